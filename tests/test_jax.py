"""`hetcoll.jax` on three ranks with JAX's CPU device, and the handler's declarations against XLA's header."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed import import_jax
from ranks import Ranks

import hetcoll

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX") or shutil.which("c++") or ""
pytestmark = pytest.mark.timeout(300)  # the first test starts the ranks, which load JAX
_ENV = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}


def load(_comm: hetcoll.Communicator) -> None:
    """On a rank: import what takes long."""
    importlib.import_module("jax_cases")


def run_case(comm: hetcoll.Communicator, name: str, *args: Any) -> Any:
    """On a rank: a function of jax_cases.py, which needs JAX."""
    return getattr(importlib.import_module("jax_cases"), name)(comm, *args)


@pytest.fixture(scope="module")
def _running() -> Iterator[list[Ranks]]:
    running: list[Ranks] = []
    yield running
    for ranks in running:
        (ranks.kill_all if ranks.broken else ranks.close)()


@pytest.fixture
def jax_ranks(_running: list[Ranks]) -> Ranks:
    """Three ranks that have JAX loaded."""
    import_jax()
    if _running and _running[-1].broken:
        _running.pop().kill_all()
    if not _running:
        _running.append(Ranks(3, _ENV, tidy=False))
        _running[-1].run(load, timeout=200)
    return _running[-1]


@pytest.mark.parametrize(
    "case",
    [
        "under_jit", "without_jit", "reductions_and_types", "gradients", "gradients_without_jit", "messages", "vmapped",
        "control_flow", "order", "in_place", "layouts", "refusals", "peer_left", "aborted", "forgotten",
        "data_parallel",
    ],
)  # fmt: skip
def test_on_three_ranks(jax_ranks: Ranks, case: str) -> None:
    jax_ranks.run(run_case, case, timeout=90)


def test_on_two_ranks(jax_ranks: Ranks) -> None:
    jax_ranks.run(run_case, "pair", ["under_jit", "data_parallel", "in_place"], timeout=90)


def test_a_mismatch_names_the_lines_that_were_traced(jax_ranks: Ranks) -> None:
    lines = (HERE / "jax_cases.py").read_text().splitlines()
    for text in jax_ranks.run(run_case, "mismatch", timeout=90):
        told = {lines[int(n) - 1].strip() for n in re.findall(r"jax_cases\.py:(\d+)", text)}
        assert told == {
            "jax.jit(lambda x: hj.allreduce(x, comm=sub)),",
            'jax.jit(lambda x: hj.allreduce(x, "max", comm=sub)),',
        }, text


def compile_check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [COMPILER, "-std=c++20", "-fsyntax-only", *flags, "-I", str(HERE.parent / "native")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")
def test_structs_are_as_in_the_header(tmp_path: Path) -> None:
    xla, check = f"-I{import_jax().ffi.include_dir()}", str(HERE / "xla_abi_check.cc")
    result = compile_check(xla, check)
    assert result.returncode == 0, result.stderr
    # The same with a field gone must not pass.
    wrong = tmp_path / "python" / "xla_abi.h"
    wrong.parent.mkdir()
    text = (HERE.parent / "native" / "python" / "xla_abi.h").read_text()
    wrong.write_text(text.replace("  const void* internal_api;\n", ""))
    refused = compile_check("-I", str(tmp_path), xla, check)
    assert "static assertion failed" in refused.stderr, refused.stderr

"""`hetcoll.jax` on three ranks with JAX's CPU device, and the handler's declarations against XLA's header."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from installed import need_jax, why_no_jax_gpus
from patience import DEADLINE
from ranks import Ranks, kept

import hetcoll

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or ""
pytestmark = pytest.mark.timeout(300)  # the first test starts the ranks, which load JAX
_ENV = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0",
    "OMP_NUM_THREADS": "1",
}


def load(_comm: hetcoll.Communicator) -> None:
    """On a rank: import what takes long."""
    importlib.import_module("jax_cases")


def run_case(comm: hetcoll.Communicator, name: str, *args: Any) -> Any:
    """On a rank: a function of jax_cases.py, which needs JAX."""
    return getattr(importlib.import_module("jax_cases"), name)(comm, *args)


@pytest.fixture(scope="module")
def _three() -> Iterator[Callable[[], Ranks]]:
    def start() -> Ranks:
        ranks = Ranks(3, _ENV, tidy=False)
        ranks.run(load, timeout=200)
        return ranks

    with kept(start) as get:
        yield get


@pytest.fixture
def jax_ranks(_three: Callable[[], Ranks]) -> Ranks:
    """Three ranks that have JAX loaded."""
    need_jax()
    return _three()


CASES = [
    "under_jit", "without_jit", "reductions_and_types", "gradients", "gradients_without_jit", "messages", "vmapped",
    "control_flow", "order", "in_place", "layouts", "refusals", "forgotten", "data_parallel",
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, "peer_left", "aborted", "interrupted"])
def test_on_three_ranks(jax_ranks: Ranks, case: str) -> None:
    jax_ranks.run(run_case, case, timeout=120)


def test_on_two_ranks(jax_ranks: Ranks) -> None:
    jax_ranks.run(run_case, "pair", ["under_jit", "data_parallel", "in_place"], timeout=120)


def test_a_mismatch_names_the_lines_that_were_traced(jax_ranks: Ranks) -> None:
    lines = (HERE / "jax_cases.py").read_text().splitlines()
    for text in jax_ranks.run(run_case, "mismatch", timeout=120):
        told = {lines[int(n) - 1].strip() for n in re.findall(r"jax_cases\.py:(\d+)", text)}
        assert told == {
            "jax.jit(lambda x: hj.allreduce(x, comm=sub)),",
            'jax.jit(lambda x: hj.allreduce(x, "max", comm=sub)),',
        }, text


@pytest.mark.cuda
@pytest.mark.parametrize("islands", ["0,1", "0|1"], ids=["nccl", "two islands"])
def test_on_gpus(islands: str) -> None:
    need_jax()
    if why := why_no_jax_gpus():
        pytest.skip(why)
    env = _ENV | {
        "JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ("0", "1"), "HETCOLL_ISLANDS": islands,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }  # fmt: skip
    with Ranks(2, env, tidy=False) as ranks:
        ranks.run(load, timeout=200)
        for case in CASES:
            ranks.run(run_case, case, timeout=120)


def compile_check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [COMPILER, "-std=c++20", "-fsyntax-only", *flags, "-I", str(ROOT / "native"), "-I", str(ROOT / "tests")]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)


@pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")
def test_structs_are_as_in_the_header(tmp_path: Path) -> None:
    need_jax()
    found = importlib.util.find_spec("jaxlib")
    assert found
    assert found.submodule_search_locations
    xla, check = f"-I{found.submodule_search_locations[0]}/include", str(HERE / "xla_abi_check.cc")
    result = compile_check(xla, check)
    assert result.returncode == 0, result.stderr
    # The same with a field gone must not pass.
    wrong = tmp_path / "python" / "xla_abi.h"
    wrong.parent.mkdir()
    text = (ROOT / "native" / "python" / "xla_abi.h").read_text()
    wrong.write_text(text.replace("  const void* internal_api;\n", ""))
    refused = compile_check("-I", str(tmp_path), xla, check)
    assert "static assertion failed" in refused.stderr, refused.stderr

"""`hetcoll selftest`: which jobs it starts, what it says of them, and that it sees what is wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from patience import PATIENCE

from hetcoll.cli import main, selftest
from hetcoll.cli.cases import Case
from hetcoll.cli.selftest import Part
from hetcoll.cli.terminal import Screen
from hetcoll.types import DType, ReduceOp


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where kernels are compiled to, once for all jobs here."""
    return {"HETCOLL_CACHE": str(tmp_path_factory.mktemp("cache") / "kernels")}


def run(tmp_path: Path, **env: str) -> tuple[int, str, str]:
    """The exit status, what is printed, and the report."""
    report = tmp_path / "report.txt"
    command = [sys.executable, "-m", "hetcoll", "selftest", "--quick", "-o", str(report)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=PATIENCE * 200, check=False
    )
    return done.returncode, done.stdout, report.read_text() if report.exists() else done.stderr


@pytest.mark.parametrize("path", ["/nowhere/x", "/"])
def test_a_report_that_cannot_be_written_is_refused_first(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--quick", "-o", path]) == 1
    captured = capsys.readouterr()
    wanted = f"-o: wanted a file in a folder that is there, got {path!r}"
    assert captured.err == f"hetcoll selftest: ArgumentError: {wanted}\n"
    assert captured.out == ""


def test_jobs_for_the_gpus_that_are_there() -> None:
    assert selftest.parts({"cuda": 0, "hip": 0}, 3) == [Part("CPUs", ("cpu",) * 3)]
    assert selftest.parts({"cuda": 0, "hip": 1}, 2)[1:] == [Part("GPUs and a CPU", ("hip:0", "cpu"))]
    both = selftest.parts({"cuda": 2, "hip": 1}, 2)
    assert [(part.devices, part.islands) for part in both[1:]] == [
        (("cuda:0", "cuda:1"), ""),
        (("cuda:0", "cuda:1"), "0|1"),
        (("cuda:0", "cuda:1", "hip:0"), ""),
        (("cuda:0", "cuda:1", "hip:0", "cpu"), ""),
    ]


def test_every_operation_type_and_reduction_is_listed() -> None:
    listed = list(selftest.listed(2, quick=False, narrow=True))
    assert {op for op, *_ in listed} == set(selftest.OPS)
    assert {dtype for _, dtype, *_ in listed} == set(DType)
    assert {redop for _, _, redop, *_ in listed} == {None, *ReduceOp}
    assert not any("float8" in dtype.label for _, dtype, *_ in selftest.listed(2, quick=False, narrow=False))


class Forgetful:
    """A communicator of one rank whose all-reduce leaves the last element out."""

    rank, size = 0, 1

    def allreduce(self, send: Any, recv: Any, op: str) -> None:
        recv[:-1] = send[:-1]


def test_a_wrong_element_is_counted() -> None:
    case = Case(Forgetful(), "allreduce", 9, DType.INT32, ReduceOp.SUM, 0, False)
    assert selftest.wrong_elements(case) == 2  # one a call
    assert np.dtype(np.int32).itemsize * 9 == case.nbytes


def test_cpus_alone(tmp_path: Path) -> None:
    status, said, report = run(tmp_path, HETCOLL_SECRET="do not tell", HETCOLL_SPIN_US="7", CUDA_VISIBLE_DEVICES="")
    assert status == 0, report
    assert "ok     CPUs: cpu, cpu" in said
    assert "everything is right" in report
    assert "HETCOLL_SPIN_US=7" in report
    assert "do not tell" not in report
    assert "all-reduce of     65536 bytes" in report


@pytest.mark.fakes
@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_a_gpu_and_what_is_wrong_with_it(tmp_path: Path, cache: dict[str, str]) -> None:
    gpu = fakes.environment("cuda", timeout=60)
    status, said, report = run(tmp_path, **gpu, **cache)
    assert status == 0, report
    assert "ok     GPUs and a CPU: cuda:0, cpu" in said
    assert "from the GPU to rank 1, a CPU" in report
    failing = fakes.environment("cuda", timeout=60, fail="cuMemcpyAsync:150+:719")
    status, said, report = run(tmp_path, **failing, **cache)
    assert status == 1
    assert "FAILED GPUs and a CPU: cuda:0, cpu" in said
    assert "cuMemcpyAsync" in report
    assert report.endswith("something is wrong\n")


@pytest.mark.fakes
@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_gpus_of_both_vendors(tmp_path: Path, cache: dict[str, str]) -> None:
    """Each rank sees both, and uses the one that it is told to."""
    both = fakes.environment("both", timeout=60)
    status, said, report = run(tmp_path, **both, **cache)
    assert status == 0, report
    for job in ("GPUs of both vendors: cuda:0, hip:0", "GPUs and a CPU: cuda:0, hip:0, cpu"):
        assert any(line.startswith("ok ") and job in line for line in said.splitlines()), said
    assert "8-bit floats: rank 1 fnuz, rank 0 not" in report


@pytest.mark.fakes
@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_amds_gpus(tmp_path: Path, cache: dict[str, str]) -> None:
    """What somebody with such a machine is asked to run."""
    amd = fakes.environment("hip", devices=2, timeout=60)
    status, said, report = run(tmp_path, **amd, **cache)
    assert status == 0, report
    for job in (
        "the vendor's library: hip:0, hip:1",
        "each GPU on its own: hip:0, hip:1",
        "GPUs and a CPU: hip:0, hip:1",
    ):
        assert any(line.startswith("ok ") and job in line for line in said.splitlines()), said
    assert "by RCCL" in report
    assert "gfx942" in report


def test_a_terminal_sees_how_far_it_is(tmp_path: Path) -> None:
    """Its ranks' pipes hold progress messages, and what else they say."""
    out, terminal = io.BytesIO(), io.BytesIO()
    said = "\0[1/2] allreduce float32\na warning\n\0[2/2] send float32\n"
    code = f"import sys; sys.stderr.write({said!r}); sys.exit(3)"
    status, said = selftest._listen([sys.executable, "-c", code], os.environ, "CPUs", Screen(out, terminal))
    assert (status, said) == (3, "a warning\n")
    shown = terminal.getvalue().decode()
    assert shown.index("CPUs [1/2] allreduce float32") < shown.index("CPUs [2/2] send float32")


def test_a_part_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "PART_SECONDS", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        selftest._listen([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, "CPUs", None)

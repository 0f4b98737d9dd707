"""`hetcoll doctor`: each check on a made-up machine, and the command itself on this one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from patience import DEADLINE

from hetcoll.cli import doctor
from hetcoll.links.verbs.library import UnavailableError
from hetcoll.tools.checks import CHECKS, Finding, Level, machine, rdma, run_checks


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A kernel with an RDMA device and the module that leads to it."""
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "module/ib_uverbs").mkdir(parents=True)
    return tmp_path


def one(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    assert bool(finding.advice) == (finding.level is not Level.FINE)
    return finding


def test_a_kernel_without_rdma_is_no_problem(tmp_path: Path) -> None:
    assert one(rdma.devices(tmp_path)).level is Level.NOTE
    for check in (rdma.modules, rdma.ports, rdma.gpu_memory):
        assert list(check(tmp_path)) == []


def test_devices_are_named(sysfs: Path) -> None:
    (sysfs / "class/infiniband/irdma0").mkdir()
    assert one(rdma.devices(sysfs)) == Finding("RDMA devices", Level.FINE, "irdma0, mlx5_0")


def test_the_way_to_a_device(sysfs: Path, tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    missing = one(rdma.modules(sysfs, dev))
    assert (missing.level, missing.advice) == (Level.PROBLEM, f"in a container: --device={dev}")
    dev.mkdir()
    (dev / "uverbs0").write_text("")
    assert one(rdma.modules(sysfs, dev)).level is Level.FINE
    (sysfs / "module/ib_uverbs").rmdir()
    assert one(rdma.modules(sysfs, dev)).advice == "modprobe ib_uverbs"


def test_a_device_file_that_is_shut(sysfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/uverbs0").write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may open everything
    finding = one(rdma.modules(sysfs, tmp_path / "dev"))
    assert finding.level is Level.PROBLEM
    assert "permission denied" in finding.text


def test_a_missing_library_is_a_problem_only_where_there_is_a_device(
    sysfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise UnavailableError("pyverbs is not installed: apt install it")

    monkeypatch.setattr(rdma, "load", refuse)
    for folder, level in ((sysfs, Level.PROBLEM), (tmp_path / "elsewhere", Level.NOTE)):
        finding = list(rdma.libraries(folder))[1]
        assert finding == Finding("pyverbs", level, "pyverbs is not installed", "apt install it")


@pytest.mark.parametrize(
    ("soft", "privileged", "level"),
    [
        (resource.RLIM_INFINITY, False, Level.FINE),
        (64 << 10, True, Level.FINE),
        (64 << 10, False, Level.PROBLEM),
        (8 << 30, False, Level.FINE),
    ],
)
def test_locked_memory(sysfs: Path, monkeypatch: pytest.MonkeyPatch, soft: int, privileged: bool, level: Level) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    monkeypatch.setattr(rdma, "_may_lock", lambda: privileged)
    assert one(rdma.locked_memory(sysfs)).level is level


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(machine.shared_memory(tmp_path / "none")).advice == f"mount a tmpfs at {tmp_path / 'none'}"
    told = os.statvfs(tmp_path)
    monkeypatch.setattr(machine, "_LEAST", told.f_bavail * told.f_frsize + (1 << 50))
    assert one(machine.shared_memory(tmp_path)).level is Level.NOTE
    monkeypatch.setattr(machine, "_LEAST", 0)
    assert one(machine.shared_memory(tmp_path)).level is Level.FINE


def test_a_new_check_is_one_line() -> None:
    def gpu() -> list[Finding]:
        return [Finding("GPU", Level.PROBLEM, "the driver is too old", "install a newer one")]

    assert run_checks([gpu]) == gpu()
    assert "problem  GPU  the driver is too old\n              to do: install a newer one" in doctor.text(gpu())
    assert doctor.document(gpu())["problems"] == 1


def test_the_checks_of_this_machine_end_and_say_what_to_do() -> None:
    for check in CHECKS:
        for finding in check():
            assert finding.text
            assert finding.advice or finding.level is Level.FINE or finding.text.startswith("unknown")


def test_the_command() -> None:
    words = [sys.executable, "-m", "hetcoll", "doctor"]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=DEADLINE)
    told = json.loads(done.stdout)
    assert told["schema"] == 1
    assert done.returncode == (told["problems"] > 0)
    text = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE).stdout
    for finding in told["findings"]:
        assert any(line.startswith(f"{finding['level']:<8} {finding['about']}") for line in text.splitlines()), finding

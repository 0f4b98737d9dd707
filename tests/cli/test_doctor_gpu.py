"""`hetcoll doctor` on GPUs: made-up machines, and fakes for the drivers, some of them broken."""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import fakes
import pytest
from patience import DEADLINE

from hetcoll.tools.checks import Finding, Level, gpu
from hetcoll.vendors.devices import cuda, hip


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two H200s, one MI300X, and a network card."""
    for i, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030200"), ("0x1002", "0x120000"), ("0x15b3", "0x020700")]
    ):
        device = tmp_path / f"sys/bus/pci/devices/0000:{i:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    return tmp_path / "sys"


def one(sysfs: Path, dev: Path, vendor: str = "cuda") -> Finding:
    (finding,) = {"cuda": gpu.nvidia, "hip": gpu.amd}[vendor](sysfs, dev)
    assert finding.advice
    return finding


def test_a_machine_without_gpus_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "why_not", lambda: "the driver is missing")
    finding = one(tmp_path, tmp_path)
    assert finding.level is Level.NOTE
    assert "the driver is missing" in finding.text


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("cuda-python is not installed (No module named 'cuda')", "pip install 'hetcoll[cuda]'"),
        ("NVIDIA's driver cannot be used: cuInit: CUDA_ERROR_SYSTEM_NOT_READY", "start nvidia-fabricmanager"),
        ("NVIDIA's driver sees no GPU (CUDA_VISIBLE_DEVICES may hide it)", "correct CUDA_VISIBLE_DEVICES"),
        ("NVIDIA's driver is not installed, or too old", "in a container: --gpus all"),
    ],
)
def test_hardware_that_cannot_be_used(
    sysfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, advice: str
) -> None:
    monkeypatch.setattr(cuda, "why_not", lambda: reason)
    finding = one(sysfs, tmp_path)
    assert finding.level is Level.PROBLEM
    assert finding.text == f"2 on this machine's PCI buses, but {reason}"
    assert advice in finding.advice


def test_amds_device_file(sysfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "why_not", lambda: "hip-python is not installed (No module named 'hip')")
    assert one(sysfs, tmp_path, "hip").advice == "pip install 'hetcoll[rocm]'"
    monkeypatch.setattr(hip, "why_not", lambda: "AMD's runtime cannot be used")
    assert "--device=/dev/kfd" in one(sysfs, tmp_path, "hip").advice
    (tmp_path / "kfd").write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may open everything
    assert "join its group" in one(sysfs, tmp_path, "hip").advice


def test_kernel_options(sysfs: Path, tmp_path: Path) -> None:
    def look() -> list[Finding]:
        return list(gpu.kernel_options(sysfs, tmp_path, tmp_path))

    assert look() == []  # no RDMA
    (sysfs / "class/infiniband").mkdir(parents=True)
    assert [f.level for f in look()] == [Level.NOTE]
    (tmp_path / f"config-{platform.release()}").write_text("CONFIG_DMABUF_MOVE_NOTIFY=y\nCONFIG_PCI_P2PDMA=y\n")
    assert [f.level for f in look()] == [Level.FINE]
    (tmp_path / "config.gz").write_bytes(
        gzip.compress(b"# CONFIG_DMABUF_MOVE_NOTIFY is not set\nCONFIG_PCI_P2PDMA=y\n")
    )
    (finding,) = look()
    assert "without CONFIG_DMABUF_MOVE_NOTIFY:" in finding.text


def doctor(tmp_path: Path, **settings: object) -> dict[str, Finding]:
    """What it says about a machine with fake GPUs."""
    env = {**os.environ, **fakes.environment("cuda", **settings), "HETCOLL_CACHE": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "hetcoll", "doctor", "--json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE)
    told = json.loads(done.stdout)
    assert done.returncode == (told["problems"] > 0)
    found = {each["about"]: Finding(**{**each, "level": Level(each["level"])}) for each in told["findings"]}
    assert all(each.advice for each in found.values() if each.level is not Level.FINE)
    return {about: each for about, each in found.items() if about.startswith("cuda:")}


@pytest.mark.fakes
def test_gpus_that_do_all_that_is_needed(tmp_path: Path) -> None:
    found = doctor(tmp_path, devices=2)
    parts = ("", " kernels", " pinned memory", " mapped memory", " signals", " dma-buf")
    assert set(found) == {f"cuda:{i}{part}" for i in (0, 1) for part in parts}
    assert {each.level for each in found.values()} == {Level.FINE}, found
    assert "sm_90" in found["cuda:1"].text


@pytest.mark.fakes
def test_gpus_that_lack_something(tmp_path: Path) -> None:
    found = doctor(tmp_path, stream_waits=0, dmabuf=0, fail="cuMemHostRegister:1+:2")
    assert found["cuda:0"].level is Level.FINE
    assert found["cuda:0 signals"].level is Level.NOTE
    assert found["cuda:0 dma-buf"].level is Level.NOTE
    assert found["cuda:0 mapped memory"].level is Level.PROBLEM
    assert "CUDA_ERROR_OUT_OF_MEMORY" in found["cuda:0 mapped memory"].text


@pytest.mark.fakes
def test_a_gpu_that_runs_nothing(tmp_path: Path) -> None:
    found = doctor(tmp_path, fail="cuLaunchKernel:1+:719")
    assert "CUDA_ERROR_LAUNCH_FAILED" in found["cuda:0 kernels"].text
    assert found["cuda:0 kernels"].level is Level.PROBLEM


@pytest.mark.fakes
def test_a_driver_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.require("cuda")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (finding,) = gpu._probe("cuda", 0)
    assert finding.level is Level.PROBLEM
    assert "status 1" in finding.text

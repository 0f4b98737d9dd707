"""GPUs: the hardware, the drivers, their Python packages, and what each device can do."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .finding import Finding, Level

_SYSFS = Path("/sys")
_DEV = Path("/dev")
_CLASSES = ("0x03", "0x12")  # PCI: display controllers, processing accelerators
_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class _Vendor:
    about: str
    module: str  # in hetcoll.vendors.devices
    pci: str
    node: str  # in /dev: what a container must have been given
    driver: str
    container: str


_NVIDIA = _Vendor("NVIDIA GPUs", "cuda", "0x10de", "nvidiactl", "NVIDIA's driver", "--gpus all")
_AMD = _Vendor("AMD GPUs", "hip", "0x1002", "kfd", "the amdgpu driver", "--device=/dev/kfd --device=/dev/dri")

# What is to be done about an error of the driver's start, by the driver's word for it.
_ADVICE = {
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, which joins the GPUs of machines with NVSwitch",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the libraries are newer than the kernel's module: load it anew, or reboot",
    "CUDA_ERROR_NO_DEVICE": "correct CUDA_VISIBLE_DEVICES; in a container: --gpus all",
    "hipErrorNoDevice": "correct HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES; join the groups render and video",
    "sees no GPU": "correct CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES",
    "wanted one libamdhip64": "set ROCM_PATH to where the framework's own libamdhip64.so lies, less its lib",
    "-python is not installed": "pip install 'hetcoll[{module}]'",
}


def nvidia(sysfs: Path = _SYSFS, dev: Path = _DEV) -> Iterator[Finding]:
    """NVIDIA's GPUs, each by a process of its own."""
    return _gpus(_NVIDIA, sysfs, dev)


def amd(sysfs: Path = _SYSFS, dev: Path = _DEV) -> Iterator[Finding]:
    """AMD's GPUs, each by a process of its own."""
    return _gpus(_AMD, sysfs, dev)


def _gpus(vendor: _Vendor, sysfs: Path, dev: Path) -> Iterator[Finding]:
    module = importlib.import_module(f"hetcoll.vendors.devices.{vendor.module}")
    reason = module.why_not()
    found = _hardware(vendor, sysfs)
    if reason is None:
        with ThreadPoolExecutor(8) as pool:
            for findings in pool.map(lambda each: _probe(vendor.module, each.index), module.devices()):
                yield from findings
    elif not found:
        yield Finding(
            vendor.about, Level.NOTE, f"none on this machine's PCI buses ({reason})", "nothing, if none is meant"
        )
    else:
        text = f"{found} on this machine's PCI buses, but {reason}"
        yield Finding(vendor.about, Level.PROBLEM, text, _what_to_do(vendor, reason, dev))


def _hardware(vendor: _Vendor, sysfs: Path) -> int:
    """How many the PCI buses have."""
    count = 0
    for device in (sysfs / "bus/pci/devices").glob("*"):
        try:
            made_by, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        count += made_by == vendor.pci and kind.startswith(_CLASSES)
    return count


def _what_to_do(vendor: _Vendor, reason: str, dev: Path) -> str:
    for words, advice in _ADVICE.items():
        if words in reason:
            return advice.format(module={"cuda": "cuda", "hip": "rocm"}[vendor.module])
    node = dev / vendor.node
    if not node.exists():
        return f"there is no {node}: load {vendor.driver}; in a container: {vendor.container}"
    if not os.access(node, os.R_OK | os.W_OK):
        return f"{node} cannot be opened: join its group (render, video)"
    return f"install the libraries that belong to {vendor.driver}"


def _probe(module: str, index: int) -> list[Finding]:
    about = f"{module}:{index}"
    words = [sys.executable, "-m", "hetcoll.tools.checks.probe", module, str(index)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"no answer in {_SECONDS:.0f} s"
        return [Finding(about, Level.PROBLEM, text, "look at dmesg and for processes that hold the GPU; reset it")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        text = f"its process ended with status {done.returncode}: {last}"
        return [Finding(about, Level.PROBLEM, text, f"run {' '.join(words[1:])} with Python, and report what it says")]
    told = json.loads(done.stdout)
    return [Finding(each["about"], Level(each["level"]), each["text"], each["advice"]) for each in told]


def kernel_options(sysfs: Path = _SYSFS, proc: Path = Path("/proc"), boot: Path = Path("/boot")) -> Iterator[Finding]:
    """What RDMA from AMD's GPU memory needs to have been built into the kernel."""
    if not _hardware(_AMD, sysfs) or not (sysfs / "class/infiniband").is_dir():
        return
    text = _kernel_config(proc, boot)
    if text is None:
        yield Finding(
            "kernel options", Level.NOTE, "unknown: no /proc/config.gz, no file in /boot", "CONFIG_IKCONFIG_PROC"
        )
        return
    missing = [name for name in ("CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_PCI_P2PDMA") if f"{name}=y" not in text]
    if missing:
        said = f"built without {', '.join(missing)}: network cards cannot reach AMD's GPU memory by dma-buf"
        yield Finding(
            "kernel options", Level.NOTE, said, "a kernel with them, or AMD's own driver package (amdgpu-dkms)"
        )
    else:
        yield Finding("kernel options", Level.FINE, "CONFIG_DMABUF_MOVE_NOTIFY, CONFIG_PCI_P2PDMA")


def _kernel_config(proc: Path, boot: Path) -> str | None:
    try:
        return gzip.decompress((proc / "config.gz").read_bytes()).decode()
    except OSError:
        pass
    try:
        return (boot / f"config-{platform.release()}").read_text()
    except OSError:
        return None

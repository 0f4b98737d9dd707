"""The GPU kernels through the vendors' compilers, none of which needs a GPU: NVRTC, hipRTC, and Clang for AMD's GPUs.

What they make cannot run here: test_device_kernels.py runs the same source compiled for a host, test_cuda.py on a GPU.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from patience import PATIENCE
from thorough import HOUSE, parametrize

from hetcoll.errors import DeviceError
from hetcoll.vendors.devices import cuda
from hetcoll.vendors.devices.kernels import modules, source

pytestmark = HOUSE

SECONDS = 600  # a compiler has what a test has: a dozen seconds of a processor, which others may want, too
# Clang by its version: 17 knows gfx942. The options are hipRTC's, without the headers and libraries of ROCm.
CLANGS = ("clang", "clang-21", "clang-20", "clang-19", "clang-18", "clang-17")
FLAGS = "-x hip -std=c++17 -O3 -ffp-contract=off --cuda-device-only -nogpuinc -nogpulib -Wall -Wextra -Werror"
AMD = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}  # and the width of their wavefronts
# Each kind of module, and of number. The others differ from them in a type.
SOME = ("signals", "float8", "float8_e4m3fn", "exchange_float8_e5m2fnuz_sum", "bfloat16", "float16_codecs", "float32",
        "int64", "complex64", "exchange_bool_max", "float32_checks", "int64_checks")  # fmt: skip
FEW = ("signals", "exchange_float8_e5m2fnuz_sum", "bfloat16")
PARTS = 8  # of the others for an architecture: they take minutes of a processor
NVIDIA = ("sm_80", "sm_90")
DEBIAN_HIP = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so.5")


def each_for(archs: Sequence[str]) -> pytest.MarkDecorator:
    """Few modules for one architecture, each kind for every one, the other modules, some at a time, for one each."""
    others, parts = [module for module in modules() if module not in SOME], PARTS * len(archs)
    rows = [(f"{archs[0]}-few", archs[0], FEW), *((f"{arch}-kinds", arch, SOME) for arch in archs)]
    for part in range(parts):
        arch = archs[part % len(archs)]
        rows.append((f"{arch}-others-{part // len(archs)}", arch, tuple(others[part::parts])))
    names, *_ = zip(*rows, strict=True)
    return parametrize(("arch", "wanted"), [row[1:] for row in rows], first=1, ids=names)


def for_all(wanted: Sequence[str], compile_one: Callable[[str], object]) -> None:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, wanted))


@functools.cache
def nvrtc(arch: str) -> cuda.Nvrtc:
    try:
        return cuda.Nvrtc(arch)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@each_for(NVIDIA)
def test_nvrtc_compiles_kernels(arch: str, wanted: Sequence[str]) -> None:
    compiler = nvrtc(arch)

    def compile_one(module: str) -> None:
        image = compiler.compile(module, source(module))
        assert image.startswith(b"\x7fELF")
        for name in modules()[module]:
            assert f".text.{name}\0".encode() in image, f"{name} is not among the kernels"

    for_all(wanted, compile_one)


def test_nvrtc_makes_ptx_for_a_gpu_that_it_does_not_know() -> None:
    """The driver translates it for the GPU."""
    text = nvrtc("sm_999").compile("signals", source("signals")).decode()
    assert re.search(r"\.target sm_\d+", text)
    for name in modules()["signals"]:
        assert f".entry {name}(" in text


def test_kernels_are_vectorised_and_signals_ordered() -> None:
    """What the speed and the memory model rest on is in the code: 16-byte accesses, single 8-byte words, and order."""
    compiler = nvrtc("sm_999")
    reduction = compiler.compile("float32", source("float32")).decode()
    assert "ld.global.v4." in reduction
    assert "st.global.v4." in reduction
    assert re.search(r"st\.volatile\.global\.[bu]64", reduction)
    assert re.search(r"ld\.volatile\.global\.[bu]64", reduction)
    assert not re.search(r"\bfma\.", reduction)
    signals = compiler.compile("signals", source("signals")).decode()
    assert "st.release.sys" in signals
    assert "ld.acquire.sys" in signals


def test_an_error_in_a_source_is_the_compilers_own_words() -> None:
    with pytest.raises(DeviceError, match='identifier "nothing" is undefined'):
        nvrtc("sm_90").compile("wrong", "__global__ void f(int* x) { *x = nothing; }")


@functools.cache
def clang() -> str:
    for name in CLANGS:
        if shutil.which(name):
            version = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=PATIENCE * 20).stdout
            found = re.search(r"version (\d+)", version)
            if found and int(found[1]) >= 17:
                return name
    pytest.skip("there is no Clang 17 or later, which knows AMD's gfx942 (apt install clang-19)")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@each_for(tuple(AMD))
def test_clang_compiles_kernels_for_amd(arch: str, wanted: Sequence[str], tmp_path: Path) -> None:
    def compile_one(module: str) -> None:
        to = tmp_path / f"{module}.s"
        command = [clang(), *FLAGS.split(), f"--offload-arch={arch}", "-S", "-", "-o", str(to)]
        done = subprocess.run(command, input=source(module), capture_output=True, text=True, timeout=PATIENCE * SECONDS)
        assert done.returncode == 0, done.stderr
        text = to.read_text()
        for name in modules()[module]:
            assert f".amdhsa_kernel {name}\n" in text, f"{name} is not among the kernels"
        assert set(re.findall(r"\.wavefront_size: *(\d+)", text)) == {str(AMD[arch])}
        assert set(re.findall(r"\.vgpr_spill_count: *(\d+)", text)) == {"0"}, "registers were spilled"

    clang()
    for_all(wanted, compile_one)


HIPRTC = """
from hetcoll.vendors.devices import hip
from hetcoll.vendors.devices.kernels import modules, source
from hetcoll.errors import DeviceError

for arch in ("gfx90a:sramecc+:xnack-", "gfx1030"):
    compiler = hip.Hiprtc(arch)
    for module in ("signals", "bfloat16", "uint8") if arch == "gfx1030" else ("float32", "int64_checks"):
        image = compiler.compile(module, source(module))
        assert image.startswith(b"\\x7fELF"), image[:20]
        for name in modules()[module]:
            assert f"{name}.kd\\0".encode() in image, name
try:
    compiler.compile("wrong", '__global__ void f(int* x) { *x = nothing; }')
except DeviceError as error:
    assert "undeclared identifier 'nothing'" in str(error), error
else:
    raise AssertionError("an error in a source went unseen")
print("compiled by", compiler.key)
"""


@pytest.mark.thorough
def test_hiprtc_compiles_kernels(tmp_path: Path) -> None:
    """The real hip-python calls the real hipRTC: Debian's, of ROCm 5.2, is old and small and needs no GPU."""
    pytest.importorskip("rocm.bindings.hiprtc", reason="hip-python is not installed")
    if not DEBIAN_HIP.exists():
        pytest.skip(f"there is no {DEBIAN_HIP} (apt install libamdhip64-5)")
    (tmp_path / "lib").mkdir()
    for name in ("libamdhip64.so", "libhiprtc.so"):  # hipRTC was a part of the runtime then
        (tmp_path / "lib" / name).symlink_to(DEBIAN_HIP)
    env = {**os.environ, "ROCM_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", HIPRTC], env=env, capture_output=True, text=True, timeout=PATIENCE * SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled by hiprtc" in done.stdout

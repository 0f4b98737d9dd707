"""Fakes for the vendors' drivers: shared libraries that the real cuda-python and hip-python call in their place.

`build` makes them from the sources beside this file, with the machine's C++ compiler, into a directory that later
sessions find again. It calls the compiler itself, since `make test` on a fresh machine has no CMake outside the
package's own build, and what CMake would take over are two commands (`_compile_into`). `environment` says what a
process must find in its environment to get them: devices whose memory is host memory, whose streams are threads and
whose kernels g++ compiles. Every load and store of a kernel is checked.

Settings (environment variables; ``FAKE_CUDA_<NAME>`` and ``FAKE_HIP_<NAME>`` go before ``FAKE_<NAME>``):

DEVICES         how many there are (1); CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES choose among them
MEMORY          bytes of each (2 GiB)
ARCH            ``sm_90``, ``gfx942``
PEER            0: no device reaches another's memory
STREAM_WAITS    0: no wait-value and write-value
DMABUF          0: memory is not exported as a file descriptor
LARGE_BAR       0: HIP says that the host does not reach device memory
STRICT          1: what may wait for the device to be idle does: allocation, registration of memory, loading of code
TIMEOUT         seconds that a stream waits for one thing (60); then the device fails and stderr says what for
JITTER          ``SEED[:MICROSECONDS]``: operations begin late, every queue at its own random pace, and copies move
                their last bytes first
FAIL            ``NAME:N:CODE,...``: the N-th call of NAME (``3+``: and later ones) returns CODE; CODE ``late719``: it
                succeeds and what it enqueued fails
LOG             a file that gets one line a call: process, thread, name

Devices that pose (``posing/``) are CUDA's, fakes or real ones, behind a libamdhip64 that calls the CUDA driver.

Streams share CUDA_DEVICE_MAX_CONNECTIONS (8) or GPU_MAX_HW_QUEUES (4) hardware queues, round robin: what waits in one
stream holds up whatever shares its queue. HIP has so many for each priority, as ROCclr does. With
GPU_STREAMOPS_CP_WAIT=1 a HIP stream waits for signal memory alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++20",
    "-ftls-model=initial-exec",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
# Kernels' loads and stores are looked at by the runtime. The rest compiles in two thirds of the time as it is.
_LEVELS = {"runtime": "-O2"}
# Each library: its path, the folders it is made of, further files, and the map of what it exports. What a folder has
# beside such files is compiled as one: that takes 28 seconds of a processor instead of 44, most of them for headers.
_LIBRARIES = (
    ("lib/libcuda.so.1", ("runtime", "cuda"), ("cuda/vendor",), "cuda/libcuda.map"),
    ("lib/libnvrtc.so.13", (), ("compiler/compile", "compiler/nvrtc"), None),
    ("lib/libnccl.so.2", ("runtime", "nccl"), ("cuda/vendor",), None),
    ("lib/libamdhip64.so", ("runtime", "hip"), ("hip/vendor", "hip/status"), "hip/libamdhip64.map"),
    ("lib/libhiprtc.so", (), ("compiler/compile", "compiler/hiprtc"), None),
    ("lib/librccl.so", ("runtime", "nccl"), ("hip/vendor",), None),
    ("posing/lib/libamdhip64.so", (), ("posing/devices", "posing/work", "hip/status"), "hip/libamdhip64.map"),
    ("posing/lib/libhiprtc.so", (), ("posing/hiprtc",), None),
)
_CUDA = ("lib/libcuda.so.1", "lib/libnvrtc.so.13", "lib/libnccl.so.2")
_POSING = ("posing/lib/libamdhip64.so", "posing/lib/libhiprtc.so")
_HIP = ("lib/libamdhip64.so", "lib/libhiprtc.so", "lib/librccl.so")
_PRELOAD = {None: (), "cuda": _CUDA, "hip": _HIP, "both": (*_CUDA, *_HIP), "posing": (*_CUDA, *_POSING)}
_PACKAGES = {
    None: (),
    "cuda": ("cuda-python",),
    "hip": ("hip-python",),
    "both": ("cuda-python", "hip-python"),
    "posing": ("hip-python",),
}
_MODULES = {"cuda-python": ("cuda", "cuda.bindings"), "hip-python": ("rocm", "rocm.bindings")}
_START = {"libcuda.so.1": "cuInit", "libamdhip64.so": "hipInit"}
_HEADERS = ("runtime/hooks.h", "compiler/shim.h", "compiler/tail.h")  # what compiled kernels include


def why_not(vendor: str | None) -> str | None:
    """Why `environment` cannot give a process what it is asked for here, or None when it can."""
    if os.uname().machine != "x86_64":
        return "the fakes compile kernels for x86-64 only"
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"the fakes need a C++ compiler ({compiler})"
    for package in _PACKAGES[vendor]:
        if any(importlib.util.find_spec(module) is None for module in _MODULES[package]):
            return f"{package} is not installed"
    return None


def require(vendor: str | None) -> None:
    """Skip the test that calls this where `environment` cannot give what it is asked for (`why_not`)."""
    import pytest  # benchmarks over real libraries do without

    if reason := why_not(vendor):
        pytest.skip(reason)


@functools.cache
def build(sanitize: str = "") -> Path:
    """The directory of the libraries, made if need be (some seconds). `sanitize` is for ``-fsanitize=``, and
    gives those of CUDA alone."""
    sources = sorted(path for path in _HERE.rglob("*") if path.suffix in (".cc", ".h", ".map"))
    compiler = os.environ.get("CXX") or "g++"
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=100).stdout
    state = hashlib.sha256(version + repr((_FLAGS, _LEVELS, _LIBRARIES, sanitize)).encode())
    for path in sources:
        state.update(str(path.relative_to(_HERE)).encode() + b"\0" + path.read_bytes())
    root = Path(tempfile.gettempdir()) / f"hetcoll-fakes-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} is another user's: what lies there would run here")
    made = root / state.hexdigest()[:16]
    if not made.is_dir():
        with open(root / f"{made.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.is_dir():
                _forget_old(root)
                _compile(compiler, made, ("-g1", f"-fsanitize={sanitize}") if sanitize else ())
    os.utime(made)
    return made


def _forget_old(root: Path) -> None:
    """Remove what nobody has used for two days."""
    for path in root.iterdir():
        if path.is_dir() and path.stat().st_mtime < time.time() - 2 * 86400:
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".lock").unlink(missing_ok=True)


def _compile(compiler: str, made: Path, sanitize: tuple[str, ...]) -> None:
    """Compile and link beside `made`, which comes to be when all is done."""
    out = Path(tempfile.mkdtemp(dir=made.parent))
    try:
        _compile_into(out, compiler, sanitize)
        out.rename(made)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _compile_into(out: Path, compiler: str, sanitize: tuple[str, ...]) -> None:
    includes = [f"-I{_HERE / folder}" for folder in ("runtime", "compiler")]

    def run(*words: str) -> None:
        done = subprocess.run([compiler, *sanitize, *words], capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"{compiler} {' '.join(words)}\n{done.stderr}")

    libraries = [library for library in _LIBRARIES if not sanitize or library[0] in _CUDA]
    alone = {each for *_, more, _ in _LIBRARIES for each in more}
    wanted = sorted({each for _, *named, _ in libraries for each in itertools.chain(*named)})

    def compile_one(unit: str) -> None:
        """A folder, or a file that several libraries share."""
        sources = [_HERE / f"{unit}.cc"]
        if unit not in alone:
            sources = [path for path in sorted((_HERE / unit).glob("*.cc")) if f"{unit}/{path.stem}" not in alone]
        target = out / "objects" / f"{unit.replace('/', '-')}.o"
        target.with_suffix(".cc").write_text("".join(f'#include "{path}"\n' for path in sources))
        run(*_FLAGS, _LEVELS.get(unit, "-Og"), *includes, "-c", str(target.with_suffix(".cc")), "-o", str(target))

    (out / "objects").mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_one, sorted(wanted, key=lambda unit: unit not in _LEVELS)))  # the longest first
    for name, folders, more, exports in libraries:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        objects = [str(out / "objects" / f"{each.replace('/', '-')}.o") for each in (*folders, *more)]
        script = [f"-Wl,--version-script={_HERE / exports}"] if exports else []
        linker = ["-shared", "-pthread", f"-Wl,-soname,{Path(name).name}", "-Wl,-z,defs", *script]
        run(*linker, *objects, "-o", str(out / name))
    if not sanitize:
        (out / "posing/lib/librccl.so").symlink_to("../../lib/libnccl.so.2")
    for header in _HEADERS:
        shutil.copy(_HERE / header, out / "lib")
    shutil.rmtree(out / "objects")


def environment(vendor: str | None, devices: int = 1, **settings: object) -> dict[str, str]:
    """What a process needs to have fake devices of ``"cuda"``, ``"hip"``, ``"both"``, or none at all; with
    ``"posing"`` of CUDA, and a libamdhip64 over them (`posing`).

    `settings` are those above in lower case (``jitter="7:300"``). Give it to a new process, or put it into the
    environment of one that has imported neither vendor's package yet and call `load` there, as `ranks` does. Skips the
    test where there can be no such devices.
    """
    require(vendor)
    made = build()
    everything = ",".join(map(str, range(devices)))
    return {
        "LD_PRELOAD": ":".join(str(made / name) for name in _PRELOAD[vendor]),
        "CUDA_VISIBLE_DEVICES": everything if vendor in ("cuda", "both", "posing") else "",
        "HIP_VISIBLE_DEVICES": everything if vendor in ("hip", "both", "posing") else "",
        "ROCM_PATH": {"hip": str(made), "both": str(made), "posing": str(made / "posing")}.get(vendor or "", ""),
        "FAKE_DEVICES": str(devices),
        "HETCOLL_SPIN_US": "0",  # the devices are threads of the same processors: who spins holds them up
        **{f"FAKE_{name.upper()}": str(value) for name, value in settings.items()},
    }


def environments(vendors: Sequence[str | None], devices: int = 1, **settings: object) -> dict[str, tuple[str, ...]]:
    """`environment` for ranks of different vendors (None: a CPU), as `Ranks` takes it."""
    each = [environment(vendor, devices, **settings) for vendor in vendors]
    return {name: tuple(env[name] for env in each) for name in each[0]}


def posing() -> dict[str, str]:
    """What a process needs for real GPUs of NVIDIA's to pose as AMD's: HIP's calls are made to CUDA's driver, hipRTC is
    NVRTC, and RCCL is NCCL, as cuda-python finds them."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    nccl, nvrtc = (str(load_nvidia_dynamic_lib(name).abs_path) for name in ("nccl", "nvrtc"))
    made = build() / "posing"
    root = made / hashlib.sha256(nccl.encode()).hexdigest()[:16]
    (root / "lib").mkdir(parents=True, exist_ok=True)
    links = {"librccl.so": nccl, **{Path(name).name: str(made.parent / name) for name in _POSING}}
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):  # another process has made it
            (root / "lib" / name).symlink_to(target)
    return {"ROCM_PATH": str(root), "FAKE_NVRTC": nvrtc, "HETCOLL_DEVICE": "hip"}


def seal(address: int) -> None:
    """From now on the processor cannot touch the device memory that was allocated at `address`: who tries is killed.

    Copies of the driver's can, and RDMA devices that it is registered with. For processes with devices of one vendor.
    """
    drivers = [path for path in os.environ["LD_PRELOAD"].split(":") if Path(path).name in _START]
    (error,) = (ctypes.CDLL(path).fake_seal(ctypes.c_size_t(address)) for path in drivers)
    if error:
        raise RuntimeError(f"sealing {address:#x}: error {error}")


def load() -> None:
    """Load what the environment says, as the dynamic linker would at a program's start, and start the devices.

    A driver's threads stay until its process ends: whoever counts what is left over begins to after this.
    """
    for path in filter(None, os.environ.get("LD_PRELOAD", "").split(":")):
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        if start := _START.get(Path(path).name):
            getattr(library, start)(0)
    for name, start in _START.items():  # a real one, all of whose devices are hidden
        with contextlib.suppress(OSError):
            getattr(ctypes.CDLL(name), start)(0)

"""Devices over fakes for the vendors' drivers: the real cuda-python and hip-python, every check of theirs."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_checks
import fakes
import pytest
from device_machine import open_device
from elements import pair_id
from ranks import Job, Ranks
from thorough import parametrize

from hetcoll.types import DType

pytestmark = pytest.mark.fakes

# The older line of hip-python, whose name is the newer one's too: `make vendors` puts it into a folder of its own.
OLDER_HIP = Path(sys.prefix) / "hip7"
SOME = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.INT16, DType.COMPLEX128, DType.BOOL)


@pytest.fixture(
    scope="module",
    params=["cuda", "hip", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("hip7", "posing"))],
)
def on(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Calls ``f(vendor, ...)`` in a process that has two fake devices of the vendor; of CUDA, posing as HIP's."""
    kind, older = request.param.removesuffix("7"), request.param == "hip7"
    vendor = "cuda" if kind == "cuda" else "hip"
    if older and not (OLDER_HIP / "hip").is_dir():
        pytest.skip(f"hip-python 7 is not in {OLDER_HIP} (make vendors)")
    env = {
        **fakes.environment(kind, devices=2, timeout=60),
        "HETCOLL_CACHE": str(tmp_path_factory.mktemp("cache") / "kernels"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # ranks that are streams of one device wait for each other
        "GPU_MAX_HW_QUEUES": "32",
    }
    process = Ranks(1, env, join=False)
    try:
        if older:
            process.run(_use_older_hip)
        yield lambda function, *args, **how: process.run(function, vendor, *args, **how)[0]
    finally:
        process.kill_all()  # a device's kernels stay loaded for as long as its process lives


def _use_older_hip(job: Job) -> None:
    sys.path.insert(0, str(OLDER_HIP))
    newer = [name for name in sys.modules if name.partition(".")[0] == "rocm"]  # loaded before this process was forked
    sys.modules.update(dict.fromkeys([*newer, "rocm", "rocm.bindings"]))  # type: ignore[arg-type]
    from hip import hip

    assert Path(hip.__file__).is_relative_to(OLDER_HIP)


def _check(job: Job, vendor: str, name: str) -> str | None:
    try:
        device_checks.CHECKS[name](open_device(vendor))
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return None


@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_device(on: Callable[..., Any], name: str) -> None:
    why_not = on(_check, name, timeout=100)
    if why_not:
        pytest.skip(why_not)


def _choice_of_cuda(job: Job, vendor: str) -> int:
    from cuda.bindings import driver

    from hetcoll.vendors.devices import cuda, hip

    devices, found = (cuda if vendor == "cuda" else hip).devices(), list[int]()

    def choose() -> None:
        _, context = driver.cuDevicePrimaryCtxRetain(1)
        driver.cuCtxSetCurrent(context)
        with devices[1].active():
            pass
        found.append(int(driver.cuCtxGetDevice()[1]))

    thread = threading.Thread(target=choose)  # its first calls
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("on", ["cuda", "posing"], indirect=True)
def test_the_device_that_a_thread_has_chosen_stays(on: Callable[..., Any]) -> None:
    assert on(_choice_of_cuda) == 1


def _kernels(job: Job, vendor: str, dtype: DType) -> None:
    device_checks.check_kernels(open_device(vendor), dtype)


@parametrize("dtype", SOME, ids=pair_id, first=1)
def test_kernels(on: Callable[..., Any], dtype: DType) -> None:
    """Some types: test_device_kernels.py has them all, and here every access is checked."""
    on(_kernels, dtype, timeout=100)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def _cache(job: Job, vendor: str, directory: str) -> None:
    records = _Records()
    logging.getLogger("hetcoll").addHandler(records)
    device_checks.check_cache(open_device(vendor), directory, lambda: records.text)


def test_compiled_kernels_are_kept(on: Callable[..., Any], tmp_path: Path) -> None:
    on(_cache, str(tmp_path / "cache"))

"""NVIDIA GPUs: the whole of `hetcoll.vendors.devices.cuda` and every kernel, on a real one."""

from __future__ import annotations

from pathlib import Path

import device_checks
import pytest
from elements import NARROW, pair_id

from hetcoll.types import DType
from hetcoll.vendors.devices import cuda

_MISSING = cuda.why_not()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]


@pytest.fixture(scope="module")
def device() -> cuda.CudaDevice:
    return cuda.device(0)


@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_device(device: cuda.CudaDevice, name: str) -> None:
    device_checks.CHECKS[name](device)


def test_compiled_kernels_are_kept(device: cuda.CudaDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device_checks.check_cache(device, str(tmp_path / "cache"), lambda: caplog.text)


@pytest.mark.parametrize("dtype", list(DType), ids=pair_id)
def test_kernels(device: cuda.CudaDevice, dtype: DType) -> None:
    device_checks.check_kernels(device, dtype)


def test_folds(device: cuda.CudaDevice) -> None:
    device_checks.check_folds(device)


def test_messages(device: cuda.CudaDevice) -> None:
    device_checks.check_messages(device)


@pytest.mark.parametrize("dtype", NARROW, ids=pair_id)
def test_every_code(device: cuda.CudaDevice, dtype: DType) -> None:
    device_checks.check_codes(device, dtype)

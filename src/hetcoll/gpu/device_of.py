"""Which of this process's GPUs holds a buffer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from ..calls.buffers import VENDOR_OF, Buffer
from ..errors import BufferTypeError
from ..vendors import devices

if TYPE_CHECKING:
    from ..vendors.devices.base import Device


def device_of(buffer: Buffer) -> Device:
    """The GPU that holds a buffer."""
    module = VENDOR_OF.get(buffer.device)
    if module is None:
        raise BufferTypeError(f"memory on {buffer.device} is not supported")
    driver = importlib.import_module(f".{module}", devices.__name__)
    reason = driver.why_not()
    if reason is not None:
        raise BufferTypeError(f"the buffers are on {buffer.device}, but {reason}")
    return cast("Device", driver.devices()[buffer.index])

"""What every device must do with memory: its own, the host's, other processes' and other devices'."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import subprocess
import sys

import kernel_checks
import numpy as np
import pytest
from device_machine import SECONDS, DeviceMachine, driver_of, held_up, open_device, random_bytes
from kernel_checks import Launch

from hetcoll.errors import ArgumentError, DeviceError
from hetcoll.vendors.devices import base
from hetcoll.vendors.devices.base import Device


def check_memory(device: Device) -> None:
    """Copies in every direction, blocking and on a stream."""
    with DeviceMachine(device) as machine:
        data = random_bytes(1_000_003)
        first, second = machine.allocate(data.size), machine.allocate(data.size)
        pinned = machine.allocate(data.size, shared=True)
        (stream,) = machine.streams(1)
        assert first % 256 == 0
        machine.write(first, data)
        device.copy(second, first, data.size)
        np.testing.assert_array_equal(machine.read(second, data.size), data)
        device.copy(pinned, second, data.size, stream)
        device.copy(first, pinned, 1000, stream)
        device.copy(first + 1001, pinned + 3, 77, stream)
        device.synchronize(stream)
        seen = np.frombuffer((ctypes.c_uint8 * data.size).from_address(pinned), np.uint8)
        np.testing.assert_array_equal(seen, data)
        np.testing.assert_array_equal(machine.read(first + 1001, 77), data[3:80])
        device.copy(first, second, 0)
        data = data.copy()
        with held_up(machine, stream):  # none waits for it
            for offset, nbytes in ((5, 70), (1001, 700_001), (999_983, 0)):  # few bytes, many pages, none
                device.clear(second + offset, nbytes)
                data[offset : offset + nbytes] = 0
            device.clear(pinned, 4)
        np.testing.assert_array_equal(machine.read(second, data.size), data)
        assert [not seen[:4].any(), bool(seen[4:9].any())] == [True, True]


def check_registered(device: Device) -> None:
    """Memory of a file, mapped by the device: each side sees what the other wrote."""
    nbytes = 64 * mmap.PAGESIZE
    fd = os.memfd_create("hetcoll-test")
    try:
        os.posix_fallocate(fd, 0, nbytes)
        with DeviceMachine(device) as machine, mmap.mmap(fd, nbytes) as mapping:
            view = np.frombuffer(mapping, np.uint8)
            address = int(view.ctypes.data)
            at = device.register_host(address, nbytes)
            try:
                data = random_bytes(nbytes)
                there = machine.allocate(nbytes)
                view[:] = data
                device.copy(there, at, nbytes)
                np.testing.assert_array_equal(machine.read(there, nbytes), data)
                counter, zero = at + 128, kernel_checks.integers(machine, 0)[0]
                machine.run([Launch("bump", 1, 1, counter, zero, 1234567)])
                assert view[128:136].view(np.uint64)[0] == 1234567
                with pytest.raises(DeviceError):
                    device.register_host(address, nbytes)
            finally:
                device.unregister_host(address)
            del view
    finally:
        os.close(fd)


def check_pointers(device: Device) -> None:
    """Whose memory an address is in, anywhere in it."""
    with DeviceMachine(device) as machine:
        there, pinned = machine.allocate(1 << 16), machine.allocate(1 << 16, shared=True)
        mine = np.zeros(1 << 16, np.uint8)
        assert device.pointer(there) == base.Pointer("device", device.index, there, 1 << 16)
        assert device.pointer(there + 1000) == base.Pointer("device", device.index, there, 1 << 16)
        found = device.pointer(pinned + 5)
        assert (found.kind, found.device) == ("host", -1)
        address = mine.ctypes.data + 7
        assert device.pointer(address) == base.Pointer("unknown", -1, address, 0)
        managed = _managed(device, 1 << 16)
        assert device.pointer(managed + 9).kind == "managed"
        device.free(managed)
    module = importlib.import_module(type(device).__module__)
    for owner in module.devices():  # memory of every device, by whatever device is asked
        there = owner.allocate(1 << 16)
        for asked in module.devices():
            assert asked.pointer(there + 8) == base.Pointer("device", owner.index, there, 1 << 16)
        owner.free(there)


def _managed(device: Device, nbytes: int) -> int:
    device.activate()
    calls = driver_of(device)
    if device.vendor == "cuda":
        return int(calls("cuMemAllocManaged", nbytes, int(calls.module.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
    return int(calls("hipMallocManaged", nbytes, calls.module.hipMemAttachGlobal))


def reverse_theirs(vendor: str, index: int, handle: bytes, nbytes: int) -> None:
    """In another process: turn the bytes of an opened allocation round."""
    device = open_device(vendor, index)
    address = device.open_ipc(handle)
    data = np.empty(nbytes, np.uint8)
    device.copy(data.ctypes.data, address, nbytes)
    turned = np.ascontiguousarray(data[::-1])
    device.copy(address, turned.ctypes.data, nbytes)
    device.synchronize()
    device.close_ipc(address)


def check_ipc(device: Device) -> None:
    """Another process opens an allocation, and both see the same bytes."""
    nbytes = 1 << 16
    with DeviceMachine(device) as machine:
        address = machine.allocate(nbytes)
        data = random_bytes(nbytes, 3)
        machine.write(address, data)
        handle = device.ipc_handle(address)
        assert len(handle) == 64
        arguments = (device.vendor, device.index, handle, nbytes)
        hidden = [name for name in ("rocm", "rocm.bindings") if sys.modules.get(name, 0) is None]
        text = f"import sys; sys.path[:] = {sys.path}; sys.modules.update(dict.fromkeys({hidden}))"
        text += f"; import memory_checks; memory_checks.reverse_theirs{arguments}"
        subprocess.run([sys.executable, "-c", text], check=True, timeout=SECONDS)
        np.testing.assert_array_equal(machine.read(address, nbytes), data[::-1])


def check_dmabuf(device: Device) -> None:
    """A file descriptor for a network card, or a reason."""
    with DeviceMachine(device) as machine:
        address = machine.allocate(4 << 20)
        try:
            found = device.dmabuf(address + 1000, 1 << 20)
        except DeviceError as error:
            pytest.skip(f"the driver exports no dma-buf: {error}")
        try:
            os.fstat(found.fd)
            assert not os.get_inheritable(found.fd)
            assert found.nbytes == 1 << 20
            assert found.offset == 1000
        finally:
            os.close(found.fd)


def check_refusals(device: Device) -> None:
    """What a driver refuses names the call and the reason, such as opening one's own memory as another process's."""
    with pytest.raises(DeviceError, match=r"[Aa]l+oc") as caught:
        device.allocate(1 << 60)
    assert "emory" in caught.value.code or "EMORY" in caught.value.code
    own = device.allocate(64)
    with pytest.raises(DeviceError):
        device.open_ipc(device.ipc_handle(own))
    device.free(own)
    with pytest.raises(ArgumentError, match="wanted 64 bytes, got 63"):
        device.open_ipc(bytes(63))
    with pytest.raises(DeviceError):
        device.load(b"no image at all" * 10)
    with pytest.raises(ArgumentError, match="no kernel 'reduce_float8_sum'"):
        device.kernels().function("reduce_float8_sum")
    device.free(device.allocate(64))  # none of it stays

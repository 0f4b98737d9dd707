"""What one rank brings to a communicator's RDMA: its open ports, known to the engine, and its registered memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from socket import AF_INET, AddressFamily
from typing import TYPE_CHECKING, Any

from ... import lifetime
from ...config.env import Config
from ...plan.rails import ETHERNET, Nic
from .devices import Device, abandon, hold, release
from .library import UnavailableError, load
from .memory import Memory
from .nics import Chosen, choose, networks
from .pci import between, device_folder

if TYPE_CHECKING:
    import hetcoll._native as _native

log = logging.getLogger("hetcoll")


class LocalNics:
    """The chosen ports of this host, opened for `engine`: `nics` is what to tell the others, in the engine's order.

    Raises
    ------
    UnavailableError
        No port can be used: says why. Nothing is left open.
    """

    def __init__(
        self, engine: _native.Engine, config: Config, family: AddressFamily = AF_INET, near: Path | None = None
    ) -> None:
        chosen, self.passed = choose(config, family, near)
        known = networks()
        self._devices: list[Device] = []
        self._ports: list[Mapping[str, Any]] = []  # as engines are told of them
        self._shared: list[Memory] = []
        self.nics: tuple[Nic, ...] = ()
        numbers: list[tuple[Device, int]] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            for each in chosen:
                try:
                    number = self._open(engine, config, each)
                except (UnavailableError, OSError, RuntimeError, ValueError) as error:
                    self.passed[each.port.name] = str(error)
                    continue
                numbers.append((self._devices[-1], number))
                self.nics += (each.nic(known),)
            if not self.nics:
                told = "; ".join(f"{name}: {reason}" for name, reason in self.passed.items())
                raise UnavailableError(f"no port of an RDMA device can be used: {told}")
            undo.pop_all()
        self._numbers = [number for _, number in numbers]
        self.memory = Memory(engine, numbers)
        for name, reason in self.passed.items():
            log.info("%s is not used: %s", name, reason)
        lifetime.watch(self)

    def _open(self, engine: _native.Engine, config: Config, chosen: Chosen) -> int:
        port, gid = chosen.port, chosen.gid
        device = hold(load(), port.device)
        try:
            told: dict[str, Any] = {
                "pd": device.pd_address,
                "port": port.number,
                "gid_index": gid.index,
                "gid": gid.raw,
                "lid": port.lid,
                "mtu": port.mtu,
                "ethernet": port.layer == ETHERNET,
                "device": port.device,
                "traffic_class": config.ib_tc,
                "service_level": config.ib_sl,
                "timeout": config.ib_timeout,
                "retries": config.ib_retry_cnt,
                "rnr_retries": 7,
                "gbps": port.gbps,
            }
            number = engine.add_nic(**told)
        except BaseException:
            release(device)
            raise
        self._devices.append(device)
        self._ports.append(told)
        return number

    def share(self, proxy: _native.Proxy) -> Memory:
        """Let a proxy use the ports, too; what is registered for it. Its numbers of them are the engine's. The proxy,
        and then this memory, must be closed before these NICs."""
        numbers = [proxy.add_nic(**told) for told in self._ports]
        assert numbers == self._numbers, numbers
        self._shared.append(Memory(proxy, list(zip(self._devices, numbers, strict=True))))
        return self._shared[-1]

    def number(self, nic: Nic) -> int:
        """The engine's number of a port."""
        return self._numbers[self.nics.index(nic)]

    @property
    def rate(self) -> int:
        """Mbit/s of all its ports together, as they say; 0 where one does not."""
        each = [int(1000 * told["gbps"]) for told in self._ports]
        return sum(each) if all(each) else 0

    def near(self, gpu: Path | None) -> tuple[int, ...]:
        """Places in `nics`, those nearest to a PCI function first, others in the order that they have."""
        return tuple(sorted(range(len(self.nics)), key=lambda i: between(device_folder(self.nics[i].device), gpu)))

    def close(self) -> None:
        """Give memory and devices back. The engine must be closed."""
        lifetime.forget(self)
        self.memory.close()
        self._release()

    def abandon(self) -> None:
        """In a forked child: all of it is the parent's."""
        for memory in (self.memory, *self._shared):
            memory.abandon()
        self._devices.clear()
        abandon()

    def _release(self) -> None:
        while self._devices:
            release(self._devices.pop())

"""How a rank with a GPU tries its ways to other ranks: those inside its host at first, others when plans need them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..plan.ir import P2P_CHANNEL
from . import path_probe, ring_proof
from .far_proof import FarProof

if TYPE_CHECKING:
    from ..links.wiring import Wiring
    from ..vendors.devices.base import Device
    from .edges import GpuEdges
    from .proxy import Proxies
    from .ring_proof import Bind
    from .shared import GpuShare
    from .vendor_comm import Meet
    from .watchdog import GpuWatch

_PATIENCE = 1.0  # seconds between looks whether the communicator has failed


class GpuProofs:
    """Of one rank. `enqueue` is `path_probe.Bench`'s."""

    def __init__(
        self,
        wiring: Wiring,
        device: Device,
        share: GpuShare,
        edges: GpuEdges,
        proxies: Proxies,
        watch: GpuWatch,
        enqueue: path_probe.Enqueue,
        undo: contextlib.ExitStack,
    ) -> None:
        self._wiring, self._share, self._edges, self._proxies, self._watch = wiring, share, edges, proxies, watch
        self._device = device
        self._undo = contextlib.ExitStack()
        self._bench = path_probe.Bench(device, edges, share, enqueue, self._undo)
        undo.callback(self._undo.close)
        edges.far_proof = FarProof(wiring, share, self._bench.exchange, edges.give_up, self._trying)

    def inside(self, meet: Meet, timeout: float) -> bool:
        """Of this host; collective over all ranks. Whether some way was given up."""
        with self._watch.patient(), self._proxies.trying():
            given_up = path_probe.prove(
                self._share,
                lambda peer, nbytes, seconds: self._bench.exchange(peer, P2P_CHANNEL, nbytes, seconds),
                meet,
                self._edges.give_up,
                lambda: self._wiring.listen(timeout),
            )
        if len(self._share.topology.hosts) == 1:
            self._undo.close()  # nothing else is to be tried
        return given_up

    def rings(self, bind: Bind, meet: Meet) -> str:
        """Of kernels, through the memory of GPUs: see `ring_proof.prove`."""
        with self._watch.patient():
            return ring_proof.prove(self._device, self._share, bind, meet)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """A way between hosts is tried while the block runs. Nothing holds up its streams by then, such as others that
        share a hardware queue with them and wait: so that the time of a pattern is its own."""
        while not (self._bench.idle(time.monotonic() + _PATIENCE) or self._wiring.engine.failed):
            pass
        with self._watch.patient(), self._proxies.trying():
            yield

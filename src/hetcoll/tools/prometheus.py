"""A communicator's counters for Prometheus, by the package prometheus-client: ``pip install 'hetcoll[prometheus]'``.

from prometheus_client import start_http_server
from hetcoll.tools import prometheus

prometheus.register(comm)
start_http_server(9400)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..errors import ClosedError

# What can fall again; all others only rise.
_GAUGES = ("residual_bytes", "memory_intervals", "memory_bytes", "memory_idle_bytes")


class Counting(Protocol):
    """A `Communicator`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def counters(self) -> Mapping[str, int]: ...


class CommunicatorCollector(Collector):
    """Gives `Communicator.counters` as ``hetcoll_<name>`` with the labels ``rank`` and ``size``, read when Prometheus
    asks; nothing once the communicator is closed. It does not keep the communicator alive."""

    def __init__(self, comm: Counting) -> None:
        self._comm = weakref.ref(comm)

    def collect(self) -> Iterator[Metric]:
        comm = self._comm()
        if comm is None:
            return
        try:
            counters = comm.counters()
        except ClosedError:  # or the parent's, of a forked process
            return
        labels = {"rank": str(comm.rank), "size": str(comm.size)}
        for name, value in counters.items():
            kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            family = kind(f"hetcoll_{name}", f"Communicator.counters: {name}", labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family


def register(comm: Counting, registry: CollectorRegistry = REGISTRY) -> CommunicatorCollector:
    """From now on `registry` shows the counters of `comm`, this rank's. The result can be unregistered there."""
    collector = CommunicatorCollector(comm)
    registry.register(collector)
    return collector

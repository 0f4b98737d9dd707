"""What `hetcoll doctor` looks at: functions that each say what they found, and what to do about it.

A check needs no job and no other machine, changes nothing, ends by itself, and never raises for what it looks for. A
new one is a function that gives `Finding`s, with a line in `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import gpu, machine, rdma
from .finding import Finding, Level

Check = Callable[[], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    machine.shared_memory,
    machine.network,
    gpu.nvidia,
    gpu.amd,
    rdma.devices,
    rdma.modules,
    rdma.libraries,
    rdma.ports,
    rdma.locked_memory,
    rdma.gpu_memory,
    gpu.kernel_options,
)


def run_checks(checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What all of them found, in order."""
    return [finding for check in checks for finding in check()]


__all__ = ["CHECKS", "Check", "Finding", "Level", "run_checks"]

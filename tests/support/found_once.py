"""What every rank would find out as it starts, found by the server that ranks are forked from (`ranks.preload`)."""

from __future__ import annotations

from hetcoll.plan.algorithms import installed
from hetcoll.vendors.devices.kernels.source import module_of

installed.load()
module_of()

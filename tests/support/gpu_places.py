"""Where tests of GPU collectives run: on fakes everywhere, and on NVIDIA's GPUs where there are enough."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import fakes
import pytest
from ranks import Env, Ranks

from hetcoll.vendors.devices import cuda

STAND_INS, REAL = "fakes", "GPUs"
PLACES = [pytest.param(STAND_INS, marks=pytest.mark.fakes), pytest.param(REAL, marks=pytest.mark.cuda)]


@functools.cache
def _found() -> tuple[int, str]:
    """How many GPUs there are, and why none."""
    why_not = cuda.why_not()
    return (0, str(why_not)) if why_not else (len(cuda.devices()), "")


def need_gpus(wanted: int) -> int:
    """How many of NVIDIA's GPUs there are; skips the test where they are less."""
    count, why_not = _found()
    if count < wanted:
        pytest.skip(why_not or f"needs {wanted} GPUs, found {count}")
    return count


def ranks_on(
    place: str, vendors: Sequence[str | None], more: Env | None = None, *, join: bool = True, **settings: object
) -> Ranks:
    """Ranks with these vendors' GPUs, one each: None is a CPU, "posing" NVIDIA's that pose as AMD's. `settings` are
    those of fakes (`fakes`): GPUs are late and share hardware queues as they are."""
    if place == STAND_INS:
        env = fakes.environments(vendors, len(vendors), **settings)
        return Ranks(len(vendors), {**env, **(more or {})}, join=join)
    if "hip" in vendors:
        pytest.skip("no AMD GPU")
    need_gpus(sum(vendor in ("cuda", "posing") for vendor in vendors))
    if "posing" in vendors:
        fakes.require("posing")
        more = {**fakes.posing(), **(more or {})}
    return Ranks(len(vendors), more, join=join, tidy=False)  # the driver keeps threads and files

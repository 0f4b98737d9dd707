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


def _need_gpu_for_each(vendors: Sequence[str | None], asked: str | tuple[str, ...] | None) -> None:
    """Skips the test where two ranks of an island would have one GPU: those of several islands may share one."""
    if not isinstance(asked, str) or not asked:  # all GPUs of a vendor are one
        need_gpus(max(sum(vendor == each for vendor in vendors) for each in ("cuda", "posing")))
        return
    islands = [[rank for rank in map(int, island.split(",")) if vendors[rank]] for island in asked.split("|")]
    count = need_gpus(max(map(len, islands)))
    if any(len({rank % count for rank in island}) < len(island) for island in islands):
        pytest.skip(f"needs a GPU for each rank of the islands {asked}, found {count} that ranks take in turn")


def ranks_on(
    place: str, vendors: Sequence[str | None], more: Env | None = None, *, join: bool = True, **settings: object
) -> Ranks:
    """Ranks with these vendors' GPUs: None is a CPU, "posing" NVIDIA's that pose as AMD's. `settings` are those of
    fakes (`fakes`): GPUs are late and share hardware queues as they are. Real GPUs are shared where there are few."""
    if place == STAND_INS:
        env = fakes.environments(vendors, len(vendors), **settings)
        return Ranks(len(vendors), {**env, **(more or {})}, join=join)
    if "hip" in vendors:
        pytest.skip("no AMD GPU")
    _need_gpu_for_each(vendors, (more or {}).get("HETCOLL_ISLANDS"))
    if "posing" in vendors:
        fakes.require("posing")
        more = {**fakes.posing(), **(more or {})}
    return Ranks(len(vendors), more, join=join, tidy=False)  # the driver keeps threads and files

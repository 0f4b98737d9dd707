"""A slice of the campaign (`campaign`): random programs, attacked, against a model. Failures replay by their seeds."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

import pytest
from resetting import own_connections
from thorough import HOUSE, parametrize

from .lanes import campaign
from .program import NETWORK, draw

pytestmark = pytest.mark.fakes  # one seed of fifty wants them

SEEDS = 2000
FEW, PARTS = 20, 20
"""The first part has few seeds, the others share the rest: a lane's start takes as long as 25 seeds."""
LANES = 2 if "PYTEST_XDIST_WORKER" in os.environ else (os.cpu_count() or 1) + 1  # others fill the processors
FOUND = ((23961, ""), (24627, "kill"), (38830, ""), (213, "truncate"), (788, "truncate"), (4064, "truncate"))
"""Later ones, which failed once, with the attack that another one has replaced since: shared memory where one rank has
little room, NCCL's id for a rank that was gone before it came, a timeout with GPUs, their paths cut off."""


def play(seeds: Iterable[int], only: str = "") -> None:
    """Skipped where what all of them want cannot be had; what some want is told."""
    found = list(campaign([(seed, only) for seed in seeds], LANES))
    absent = [
        f"seed {seed} was skipped, which wants {problems}" for seed, problems in found if isinstance(problems, str)
    ]
    print("\n".join(absent))
    failed = [
        f"{draw(seed, only)}\n" + "\n".join(problems)
        for seed, problems in found
        if problems and not isinstance(problems, str)
    ]
    how = f"--only {only} " if only else ""
    assert not failed, "\n\n".join(
        [f"{len(failed)} failed", *failed[:3], f"`make campaign SEEDS='{how}--seed N'` plays N again"]
    )
    if len(absent) == len(found):
        pytest.skip(absent[0])


@parametrize("part", range(PARTS), first=1, whole=True)
@pytest.mark.timeout(300)
def test_right_results_or_the_right_errors_and_nothing_left(part: int) -> None:
    play(range(FEW) if part == 0 else range(FEW + part - 1, SEEDS, PARTS - 1))


@HOUSE
def test_the_same_where_it_went_wrong_once() -> None:
    for only in sorted({only for _, only in FOUND}):
        play([seed for seed, each in FOUND if each == only] * 4, only)


@parametrize("kind", sorted(NETWORK), first=1, whole=True)
def test_the_same_where_networks_are_slow_or_cut(kind: str) -> None:
    play(range(LANES), kind)


def test_looking_for_connections_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is closed meanwhile and its number is that of another file, as of this one, which is said to be one."""
    monkeypatch.setattr(os, "readlink", lambda _: "socket:[1]")
    with select.epoll():
        before = sorted(os.listdir("/proc/self/fd"))
        for sock in own_connections():
            sock.close()
        assert sorted(os.listdir("/proc/self/fd")) == before

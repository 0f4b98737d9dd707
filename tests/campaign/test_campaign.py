"""A slice of the campaign (`campaign`): random programs, attacked, against a model. Failures replay by their seeds."""

from __future__ import annotations

import os

import pytest
from thorough import parametrize

from .lanes import campaign
from .program import draw

pytestmark = pytest.mark.fakes  # one seed of fifty wants them

SEEDS = 2000
PARTS = 50


@parametrize("part", range(PARTS), first=1)
def test_right_results_or_the_right_errors_and_nothing_left(part: int) -> None:
    found = campaign([(seed, "") for seed in range(part, SEEDS, PARTS)], (os.cpu_count() or 1) + 1)
    failed = [f"{draw(seed)}\n" + "\n".join(problems) for seed, problems in found if problems]
    assert not failed, "\n\n".join(
        [f"{len(failed)} failed", *failed[:3], "`make campaign SEEDS='--seed N'` plays N again"]
    )

"""In a guest: a slice of the campaign over RDMA devices, whose cables are pulled and come back.

`PYTHONPATH=.:support:verbs verbs/guest.py python -m campaign --only rdma --seed N` in tests/ plays a seed again.
"""

from __future__ import annotations

import time

from cables import allow_resets  # a module that says what ranks load
from campaign.lanes import campaign
from campaign.program import draw

SECONDS = 45.0  # then no other seed begins


def test_right_results_or_the_right_errors_and_nothing_left() -> None:
    allow_resets()
    end, played = time.monotonic() + SECONDS, 0
    for seed, problems in campaign([(seed, "rdma") for seed in range(1000)], 1):
        assert not problems, f"{draw(seed, 'rdma')}\n" + "\n".join(problems)
        played += 1
        if time.monotonic() >= end:
            break
    print(f"{played} seeds")
    assert played >= 3

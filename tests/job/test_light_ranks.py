"""A job of many ranks starts and ends: light ranks (benchmarks/start.py), whose sockets and frames are real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

START = Path(__file__).resolve().parents[2] / "benchmarks/start.py"
SMALL, LARGE = 256, 1024


@pytest.mark.calm
@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_rank_takes_does_not_grow_with_their_number(tmp_path: Path) -> None:
    """All know all, or the ranks themselves say so. What a bound allows beyond a tree's next level is far from what a
    rank costs that each other one is told of."""
    file = tmp_path / "figures.json"
    command = [sys.executable, str(START), "--json", str(file), str(SMALL), str(LARGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    small, large = json.loads(file.read_text())
    assert (small["ranks"], large["ranks"]) == (SMALL, LARGE)
    assert large["nbytes"] / LARGE <= 1.1 * small["nbytes"] / SMALL
    for job in (small, large):
        assert job["frames"] <= 32 * job["ranks"], "between the store and a rank: some tell of others that go"
        assert max(job["rank_descriptors"], job["store_descriptors"]) <= 256
        assert job["left"] == 0

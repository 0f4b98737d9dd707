"""Benchmarks whose ranks measure once and end: experts and scattered pieces, and what is said where ranks fail."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import import_torch
from thorough import parametrize

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import experts
import launched
import serving

TOKENS = 16


def options(**more: Any) -> argparse.Namespace:
    sizes = {"ranks": 2, "hidden": 256, "experts": 8, "topk": 2, "rounds": 2, "device": "cpu"}
    return argparse.Namespace(**sizes | more)


@parametrize("way", [way for way in experts.WAYS["cpu"] if way != "gloo"], first=1)
def test_experts_are_measured(way: str) -> None:
    """The ranks compare what comes back, and a failure of theirs ends this."""
    seconds = experts.launch(options(), way, sys.executable, TOKENS)
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.thorough
def test_experts_are_measured_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import_torch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where PyTorch may be
    assert len(experts.launch(options(), "gloo", sys.executable, TOKENS)) == 2


def test_tokens_that_come_back_as_others_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")

    def measured(way: str, spoil: int) -> list[float]:
        return experts.measure(options(way=way), TOKENS, lambda x, ids, weights: x + np.float32(spoil), lambda: None)

    assert len(measured("hetcoll fp8", 4)) == 2
    for way, spoil in (("hetcoll fp8", 5), ("hetcoll", 1)):
        with pytest.raises(AssertionError, match="other tokens came back"):
            measured(way, spoil)


@parametrize("way", [way for way in reversed(serving.WAYS) if way != "gloo"], first=1)
def test_scattered_pieces_are_measured(way: str) -> None:
    seconds = serving.launch(way, sys.executable, 1024, 32, 2)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_pieces_that_came_elsewhere_are_noticed() -> None:
    source, target = serving.places(4)
    cache = np.empty((4, 64), np.uint8)
    cache[target] = serving.content(64, 4, 1).reshape(4, 64)[source]
    serving.check(cache, 64, 4, 1)
    cache[[0, 1]] = cache[[1, 0]]
    with pytest.raises(AssertionError, match="wrong bytes"):
        serving.check(cache, 64, 4, 1)


def test_a_rank_that_fails_ends_the_benchmark() -> None:
    program = "import os, sys; sys.exit(3 * int(os.environ['RANK']))"
    with pytest.raises(SystemExit, match=r"mine: exit statuses \[0, 3\]"):
        launched.launched("mine", [sys.executable, "-c", program], 2, os.environ, 60)


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(SystemExit, match=r"mine: exit statuses \[-9, -9\]"):
        launched.launched("mine", [sys.executable, "-c", "import time; time.sleep(600)"], 2, os.environ, 1)

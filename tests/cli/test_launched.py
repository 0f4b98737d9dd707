"""Benchmarks whose ranks measure once and end: experts and scattered pieces, and what is said where ranks fail."""

from __future__ import annotations

import argparse
import io
import json
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
import serving_rank
from serving_caches import Shape

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


@parametrize("way", ["hetcoll shm", "hetcoll tcp", "socket"], first=1)
def test_scattered_pieces_are_measured(way: str, tmp_path: Path) -> None:
    """The receiver compares what came. One put at a time, then three of which two are under way."""
    pair = serving.Pair(way, sys.executable, tmp_path)
    try:
        assert min(pair.round(Shape(1024, 32, depth), repeats) for depth, repeats in ((1, 1), (2, 3))) > 0
    finally:
        pair.close()


class Brings:
    """A way on whose receiver there is what it is told."""

    clock = 1

    def __init__(self, came: Any) -> None:
        self._came = came

    def came(self) -> Any:
        return self._came

    def nothing(self, *_: Any) -> None:
        """Of a way, all else."""

    prepare = fill = meet = move = close = nothing


def test_pieces_that_came_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(64, 4, 1)
    came = shape.wanted()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["serving_rank.py", "brings"])
    monkeypatch.setattr(serving_rank, "WAYS", {"brings": lambda rank, name: Brings(came)})

    def compare() -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"shape": shape, "repeats": 1}) + "\n"))
        serving_rank.main(io.StringIO())

    compare()
    came[:128] = came[:128].reshape(2, 64)[::-1].reshape(-1)
    with pytest.raises(AssertionError, match="wrong bytes"):
        compare()


def test_a_rank_that_fails_ends_the_benchmark() -> None:
    program = "import os, sys; sys.exit(3 * int(os.environ['RANK']))"
    with pytest.raises(SystemExit, match=r"mine: exit statuses \[0, 3\]"):
        launched.launched("mine", [sys.executable, "-c", program], 2, os.environ, 60)


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(SystemExit, match=r"mine: exit statuses \[-9, -9\]"):
        launched.launched("mine", [sys.executable, "-c", "import time; time.sleep(600)"], 2, os.environ, 1)

"""The benchmark of a job that loses a rank and has it back (benchmarks/elastic.py)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from installed import import_torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import elastic


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "1"], "wanted two ranks or more"),
        (["--victim", "4"], "one of them as --victim, got 4 and 4"),
        (["--batch", "3"], "--batch: wanted a sample for each of 4 ranks, got 3"),
    ],
)
def test_words_that_are_none(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        elastic.main(words)
    assert said in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_is_lost_and_comes_back(victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_torch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where PyTorch may be
    file = tmp_path / "figures.json"
    words = ["--ranks", "3", "--model", "tiny", "--victim", victim, "--kill", "3", "--more", "3"]
    assert elastic.main([*words, "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert len(told["losses"]) == len(told["alone"]) > 6
    assert min(told["phases"].values()) > 0

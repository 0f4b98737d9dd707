"""The benchmark of predictions (benchmarks/predict.py): what it prints of what was measured before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from thorough import HOUSE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import predict  # noqa: E402

pytestmark = HOUSE

CARDS = {"nic": "0.1 GB/s", "burst": 0}
NETWORK = {"latency": "2 us", "overhead": "3 us"}


def test_each_ratio_is_printed_beside_the_launches_and_none_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two hosts: of 1 MB each sends and gets as much."""
    cells = [
        predict.Cell("ring", 10**6, [0.0101, 0.0100, 0.0102], [0.0, 1.0, 2.0]),
        predict.Cell("ring", 8, [8e-6, 16e-6, 88e-6], [0.0, 0.0, 0.0]),
        predict.Cell("direct", 10**6, [0.0202, 0.0200, 0.0201], [5.0, 7.0, 9.5]),
    ]
    text = predict.described(2, 1, CARDS, NETWORK)
    place = predict.Place("2 namespaces, 800mbit", text, cells)
    file = tmp_path / "found.json"
    rows = [place._asdict() | {"cells": [cell._asdict() for cell in cells]}]
    file.write_text(json.dumps({"machine": {}, "places": rows}))
    assert predict.main(["--again", str(file), "--markdown"]) == 0
    told = capsys.readouterr().out.splitlines()
    long, short, off = (line.split()[3:] for line in told if line.startswith("2 namespaces,"))
    assert long[:5] == ["ring", "1000000", "10000.0", "10100.0", "10200.0"]
    assert (long[-2], long[-1]) == ("0.99", "0.0"), "of the middle launch"
    assert short[-2] == "1.00", "8 us there, 8 us back"
    assert (off[-2], off[-1]) == ("0.50*", "9.5!"), "lost what no model meets, and is there"
    assert "namespaces: 2 of 3 within 15 %, geometric mean 0.79, from 0.50 to 1.00" in told
    assert "  launches within 15 % of one another: 1 of 2 within 15 %, geometric mean 0.70, from 0.50 to 0.99" in told
    assert "  nothing sent again: 2 of 2 within 15 %, geometric mean 1.00, from 0.99 to 1.00" in told
    assert told[-2] == "| 2 namespaces, 800mbit | ring | 0.99 | 1.00 (0.50 to 5.50) |"
    assert told[-1] == "| 2 namespaces, 800mbit | direct | 0.50 (10 sent again) |  |"

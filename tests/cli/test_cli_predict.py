"""`hetcoll simulate CLUSTER.toml`, as a shell sees it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hetcoll.cli import main
from hetcoll.cli.predict import spans
from hetcoll.errors import ArgumentError

CLUSTERS = Path(__file__).parents[2] / "docs/examples/clusters"
MIXED, CPUS = str(CLUSTERS / "h200-mi300x.toml"), str(CLUSTERS / "two-cpu-hosts.toml")


def test_a_curve_names_the_fastest_and_what_holds_it_back(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", CPUS, "allreduce", "--sizes", "8,64M", "--what-if", "hosts.server.pinned=90 GB/s"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "allreduce among 8 ranks, hosts x ranks: 2 x 4 server"
    rows = [line.split() for line in out]
    assert next(row[-1] for row in rows if row[:1] == ["8"]) in ("oneshot", "doubling")
    assert next(row[-1] for row in rows if row[:1] == ["64M"]) == "direct"
    assert out[-1].startswith("what holds it back: card ")
    assert [row[0] for row in rows if "memory" in row].count("memory") == 1  # of all hosts


def test_what_if_compares_and_training_says_what_gpus_add(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", MIXED, "allreduce", "--sizes", "64M", "--algo", "islands"]
    assert main([*words, "--what-if", "hosts.mi300x.count=0"]) == 0
    out = capsys.readouterr().out
    assert "with hosts.mi300x.count=0:" in out
    assert "allreduce among 16 ranks, hosts x ranks: 2 x 8 h200" in out
    steps = [line for line in out.splitlines() if "samples a second" in line]
    assert len(steps) == 2
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cluster"]["ranks"] == 32
    assert document["cluster"]["seconds"][0]["bytes"] == 64 << 20
    assert document["what_if"] is None


def test_a_trace_has_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["simulate", CPUS, "allreduce", "--sizes", "2M", "--algo", "tree", "--trace", str(trace)]) == 0
    document = json.loads(trace.read_text())
    assert {event["pid"] for event in document["traceEvents"]} == set(range(8))
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in document["traceEvents"])
    ends = max(event["ts"] + event["dur"] for event in document["traceEvents"])
    assert f"{ends / 1e3:.3g} ms" in capsys.readouterr().out


def test_a_plot_is_drawn_or_its_extra_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["simulate", CPUS, "allreduce", "--sizes", "1K,1M", "--plot", str(tmp_path / "out.svg")]
    assert main(words) == 1
    assert "pip install 'hetcoll[plot]'" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert main(words) == 0
    assert "<svg" in (tmp_path / "out.svg").read_text()


EIGHT = [CPUS, "allreduce", "--sizes", "8"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([CPUS], "wanted a collective after"), ([CPUS, "ring"], "wanted a collective after"),
        (["missing.toml", "allreduce"], "missing.toml: No such file"),
        (["FOLDER", "allreduce"], "Is a directory"), (["BYTES", "allreduce"], "wanted text, got 'utf-8' codec"),
        ([CPUS, "allreduce", "--sizes", "1G..1K"], "--sizes wants bytes"),
        ([CPUS, "allreduce", "--algo", "circle"], "no algorithm 'circle' for allreduce"),
        ([*EIGHT, "--what-if", "x"], "wanted KEY=VALUE"),
        ([*EIGHT, "--what-if", f"hosts.server.speed={10**400}"], "wanted a number above 0, got 1000"),
        ([*EIGHT, "--what-if", "hosts.server.speed=inf"], "wanted a number above 0, got inf"),
        ([*EIGHT, "--what-if", "hosts.server.latency=1e999 s"], "wanted a time in a string"),
        ([*EIGHT, "--what-if", "hosts.server.nic=1e999 GB/s"], "wanted a bandwidth in a string"),
        ([CPUS, "p2p"], "no algorithm for p2p among these ranks"),
        (["allreduce", "ring", "--trace", "x"], "--trace is for cluster files"),
        ([CPUS, "allreduce", "--sizes", "8", "--trace", "/nowhere/x"], "--trace /nowhere/x: No such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "folder.toml").mkdir()
    (binary := tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    paths = {"FOLDER": str(folder), "BYTES": str(binary)}
    assert main(["simulate", *(paths.get(word, word) for word in words)]) == 1
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


def test_sizes() -> None:
    assert spans("1K..4K") == [1024, 2048, 4096]
    assert spans("8, 1M") == [8, 1 << 20]
    for wrong in ("", "1K..", "0", "4K..1K", "1..2..3", "x"):
        with pytest.raises(ArgumentError):
            spans(wrong)

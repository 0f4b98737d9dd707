"""The command hetcoll perf: what stands on a terminal, and whole runs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import DEADLINE
from perf_ranks import ROW_KEYS
from thorough import parametrize

from hetcoll.cli import cases, main, terminal
from hetcoll.types import DType, ReduceOp, supports

# On a terminal -------------------------------------------------------------------------------------------------------


def test_progress_goes_where_it_was_asked_for() -> None:
    said = {}
    for mode in ("off", "lines", "terminal"):
        out = io.StringIO()
        progress = terminal.Progress(2, mode, out)
        progress.show("allreduce 8 B")
        progress.clear()
        said[mode] = out.getvalue()
    assert said["off"] == ""
    assert said["lines"] == "\x00[1/2] allreduce 8 B\n"
    assert said["terminal"] == "\r\x1b[K[1/2] allreduce 8 B\r\x1b[K"


def test_the_screen_keeps_progress_below_the_output() -> None:
    out, terminal_bytes = io.BytesIO(), io.BytesIO()
    screen = terminal.Screen(out, terminal_bytes)
    screen.stderr.write(b"\x00[1/2] first\n")
    screen.stdout.write(b"row\n")
    screen.stderr.write(b"a warning\n\x00[2/2] second\n")
    screen.clear()
    assert out.getvalue() == b"row\n"
    clear = b"\r\x1b[K"
    assert terminal_bytes.getvalue() == b"".join(
        [clear, b"[1/2] first", clear, b"a warning\n", clear, b"[2/2] second", clear]
    )


# The command ----------------------------------------------------------------------------------------------------------


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")} | environ
    return subprocess.run(
        [sys.executable, "-m", "hetcoll", *words], env=env, capture_output=True, text=True, timeout=DEADLINE
    )


@parametrize("transport", ["shm", "tcp"], first=1)
def test_every_operation_is_right_between_two_ranks(transport: str, tmp_path: Any) -> None:
    json_file = tmp_path / "perf.json"
    words = ["perf", "all", "-n", "2", "-b", "64", "-e", "256K", "-f", "4096", "--iters", "3", "--transport", transport]
    done = command(*words, "--json", str(json_file))
    assert done.returncode == 0, done.stderr
    assert "\x00" not in done.stdout + done.stderr
    document = json.loads(json_file.read_text())
    assert {row["op"] for row in document["rows"]} == set(cases.OPS)
    assert {row["transport"] for row in document["rows"]} == {transport}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in document["rows"])
    assert all(list(row) == ROW_KEYS for row in document["rows"])


@pytest.mark.thorough
def test_every_type_and_reduction_is_right_among_three_ranks(tmp_path: Any) -> None:
    json_file = tmp_path / "perf.json"
    words = ["perf", "allreduce", "-n", "3", "-b", "1000", "-e", "1000", "--iters", "2", "-w", "0"]
    done = command(*words, "-d", "all", "-o", "all", "--json", str(json_file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(json_file.read_text())["rows"]
    pairs = {(row["dtype"], row["redop"]) for row in rows}
    assert pairs == {(d.label, r.label) for d in DType for r in ReduceOp if supports(d, r)}
    assert all(row["wrong"] == 0 for row in rows)


def test_one_rank_alone_is_measured_without_a_launcher() -> None:
    done = command("perf", "allreduce", "allgather", "-n", "1", "-e", "64", "--iters", "2")
    assert done.returncode == 0, done.stderr
    assert "# 1 rank on 1 host" in done.stdout


def test_it_joins_the_ranks_of_a_launcher() -> None:
    perf_words = ["perf", "allreduce", "-e", "8", "--iters", "2", "-n", "9"]
    done = command("run", "--no-prefix", "-n", "2", "-m", "hetcoll", *perf_words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# 2 ranks on 1 host") == 1


@pytest.mark.parametrize("option", ["--json", "--csv"])
@pytest.mark.parametrize("path", ["/nowhere/x", "/"])
def test_results_that_cannot_be_written_are_not_measured(
    option: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perf", "allreduce", "-n", "1", "-e", "8", option, path]) == 1
    captured = capsys.readouterr()
    assert (
        captured.err
        == f"hetcoll perf: ArgumentError: {option}: wanted a file in a folder that is there, got {path!r}\n"
    )
    assert captured.out == ""


@pytest.mark.parametrize("there", [False, True])
def test_a_file_that_others_keep_is_refused_first(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, asked = tmp_path / "results", list[tuple[str, int]]()
    if there:
        path.touch()
    monkeypatch.setattr(os, "access", lambda file, mode: asked.append((str(file), mode)))  # root may write any
    assert main(["perf", "allreduce", "-n", "1", "-e", "8", "--csv", str(path)]) == 1
    assert f"--csv: wanted a file that can be written, got {str(path)!r}" in capsys.readouterr().err
    assert asked == [(str(path if there else tmp_path), os.W_OK)]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["allreduce", "-b", "9", "-e", "8"], "larger than"), (["allredice"], "invalid choice"),
        (["allreduce", "-n", "0"], "from 1"), (["allreduce", "-d", "float33"], "wanted all or one of"),
        (["allreduce", "-o", "plus"], "wanted all or one of"), (["allreduce", "-b", "8Q"], "wanted a size"),
        (["broadcast", "-n", "1", "-r", "1"], "a rank from 0 to 0"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_message(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["perf", *words])
    # It ends with argparse's 2 and a message, or with a message alone, which is a status of 1 and goes to stderr, too.
    assert complaint in (capsys.readouterr().err if end.value.code == 2 else str(end.value.code))

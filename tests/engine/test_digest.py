"""HETCOLL_DIGEST: two runs alike have the same lines, and the first call that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks

import hetcoll
from hetcoll.cli import main
from hetcoll.runtime.digest import first_difference, read

Launch = Callable[..., Ranks]


def program(comm: hetcoll.Communicator, odd: tuple[str, int] = ("", 0)) -> None:
    """Calls of the whole and of its halves. `odd` names what this run does otherwise, and the rank."""
    x, gathered = np.full(3, comm.rank + 0.5), np.empty((comm.size, 3))
    comm.allreduce(x)
    comm.allgather(x, gathered)
    half = comm.split(comm.rank % 2)
    assert half is not None
    y = np.full(2, comm.rank + (0.25 if odd == ("input", comm.rank) else 0.0))
    half.allreduce(y, op="max" if odd[0] == "call" else "sum")
    half.close()
    comm.broadcast(x, root=1)
    comm.barrier()
    if odd == ("length", comm.rank):
        comm.allreduce(x)


def run(launch: Launch, directory: Path, odd: tuple[str, int] = ("", 0)) -> None:
    with launch(4, HETCOLL_DIGEST=str(directory)) as ranks:
        ranks.run(program, odd)


def test_two_runs(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, odd in (("a", ("", 0)), ("b", ("", 0)), ("c", ("input", 3)), ("d", ("call", 0))):
        run(launch, tmp_path / name, odd)
    assert main(["digest", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "20 calls of 4 ranks are the same\n"
    assert main(["digest", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("communicator 1, call 0, allreduce(float64, count=2, op=sum) at ")
    assert said.endswith("its input differs (rank 3)\n"), "rank 1's result differs for that reason"
    assert Path(__file__).name in said
    difference = first_difference(read(tmp_path / "a"), read(tmp_path / "d"))
    assert "the second run called allreduce(float64, count=2, op=max) at " in difference
    assert difference.endswith("(rank 0, 1, 2, 3)")


def test_a_result_that_differs(launch: Launch, tmp_path: Path) -> None:
    run(launch, tmp_path / "a")
    (tmp_path / "b").mkdir()
    for file in (tmp_path / "a").iterdir():
        (tmp_path / "b" / file.name).write_text(file.read_text())
    lines = (tmp_path / "b" / "rank-2.txt").read_text().splitlines()
    words = lines[1].split("\t")
    lines[1] = "\t".join([*words[:3], "0" * 16, *words[4:]])
    (tmp_path / "b" / "rank-2.txt").write_text("\n".join(lines[:-1]) + "\n")
    difference = first_difference(read(tmp_path / "a"), read(tmp_path / "b"))
    assert difference.startswith("communicator 0, call 1, allgather(")
    assert difference.endswith("its inputs are the same, its result differs (rank 2)")
    assert "only the first run made it" in first_difference(read(tmp_path / "a"), {**read(tmp_path / "a"), 0: []})
    assert first_difference(read(tmp_path / "a"), {}) == "one run had ranks [0, 1, 2, 3], the other []"


def test_digests_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digest", str(tmp_path), str(tmp_path)]) == 1
    assert "wanted a directory that HETCOLL_DIGEST named" in capsys.readouterr().err
    (tmp_path / "rank-0.txt").write_text("nothing of ours\n")
    assert main(["digest", str(tmp_path), str(tmp_path)]) == 1
    assert "line 1: wanted a line of HETCOLL_DIGEST" in capsys.readouterr().err
    (tmp_path / "rank-0.txt").write_text("0\tone\t-\t-\tbarrier()\there\n")
    assert main(["digest", str(tmp_path), str(tmp_path)]) == 1
    assert "line 1: wanted a line of HETCOLL_DIGEST" in capsys.readouterr().err
    for name, content in (("rank-0.txt", b"\xff"), ("rank-0-of-before.txt", b"")):
        (tmp_path / "rank-0.txt").write_text("")
        (tmp_path / name).write_bytes(content)
        assert main(["digest", str(tmp_path), str(tmp_path)]) == 1
        assert f"{name}: wanted a file of HETCOLL_DIGEST: " in capsys.readouterr().err

"""In a guest: one-sided messages that devices write straight into windows, and what becomes of them when cables fail,
windows are closed and ranks stop or die."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cables import all_plugged, cut_and_mend, verbs
from faults import PROMPT, in_the_middle
from ranks import Ranks, elapsed, wait_until
from window_moves import FEW, PIECE, PIECES, moved

import hetcoll
from hetcoll import ClosedError, PeerLostError

Launch = Callable[..., Ranks]


@pytest.fixture(autouse=True)
def _cables() -> Iterator[None]:
    yield
    all_plugged()


def move_everywhere(comm: hetcoll.Communicator, least: float) -> None:
    """Pieces of 1 MiB out of one's own window, and of memory that was registered before there were windows, or after,
    or not; and back there. At least that share of it is not copied, where it is registered."""
    nbytes = 4 * PIECE * PIECES
    few, intervals = FEW + (1 - least) * nbytes, comm.counters()["memory_intervals"]
    early, plain = np.full(PIECE * PIECES, 3, np.float32), np.full(PIECE * PIECES, 5, np.float32)
    order = np.random.default_rng(1).permutation(PIECES) * PIECE
    with comm.register(early), comm.window(own := np.full(PIECE * PIECES, 2, np.float32)) as window:
        late = comm.empty(PIECE * PIECES, np.float32)
        late[:] = 4
        for number, mine in enumerate((own, early, late, plain)):
            here, copied_once = np.arange(PIECES) * PIECE, nbytes if mine is plain else 0

            def put(mine: Any = mine, here: Any = here) -> None:
                window.put(mine, 1, order, src_offset=here, count=PIECE, signal=0)

            def get(mine: Any = mine, here: Any = here, value: int = 2 + number) -> None:
                mine[:] = 0
                window.get(mine, 1, order, dst_offset=here, count=PIECE)
                assert (mine == value).all()

            direct, lent, staged, copied = found = moved(comm, put)
            if comm.rank == 0:
                assert direct >= least * nbytes, found
                assert lent == nbytes - copied_once, found
                assert staged - copied_once <= FEW, found
            else:
                window.wait_signal(0, number + 1)
                assert (own == 2 + number).all()
                assert copied <= few, found
            direct, lent, staged, copied = found = moved(comm, get)
            if comm.rank == 1:
                assert direct >= least * (nbytes - copied_once), found
                assert lent == nbytes - copied_once, found
                assert staged - copied_once <= FEW, found
            else:
                assert copied - copied_once <= few, found
        comm.barrier()
    assert comm.counters()["memory_intervals"] <= intervals + 1, "more is registered than what is `late`"


@pytest.mark.parametrize("integrity", ["off", "sampled"])
def test_puts_and_gets_are_not_copied(launch: Launch, integrity: str) -> None:
    """But for what is checked."""
    ranks = verbs(launch, 2, HETCOLL_INTEGRITY=integrity)
    least = 1.0 if integrity == "off" else 0.9
    ranks.run(move_everywhere, least)
    ranks.run(move_everywhere, least)


def exchanged(comm: hetcoll.Communicator, x: np.ndarray) -> np.ndarray:
    """The sum of both ranks' `x`, each of which was put into the other's window in pieces."""
    kept = vars(comm).setdefault("kept for suite_windows", {})
    if not kept:
        kept["theirs"] = np.zeros_like(x)
        kept["window"], kept["calls"] = comm.window(kept["theirs"]), 0
    window, theirs = kept["window"], kept["theirs"]
    kept["calls"] += 1
    at = np.arange(0, x.size, PIECE)
    window.put(x, 1 - comm.rank, at, src_offset=at, count=np.minimum(PIECE, x.size - at), signal=0)
    window.wait_signal(0, kept["calls"])
    found: np.ndarray = x + theirs
    comm.barrier()  # the other has its sum
    return found


@pytest.mark.parametrize(("cables", "shows"), [(["veth2"], "lost_rails"), (["veth1", "veth2"], "tcp_bytes")])
def test_cables_are_cut(launch: Launch, cables: list[str], shows: str) -> None:
    """One, or all."""
    for outcome in in_the_middle(verbs(launch, 2, **PROMPT), cut_and_mend(*cables, shows=shows), exchanged):
        assert outcome.error is None, outcome.trace


def put_until_refused(comm: hetcoll.Communicator, folder: Path) -> str:
    """Rank 0 puts on and on. Rank 1 is told to close its window meanwhile: from then on nothing writes there."""
    mine = np.zeros(PIECE * PIECES, np.float32)
    window = comm.window(mine)
    if comm.rank == 0:
        src, at = np.ones_like(mine), np.arange(PIECES) * PIECE
        try:
            while True:
                src += 1
                window.put(src, 1, at, src_offset=at, count=PIECE, signal=0)
        except ClosedError as error:
            comm.barrier()
            return str(error)
        except PeerLostError as error:
            return f"lost {error.rank}"
    window.wait_signal(0, 3)
    (folder / "under way").touch()
    try:
        wait_until(lambda: (folder / "stopped").exists(), 60)
        with elapsed() as took:
            window.close()
        closed = mine.copy()
        (folder / "closed").write_text(str(took[0]))
        comm.barrier()
        assert (mine == closed).all(), "written after it was closed"
        return f"lost_rails {comm.counters()['lost_rails']}"
    except PeerLostError as error:
        return f"lost {error.rank}"


@pytest.mark.parametrize("stops", [False, True])
def test_a_window_is_closed_while_it_is_written(launch: Launch, tmp_path: Path, stops: bool) -> None:
    """By a rank that goes on, which stops by itself; and by one that is stopped, which nobody waits for."""
    ranks = verbs(launch, 2, **PROMPT)
    ranks.start(put_until_refused, tmp_path)
    wait_until((tmp_path / "under way").exists, 60)
    if stops:
        ranks.signal(0, signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    try:
        wait_until((tmp_path / "closed").exists, 30)
    finally:
        ranks.signal(0, signal.SIGCONT)
    writer, owner = ranks.finish(60)
    assert writer.error is None, writer.trace
    assert owner.error is None, owner.trace
    assert "the window was closed by its rank" in writer.value
    assert stops or owner.value == "lost_rails 0", owner.value


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_is_killed_while_it_writes_or_is_written(launch: Launch, tmp_path: Path, dies: int) -> None:
    ranks = verbs(launch, 2, **PROMPT)
    ranks.start(put_until_refused, tmp_path)
    wait_until((tmp_path / "under way").exists, 60)
    ranks.kill(dies)
    (tmp_path / "stopped").touch()
    (outcome,) = ranks.finish(60, only=[1 - dies])
    assert outcome.error is None, outcome.trace
    assert outcome.value == f"lost {dies}"

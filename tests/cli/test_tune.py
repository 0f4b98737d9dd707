"""`hetcoll tune` measures each algorithm, keeps what was found, and later jobs choose by it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from patience import DEADLINE
from ranks import Ranks
from thorough import parametrize

import hetcoll
from hetcoll import calls
from hetcoll.cli import main, tune, tuning
from hetcoll.config.env import configuration, environment
from hetcoll.links.tuned import place
from hetcoll.plan import tuned, tuner
from hetcoll.plan.machine import Network
from hetcoll.types import ROOTED, Collective

ONE_WAY_INSIDE = (Collective.ALLTOALL, Collective.GATHER, Collective.SCATTER)  # inside a host
KINDS_INSIDE = [kind for kind in tuning.KINDS if kind not in ONE_WAY_INSIDE]


BARRIER = 3.0  # seconds, by the clock below
FEW = (8, 64 << 10)


def _hetcoll(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetcoll", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=os.environ | env, check=False)


def measure(comm: hetcoll.Communicator, sizes: Sequence[int]) -> list[tuned.Measured]:
    """With a clock by which the algorithms of longer names are faster: what they are bound to is what runs."""

    def clock(child: hetcoll.Communicator, kind: Collective, nbytes: int, _: object) -> float:
        tuning._call(child, kind, nbytes)()
        if kind is Collective.BARRIER:
            return BARRIER
        name = child.explain(kind.label, nbytes).algorithm
        return (nbytes + 1) / len(name) + BARRIER * (kind in ROOTED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_time", clock)
        patch.setattr(tuning, "_TURNS", 2)  # each takes as long by that clock
        return tuning.measure(comm, sizes)


@parametrize("transport", ["shm", "tcp"], first=1)
def test_every_algorithm_that_may_be_chosen_is_measured(pool: Callable[..., Ranks], transport: str) -> None:
    found = pool(3, HETCOLL_TRANSPORT=transport, HETCOLL_TUNED="none").run(measure, FEW)
    assert found[0] == found[1] == found[2]
    assert [one.collective for one in found[0]] == [*KINDS_INSIDE]
    for one in found[0]:
        assert one.placed.hosts == (3,)
        assert one.placed.transport == transport
        assert len(one.seconds) > 1
        for name, seconds in one.seconds.items():
            assert seconds == pytest.approx([(nbytes + 1) / len(name) for nbytes in FEW]), "without a barrier"
        longest = max(map(len, one.seconds))
        assert [len(name) for _, name in one.rows()] == [longest]


def between(comm: hetcoll.Communicator) -> tuple[list[tuned.Measured], tuple[tuned.Between, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_MESSAGES", 4)  # so many are a network's times, too, which here may be any
        return measure(comm, (8,)), tuning.networks(comm)


def test_among_hosts_all_to_alls_and_the_network_are_measured(pool: Callable[..., Ranks]) -> None:
    found = pool(4, HETCOLL_HOST_ID=("a", "a", "b", "b"), HETCOLL_TUNED="none").run(between)
    times = {one.collective: one for one in found[0][0]}
    assert [*times] == list(tuning.KINDS)
    assert set(times[Collective.ALLTOALL].seconds) == {"pairwise", "aggregated"}
    assert set(times[Collective.GATHER].seconds) == set(times[Collective.SCATTER].seconds) == {"direct", "led"}
    [network], *others = [networks for _, networks in found]
    assert network.hosts == (2, 2)
    assert network.transport == "shm and tcp"
    assert 0 < network.network.latency < DEADLINE
    assert 0 < network.network.overhead < DEADLINE
    assert 1e5 < network.network.bandwidth < 1e12
    assert others == [()] * 3


def network_of(comm: hetcoll.Communicator) -> tuple[str, str]:
    found = comm.explain("barrier", 0)
    return found.algorithm, found.network


def test_jobs_start_from_the_measured_network(launch: Callable[..., Ranks], tmp_path: Path) -> None:
    """All choose by rank 0's, also what was not timed."""
    file = tmp_path / "network.toml"
    hosts, names = (1,) * 8, tuple("abcdefgh")
    for latency, algorithm in ((500e-6, "direct"), (1e-6, "dissemination")):
        network = tuned.Between(hosts, "tcp", Network(latency, 3e-6, 1e9))
        file.write_text(tuned.write(tuned.Tuned(networks=(network,)), ["by hand"]))
        ranks = launch(8, HETCOLL_TUNED=(str(file), *["none"] * 7), HETCOLL_HOST_ID=names)
        told = f"network between hosts: 8 Gbit/s, {latency * 1e6:.3g} us a message and 3 us of work at either end"
        assert ranks.run(network_of) == [(algorithm, f"{told}, as measured")] * 8


REST = 2e-3  # seconds


def handed_on(comm: hetcoll.Communicator) -> float:
    """A call that goes from rank to rank, each of which rests before it has it."""

    def call() -> None:
        x = np.ones(1, np.uint8)
        if comm.rank > 0:
            comm.recv(x, comm.rank - 1)
            time.sleep(REST)
        if comm.rank < comm.size - 1:
            comm.send(x, comm.rank + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_call", lambda *_: call)
        return tuning._time(comm, Collective.BROADCAST, 8)


def test_rooted_calls_take_until_the_last_rank_has_it(pool: Callable[..., Ranks]) -> None:
    """In a row, whose first rank goes on at once, they would take one rest each."""
    for seconds in pool(4).run(handed_on):
        assert seconds > 2.5 * REST, "three of them"


def broadcast(comm: hetcoll.Communicator) -> tuple[str, str]:
    found = comm.explain("broadcast", 64)
    x = np.full(16, comm.rank, np.float32)
    assert comm._planner.on_host(calls.broadcast(comm.rank, comm.size, x, 1)).algorithm.name == found.algorithm
    comm.broadcast(x, 1)
    assert (x == 1).all()
    return found.algorithm, found.reason


def test_rooted_collectives_are_chosen_by_times(launch: Callable[..., Ranks], tmp_path: Path) -> None:
    """And by the model where a file was written before they were measured."""
    (plain, _), *_ = launch(3, HETCOLL_TUNED="none").run(broadcast)
    other = "ring" if plain != "ring" else "direct"
    placed = tuned.Placed((3,), min(3, len(os.sched_getaffinity(0))), "shm")
    times: dict[str, tuple[float, ...]] = {plain: (9e-6,), other: (1e-6,)}
    by_hand = tuned.Measured(Collective.BROADCAST, placed, (64,), times)
    before = tuned.Measured(Collective.ALLREDUCE, placed, (64,), {"ring": (1e-6,)})
    file = tmp_path / "times.toml"
    for one, name, told in ((by_hand, other, f"measured with 64 bytes: {other} 1.0 us ("), (before, plain, "before ")):
        file.write_text(tuned.write(tuned.Tuned((one,)), ["by hand"]))
        for chosen, reason in launch(3, HETCOLL_TUNED=(str(file), "none", "none")).run(broadcast):
            assert chosen == name
            assert reason.startswith(told)


def test_turns_that_differ_are_refused() -> None:
    tuning._check_alike([[[1.0] * 8, [9.0] * 8, [1.4] * 8]], "2 ranks over shm")
    with pytest.raises(hetcoll.HetcollError, match=r"50% of what 2 ranks over shm measured .* Nothing was kept"):
        tuning._check_alike([[[1.0] * 8, [9.0] * 8, [1.0, 1.6] * 4]], "2 ranks over shm")


def chosen(comm: hetcoll.Communicator) -> tuple[str, str]:
    found = comm.explain("allreduce", 64)
    call = calls.allreduce(comm.rank, comm.size, np.ones(16, np.float32), None, "sum")
    assert comm._planner.on_host(call).algorithm.name == found.algorithm, "what runs is what is told"
    return found.algorithm, found.reason


def asked_for(comm: hetcoll.Communicator) -> str:
    return comm.explain("allreduce", 64).reason


def compressed(comm: hetcoll.Communicator) -> tuple[str, str]:
    found = comm.explain("allreduce", 64, compress="bf16")
    return found.algorithm, found.reason


def test_what_compresses_is_not_chosen_by_times(launch: Callable[..., Ranks], tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    one = tuned.Measured(Collective.ALLREDUCE, tuned.Placed((1, 1), min(1, cores), "tcp"), (64,), {"ring": (1e-6,)})
    file = tmp_path / "times.toml"
    file.write_text(tuned.write(tuned.Tuned((one,)), ["by hand"]))
    ranks = launch(2, HETCOLL_TUNED=str(file), HETCOLL_HOST_ID=("a", "b"))
    assert [name for name, _ in ranks.run(chosen)] == ["ring"] * 2
    assert all(reason.endswith("the one that compresses") for _, reason in ranks.run(compressed))


def test_jobs_choose_by_rank_0s(launch: Callable[..., Ranks], tmp_path: Path) -> None:
    (plain, reason), *_ = launch(2, HETCOLL_TUNED="none").run(chosen)
    assert "measured" not in reason
    other = "ring" if plain != "ring" else "direct"
    seconds = {plain: (9e-6,), other: (1e-6,)}
    cores = min(2, len(os.sched_getaffinity(0)))
    one = tuned.Measured(Collective.ALLREDUCE, tuned.Placed((2,), cores, "shm"), (64,), seconds)
    text = tuned.write(tuned.Tuned((one,)), ["by hand"])
    both = rf"measured with 64 bytes: {other} 1\.0 us \([\d.]+ predicted\), {plain} 9\.0 us \([\d.]+ predicted\), "
    file = tmp_path / "times.toml"
    file.write_text(text)
    for name, reason in launch(2, HETCOLL_TUNED=(str(file), "none")).run(chosen):
        assert name == other
        assert re.match(both, reason)
    assert launch(2, HETCOLL_TUNED=str(file), HETCOLL_ALGO=plain).run(asked_for) == ["asked for"] * 2
    cache = tmp_path / "cache"
    cache.mkdir()
    Path(place(str(cache))).write_text(text)
    for name, reason in launch(2, HETCOLL_TUNED="auto", HETCOLL_CACHE=str(cache)).run(chosen):
        assert name == other
        assert re.match(both, reason)


def test_a_file_that_is_wrong_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "times.toml"
    one = tuned.Measured(Collective.REDUCE, tuned.Placed((2,), 2, "shm"), (8,), {"ring": (1.0,)})
    file.write_text(tuned.write(tuned.Tuned((one,)), ()).replace("hosts = [2]", "hosts = 2"))
    done = _hetcoll("explain", "reduce", "8", "-n", "1", HETCOLL_TUNED=str(file))
    assert done.returncode == 1
    assert f"{file}, line 4: measured.1.hosts: wanted a list, got 2" in done.stderr
    done = _hetcoll("explain", "reduce", "8", "-n", "1", HETCOLL_TUNED=str(tmp_path / "none.toml"))
    assert "HETCOLL_TUNED: wanted a readable file, or none, got " in done.stderr


def test_each_kind_of_memory_keeps_its_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "numbers.toml"
    islands = (tuned.Island("cuda", ((0, 1),)), tuned.Island("hip", ((1, 1),)))
    placed = tuned.Placed((1, 1), 1, "tcp")
    names = tuner.lines(Collective.ALLREDUCE, placed.topology)
    host = tuned.Measured(Collective.ALLREDUCE, placed, (8,), dict.fromkeys(names, (1e-6,)))
    gpus = host._replace(placed=tuned.Placed((1, 1), 1, "staged-tcp", islands))
    network = tuned.Between((1, 1), "tcp", Network(5e-6, 3e-6, 1e9))
    slower = network._replace(network=Network(9e-6, 3e-6, 1e9))
    tune._finish(tuned.Tuned((host,), (network,)), file)
    tune._finish(tuned.Tuned((gpus,)), file)
    assert file.read_text().endswith(tuned.write(tuned.Tuned((gpus, host), (network,)), ()))
    again = host._replace(seconds=dict.fromkeys(names, (3e-6,)))
    tune._finish(tuned.Tuned((again,), (slower,)), file)
    assert file.read_text().endswith(tuned.write(tuned.Tuned((again, gpus), (slower,)), ()))


@pytest.mark.calm
def test_what_is_chosen_is_judged_by_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's choices and those of the file until now, over the fastest."""
    shape, sizes = tuned.Placed((2,), 2, "shm"), (8, 1 << 20)
    rows = tuner.table(Collective.ALLGATHER, shape.topology)
    small, large = (tuner.look_up(rows, nbytes) for nbytes in sizes)
    other = next(name for name in tuner.lines(Collective.ALLGATHER, shape.topology) if name not in (small, large))
    seconds = dict.fromkeys({small, large}, (1.0, 1.0)) | {other: (0.5, 1.0)}
    first = tuned.Measured(Collective.ALLGATHER, shape, sizes, seconds)
    again = first._replace(seconds=dict.fromkeys({small, large}, (1.0, 1.0)) | {other: (2.0, 2.0)})
    for found, by_model, by_kept in ((first, (2.0, 1.0), ()), (again, (1.0, 1.0), (2.0, 2.0))):
        tune._finish(tuned.Tuned((found,)), tmp_path / "numbers.toml")
        *_, total, _, _ = capsys.readouterr().out.splitlines()
        assert tune._spell(by_model) in total
        assert tune._spell(by_kept) in total
    assert tune._spell((2.0, 1.0)) == "1.414  2.00"


def test_the_command(tmp_path: Path) -> None:
    """On a machine that is busy all the same it says so, and keeps nothing. A size that is named twice is measured
    once."""
    done = _hetcoll("tune", "-n", "2", "--transport", "shm", "--sizes", "64K", "65536", HETCOLL_CACHE=str(tmp_path))
    files = list(tmp_path.glob("tuned-*.toml"))
    if done.returncode != 0:
        assert "wanted a machine that does nothing else. Nothing was kept" in done.stderr
        assert files == []
        return
    assert files == [Path(place(str(tmp_path)))]
    measured = tuned.read(files[0].read_text(), "file").times
    assert [one.collective for one in measured] == [*KINDS_INSIDE]
    assert {one.nbytes for one in measured} == {(64 << 10,)}
    assert all(one.rows()[-1][0] == tuner.UNLIMITED for one in measured)
    assert "HETCOLL_TUNED=none goes without it" in done.stdout


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        (("tune", "-n", "1"), {}, "wanted 2 to 16 ranks, got 1"),
        (("tune", "-n", "two"), {}, "wanted 2 to 16 ranks, got two"),
        (("tune", "--sizes", "0"), {}, "--sizes: wanted 1 byte or more, got 0"),
        (("tune",), {"HETCOLL_CACHE": "none"}, "-o: wanted a file to write to, since nothing is kept"),
        (("tune", "-o", "/"), {}, "-o: wanted a file to write to, got '/': "),
        (("tune", "-o", "/dev/null/numbers"), {}, "-o: wanted a file to write to, got '/dev/null/numbers': "),
        (("tune", "-o", __file__), {}, f"ArgumentError: {__file__}: "),
    ],
)
def test_wrong_words(
    words: tuple[str, ...],
    env: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    try:
        read_again()
        assert status_of(words) in (1, 2)
    finally:
        read_again()
    assert told in capsys.readouterr().err


def status_of(words: Sequence[str]) -> object:
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


def read_again() -> None:
    """The environment, which is else read once a process."""
    environment.cache_clear()
    configuration.cache_clear()

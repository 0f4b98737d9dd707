"""`hetcoll top`: what it counts, whom it names, and that the job does not notice it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from losing import found, lose
from patience import PATIENCE
from ports import free_port
from ranks import Ranks, wait_until

import hetcoll
from hetcoll.cli.top import text
from hetcoll.config.env import Config
from hetcoll.errors import ArgumentError, AuthenticationError, InitError
from hetcoll.rendezvous.control import WORLD
from hetcoll.tools.observing import Observer, Told, observe
from hetcoll.tools.rates import WINDOW, Rates, Watch

Launch = Callable[..., Ranks]
COUNT, ROUNDS = 1000, 50


@contextlib.contextmanager
def looking_on(ranks: Ranks) -> Iterator[Observer]:
    observer = observe(str(ranks.pid(0)), Config())
    try:
        yield observer
    finally:
        observer.close()


TOP = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
from hetcoll.cli import main
sys.exit(main(["top", *sys.argv[1:]]))
"""


def command(*words: str, **variables: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")} | variables
    return subprocess.Popen([sys.executable, "-c", TOP, *words], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


# What is counted.


def to_the_next(comm: hetcoll.Communicator) -> None:
    data, into = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    for _ in range(ROUNDS):
        comm.sendrecv(data, (comm.rank + 1) % comm.size, into, (comm.rank - 1) % comm.size)


def reductions(comm: hetcoll.Communicator) -> None:
    for _ in range(ROUNDS):
        comm.allreduce(np.ones(COUNT, np.float32))


def only_group(told: Told) -> dict[str, Any]:
    (group,) = told.answer["groups"]
    assert isinstance(group, dict)
    return group


def test_counts_are_those_of_what_was_called(launch: Launch) -> None:
    ranks = launch(3)
    with looking_on(ranks) as observer:
        ranks.run(reductions)
        before = [only_group(each) for each in observer.activity(10)]
        assert [group["calls"] for group in before] == [ROUNDS] * 3
        assert all(group["spent"] > 0 and group["waits"] == 0 and group["what"] == "" for group in before)
        ranks.run(to_the_next)
        after = observer.activity(10)
        assert [each.rank for each in after] == [0, 1, 2]
        assert [each.answer["pid"] for each in after] == [ranks.pid(rank) for rank in range(3)]
        for rank, (then, each) in enumerate(zip(before, after, strict=True)):
            now = only_group(each)
            assert (now["calls"], now["messages"], now["rank"]) == (ROUNDS, ROUNDS, rank)
            grown = {int(p): n - then["edges"].get(p, 0) for p, n in now["edges"].items()}
            assert {peer: n for peer, n in grown.items() if n} == {(rank + 1) % 3: ROUNDS * COUNT * 4}


def part(comm: hetcoll.Communicator) -> None:
    half = comm.split(comm.rank % 2)
    assert half is not None
    half.allreduce(np.ones(COUNT, np.float32))
    half.close()
    comm._kept = comm.split(comm.rank % 2)  # type: ignore[attr-defined]


def close_part(comm: hetcoll.Communicator) -> None:
    comm._kept.close()  # type: ignore[attr-defined]


def test_parts_of_the_job_are_told_while_they_are_open(launch: Launch) -> None:
    ranks = launch(4)
    with looking_on(ranks) as observer:
        ranks.run(part)
        told = observer.activity(10)
        assert [len(each.answer["groups"]) for each in told] == [2] * 4
        ranks.run(close_part)
        assert [len(each.answer["groups"]) for each in observer.activity(10)] == [1] * 4


# Who is slow, or silent.


def with_a_late_rank(comm: hetcoll.Communicator, at: str) -> None:
    more = np.ones(1, np.int32)
    while more[0]:
        if comm.rank == 1:
            time.sleep(0.01)
        more[0] = not Path(at).exists()
        comm.allreduce(more, op="min")


def look_until(observer: Observer, watch: Watch, found: Callable[[Rates], object]) -> Rates:
    def look() -> Rates | None:
        time.sleep(0.05)
        watch.add(observer.activity(1.0))
        rates = watch.rates()
        return rates if found(rates) else None

    rates = wait_until(look, 30)
    assert isinstance(rates, Rates)
    return rates


def test_the_slowest_rank_and_one_that_is_stopped_are_named(launch: Launch, tmp_path: Path) -> None:
    ranks, at = launch(3), tmp_path / "enough"
    ranks.start(with_a_late_rank, str(at))
    with looking_on(ranks) as observer:
        watch = Watch()
        rates = look_until(observer, watch, lambda rates: rates.slowest and rates.slowest.window > 0.5)
        assert rates.slowest is not None
        assert rates.slowest.rank == "1"
        assert rates.slowest.own is not None
        assert rates.slowest.others is not None
        assert rates.slowest.own < 0.5 * rates.slowest.others
        assert "slowest of the last" in text(rates)
        ranks.signal(2, signal.SIGSTOP)
        started = time.monotonic()
        stopped = look_until(observer, watch, lambda rates: rates.ranks[2].silent)
        assert time.monotonic() - started < 20  # a look waits for one second, however many are stopped
        assert [rank.silent for rank in stopped.ranks] == [False, False, True]
        assert re.search(rf"\n +2 \S+ +{ranks.pid(2)} .* does not answer: stopped", text(stopped))
        call = "in allreduce(int32, count=1, op=min), test_top.py:"
        look_until(observer, watch, lambda rates: call in rates.ranks[0].state)
        ranks.signal(2, signal.SIGCONT)
        look_until(observer, watch, lambda rates: not rates.ranks[2].silent)
    at.touch()
    assert not any(outcome.problem() for outcome in ranks.finish())


def test_a_stopped_store_is_told_and_waited_for(launch: Launch) -> None:
    ranks = launch(2)
    process = command(str(ranks.pid(0)), "--interval", "0.3", "--json", "-")
    try:
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert (line["problem"], len(line["ranks"])) == ("", 2)
        ranks.signal(0, signal.SIGSTOP)
        wait_until(lambda: "rank 0 is stopped" in json.loads(process.stdout.readline())["problem"], 30)
        ranks.signal(0, signal.SIGCONT)
        wait_until(lambda: not json.loads(process.stdout.readline())["problem"], 30)
    finally:
        ranks.signal(0, signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE * 30)
    assert (process.returncode, errors) == (0, "")  # Ctrl-C is how one ends it


def without_rank_0(comm: hetcoll.Communicator, at: str) -> None:
    comm.barrier()
    lose(comm, 0)
    with_a_late_rank(comm.shrink(), at)


def test_it_follows_the_store_where_rank_0_dies(launch: Launch, tmp_path: Path) -> None:
    ranks, at = launch(3), tmp_path / "enough"
    process = command(str(ranks.pid(0)), "--interval", "0.3", "--json", "-")
    try:
        assert process.stdout is not None
        assert len(json.loads(process.stdout.readline())["ranks"]) == 3
        ranks.start(without_rank_0, str(at))

        def look() -> bool:
            line = json.loads(process.stdout.readline())
            pids = [rank["pid"] for rank in line["ranks"] if not rank["silent"]]
            return pids == [ranks.pid(1), ranks.pid(2)] and bool(line["collectives"])

        wait_until(look, 30)
    finally:
        at.touch()
        process.kill()
        process.communicate(timeout=PATIENCE * 30)
    assert set(found(ranks, 0)) == {1, 2}


# The job does not notice.


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_goes_on_and_ends_without_its_observer(launch: Launch, number: signal.Signals) -> None:
    ranks = launch(2, HETCOLL_LINGER="60")
    process = command(str(ranks.pid(0)), "--interval", "0.1", "--json", "-")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        ranks.run(reductions)
        assert survey_of(ranks) == [ROUNDS] * 2
        end(ranks)  # within seconds: rank 0 does not linger for who looks on
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE * 30)


def end(ranks: Ranks) -> None:
    """As programs that end without closing anything."""
    for rank in reversed(range(ranks.size)):
        ranks.end(rank)


def survey_of(ranks: Ranks) -> list[int]:
    with looking_on(ranks) as observer:
        return [only_group(each)["calls"] for each in observer.activity(10)]


def test_it_ends_with_the_job(launch: Launch) -> None:
    ranks = launch(2)
    process = command(str(ranks.pid(0)), "--interval", "0.2")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("2 ranks on 1 host")
        end(ranks)
        out, errors = process.communicate(timeout=PATIENCE * 30)
    finally:
        process.kill()
    assert out.endswith("the job has ended\n"), (out, errors)
    assert (process.returncode, errors) == (0, "")


# Which job.


def test_a_job_that_is_not_there_is_said(launch: Launch) -> None:
    ranks = launch(2, join=False)
    port = free_port()
    with pytest.raises(InitError, match=rf"127\.0\.0\.1:{port}: connection refused"):
        observe(f"127.0.0.1:{port}", Config())
    with pytest.raises(InitError, match=f"process {ranks.pid(1)} is no rank 0 of a job here"):
        observe(str(ranks.pid(1)), Config())
    for wrong in ("gpu07", "host:0", "host:99999", ":1"):
        with pytest.raises(ArgumentError, match="JOB: wanted HOST:PORT of rank 0"):
            observe(wrong, Config())


def by_hand(job: Any, port: int) -> str:
    os.environ.update(RANK=str(job.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from hetcoll.config import env

    env.environment.cache_clear()
    job.comm = hetcoll.init(timeout=30)
    return str(job.comm.size)


@pytest.mark.parametrize("secret", ["", "the job's own"])
def test_a_job_is_found_by_its_port_with_its_secret(launch: Launch, secret: str) -> None:
    variables = {"HETCOLL_SECRET": secret} if secret else {}
    ranks = launch(2, join=False, **variables)
    port = free_port()
    assert ranks.run(by_hand, port) == ["2", "2"]
    place = f"127.0.0.1:{port}"
    observer = observe(place, Config(secret=secret.encode() or None))
    assert [(each.group, each.rank) for each in observer.activity(10)] == [(WORLD, 0), (WORLD, 1)]
    observer.close()
    if secret:
        with pytest.raises(AuthenticationError, match="different secrets"):
            observe(place, Config(secret=b"another"))
        with pytest.raises(AuthenticationError, match="rank 0 has a HETCOLL_SECRET and this process has none"):
            observe(place, Config())
        process = command(place, "--once", HETCOLL_SECRET="another")
        _, errors = process.communicate(timeout=PATIENCE * 30)
        assert process.returncode == 1
        assert "hetcoll top: AuthenticationError: the store of rank 0 at 127.0.0.1" in errors
    end(ranks)  # rank 0 has a store more than the test's other jobs


# Rates, from answers that were made up.


def told(rank: int, clock: float, **values: Any) -> Told:
    group = {"name": "j g", "rank": rank, "size": 3, "calls": 0, "messages": 0, "spent": 0.0, "waits": 0.0, "what": "",
             "site": "", "state": "", "failed": "", "sent": 0, "edges": {}, "on": "h"} | values  # fmt: skip
    return Told(WORLD, rank, {"clock": clock, "pid": 100 + rank, "host": "h", "program": "x.py", "groups": [group]})


def rates_of(*looks: list[Told]) -> Rates:
    watch = Watch()
    for look in looks:
        watch.add(look)
    return watch.rates()


def test_rates_are_by_each_ranks_own_clock() -> None:
    """A look that came late to one rank does not make it faster."""
    first = [told(0, 10.0), told(1, 500.0)]
    second = [
        told(0, 12.0, calls=20, sent=4_000, edges={"1": 4_000}),
        told(1, 504.0, calls=40, messages=8, sent=2_000, edges={"0": 2_000}),
    ]
    rates = rates_of(first, second)
    assert (rates.collectives, rates.messages) == (10.0, 2.0)
    assert [(edge.source, edge.destination, edge.sent) for edge in rates.edges] == [("0", "1", 2000), ("1", "0", 500)]
    assert rates_of(first).collectives is None


def test_who_is_late_is_late_in_the_last_minute_only() -> None:
    def look(clock: float, spent: tuple[float, float, float]) -> list[Told]:
        return [told(rank, clock, calls=int(clock), spent=spent[rank]) for rank in range(3)]

    late = rates_of(look(0, (0, 0, 0)), look(50, (45, 2, 46))).slowest
    assert late is not None
    assert (late.rank, late.window, late.others, late.own) == ("1", 50, 45.5, 2)
    watch = Watch()
    for clock in range(0, 200, 5):  # rank 1 was late in the first 50 seconds, and rank 2 is a little now
        watch.add(look(clock, (min(clock, 50) + clock * 0.1, clock * 0.1, min(clock, 50) + clock * 0.05)))
    late = watch.rates().slowest
    assert late is not None
    assert (late.rank, late.window) == ("2", WINDOW)
    assert rates_of(look(0, (0, 0, 0)), look(50, (4, 4.1, 4.2))).slowest is None


def test_on_gpus_the_slowest_is_who_is_behind() -> None:
    def look(clock: float, *calls: int) -> list[Told]:
        return [told(rank, clock, calls=n, spent=None) for rank, n in enumerate(calls)]

    late = rates_of(look(0, 9, 9, 9), look(2, 90, 60, 91)).slowest
    assert late is not None
    assert (late.rank, late.behind, late.own, late.others) == ("1", 30, None, None)
    assert rates_of(look(0, 9, 9, 9), look(2, 90, 89, 90)).slowest is None


def test_who_failed_starts_or_has_gone() -> None:
    looks = (
        [told(0, 0.0), told(1, 0.0), Told(WORLD, 2, [0, {}])],
        [told(0, 1.0, failed="rank 1 was lost"), Told(WORLD, 2, [0, {}])],
    )
    rates = rates_of(*looks)
    assert [(rank.rank, rank.failed, rank.silent) for rank in rates.ranks] == [("0", True, False), ("2", False, False)]
    assert rates.ranks[1].state == "no communicator is open"
    assert json.loads(json.dumps(rates.document()))["schema"] == 1


def test_of_many_ranks_those_that_stand_out_are_shown() -> None:
    def look(clock: float) -> list[Told]:
        rows = [told(rank, clock, spent=clock * (0.2 if rank == 700 else 0.9)) for rank in range(1000)]
        rows[500] = rows[500]._replace(answer=None) if clock else rows[500]
        return rows

    shown = text(rates_of(look(0), look(10)), most=5).splitlines()
    at = next(number for number, line in enumerate(shown) if line.startswith("  rank"))
    assert [line.split()[0] for line in shown[at + 1 : at + 3]] == ["500", "700"]
    assert shown[at + 6] == "       and 995 more"
    assert max(map(len, shown)) <= 120


def test_a_line_of_the_program_is_not_cut_where_the_call_can_be() -> None:
    waits = {"what": "allreduce(float64, count=262144, op=sum)", "site": "/home/me/train.py:17", "waits": 3.0}
    rates = rates_of([told(0, 0.0), told(1, 0.0)], [told(0, 1.0, **waits), told(1, 1.0, failed="x" * 100)])

    def rows(columns: int) -> list[str]:
        return [line for line in text(rates, columns=columns).splitlines() if " 100 " in line or " 101 " in line]

    assert rows(0)[0].endswith("  3.0 s in allreduce(float64, count=262144, op=sum), train.py:17")
    assert rows(0)[1].endswith("failed: " + "x" * 100)
    assert rows(100)[0].endswith("  3.0 s in allred..., train.py:17")
    assert rows(82)[0].endswith("  train.py:17")
    for columns in (60, 82, 100, 120):
        assert max(map(len, rows(columns))) <= columns
    assert [len(row) for row in rows(100)] == [100, 100]

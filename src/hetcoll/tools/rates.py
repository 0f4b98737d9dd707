"""What `hetcoll top` makes of a job's answers (`health.activity`): rates, bandwidth by edge, and the slowest rank.

A rank that the others wait for spends less time in collectives than they do, on any clock. So nobody needs to compare
clocks, and running calls need to tell nothing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from ..rendezvous.protocol.wire import WORLD
from .observing import Told

WINDOW = 60.0  # seconds over which the slowest rank is found
_LEAST = 0.01  # of the window: a rank that is later than that by less is not the slowest


class Process(NamedTuple):
    """A process of the job: a group of the store, and its rank there. In jobs that have lost none, that of all."""

    group: bytes
    rank: int

    @property
    def label(self) -> str:
        return str(self.rank) if self.group == WORLD else f"{self.rank} of {self.group.hex()[:6]}"


class _Seen(NamedTuple):
    """A communicator's answer at a time of its process's clock."""

    clock: float
    told: Mapping[str, Any]

    @property
    def inside(self) -> float | None:
        """Seconds that were spent in collectives, that which runs included; None where that is not seen."""
        spent = self.told["spent"]
        return None if spent is None else float(spent) + float(self.told["waits"])


@dataclass(frozen=True)
class RankRates:
    """A process in the last interval. Rates are a second, bytes where they are of data; `inside` is the part of the
    window that it spent in collectives. None: not known (yet), or not seen, on a GPU. `state`: what it does."""

    rank: str
    host: str
    pid: int
    collectives: float | None
    messages: float | None
    sent: float | None
    inside: float | None
    state: str
    silent: bool = False
    failed: bool = False


@dataclass(frozen=True)
class EdgeRates:
    """Bytes a second from one rank to another."""

    source: str
    destination: str
    sent: float


@dataclass(frozen=True)
class Slowest:
    """Whom the others waited for. In `window` seconds they spent `others` seconds in collectives, the middle one of
    them, and it spent `own`; where these are not seen (GPUs), None: then it has called `behind` collectives fewer."""

    rank: str
    window: float
    others: float | None
    own: float | None
    behind: int


@dataclass(frozen=True)
class Rates:
    """One look at a job. `collectives` counts each once, not for each rank; `messages` are calls that send or receive
    one, on all ranks."""

    ranks: list[RankRates]
    edges: list[EdgeRates]
    slowest: Slowest | None
    collectives: float | None
    messages: float | None
    sent: float | None
    hosts: int
    program: str

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {"schema": 1, **asdict(self)}


@dataclass
class _History:
    """Of one process: what it said last, and its communicators in the last minute, by name."""

    host: str = ""
    pid: int = 0
    program: str = ""
    silent: bool = True
    groups: dict[str, deque[_Seen]] = field(default_factory=dict)
    fresh: bool = False  # it answered twice in a row


class Watch:
    """Looks at a job again and again: `add` what it told, then `rates`."""

    def __init__(self) -> None:
        self._processes: dict[Process, _History] = {}

    def add(self, rows: Iterable[Told]) -> None:
        """The answers of one survey. Who is not in it has gone."""
        before, self._processes = self._processes, {}
        for row in rows:
            key = Process(row.group, row.rank)
            history = self._processes[key] = before.get(key, _History())
            told = row.answer if isinstance(row.answer, Mapping) and "groups" in row.answer else None
            history.fresh, history.silent = not history.silent and told is not None, row.answer is None
            if told is None:
                continue
            history.host, history.pid, history.program = told["host"], told["pid"], told["program"]
            groups: dict[str, deque[_Seen]] = {}
            for each in told["groups"]:
                seen = groups[each["name"]] = history.groups.get(each["name"], deque())
                seen.append(_Seen(told["clock"], each))
                while seen[-1].clock - seen[0].clock > WINDOW:
                    seen.popleft()
            history.groups = groups

    def rates(self) -> Rates:
        """What follows from all answers so far; rates are those of the last interval."""
        who = {(name, seen[-1].told["rank"]): key for key, name, seen in self._groups()}
        ranks = [self._rank(key, history) for key, history in self._processes.items()]
        edges = [
            EdgeRates(key.label, who[name, int(peer)].label, rate)
            for key, name, seen in self._groups()
            if self._processes[key].fresh
            for peer, rate in _edges(seen)
            if (name, int(peer)) in who
        ]
        merged: dict[tuple[str, str], float] = {}
        for edge in edges:
            at = edge.source, edge.destination
            merged[at] = merged.get(at, 0.0) + edge.sent
        by_name: dict[str, list[float]] = {}
        for key, name, seen in self._groups():
            if self._processes[key].fresh and (rate := _rate(seen, "calls")) is not None:
                by_name.setdefault(name, []).append(rate)
        programs = [history.program for history in self._processes.values() if history.program]
        return Rates(
            ranks=ranks,
            edges=sorted((EdgeRates(*at, sent) for at, sent in merged.items()), key=lambda edge: -edge.sent),
            slowest=self._slowest(),
            collectives=sum(map(median, by_name.values())) if by_name else None,
            messages=_sum(rank.messages for rank in ranks),
            sent=_sum(rank.sent for rank in ranks),
            hosts=len({seen[-1].told["on"] for _, _, seen in self._groups()}),
            program=programs[0] if programs else "",
        )

    def _groups(self) -> Iterable[tuple[Process, str, deque[_Seen]]]:
        for key, history in self._processes.items():
            for name, seen in history.groups.items():
                yield key, name, seen

    def _rank(self, key: Process, history: _History) -> RankRates:
        told = [seen[-1].told for seen in history.groups.values()]
        failed = next((each["failed"] for each in told if each["failed"]), "")
        if history.silent:
            state = "does not answer: stopped, cut off or busy"
        elif not told:
            state = "no communicator is open"
        else:
            state = f"failed: {failed}" if failed else next(filter(None, map(_spell_state, told)), "")
        known = history.groups.values() if history.fresh else ()
        inside = [part for seen in known if (part := _part_inside(seen)) is not None]
        return RankRates(
            rank=key.label,
            host=history.host,
            pid=history.pid,
            collectives=_sum(_rate(seen, "calls") for seen in known),
            messages=_sum(_rate(seen, "messages") for seen in known),
            sent=_sum(_rate(seen, "sent") for seen in known),
            inside=min(1.0, sum(inside)) if inside else None,
            state=state,
            silent=history.silent,
            failed=bool(failed),
        )

    def _slowest(self) -> Slowest | None:
        """The rank that others waited for longest, of all communicators; None where nobody was much later."""
        members: dict[str, list[tuple[Process, deque[_Seen]]]] = {}
        for key, name, seen in self._groups():
            members.setdefault(name, []).append((key, seen))
        found = [each for group in members.values() if len(group) > 1 and (each := _latest(group)) is not None]
        return max(found, key=lambda each: ((each.others or 0.0) - (each.own or 0.0), each.behind), default=None)


def _latest(group: Sequence[tuple[Process, deque[_Seen]]]) -> Slowest | None:
    """The slowest rank of one communicator. Who has not answered of late is taken at its last word: it was in no call
    since, or in the same one."""
    window = max(seen[-1].clock - seen[0].clock for _, seen in group)
    spent: dict[Process, float] = {}
    for key, seen in group:
        first, last = seen[0].inside, seen[-1].inside
        if first is not None and last is not None and window > 0:
            spent[key] = last - first
    if len(spent) == len(group):
        late = min(spent, key=spent.__getitem__)
        others = median(value for key, value in spent.items() if key != late)
        if others - spent[late] < _LEAST * window:
            return None
        return Slowest(late.label, window, others, spent[late], 0)
    calls = {key: int(seen[-1].told["calls"]) for key, seen in group}
    late = min(calls, key=calls.__getitem__)
    behind = int(median(value for key, value in calls.items() if key != late)) - calls[late]
    return Slowest(late.label, window, None, None, behind) if behind > 1 else None


def _spell_state(told: Mapping[str, Any]) -> str:
    """What a rank waits in, if it does."""
    if told["what"]:
        site = f", {os.path.basename(told['site'])}" if told["site"] else ""
        return f"{told['waits']:.1f} s in {told['what']}{site}"
    return str(told["state"])


def _rate(seen: Sequence[_Seen], name: str) -> float | None:
    """By how much a counter has risen a second since the last answer but one."""
    if len(seen) < 2 or seen[-1].clock <= seen[-2].clock:
        return None
    return (float(seen[-1].told[name]) - float(seen[-2].told[name])) / (seen[-1].clock - seen[-2].clock)


def _edges(seen: Sequence[_Seen]) -> Iterable[tuple[str, float]]:
    """The rates of the edges that both of the last answers tell of; of a new one all that it carried."""
    if len(seen) < 2 or seen[-1].clock <= seen[-2].clock:
        return
    now, before = seen[-1].told["edges"], seen[-2].told["edges"]
    for peer, nbytes in now.items():
        if peer not in before and int(seen[-2].told["sent"]) > sum(before.values()):
            continue  # it may have been there, and was left out
        rate = (nbytes - before.get(peer, 0)) / (seen[-1].clock - seen[-2].clock)
        if rate > 0:
            yield peer, rate


def _part_inside(seen: Sequence[_Seen]) -> float | None:
    first, last, window = seen[0].inside, seen[-1].inside, seen[-1].clock - seen[0].clock
    return None if first is None or last is None or window <= 0 else max(0.0, last - first) / window


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

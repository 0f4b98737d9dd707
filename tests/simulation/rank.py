"""What each rank of a simulated job does, as the library's communicators do it: it joins, goes through the steps with
the others, and goes on with those that are left where that fails. All that it is told is kept for the verdict.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hetcoll import lifetime
from hetcoll.config.env import Config
from hetcoll.config.launchers import Launch
from hetcoll.errors import CommunicationError, HetcollError, InitError, PeerLostError
from hetcoll.health.diagnosis import Diagnosis
from hetcoll.health.verdicts import Kind
from hetcoll.rendezvous import decisions
from hetcoll.rendezvous.bootstrap import bootstrap, get_unique_id
from hetcoll.rendezvous.protocol.columns import Telling
from hetcoll.rendezvous.protocol.news import Event, Handler, Query
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.protocol.wire import WORLD
from hetcoll.rendezvous.session import Session, coming_together

from . import threads
from .engine import Engine, Links, spell
from .job import ROUGH, Job, Step
from .kernel import World, process

TIMEOUT = 25.0  # seconds of a collective
PATIENCE = 60.0  # seconds that a call may take
_ROUNDS = 4  # that shrink() takes, at most
_STARTS = 60.0  # seconds in which rank 0 is found
_PORT = 29500
_STAYS = 200.0  # seconds
_CLOSING = 40.0  # in which what looks for a store, or waits for an answer, sees that nobody needs it any more
_LOOKS = 0.5


@dataclass
class History:
    """What the ranks of a job were told. Names are those of ranks: "0", or "+0" for the first newcomer."""

    answers: dict[Any, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Of what all of a group are to be told alike, by group and what: what each was told."""
    failures: dict[Any, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """The same for those that were told that it failed."""
    news: dict[str, list[tuple[float, bytes, Event]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, str] = field(default_factory=dict)
    """How each ended: "" well, or with which error."""
    ended: dict[str, float] = field(default_factory=dict)
    left_open: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    places: dict[bytes, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """Who is which rank of a group."""
    done: set[str] = field(default_factory=set)
    over: Callable[[], bool] = lambda: True
    """Whether all are done."""
    errors: dict[tuple[bytes, int], dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Of each collective, by group and step: with what it failed, or None, and how long it took."""
    mistake: tuple[bytes, int, int] | None = None
    """In which group a rank made the mistake of this job, at which step, and which rank."""
    stopped: str = ""
    """Who was the first successor, where that was stopped."""
    cuts: list[tuple[float, float, set[str]]] = field(default_factory=list)
    """Of the network: when each began, until when, and the machines on one side."""
    stores: set[str] = field(default_factory=set)
    """The machines of the store, and of its successors, when that was."""
    met: dict[str, float] = field(default_factory=dict)
    """When each first met all others."""
    again: dict[str, float] = field(default_factory=dict)
    """Newcomers that left, and came again, when; their goodbyes may be lost with a store."""
    times: dict[tuple[Any, str], float] = field(default_factory=dict)
    """When each was told an answer, or that it failed."""
    decided: dict[Any, float] = field(default_factory=dict)
    """When a store first knew the answer of an exchange, which who was stopped then hears much later."""


class LeaveError(Exception):
    """This rank goes before the others do."""


@dataclass
class Rank:
    """One of them. `told` is how newcomers find the job. `leaving`: it is to go."""

    job: Job
    history: History
    name: str
    told: dict[str, UniqueId]
    links: Links
    session: Any = None
    diagnosis: Any = None
    engine: Any = None
    group: bytes = WORLD
    rank: int = 0
    size: int = 0
    agreements: int = 0
    growths: int = 0
    leaving: bool = False

    def _handler(self, diagnosis: Diagnosis) -> Handler:
        def hear(group: bytes, event: Event) -> bytes | None:
            if not isinstance(event, Query):
                self.history.news[self.name].append((World.kernel.seconds, group, event))
                World.kernel.tell(process(), f"hears {event}")
            return diagnosis.on_event(group, event)

        return hear

    def run(self, rank: int | None) -> None:
        """All that its main thread does; of a newcomer where there is no rank."""
        try:
            if rank is None:
                self.come()
            else:
                self.work(rank)
            self.history.ends[self.name] = ""
        except LeaveError:
            self.history.ends[self.name] = "left"
        except HetcollError as error:
            self.history.ends[self.name] = f"{type(error).__name__}: {error}"
        lifetime._close_all()  # as at the end of a process
        here = process()
        World.kernel.tell(here, f"ends: {self.history.ends[self.name]}")
        self.history.ended[self.name] = World.kernel.seconds
        self.links.close(self.name)
        for _ in range(int(_CLOSING / _LOOKS)):  # so many seconds in which it is not stopped
            if here.files or len(here.tasks) > 1:
                threads.sleep(_LOOKS)
        if here.files or len(here.tasks) > 1:
            files = [f"{number}: {file.state}" for number, file in here.files.items()]
            self.history.left_open[self.name] = f"{files} {[task.name for task in here.tasks if task is not here.main]}"
        here.kill()

    # From the beginning.

    def work(self, rank: int) -> None:
        self.rank, self.size = rank, self.job.size
        self.history.places[WORLD][rank] = self.name
        with coming_together():
            self.session = Session(self._find(rank), rank, self.size, _STARTS)
        try:
            self._take_part(WORLD, rank, self.size)
            self._go_through(0)
            self._stay()
        finally:
            self.session.control.close()

    def _find(self, rank: int) -> UniqueId:
        config = Config(linger=0.0 if self.job.kind == "stop" else 30.0, init_timeout=_STARTS)
        if self.job.named:
            hosts = set(self.job.hosts)
            here = self.job.size if len(hosts) == 1 else None
            master = ("10.0.0.1", _PORT)
            launch = Launch(rank, self.job.size, rank, here, master, "hetcoll", "job")
            self.told["id"] = found = bootstrap(launch, config)
            return found
        if rank == 0:
            self.told["id"] = get_unique_id(config)
        until = threads.monotonic() + _STARTS
        while "id" not in self.told:
            if threads.monotonic() > until:
                raise InitError("rank 0 said nothing")
            threads.sleep(0.01)
        return self.told["id"]

    def come(self) -> None:
        """A newcomer."""
        until = threads.monotonic() + PATIENCE
        while True:
            while "id" not in self.told:
                if threads.monotonic() > until:
                    raise InitError("there is no job")
                threads.sleep(0.05)
            left = until - threads.monotonic()
            place = None
            with coming_together():
                self.session = Session(self.told["id"], 0, 1, max(left, 0.1), joins=True)
            try:
                place = decisions.come(self.session.control, max(until - threads.monotonic(), 0.0))
                self._take_part(place.group, place.rank, place.size)
                self._go_through(self._confirm(json.loads(place.told)))
                self._stay()
                return
            except PeerLostError:
                if not (place is not None or self.session.control.lost_early) or threads.monotonic() > until:
                    raise
                self.history.again.setdefault(self.name, World.kernel.seconds)
            finally:
                self.session.control.close()

    def _take_part(self, group: bytes, rank: int, size: int) -> None:
        """Be a rank of a group, with what a communicator has of it."""
        self.history.places[group][rank] = self.name
        diagnosis = Diagnosis(self.session, group, rank, size)
        diagnosis.questions.answers["who"] = lambda asker: f"{self.name} asked by {asker}"
        self.session.join(group, rank, size, self._handler(diagnosis), PATIENCE / 2)
        found = self.session.control.exchange(group, b"where", process().host.address.encode(), PATIENCE / 2)
        hosts = {rank: self.links.network.host(where.decode()) for rank, where in enumerate(found)}
        self.engine = Engine(self.links, self.name, process().host, group, rank, hosts)
        diagnosis.attach(self.engine, self.engine)
        self.group, self.rank, self.size, self.diagnosis = group, rank, size, diagnosis
        self.agreements = self.growths = 0

    def _stay(self) -> None:
        """Until all are done: who was stopped meanwhile, or cut off, comes to a job that is there."""
        self.history.done.add(self.name)
        until = World.kernel.now + _STAYS
        waits = self.job.kind in ROUGH or self.job.kind == "vanish"
        while waits and not self.history.over() and World.kernel.now < until:
            threads.sleep(1.0)
        self.session.leave(self.group)

    # Steps.

    def _go_through(self, number: int) -> None:
        """From step `number` on, in whatever group there is by then."""
        while number <= len(self.job.steps):
            if self.leaving:
                raise LeaveError
            self.told["id"] = self.session.control.unique_id
            try:
                if number == len(self.job.steps):
                    self._meet(b"end")
                    return
                step = self.job.steps[number]
                World.kernel.tell(process(), f"step {number}: {step} of {self.group[:6]!r}")
                getattr(self, f"_{step.what}")(step, b"%d" % number)
                number += 1
                if step.what == "grow":
                    number = self._confirm(number)
            except (CommunicationError, InitError) as error:
                World.kernel.tell(process(), f"fails: {error}")
                grew = number < len(self.job.steps) and self.job.steps[number].what in ("grow", "verdict")
                number = self._shrink(number + grew)  # who was to come may be dead

    def _told(self, key: tuple[Any, ...], answer: Any) -> None:
        self.history.answers[self.group, *key][self.name] = answer
        self.history.times[(self.group, *key), self.name] = World.kernel.seconds

    def _failed(self, key: tuple[Any, ...], error: HetcollError) -> None:
        self.history.failures[self.group, *key][self.name] = str(error)
        self.history.times[(self.group, *key), self.name] = World.kernel.seconds

    def _meet(self, tag: bytes) -> None:
        key = "exchange", tag
        try:
            found = self.session.control.exchange(self.group, tag, self.name.encode(), PATIENCE)
        except HetcollError as error:
            self._failed(key, error)
            raise
        self._told(key, tuple(found))
        self.history.met.setdefault(self.name, World.kernel.seconds)

    def _confirm(self, number: int) -> int:
        """Meet in a new group; from which step on."""
        telling = Telling([b"%d" % number])
        columns = self.session.control.exchange_columns(self.group, b"epoch", telling, PATIENCE)
        self._told(("exchange", b"epoch"), tuple(columns[0]))
        return max(int(each) for each in columns[0])

    def _exchange(self, _: Step, tag: bytes) -> None:
        self._meet(tag)

    def _keys(self, _: Step, tag: bytes) -> None:
        """Keys live as long as their store, so that who misses one does without."""
        control = self.session.control
        control.put(tag + self.name.encode(), self.name.encode(), PATIENCE)
        self._meet(tag)
        try:
            found = control.get(tag + self.name.encode(), PATIENCE if self.job.sound else 1.0)
        except InitError:
            if self.job.sound:
                raise
            return
        if found != self.name.encode():
            self.history.wrong.append(f"{self.name} got {found!r} for its own key")

    def _query(self, _: Step, tag: bytes) -> None:
        try:
            answers = self.diagnosis.questions.ask("who", 2.0)
        except InitError:  # the store is late
            if self.job.kind in ("calm", "reset"):
                raise
            answers = {}
        for rank, answer in answers.items():
            name = self.history.places[self.group].get(rank)
            if answer is None and self.job.kind in ("calm", "reset"):
                self.history.wrong.append(f"{self.name} asked, and {name} did not answer")
            if answer not in (None, f"{name} asked by {self.rank}"):
                self.history.wrong.append(f"{self.name} asked, and {name} said {answer!r}")
        self._meet(tag)

    def _call(self, _: Step, tag: bytes) -> None:
        """A collective. One rank may call another one, or come too late."""
        what = "allreduce()"
        if self.job.mistake == (self.name, int(tag)) and self.history.mistake is None:
            self.history.mistake = self.group, int(tag), self.rank
            if self.job.kind == "mismatch":
                what = "barrier()"
            else:
                threads.sleep(TIMEOUT + 5.0)
        began = World.kernel.now
        try:
            self.engine.run(what, self.diagnosis, TIMEOUT)
        except CommunicationError as error:
            self.history.errors[self.group, int(tag)][self.name] = spell(error), World.kernel.now - began
            raise
        self.history.errors[self.group, int(tag)][self.name] = None, World.kernel.now - began
        self._meet(tag)  # it may have failed for others, who do not come to agree() then

    def _agree(self, _: Step, tag: bytes) -> None:
        self.agreements += 1
        key, flag = ("agree", self.agreements), ~(1 << self.rank)
        try:
            found = decisions.agree(self.session.control, self.group, self.agreements, flag, PATIENCE)
        except HetcollError as error:
            self._failed(key, error)
            raise
        self._told(key, found)
        if found & ~flag:
            self.history.wrong.append(f"{self.name} agreed to {found:b} though it said {flag:b}")

    def _look(self, _: Step, tag: bytes) -> None:
        control = self.session.control
        control.exchange_columns(self.group, tag, Telling([b""], [], self.name.encode()), PATIENCE)
        found = control.look_up(self.group, tag, range(self.size), PATIENCE)
        self._told(("look", tag), tuple(sorted(found.items())))
        if self.job.few:  # who looks last may miss what a rank told that died with the store, and does not go on
            self._meet(b"looked " + tag)

    def _verdict(self, _: Step, tag: bytes) -> None:
        """All abort at about the same time: the first who does is the one whom all name."""
        self._meet(tag)
        self.diagnosis.post(Kind.ABORTED, self.rank, f"{self.name} aborts")
        error = self.diagnosis.error()
        self._told(("verdict",), spell(error))
        raise error

    def _pause(self, step: Step, _: bytes) -> None:
        threads.sleep(step.number)

    # Other groups.

    def _grow(self, step: Step, tag: bytes) -> None:
        self.growths += 1
        key, told = ("grow", self.growths), json.dumps(int(tag) + 1).encode()
        try:
            place = decisions.grow(self.session.control, self.group, self.growths, int(step.number), told, PATIENCE / 2)
        except HetcollError as error:
            self._failed(key, error)
            raise
        self._told(key, (place.group, place.size, place.told))
        before, places = self.group, self.history.places
        places[place.group] |= places[before]
        self._take_part(place.group, place.rank, place.size)
        self.session.leave(before)

    def _shrink(self, number: int) -> int:
        """Go on with those that are left; from which step on."""
        attempts, start = self.size, threads.monotonic()
        while True:
            roll, ranks = decisions.shrink(self.session.control, self.group, PATIENCE)
            self._told(("shrink", roll), tuple(ranks))
            if self.rank not in ranks:
                self.history.wrong.append(f"{self.name}, rank {self.rank}, goes on with {ranks}")
            before, name = self.group, self.group + b" shrink %d" % roll
            try:
                here = self.history.places[before]
                self.history.places[name] |= {new: here.get(old, "?") for new, old in enumerate(ranks)}
                old = self.group, self.rank, self.size, self.diagnosis, self.engine, self.agreements, self.growths
                self._take_part(name, ranks.index(self.rank), len(ranks))
                found = self.session.control.exchange(name, b"epoch", b"%d" % number, PATIENCE / 2)
                self._told(("exchange", b"epoch"), tuple(found))
            except (PeerLostError, InitError) as error:
                World.kernel.tell(process(), f"tries again: {error}")
                self.session.leave(name)
                self.group, self.rank, self.size, self.diagnosis, self.engine, self.agreements, self.growths = old
                attempts -= 1
                if attempts == 0 or threads.monotonic() > start + _ROUNDS * PATIENCE:
                    raise
                continue
            self.session.leave(before)
            return max(int(each) for each in found)

"""The store's state machine under random histories: every request is answered once, whatever dies in between."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from thorough import examples

from hetcoll.errors import spell_ranks
from hetcoll.rendezvous.protocol.wire import F64, I64, U32, Frame, Op, Status, pack, unpack
from hetcoll.rendezvous.store.groups import Groups

SIZE = 3
names = st.sampled_from([b"world", b"sub"])
tags = st.sampled_from([b"a", b"b"])
ranks = st.integers(0, SIZE - 1)
seconds = st.sampled_from([0.0, 1.0, 5.0])


class FakeMember:
    """What it was sent, with the questions that it has not answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: dict[bytes, int] = {}
        self.sent: list[tuple[Op, bytes, int, Status]] = []
        self.questions: list[bytes] = []
        self.asked: list[int] = []

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None:
        self.sent.append((op, body, request, status))
        if op is Op.ASK:
            self.questions.append(unpack(body)[3])


class Store(RuleBasedStateMachine):
    """Members come, ask for things, answer and go; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.groups = Groups(lambda: self.now)
        self.members: list[FakeMember] = []
        self.everyone: list[FakeMember] = []
        self.request = 0
        self.decisions: dict[int, tuple[int, str, int]] = {}  # by request: which decision of which group
        self.decided: dict[tuple[int, int, str], int] = {}
        self.kept: list[Any] = []  # so that ids stay theirs
        self.rolls: dict[int, tuple[object, int]] = {}  # by request: the group and the rank that asked who goes on

    def ask(self, who: int, op: Op, *fields: bytes) -> None:
        member = self.members[who % len(self.members)]
        self.request += 1
        member.asked.append(self.request)
        self.groups.handle(member, Frame(op, 0, self.request, pack(fields)))

    @rule()
    def connect(self) -> None:
        if len(self.members) < 6:
            self.members.append(FakeMember(f"member {len(self.everyone)}"))
            self.everyone.append(self.members[-1])

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), reason=st.sampled_from(["", "it died"]))
    def drop(self, who: int, reason: str) -> None:
        member = self.members.pop(who % len(self.members))
        self.groups.drop(member, reason)
        member.sent.clear()
        assert member.ranks == {}

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), wait=seconds)
    def survey(self, who: int, wait: float) -> None:
        self.ask(who, Op.SURVEY, b"?", F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, rank=ranks, wait=seconds, hosts=st.booleans())
    def join(self, who: int, name: bytes, rank: int, wait: float, hosts: bool) -> None:
        self.ask(who, Op.JOIN, name, U32.pack(rank), U32.pack(SIZE), b"\1" if hosts else b"\0", F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, words=st.binary(max_size=3))
    def leave(self, who: int, name: bytes, words: bytes) -> None:
        self.ask(who, Op.LEAVE, name, words)

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, tag=tags, wait=seconds)
    def exchange(self, who: int, name: bytes, tag: bytes, wait: float) -> None:
        self.ask(who, Op.EXCHANGE, name, tag, pack([b"blob"]), pack([b"host"]), b"mine", F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, tag=tags, rank=st.integers(0, 3))
    def look(self, who: int, name: bytes, tag: bytes, rank: int) -> None:
        self.ask(who, Op.LOOK, name, tag, U32.pack(rank))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, kind=tags)
    def post(self, who: int, name: bytes, kind: bytes) -> None:
        self.ask(who, Op.POST, name, kind, b"why")

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, wait=seconds)
    def query(self, who: int, name: bytes, wait: float) -> None:
        self.ask(who, Op.QUERY, name, b"where", F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, wait=seconds)
    def shrink(self, who: int, name: bytes, wait: float) -> None:
        member = self.members[who % len(self.members)]
        self.rolls[self.request + 1] = (self.groups._groups.get(name), member.ranks.get(name, -1))
        self.ask(who, Op.SHRINK, name, U32.pack(1), F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, wait=seconds, flag=st.integers(-4, 3))
    def agree(self, who: int, name: bytes, wait: float, flag: int) -> None:
        number = self.number(who, name, "agree")
        self.ask(who, Op.AGREE, name, U32.pack(number), I64.pack(flag), F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), name=names, wait=seconds, count=st.sampled_from([1, 1, 1, 2]))
    def grow(self, who: int, name: bytes, wait: float, count: int) -> None:
        number = self.number(who, name, "grow")
        self.ask(who, Op.GROW, name, U32.pack(number), U32.pack(count), b"told", F64.pack(wait))

    def number(self, who: int, name: bytes, what: str) -> int:
        """Of this member's next such decision of a group; whose answers are to be the same is kept."""
        member = self.members[who % len(self.members)]
        group = self.groups._groups.get(name)
        number = self.decided[id(member), id(group), what] = self.decided.get((id(member), id(group), what), 0) + 1
        self.decisions[self.request + 1] = (id(group), what, number)
        self.kept.append((member, group))
        return number

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), wait=seconds)
    def admit(self, who: int, wait: float) -> None:
        self.ask(who, Op.ADMIT, F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), wait=seconds, key=tags)
    def get(self, who: int, wait: float, key: bytes) -> None:
        self.ask(who, Op.GET, key, F64.pack(wait))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), key=tags)
    def put(self, who: int, key: bytes) -> None:
        self.ask(who, Op.PUT, key, b"value")

    @precondition(lambda self: any(member.questions for member in self.members))
    @rule()
    def answer(self) -> None:
        member = next(member for member in self.members if member.questions)
        self.groups.handle(member, Frame(Op.ANSWER, 0, 0, pack([member.questions.pop(0), b"here"])))

    @precondition(lambda self: self.members)
    @rule(who=st.integers(0, 5), op=st.integers(0, 80), body=st.binary(max_size=40))
    def nonsense(self, who: int, op: int, body: bytes) -> None:
        try:
            fields = unpack(body)
        except Exception:  # the server drops such a connection
            return
        if op not in (Op.ANSWER, Op.BYE):
            self.ask(who, Op(op) if op in set(Op) else op, *fields)  # type: ignore[arg-type]

    @rule(step=st.sampled_from([0.5, 5.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        due = self.groups.tick()
        assert due is None or due > 0

    @invariant()
    def nobody_is_answered_twice_or_for_nothing(self) -> None:
        for member in self.members:
            replies = Counter(request for op, _, request, _ in member.sent if op is Op.REPLY)
            assert set(replies.values()) <= {1}
            assert set(replies) <= {*member.asked, 0}

    @invariant()
    def all_go_on_with_the_same_ranks(self) -> None:
        told: dict[tuple[int, int], list[int]] = {}
        for member in self.members:
            for op, body, request, status in member.sent:
                if op is Op.REPLY and request in self.rolls and status is Status.OK:
                    group, rank = self.rolls[request]
                    number, *ranks = (U32.unpack(field)[0] for field in unpack(body))
                    assert rank in ranks
                    assert ranks == told.setdefault((id(group), number), ranks)

    @invariant()
    def all_who_decide_get_the_same(self) -> None:
        told: dict[tuple[int, str, int], tuple[Status, bytes]] = {}
        for member in self.members:
            for op, body, request, status in member.sent:
                if op is not Op.REPLY or request not in self.decisions or status is Status.REFUSED:
                    continue
                assert told.setdefault(self.decisions[request], (status, body)) == (status, body)

    @invariant()
    def the_same_verdict_for_all(self) -> None:
        for member in self.members:
            for name in member.ranks:
                verdicts = {body for op, body, _, _ in member.sent if op is Op.VERDICT and unpack(body)[0] == name}
                group = self.groups._groups[name]
                assert group.verdict is None or group.verdict in verdicts

    def teardown(self) -> None:
        """When all deadlines have passed, nobody waits any more, and when all have gone, nothing is kept."""
        self.now += 1e7
        assert self.groups.tick() is None
        for member in self.members:
            assert {request for op, _, request, _ in member.sent if op is Op.REPLY} >= set(member.asked)
        for member in list(self.members):
            self.groups.drop(member, "")
        assert not any(group.members or group.roll for group in self.groups._groups.values())
        assert not self.groups._questions._open
        assert not any(self.groups._returning.values())
        assert not self.groups.rolls._lobby
        assert not self.groups.rolls._growing


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_ranks_are_spelt_as_runs() -> None:
    assert spell_ranks([3]) == "rank 3"
    assert spell_ranks([0, 1]) == "ranks 0-1"
    assert spell_ranks([7, 3, 5, 6]) == "ranks 3, 5-7"


def test_endless_timeouts_are_refused() -> None:
    groups, member = Groups(lambda: 0.0), FakeMember("m")
    for wait in (float("nan"), float("inf")):
        groups.handle(member, Frame(Op.GET, 0, 1, pack([b"key", struct.pack("<d", wait)])))
    assert [status for _, _, _, status in member.sent] == [Status.REFUSED] * 2
    groups.handle(member, Frame(Op.JOIN, 0, 2, pack([b"g", U32.pack(0), U32.pack(1), b"\0", F64.pack(1.0)])))
    for op, fields in ((Op.AGREE, (I64.pack(1),)), (Op.GROW, (U32.pack(1), b"")), (Op.ADMIT, ()), (Op.SHRINK, ())):
        number = () if op is Op.ADMIT else (U32.pack(1),)
        name = () if op is Op.ADMIT else (b"g",)
        groups.handle(member, Frame(op, 0, 3, pack((*name, *number, *fields, F64.pack(float("nan"))))))
        assert member.sent[-1] == (Op.REPLY, b"a timeout of nan seconds: wanted a finite one", 3, Status.REFUSED)
    assert len(member.sent) == 7


def left_of(member: FakeMember) -> list[int]:
    """The ranks of which it was told that they have left."""
    bodies = [unpack(body)[1:] for op, body, _, _ in member.sent if op is Op.LEFT]
    return [U32.unpack(rank)[0] for ranks in bodies for rank in ranks]


def test_goodbyes_of_all_ranks_take_few_messages_and_reach_all_who_stay() -> None:
    now, size = [0.0], 500
    groups = Groups(lambda: now[0])
    members = [FakeMember(f"m{rank}") for rank in range(size)]
    for rank, member in enumerate(members):
        groups.handle(member, Frame(Op.JOIN, 0, 1, pack([b"world", U32.pack(rank), U32.pack(size), b"", F64.pack(1)])))
    for rank, member in enumerate(members[: size // 2]):
        if rank == 100:
            groups.drop(member, "it died")
        else:
            groups.drop(member, "")
    now[0] += 0.5
    groups.tick()
    staying = members[size // 2 :]
    for member in staying:
        assert left_of(member) == [*range(100), *range(101, size // 2)]
        ops = [op for op, _, _, _ in member.sent if op is not Op.REPLY]
        assert ops == [Op.LEFT, Op.LOST, Op.LEFT]  # a death is told at once, after the goodbyes before it
    for member in staying:
        groups.drop(member, "")
    assert sum(op is Op.LEFT for member in members for op, _, _, _ in member.sent) <= 3 * size


def test_decisions_that_failed_are_kept_until_all_have_heard() -> None:
    """A program may ask for newcomers at every step, in vain."""
    now = 0.0
    groups = Groups(lambda: now)
    members = [FakeMember(f"member {rank}") for rank in range(2)]

    def ask(rank: int, op: Op, *fields: bytes) -> tuple[Op, bytes, int, Status] | None:
        sent = len(members[rank].sent)
        groups.handle(members[rank], Frame(op, 0, sent + 1, pack(fields)))
        return members[rank].sent[sent] if len(members[rank].sent) > sent else None

    for rank in range(2):
        ask(rank, Op.JOIN, b"world", U32.pack(rank), U32.pack(2), b"\0", F64.pack(9.0))
    group = groups._groups[b"world"]
    for number in range(1, 4):
        for op, rolls in ((Op.GROW, group.growths), (Op.AGREE, group.agreements)):
            more = (U32.pack(1), b"") if op is Op.GROW else (I64.pack(1),)
            assert ask(0, op, b"world", U32.pack(number), *more, F64.pack(1.0)) is None
            now += 2.0
            groups.tick()
            assert members[0].sent[-1][3] is Status.TIMEOUT
            assert len(rolls) == 1
            assert ask(1, op, b"world", U32.pack(number), *more, F64.pack(1.0)) is not None
            assert members[1].sent[-1][1] == members[0].sent[-1][1]
            assert not rolls
    for number in range(4, 104):
        for rank in range(2):
            ask(rank, Op.AGREE, b"world", U32.pack(number), I64.pack(rank), F64.pack(300.0))
        assert members[0].sent[-1][1] == pack([I64.pack(0)])
    assert len(groups._timers) < 10, "one for all, not one for each"


EVENTS = [*(("grow", rank) for rank in range(SIZE)), *(("admit", i) for i in range(3))]
TROUBLE = [("lose", 0), ("leave", 1), ("lose", SIZE), ("leave", SIZE + 1), ("time", 0)]


@settings(max_examples=examples(60))
@given(data=st.data(), trouble=st.lists(st.sampled_from(TROUBLE), max_size=2), count=st.integers(1, 2))
def test_all_grow_alike_or_none_does(data: st.DataObject, trouble: list[tuple[str, int]], count: int) -> None:
    """Members call grow(), newcomers come, some die or leave, time passes, all in any order."""
    now = 0.0
    groups = Groups(lambda: now)
    members = [FakeMember(f"member {i}") for i in range(SIZE + 3)]  # three of a group, and newcomers
    asked: dict[int, int] = {}
    gone: set[int] = set()

    def ask(who: int, request: int, op: Op, *fields: bytes) -> None:
        groups.handle(members[who], Frame(op, 0, request, pack(fields)))

    for rank in range(SIZE):
        ask(rank, 99, Op.JOIN, b"world", U32.pack(rank), U32.pack(SIZE), b"\0", F64.pack(9.0))
    for what, who in data.draw(st.permutations(EVENTS + trouble)):
        number = SIZE + who if what == "admit" else who
        if what == "time":
            now += 4.0
            groups.tick()
        elif number in gone:
            continue
        elif what in ("lose", "leave"):
            gone.add(number)
            groups.drop(members[number], "it died" if what == "lose" else "")
        else:
            asked[number] = len(asked) + 1
            fields = (b"world", U32.pack(1), U32.pack(count), b"told by %d" % number) if what == "grow" else ()
            ask(number, asked[number], Op.GROW if fields else Op.ADMIT, *fields, F64.pack(5.0))
    now += 9.0
    groups.tick()
    replies: dict[int, list[tuple[Status, bytes]]] = {}
    for number, request in asked.items():
        sent = members[number].sent
        replies[number] = [(s, body) for op, body, r, s in sent if op is Op.REPLY and r == request and body]
        assert len(replies[number]) == 1 or (number in gone and not replies[number]), (number, sent)
    places = {n: unpack(found[0][1]) for n, found in replies.items() if found and found[0][0] is Status.OK}
    errors = {found[0] for n, found in replies.items() if found and n < SIZE and n not in gone and n not in places}
    assert len(errors) <= 1, "one error for all that live"
    assert not (errors and any(n < SIZE for n in places))
    if places:
        assert len(places) == SIZE + count
        assert sorted(U32.unpack(rank)[0] for _, rank, _, _ in places.values()) == list(range(SIZE + count))
        assert all(U32.unpack(places[rank][1])[0] == rank for rank in range(SIZE))
        ((name, size, said),) = {(name, size, said) for name, _, size, said in places.values()}
        assert (U32.unpack(size)[0], said) == (SIZE + count, b"told by 0")
        alive = {n for n in places if n not in gone}
        made = groups._groups.get(name)
        assert alive == (set() if made is None else {members.index(member) for member in made.members.values()})


def test_a_rank_that_was_lost_is_refused_and_counted() -> None:
    """It may come as a newcomer."""
    groups = Groups()
    members = [FakeMember(f"member {i}") for i in range(3)]
    for who, rank in ((0, 0), (1, 1)):
        fields = (b"world", U32.pack(rank), U32.pack(2), b"\0", F64.pack(9.0))
        groups.handle(members[who], Frame(Op.JOIN, 0, 1, pack(fields)))
    groups.drop(members[1], "it died")
    groups.handle(members[2], Frame(Op.JOIN, 0, 1, pack(fields)))
    text = (
        b"rank 1 was lost: it died, and cannot come back to this group: a newcomer enters by join=True (HETCOLL_JOIN=1)"
    )
    assert members[2].sent == [(Op.REPLY, text, 1, Status.REFUSED)]
    assert groups.rolls.refused == 1

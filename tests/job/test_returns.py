"""The state of a store that takes the place of another: of what members tell, whatever died or was under way."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from thorough import examples

from hetcoll.rendezvous.connections.pulse import Places
from hetcoll.rendezvous.membership import Call, Membership
from hetcoll.rendezvous.protocol.wire import F64, I64, U32, WORLD, Frame, Op, Status, pack, unpack
from hetcoll.rendezvous.store.groups import Groups
from hetcoll.rendezvous.store.returns import Claim
from hetcoll.rendezvous.uplink import pack_places

SIZE = 4
ALONE = Claim(1, (), True, 15.0, 2.0)
PLACES: Places = (("10.0.0.2", 1), ("127.0.0.1", 1))
OTHERS: Places = (("10.0.0.3", 1),)
clients = st.integers(0, SIZE - 1)
some = st.one_of(st.permutations(range(SIZE)), st.lists(clients, unique=True))


class Client:
    """A rank of WORLD. It keeps what a real one keeps; what it has not read of its `inbox` is lost with the store."""

    def __init__(self, rank: int, size: int) -> None:
        self.name = f"rank {rank}"
        self.ranks: dict[bytes, int] = {}
        self.inbox: list[Frame] = []
        self.membership = Membership(WORLD, rank, size, None)
        self.pending: dict[int, tuple[Call, bytes]] = {}
        self.numbers: dict[Op, int] = defaultdict(int)
        self.got: dict[tuple[Op, bytes], tuple[Status, bytes]] = {}
        self.behind = self.cut = False

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None:
        if self.cut:
            return
        self.inbox.append(Frame(op, status, request, body))

    def read(self, count: int) -> None:
        for frame in self.inbox[:count]:
            member = self.membership
            if frame.op == Op.REPLY:
                call, _ = self.pending.pop(frame.request)
                member.keep(call, frame)
                if call.op is Op.SHRINK and frame.status == Status.OK:
                    assert unpack(frame.body)[0] == call.key
                self.got[call.op, call.key] = Status(frame.status), frame.body
                continue
            fields = unpack(frame.body)
            member.hear(frame.op, fields[1:], frame.body)
            self.behind = self.behind or (frame.op == Op.LOST and U32.unpack(fields[1])[0] == member.rank)
        del self.inbox[:count]


class Returning(RuleBasedStateMachine):
    """Ranks decide things together, die, and lose the store in the middle of it."""

    @initialize()
    def begin(self) -> None:
        self.now, self.request = 0.0, 0
        self.groups = Groups(lambda: self.now)
        self.alive = [Client(rank, SIZE) for rank in range(SIZE)]
        for client in self.alive:
            rank = client.membership.rank
            self.ask(client, Op.JOIN, WORLD, U32.pack(rank), U32.pack(SIZE), b"\0", F64.pack(9.0))
        for client in self.alive:
            self.ask_next(client, Op.EXCHANGE, pack([b"shared"]), pack([]), b"%d" % client.membership.rank)
        for client in self.alive:
            client.read(9)
            assert client.membership.formed

    def ask(self, client: Client, op: Op, *fields: bytes) -> None:
        self.request += 1
        client.pending[self.request] = Call(op, WORLD, fields), pack(fields)
        if not client.cut:
            self.groups.handle(client, Frame(op, 0, self.request, pack(fields)))

    def ask_next(self, client: Client, op: Op, *fields: bytes) -> None:
        """One of each kind at a time; shrinks are numbered by what is known, as `decisions` does it."""
        if any(call.op is op for call, _ in client.pending.values()):
            return
        client.numbers[op] += 1
        number = client.membership.rolls + 1 if op is Op.SHRINK else client.numbers[op]
        self.ask(client, op, WORLD, U32.pack(number), *fields, F64.pack(9.0))

    def pick(self, who: int) -> Client:
        return self.alive[who % len(self.alive)]

    def those(self, who: list[int]) -> list[Client]:
        return [each for rank in who for each in self.alive if each.membership.rank == rank]

    @rule(who=some)
    def exchange(self, who: list[int]) -> None:
        for client in self.those(who):
            self.ask_next(client, Op.EXCHANGE, pack([b"shared"]), pack([]), b"own")

    @rule(who=some)
    def shrink(self, who: list[int]) -> None:
        for client in self.those(who):
            self.ask_next(client, Op.SHRINK)

    @rule(who=some, flag=st.integers(0, 3))
    def agree(self, who: list[int], flag: int) -> None:
        for client in self.those(who):
            self.ask_next(client, Op.AGREE, I64.pack(flag))

    @precondition(lambda self: self.alive)
    @rule(who=clients)
    def post(self, who: int) -> None:
        client = self.pick(who)
        self.ask(client, Op.POST, WORLD, b"failed", client.name.encode())

    @precondition(lambda self: self.alive)
    @rule(who=clients, count=st.integers(1, 6))
    def read(self, who: int, count: int) -> None:
        self.pick(who).read(count)

    @precondition(lambda self: len(self.alive) > 1)
    @rule(who=clients)
    def die(self, who: int) -> None:
        client = self.pick(who)
        self.alive.remove(client)
        if not client.cut:
            self.groups.drop(client, "it died")

    @precondition(lambda self: len(self.alive) > 1)
    @rule(who=clients)
    def cut(self, who: int) -> None:
        """Its connection breaks, and it lives."""
        client = self.pick(who)
        if not client.cut:
            client.read(len(client.inbox))
            client.cut = True
            self.groups.drop(client, "it was cut off")

    @rule(step=st.sampled_from([0.1, 3.0, 9.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.groups.tick()

    @precondition(lambda self: self.alive)
    @rule(order=st.permutations(range(SIZE)), dead=st.sets(clients, max_size=2), late=st.booleans())
    def lose_the_store(self, order: list[int], dead: set[int], late: bool) -> None:
        """Some die with it; those that are left come to the next one in any order, the last one too late perhaps."""
        self.groups = Groups(lambda: self.now, succeeds=ALONE)
        self.alive = [each for each in self.alive if each.membership.rank not in dead] or self.alive
        coming = sorted(self.alive, key=lambda each: order[each.membership.rank])
        for client in coming:
            client.inbox.clear()
            client.ranks.clear()
            client.cut = False
            if late and client is coming[-1] and len(coming) > 1:
                self.time_passes(3.0)
            past = client.membership.spell()
            self.groups.handle(client, Frame(Op.RETURN, 0, 0, pack([b"\0", b"", b"", pack([past])])))
            for request, (call, body) in list(client.pending.items()):
                self.groups.handle(client, Frame(call.op, Status.AGAIN, request, body))

    def teardown(self) -> None:
        """In the end all was answered, all who decided together got the same, and know the same of the others."""
        if not hasattr(self, "groups"):
            return
        self.lose_the_store(list(range(SIZE)), set(), late=False)
        for _ in range(4):
            self.now += 60.0
            self.groups.tick()
            for client in self.alive:
                client.read(len(client.inbox))
        for client in self.alive:
            assert not client.pending, client.pending
        present = [each for each in self.alive if not each.behind]
        told: dict[tuple[Op, bytes], set[tuple[Status, bytes]]] = defaultdict(set)
        for client in present:
            for (op, key), (status, body) in client.got.items():
                if op in (Op.SHRINK, Op.AGREE) and status is not Status.REFUSED:
                    told[op, key].add((status, body))
                if op is Op.SHRINK and status is Status.OK:
                    went_on = {U32.unpack(field)[0] for field in unpack(body)[1:]}
                    assert {each.membership.rank for each in present} <= went_on
        assert all(len(answers) == 1 for answers in told.values()), told
        assert len({each.membership.verdict for each in present}) <= 1
        away = set(range(SIZE)) - {each.membership.rank for each in present}
        for client in present:
            assert set(client.membership.gone) <= away
            assert {each for each in away if self.all_dead(each)} <= set(client.membership.gone)

    def all_dead(self, rank: int) -> bool:
        return all(each.membership.rank != rank for each in self.alive)


TestReturning = Returning.TestCase
TestReturning.settings = settings(max_examples=examples(80), stateful_step_count=30)


def test_who_has_asked_on_still_knows_the_answer_that_others_have_not_read() -> None:
    """Rank 0 agrees again and again while the others, who have yet to read that all agreed, are stuck."""
    state = Returning()
    state.begin()
    state.agree(list(range(SIZE)), 3)
    for _ in range(3):
        state.read(0, 9)
        state.agree([0], 3)
        state.time_passes(9.0)
    state.read(0, 9)
    state.teardown()


def return_to(groups: Groups, client: Client, places: bytes = b"") -> None:
    groups.handle(client, Frame(Op.RETURN, 0, 0, pack([b"\0", places, b"", pack([client.membership.spell()])])))


def test_a_store_that_is_not_sure_waits_for_more_than_half() -> None:
    now = [0.0]
    groups = Groups(lambda: now[0], succeeds=Claim(3, (), False, 5.0, 5.0))
    members = [Client(rank, 5) for rank in range(5)]
    for client in members[:2]:
        client.membership.formed = client.membership.joined = True
        return_to(groups, client)
        groups.handle(client, Frame(Op.PUT, 0, 7, pack([b"key", b"value"])))
        assert [frame for frame in client.inbox if frame.op == Op.REPLY] == []
    return_to(groups, members[2])
    for client in members[:2]:
        assert [frame.request for frame in client.inbox if frame.op == Op.REPLY] == [7]
    now[0] = 60.0
    groups.tick()
    assert not groups.returns.alone


def test_a_store_that_finds_no_half_gives_up() -> None:
    now = [0.0]
    groups = Groups(lambda: now[0], succeeds=Claim(3, (), False, 5.0, 5.0))
    return_to(groups, Client(0, 5))
    now[0] = 6.0
    groups.tick()
    assert groups.returns.alone == "1 processes found each other where 3 are more than half of the job"


def test_who_was_on_a_host_that_fell_silent_is_lost_when_all_others_have_come() -> None:
    """Only they might come later, and their host does not answer."""
    groups = Groups(lambda: 0.0, succeeds=Claim(3, (), False, 15.0, 15.0, 4))
    members = [Client(rank, 6) for rank in range(1, 5)]
    for client in members:
        assert not any(frame.op == Op.LOST for frame in members[0].inbox)
        client.membership.formed = client.membership.joined = True
        return_to(groups, client)
    for client in members:
        lost = [unpack(frame.body)[1:] for frame in client.inbox if frame.op == Op.LOST]
        assert lost == [[U32.pack(rank), b"its host fell silent, as the one of the job's store did"] for rank in (0, 5)]


@pytest.mark.parametrize("certain", [False, True], ids=["one before it lives", "it may have been passed over"])
def test_a_store_serves_alone_where_nobody_else_may(certain: bool) -> None:
    """All others that might serve have come or are dead; a store that was served before this one may do so as well."""
    groups = Groups(lambda: 0.0, succeeds=Claim(3, (PLACES, OTHERS), certain, 15.0, 2.0))
    alone, rival = Client(0, 5), Client(1, 5)
    return_to(groups, alone)
    for address in PLACES:
        assert not groups.returns.sure
        groups.hear_of_death(pack_places((address,)))
    assert not groups.returns.sure
    return_to(groups, rival, pack_places(OTHERS))
    assert groups.returns.waits is not certain


def test_what_ranks_told_of_their_own_waits_until_they_are_here() -> None:
    """In large groups who asks for it may come before who told it. What the dead told may be lost with the store."""
    now = [0.0]
    groups = Groups(lambda: now[0], succeeds=ALONE)
    asks, told = Client(0, 3), Client(1, 3)
    for client in (asks, told):
        client.membership.formed = client.membership.joined = True
        client.membership.own[b"tag", client.membership.rank] = b"%d" % client.membership.rank
    return_to(groups, asks)
    groups.handle(asks, Frame(Op.LOOK, 0, 7, pack([WORLD, b"tag", U32.pack(0) + U32.pack(1)])))
    groups.handle(asks, Frame(Op.LOOK, 0, 8, pack([WORLD, b"tag", U32.pack(2)])))
    return_to(groups, told)
    now[0] = 3.0
    groups.tick()
    replies = {frame.request: frame for frame in asks.inbox if frame.op == Op.REPLY}
    assert unpack(replies[7].body) == [b"0", b"1"]
    assert (replies[8].status, unpack(replies[8].body)[0]) == (Status.LOST, U32.pack(2))


def test_who_comes_late_is_asked_what_its_group_was_asked_before() -> None:
    """Or who asks would wait as long as it asked for, though all are here. No answer to the lost store's question is
    one to this store's."""
    groups, other = (Groups(lambda: 0.0, succeeds=ALONE) for _ in range(2))
    asks, late = Client(0, 2), Client(1, 2)
    for client in (asks, late):
        client.membership.formed = client.membership.joined = True
    return_to(groups, asks)
    groups.handle(asks, Frame(Op.QUERY, 0, 7, pack([WORLD, b"what?", F64.pack(20.0)])))
    return_to(groups, late)
    numbers = set()
    for client in (asks, late):
        ((name, asker, blob, number),) = (unpack(frame.body) for frame in client.inbox if frame.op == Op.ASK)
        assert (name, asker, blob) == (WORLD, U32.pack(0), b"what?")
        groups.handle(client, Frame(Op.ANSWER, 0, 0, pack([number, client.name.encode()])))
        numbers.add(number)
    (reply,) = (frame for frame in asks.inbox if frame.op == Op.REPLY)
    assert unpack(reply.body) == [b"\1rank 0", b"\1rank 1"]
    return_to(other, asks)
    other.handle(asks, Frame(Op.QUERY, 0, 8, pack([WORLD, b"and?", F64.pack(20.0)])))
    assert unpack(asks.inbox[-1].body)[3] not in numbers


def test_a_rival_that_came_and_fell_silent_may_serve() -> None:
    groups = Groups(lambda: 0.0, succeeds=Claim(3, (PLACES, OTHERS), True, 15.0, 2.0))
    rival = Client(1, 5)
    return_to(groups, rival, pack_places(OTHERS))
    groups.drop(rival, "its connection timed out", silent=True)
    for address in PLACES:
        groups.hear_of_death(pack_places((address,)))
    for rank in (0, 2):
        return_to(groups, Client(rank, 5))
    assert groups.returns.waits, "it does not count either"
    return_to(groups, Client(3, 5))
    assert not groups.returns.waits


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["after", "before"])
@pytest.mark.parametrize("apart", [False, True], ids=["all in common", "a group of its own"])
def test_whom_the_store_before_had_lost_is_none_of_more_than_half(order: tuple[int, int], apart: bool) -> None:
    """It is not among those of whom they are more than half, whenever it comes, and whatever others it has."""
    groups = Groups(lambda: 0.0, succeeds=Claim(2, (), False, 15.0, 15.0))
    knows, lost = Client(0, 5), Client(1, 5)
    knows.membership.gone[1] = "nothing came from its host for 22 s"
    pasts = [each.membership.spell() for each in (knows, lost)]
    pasts[1] = pack([pasts[1]] + [Membership(b"others", 0, 2, None).spell()] * apart)
    pasts[0] = pack([pasts[0]])
    for number in order:
        groups.handle((knows, lost)[number], Frame(Op.RETURN, 0, 0, pack([b"\0", b"", b"", pasts[number]])))
    assert groups.returns.waits
    return_to(groups, Client(2, 5))
    assert not groups.returns.waits


def test_who_was_left_behind_hears_it_from_the_next_store() -> None:
    job = Returning()
    job.begin()
    job.shrink([0, 1, 2])
    job.time_passes(9.0)
    for client in job.alive[:3]:
        client.read(1)
    job.lose_the_store([3, 0, 1, 2], set(), late=False)
    for client in job.alive:
        client.read(len(client.inbox))
    assert [client.behind for client in job.alive] == [False, False, False, True]


def test_who_did_not_hear_that_the_others_went_on_hears_it_from_the_next_store() -> None:
    """They have left the group since, and the store at which that was decided is gone."""
    job = Returning()
    job.begin()
    job.shrink([0, 1, 2])
    job.time_passes(9.0)
    groups = Groups(lambda: 0.0, succeeds=ALONE)
    for client in job.alive[:3]:
        client.read(len(client.inbox))
        client.membership.leave()
        return_to(groups, client)
    late = job.alive[3]
    late.inbox.clear()  # it was cut off
    return_to(groups, late)
    late.read(len(late.inbox))
    assert late.behind


def test_who_knows_that_it_was_left_behind_does_not_go_on_alone() -> None:
    """Where the others have ended since, the next store knows it from this one only."""
    now = [0.0]
    groups, client = Groups(lambda: now[0], succeeds=ALONE), Client(1, 2)
    client.membership.formed = client.membership.joined = True
    client.membership.hear(Op.LOST, [U32.pack(1), b"the others went on without it"], b"")
    return_to(groups, client)
    groups.handle(client, Frame(Op.SHRINK, 0, 3, pack([WORLD, U32.pack(1), F64.pack(1.0)])))
    now[0] = 3.0
    groups.tick()
    assert [frame.status for frame in client.inbox if frame.op == Op.REPLY] == [Status.REFUSED]


@pytest.mark.parametrize("succeeds", [None, ALONE])
def test_who_comes_when_the_others_have_gone_on_and_closed_is_left_behind(succeeds: Claim | None) -> None:
    """A store that forgot a group because all had left it does not begin it anew for one that was cut off meanwhile."""
    now = [0.0]
    groups = Groups(lambda: now[0], succeeds=succeeds)
    stays, late = (Client(rank, 2) for rank in range(2))
    for client in (stays, late):
        client.membership.formed = client.membership.joined = True
    if succeeds is not None:
        return_to(groups, stays)  # this one alone, in time
        now[0] = 3.0
        groups.tick()
    else:
        for client in (stays, late):
            fields = (WORLD, U32.pack(client.membership.rank), U32.pack(2), b"\0", F64.pack(9.0))
            groups.handle(client, Frame(Op.JOIN, 0, 1, pack(fields)))
        groups.drop(late, "timed out", silent=True)
    groups.handle(stays, Frame(Op.LEAVE, 0, 2, pack([WORLD, b""])))
    late.inbox.clear()  # it was cut off
    return_to(groups, late)
    late.read(len(late.inbox))
    assert late.behind
    groups.handle(late, Frame(Op.SHRINK, 0, 3, pack([WORLD, U32.pack(1), F64.pack(1.0)])))
    assert [frame.status for frame in late.inbox if frame.op == Op.REPLY] == [Status.REFUSED]


def test_a_store_that_most_members_fall_silent_to_gives_up() -> None:
    """Those that die with a word from their host, and those that leave, do not count."""
    now = [0.0]
    groups = Groups(lambda: now[0], charge=b"charge")
    members = [Client(rank, 6) for rank in range(6)]
    for rank, client in enumerate(members):
        fields = (WORLD, U32.pack(rank), U32.pack(6), b"\1" if rank == 0 else b"\0", F64.pack(9.0))
        groups.handle(client, Frame(Op.JOIN, 0, 1, pack(fields)))
    for client in members:
        told = (WORLD, b"tag", pack([b"shared"]), pack([]), b"", F64.pack(9.0))
        groups.handle(client, Frame(Op.EXCHANGE, 0, 2, pack(told)))
    groups.drop(members[5], "it died")
    groups.drop(members[4], "timed out", silent=True)
    now[0] += 100.0
    groups.tick()
    groups.drop(members[3], "timed out", silent=True)
    assert not groups.alone
    groups.drop(members[2], "timed out", silent=True)
    assert not groups.alone
    groups.drop(members[1], "timed out", silent=True)
    assert groups.alone == "3 of 4 processes fell silent, and may go on without this part"

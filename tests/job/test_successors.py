"""What a job's store tells its members of its successors, and when."""

from __future__ import annotations

from hetcoll.rendezvous.protocol.wire import U32, Op, Status, pack, unpack
from hetcoll.rendezvous.store.successors import Successors


class Heard:
    """A member that notes what it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.ranks = name, dict[bytes, int]()
        self.told: list[tuple[Op, bytes]] = []

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None:
        self.told.append((op, body))


def test_a_job_that_goes_on_knows_its_successors_though_a_newcomer_has_not_answered() -> None:
    later = list[object]()
    successors = Successors(pack((b"charge",)), lambda _, action: later.append(action))
    host, rank, newcomer = map(Heard, ("rank 0", "rank 1", "a newcomer"))
    successors.add(host, hosts=True)
    successors.add(rank)
    successors.stand(rank, 0, b"", b"where rank 1 listens")
    successors.add(newcomer)
    assert [op for op, _ in newcomer.told] == [Op.STAND]
    successors.begin()
    for member in (host, rank, newcomer):
        op, body = member.told[-1]
        assert (op, unpack(body)) == (Op.SUCCESSORS, [U32.pack(3), b"where rank 1 listens"])
    successors.stand(newcomer, 0, b"", b"where it does")
    assert unpack(rank.told[-1][1])[1:] == [b"where rank 1 listens", b"where it does"]

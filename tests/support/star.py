"""An algorithm as a user writes it: rank 0 adds up and sends the sum."""

from hetcoll.plan.algorithms import Draft, inp, out


def star(p: Draft) -> None:
    if p.rank != 0:
        p.send(0, inp(), 0)
        p.recv(1, out(), 0, channel=1)
        return
    total, added = inp(), None
    for peer in p.others():
        added = p.recv_reduce(0, out(), total, peer)
        total = out()
    final = p.scaled(1, out(), added)
    for peer in p.others():
        p.send(2, out(), peer, channel=1, after=[final])


REGISTERED = """
from hetcoll.plan.algorithms import register
from hetcoll.types import Collective

register(Collective.ALLREDUCE, "star")(star)
"""


def source() -> str:
    """A module of its own, which registers it where it is imported."""
    with open(__file__) as file:
        return file.read() + REGISTERED

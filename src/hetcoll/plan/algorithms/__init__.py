"""The algorithms: pure functions that draw plans, and the table of them.

`find` looks one up by name; `hetcoll.plan.tuner` chooses. To add one, decorate a function with `register`: see `base`.

Examples
--------
>>> from hetcoll.types import Collective
>>> print(find(Collective.ALLGATHER, "ring").build(2, 0).dump())
allgather by ring: rank 0 of 2
  0  0:send send[0:1] peer 1
  1  1:recv -> recv[1:2] peer 1
  2  2:copy send[0:1] -> recv[0:1]
"""

from . import direct  # first: of two that are equally fast, the tuner takes the one that came first

# isort: split
from ..costs import Cost, Hosts, Reach
from . import aggregated, binomial, chained, dissemination, installed, led, pairwise, recursive, ring, staged, tree
from .base import ALGORITHMS, Algorithm, Draft, find, inp, known, out, power_of_two, register, tmp
from .p2p import p2p

__all__ = [
    "ALGORITHMS", "Algorithm", "Cost", "Draft", "Hosts", "Reach", "aggregated", "binomial", "chained", "direct",
    "dissemination", "find", "inp", "installed", "known", "led", "out", "p2p", "pairwise", "power_of_two",
    "recursive", "register", "ring", "staged", "tmp", "tree",
]  # fmt: skip

"""A job, drawn from its seed: its ranks, what they do, the network, and what is done to them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from .network import Weather

KINDS = {
    "calm": 4,
    "reset": 3,
    "freeze": 3,
    "stall": 2,
    "kill": 6,
    "vanish": 2,
    "cut": 3,
    "leave": 2,
    "mismatch": 1,
    "late": 1,
    "storm": 4,
    "stop": 2,
    "away": 2,
    "torn": 2,
}
"""What is done to a job, and how often. In a `stall` the network is cut for less than any timeout; a `cut` lasts. In a
`mismatch` one rank calls something else than the others, or it is too `late` for a call. In a `stop` the first
successor is stopped, or cut off from all but rank 0, and that dies or leaves. In an `away` rank 0 is stopped, perhaps
with some others, or cut off as well, and the rest go on without it, of which some leave or die. Where the network is
`torn`, it is cut again along another line, as soon as another store serves."""

ROUGH = {"away", "cut", "stop", "storm", "torn"}
"""In these some may be lost to whom nothing was done, or be told nothing in time."""

SOUND = {"calm", "reset", "freeze", "stall"}
"""After these nobody is lost, and nothing fails."""

SUCCESSOR = -1  # in place of a rank: the first successor, where there is one by then
LONG = 1000.0  # virtual seconds until a job must be over
_TIMED = 12.0  # in which faults begin


class Step(NamedTuple):
    """What all ranks of a group do next; `number` is what `what` makes of it."""

    what: str
    number: float = 0.0


class Fault(NamedTuple):
    """What is done at a time, to a rank or SUCCESSOR; `seconds`: for how long, 0 for ever. `side` are machines that are
    cut off, with SUCCESSOR its own and rank 0's."""

    at: float
    what: str
    rank: int = 0
    seconds: float = 0.0
    side: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """`hosts` says on which machine each rank is. `few`: how many ranks the store serves itself, where that is not what
    the product says, so that some come through relays. `named`: they find the store by a launcher's address."""

    seed: int
    kind: str
    size: int
    hosts: tuple[int, ...]
    steps: tuple[Step, ...]
    faults: tuple[Fault, ...]
    newcomers: tuple[float, ...]
    weather: Weather
    preempt: float
    few: int = 0
    named: bool = False
    mistake: tuple[str, int] | None = None
    """Who makes one, at which step."""

    @property
    def sound(self) -> bool:
        return self.kind in SOUND


def draw(seed: int, only: str = "") -> Job:
    """The job of a seed; `only`: of that kind."""
    rng = random.Random(f"job {seed}")
    kind = rng.choices([*KINDS], [*KINDS.values()])[0]
    kind = only or kind
    size = rng.choice([2, 3, 3, 4, 4, 5, 6])
    few = 0
    if rng.random() < 0.2:
        few, size = 3, rng.randint(5, 9)
    if kind == "torn":
        few, size = 0, rng.randint(5, 8)
    few_hosts = 3 if kind == "vanish" and size > 4 else size  # more than half may outlive one of more than one
    spread = rng.choice([1, 2, few_hosts, size])
    spread = size if kind == "torn" else spread
    hosts = tuple(rank % spread for rank in range(size))
    weather = Weather(
        rng.choice([2e-5, 5e-4, 2e-2]), rng.choice([0.0, 0.0, 0.02]), room=rng.choice([1 << 13, 1 << 18, 1 << 18])
    )
    steps = (Step("exchange"), *(_draw_step(rng) for _ in range(rng.randint(2, 7))))
    mistake = None
    if kind in ("mismatch", "late"):
        at = rng.randint(1, len(steps))
        steps = (*steps[:at], Step("call"), *(step for step in steps[at:] if step.what != "grow"))
        mistake = str(rng.randrange(size)), at
    if kind == "torn":  # they are at work so long
        steps = (*steps, Step("pause", 3.0), Step("agree"), Step("pause", 3.0), Step("exchange"))
    newcomers: list[float] = []
    for step in steps:
        newcomers += [rng.uniform(0, 20) for _ in range(int(step.number) if step.what == "grow" else 0)]
    machines = [*dict.fromkeys(address(number) for number in hosts), *map(new_address, range(len(newcomers)))]
    faults = tuple(sorted(_draw_faults(rng, kind, size, machines)))
    preempt = rng.choice([0.0, 0.02, 0.2])
    return Job(
        seed, kind, size, hosts, steps, faults, tuple(newcomers), weather, preempt, few, rng.random() < 0.5, mistake
    )


def _draw_step(rng: random.Random) -> Step:
    what = rng.choice(
        ["call", "call", "exchange", "keys", "query", "agree", "agree", "look", "verdict", "pause", "grow"]
    )
    if what == "pause":
        return Step(what, rng.choice([0.1, 3.0]))
    return Step(what, rng.choice([1, 1, 2]) if what == "grow" else 0)


def address(number: int) -> str:
    """Of a machine."""
    return f"10.0.0.{number + 1}"


def new_address(number: int) -> str:
    """Of a newcomer's."""
    return f"10.0.1.{number + 1}"


def _draw_faults(rng: random.Random, kind: str, size: int, machines: list[str]) -> list[Fault]:
    def when() -> float:
        return rng.choice([rng.uniform(0, 0.05), rng.uniform(0, 1), rng.uniform(0, _TIMED)])

    def some(most: int) -> range:
        return range(rng.randint(1, most))

    def cut(seconds: float) -> Fault:
        return Fault(when(), "cut", 0, seconds, tuple(rng.sample(machines, rng.randint(1, len(machines)))))

    if kind == "reset":
        return [Fault(when(), "reset") for _ in some(4)]
    if kind == "freeze":
        return [Fault(when(), "freeze", rng.randrange(size), rng.uniform(0.05, 2.0)) for _ in some(4)]
    if kind == "stall":
        return [cut(rng.uniform(0.1, 8.0))]
    if kind == "kill":
        first = rng.choice([0, rng.randrange(size)])
        return [Fault(when(), "kill", rng.choice([first, rng.randrange(size)])) for _ in some(max(1, size - 1))]
    if kind == "vanish":
        return [Fault(when(), "vanish", rng.randrange(size))]
    if kind == "cut":
        return [cut(rng.choice([0.0, rng.uniform(20, 120)]))]
    if kind == "stop":
        at = rng.uniform(0, 3)
        gone = Fault(at, rng.choice(["kill", "leave"]))
        if rng.random() < 0.3:
            return [Fault(at, "cut", SUCCESSOR, rng.choice([0.0, rng.uniform(20, 100)])), gone]
        return [Fault(at, "freeze", SUCCESSOR, rng.uniform(1, 60)), gone]
    if kind == "leave":
        return [Fault(when(), "leave", rng.randrange(size)) for _ in some(2)]
    if kind == "away":
        at, seconds = rng.uniform(0, 3), rng.choice([rng.uniform(5, 15), rng.uniform(15, 60), 0.0])
        with_it = {rng.randrange(size) for _ in range(rng.randint(0, size // 2))}
        some_faults = [Fault(at, "freeze", rank, seconds) for rank in sorted({0} | with_it)]
        if rng.random() < 0.5:
            some_faults.append(Fault(at, "cut", 0, rng.uniform(5, 60), (machines[0],)))
        some_faults += [Fault(at + rng.uniform(0, 15), "reset") for _ in some(2 * size + 2)]
        return some_faults + [
            Fault(at + rng.uniform(0, 70), rng.choice(["leave", "kill"]), rng.randrange(1, size)) for _ in some(size)
        ]
    if kind == "torn":
        at, seconds, others = rng.uniform(0, 6), rng.uniform(11, 16), rng.sample(machines[1:size], size - 1)
        apart, most = others[: (size - 3) // 2], others[(size - 3) // 2 :]
        first = Fault(at, "cut", 0, seconds, (machines[0], *apart))
        then = Fault(at + seconds + 1e-3, "cut", 0, 0.0, (*apart, *most[: len(most) // 2]))
        resets = [Fault(rng.choice([at, then.at]) + rng.uniform(0.05, 0.5), "reset") for _ in range(80)]
        stopped = Fault(at, rng.choice(["freeze", "kill"]), 0, rng.choice([0.0, 30.0]))
        return [first, then, *resets, *([stopped] if rng.random() < 0.7 else [])]
    if kind == "storm":
        long = [0.0, *(rng.uniform(0.1, 60) for _ in range(2))]
        whats = ["kill", "reset", "reset", "freeze", "freeze", "cut", "leave", "vanish"]
        some_faults = [Fault(when(), rng.choice(whats), rng.randrange(size), rng.choice(long)) for _ in some(5)]
        return [cut(each.seconds) if each.what == "cut" else each for each in some_faults]
    return []

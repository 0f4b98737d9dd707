"""What a seed stands for: a job, what its ranks call, and what is done to them. A pure function, `draw`."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from reference import Case

from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.types import REDUCING, Collective, DType, ReduceOp, supports

KINDS = [kind for kind in Collective if kind.label not in ("barrier", "p2p", "alltoallv")]
ROOTED = (Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER)
TYPES = tuple(dtype.label for dtype in DType)
WIDE = tuple(label for label in TYPES if not label.startswith("float8"))  # what GPUs of both vendors hold alike


@dataclass(frozen=True)
class Step:
    """One thing that all ranks of a communicator do: a function of `play` and its arguments."""

    what: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}{self.args}"


@dataclass(frozen=True)
class Attack:
    """What is done to `victims` when they come to step `at`; `delay` is how many seconds later, on a thread.

    What is done to a network concerns the hosts of the victims, and `how` says how; a cut ends after `delay`, if ever.
    """

    kind: str
    victims: tuple[int, ...] = ()
    at: int = 0
    delay: float | None = None
    how: str = ""


@dataclass(frozen=True)
class Program:
    """A job. `hosts` and `devices` have a letter for each rank; those in `env` hold for all.

    Ranks run `steps`. After an attack that must be seen those that are left shrink, take `newcomers` in, and run other
    steps, which `more` draws for their number.
    """

    seed: int
    size: int
    hosts: str
    devices: str
    env: dict[str, str]
    steps: tuple[Step, ...]
    attack: Attack
    newcomers: int = 0
    rdma: bool = False

    def device(self, rank: int) -> str:
        """A newcomer's is one of those that there are."""
        return self.devices[rank % self.size]

    def more(self, size: int) -> tuple[Step, ...]:
        """The steps of the communicator that comes after."""
        steps = draw_steps(random.Random(f"{self.seed} goes on"), size, self.devices, 2)
        return (*_widen(f"{self.seed} goes on widely", steps, size, self.devices), Step("fence"))

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.size} ranks on hosts {self.hosts}, devices {self.devices}, {self.env}"]
        lines += [f"  {number}: {step}" for number, step in enumerate(self.steps)]
        return "\n".join([*lines, f"  {self.attack}, then {self.newcomers} newcomers"])


# What is done to a job. Weights: how often of a thousand seeds; those that wait for timeouts cost seconds.

CUT = {"half": 2, "rejoin": 2, "partition": 4}  # a network: one of two; both, for longer than the timeout; for ever
HARMLESS = {"slow": 4, "lossy": 4, "blink": 4, "nothing": 280, "links": 110, "pause": 60, "signals": 60, "late": 40}
HARMLESS["resets"] = 0  # of TCP connections, those to the store too: of those to which nothing was to be done, below
LOSING = {"kill": 70, "exit": 20, "raise": 60, "close": 40}  # victims are gone for the others
LOSING["exec"] = 0  # a third of those that were to be killed, below
FAILING = {"abort": 65, "mismatch": 55, "interrupt": 45}  # all ranks live, and all calls fail
WAITING = {"absent": 3, "stop": 2}  # the same, when the timeout is over
PERHAPS = {"spoil": 25, "files": 15, "memory": 12, "sizes": 10, "joining": 8}  # right results, or an error everywhere
PERHAPS["truncate"] = 0  # a third of those of which messages were to be spoiled, below
ATTACKS = CUT | HARMLESS | LOSING | FAILING | WAITING | PERHAPS
RDMA = ("cables", "cables", "nothing", "links", "kill", "raise", "close", "abort", "mismatch", "interrupt", "absent")
NETWORK = {*CUT, "slow", "lossy", "blink"}  # hosts are network namespaces, joined by two networks
NEVER_ON_GPUS = {*NETWORK, "links", "interrupt", "cables", "files", "memory", "sizes"}
REGROUPS = {*CUT, *LOSING, *FAILING, *WAITING}
TIMEOUT = 1.0  # seconds, of WAITING and of links that lose messages


def draw(seed: int, only: str = "") -> Program:
    """The program of a seed. `only`: with this attack, or "rdma": over devices whose cables may be pulled."""
    rng, rdma = random.Random(seed), only == "rdma"
    size = rng.choices(range(2, 9), (40, 33, 15, 5, 3, 2, 2))[0]
    size = min(size, 4) if rdma else size
    kind = rng.choices(list(ATTACKS), ATTACKS.values())[0]
    resetting = random.Random(f"{seed} is reset")
    if kind == "nothing" and resetting.random() < 0.2:
        kind = "resets"
    becoming = random.Random(f"{seed} becomes")
    if kind == "kill" and becoming.random() < 1 / 3:
        kind = "exec"
    if kind == "spoil" and random.Random(f"{seed} is cut off").random() < 1 / 3:
        kind = "truncate"
    kind = random.Random(f"{seed} over RDMA").choice(RDMA) if rdma else only or kind
    devices = _devices(rng, size, kind)
    hosts, env = _links(rng, size, kind, devices)
    if rdma:
        hosts, env = "a" * size, env | _RDMA
    elif random.Random(f"{seed} in secret").random() < 0.12:
        env["HETCOLL_TLS"] = "1"
    steps = draw_steps(rng, size, devices, rng.randint(1, 5))
    steps = _widen(f"{seed} is widened", steps, size, devices)
    attack = Attack(kind, _victims(rng, size, kind), rng.randrange(len(steps)), _delay(rng, kind))
    if kind in NETWORK:
        attack = _network_attack(rng, hosts, attack)
    if kind == "resets":
        some = tuple(sorted(resetting.sample(range(size), resetting.randint(1, size))))
        how = f"{resetting.randint(1, 30)} {resetting.choice((0.5, 2, 20))}"  # times, and milliseconds between them
        attack = replace(attack, victims=some, delay=resetting.random() * 0.01, how=how)
    if kind == "cables":
        attack = replace(attack, how=" ".join(rng.sample(("veth0", "veth1", "veth2", "veth3"), rng.randint(1, 3))))
        # Communicators that are made meanwhile may find no port.
        steps = tuple(step if step.what in ("calls", "messages", "repeat") else Step("look", (0,)) for step in steps)
    if kind == "mismatch" or kind in WAITING:
        shown = _comparable(rng, size) if kind == "mismatch" else Step("hurry", (TIMEOUT,))
        steps = (*steps[: attack.at], shown, *steps[attack.at + 1 :])
    if kind in REGROUPS:
        # Who still agrees as a step would meet those that agree on what to do next; and all are to have a communicator.
        steps = (Step("fence"), *(Step("look", (0,)) if step.what == "agree" else step for step in steps))
        attack = replace(attack, at=attack.at + 1)
    placed = random.Random(f"{seed} is placed")
    if kind == "interrupt" and placed.random() < 0.5:
        attack = replace(attack, how=f"{10 ** (3.5 * placed.random()):.0f}")  # places later, in place of a delay
    if kind == "exec":  # what ends at once, or lives on; places later in place of a delay, or at once
        place = f" {10 ** (3.5 * becoming.random()):.0f}" if becoming.random() < 0.5 else ""
        attack = replace(attack, how=becoming.choice(("true", "sleep")) + place)
    newcomers = 0
    if kind in ("nothing", "resets") and rng.random() < 0.1:
        newcomers = rng.randint(1, 2)
    elif kind in LOSING and rng.random() < 0.4:
        newcomers = len(attack.victims)
    return Program(seed, size, hosts, devices, env, (*steps, Step("fence")), attack, newcomers, rdma)


_RDMA = {"HETCOLL_TRANSPORT": "verbs", "HETCOLL_IB_BYTES": "128K", "HETCOLL_IB_TIMEOUT": "15"}


def _devices(rng: random.Random, size: int, kind: str) -> str:
    """Mostly processors. Slow links exceed the patience of the proof of paths; Ctrl-C may hit the copies of `OnGpu`;
    limits are the fakes', too, whose memory is files."""
    if rng.random() >= 0.02 or size > 4 or kind in NEVER_ON_GPUS:
        return "c" * size
    return "".join(rng.choice("nnaac") for _ in range(size))


def _victims(rng: random.Random, size: int, kind: str) -> tuple[int, ...]:
    most = 2 if kind in ("kill", "exec") and size > 3 and rng.random() < 0.3 else 1
    return tuple(sorted(rng.sample(range(size), most)))


def _delay(rng: random.Random, kind: str) -> float | None:
    if kind in ("pause", "signals", "interrupt"):
        return rng.random() * 0.01
    if kind == "cables":
        return rng.choice((0.0, 3.0)) * rng.random()
    return rng.random() * 0.01 if kind in ("kill", "exec", "abort", "joining") and rng.random() < 0.7 else None


def _links(rng: random.Random, size: int, kind: str, devices: str) -> tuple[str, dict[str, str]]:
    """Which ranks share a host, and how links are set up and misbehave."""
    several = kind in NETWORK or (rng.random() < 0.35 and set(devices) == {"c"})
    hosts = "".join(rng.choice("ab" if size < 5 else "abc") for _ in range(size)) if several else "a" * size
    if kind in NETWORK:  # two at least
        there = "abcd"[: rng.randint(2, min(4, size))]
        hosts = "".join(rng.sample([*there, *(rng.choice(there) for _ in range(size - len(there)))], size))
    env = {}
    if rng.random() < 0.3:
        env["HETCOLL_TRANSPORT"] = "tcp"
    may = {
        "HETCOLL_SHM_BYTES": ("4096", "65536"),
        "HETCOLL_SHM_READ": ("always", "never"),
        "HETCOLL_SOCKET_STRIPES": ("2", "3"),
        "HETCOLL_INTEGRITY": ("off", "all"),
        "HETCOLL_REPRODUCIBLE": ("1",),
        "HETCOLL_CHECK": ("1",),
        "HETCOLL_ALGO": [
            f"{kind.label}:{name}"
            for kind, table in ALGORITHMS.items()
            for name, each in table.items()
            if each.supports is bool
        ],
    }
    env |= {name: rng.choice(values) for name, values in may.items() if rng.random() < 0.12}
    if "HETCOLL_REPRODUCIBLE" in env or set(devices) != {"c"}:
        env.pop("HETCOLL_ALGO", None)
    if kind == "links":
        words = [f"delay={rng.random() * 0.3:.2f}", f"short={rng.random():.2f}", f"reorder={rng.random() * 0.5:.2f}"]
        words += [f"stall={1 + rng.randrange(100_000)},hold=0.05"]
        if os.geteuid() == 0:  # it takes CAP_NET_ADMIN
            words.append(f"reset={rng.randrange(100_000, 2_000_000)}")
        env["HETCOLL_FAULT"] = ",".join([*rng.sample(words, rng.randint(1, 4)), f"seed={rng.randrange(1000)}"])
    if kind == "spoil":
        word = rng.choice(
            (f"drop={rng.randint(1, 8)}",)
            + (f"duplicate={rng.randint(1, 8)}", f"close={rng.randint(1, 8)}", f"corrupt={rng.randrange(20_000)}") * 4
        )
        env["HETCOLL_FAULT"] = f"{word},rank={rng.randrange(size)}"
        if word.startswith("corrupt"):
            env |= {"HETCOLL_INTEGRITY": "all", "HETCOLL_TRANSPORT": "tcp"}
    if kind == "truncate":  # the stream of each of a rank's links ends there, mostly in the middle of a message
        env |= {"HETCOLL_FAULT": f"truncate={10 ** (5.5 * rng.random()):.0f},rank={rng.randrange(size)}"}
        env["HETCOLL_TRANSPORT"] = "tcp"
    if "drop" in env.get("HETCOLL_FAULT", ""):
        env["HETCOLL_TIMEOUT"] = str(TIMEOUT)
    if kind in {*CUT, "stop"}:
        env["HETCOLL_INIT_TIMEOUT"] = "8"  # what is made in the midst of it
    if kind in CUT and (kind != "partition" or rng.random() < 0.7):  # else TCP notices
        env["HETCOLL_TIMEOUT"] = str(rng.choice((1, 2)) * TIMEOUT)
    return hosts, env


def _network_attack(rng: random.Random, hosts: str, attack: Attack) -> Attack:
    """What is done to the network between `hosts`, and to whom."""
    there = sorted(set(hosts))
    some = rng.sample(there, rng.randint(1, len(there) - 1))
    delay = {"blink": 0.8 * rng.random(), "rejoin": 2.5 + 4 * rng.random()}.get(attack.kind)
    match attack.kind:
        case "slow":
            how = f"{rng.choice((20, 60, 200))}mbit 256kb 50ms"
        case "lossy":  # what does not leave at once is lost
            how = f"{rng.choice((50, 200))}mbit {rng.choice((3, 8))}kb 1ms"
        case "half":
            how = rng.choice(("part 0", "part 1", "cut 0", "cut 1"))
        case _:
            how = rng.choice(("part 0 1", "cut 0 1") if len(some) == 1 else ("part 0 1",))
    return replace(attack, victims=tuple(r for r, host in enumerate(hosts) if host in some), delay=delay, how=how)


# What ranks call.


def draw_steps(rng: random.Random, size: int, devices: str, most: int, *, part: bool = False) -> tuple[Step, ...]:
    """As many steps for `size` ranks. `part`: of a communicator that is one."""
    hosts = set(devices) == {"c"}
    kinds, types = (STEPS, TYPES) if hosts else (STEPS_ON_GPUS, WIDE)
    if part:
        kinds = {kind: kinds[kind] for kind in IN_PARTS if kind in kinds}
    return tuple(_step(rng, kind, size, types) for kind in rng.choices(list(kinds), list(kinds.values()), k=most))


STEPS = {
    "calls": 12, "messages": 5, "split": 2, "repeat": 1, "objects": 1, "mistake": 1, "fork": 0.3, "weigh": 0.5,
    "agree": 0.7, "look": 0.5, "put": 0.5, "tagged": 0.5, "near": 0.5,
}  # fmt: skip
STEPS_ON_GPUS = {"calls": 12, "messages": 8, "graphs": 5, "split": 2, "mistake": 0.5, "agree": 0.7, "look": 0.5}
IN_PARTS = ("calls", "messages", "graphs")
BESIDE = ("nothing", "barrier", "between")  # what comes between two replays


def _step(rng: random.Random, what: str, size: int, types: Sequence[str]) -> Step:
    some = rng.randrange(size)
    match what:
        case "calls":
            flight = rng.choice((1, 1, 1, 2, 4))
            calls = [(draw_case(rng, size, types), flight > 1 and rng.random() < 0.7) for _ in range(flight)]
            return Step(what, (calls, some, rng.choice((0.0, 0.0, 0.002))))
        case "messages":
            pairs = [rng.sample(range(size), 2) for _ in range(rng.randint(1, 2 * size))] if size > 1 else []
            edges = [(a, b, rng.choice((0, 1, 30, 2000, 2000, 50_000))) for a, b in pairs]
            how, captured = rng.choice(("group", "async", "in turn", "threads")), random.Random(f"{edges} captured")
            if types is TYPES or captured.random() >= 1 / 3:
                return Step(what, (edges, how))
            seeds = [captured.randrange(1 << 20) for _ in range(captured.randint(1, 5))]
            return Step("passing", (edges, captured.random() < 0.5, seeds, captured.choice(BESIDE)))
        case "graphs":
            cases = [_of_something(draw_case(rng, size, types)) for _ in range(rng.choice((1, 1, 2)))]
            seeds = [rng.randrange(1 << 20) for _ in range(rng.randint(1, 5))]
            beside = rng.choice((*BESIDE, "under way"))
            return Step(what, (cases, seeds, beside, some, rng.choice((0.0, 0.0, 0.002))))
        case "tagged":
            return Step(what, (some, rng.randint(1, 9), rng.choice((1, 3000))))
        case "split":
            colors = [rng.choice((0, 0, 1, 1, 2, None)) for _ in range(size)]
            return Step(what, (colors, rng.random() < 0.5, rng.randrange(1 << 30)))
        case "repeat":
            kind = rng.choice((Collective.ALLREDUCE, Collective.ALLGATHER, Collective.BROADCAST))
            return Step(what, (kind.label, rng.choice((1, 100, 5000)), some, rng.randint(1, 4)))
        case "objects":
            return Step(
                what, (rng.choice(("broadcast", "allgather", "gather", "scatter")), some, rng.choice((3, 5000)))
            )
        case "agree":
            return Step(what, ([rng.randrange(1 << 16) | 256 for _ in range(size)],))
        case "near":
            return Step(what, (rng.choice((100, 20_000, 200_000)), some))
        case "put":
            return Step(what, (rng.choice((1, 1000, 20_000)),))
    return Step(what, (some,))


WIDER = {"experts": 4, "caches": 3, "layouts": 3, "pieces": 3, "ring": 1, "returned": 1, "trace": 0.5, "beyond": 1}
ON_GPUS = ("experts", "caches", "pieces", "layouts", "beyond")
ON_HOSTS = [kind for kind in WIDER if kind != "beyond"]  # which takes a GPU


def _widen(key: str, steps: tuple[Step, ...], size: int, devices: str) -> tuple[Step, ...]:
    """In a fifth of programs some steps are those of `wider` instead. All else about a seed stays as it is."""
    rng, here = random.Random(key), {kind: WIDER[kind] for kind in (ON_HOSTS if set(devices) == {"c"} else ON_GPUS)}
    if rng.random() >= 0.2:
        return steps
    return tuple(_wider(rng, here, size, step) if rng.random() < 0.6 else step for step in steps)


def _wider(rng: random.Random, weights: dict[str, float], size: int, step: Step) -> Step:
    what, seed = rng.choices(list(weights), list(weights.values()))[0], rng.randrange(1 << 30)
    match what:
        case "experts":
            dtype, fp8 = rng.choice((("float32", False), ("bfloat16", True), ("float16", False)))
            return Step(what, (rng.random() < 0.5, seed, dtype, fp8, rng.randint(1, 3)))
        case "caches":
            groups = [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4) if a + b <= size]
            if not groups:
                return step
            senders, receivers = rng.choice(groups)
            ranks = rng.sample(range(size), senders + receivers)
            return Step(what, (ranks[:senders], ranks[senders:], seed, rng.random() < 0.2))
        case "layouts":
            return Step(what, (seed, rng.randint(1, 4), rng.random() < 0.5))
        case "beyond":
            return Step(what, (seed, rng.choice((1, 100, 3000))))
        case "pieces":
            return Step(what, (seed, rng.choice((1, 100, 3000))))
        case "returned":
            return Step(what, (rng.choice((1, 100, 5000)), rng.randint(1, 3)))
        case "ring":
            return Step(what, (rng.choice((1, 3000, 50_000)),))
    return Step(what, (rng.randrange(size),))


def draw_case(rng: random.Random, size: int, types: Sequence[str]) -> Case:
    """A collective call whose result is exact."""
    kind = rng.choice(KINDS)
    dtype = rng.choice(("float32", "float64", "int32", rng.choice(types)))
    ops = [op.label for op in ReduceOp if supports(DType[dtype.upper()], op)]
    op = rng.choice(("sum", "sum", rng.choice(ops))) if kind in REDUCING else "sum"
    if op not in ops:
        op = ops[0]
    count = rng.choice((0, 1, 2, size - 1, size + 1, 7, 64, 500, 500, 3001, 3001, rng.choice((20_000, 60_000))))
    if size > 4:
        count = min(count, 3001)
    case = Case(kind.label, dtype, count, op, seed=rng.randrange(1 << 20), shift=rng.choice((0, 0, 0, 1, 5)))
    if kind in ROOTED:
        case = replace(case, root=rng.randrange(size))
    case = replace(case, inplace=kind is not Collective.BROADCAST and rng.random() < 0.5)
    if kind.plain is not kind:
        case = replace(case, counts=tuple(rng.choice((0, 1, 5, 300, 2000)) for _ in range(size)))
    elif kind is Collective.ALLTOALL and rng.random() < 0.3:
        case = replace(case, collective="alltoallv", inplace=False)
    return case


def _of_something(case: Case) -> Case:
    """Not of nothing, which anything can capture."""
    return replace(case, count=max(1, case.count), counts=tuple(n or 1 for n in case.counts))


def _comparable(rng: random.Random, size: int) -> Step:
    """One call that shows all ranks what the victim calls."""
    kind = rng.choice((Collective.ALLREDUCE, Collective.ALLGATHER))
    return Step("calls", ([(Case(kind.label, "float32", rng.choice((1, 64, 3001))), False)], 0, 0.0))


def other_case(case: Case, rng: random.Random) -> Case:
    """What a rank that is mistaken calls in its place."""
    kinds = [kind.label for kind in (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.BROADCAST)]
    ways = (
        replace(case, count=case.count + 1, counts=tuple(n + 1 for n in case.counts)),
        replace(case, dtype="int16" if case.dtype != "int16" else "float32", op="sum"),
        replace(case, collective=kinds[0] if case.collective != kinds[0] else kinds[1], counts=(), op="sum"),
    )
    return rng.choice(ways[: 2 if rng.random() < 0.9 else 3])


def values(*key: int, count: int) -> np.ndarray[Any, Any]:
    """Numbers that differ by key: what messages carry."""
    return np.arange(count, dtype=np.int64) * 7 + hash(key) % 1_000_003

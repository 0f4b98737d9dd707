"""The experiments of benchmarks/seeds.py that train, or decode, a model: their ranks need PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from places import DEVICES, Place, islands_of
from shaped import shaped
from shapes import SHAPES, Shape
from training import FEW, TOLERANCE, Job, dtype_of, losses_of_one

PIPELINES = ("pipeline", "overlapped")  # training_ways.py
SLEEP = {"HETCOLL_SPIN_US": os.environ.get("HETCOLL_SPIN_US", "0")}  # hosts that are namespaces share the cores


@dataclass
class Found:
    """A table, its head first; the figures behind it; and what was wrong."""

    table: list[list[str]]
    figures: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, cells: Sequence[object], figures: Mapping[str, Any]) -> None:
        self.table.append([str(cell) for cell in cells])
        self.figures.append(dict(figures))


def steps_of(args: argparse.Namespace) -> int:
    """Of all turns, and of the one before that is not timed."""
    steps: int = (1 + args.turns) * args.steps
    return steps


def train(
    jobs: Mapping[str, tuple[Job, Shape, Mapping[str, Any]]], args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Each job's median seconds a step, by turns, and its losses. What a job is told says how it trains. The first
    turn is not timed: buckets are cut anew in it, and calls of each length come for the first time."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    losses: dict[str, list[float]] = {name: [] for name in jobs}
    for job, shape, told in jobs.values():
        job.ask({"do": "make", "shape": asdict(shape), "steps": steps_of(args), **told})
    for first in range(0, steps_of(args), args.steps):
        for name, (job, _, _) in jobs.items():
            answers = job.ask({"do": "turn", "first": first, "steps": args.steps})
            losses[name] += answers[0]["losses"]
            if first > 0:
                seconds[name].append(max(each["seconds"] for each in answers))
    return {name: statistics.median(each) for name, each in seconds.items()}, losses


def error(losses: Sequence[float], wanted: Sequence[float], what: str, wrong: list[str]) -> float:
    """The largest relative error of a step's loss."""
    most = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
    if not most < TOLERANCE:
        wrong.append(f"{what}: a loss is off by {most:.1e}")
    return most


def references(
    shapes: Sequence[Shape], places: Sequence[Place], args: argparse.Namespace, home: Path
) -> list[list[float]]:
    """The losses of one process in the first place, in what ranks in all of these places train in."""
    alone = replace(places[0], kind="cpu") if places[0].torch == "cpu" else places[0]
    pieces, dtype = args.ranks * args.pieces, dtype_of(places)
    return losses_of_one(shapes, alone, home, steps=steps_of(args), pieces=pieces, dtype=dtype, seconds=args.seconds)


def told_to(ranks: int, way: str, batch: int, pieces: int) -> dict[str, Any]:
    """How so many ranks train, of whom each has `batch` samples in `pieces`. Both halves are a pipeline of two stages,
    as each half is: its ranks share batches. A half of one rank has no stages."""
    if way not in PIPELINES:
        return {"way": way, "pieces": pieces}
    if ranks == 1:
        return {"way": "ddp", "pieces": pieces}
    return {"way": way, "stages": 2, "samples": batch // pieces}


def halves(args: argparse.Namespace, home: Path) -> Found:
    kinds = DEVICES[args.device]
    places, way = kinds.places(args.ranks, args.hip_python), args.way or ("ddp" if kinds.alike else "balanced")
    found = Found([["model", "first half alone", "second half alone", "their sum", "both, tokens/s", "of the sum",
                    "times the first", "times the second", "error of a loss"]])  # fmt: skip
    found.notes.append(f"Trained by {way}; aimed at is 0.97 of the sum on every model.")
    half = args.ranks // 2
    parts = {"first": places[:half], "second": places[half:], "both": places}
    for model in args.models:
        shape = replace(SHAPES[model], batch=args.batch or SHAPES[model].batch)
        shapes = {name: replace(shape, batch=shape.batch * len(those)) for name, those in parts.items()}
        small, large = references([shapes["first"], shapes["both"]], places, args, home)
        with contextlib.ExitStack() as stack:
            jobs = {}
            for name, those in parts.items():
                env = (islands_of(args.ranks) if kinds.islands else {}) | FEW if name == "both" else {}
                log = home / f"{model}-{name}"
                job = Job(name, "hetcoll", those, log, env, dtype=dtype_of(places), seconds=args.seconds)
                stack.callback(job.close)
                jobs[name] = job, shapes[name], told_to(len(those), way, shape.batch, args.pieces)
            seconds, losses = train(jobs, args)
        rate = {name: shapes[name].batch * shape.length / each for name, each in seconds.items()}
        total = rate["first"] + rate["second"]
        off = max(
            error(each, large if name == "both" else small, f"{model}, {name}", found.wrong)
            for name, each in losses.items()
        )
        cells = [f"{each:.0f}" for each in (rate["first"], rate["second"], total, rate["both"])]
        ratios = [f"{rate['both'] / each:.2f}" for each in (total, rate["first"], rate["second"])]
        found.add([model, *cells, *ratios, f"{off:.0e}"], {"model": model, "tokens_per_second": rate, "error": off})
    return found


@dataclass(frozen=True)
class Way:
    """How what leaves a rank travels: through which host's cards, `cards` of them; hosts "" is none."""

    name: str
    hosts: str = ""  # "each" rank is one, or each "half"
    cards: int = 2
    how: str = "hetcoll"
    published: float = 0.0  # TFLOPS a GPU

    def places(self, places: Sequence[Place], names: Sequence[str]) -> list[Place]:
        half = len(places) // 2
        at = {"each": range(len(places)), "half": [rank // half for rank in range(len(places))]}.get(self.hosts)
        return [replace(each, host=names[at[rank]] if at else "") for rank, each in enumerate(places)]

    @property
    def environment(self) -> dict[str, str]:
        if not self.hosts:
            return {}
        cards = {"HETCOLL_SOCKET_IFNAME": "=eth0"} if self.cards == 1 else {"HETCOLL_SOCKET_STRIPES": "2"}
        return cards | SLEEP | {"GLOO_SOCKET_IFNAME": "eth0"}


FORWARDING = (
    Way("Gloo for all traffic, one card", "each", 1, "gloo"),
    Way("by the CPU for all traffic, one card", "each", 1, published=11.1),
    Way("by the CPU for the pipeline only, one card", "half", 1, published=160.8),
    Way("by the CPU for the pipeline only, all cards", "half", published=236.5),
    Way("not forwarded: one host, memory that both sides map", published=539.6),
)
ONE_VENDOR = 549.7


def forwarding(args: argparse.Namespace, home: Path) -> Found:
    kinds, shape = DEVICES[args.device], SHAPES[args.models[0]]
    if args.ranks < 4:
        raise SystemExit(f"--ranks: wanted 4 or more, so that stages have several, got {args.ranks}")
    whole = replace(shape, batch=shape.batch * args.ranks)
    places = kinds.places(args.ranks, args.hip_python)
    known = [way for way in FORWARDING if way.how == "hetcoll" or args.device == "cpu"]
    ways = [way for at, way in enumerate(known) if not args.only or at in args.only]
    (wanted,) = references([whole], places, args, home)
    found = Found([["how", "tokens/s", "TFLOPS a rank", "part of the last", "published, TFLOPS a GPU",
                    f"part of one vendor's {ONE_VENDOR}", "error of a loss"]])  # fmt: skip
    found.notes.append(f"The model is {args.models[0]}; cards of {args.rate}. TFLOPS are 6 x parameters x tokens/s.")
    jobs: dict[str, tuple[Job, Shape, Mapping[str, Any]]] = {}
    with shaped(args.ranks, args.rate, 256 << 10, second=args.rate) as net, contextlib.ExitStack() as stack:
        for at, way in enumerate(ways):
            env = way.environment | (islands_of(args.ranks) if kinds.islands and way.hosts != "each" else {})
            those = way.places(places, net.hosts)
            log, dtype = home / f"way-{at}", dtype_of(places)
            job = Job(way.name, way.how, those, log, env, dtype=dtype, seconds=args.seconds)
            stack.callback(job.close)
            jobs[way.name] = job, whole, {"way": "pipeline", "stages": 2}
        seconds, losses = train(jobs, args)
    rates = {name: whole.batch * whole.length / each for name, each in seconds.items()}
    for way in ways:
        rate, off = rates[way.name], error(losses[way.name], wanted, way.name, found.wrong)
        flops = 6 * shape.parameters * rate / args.ranks / 1e12
        told = [f"{way.published}", f"{way.published / ONE_VENDOR:.2f}"] if way.published else ["", ""]
        part = rate / rates[ways[-1].name]
        found.add([way.name, f"{rate:.0f}", f"{flops:.3g}", f"{part:.2f}", *told, f"{off:.0e}"],
                  {"way": way.name, "tokens_per_second": rate, "tflops": flops, "error": off})  # fmt: skip
    return found


def inference(args: argparse.Namespace, home: Path) -> Found:
    kinds = DEVICES[args.device]
    places = kinds.places(args.ranks, args.hip_python)
    alone = replace(places[0], kind="cpu") if places[0].torch == "cpu" else places[0]
    found = Found([["model", "how", "ranks", "tokens/s", "of one process", "same tokens", "least gap of logits"]])
    found.notes.append(f"{args.prompts} prompts of {args.prompt} bytes, {args.tokens} tokens each, float32, greedy"
                       f"{', in graphs' if args.graph else ''}.")  # fmt: skip
    names = {"one": "one process", "tensor": "tensor parallel", "stages": "pipeline parallel"}
    for model in args.models:
        shape, answers = replace(SHAPES[model], batch=args.prompts), dict[str, dict[str, Any]]()
        for ways, how, those in ((("one",), "alone", [alone]), (("tensor", "stages"), "hetcoll", places)):
            env = islands_of(args.ranks) if how == "hetcoll" and kinds.islands else {}
            job = Job(how, how, those, home / f"{model}-{how}", env, dtype="float32", seconds=args.seconds)
            try:
                for way in ways:
                    asked = {
                        "do": "decode",
                        "way": way,
                        "shape": asdict(shape),
                        "prompt": args.prompt,
                        "graphs": args.graph,
                    }
                    every = job.ask({**asked, "count": args.tokens})
                    answers[way] = {**every[-1], "seconds": max(each["seconds"] for each in every)}
                    if way == "tensor" and any(each["tokens"] != every[0]["tokens"] for each in every):
                        found.wrong.append(f"{model}, {names[way]}: ranks have different tokens")
            finally:
                job.close()
        for way, answer in answers.items():
            same, of = answer["tokens"] == answers["one"]["tokens"], answers["one"]["seconds"] / answer["seconds"]
            if not same:
                found.wrong.append(f"{model}, {names[way]}: the tokens are not one process's")
            rate, ranks = args.prompts / answer["seconds"], 1 if way == "one" else args.ranks
            cells = [names[way], ranks, f"{rate:.1f}", f"{of:.2f}", "yes" if same else "NO", f"{answer['gap']:.1e}"]
            found.add([model, *cells], {"model": model, "way": way, "tokens_per_second": rate, "same": same, **answer})
    return found

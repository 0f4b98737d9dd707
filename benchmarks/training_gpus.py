"""`benchmarks/training.py --gpus N`: a billion parameters on GPUs, hetcoll and its peers by turns in one run.

Each peer has processes of its own, a rank a GPU (training_rank.py), which wait while another one trains. All train on
the same batches from the same weights; their losses are held against those of one process on one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import results
from gpus import about, free_port
from llama import Shape
from posing import posing
from staying import StayingRanks

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs/measurements/training-tables.md"
GPUS = (2, 4)
PHASES = ("even", "slowed", "balanced")
TURNS, STEPS = 3, 4  # each turn's first step is not timed
SECONDS = 60.0  # for one answer
COMMON = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo",
    "HETCOLL_TIMEOUT": "60", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2",
}  # fmt: skip
FEW = {"NCCL_MAX_NCHANNELS": "8"}  # inside islands, where what crosses is the limit: the SMs are for the model
LARGE = Shape(width=2048, layers=16, heads=32, shared_heads=8, hidden=8192, length=2048, batch=8)  # a rank's batch
SMALL = Shape(width=64, layers=4, heads=4, shared_heads=2, hidden=128, length=32, batch=4)


@dataclass(frozen=True)
class Peer:
    """What carries a job's data: how `training_rank.Rank` knows it, and what it is to people."""

    name: str
    how: str
    islands: bool = False  # two of them, by HETCOLL_ISLANDS


PEERS = {
    "nccl": Peer("NCCL", "nccl"),
    "posing": Peer("hetcoll, half of the GPUs posing as AMD's", "posing"),
    "islands": Peer("hetcoll, two islands", "hetcoll", islands=True),
    "one": Peer("hetcoll, one island", "hetcoll"),
    "gloo": Peer("NCCL inside, Gloo between the halves", "boundary"),
}


class Job(StayingRanks):
    """The ranks of one peer."""

    def __init__(self, peer: Peer, ranks: int, device: str, log: Path) -> None:
        half = ranks // 2
        islands = {"HETCOLL_ISLANDS": f"0-{half - 1}|{half}-{ranks - 1}"} if peer.islands else {}
        islands |= FEW if peer.islands or peer.how == "posing" else {}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        dtype = "bfloat16" if device == "cuda" else "float32"
        commands = []
        for rank in range(ranks):
            poses = peer.how == "posing" and rank >= half
            how = "hetcoll" if peer.how == "posing" and not poses else peer.how
            told = {"how": how, "device": device, "dtype": dtype, "rate": 1e-4}
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **(posing() if poses else {})}
            words = [sys.executable, str(HERE / "training_rank.py"), json.dumps(told)]
            commands.append((words, {**os.environ, **COMMON, **islands, **where, **sizes, **own}))
        super().__init__(peer.name, commands, log, SECONDS)


@dataclass
class Found:
    """What one peer did in one way: seconds a step of each turn, the losses of all steps, bytes on a GPU."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    error: float = 0.0  # of the last loss, against one process


class Run:
    """All peers on the GPUs of this host."""

    def __init__(
        self, peers: Sequence[str], gpus: int, shape: Shape, device: str, home: Path, bucket: int, samples: int
    ) -> None:
        self.gpus, self.shape, self.device, self.home = gpus, shape, device, home
        self.cuts = {"bucket": bucket, "samples": samples}
        self.whole = replace(shape, batch=shape.batch * gpus)
        self.failed: list[str] = []
        self.jobs = {name: Job(PEERS[name], gpus, device, home / name) for name in peers}

    def attempt(self, name: str, do: str, **told: Any) -> list[dict[str, Any]] | None:
        """What a peer's ranks answer. One that fails takes no further part, and is told of in the end."""
        try:
            return self.jobs[name].ask({"do": do, **told})
        except RuntimeError as error:
            print(error, flush=True)
            self.failed.append(f"{PEERS[name].name}: {do} {told.get('way', '')}")
            self.jobs[name].kill()
            self.jobs.pop(name).close()
            return None

    def reference(self) -> list[float]:
        """Losses of one process."""
        job = Job(Peer("one process", "alone"), 1, self.device, self.home / "alone")
        steps = TURNS * STEPS
        make = {"do": "make", "way": "one", "shape": asdict(self.whole), "steps": steps, "pieces": self.gpus}
        job.ask(make)
        losses: list[float] = job.ask({"do": "turn", "first": 0, "steps": steps})[0]["losses"]
        job.close()
        return losses

    def train(self, way: str) -> dict[str, Found]:
        """By turns."""
        found = {name: Found() for name in self.jobs}
        for name in list(self.jobs):
            self.attempt(name, "make", way=way, shape=asdict(self.whole), steps=TURNS * STEPS, pieces=1, **self.cuts)
        for turn in range(TURNS):
            for name in list(self.jobs):
                answers = self.attempt(name, "turn", first=turn * STEPS, steps=STEPS)
                if answers is None:
                    continue
                found[name].seconds.append(max(each["seconds"] for each in answers))
                found[name].losses += answers[0]["losses"]
                found[name].peak = max(each.get("peak", 0) for each in answers)
        for name in list(self.jobs):
            self.attempt(name, "drop")
        return {name: each for name, each in found.items() if len(each.seconds) == TURNS}

    def close(self) -> None:
        for job in self.jobs.values():
            job.close()


def judge(way: str, found: dict[str, Found], wanted: list[float], tokens: int) -> str:
    """Lines for people; sets the errors."""
    lines = []
    for name, each in found.items():
        each.error = abs(each.losses[-1] - wanted[-1]) / wanted[-1]
        rate = tokens / statistics.median(each.seconds)
        of = {peer: statistics.median(found[peer].seconds) / statistics.median(each.seconds) for peer in found}
        lines.append(
            f"{way:10} {PEERS[name].name:42} {rate:9.0f} tokens/s, of NCCL {of.get('nccl', 0):.3f}, of Gloo "
            f"{of.get('gloo', 0):.2f}, loss {each.losses[0]:.4f} to {each.losses[-1]:.5f}, error {each.error:.1e}, "
            f"{each.peak >> 30} GiB"
        )
    return "\n".join(lines)


def markdown(done: dict[str, dict[str, Found]], balanced: dict[str, Any], tokens: int, gpus: int) -> str:
    """NCCL's tokens/s in each way; of each peer the part of them that it reaches, and in brackets how often Gloo's."""
    rows = [["carried by", *done], ["---", *["---:"] * len(done)]]
    nccl = [
        f"{tokens / statistics.median(found['nccl'].seconds):.0f}" if "nccl" in found else "-"
        for found in done.values()
    ]
    rows.append(["NCCL, tokens/s", *nccl])
    for name, peer in PEERS.items():
        if any(name in found for found in done.values()):
            rows.append([peer.name, *(ratios(found, name) for found in done.values())])
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    error = max((each.error for found in done.values() for each in found.values()), default=0.0)
    told = [f"The largest error of a loss: {error:.1e}.", *([balance_text(balanced, gpus)] if balanced else [])]
    return "\n\n".join([f"### {gpus} GPUs", table, *told])


def ratios(found: dict[str, Found], name: str) -> str:
    """A peer's speed, of NCCL's and in brackets of Gloo's."""
    if name not in found:
        return "-"
    middle = statistics.median(found[name].seconds)
    nccl, gloo = (
        f"{statistics.median(found[peer].seconds) / middle:.{digits}f}" if peer in found else "-"
        for peer, digits in (("nccl", 3), ("gloo", 2))
    )
    return f"{nccl} ({gloo})"


def section(gpus: int) -> str:
    """The name of the marks in training-tables.md between which the table stands."""
    return f"training on {gpus} GPUs"


def balance_text(found: dict[str, Any], gpus: int) -> str:
    even, slowed, balanced = (found[phase] for phase in PHASES)
    losses = ", ".join(f"{found[f'loss {phase}']:.4f}" for phase in PHASES)
    left = (gpus - 1 + even / slowed) / gpus  # with equal parts all wait for the slowed one, so that gives its speed
    return (
        f"One GPU of {gpus} slowed to half its speed (it computes every layer twice), DistributedDataParallel on "
        f"hetcoll, two islands: {100 * even / slowed:.0f} % of the tokens/s of equal GPUs with equal parts, "
        f"{100 * even / balanced:.0f} % with `hetcoll.torch.balance` (parts {', '.join(map(str, found['shares']))}); "
        f"the GPUs leave {100 * left:.0f} %, so balance reaches {even / balanced / left:.3f} of its share. "
        f"Losses after as many steps: {losses}, each going on from the last."
    )


def main(args: argparse.Namespace, tolerance: float) -> int:
    deadline, start = time.monotonic() + args.limit, time.monotonic()
    device = "cpu" if args.small else "cuda"
    done: dict[str, dict[str, Found]] = {}
    balanced: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        shape = SMALL if args.small else LARGE
        run = Run(args.peers.split(","), args.gpus, shape, device, Path(home), args.bucket, args.samples)
        stack.callback(run.close)
        tokens = run.whole.batch * run.whole.length
        ways = [way for way in args.ways.split(",") if way]
        wanted = run.reference() if ways else []
        print(f"{time.monotonic() - start:.0f} s; one process: {' '.join(f'{x:.4f}' for x in wanted)}", flush=True)
        for way in ways:
            if time.monotonic() > deadline:
                run.failed.append(f"{way}: no time left")
                continue
            done[way] = run.train(way)
            print(judge(way, done[way], wanted, tokens), f"{time.monotonic() - start:.0f} s", sep="\n", flush=True)
            save(args.json, run, done, balanced, wanted)
        if "islands" in run.jobs and time.monotonic() < deadline:
            shape = replace(run.whole, length=run.whole.length // 4, batch=run.whole.batch * 4)
            answers = run.attempt("islands", "balance", shape=asdict(shape), steps=8)
            balanced = answers[0] if answers else {}
            if balanced:
                print(balance_text(balanced, args.gpus), f"{time.monotonic() - start:.0f} s", sep="\n", flush=True)
        save(args.json, run, done, balanced, wanted)
    each_of = [(f"{way} {name}", each) for way, found in done.items() for name, each in found.items()]
    wrong = [name for name, each in each_of if not each.error < tolerance]
    for problem in (*run.failed, *(f"{name}: the loss is wrong" for name in wrong)):
        print(f"failed: {problem}")
    if args.write_docs and not run.failed and not wrong:
        command = f"python benchmarks/training.py --gpus {args.gpus} --bucket {args.bucket} --samples {args.samples}"
        words = f"{about()}, PyTorch {torch_version()}. `{command}`, medians of {TURNS} turns."
        told = json.dumps(document(run, done, balanced, wanted), indent=1) + "\n"
        all_of_it = results.keep(told, PAGE.parent, time.strftime("%Y-%m-%d"), f"training-{args.gpus}")
        text = f"{words} Everything: {all_of_it}.\n\n{markdown(done, balanced, tokens, args.gpus)}"
        name, page = section(args.gpus), PAGE.read_text()
        PAGE.write_text(results.replace_between_marks(page, name, text, "benchmarks/training.py"))
    return int(bool(run.failed or wrong))


def torch_version() -> str:
    import torch

    return str(torch.__version__)


def document(run: Run, done: dict[str, dict[str, Found]], balanced: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """Everything, for the JSON file."""
    ways = {way: {name: asdict(each) for name, each in found.items()} for way, found in done.items()}
    told = {"about": about(), "shape": asdict(run.whole), "one process": wanted, "ways": ways}
    return told | {"balance": balanced, "failed": run.failed}


def save(file: Path | None, run: Run, done: dict[str, dict[str, Found]], balanced: dict[str, Any], wanted: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(document(run, done, balanced, wanted), indent=1) + "\n")

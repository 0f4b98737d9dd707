"""Train a LLaMA-shaped decoder, hetcoll and its peers by turns in one run, and hold the losses to those of one process.

    python benchmarks/training.py [--ranks 4] [--ways ddp,fsdp2,pipeline,overlapped] [--json FILE]
    python benchmarks/training.py --gpus 2 [--write-docs]

The first form trains a small model on CPUs; the second one of a billion parameters on GPUs. Each peer has processes of
its own, a rank a GPU (training_rank.py), which wait while another one trains. The text is Python's own reference (the
module pydoc_data.topics, which CPython ships), read as bytes. Every way trains the same model from the same weights on
the same batches; what may differ is the order of additions. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import results
from gpus import about
from places import DEVICES, Place, commands, islands_of
from shapes import SHAPES, Shape
from staying import StayingRanks

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs/measurements/training-tables.md"
GPUS = (2, 4)
WAYS = ("ddp", "fsdp2", "pipeline", "overlapped")  # training_ways.py
PHASES = ("even", "slowed", "balanced")
TURNS, STEPS = 3, 4  # each turn's first step is not timed
SECONDS = 60.0  # for one answer
TOLERANCE = 7e-3  # HetCCL's figure for the relative error of the loss
COMMON = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo",
    "HETCOLL_TIMEOUT": "60", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2",
}  # fmt: skip
FEW = {"NCCL_MAX_NCHANNELS": "8"}  # inside islands, where what crosses is the limit: the SMs are for the model


@dataclass(frozen=True)
class Peer:
    """What carries a job's data: how `training_rank.Rank` knows it, and what it is to people."""

    name: str
    how: str
    device: str = "cuda"  # a key of DEVICES
    islands: bool = False  # two of them, by HETCOLL_ISLANDS


PEERS = {
    "nccl": Peer("NCCL", "nccl"),
    "posing": Peer("hetcoll, half of the GPUs posing as AMD's", "hetcoll", "posing"),
    "islands": Peer("hetcoll, two islands", "hetcoll", islands=True),
    "one": Peer("hetcoll, one island", "hetcoll"),
    "gloo": Peer("NCCL inside, Gloo between the halves", "boundary"),
}
ON_CPUS = {"hetcoll": Peer("hetcoll", "hetcoll", "cpu"), "gloo": Peer("Gloo", "gloo", "cpu")}


def dtype_of(places: Sequence[Place]) -> str:
    """What ranks there train in: all in the same, so that their losses and speeds can be compared."""
    return "bfloat16" if all(place.torch != "cpu" for place in places) else "float32"


class Job(StayingRanks):
    """The ranks of a job of training_rank.py in these places."""

    def __init__(
        self, name: str, how: str, places: Sequence[Place], log: Path, env: Mapping[str, str], *, dtype: str,
        rate: float = 1e-4, seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        told = [{"how": how, "kind": each.kind, "device": each.torch, "dtype": dtype, "rate": rate} for each in places]
        script = str(HERE / "training_rank.py")
        words = [[each.python, script, json.dumps(one)] for each, one in zip(places, told, strict=True)]
        super().__init__(name, commands(words, {**COMMON, **env}, places), log, seconds)


def job_of(peer: Peer, ranks: int, log: Path) -> Job:
    env = (islands_of(ranks) if peer.islands else {}) | (FEW if peer.islands or peer.device == "posing" else {})
    places = DEVICES[peer.device].places(ranks)
    return Job(peer.name, peer.how, places, log, env, dtype=dtype_of(places))


def losses_of_one(
    shapes: Sequence[Shape], place: Place, home: Path, *, steps: int, pieces: int, dtype: str, seconds: float = SECONDS
) -> list[list[float]]:
    """Of one process that trains each on whole batches."""
    job, losses = Job("one process", "alone", [place], home / "alone", {}, dtype=dtype, seconds=seconds), []
    try:
        for shape in shapes:
            job.ask({"do": "make", "way": "one", "shape": asdict(shape), "steps": steps, "pieces": pieces})
            losses.append(job.ask({"do": "turn", "first": 0, "steps": steps})[0]["losses"])
            job.ask({"do": "drop"})
        return losses
    finally:
        job.close()


@dataclass
class Found:
    """What one peer did in one way: seconds a step of each turn, the losses of all steps, bytes on a GPU."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    error: float = 0.0  # of the last loss, against one process


class Run:
    """All peers on the GPUs of this host, or on its CPUs."""

    def __init__(self, peers: Mapping[str, Peer], args: argparse.Namespace, home: Path) -> None:
        self.peers, self.ranks, self.home = peers, args.gpus or args.ranks, home
        self.cuts = {"bucket": args.bucket, "samples": args.samples}
        shape = SHAPES["billion" if args.gpus else "small"]
        self.whole = replace(shape, batch=shape.batch * self.ranks)
        self.failed: list[str] = []
        self.jobs = {name: job_of(peer, self.ranks, home / name) for name, peer in peers.items()}

    def attempt(self, name: str, do: str, **told: Any) -> list[dict[str, Any]] | None:
        """What a peer's ranks answer. One that fails takes no further part, and is told of in the end."""
        try:
            return self.jobs[name].ask({"do": do, **told})
        except RuntimeError as error:
            print(error, flush=True)
            self.failed.append(f"{self.peers[name].name}: {do} {told.get('way', '')}")
            self.jobs[name].kill()
            self.jobs.pop(name).close()
            return None

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


def judge(way: str, found: dict[str, Found], wanted: list[float], tokens: int, peers: Mapping[str, Peer]) -> str:
    """Lines for people; sets the errors."""
    lines = []
    for name, each in found.items():
        each.error = abs(each.losses[-1] - wanted[-1]) / wanted[-1]
        middle = statistics.median(each.seconds)
        of = {peer: statistics.median(found[peer].seconds) / middle for peer in ("nccl", "gloo") if peer in found}
        ratios = "".join(f", of {peers[peer].name} {ratio:.3f}" for peer, ratio in of.items() if peer != name)
        lines.append(
            f"{way:10} {peers[name].name:42} {tokens / middle:9.0f} tokens/s{ratios}, loss {each.losses[0]:.4f} to "
            f"{each.losses[-1]:.5f}, error {each.error:.1e}, {each.peak >> 30} GiB"
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


def run_all(args: argparse.Namespace) -> int:
    start = time.monotonic()
    done: dict[str, dict[str, Found]] = {}
    balanced: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        known = PEERS if args.gpus else ON_CPUS
        run = Run({name: known[name] for name in args.peers.split(",")}, args, Path(home))
        stack.callback(run.close)
        tokens = run.whole.batch * run.whole.length
        ways = [way for way in args.ways.split(",") if way]
        place, steps = Place("cuda" if args.gpus else "cpu"), TURNS * STEPS
        wanted = []
        if ways:
            (wanted,) = losses_of_one(
                [run.whole], place, Path(home), steps=steps, pieces=run.ranks, dtype=dtype_of([place])
            )
        print(f"{time.monotonic() - start:.0f} s; one process: {' '.join(f'{x:.4f}' for x in wanted)}", flush=True)
        for way in ways:
            if time.monotonic() > start + args.limit:
                run.failed.append(f"{way}: no time left")
                continue
            done[way] = run.train(way)
            told = judge(way, done[way], wanted, tokens, run.peers)
            print(told, f"{time.monotonic() - start:.0f} s", sep="\n", flush=True)
            save(args.json, run, done, balanced, wanted)
        if "islands" in run.jobs and time.monotonic() < start + args.limit:
            shape = replace(run.whole, length=run.whole.length // 4, batch=run.whole.batch * 4)
            answers = run.attempt("islands", "balance", shape=asdict(shape), steps=8)
            balanced = answers[0] if answers else {}
            if balanced:
                print(balance_text(balanced, args.gpus), f"{time.monotonic() - start:.0f} s", sep="\n", flush=True)
        save(args.json, run, done, balanced, wanted)
    each_of = [(f"{way} {name}", each) for way, found in done.items() for name, each in found.items()]
    wrong = [name for name, each in each_of if not each.error < TOLERANCE]
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
    return importlib.metadata.version("torch")


def document(run: Run, done: dict[str, dict[str, Found]], balanced: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """Everything, for the JSON file."""
    ways = {way: {name: asdict(each) for name, each in found.items()} for way, found in done.items()}
    told = {"about": about(), "shape": asdict(run.whole), "one process": wanted, "ways": ways}
    return told | {"balance": balanced, "failed": run.failed}


def save(file: Path | None, run: Run, done: dict[str, dict[str, Found]], balanced: dict[str, Any], wanted: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(document(run, done, balanced, wanted), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="on CPUs")
    parser.add_argument("--gpus", type=int, choices=GPUS, help="train the large model on so many GPUs")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--peers", help=f"of {','.join(ON_CPUS)}; with --gpus of {','.join(PEERS)} (default: all)")
    parser.add_argument("--bucket", type=int, default=250, help="MiB of DistributedDataParallel's buckets")
    parser.add_argument("--samples", type=int, help="in a micro-batch of the pipeline (default 1; with --gpus 2)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds; the rest is left out")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    parser.add_argument("--write-docs", action="store_true", help="with --gpus: write the table of training-tables.md")
    args = parser.parse_args()
    if args.write_docs and not args.gpus:
        parser.error("--write-docs: wanted with --gpus: the table is of the large model on GPUs")
    args.peers = args.peers or ",".join(PEERS if args.gpus else ON_CPUS)
    args.samples = args.samples or (2 if args.gpus else 1)
    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())

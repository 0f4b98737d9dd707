"""A job that trains, loses a rank, goes on with the rest, and takes a new one in: how long each phase takes.

    python benchmarks/elastic.py [--ranks 4] [--device cuda] [--model billion] [--victim 1] [--json FILE]

Data-parallel training of the decoder of llama.py, whose ranks are told where they are by places.py. The victim kills
itself (SIGKILL) in the middle of the collectives of a step. The others `agree` that the step failed, `shrink`, and go
on, a larger part of each batch on each. `hetcoll run` starts the victim again. Between steps the others look whether it
has come (`grow` with a short timeout); then rank 0 tells it the weights, the optimizer's state and the losses, and all
train some steps more. Every step is on the whole batch, so the losses are to be those of one process, but for rounding.
Phases are by the clock of this host; a phase of several ranks ends with the last of them. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from places import DEVICES
from shapes import SHAPES, Shape

TOLERANCE = 7e-3  # as training.py's
PIECE = 2  # samples that a GPU has at work at once
LOOK = 0.05  # seconds that survivors wait for a newcomer between two steps
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "HETCOLL_TIMEOUT": "60", "OMP_NUM_THREADS": "1",
}  # fmt: skip


class Trainer:
    """This process's model, and what it takes part with in a step of all."""

    def __init__(self, shape: Shape, device: str, steps: int) -> None:
        import torch
        from llama import batches, layers
        from training_ways import made_on, optimizer_of

        self.device, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16
        if device == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
        with made_on(self.device, dtype):
            self.model = torch.nn.Sequential(*layers(shape))
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer_of(self.model, 1e-4)
        self.data = [(x.to(self.device), y.to(self.device)) for x, y in batches(shape, steps)]
        for each in self.parameters:
            each.grad = torch.zeros_like(each)
        self.optimizer.step()  # makes the state, for whoever is told it; zero gradients leave only the decay
        self.gradients = torch.zeros(sum(each.numel() for each in self.parameters), dtype=dtype, device=self.device)

    def state(self) -> list[Any]:
        """All that a newcomer has to be told, in one order on all ranks."""
        kept = [self.optimizer.state[each] for each in self.parameters]
        return [
            *(each.data for each in self.parameters),
            *(one[key] for one in kept for key in ("exp_avg", "exp_avg_sq", "step")),
        ]

    def part(self, step: int, rank: int, size: int) -> Any:
        """This rank's gradients, in `gradients`, and its part of the batch's mean loss."""
        import torch
        from llama import loss_of

        x, y = (whole[rank * len(whole) // size : (rank + 1) * len(whole) // size] for whole in self.data[step])
        count, total = len(self.data[step][0]), torch.zeros(1, device=self.device)
        self.optimizer.zero_grad()
        for inputs, wanted in zip(x.split(PIECE), y.split(PIECE), strict=True):
            loss = loss_of(self.model(inputs), wanted) * (len(inputs) / count)
            loss.backward()
            total += loss.detach()
        torch.cat([each.grad.flatten() for each in self.parameters if each.grad is not None], out=self.gradients)
        return total

    def learn(self) -> None:
        """From the whole batch's gradients."""
        for each, whole in zip(
            self.parameters, self.gradients.split([each.numel() for each in self.parameters]), strict=True
        ):
            each.grad = whole.view_as(each)
        self.optimizer.step()


class Rank:
    """A rank of the job. `mark` writes down when something had happened."""

    def __init__(self, args: argparse.Namespace) -> None:
        begun = time.time()
        self.args, self.seat = args, int(os.environ["LOCAL_RANK"])
        self.marks = args.rank / f"{self.seat}-{os.getpid()}"
        place = DEVICES[args.device].places(args.ranks)[self.seat]
        self.trainer = Trainer(shape_of(args), place.torch, args.steps)
        self.losses: Any = self.trainer.gradients.new_zeros(args.steps).float()
        self.mark("made", since=begun)
        import hetcoll

        self.comm = self.shown(hetcoll.init())
        if self.comm.epoch:
            self.mark("in")
            self.tell()

    def mark(self, what: str, **told: Any) -> None:
        line = json.dumps({"what": what, "at": time.time(), "epoch": self.epoch, **told})
        with self.marks.open("a") as file:
            file.write(line + "\n")

    @property
    def epoch(self) -> int:
        return self.comm.epoch if hasattr(self, "comm") else -1

    def shown(self, comm: Any) -> Any:
        """The communicator as this rank's tensors need it."""
        if self.args.device != "posing":
            return comm
        sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))
        from torch_substitutes import Posing

        return Posing(comm) if os.environ["HETCOLL_DEVICE"].startswith("hip") else comm

    def tell(self) -> None:
        """Everybody has rank 0's state, and all steps that were done."""
        for each in (self.losses, *self.trainer.state()):
            if each.device == self.trainer.device:
                self.comm.broadcast(each).wait()
            else:  # the optimizer's count of steps is a number of the host
                moved = each.to(self.trainer.device)
                self.comm.broadcast(moved).wait()
                each.copy_(moved)
        self.mark("told")

    def step(self, step: int) -> bool:
        """Whether it was done: by all, or by nobody."""
        import hetcoll

        loss = self.trainer.part(step, self.comm.rank, self.comm.size)
        try:
            self.comm.allreduce(loss).wait()
            if step == self.args.kill and self.seat == self.args.victim and not self.comm.epoch:
                self.mark("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            self.comm.allreduce(self.trainer.gradients).wait()
            went_well = True
        except hetcoll.CommunicationError:
            self.mark("failed")
            went_well = False
        if not self.comm.agree(went_well):
            return False
        self.trainer.learn()
        self.losses[step] = loss[0]
        return True

    def shrink(self) -> None:
        old = self.comm
        self.comm = self.shown(old.shrink())
        self.mark("shrunk")
        old.close()

    def look(self) -> None:
        """Take in who has come, if somebody has."""
        import hetcoll

        begun = time.time()
        try:
            grown = self.shown(self.comm.grow(1, timeout=LOOK))
        except hetcoll.InitError:
            return
        self.comm.close()
        self.comm = grown
        self.mark("grown", since=begun)
        self.tell()

    def train(self) -> None:
        more = self.args.more
        while (done := int((self.losses != 0).sum())) < self.args.steps and more:
            if not self.step(done):
                self.shrink()
                continue
            self.mark("step", step=done, size=self.comm.size)
            if self.comm.epoch == 0 or self.comm.size == self.args.ranks:
                more -= self.comm.epoch > 0
            else:
                self.look()
        self.mark("end", losses=self.losses[: int((self.losses != 0).sum())].tolist())
        self.comm.barrier()
        self.comm.close()


def shape_of(args: argparse.Namespace) -> Shape:
    return replace(SHAPES[args.model], batch=args.batch)


def alone(args: argparse.Namespace, steps: int) -> list[float]:
    """The losses of one process."""
    place = DEVICES[args.device].places(args.ranks)[0]
    trainer, losses = Trainer(shape_of(args), place.torch, steps), []
    for step in range(steps):
        losses.append(float(trainer.part(step, 0, 1)))
        trainer.learn()
    return losses


def job(args: argparse.Namespace, told: Sequence[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each process of a job marked."""
    words = [sys.executable, "-m", "hetcoll", "run", "-n", str(args.ranks), "--respawn", "1", "--no-bind"]
    rank = [sys.executable, str(Path(__file__)), *told, "--rank", str(folder)]
    subprocess.run([*words, *rank], env={**os.environ, **ENVIRONMENT}, check=True, timeout=args.seconds)
    return {each.name: [json.loads(line) for line in each.read_text().splitlines()] for each in folder.iterdir()}


def phases(marks: dict[str, list[dict[str, Any]]]) -> list[tuple[str, float]]:
    """Each phase and its seconds."""
    by_what: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for lines in marks.values():
        for line in lines:
            by_what.setdefault((line["what"], line["epoch"]), []).append(line)
    epochs = sorted({epoch for _, epoch in by_what})

    def last(what: str, epoch: int) -> float:
        return max(float(line["at"]) for line in by_what[what, epoch])

    def pace(epoch: int) -> float:
        ends = [
            [line["at"] for line in each if (line["what"], line["epoch"]) == ("step", epoch)] for each in marks.values()
        ]
        return statistics.median(float(b - a) for each in ends for a, b in itertools.pairwise(each))

    _, start, less, more = epochs
    killed, failed, shrunk = last("killed", start), last("failed", start), last("shrunk", less)
    grown, told = last("grown", more), last("told", more)
    first = min(line["at"] for line in by_what["step", less])
    (newcomer,) = (lines for lines in marks.values() if any(line["what"] == "in" for line in lines))
    return [
        ("a step of all ranks", pace(start)),
        ("the survivors know that a rank is lost", failed - killed),
        ("they agree, and shrink", shrunk - failed),
        ("their first step, from then on", first - shrunk),
        ("a step of theirs", pace(less)),
        ("the rank that is started again has begun, since it was killed", newcomer[0]["since"] - killed),
        ("it has PyTorch, a model and an optimizer", newcomer[0]["at"] - newcomer[0]["since"]),
        ("it is taken in: the others' call of grow", max(grown - line["since"] for line in by_what["grown", more])),
        ("it is told weights, optimizer and losses", told - grown),
        ("the first step of all, from then on", min(line["at"] for line in by_what["step", more]) - told),
        ("a step of all ranks again", pace(more)),
    ]


def rank(args: argparse.Namespace) -> None:
    """As a rank: with the environment of its place from the start, which packages read when they are loaded."""
    place = DEVICES[args.device].places(args.ranks)[int(os.environ["LOCAL_RANK"])]
    own = place.environment(args.ranks)
    if any(os.environ.get(key) != value for key, value in own.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **own})
    Rank(args).train()


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda", "hip", "posing"], default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--batch", type=int, default=12, help="of all ranks")
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--kill", type=int, default=8, help="at this step, from 0")
    parser.add_argument("--more", type=int, default=8, help="steps once all are there again")
    parser.add_argument("--steps", type=int, default=1000, help="at most")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.ranks < 2 or not 0 <= args.victim < args.ranks:
        parser.error(f"wanted two ranks or more, and one of them as --victim, got {args.ranks} and {args.victim}")
    if args.batch < args.ranks:
        parser.error(f"--batch: wanted a sample for each of {args.ranks} ranks, got {args.batch}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    args = parse(words)
    if args.rank:
        rank(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        marks = job(args, words, Path(folder))
    ends = [line["losses"] for lines in marks.values() for line in lines if line["what"] == "end"]
    wanted = alone(args, len(ends[0]))
    off = max(abs(a - b) / b for each in ends for a, b in zip(each, wanted, strict=True))
    found = phases(marks)
    print("| phase | seconds |", "| --- | ---: |", *(f"| {name} | {each:.3f} |" for name, each in found), sep="\n")
    print(f"\n{len(wanted)} steps, on {len(ends)} ranks in the end. Losses from {wanted[0]:.3f} to {wanted[-1]:.3f}; "
          f"of one process's they are off by {off:.1e} at most.")  # fmt: skip
    if args.json:
        told = {"model": args.model, "ranks": args.ranks, "device": args.device, "error": off, "losses": ends[0]}
        args.json.write_text(json.dumps({**told, "alone": wanted, "phases": dict(found)}, indent=1) + "\n")
    if len(ends) != args.ranks or off >= TOLERANCE:
        print("WRONG: wanted all ranks in the end, and one process's losses")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

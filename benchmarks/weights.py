"""A model's weights from the ranks that train to those that serve: `hetcoll.torch.reshard` beside what else moves them.

    python benchmarks/weights.py                                          # small, on CPUs, beside Gloo
    python benchmarks/weights.py --device cuda --ranks 2 --models billion qwen2-7b
    HETCOLL_ISLANDS='0|1' python benchmarks/weights.py --device cuda --ranks 2
    python benchmarks/weights.py --ranks 4 --hosts 2 --rate 1gbit         # over links of a known rate; as root

Each rank holds its part of every weight as `--trainers` ranks have it (FSDP: rows), and gets its part as servers do
(tensor parallel: columns; or all of it). Both may be all ranks, or ranks that are not the same. The ways take turns,
round for round; before each one the trainers write other weights, and behind it every element is compared. Norms are
whole on every server. Results are new tensors, but for "in place", which writes those that a server has.

The peers are DTensor's `redistribute`, which wants one mesh on both sides, and a broadcast of each trainer's part of
each weight to all ranks, which keep what is theirs. GB/s are the model's bytes by time. The limit is what the busiest
rank has to send or to receive, as one plain send or one plain copy, whichever is faster. With `--hosts` ranks are in
network namespaces, servers may be one group on each host as well, and the limit is the link of the host that lacks
most. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from places import Place, commands
from shaped import FRAMES, bits, shaped
from shapes import SHAPES, Shape
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import hetcoll.torch
from hetcoll.plan.layout import Box, Layout, common, extents, volume
from hetcoll.torch import layout, reshard, reshard_all

OURS = "hetcoll"
DTYPE = torch.bfloat16
LIMITS = ("plain send", "plain copy")
ON_HOSTS = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "HETCOLL_SPIN_US": "0"}  # they share the cores


def weights_of(s: Shape) -> list[tuple[int, ...]]:
    """The shapes of a decoder's weights (llama.py)."""
    kept, norm, ends = s.width // s.heads * s.shared_heads, (s.width,), (s.vocabulary, s.width)
    attention = [(s.width, s.width), (kept, s.width), (kept, s.width), (s.width, s.width)]
    block = [norm, *attention, norm, (s.hidden, s.width), (s.hidden, s.width), (s.width, s.hidden)]
    return [ends, *(block * s.layers), norm, ends]


@dataclass(frozen=True)
class Case:
    """Who has rows of the weights, and who gets what of them."""

    sources: range
    targets: range
    placement: Placement
    groups: int = 1  # of targets, each of which gets all

    def __str__(self) -> str:
        where = (
            f"{len(self.sources)} to {len(self.targets)} other ranks" if self.apart else f"{len(self.sources)} ranks"
        )
        shards = isinstance(self.placement, Shard) and len(self.targets) > 1
        each = f" in each of {self.groups} groups" if self.groups > 1 else ""
        return f"{where}, Shard(0) to {'Shard(1)' if shards else 'Replicate()'}{each}"

    @property
    def apart(self) -> bool:
        return self.sources != self.targets

    def placed(self, shape: Sequence[int]) -> Placement:
        return self.placement if len(shape) > 1 else Replicate()

    def layouts(self, shape: Sequence[int]) -> tuple[Layout, Layout]:
        mesh = torch.tensor(self.targets).view(self.groups, -1)
        return layout(shape, self.sources, [Shard(0)]), layout(shape, mesh, [Replicate(), self.placed(shape)])

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Who sends to whom so that as many as may be do so at once."""
        if self.apart:
            return list(zip(self.sources, self.targets, strict=False))
        return [(rank, (rank + 1) % len(self.sources)) for rank in self.sources]

    def busiest(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Bytes that some rank has to send, or to receive: what others want of it once, what it wants of others."""
        sent, got = dict.fromkeys(self.sources, 0), dict.fromkeys(self.targets, 0)
        for source, target in map(self.layouts, shapes):
            for holder, held in source.boxes.items():
                parts = {to: both for to, box in target.boxes.items() if (both := common(held, box)) and to != holder}
                sent[holder] += sum(map(volume, set(parts.values())))
                for to, part in parts.items():
                    got[to] += volume(part)
        return max(*sent.values(), *got.values()) * int(DTYPE.itemsize)

    def lacked(self, shapes: Sequence[tuple[int, ...]], hosts: Sequence[Sequence[int]]) -> int:
        """Bytes of all weights that the ranks of some host want, and none of these holds."""
        found = dict.fromkeys(range(len(hosts)), 0)
        for source, target in map(self.layouts, shapes):
            for number, ranks in enumerate(hosts):
                wanted = {box for rank, box in target.boxes.items() if rank in ranks}
                far = (box for rank, box in source.boxes.items() if rank not in ranks)
                parts = {both for held in far for box in wanted if (both := common(held, box))}
                found[number] += sum(map(volume, parts))
        return max(found.values()) * int(DTYPE.itemsize)


def cases(ranks: int, trainers: int, hosts: int) -> list[Case]:
    every, servers = range(ranks), range(trainers, ranks)
    asked = [(every, Shard(1)), (every, Replicate()), (range(trainers), Shard(1)), (range(trainers), Replicate())]
    found = [Case(first, every if first == every else servers, to) for first, to in asked]
    found = found[:3] if len(servers) == 1 else found  # one server has all, either way
    return found + [Case(every, every, Shard(1), hosts)] * (hosts > 1)


def expected(box: Box, number: int, device: torch.device) -> Tensor:
    """A block of the weight `number`: small whole numbers, which have a bfloat16, and come again where none is cut."""
    first, *second = (torch.arange(begin, end, device=device) + number for begin, end in box)
    if not second:
        return (first % 247).to(DTYPE)
    return (first % 13 * 19).to(DTYPE)[:, None] + (second[0] % 19).to(DTYPE)


class Rank:
    """This rank's weights in one case, and the ways to move them: each gives this rank's part of the result."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.backend = "NCCL" if device.type == "cuda" else "Gloo"
        self.group = dist.new_group(backend="hetcoll")
        self.comm: hetcoll.Communicator = self.group.comm
        self.mesh = dist.init_device_mesh(device.type, (self.size,))

    def begin(self, case: Case, shapes: Sequence[tuple[int, ...]]) -> dict[str, Callable[[], list[Tensor]]]:
        self.case, self.shapes, self.layouts = case, shapes, [case.layouts(shape) for shape in shapes]
        self.held = [self.new(source.shape_on(self.rank)) for source, _ in self.layouts]
        self.outs = [self.new(target.shape_on(self.rank)) for _, target in self.layouts]
        self.busiest = case.busiest(shapes)
        self.payload = torch.ones(self.busiest, dtype=torch.uint8, device=self.device)
        self.other, self.far = torch.zeros_like(self.payload), torch.empty(0)
        for to in (to for who, to in case.pairs if who == self.rank):
            there = self.device if self.device.type == "cpu" else torch.device("cuda", to)
            self.far = torch.zeros_like(self.payload, device=there)
        ways: dict[str, Callable[[], list[Tensor]]] = {
            OURS: self.at_once, f"{OURS}, in place": self.in_place, f"{OURS}, weight by weight": self.by_weight,
            f"{OURS}'s broadcast": lambda: self.broadcast(self.comm.broadcast),
        }  # fmt: skip
        if not case.apart and case.groups == 1:
            ways[f"redistribute, {self.backend}"] = self.redistribute
        ways[f"broadcast, {self.backend}"] = lambda: self.broadcast(dist.broadcast)
        return ways | dict(zip(LIMITS, (self.send, self.copy), strict=True))

    def new(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=DTYPE, device=self.device)

    # The ways.

    def at_once(self) -> list[Tensor]:
        items = zip(self.held, self.layouts, strict=True)
        return reshard_all([(held, *both) for held, both in items], self.group)

    def in_place(self) -> list[Tensor]:
        items = zip(self.held, self.layouts, self.outs, strict=True)
        return reshard_all([(held, *both, out) for held, both, out in items], self.group)

    def by_weight(self) -> list[Tensor]:
        return [reshard(held, *both, self.group) for held, both in zip(self.held, self.layouts, strict=True)]

    def redistribute(self) -> list[Tensor]:
        found = []
        for held, shape in zip(self.held, self.shapes, strict=True):
            stride = torch.empty(shape, device="meta").stride()
            one = DTensor.from_local(
                held, self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
            found.append(one.redistribute(placements=[self.case.placed(shape)]).to_local())
        return found

    def broadcast(self, call: Callable[[Tensor, int], object]) -> list[Tensor]:
        found = []
        for held, shape, (source, target) in zip(self.held, self.shapes, self.layouts, strict=True):
            whole = self.new(shape)
            for root, ((begin, end), *_) in source.boxes.items():
                rows = whole[begin:end]
                if root == self.rank and root in target.boxes:
                    rows.copy_(held)
                call(held if root == self.rank else rows, root)
            if self.rank in target.boxes:
                part = whole[tuple(slice(*each) for each in target.boxes[self.rank])]
                found.append(part.contiguous())
        return found

    # What limits them.

    def send(self) -> list[Tensor]:
        ends = [dist.P2POp(dist.isend, self.payload, to) for who, to in self.case.pairs if who == self.rank]
        ends += [dist.P2POp(dist.irecv, self.other, who) for who, to in self.case.pairs if to == self.rank]
        for work in dist.batch_isend_irecv(ends) if ends else []:
            work.wait()
        return []

    def copy(self) -> list[Tensor]:
        """From this rank's GPU to the next one's, or in the host's memory."""
        if len(self.far):
            self.far.copy_(self.payload)
        return []

    # One round.

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, way: Callable[[], list[Tensor]], seed: int) -> tuple[float, int]:
        """Seconds of the slowest rank, and the elements that are wrong on all, of weights that `seed` makes others."""
        for number, (held, (source, _)) in enumerate(zip(self.held, self.layouts, strict=True)):
            if self.rank in source.boxes:
                held.copy_(expected(source.boxes[self.rank], number + seed, self.device))
        self.settle()
        start = time.perf_counter()
        found = way()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        took, wrong = time.perf_counter() - start, 0
        for number, (_, target) in enumerate(self.layouts if found else []):
            if self.rank in target.boxes:
                box = target.boxes[self.rank]
                assert found[number].shape == extents(box)
                wrong += int((found[number] != expected(box, number + seed, self.device)).sum())
        most = torch.tensor([took], dtype=torch.float64, device=self.device)
        every = torch.tensor([wrong], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(every)
        return float(most), int(every)


def measured(rank: Rank, case: Case, s: Shape, rounds: int, hosts: bool) -> tuple[dict[str, list[float]], int]:
    """Seconds of each round of each way, and wrong elements; the first round is verified, but does not count."""
    ways, wrong, seed = rank.begin(case, weights_of(s)), 0, 0
    ways = {name: way for name, way in ways.items() if name not in LIMITS or not hosts}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in reversed(ways) if turn % 2 else ways:
            seed += 5
            took, bad = rank.timed(ways[name], seed)
            times[name] += [took] * (turn > 0)
            wrong += bad
    return times, wrong


def rows(times: dict[str, list[float]], nbytes: int, link: float) -> list[str]:
    """Medians: milliseconds, the model's GB/s, how many times as fast as the best peer, the part of the limit; that is
    `link`, in seconds, where ranks are on hosts."""
    took = {name: statistics.median(each) for name, each in times.items()}
    limit = link or min(took[name] for name in LIMITS)
    peer = min(each for name, each in took.items() if name not in LIMITS and not name.startswith(OURS))
    found = []
    for name, each in took.items():
        rate = "" if name in LIMITS else f"{nbytes / each / 1e9:.3g}"
        ratio = f"{peer / each:.2f}" if name.startswith(OURS) else ""
        found.append(f"{name} | {each * 1e3:.2f} | {rate} | {ratio} | {limit / each:.2f}")
    return found


def run(args: argparse.Namespace) -> int:
    number = int(os.environ["LOCAL_RANK"])
    os.environ.setdefault("HETCOLL_DEVICE", "cpu" if args.device == "cpu" else f"cuda:{number}")
    device = torch.device("cpu" if args.device == "cpu" else f"cuda:{number}")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    hetcoll.torch.register()
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    rank, figures, failed = Rank(device), [], 0
    hosts = [range(at, at + rank.size // args.hosts) for at in range(0, rank.size, rank.size // args.hosts)]
    if rank.rank == 0:
        what = torch.cuda.get_device_name() if args.device == "cuda" else "CPUs"
        print(f"{rank.size} ranks on {what}, PyTorch {torch.__version__}, {DTYPE}, medians of {args.rounds} rounds.\n")
        print("| Model | Layouts | Way | ms | GB/s | Times the best peer | Of the limit |")
        print("| --- | --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    for model in args.models:
        for case in cases(rank.size, args.trainers, args.hosts):
            times, wrong = measured(rank, case, SHAPES[model], args.rounds, args.hosts > 1)
            failed += wrong
            if rank.rank == 0:
                nbytes = SHAPES[model].parameters * DTYPE.itemsize
                lacked = case.lacked(weights_of(SHAPES[model]), hosts)
                link = lacked / (bits(args.rate) * FRAMES)
                for row in rows(times, nbytes, link):
                    print(f"| {model}, {nbytes / 1e9:.3g} GB | {case} | {row} |", flush=True)
                if wrong:
                    print(f"WRONG: {wrong} elements of {model}, {case}", flush=True)
                figures.append(
                    {"model": model, "case": str(case), "busiest": rank.busiest, "lacked": lacked, "seconds": times}
                )
    if args.json and rank.rank == 0:
        args.json.write_text(json.dumps({"schema": 1, "figures": figures, "wrong": failed}, indent=1) + "\n")
    dist.destroy_process_group()
    return int(failed > 0)


def on_hosts(args: argparse.Namespace, ranks: int) -> int:
    """The largest status of the ranks."""
    with shaped(args.hosts, args.rate, 256 << 10) as net:
        places = [Place(host=net.hosts[rank * args.hosts // ranks]) for rank in range(ranks)]
        words = [[sys.executable, __file__, *sys.argv[1:]]] * ranks
        started = [subprocess.Popen(one, env=env) for one, env in commands(words, ON_HOSTS, places)]
        try:
            return max(abs(each.wait()) for each in started)
        finally:
            for each in started:
                each.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="where no launcher has started this")
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces, with as many ranks each")
    parser.add_argument("--rate", default="1gbit", help="of each host's card, in tc's words")
    parser.add_argument("--trainers", type=int, help="of the ranks, where servers are others (default: half)")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["small"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    args.trainers = ranks // 2 if args.trainers is None else args.trainers
    if not 0 < args.trainers < ranks:
        parser.error(f"--trainers: wanted 1 to {ranks - 1} of {ranks} ranks, got {args.trainers}")
    if args.hosts < 1 or ranks % args.hosts:
        parser.error(f"--hosts: wanted a divisor of {ranks} ranks, got {args.hosts}")
    if args.hosts > 1 and args.device != "cpu":
        parser.error(f"--hosts: wanted with --device cpu, got {args.device}")
    if "RANK" in os.environ:
        return run(args)
    if args.hosts > 1:
        return on_hosts(args, ranks)
    launcher = [sys.executable, "-m", "hetcoll", "run", "--no-prefix", "-n", str(ranks)]
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    return subprocess.call([*launcher, __file__, *sys.argv[1:]], env=env)


if __name__ == "__main__":
    sys.exit(main())

"""Dispatch and combine of a mixture of experts: hetcoll beside torch's `all_to_all_single`, in one run.

    python benchmarks/experts.py [--ranks 4] [--tokens 1024 128] [--hidden 4096] [--topk 8] [--device cpu]

Each rank routes its tokens to random experts, which hand them back as they are, and weights sum to 1: so every
token must come back as it was, with fp8 within a step of its codes. With torch a rank sorts its tokens by expert,
tells the others how many come, and sends each token once for each of its experts, as Megatron's dispatcher does;
hetcoll sends it once to each rank. Libraries take turns; medians of rank 0's times are printed, from arrays to sums.

`--device cpu` has float32 in shared memory, and torch's Gloo, whose only link is loopback TCP. `--device cuda` has
bfloat16 on a GPU a rank, and NCCL; it wants a Python with torch. `low-latency` is `LowLatencyExperts`; `in a graph`:
the same as a CUDA graph, which is replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from launched import launched

WAYS = {
    "cpu": ("gloo", "hetcoll", "hetcoll fp8", "hetcoll low-latency"),
    "cuda": ("nccl", "hetcoll", "hetcoll fp8", "hetcoll low-latency", "hetcoll low-latency fp8",
             "hetcoll low-latency in a graph"),
}  # fmt: skip
_SECONDS = 300

Routed = Callable[[Any, Any, Any], Any]
"""Tokens, ids and weights to what comes back."""


def inputs(options: argparse.Namespace, tokens: int, turn: int) -> tuple[Any, Any, Any]:
    """This rank's tokens, which bfloat16 holds exactly, ids and weights."""
    random = np.random.default_rng((int(os.environ["RANK"]), turn))
    x = random.integers(-64, 65, (tokens, options.hidden)).astype(np.float32)
    ids = random.random((tokens, options.experts)).argpartition(options.topk - 1, axis=1)[:, : options.topk]
    return x, ids.astype(np.int64), np.full((tokens, options.topk), 1 / options.topk, np.float32)


def measure(options: argparse.Namespace, tokens: int, routed: Routed, meet: Callable[[], object]) -> list[float]:
    """Seconds of each round; `routed` is complete on return."""
    on_gpu, found = options.device == "cuda", []
    for turn in range(options.rounds + 1):
        x, ids, weights = arrays = inputs(options, tokens, turn)
        if on_gpu:
            import torch

            x, ids, weights = (torch.from_numpy(each).cuda() for each in arrays)
            x = x.bfloat16()
            torch.cuda.synchronize()
        meet()
        start = time.perf_counter()
        result = routed(x, ids, weights)
        found.append(time.perf_counter() - start)
        got = result.float().cpu().numpy() if on_gpu else np.asarray(result)
        most = 64 / 16 if "fp8" in options.way else 0  # half a step of the largest codes
        assert np.abs(got - arrays[0]).max(initial=0) <= most, "other tokens came back"
        meet()
    return found[1:]


def with_hetcoll(options: argparse.Namespace, tokens: int) -> list[float]:
    import hetcoll
    from hetcoll.experts import Experts, LowLatencyExperts

    kind: Any = LowLatencyExperts if "low-latency" in options.way else Experts
    dtype, fp8 = "bfloat16" if options.device == "cuda" else "float32", "fp8" in options.way
    sizes = (options.experts, options.hidden, dtype, tokens, options.topk)
    with hetcoll.init() as comm, kind(comm, *sizes, fp8=fp8) as experts:

        def route(x: Any, ids: Any, weights: Any) -> Any:
            received, layout = experts.dispatch(x, ids)
            return experts.combine(received, layout, weights)

        found = measure(options, tokens, complete(options, route), comm.barrier)
        comm.barrier()
        return found


def complete(options: argparse.Namespace, route: Routed) -> Routed:
    """`route` until its GPU is done; as a graph, where that was asked for."""
    if options.device == "cpu":
        return route
    import torch

    kept: list[Any] = []

    def whole(x: Any, ids: Any, weights: Any) -> Any:
        result = route(x, ids, weights)
        torch.cuda.synchronize()
        return result

    def replayed(x: Any, ids: Any, weights: Any) -> Any:
        if not kept:  # the first round is not counted
            own = [each.clone() for each in (x, ids, weights)]
            whole(*own)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept.append(route(*own))
            kept.extend([graph, own])
        result, graph, own = kept
        for into, each in zip(own, (x, ids, weights), strict=True):
            into.copy_(each)
        graph.replay()
        torch.cuda.synchronize()
        return result

    return replayed if "graph" in options.way else whole


def with_torch(options: argparse.Namespace, tokens: int) -> list[float]:
    import torch
    import torch.distributed as dist

    on_gpu = options.device == "cuda"
    dist.init_process_group(options.way)
    size, each = dist.get_world_size(), options.experts // dist.get_world_size()

    def route(x: Any, ids: Any, weights: Any) -> Any:
        x, ids, weights = (torch.as_tensor(array) for array in (x, ids, weights))
        order = ids.reshape(-1).argsort(stable=True)
        source = order // options.topk
        counts = torch.bincount(ids.reshape(-1), minlength=options.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        out, into = (n.reshape(size, each).sum(1).tolist() for n in (counts, theirs))
        came = x.new_empty(sum(into), options.hidden)
        dist.all_to_all_single(came, x[source], into, out)
        # By expert, of which the ranks have sent one after the other.
        number = torch.arange(each, device=x.device).repeat(size).repeat_interleave(theirs)
        grouped = number.argsort(stable=True)
        made = came[grouped]
        back = torch.empty_like(made)
        back[grouped] = made
        rows = x.new_empty(len(source), options.hidden)
        dist.all_to_all_single(rows, back, out, into)
        result = torch.zeros(len(x), options.hidden, device=x.device)
        result.index_add_(0, source, rows * weights.reshape(-1)[order, None])
        return result.to(x.dtype)

    def meet() -> None:
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()

    found = measure(options, tokens, complete(options, route), meet)
    dist.destroy_process_group()
    return found


def run_rank(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    run = with_hetcoll if options.way.startswith("hetcoll") else with_torch
    print(json.dumps(run(options, options.tokens[0])))


def launch(options: argparse.Namespace, way: str, python: str, tokens: int) -> list[float]:
    """The seconds of one library's rounds."""
    words = [python, __file__, "--way", way, "--tokens", str(tokens), "--device", options.device]
    for name in ("ranks", "hidden", "experts", "topk", "rounds"):
        words += [f"--{name}", str(getattr(options, name))]
    return launched(way, words, options.ranks, os.environ, _SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 128], help="of a rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=8, help="a power of two, so that weights are exact")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--device", choices=sorted(WAYS), default="cpu")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/hetcoll-bench")
    parser.add_argument("--ways", nargs="+", help="some of them")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_rank(options)
        return
    ways = options.ways or WAYS[options.device]
    gloo = sys.executable
    if "gloo" in ways:
        from libraries import prepare

        gloo = str(prepare("gloo", options.cache) / "bin/python")
    print(f"{options.ranks} ranks, {options.experts} experts, {options.topk} of a token, {options.hidden} elements")
    print("| Tokens a rank | Way | Dispatch and combine, µs |\n| --- | --- | --- |")
    for tokens in options.tokens:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.launches):
            for way in ways:
                seconds[way] += launch(options, way, gloo if way == "gloo" else sys.executable, tokens)
        for way in ways:
            print(f"| {tokens} | {way} | {statistics.median(seconds[way]) * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""A program that knows nothing of hetcoll: it trains with the backends it names, and checks what it got."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(backend: str | None, answer: str) -> None:
    dist.init_process_group(backend)
    assert dist.get_backend() == answer, dist.get_backend()
    assert dist.is_nccl_available()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    data = torch.randn(dist.get_world_size(), 16, 8)[dist.get_rank()]
    (model(data) ** 2).mean().backward()
    weight = model.module.weight.grad
    gathered = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weight)
    assert all(torch.equal(each, weight) for each in gathered)
    pair = dist.new_group([0, 1])
    assert dist.get_backend(pair) == answer
    dist.monitored_barrier()
    rank, got = dist.get_rank(), [torch.empty(2), torch.empty(2)]
    works = [dist.isend(torch.full((2,), float(tag)), 1 - rank, tag=tag) for tag in (0, 1)]
    works += [dist.irecv(got[tag], 1 - rank, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    assert [x[0].item() for x in got] == [0, 1]
    # One write: under torchrun all ranks share one pipe, and print() gives an unbuffered one the newline by itself.
    sys.stdout.write(f"{backend} is {type(dist.group.WORLD).__name__}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        main(None if name == "none" else name, {"none": "undefined"}.get(name, name))
    assert os.environ["HETCOLL_REPLACE"]

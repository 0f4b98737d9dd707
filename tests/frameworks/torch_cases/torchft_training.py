"""One replica of a training under torchft: it trains until the file STOP is there, and prints each step that counts.

torchft_training.py LIGHTHOUSE REPLICA STOP DEVICE    lines "step loss rank size" in JSON
torchft_training.py STEPS                      the losses of one process alone
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

BATCH, INPUTS, RATE = 96, 8, 0.05  # a batch is divided among 1, 2 or 3 replicas


def data(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step)).to(device)
    return inputs, inputs.sum(1, keepdim=True).tanh()


def make(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(INPUTS, 1).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def loss_of(model: torch.nn.Module, step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    inputs, wanted = data(step, str(next(model.parameters()).device))
    return (model(inputs[rank::size]) - wanted[rank::size]).square().mean()


def alone(steps: int) -> None:
    model, optimizer = make("cpu")
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps(losses))


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("hetcoll"))


def train(lighthouse: str, replica: str, stop: Path, device: str) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer

    from hetcoll.torch.torchft import ProcessGroupHetcoll

    if device != "cpu":
        torch.cuda.set_device(device)
    model, plain = make(device)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupHetcoll(timeout=timedelta(seconds=60))
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,  # so that who comes has the others' weights before its first batch
        replica_id=replica,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=60),
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    while not stop.exists():
        optimizer.zero_grad()  # here they agree who takes part
        step, rank, size = manager.current_step(), manager.participating_rank(), manager.num_participants()
        loss_of(parallel, step, rank, size).backward()
        with torch.no_grad():
            loss = loss_of(model, step).item()
        optimizer.step()
        if manager.current_step() > step:  # it counts
            print(json.dumps([step, loss, rank, size]), flush=True)
    group.shutdown()
    manager.shutdown()
    limit = time.monotonic() + 60
    while (left := threads()) and time.monotonic() < limit:  # a store is there until the other replicas have left, too
        time.sleep(0.01)
    print(json.dumps(left))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        alone(int(sys.argv[1]))
    else:
        train(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])

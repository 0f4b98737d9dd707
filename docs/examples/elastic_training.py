"""Data-parallel training that loses ranks and takes new ones in, without a restart and with the same losses.

    hetcoll run -n 3 --respawn 2 docs/examples/elastic_training.py

Rank 1 kills itself at step 20, rank 0 at step 40. `hetcoll run` starts it again, and `hetcoll.init` makes it a
newcomer, which has all to learn: rank 0 tells it the weights and the losses so far. A step counts only where all ranks
agree that it went well, so nobody is a step ahead. Every batch is divided among the ranks that are there, hence the
losses are those of one process alone, but for the rounding of sums in another order.
"""

from __future__ import annotations

import os
import signal

import numpy as np

import hetcoll

RANKS, STEPS, BATCH, INPUTS, RATE = 3, 60, 96, 8, 0.1
VICTIMS = {(20, 0): 1, (40, 2): 0}  # by step and epoch
HIDDEN = np.random.default_rng(7).normal(size=INPUTS)  # what is to be learned


def sums(weights: np.ndarray, step: int, rank: int, size: int) -> np.ndarray:
    """The gradient of this rank's part of the step's batch, summed over samples, and the squared errors."""
    inputs = np.random.default_rng(step).normal(size=(BATCH, INPUTS))[rank * BATCH // size : (rank + 1) * BATCH // size]
    errors = inputs @ weights - np.tanh(inputs @ HIDDEN)
    return np.append(inputs.T @ errors, errors @ errors)


def learn(weights: np.ndarray, total: np.ndarray) -> float:
    """One step with the whole batch's sums; its mean loss."""
    weights -= RATE * total[:-1] / BATCH
    return float(total[-1]) / BATCH


def whole_again(comm: hetcoll.Communicator, state: np.ndarray) -> hetcoll.Communicator:
    """Those that are left take in as many as are missing, and all go on from rank 0's `state`."""
    with comm, comm.shrink() as rest:
        if rest.rank == 0:
            print(f"{rest.size} ranks are left")
        comm = rest.grow(RANKS - rest.size)
    comm.broadcast(state)
    return comm


def train(comm: hetcoll.Communicator) -> tuple[np.ndarray, hetcoll.Communicator]:
    """The loss of every step, and the communicator with which the training ended."""
    state = np.zeros(1 + INPUTS + STEPS)  # steps that are done, weights, losses
    weights, losses = state[1 : 1 + INPUTS], state[1 + INPUTS :]
    if comm.epoch > 0:  # a newcomer: the others are in `whole_again`
        comm.broadcast(state)
    while (step := int(state[0])) < STEPS:
        if comm.rank == VICTIMS.get((step, comm.epoch)):
            os.kill(os.getpid(), signal.SIGKILL)
        total = sums(weights, step, comm.rank, comm.size)
        try:
            comm.allreduce(total)
            went_well = True
        except hetcoll.CommunicationError:
            went_well = False
        if comm.agree(went_well):
            losses[step] = learn(weights, total)
            state[0] += 1
        else:
            comm = whole_again(comm, state)
    return losses, comm


def main() -> None:
    losses, comm = train(hetcoll.init())
    with comm:
        comm.barrier()
        if comm.rank > 0:
            return
        weights = np.zeros(INPUTS)
        alone = [learn(weights, sums(weights, step, 0, 1)) for step in range(STEPS)]
        assert np.abs(losses - alone).max() < 1e-12, "the losses are those of one process"
        assert comm.size == RANKS
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} in the end, on {comm.size} ranks in epoch {comm.epoch}")


if __name__ == "__main__":
    main()

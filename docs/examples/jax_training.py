"""Data-parallel training in JAX, beside `jax.distributed`: every rank has a part of the batch.

    hetcoll run -n 2 docs/examples/jax_training.py

The whole step is one compiled program, with the all-reduces of the gradients in it. `jax.distributed` is not needed for
that; where a program uses it, for JAX's own collectives among processes of one vendor, both work side by side.
"""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hetcoll
import hetcoll.jax as hj

Weights = dict[str, Any]
STEPS, BATCH = 200, 96


def loss(weights: Weights, x: Any, y: Any) -> Any:
    """Mean squared error of a small network."""
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    return ((hidden @ weights["out"] - y) ** 2).mean()


def train(comm: hetcoll.Communicator, weights: Weights, x: Any, y: Any) -> tuple[Weights, Any]:
    """The weights and the losses of gradient descent. Every rank has as many samples."""

    def step(weights: Weights, _: None) -> tuple[Weights, Any]:
        found = jax.value_and_grad(loss)(weights, x, y)
        value, gradient = jax.tree.map(lambda leaf: hj.allreduce(leaf, "avg", comm=comm), found)
        return jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradient), value

    return jax.lax.scan(step, weights, length=STEPS)


def coordinator(comm: hetcoll.Communicator, folder: str) -> str:
    """Where rank 0's jax.distributed listens: a socket in the file system here, ``"host:port"`` on several hosts."""
    text = np.zeros(200, np.uint8)
    if comm.rank == 0:
        path = f"unix:{folder}/coordinator".encode()
        text[: len(path)] = list(path)
    comm.broadcast(text)
    return text.tobytes().rstrip(b"\0").decode()


def main() -> None:
    with hetcoll.init() as comm, tempfile.TemporaryDirectory() as folder:
        address = coordinator(comm, folder)
        jax.distributed.initialize(address, comm.size, comm.rank, coordinator_bind_address=address)
        assert (jax.process_index(), jax.process_count()) == (comm.rank, comm.size)
        keys = jax.random.split(jax.random.key(0), 3)
        weights = {"in": jax.random.normal(keys[0], (4, 16)), "bias": jnp.zeros(16), "out": jnp.zeros((16, 1))}
        x = jax.random.uniform(keys[1], (BATCH, 4), minval=-1.0)
        y = jnp.sin(2 * x.sum(1, keepdims=True))
        mine = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
        weights, losses = jax.jit(lambda w, x, y: train(comm, w, x, y))(weights, x[mine], y[mine])
        assert float(losses[-1]) < 0.1 * float(losses[0])
        np.testing.assert_allclose(losses[0], (y**2).mean(), rtol=1e-5)  # of the whole batch
        if comm.rank == 0:
            print(f"the loss fell below a tenth in {STEPS} steps on {comm.size} ranks")
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()

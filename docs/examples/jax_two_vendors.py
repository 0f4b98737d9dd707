"""Data-parallel training in JAX, where some processes have a JAX for CUDA and others one for ROCm.

    hetcoll run -n 4 docs/examples/jax_two_vendors.py
    hetcoll run -n 4 docs/examples/jax_two_vendors.py --pretend cuda,cuda,rocm,rocm

`jax.distributed` joins processes of one build only. So each vendor's processes have one of their own, for JAX's own
collectives among them; hetcoll joins all, and the compiled step averages gradients over both vendors. Give each process
one GPU (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES). With `--pretend` ranks are told which build they have.
"""

from __future__ import annotations

import argparse
import importlib.util
import pkgutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax_training import BATCH, STEPS, coordinator, train

import hetcoll

BUILDS = ("cuda", "rocm", "cpu")


def build() -> str:
    """Whose plugin this process's JAX has. Asking JAX for its devices would start it, too early for what follows."""
    found = importlib.util.find_spec("jax_plugins")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    names = " ".join(module.name for module in pkgutil.iter_modules(folders))
    return next((name for name in BUILDS if name in names), "cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretend", help="the builds of all ranks")
    args = parser.parse_args()
    with hetcoll.init() as comm, tempfile.TemporaryDirectory() as folder:
        mine = args.pretend.split(",")[comm.rank] if args.pretend else build()
        alike = comm.split(BUILDS.index(mine))
        assert alike is not None
        address = coordinator(alike, folder)
        jax.distributed.initialize(address, alike.size, alike.rank, coordinator_bind_address=address)
        assert (jax.process_index(), jax.process_count()) == (alike.rank, alike.size)

        keys = jax.random.split(jax.random.key(0), 3)
        weights = {"in": jax.random.normal(keys[0], (4, 16)), "bias": jnp.zeros(16), "out": jnp.zeros((16, 1))}
        x = jax.random.uniform(keys[1], (BATCH, 4), minval=-1.0)
        y = jnp.sin(2 * x.sum(1, keepdims=True))
        part = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
        weights, losses = jax.jit(lambda w, x, y: train(comm, w, x, y))(weights, x[part], y[part])
        np.testing.assert_allclose(losses[0], (y**2).mean(), rtol=1e-5)  # of the batch of both vendors' ranks
        assert float(losses[-1]) < 0.1 * float(losses[0])
        if comm.rank == 0:
            print(
                f"the loss fell below a tenth in {STEPS} steps: {alike.size} of {comm.size} ranks have JAX for {mine}"
            )
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()

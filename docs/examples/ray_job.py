"""Ranks that Ray places: each is an actor in a bundle of a placement group, and they add up gradients among themselves.

    pip install ray
    python docs/examples/ray_job.py --ranks 4

On a cluster, RAY_ADDRESS says where it is. Rank 0's actor makes the unique id, by which the others join: Ray starts the
processes, and no data of the training passes it. For GPUs a bundle is {"CPU": 1, "GPU": 1} and an actor asks for
num_gpus=1: Ray shows each its own GPU alone, and its buffers are on that.
"""

from __future__ import annotations

import argparse

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import hetcoll

SAMPLES, FEATURES, STEPS, RATE = 1200, 8, 200, 0.5


@ray.remote(num_cpus=1)
class Rank:
    """A rank of the job, in a process of its own."""

    def unique_id(self) -> bytes:
        """Start the job's store in this process. Only rank 0 is asked."""
        return hetcoll.get_unique_id().to_bytes()

    def train(self, rank: int, size: int, unique_id: bytes) -> tuple[float, np.ndarray]:
        """Least squares by gradient descent on this rank's samples and everyone else's: the loss and the weights."""
        data = np.random.default_rng(0)
        inputs, truth = data.standard_normal((SAMPLES, FEATURES)), np.arange(1.0, FEATURES + 1)
        inputs, targets = inputs[rank::size], (inputs @ truth)[rank::size]
        weights = np.zeros(FEATURES)
        with hetcoll.Communicator.init(size, rank, unique_id, timeout=60) as comm:
            for _ in range(STEPS):
                error = inputs @ weights - targets
                sums = np.append(inputs.T @ error, [error @ error, len(error)])
                comm.allreduce(sums)
                weights -= RATE * sums[:FEATURES] / sums[-1]
        return float(sums[-2] / sums[-1]), weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="PACK", help="PACK, SPREAD, STRICT_PACK or STRICT_SPREAD")
    args = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    bundles = placement_group([{"CPU": 1}] * args.ranks, strategy=args.strategy)
    if not bundles.wait(60):
        raise SystemExit(
            f"ray_job.py: Ray has no room for {args.ranks} bundles of one CPU each: {ray.available_resources()}"
        )
    ranks = [
        Rank.options(scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, index)).remote()
        for index in range(args.ranks)
    ]
    unique_id = ray.get(ranks[0].unique_id.remote())
    results = ray.get([actor.train.remote(rank, args.ranks, unique_id) for rank, actor in enumerate(ranks)])
    assert all(np.array_equal(weights, results[0][1]) for _, weights in results), "ranks differ"
    assert results[0][0] < 1e-10, f"the loss is {results[0][0]}"
    print(f"{args.ranks} ranks found {np.round(results[0][1], 3).tolist()}")
    remove_placement_group(bundles)
    ray.shutdown()


if __name__ == "__main__":
    main()

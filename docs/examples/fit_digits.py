"""Data-parallel training of a small network, in which ranks have unequal shares of every batch.

    pip install scikit-learn
    hetcoll run -n 4 docs/examples/fit_digits.py

Rank r takes about r + 1 parts of each batch of scikit-learn's handwritten digits (1797 images of 8 x 8). It adds up the
gradients of its own samples; one all-reduce of sums (gradients, loss and number of samples together) makes them the
whole batch's. So the ranks end where one rank alone ends, but for the rounding of sums in another order.
"""

from __future__ import annotations

import numpy as np

import hetcoll

HIDDEN, CLASSES, BATCH, EPOCHS, RATE = 32, 10, 256, 15, 0.5
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
SIZES = [int(np.prod(shape)) for shape in SHAPES]
COUNT = sum(SIZES)
IMAGES = 1797


def load(comm: hetcoll.Communicator) -> tuple[np.ndarray, np.ndarray]:
    """The images, scaled to [0, 1], and their labels. Rank 0 reads them and broadcasts them."""
    images, labels = np.empty((IMAGES, 64)), np.empty(IMAGES, np.int64)
    if comm.rank == 0:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise SystemExit("fit_digits.py: its images come with scikit-learn: pip install scikit-learn") from None
        digits = load_digits()
        images[:], labels[:] = digits.data / 16.0, digits.target
    comm.broadcast(images)
    comm.broadcast(labels)
    return images, labels


def share(start: int, stop: int, rank: int, size: int) -> slice:
    """The part of [start, stop) that belongs to `rank`: in the proportion 1 : 2 : 3 : ..."""
    whole = size * (size + 1) // 2
    low, high = (start + (stop - start) * (r * (r + 1) // 2) // whole for r in (rank, rank + 1))
    return slice(low, high)


def sums(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The gradients of the samples' summed loss, that loss, the number of samples: COUNT + 2 values."""
    parts = np.split(weights, np.cumsum(SIZES)[:-1])
    w1, b1, w2, b2 = (part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True))
    hidden = np.tanh(images @ w1 + b1)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    error = np.exp(logs)
    error[rows, labels] -= 1.0
    back = (error @ w2.T) * (1.0 - hidden**2)
    gradients = (images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0))
    loss = -logs[rows, labels].sum()
    return np.concatenate([*(g.ravel() for g in gradients), [loss, len(labels)]])


def fit(images: np.ndarray, labels: np.ndarray, comm: hetcoll.Communicator | None) -> tuple[np.ndarray, float]:
    """The weights after EPOCHS, and the mean loss over the last epoch. Without `comm` one process does all the work."""
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    random = np.random.default_rng(1)  # the same weights and the same order of samples on every rank
    weights = random.normal(0.0, 0.1, COUNT)
    loss = 0.0
    for _ in range(EPOCHS):
        order, loss = random.permutation(IMAGES), 0.0
        for start in range(0, IMAGES, BATCH):
            stop = min(start + BATCH, IMAGES)
            mine = order[share(start, stop, rank, size)]
            total = sums(weights, images[mine], labels[mine])
            if comm:
                comm.allreduce(total)
            weights -= RATE * total[:COUNT] / total[-1]
            loss += total[COUNT]
    return weights, loss / IMAGES


def main() -> None:
    with hetcoll.init() as comm:
        images, labels = load(comm)
        weights, loss = fit(images, labels, comm)
        everyone = np.empty((comm.size, COUNT))
        comm.gather(weights, everyone)
        if comm.rank > 0:
            return
        assert (everyone == weights).all(), "all ranks hold the same bits"
        weights_alone, loss_alone = fit(images, labels, None)
        assert abs(loss - loss_alone) <= 1e-9, f"{comm.size} ranks end at {loss}, one at {loss_alone}"
        assert np.abs(weights - weights_alone).max() <= 1e-9
        assert loss < 0.25, "it has learned"
        print(f"loss {loss:.6f} on {comm.size} ranks, {loss_alone:.6f} on one")


if __name__ == "__main__":
    main()

"""A pipeline: each rank applies one stage to a stream of pieces and passes them on, by send and recv.

    hetcoll run -n 3 docs/examples/pipeline.py

A piece is sent with `async_op=True`, so a stage works on the next piece while the last one is on its way. Two buffers
take turns; one is filled again only after its send is done.
"""

from __future__ import annotations

import numpy as np

import hetcoll

PIECES, WIDTH = 8, 1 << 16


def stage(rank: int, piece: np.ndarray) -> np.ndarray:
    """What rank `rank` does to a piece."""
    return np.sqrt(piece) + rank


def main() -> None:
    with hetcoll.init() as comm:
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        source = np.random.default_rng(7).random((PIECES, WIDTH))  # the same everywhere: the last rank checks with it
        buffers, sending = np.empty((2, WIDTH)), [hetcoll.Work(), hetcoll.Work()]
        for i, piece in enumerate(source):
            into = i % 2
            sending[into].wait()
            if first:
                buffers[into] = piece
            else:
                comm.recv(buffers[into], comm.rank - 1)
            buffers[into] = stage(comm.rank, buffers[into])
            if not last:
                sending[into] = comm.send(buffers[into], comm.rank + 1, async_op=True)
                continue
            for rank in range(comm.size):
                piece = stage(rank, piece)
            assert (buffers[into] == piece).all(), f"piece {i} is wrong"
        for work in sending:
            work.wait()
        if last:
            print(f"{PIECES} pieces went through {comm.size} stages")


if __name__ == "__main__":
    main()

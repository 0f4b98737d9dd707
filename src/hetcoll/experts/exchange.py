"""How many tokens travel between ranks of any kind: headers, then rows into windows, by counts that hosts know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import Communicator
from ..calls.buffers import Buffer
from .headers import Headers
from .put_rows import Sizes
from .routing import Column


class Exchange:
    """Of one `Experts`. `window` is what others put into: of each rank `Sizes.most` rows, `Wire.stride` apart."""

    def __init__(self, comm: Communicator, sizes: Sizes, window: Buffer, timeout: float | None) -> None:
        self._comm, self._sizes = comm, sizes
        self.headers = Headers(comm, sizes.most, sizes.topk, timeout)
        self._arrived = [0] * comm.size  # puts of rows, by rank
        self._window = comm.window(window, signals=comm.size, timeout=timeout)

    def move(
        self, packed: Buffer, offsets: Sequence[Column], nbytes: int, came: Sequence[int], stream: int | None,
        timeout: float | None,
    ) -> None:  # fmt: skip
        """Put rows of `packed`, so many bytes from `offsets` on, in their order, to each rank, and wait for those that
        come here."""
        window, size, rank, stride = self._window, self._comm.size, self._comm.rank, self._sizes.wire.stride
        works = []
        for step in range(1, size):  # each begins with another one
            peer = (rank + step) % size
            if (n := len(offsets[peer])) > 0:
                first, count = rank * self._sizes.most * stride, nbytes
                here: Any = offsets[peer]
                into: Any = first + np.arange(n) * stride
                if nbytes == stride and here[-1] - here[0] == (n - 1) * stride:  # one piece
                    into, here, count = first, int(here[0]), n * stride
                works.append(window.put(packed, peer, into, src_offset=here, count=count, signal=rank, stream=stream,
                                        async_op=True))  # fmt: skip
        for peer, n in enumerate(came):
            if peer != rank and n > 0:
                self._arrived[peer] += 1
                window.wait_signal(peer, self._arrived[peer], timeout=timeout)
        for work in works:
            work.wait(timeout)

    def close(self) -> None:
        """Local."""
        self.headers.close()
        self._window.close()

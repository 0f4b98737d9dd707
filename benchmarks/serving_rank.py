"""One rank of one way that serving.py measures: it does what each line of its standard input asks for.

A line has a shape and how often all of it is moved, and is answered with the seconds of one, once every byte of the
last was compared.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from serving_caches import Shape
from serving_ways import WAYS


def main(answers: TextIO) -> None:
    name, rank = sys.argv[1], int(os.environ["RANK"])
    way = WAYS[name.split()[0]](rank, name)
    made: Shape | None = None
    wanted: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        shape, repeats = Shape(*asked["shape"]), asked["repeats"]
        if shape != made:
            way.prepare(shape)
            made, wanted = shape, shape.wanted() if rank == 1 else None
            if rank == 0:
                way.fill(shape.content())
        if rank == 1:
            way.fill(0)
        way.meet()
        start = time.perf_counter()
        way.move(repeats)
        took = (time.perf_counter() - start) / repeats
        way.meet()
        if rank == 1:
            came = way.came()
            assert came is None or np.array_equal(came, wanted), "wrong bytes"
        print(json.dumps({"seconds": took if rank == way.clock else 0.0}), file=answers, flush=True)
    way.close()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)  # what libraries print is no answer
        main(own)

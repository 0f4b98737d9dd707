"""How fast the GPU's kernels reduce, beside copies by the driver: python benchmarks/gpu_kernels.py [cuda|hip]

Bytes per second that a kernel reads and writes (three streams of memory for a reduction, two for a copy), the best of
some rounds that alternate between all of them, on 256 MiB an operand: on the whole GPU, and on the 64 blocks that
collectives use.
"""

from __future__ import annotations

import argparse
import importlib
import struct
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices.kernels import reduce_name

if TYPE_CHECKING:
    from hetcoll.vendors.devices.base import Device

NBYTES = 256 << 20
ROUNDS, LAUNCHES = 5, 4
DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3FN, DType.INT8, DType.FLOAT64)


def timed(device: Device, stream: int, run: Callable[[], None]) -> float:
    """Seconds of one run on the GPU."""
    start, end = device.event(timing=True), device.event(timing=True)
    device.record(start, stream)
    for _ in range(LAUNCHES):
        run()
    device.record(end, stream)
    device.synchronize(stream)
    seconds = device.elapsed(start, end) / LAUNCHES
    device.destroy_event(start)
    device.destroy_event(end)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vendor", nargs="?", choices=["cuda", "hip"], default="cuda")
    device: Device = importlib.import_module(f"hetcoll.vendors.devices.{parser.parse_args().vendor}").device(0)
    table = device.kernels()
    with ExitStack() as undo:
        buffers = [device.allocate(NBYTES) for _ in range(3)]
        for buffer in buffers:
            undo.callback(device.free, buffer)
        stream = device.stream()
        undo.callback(device.destroy_stream, stream)
        runs: dict[str, tuple[int, Callable[[], None]]] = {
            "copy": (2, lambda: device.copy(buffers[0], buffers[1], NBYTES, stream))
        }
        for dtype in DTYPES:
            count = NBYTES // dtype.itemsize
            arguments = [struct.pack("Q", x) for x in (*buffers, count)]
            function = table.function(reduce_name(dtype, ReduceOp.SUM))
            for shape in (table.launch(count, dtype.itemsize), (64, 512)):
                name = f"{dtype.label} sum, {shape[0]} blocks"
                runs[name] = (3, partial(device.launch, function, *shape, arguments, stream))
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(ROUNDS + 1):  # the first to warm up
            for name, (_, run) in runs.items():
                best[name] = min(best[name], timed(device, stream, run))
        print(f"{device.name}, {NBYTES >> 20} MiB an operand")
        for name, (passes, _) in runs.items():
            print(f"{name:<32} {passes * NBYTES / best[name] / 1e9:8.0f} GB/s")


if __name__ == "__main__":
    main()

"""What `hetcoll simulate` predicts over what collectives among the GPUs of one host took: every cell that was measured.

    python benchmarks/predict_gpus.py [--cluster docs/examples/clusters/h200-host.toml] [--markdown]

Nothing is run: what was measured lies in docs/measurements, in the JSON files of benchmarks/gpus.py and in tables of
2026-11-gpus.md, which stand below. The cluster file has the machine's own limits; only how many GPUs there are and
which are islands is changed, and what NCCL gets of NVLink and takes to begin (`NCCL`), which is another figure for two
GPUs than for four. Each cell is predicted by the algorithm that was run. Where two figures stand they are two
machines', and both are cells.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hetcoll.cli.predict import spans
from hetcoll.plan.cluster import read
from hetcoll.plan.forecast import Forecast, forecast
from hetcoll.types import Collective

HERE = Path(__file__).resolve().parents[1] / "docs"
NEAR = 0.15
NCCL = {2: ("299 GB/s", "8.3 us"), 4: ("335 GB/s", "11.1 us")}  # its own 256 MiB and 8 B, in the JSON files
FILES = ("2026-11-22-gpus-2.json", "2026-11-22-gpus-4.json", "2026-11-26-gpus-4.json")
KERNELS_OF_TWO = 1 << 20  # bytes: the largest all-reduce in FILES among two GPUs that a kernel did
AMONG, KERNEL, CUT = "Algorithms among islands", "One kernel a rank", "Short all-gathers"
SIZES = {KERNEL: "128K..8M", CUT: "8,4K,64K,256K,1M,2M,4M,8M"}
# Of 2026-11-gpus.md, microseconds: the page's part, islands, collective, algorithm, sizes, and times of one machine.
TABLES = (
    (AMONG, "0|1|2|3", "allreduce", "direct", "1M,4M,16M,64M,256M", (153, 362, 1032, 3211, 11545)),
    (AMONG, "0|1|2|3", "allreduce", "direct", "16M,64M,256M", (1142, 3762, 13905)),
    (AMONG, "0|1|2|3", "allreduce", "ring", "1M,4M,16M,64M,256M", (249, 377, 857, 3037, 12263)),
    (AMONG, "0|1|2|3", "allreduce", "ring", "16M,64M,256M", (882, 3231, 13054)),
    (AMONG, "0|1|2|3", "allreduce", "tree", "1M,4M,16M,64M,256M", (240, 441, 1100, 3963, 15803)),
    (AMONG, "0|1|2|3", "allreduce", "tree", "16M,64M,256M", (1193, 4774, 19670)),
    (AMONG, "0|1|2|3", "allreduce", "halving_doubling", "1M,4M,16M,64M,256M", (194, 371, 919, 2831, 10630)),
    (AMONG, "0|1|2|3", "allreduce", "halving_doubling", "16M,64M,256M", (1027, 3374, 13549)),
    (AMONG, "0|1|2,3", "allreduce", "direct", "16M,64M,256M", (874, 2786, 9391)),
    (AMONG, "0|1|2,3", "allreduce", "ring", "16M,64M,256M", (804, 2758, 10129)),
    (AMONG, "0|1|2,3", "allreduce", "tree", "16M,64M,256M", (979, 3234, 12267)),
    (AMONG, "0,1|2,3", "allreduce", "oneshot", "64M,256M", (1071, 4008)),
    (AMONG, "0|1|2|3", "allgather", "direct", "64M", (1609,)),
    (AMONG, "0|1|2|3", "allgather", "direct", "64M", (1684,)),
    (AMONG, "0|1|2|3", "allgather", "ring", "64M", (1560,)),
    (AMONG, "0|1|2|3", "allgather", "ring", "64M", (1384,)),
    (AMONG, "0|1|2|3", "allgather", "doubling", "64M", (1494,)),
    (AMONG, "0|1|2|3", "allgather", "doubling", "64M", (1483,)),
    (AMONG, "0|1|2|3", "reduce_scatter", "direct", "64M", (1634,)),
    (AMONG, "0|1|2|3", "reduce_scatter", "direct", "64M", (1789,)),
    (AMONG, "0|1|2|3", "reduce_scatter", "ring", "64M", (1645,)),
    (AMONG, "0|1|2|3", "reduce_scatter", "ring", "64M", (1457,)),
    (AMONG, "0|1|2|3", "reduce_scatter", "halving", "64M", (1584,)),
    (AMONG, "0|1|2|3", "reduce_scatter", "halving", "64M", (1616,)),
    (KERNEL, "0|1|2|3", "allreduce", "direct", SIZES[KERNEL], (110, 111, 119, 154, 208, 364, 589)),
    (KERNEL, "0|1|2", "allreduce", "direct", SIZES[KERNEL], (88, 92, 103, 129, 217, 283, 427)),
    (KERNEL, "0|1", "allreduce", "direct", SIZES[KERNEL], (67, 72, 87, 107, 142, 222, 298)),
    (KERNEL, "0|1|2|3", "allreduce", "kernel", "128K,256K", (29, 41)),
    (KERNEL, "0|1|2|3", "allreduce", "kernel", "512K..8M", (57, 81, 147, 277, 536)),
    (KERNEL, "0|1|2", "allreduce", "kernel", SIZES[KERNEL], (28, 36, 49, 80, 151, 289, 560)),
    (KERNEL, "0|1", "allreduce", "kernel", SIZES[KERNEL], (23, 28, 38, 59, 108, 207, 394)),
    (CUT, "0|1", "allgather", "kernel", SIZES[CUT], (15.8, 16.9, 17.8, 21.9, 39.2, 61.8, 109.0, 207.8)),
    (CUT, "0|1", "allgather", "direct", SIZES[CUT], (32.0, 32.1, 33.1, 34.8, 52.3, 82.4, 120.9, 167.3)),
    (CUT, "0|1", "reduce_scatter", "kernel", SIZES[CUT], (17.3, 17.1, 19.7, 24.4, 38.9, 67.5, 124.1, 237.2)),
    (CUT, "0|1", "reduce_scatter", "direct", SIZES[CUT], (27.4, 29.2, 31.8, 34.6, 54.6, 85.6, 122.9, 169.3)),
    (CUT, "0,1|2,3", "allgather", "kernel", SIZES[CUT], (18.6, 18.6, 21.2, 28.0, 43.2, 62.5, 105.0, 194.0)),
    (CUT, "0,1|2,3", "allgather", "islands", SIZES[CUT], (52.3, 48.2, 50.0, 54.2, 56.3, 65.7, 137.9, 161.8)),
    (CUT, "0|1|2|3", "allgather", "direct", SIZES[CUT], (53.2, 55.5, 59.2, 67.7, 92.8, 115.0, 181.5, 249.4)),
    (CUT, "0,1|2,3", "reduce_scatter", "kernel", SIZES[CUT], (20.7, 20.8, 23.9, 30.5, 52.5, 91.4, 170.4, 325.0)),
    (CUT, "0,1|2,3", "reduce_scatter", "islands", SIZES[CUT], (59.8, 58.9, 60.1, 62.1, 61.8, 71.6, 153.6, 166.8)),
    (CUT, "0|1|2|3", "reduce_scatter", "direct", SIZES[CUT], (59.0, 61.8, 65.2, 73.8, 99.4, 126.9, 196.5, 257.4)),
)  # fmt: skip


class Cell(NamedTuple):
    """What was measured: in which part of the notes, among which islands, and seconds."""

    where: str
    islands: str
    collective: str
    algorithm: str
    nbytes: int
    took: float


def cells() -> Iterator[Cell]:
    """All of them."""
    for file in FILES:
        document = json.loads((HERE / "measurements" / file).read_text())
        for setting in document["settings"]:
            kind, _, islands = setting["setting"].partition(" ")
            whole = setting["setting"] == "one island"
            if (kind != "islands" and not whole) or "queue" in setting["setting"]:
                continue
            islands = ",".join(map(str, range(setting["ranks"]))) if whole else islands
            for op, nbytes, row in setting["points"]:
                if op in ("allreduce", "allgather", "reduce_scatter"):
                    name = done_by(islands, op, nbytes)
                    yield Cell(file.removesuffix(".json"), islands, op, name, nbytes, row["hetcoll"]["us"] * 1e-6)
    for where, islands, op, name, sizes, times in TABLES:
        for nbytes, us in zip(spans(sizes), times, strict=True):
            yield Cell(where, islands, op, name, nbytes, us * 1e-6)


def done_by(islands: str, op: str, nbytes: int) -> str:
    """What ran then: among four GPUs all by copies, as kernels did less than today."""
    if islands == "0|1":
        return "kernel" if op == "allreduce" and nbytes <= KERNELS_OF_TWO else "direct"
    return "islands"


def predicted(text: str, name: str, cell: Cell) -> Forecast:
    """What the cluster file says with the cell's GPUs."""
    size = len(cell.islands.replace("|", ",").split(","))
    fabric, launch = NCCL[2 if size == 2 else 4]
    changes = {"ranks": size, "islands": f"'{cell.islands}'", "fabric": f"'{fabric}'", "launch": f"'{launch}'"}
    cluster = read(text, name, tuple(f"hosts.h200.{key}={value}" for key, value in changes.items()))
    return forecast(cluster, Collective[cell.collective.upper()], cell.algorithm)


def summary(ratios: list[float]) -> str:
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return (
        f"{near} of {len(ratios)} within 15 %, geometric mean {mean:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    )


def compared(file: Path) -> Iterator[tuple[Cell, float]]:
    """Each cell, and what the cluster file says over what was measured."""
    text, known = file.read_text(), dict[tuple[object, ...], Forecast]()
    for cell in cells():
        if cell[1:4] not in known:
            known[cell[1:4]] = predicted(text, str(file), cell)
        yield cell, known[cell[1:4]].tasks.run(cell.nbytes).seconds / cell.took


def main(words: Any = None) -> int:
    """Predict, and print each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=HERE / "examples/clusters/h200-host.toml")
    parser.add_argument("--markdown", action="store_true", help="print tables of ratios")
    args = parser.parse_args(words)
    rows: dict[tuple[str, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell, ratio in compared(args.cluster):
        rows[cell[:4]][cell.nbytes].append(ratio)
    for where in dict.fromkeys(key[0] for key in rows):
        these = {key[1:]: row for key, row in rows.items() if key[0] == where}
        ratios = [ratio for row in these.values() for found in row.values() for ratio in found]
        print(f"\n{where}: {summary(ratios)}\n")
        print("\n".join(table(these) if args.markdown else lines(these)))
    every = [ratio for row in rows.values() for found in row.values() for ratio in found]
    print(f"\nall: {summary(every)}")
    return 0


def lines(rows: dict[tuple[str, ...], dict[int, list[float]]]) -> Iterator[str]:
    for (islands, op, name), row in rows.items():
        for nbytes, ratios in row.items():
            yield f"{islands:<10} {op:<15} {name:<17} {nbytes:>10} {' '.join(f'{ratio:>6.2f}' for ratio in ratios)}"


def table(rows: dict[tuple[str, ...], dict[int, list[float]]]) -> Iterator[str]:
    sizes = sorted({nbytes for row in rows.values() for nbytes in row})
    yield "| Islands | Operation | Algorithm | " + " | ".join(map(human, sizes)) + " |"
    yield "| --- | --- | --- |" + " ---: |" * len(sizes)
    for (islands, op, name), row in rows.items():
        figures = (", ".join(f"{ratio:.2f}" for ratio in row.get(nbytes, [])) for nbytes in sizes)
        shown = islands.replace("|", "\\|")
        yield f"| {shown} | {op} | {name} | " + " | ".join(figures) + " |"


def human(nbytes: int) -> str:
    return next((f"{nbytes >> p} {u}" for u, p in (("MiB", 20), ("KiB", 10)) if nbytes >= 1 << p), f"{nbytes} B")


if __name__ == "__main__":
    sys.exit(main())

"""What `hetcoll perf --plot` draws: bus bandwidth and latency by size, once for light and once for dark pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import ArgumentError
from .report import Row, human_size

_SUFFIXES = (".png", ".svg")
_STYLES = (("", "default", "white"), ("-dark", "dark_background", "#0d1117"))


def check(path: str) -> None:
    """ArgumentError unless such a file can be drawn."""
    if Path(path).suffix not in _SUFFIXES:
        raise ArgumentError(f"--plot: wanted a name that ends in {' or '.join(_SUFFIXES)}, got {path!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ArgumentError(f"--plot: wanted a file in a folder that is there, got {path!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib: pip install 'hetcoll[plot]'")


def draw(path: str, env: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Write the figure and its dark twin; the files. The same rows give the same bytes."""
    import matplotlib.style
    from matplotlib.figure import Figure

    title = f"{env['ranks']} ranks, {env['device']}, {env['transport']}"
    made = []
    for tail, style, ground in _STYLES:
        target = Path(path).with_stem(Path(path).stem + tail)
        with matplotlib.style.context(
            [style, {"svg.hashsalt": "hetcoll", "savefig.facecolor": ground, "axes.facecolor": ground}]
        ):
            figure = Figure(figsize=(11, 4.5), layout="constrained")
            bandwidth, latency = figure.subplots(1, 2)
            for label, line in _lines(rows).items():
                sizes = [row.nbytes for row in line]
                bandwidth.plot(sizes, [row.busbw_gbs for row in line], marker="o", markersize=3, label=label)
                latency.plot(sizes, [row.time_us for row in line], marker="o", markersize=3, label=label)
            bandwidth.set(title=f"bus bandwidth, {title}", ylabel="GB/s", xscale="log")
            latency.set(title=f"latency, {title}", ylabel="µs", xscale="log", yscale="log")
            for axes in (bandwidth, latency):
                _ticks(axes, sorted({row.nbytes for row in rows if row.nbytes}))
            latency.legend(fontsize=8)
            figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
        made.append(target)
    return made


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What belongs to one line of the figure. A barrier has no size."""
    found: dict[str, list[Row]] = {}
    several = len({(row.dtype, row.redop, row.root) for row in rows}) > 1
    for row in rows:
        if row.nbytes:
            more = f" {row.dtype} {row.redop} {row.root}" if several else ""
            found.setdefault(f"{row.op}{more}, {'out of' if row.place == 'out' else 'in'} place", []).append(row)
    return found


def _ticks(axes: Any, sizes: Sequence[int]) -> None:
    shown = sizes[:: max(1, -(-len(sizes) // 8))]
    axes.set_xticks(shown, [human_size(size) for size in shown], fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)

"""Draw the sweep: `plot.py RESULTS.json FIGURE`. Runs in an environment of its own that has matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = {8: "8 B", 1 << 10: "1 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}


def panel(axes: Any, lines: list[dict[str, Any]], title: str) -> None:
    """Time against size, both logarithmic: ours, every peer's, the limit."""
    sizes = [line["nbytes"] for line in lines]
    for name in dict.fromkeys(name for line in lines for name in line["peers"]):
        points = [(line["nbytes"], line["peers"][name][0]) for line in lines if name in line["peers"]]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2, alpha=0.85)
    axes.plot(
        sizes, [line["best_us"] for line in lines], label="hetcoll", color="black", linewidth=2.4, marker="o", ms=3
    )
    if all(line["limit_us"] for line in lines):
        axes.plot(sizes, [line["limit_us"] for line in lines], label="limit", color="grey", linestyle=":")
    axes.set(xscale="log", yscale="log", title=title, ylabel="time (µs)")
    axes.set_xticks(list(SIZES), SIZES.values(), fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main(results: str, figure: str) -> None:
    """One panel for each transport, the all-reduce of the smallest number of ranks."""
    table = json.loads(Path(results).read_text())["table"]
    ranks = min(line["ranks"] for line in table)
    chosen = [line for line in table if line["op"] == "allreduce" and line["ranks"] == ranks]
    transports = list(dict.fromkeys(line["transport"] for line in chosen))
    plt.rcParams["svg.hashsalt"] = "hetcoll"  # the same data give the same file
    drawing, all_axes = plt.subplots(1, len(transports), figsize=(5.5 * len(transports), 4), squeeze=False)
    for axes, transport in zip(all_axes[0], transports, strict=True):
        lines = sorted((x for x in chosen if x["transport"] == transport), key=lambda x: x["nbytes"])
        panel(axes, lines, f"all-reduce, float32, {ranks} ranks, {transport}")
    drawing.tight_layout()
    drawing.savefig(figure, metadata={"Date": None} if figure.endswith(".svg") else None)


if __name__ == "__main__":
    main(*sys.argv[1:])

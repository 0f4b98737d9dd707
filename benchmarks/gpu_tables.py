"""What benchmarks/gpus.py measures as lines, and as tables of docs/measurements/gpu-tables.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import results

if TYPE_CHECKING:
    from gpus import Setting

PAGE = Path(__file__).resolve().parents[1] / "docs/measurements/gpu-tables.md"
K, M = 1 << 10, 1 << 20
COPIES = "only the copies"  # gpu_limits.py
BESIDE = "product "  # in front of the collective that is under way beside products

Figures = dict[str, dict[str, float]]  # by library


def best(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    """The least of each figure, but the most of what is wrong."""
    return {name: (max if name == "wrong" else min)(a[name], b[name]) for name in a}


def line(op: str, nbytes: int, row: Figures) -> str:
    parts = [f"{op:15} {results.human(nbytes):>8}"]
    for name, x in row.items():
        wrong = f" {x['wrong']:.0f} WRONG" if x["wrong"] else ""
        if op.startswith(BESIDE):
            parts.append(f"{name}: {beside(x)}{wrong}")
            continue
        ratio = "" if name == "hetcoll" else f" ratio {x['us'] / row['hetcoll']['us']:.2f}"
        rate = f"{nbytes / x['us'] / 1e3:.1f} GB/s" if nbytes >= M else ""
        calls = "".join(f" {call} {x[call]:.1f}" for call in ("sync", "cost") if call in x)  # `nothing` has no cost
        parts.append(f"{name}: {x['us']:.1f} us {rate}{calls}{ratio}{wrong}")
    return " | ".join(parts)


def beside(x: Mapping[str, float]) -> str:
    """What collectives have taken from products: of a product's time, and in all for each call."""
    more, taken = x["beside"] / x["alone"] - 1, x["call_beside"] * (1 - x["alone"] / x["beside"])
    return (
        f"{100 * more:.1f} % ({x['alone']:.0f} to {x['beside']:.0f} us; a call {x['call']:.0f} us alone, "
        f"{x['call_beside']:.0f} beside, {taken:.0f} taken from products)"
    )


def markdown(setting: Setting, found: list[tuple[str, int, Figures]]) -> str:
    """Of each operation our microseconds, the ratio to each peer, and the part of the limit, by size."""
    at = {(op, nbytes): row for op, nbytes, row in found if op != "nothing" and not op.startswith(BESIDE)}
    sizes = sorted({nbytes for _, nbytes in at})
    rows = [["operation", "", *map(results.human, sizes)], ["---", "---", *["---:"] * len(sizes)]]
    for op in dict.fromkeys(op for op, _ in at):
        rows.append([op, "us", *(results.digits(at[op, n]["hetcoll"]["us"]) if (op, n) in at else "" for n in sizes)])
        for peer in setting.peers:
            cells = [ratio(at.get((op, nbytes), {}), peer.name) for nbytes in sizes]
            if any(cells):
                rows.append(["", "of the limit" if peer.name == COPIES else f"times {peer.name}", *cells])
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows)
    return "\n\n".join(["### " + heading(setting).replace("|", "\\|"), *([table] if at else []), *notes(found)])


def ratio(row: Figures, peer: str) -> str:
    """How many times as fast as a peer we are, or what part of the limit we reach; "" where it was not measured."""
    return f"{row[peer]['us'] / row['hetcoll']['us']:.2f}" if peer in row else ""


def notes(found: list[tuple[str, int, Figures]]) -> list[str]:
    """Sentences of what is no row of a table."""
    told = []
    for op, nbytes, row in found:
        if op == "nothing":
            ours = row["hetcoll"]
            words = f"An empty kernel, by the driver's C function: {ours['us']:.1f} us, {ours['sync']:.1f} with a wait."
            told.append(words)
        elif op.startswith(BESIDE):
            what = f"{op.removeprefix(BESIDE)} with {results.human(nbytes)}"
            told.append(
                f"Calls of {what} beside products of 8192 x 8192 matrices in bfloat16 make these slower by: "
                f"{', '.join(f'{name} {beside(x)}' for name, x in row.items())}."
            )
    return told


def section(gpus: int) -> str:
    """The name of the marks in the page between which the tables stand."""
    return f"{gpus} GPU{'s' * (gpus > 1)}"


def heading(setting: Setting) -> str:
    return f"{section(setting.gpus)}, {setting.title}"

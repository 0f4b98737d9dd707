"""What benchmarks/gpus.py measures as lines, and as tables of docs/measurements/gpu-tables.md; docs/benchmarks.md has
some rows of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import results

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, CHOSEN = DOCS / "measurements/gpu-tables.md", DOCS / "benchmarks.md"
SCRIPT = "benchmarks/gpus.py"
COLUMNS, SIZES = ("GPUs", "Joined by", "Peer"), ("8 B", "64 KiB", "1 MiB", "256 MiB")
# Of `chosen`: the heading, the first two columns, and the peer.
ROWS = (
    ("1 GPU, and a rank without one", "1 and a CPU", "host memory", "Gloo"),
    ("2 GPUs, one island", "2", "NVLink", "NCCL"),
    ("4 GPUs, one island", "4", "NVLink", "NCCL"),
    ("2 GPUs, islands 0|1", "2", "host memory (0|1)", "NCCL without P2P"),
    ("4 GPUs, islands 0,1|2,3", "4", "host memory (0,1|2,3)", "NCCL without P2P"),
    ("4 GPUs, islands 0|1|2,3", "4", "host memory (0|1|2,3)", "NCCL without P2P"),
    ("2 GPUs, two hosts, by TCP on loopback", "2, as two hosts", "TCP on loopback", "NCCL over sockets"),
)
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


def markdown(heading: str, about: str, found: Sequence[tuple[str, int, Figures]]) -> str:
    """Of each operation our microseconds, the ratio to each peer, and the part of the limit, by size."""
    at = {(op, nbytes): row for op, nbytes, row in found if op != "nothing" and not op.startswith(BESIDE)}
    sizes = sorted({nbytes for _, nbytes in at})
    peers = dict.fromkeys(name for row in at.values() for name in row if name != "hetcoll")
    rows = [["operation", "", *map(results.human, sizes)], ["---", "---", *["---:"] * len(sizes)]]
    for op in dict.fromkeys(op for op, _ in at):
        rows.append([op, "us", *(results.digits(at[op, n]["hetcoll"]["us"]) if (op, n) in at else "" for n in sizes)])
        for peer in peers:
            cells = [ratio(at.get((op, nbytes), {}), peer) for nbytes in sizes]
            if any(cells):
                rows.append(["", "of the limit" if peer == COPIES else f"times {peer}", *cells])
    return "\n\n".join([f"### {_escaped(heading)}", about, *([_table(rows)] if at else []), *notes(found)])


def _table(rows: Iterable[Iterable[str]]) -> str:
    return "\n".join("| " + " | ".join(map(_escaped, cells)) + " |" for cells in rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def ratio(row: Figures, peer: str) -> str:
    """How many times as fast as a peer we are, or what part of the limit we reach; "" where it was not measured."""
    return f"{row[peer]['us'] / row['hetcoll']['us']:.2f}" if peer in row else ""


def notes(found: Sequence[tuple[str, int, Figures]]) -> list[str]:
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


def heading(gpus: int, title: str) -> str:
    return f"{section(gpus)}, {title}"


# The documents.


def write(document: Mapping[str, Any], gpus: int, titles: Sequence[str]) -> None:
    """Keep a run, and put its tables in the place of older ones of the same settings; and what follows into
    docs/benchmarks.md. `titles` are those of all settings, in their order."""
    told, page, name = document["about"], PAGE.read_text(), section(gpus)
    part = re.search('--only "(.*?)"', told)
    words = ["gpus", str(gpus), *re.findall("[a-z0-9]+", part[1] if part else "")]
    text = json.dumps(document, indent=1) + "\n"
    about = f"{told} Everything: {results.keep(text, PAGE.parent, _date(told), '-'.join(words))}."
    tables = _tables(results.between_marks(page, name, SCRIPT))
    for each in document["settings"]:
        title = heading(gpus, each["setting"])
        tables[_escaped(title)] = markdown(title, about, each["points"])
    there = [_escaped(heading(gpus, title)) for title in titles]
    body = "\n\n".join(tables[each] for each in there if each in tables)
    page = results.replace_between_marks(page, name, body, SCRIPT)
    PAGE.write_text(page)
    CHOSEN.write_text(results.replace_between_marks(CHOSEN.read_text(), "GPUs", chosen(page), SCRIPT))


def _tables(text: str) -> dict[str, str]:
    """By heading, each with that."""
    parts = re.split(r"(?m)^### ", text)[1:]
    return {part.partition("\n")[0]: f"### {part.strip()}" for part in parts}


def chosen(page: str) -> str:
    """A table of how many times as fast some all-reduces of the page are."""
    rows, tables = [[*COLUMNS, *SIZES], ["---"] * len(COLUMNS) + ["---:"] * len(SIZES)], _tables(page)
    for title, gpus, joined, peer in ROWS:
        table = tables[_escaped(title)]
        found = _ratios(table, "allreduce", peer)
        rows.append([gpus, joined, peer, *(found.get(size, "") for size in SIZES)])
    return _table(rows)


def _date(about: str) -> str:
    return about[: len("2026-01-01")]


def _ratios(table: str, op: str, peer: str) -> dict[str, str]:
    """By size, of one operation beside a peer."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if row.startswith("|")]
    sizes, _, *rows = rows
    of = ""
    for name, what, *cells in rows:
        of = name or of
        if (of, what) == (op, f"times {peer}"):
            return dict(zip(sizes[2:], cells, strict=True))
    raise ValueError(f"wanted {op} beside {peer}, found none of it: {table.partition(chr(10))[0]}")

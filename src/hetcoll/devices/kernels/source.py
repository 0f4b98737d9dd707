"""The names of the kernels, and the source of the modules that hold them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from ...errors import ArgumentError
from ...types import DType, ReduceOp, supports

SIGNALS = "signals"
_EXCHANGE = "_exchange"  # modules of their own, as few programs need them
_SIGNAL_KERNELS = ("bump", "await", "advance")


def reduce_name(dtype: DType, op: ReduceOp) -> str:
    """The kernel that reduces `dtype` by `op`."""
    return _name("reduce", dtype, op)


def oneshot_name(dtype: DType, op: ReduceOp) -> str:
    """The kernel that all-reduces small messages."""
    return _name("oneshot", dtype, op)


def exchange_name(dtype: DType, op: ReduceOp) -> str:
    """The kernel that all-reduces medium messages."""
    return _name("exchange", dtype, op)


def scale_name(dtype: DType) -> str:
    """The kernel that divides `dtype`."""
    if not supports(dtype, ReduceOp.AVG):
        raise ArgumentError(f"wanted a type that avg is defined on, got {dtype.label}")
    return f"scale_{dtype.label}"


def _name(kind: str, dtype: DType, op: ReduceOp) -> str:
    if not supports(dtype, op):
        raise ArgumentError(f"{op.label} is not defined on {dtype.label}")
    return f"{kind}_{dtype.label}_{(ReduceOp.SUM if op is ReduceOp.AVG else op).label}"


def reductions(dtype: DType) -> list[ReduceOp]:
    """The reductions that `dtype` has kernels for."""
    return [op for op in ReduceOp if op is not ReduceOp.AVG and supports(dtype, op)]


@functools.cache
def modules() -> dict[str, tuple[str, ...]]:
    """The kernels of every module."""
    table: dict[str, tuple[str, ...]] = {SIGNALS: _SIGNAL_KERNELS}
    for dtype in DType:
        names = [name(dtype, op) for op in reductions(dtype) for name in (reduce_name, oneshot_name)]
        if supports(dtype, ReduceOp.AVG):
            names.append(scale_name(dtype))
        table[dtype.label] = tuple(names)
        table[dtype.label + _EXCHANGE] = tuple(exchange_name(dtype, op) for op in reductions(dtype))
    return table


@functools.cache
def module_of() -> dict[str, str]:
    """The module of every kernel."""
    return {name: module for module, names in modules().items() for name in names}


_PACKAGE = Path(__file__).parents[2]
_INCLUDE = re.compile(r'#include "(.*)"\n')


def source(module: str) -> str:
    """One module's whole source: no compiler needs a path to our headers."""
    if module == SIGNALS:
        return _expand("devices/kernels/signals.h", set())
    dtype = DType[module.removesuffix(_EXCHANGE).upper()]
    if module.endswith(_EXCHANGE):
        lines = [_expand("devices/kernels/exchange.h", set()), f'#line 1 "{module}"\n']
        return "".join([*lines, *(f"HETCOLL_EXCHANGE({dtype.label}, {op.label})\n" for op in reductions(dtype))])
    lines = [_expand("devices/kernels/oneshot.h", set()), f'#line 1 "{module}"\n']
    lines += [
        f"HETCOLL_REDUCE({module}, {op.label})\nHETCOLL_ONESHOT({module}, {op.label})\n" for op in reductions(dtype)
    ]
    if supports(dtype, ReduceOp.AVG):
        lines.append(f"HETCOLL_SCALE({module})\n")
    return "".join(lines)


def _expand(path: str, seen: set[str]) -> str:
    """The file with every file of ours that it includes in place of the first directive that does so."""
    seen.add(path)
    lines = [f'#line 1 "{path}"\n']
    for number, line in enumerate((_PACKAGE / path).read_text().splitlines(keepends=True), 1):
        included = _INCLUDE.fullmatch(line)
        if included and included[1] not in seen:
            lines.append(_expand(included[1], seen) + f'#line {number + 1} "{path}"\n')
        else:
            lines.append("\n" if included or line == "#pragma once\n" else line)
    return "".join(lines)

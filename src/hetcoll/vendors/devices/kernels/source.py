"""The names of the kernels, and the source of the modules that hold them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from ....errors import ArgumentError
from ....types import FNUZ_OF, DType, Format, ReduceOp, supports

SIGNALS = "signals"
FLOAT8 = "float8"
MESSAGES, PIECES = "messages", "pieces"  # modules, and kernels of theirs
PIECES_OF_TABLE = "pieces_of_table"
GATHER = "gather"
_WORDS = {
    1: "unsigned char",
    2: "unsigned short",
    4: "unsigned",
    8: "hetcoll::U64",
}  # by bytes: what is copied at least
TOKENS, PLACE_TOKENS, NUMBER_TOKENS, TELL_TOKENS = "tokens", "place_tokens", "number_tokens", "tell_tokens"
_EXCHANGE, _CODECS, _CHECKS = "_exchange", "_codecs", "_checks"  # modules of their own, as few programs need them
_CODED = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_CODINGS = ("round", "encode", "decode", "add")
_SIGNAL_KERNELS = ("bump", "await")
_TOKENS_DO = ("pack", "spread", "weigh", "sum")


def reduce_name(dtype: DType, op: ReduceOp) -> str:
    """The kernel that reduces `dtype` by `op`."""
    return _name("reduce", dtype, op)


def oneshot_name(dtype: DType, op: ReduceOp) -> str:
    """The kernel that all-reduces small messages."""
    return _name("oneshot", dtype, op)


def exchange_name(dtype: DType, op: ReduceOp) -> str:
    """The kernel that reduces medium messages."""
    return _name("exchange", dtype, op)


def gather_name(dtype: DType) -> str:
    """The kernel of collectives that reduce nothing."""
    return f"{GATHER}_{gather_bytes(dtype)}"


def gather_bytes(dtype: DType) -> int:
    """What that kernel counts in."""
    return min(dtype.itemsize, max(_WORDS))


def scale_name(dtype: DType) -> str:
    """The kernel that divides `dtype`."""
    if not supports(dtype, ReduceOp.AVG):
        raise ArgumentError(f"wanted a type that avg is defined on, got {dtype.label}")
    return f"scale_{dtype.label}"


def convert_name(source: DType, target: DType) -> str:
    """The kernel that converts 8-bit floats of one kind to the other. To the same, OCP's: to what both hold."""
    return f"common_{source.label}" if source is target else f"convert_{source.label}_{target.label}"


def codec_names(dtype: DType, form: Format) -> tuple[str, ...]:
    """The kernels that round to a format, encode, decode, and add what they decode."""
    return tuple(f"{what}_{dtype.label}_{form.label}" for what in _CODINGS)


def tokens_names(dtype: DType) -> tuple[str, ...]:
    """The kernels that carry tokens to experts and what these make of them back, of each type."""
    return tuple(f"{what}_tokens_{dtype.label}" for what in _TOKENS_DO)


def checks_names(dtype: DType) -> tuple[str, str]:
    """The kernels that fold parts of buffers, and compare folds."""
    return f"fold_{dtype.label}", f"compare_{dtype.label}"


def _formats(dtype: DType) -> list[Format]:
    """Those that are narrower than the type."""
    return [form for form in Format if form.factor(dtype.itemsize) < 1]


def _conversions() -> dict[str, str]:
    """Every such kernel, and the arguments of the macro that makes it."""
    table = {}
    for ocp, fnuz in FNUZ_OF.items():
        table[convert_name(ocp, fnuz)] = f"Conversion, {ocp.label}, {fnuz.label}"
        table[convert_name(fnuz, ocp)] = f"Conversion, {fnuz.label}, {ocp.label}"
        table[convert_name(ocp, ocp)] = f"Commoning, {ocp.label}, {fnuz.label}"
    return table


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
    table: dict[str, tuple[str, ...]] = {SIGNALS: _SIGNAL_KERNELS, FLOAT8: tuple(_conversions())}
    table |= {
        MESSAGES: (MESSAGES,),
        PIECES: (PIECES, PIECES_OF_TABLE),
        GATHER: tuple(f"{GATHER}_{nbytes}" for nbytes in _WORDS),
    }
    table[TOKENS] = (
        PLACE_TOKENS, NUMBER_TOKENS, TELL_TOKENS, *(name for dtype in _CODED for name in tokens_names(dtype))
    )  # fmt: skip
    for dtype in DType:
        names = [name(dtype, op) for op in reductions(dtype) for name in (reduce_name, oneshot_name)]
        if supports(dtype, ReduceOp.AVG):
            names.append(scale_name(dtype))
        table[dtype.label] = tuple(names)
        if dtype in _CODED:
            table[dtype.label + _CODECS] = tuple(name for form in _formats(dtype) for name in codec_names(dtype, form))
        table[dtype.label + _CHECKS] = checks_names(dtype)
        table[dtype.label + _EXCHANGE] = tuple(exchange_name(dtype, op) for op in reductions(dtype))
    return table


@functools.cache
def module_of() -> dict[str, str]:
    """The module of every kernel."""
    return {name: module for module, names in modules().items() for name in names}


_VENDOR = Path(__file__).parents[2]
_DIRECTIVE = re.compile(r'^#(?:include "(.*)"|pragma once)\n', re.MULTILINE)


def source(module: str) -> str:
    """One module's whole source: no compiler needs a path to our headers."""
    if module in (SIGNALS, MESSAGES, PIECES, TOKENS):
        return _expand(f"devices/kernels/{module}.h", set())
    if module == FLOAT8:
        lines = [_expand("devices/kernels/float8.h", set()), f'#line 1 "{module}"\n']
        return "".join([*lines, *(f"HETCOLL_CONVERT({name}, {rest})\n" for name, rest in _conversions().items())])
    if module == GATHER:
        lines = [_expand("devices/kernels/exchange.h", set()), f'#line 1 "{module}"\n']
        return "".join([*lines, *(f"HETCOLL_GATHER({nbytes}, {word})\n" for nbytes, word in _WORDS.items())])
    dtype = DType[module.removesuffix(_EXCHANGE).removesuffix(_CODECS).removesuffix(_CHECKS).upper()]
    if module.endswith(_CHECKS):
        return _expand("devices/kernels/checks.h", set()) + f'#line 1 "{module}"\nHETCOLL_CHECKS({dtype.label})\n'
    if module.endswith(_CODECS):
        lines = [_expand("devices/kernels/codecs.h", set()), f'#line 1 "{module}"\n']
        return "".join([*lines, *(f"HETCOLL_CODECS({dtype.label}, {form.label})\n" for form in _formats(dtype))])
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


@functools.cache
def _text(path: str) -> str:
    return (_VENDOR / path).read_text()


def _expand(path: str, seen: set[str]) -> str:
    """The file with every file of ours that it includes in place of the first directive that does so."""
    seen.add(path)
    text, parts, done, line = _text(path), [f'#line 1 "{path}"\n'], 0, 1
    for found in _DIRECTIVE.finditer(text):
        parts.append(text[done : found.start()])
        line += parts[-1].count("\n") + 1
        done, included = found.end(), found[1]
        again = included is None or included in seen
        parts.append("\n" if again else _expand(included, seen) + f'#line {line} "{path}"\n')
    return "".join([*parts, text[done:]])

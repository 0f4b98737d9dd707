"""The names of the kernels, and the source of the modules that hold them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

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


class _Module(NamedTuple):
    """The header of this folder that it is, the macros behind that, and the kernels that these make."""

    header: str
    macros: tuple[str, ...]
    kernels: tuple[str, ...]


@functools.cache
def _modules() -> dict[str, _Module]:
    conversions = tuple(f"HETCOLL_CONVERT({name}, {rest})" for name, rest in _conversions().items())
    tokens = (name for dtype in _CODED for name in tokens_names(dtype))
    table = {
        SIGNALS: _Module("signals.h", (), _SIGNAL_KERNELS),
        FLOAT8: _Module("float8.h", conversions, tuple(_conversions())),
        MESSAGES: _Module("messages.h", (), (MESSAGES,)),
        PIECES: _Module("pieces.h", (), (PIECES, PIECES_OF_TABLE)),
        TOKENS: _Module("tokens.h", (), (PLACE_TOKENS, NUMBER_TOKENS, TELL_TOKENS, *tokens)),
    }
    for nbytes, word in _WORDS.items():
        name = f"{GATHER}_{nbytes}"
        table[name] = _Module("exchange.h", (f"HETCOLL_GATHER({nbytes}, {word})",), (name,))
    for dtype in DType:
        label, ops = dtype.label, reductions(dtype)
        macros = [f"HETCOLL_{what}({label}, {op.label})" for op in ops for what in ("REDUCE", "ONESHOT")]
        names = [name(dtype, op) for op in ops for name in (reduce_name, oneshot_name)]
        if supports(dtype, ReduceOp.AVG):
            macros.append(f"HETCOLL_SCALE({label})")
            names.append(scale_name(dtype))
        table[label] = _Module("oneshot.h", tuple(macros), tuple(names))
        if dtype in _CODED:
            macros = [f"HETCOLL_CODECS({label}, {form.label})" for form in _formats(dtype)]
            names = [name for form in _formats(dtype) for name in codec_names(dtype, form)]
            table[f"{label}_codecs"] = _Module("codecs.h", tuple(macros), tuple(names))
        table[f"{label}_checks"] = _Module("checks.h", (f"HETCOLL_CHECKS({label})",), checks_names(dtype))
        for op in ops:
            name = exchange_name(dtype, op)
            table[name] = _Module("exchange.h", (f"HETCOLL_EXCHANGE({label}, {op.label})",), (name,))
    return table


def modules() -> dict[str, tuple[str, ...]]:
    """The kernels of every module."""
    return {name: module.kernels for name, module in _modules().items()}


@functools.cache
def module_of() -> dict[str, str]:
    """The module of every kernel."""
    return {name: module for module, names in modules().items() for name in names}


_VENDOR = Path(__file__).parents[2]
_DIRECTIVE = re.compile(r'^#(?:include "(.*)"|pragma once)\n', re.MULTILINE)


def source(module: str) -> str:
    """One module's whole source: no compiler needs a path to our headers."""
    header, macros, _ = _modules()[module]
    return _whole(header) + "".join([f'#line 1 "{module}"\n', *(f"{macro}\n" for macro in macros)] if macros else [])


@functools.cache
def _whole(header: str) -> str:
    return _expand(f"devices/kernels/{header}", set())


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

"""Compression in NumPy: the formats, and compressed plans run step by step, to compare with the engine bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hetcoll.plan.ir import Buf, Op, Plan, Span, cut
from hetcoll.plan.simulator.network import network
from hetcoll.plan.simulator.progress import run
from hetcoll.types import DType, Format

DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
FORMATS = (Format.BF16, Format.FP8, Format.INT8)
KINDS = [(d, f) for d in DTYPES for f in FORMATS if f.factor(d.itemsize) < 1]

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 32
HIGHEST = {DType.FLOAT32: 127, DType.BFLOAT16: 127, DType.FLOAT16: 15}  # exponents: of the largest number,
LOWEST = {DType.FLOAT32: -126, DType.BFLOAT16: -126, DType.FLOAT16: -24}  # and of the smallest step


def scales(v: Array, dtype: DType, form: Format) -> Array:
    """The exponent of each block of float32; NaNs count as 0 here."""
    binade, steps, beyond = (6, 0, 127.5) if form is Format.INT8 else (8, 9, 464.5)
    most, least = HIGHEST[dtype] - binade, LOWEST[dtype] + steps
    top = np.abs(np.nan_to_num(v, nan=0, posinf=0, neginf=0)).max(axis=1).astype(np.float64)
    e = np.where(top > 0, np.frexp(top)[1] - 1 - binade, least).clip(least, most)
    return np.where((e < most) & (top >= beyond * 2.0**e), e + 1, e)


def codes(v: Array, dtype: DType, form: Format) -> tuple[Array, Array]:
    """Blocks of float32 as (scale bytes, codes); with BF16 there are no scales."""
    if form is Format.BF16:
        return np.empty((len(v), 0), np.uint8), v.astype(ml_dtypes.bfloat16).view(np.uint8).reshape(len(v), 2 * BLOCK)
    e, bad = scales(v, dtype, form), ~np.isfinite(v).all(axis=1)
    with np.errstate(invalid="ignore"):
        x = v.astype(np.float64) / 2.0 ** e[:, None]
    x[bad] = 0
    if form is Format.INT8:
        found = np.rint(x.clip(-127, 127)).astype(np.int8).view(np.uint8)
    else:
        found = x.clip(-448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(bad, 255, e + 127).astype(np.uint8)[:, None], found


def values(scale: Array, code: Array, form: Format) -> Array:
    """What `codes` stand for, as float32."""
    if form is Format.BF16:
        return code.copy().view(ml_dtypes.bfloat16).astype(np.float32)
    kind: Any = np.int8 if form is Format.INT8 else ml_dtypes.float8_e4m3fn
    x = code.view(kind).astype(np.float32) * np.float32(2) ** (scale.astype(np.float32) - 127)
    return np.where(scale == 255, np.float32(np.nan), x)


def blocks(x: Array) -> Array:
    return np.pad(x.astype(np.float32), (0, -len(x) % BLOCK)).reshape(-1, BLOCK)


def wire(x: Array, dtype: DType, form: Format) -> bytes:
    """The codes of an array as they travel."""
    scale, code = codes(blocks(x), dtype, form)
    short = (-len(x) % BLOCK) * (code.shape[1] // BLOCK)
    whole = np.concatenate([scale, code], axis=1).tobytes()
    return whole[: len(whole) - short]


def rounded(x: Array, residual: Array | None, dtype: DType, form: Format) -> tuple[Array, Array]:
    """(what of `x` plus the residual goes over the wire, in x's type; the new residual)."""
    with np.errstate(over="ignore", invalid="ignore"):
        v = x.astype(np.float32) + (np.float32(0) if residual is None else residual)
        y = values(*codes(blocks(v), dtype, form), form).reshape(-1)[: len(x)]
        lost = v - y
        return y.astype(x.dtype), np.where(np.isfinite(lost), lost, 0).astype(np.float32)


class Reference:
    """Compressed plans of all ranks, run again and again on the same buffers."""

    def __init__(self, plans: Sequence[Plan], dtype: DType, form: Format, *, feedback: bool = True) -> None:
        self.plans, self.dtype, self.form, self.feedback = plans, dtype, form, feedback
        self.residuals: dict[tuple[int, int], Array] = {}

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        """Each rank's output. The order of the steps is one that the simulator found possible."""
        plans = self.plans
        memory = [Memory(plan, x) for plan, x in zip(plans, inputs, strict=True)]
        messages: dict[int, Array] = {}
        for node in run(plans, network(plans), 0):
            step, mine = node.step, memory[node.rank]
            src, dst = mine.view(step.src), mine.view(step.dst)
            if step.op is Op.SEND:
                messages[node.id] = src.copy()
            elif step.op is Op.ROUND:
                key = (node.rank, node.index)
                dst[:], lost = rounded(src, self.residuals.get(key), self.dtype, self.form)
                if self.feedback:
                    self.residuals[key] = lost
            elif step.op is Op.SCALE:
                dst[:] = (dst.astype(np.float32) / np.float32(len(plans))).astype(dst.dtype)
            elif step.op in (Op.RECV, Op.RECV_REDUCE):
                assert node.other is not None
                came = messages[node.other.id]
                dst[:] = came if step.op is Op.RECV else src + came
            else:
                raise AssertionError(step)
        return [m.memory[Buf.RECV] for m in memory]


class Memory:
    def __init__(self, plan: Plan, x: Array) -> None:
        count = len(x) * plan.recv_units // plan.send_units
        self.plan = plan
        like = len(x) if plan.scratch_like is Buf.SEND else count
        self.memory = {
            Buf.SEND: x.copy(),
            Buf.RECV: np.zeros(count, x.dtype),
            Buf.SCRATCH: np.zeros(plan.scratch_copies * like, x.dtype),
        }

    def view(self, span: Span | None) -> Array:
        if span is None:
            return np.empty(0)
        buf = self.plan.scratch_like if span.buf is Buf.SCRATCH else span.buf
        units = self.plan.units(buf)
        table = cut(len(self.memory[buf]), units)
        copy, unit = divmod(span.start, units)
        shift = copy * table[-1]
        return self.memory[span.buf][shift + table[unit] : shift + table[unit + span.count]]

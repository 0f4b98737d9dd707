"""Which tokens go to which ranks, and what of them a rank's experts get: tables in NumPy, where nothing moves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import ArgumentError, BufferTypeError, DType
from ..calls.buffers import Buffer

Column = np.ndarray[Any, np.dtype[np.int64]]


class Sent(NamedTuple):
    """Where the tokens of this rank go: each once to every rank that has an expert of it."""

    tokens: list[Column]  # by rank, in ascending order
    columns: list[Column]  # by rank: of how many lower ranks each of them is, too
    width: int  # ranks of the token that has most


def sent(ids: Column, size: int, experts: int) -> Sent:
    """Of `ids`, [tokens, k]; each of `size` ranks has so many experts. -1 is no expert."""
    goes = np.zeros((len(ids), size), bool)
    rows, slots = np.nonzero(ids >= 0)
    goes[rows, ids[rows, slots] // experts] = True
    before = goes.cumsum(axis=1)
    tokens = [np.flatnonzero(goes[:, rank]) for rank in range(size)]
    columns = [before[tokens[rank], rank] - 1 for rank in range(size)]
    return Sent(tokens, columns, int(before[:, -1].max(initial=0)))


class Grouped(NamedTuple):
    """What this rank's experts get of the tokens that came, by expert; of one expert in the order of the tokens."""

    rows: Column  # of each: which token
    counts: Column  # by expert
    places: Column  # [tokens, k]: which of them it is; -1 where the expert is another rank's


def grouped(ids: Column, first: int, experts: int) -> Grouped:
    """Of the `ids` of what came, [tokens, k]; this rank's experts are `experts` from `first` on."""
    own, here = ids - first, np.arange(ids.shape[1])
    before = (ids[:, :, None] == ids[:, None, :]).argmax(axis=2)  # an expert that is named again: where it was first
    rows, slots = np.nonzero((own >= 0) & (own < experts) & (before == here))
    found = own[rows, slots]
    order = np.argsort(found, kind="stable")
    places = np.full(ids.shape, -1, np.int64)
    places[rows[order], slots[order]] = np.arange(len(order))
    places = np.take_along_axis(places, before, axis=1)
    return Grouped(rows[order], np.bincount(found, minlength=experts), places)


def check_shape(array: Any, name: str, *wanted: int | None) -> tuple[int, ...]:
    """The shape of an array, where None may be any number. ArgumentError where it is another."""
    if not hasattr(array, "shape"):
        raise BufferTypeError(f"{name}: wanted an array with a shape, got {type(array).__name__}")
    found = tuple(array.shape)
    if len(found) != len(wanted) or any(w is not None and w != f for w, f in zip(wanted, found, strict=True)):
        spelled = ", ".join("any" if each is None else str(each) for each in wanted)
        raise ArgumentError(f"{name}: wanted the shape ({spelled}), got {found}")
    return found


def check_dtype(buffer: Buffer, name: str, *wanted: DType) -> None:
    """BufferTypeError for any other type."""
    if buffer.dtype not in wanted:
        spelled = " or ".join(each.label for each in wanted)
        raise BufferTypeError(f"{name}: wanted {spelled}, got {buffer.dtype.label}")


def check_ids(ids: Column, num_experts: int) -> None:
    """ArgumentError unless each is an expert, or -1 for none."""
    if ids.size and not (int(ids.min()) >= -1 and int(ids.max()) < num_experts):
        token, slot = np.argwhere((ids < -1) | (ids >= num_experts))[0]
        raise ArgumentError(
            f"topk_ids: wanted experts in [0, {num_experts}) or -1, got {ids[token, slot]} of token {token}"
        )

"""Compressed edges between GPUs: the kernels against NumPy bit by bit, and plans against the checker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_reference import rounded, wire
from compressed_calls import COLLECTIVES, KINDS
from elements import NUMPY, assert_same, bit_patterns
from kernel_checks import Launch, as_bytes
from mutants import edited, field_mutants, passes, structural_mutants
from plain_kernels import PlainMachine
from thorough import parametrize
from waits import Waits

from hetcoll.plan.algorithms import Hosts
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import Plan
from hetcoll.plan.pipeline import pipelined
from hetcoll.plan.simulator import check, serialisable
from hetcoll.types import Collective, DType, Format
from hetcoll.vendors.devices.kernels import codec_names

Array = np.ndarray[Any, np.dtype[Any]]
COUNTS = (1, 31, 32, 33, 4099)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainMachine]:
    made = PlainMachine(tmp_path_factory.mktemp("kernels"))
    yield made
    made.close()


class Memory:
    """Of the machine: what is put there, at `skew` bytes from a multiple of 256, between guards."""

    def __init__(self, machine: PlainMachine, data: Array, skew: int = 0) -> None:
        self.machine, self.data = machine, data
        self.base = machine.allocate(data.nbytes + 1024)
        self.address = self.base + 256 + skew
        machine.write(self.base, np.full(data.nbytes + 1024, 0xA5, np.uint8))
        machine.write(self.address, as_bytes(data))

    def read(self) -> Array:
        around = self.machine.read(self.base, self.data.nbytes + 1024)
        begin = self.address - self.base
        assert (around[:begin] == 0xA5).all()
        assert (around[begin + self.data.nbytes :] == 0xA5).all()
        return around[begin : begin + self.data.nbytes].view(self.data.dtype)


@parametrize("skew", [1, 0], first=1)
@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_kernels_give_numpys_bits(machine: PlainMachine, dtype: DType, form: Format, skew: int) -> None:
    round_, encode, decode, add = codec_names(dtype, form)
    for count in COUNTS:
        for clean in (True, False):
            x = bit_patterns(dtype, count, count).view(NUMPY[dtype])
            with np.errstate(invalid="ignore", over="ignore"):
                x = np.where(np.isfinite(x.astype(np.float32)), x, 3).astype(x.dtype) if clean else x
                lost = np.random.default_rng(count).standard_normal(count).astype(np.float32)
                want, want_left = rounded(x, lost, dtype, form)
                plain, _ = rounded(x, None, dtype, form)
            src, dst = Memory(machine, x, skew), Memory(machine, np.zeros_like(x), skew)
            kept = Memory(machine, lost)
            machine.run([Launch(round_, 2, 16, dst.address, src.address, kept.address, count)])
            assert_same(dtype, dst.read(), want, x)
            assert_same(DType.FLOAT32, kept.read(), want_left, x)
            machine.run([Launch(round_, 2, 16, src.address, src.address, 0, count)])  # in place, nothing kept
            assert_same(dtype, src.read(), plain, x)
            length = len(wire(plain, dtype, form))
            codes = Memory(machine, np.zeros(length, np.uint8))
            machine.run([Launch(encode, 2, 16, codes.address, src.address, count)])
            if clean or form is not Format.BF16:  # a NaN has many codes there
                assert codes.read().tobytes() == wire(plain, dtype, form)
            machine.run([Launch(decode, 2, 16, dst.address, codes.address, count)])
            assert_same(dtype, dst.read(), plain, x)
            if clean:
                term = np.random.default_rng(1).standard_normal(count).astype(x.dtype)
                other = Memory(machine, term, skew)
                machine.run([Launch(add, 2, 16, other.address, other.address, codes.address, count)])
                with np.errstate(over="ignore"):
                    assert_same(
                        dtype, other.read(), (term.astype(np.float32) + plain.astype(np.float32)).astype(x.dtype), x
                    )


def test_kernels_have_no_undefined_behaviour(tmp_path: Path) -> None:
    options = "-O1 -fsanitize=undefined -fno-sanitize-recover=all"
    machine = PlainMachine(tmp_path, options)
    for form in (Format.FP8, Format.INT8):
        for skew in (0, 1):
            test_kernels_give_numpys_bits(machine, DType.FLOAT16, form, skew)
    machine.close()


# The plans.

ISLAND_SHAPES: tuple[Hosts, ...] = (
    ((0,), (1,)), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 3), (1, 2)), ((0, 1), (2,), (3, 4, 5)),
    ((1, 0), (4, 2, 3)),
)  # fmt: skip


def build(kind: Collective, islands: Hosts, groups: Hosts = (), *, scale: bool = False) -> list[Plan]:
    n = sum(map(len, islands))
    return [ISLANDS[kind].build(n, r, scale=scale, hosts=islands, compress=True, groups=groups) for r in range(n)]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("islands", ISLAND_SHAPES, ids=str)
def test_plans_are_proved(kind: Collective, islands: Hosts) -> None:
    """Whole and in pieces; no edges but those between islands, or between groups of them, are compressed."""
    joined = ((*islands[0], *islands[1]), *islands[2:])
    for groups in (islands, joined):
        home = {rank: group for group in groups for rank in group}
        for scale in (False, True):
            plans = build(kind, islands, groups, scale=scale)
            for plan in plans:
                assert all(s.compressed == (s.peer not in home[plan.rank]) for s in plan.steps if s.peer >= 0)
            for inplace in (False, True):
                check(plans, scale=scale, inplace=inplace, credits=1)
            pieces = pipelined(plans, (0, 1, 3))
            check(pieces, scale=scale, credits=1)
            serialisable(pieces, Waits(pieces, 2).orders(), 2)


@pytest.mark.parametrize("islands", ISLAND_SHAPES[:3], ids=str)
def test_every_single_mistake_is_caught(islands: Hosts) -> None:
    plans = build(Collective.REDUCE_SCATTER, islands)
    for rank, plan in enumerate(plans):
        flipped = (
            (f"step {i} flipped", edited(plan, i, compressed=not s.compressed)) for i, s in enumerate(plan.steps)
        )
        for what, mutant in (*structural_mutants(plan), *field_mutants(plan), *flipped):
            if passes([*plans[:rank], mutant, *plans[rank + 1 :]], scale=False):
                raise AssertionError(f"rank {rank}: {what}\n{plan.dump()}")

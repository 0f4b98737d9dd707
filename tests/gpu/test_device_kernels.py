"""The GPU kernels' one source: as plain C++ against the host's kernels, and through the compilers of both vendors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kernel_checks as checks
import pytest
from elements import AVERAGED, NARROW, PAIRS, pair_id
from fold_checks import check_folds
from plain_kernels import PlainMachine
from thorough import parametrize

from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices.kernels import KernelTable, modules, source

# Each type's kernels are compiled by themselves, which takes most of the time: a few types come first.
FEW = [DType.INT32, DType.BFLOAT16, DType.FLOAT8_E4M3FN]


def _late(case: DType | tuple[DType, ReduceOp]) -> bool:
    return (case if isinstance(case, DType) else case[0]) not in FEW


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainMachine]:
    made = PlainMachine(tmp_path_factory.mktemp("kernels"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def operands(machine: PlainMachine) -> checks.Operands:
    return checks.Operands(machine)


def shape(count: int, itemsize: int) -> tuple[int, int]:
    """Some blocks, and fewer threads than packs."""
    return 3, 16


@parametrize(("dtype", "op"), sorted(PAIRS, key=_late), first=1, ids=pair_id)
def test_reductions_match_the_hosts(operands: checks.Operands, dtype: DType, op: ReduceOp) -> None:
    checks.check_reduce(operands, dtype, op, shape)


@parametrize("dtype", sorted(AVERAGED, key=_late), first=2, ids=pair_id)
def test_divisions_match_the_hosts(operands: checks.Operands, dtype: DType) -> None:
    checks.check_scale(operands, dtype, shape)


@parametrize("dtype", sorted(NARROW, key=_late), first=3, ids=pair_id)
def test_every_code_of_narrow_types(operands: checks.Operands, dtype: DType) -> None:
    checks.check_every_code(operands, dtype, shape)


@parametrize("size", [3, 2, 5], first=1)
@parametrize("dtype", sorted(DType, key=_late), ids=pair_id, first=1)
def test_oneshot_all_reduces(machine: PlainMachine, dtype: DType, size: int) -> None:
    checks.check_oneshot(machine, dtype, size)


def test_oneshot_takes_as_many_ranks_as_there_are_areas(machine: PlainMachine) -> None:
    ring = checks.Ring(machine, 16, 1024)
    for _ in range(3):
        ring.check(DType.INT32, ReduceOp.SUM, 100)
        ring.check(DType.BFLOAT16, ReduceOp.AVG, 99, divisor=16)


def test_oneshot_numbers_wrap_and_old_words_are_swept(machine: PlainMachine) -> None:
    checks.check_oneshot_numbers(machine)


def test_messages(machine: PlainMachine) -> None:
    checks.check_messages(machine)


def test_numbers_of_messages_pass_any_size_and_old_words_are_swept(machine: PlainMachine) -> None:
    checks.check_message_numbers(machine)


@parametrize("dtype", [DType.FLOAT32, DType.INT16, DType.FLOAT64], first=1, ids=pair_id)
def test_folds(machine: PlainMachine, dtype: DType) -> None:
    check_folds(machine, dtype)


def test_signals(machine: PlainMachine) -> None:
    checks.check_signals(machine)


def test_waiting_kernels_end_when_aborted(machine: PlainMachine) -> None:
    checks.check_aborts(machine)


@pytest.mark.thorough
def test_no_behaviour_is_undefined(tmp_path: Path) -> None:
    """Overflow, shifts, alignment, under UBSan, which takes too long to compile for all types."""
    machine = PlainMachine(tmp_path, "-O1 -fsanitize=undefined -fno-sanitize-recover=all")
    operands = checks.Operands(machine)
    for dtype in (DType.INT16, DType.FLOAT8_E4M3FN):
        for op in checks.reductions(dtype):
            checks.check_reduce(operands, dtype, op, shape)
        checks.check_scale(operands, dtype, shape)
        checks.check_oneshot(machine, dtype, 2)
    checks.check_messages(machine)
    machine.close()


def test_every_kernel_stands_in_one_module() -> None:
    names = [name for each in modules().values() for name in each]
    assert len(names) == len(set(names))
    alone = {name for name in names if name.startswith(("exchange_", "gather_"))}
    assert all(modules()[name] == (name,) for name in alone)
    of_types = {d.label + end for d in DType for end in ("", "_checks")}
    others = {"signals", "messages", "pieces", "tokens", "float8"}
    assert set(modules()) == alone | of_types | others | {"float32_codecs", "float16_codecs", "bfloat16_codecs"}


def test_a_source_needs_no_file_of_ours() -> None:
    for module in modules():
        assert '#include "' not in source(module)


def test_oneshot_launches_serve_every_size() -> None:
    for dtype in DType:
        for nbytes in (8, 100, 4096, 32768):
            count = -(-nbytes // dtype.itemsize)
            grid, block = KernelTable.oneshot_launch(count, dtype.itemsize, 32)
            assert 1 <= grid <= 32
            assert block <= 512
            assert KernelTable.oneshot_words(count * dtype.itemsize) * 4 >= count * dtype.itemsize

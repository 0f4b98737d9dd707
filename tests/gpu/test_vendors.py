"""NCCL and RCCL as islands: found, joined within a deadline, called by address, failing in words, ended at once.

They are the fakes: libraries of the same functions, over the fake driver's devices.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import ml_dtypes
import numpy as np
import pytest
from patience import DEADLINE
from ranks import Job, Ranks, close_all, elapsed, wait_until

from hetcoll.errors import ArgumentError, CommunicationError, DeviceError, InitError
from hetcoll.types import COMPLEX, FLOATS, DType, ReduceOp, supports
from hetcoll.vendors.ccl import nccl, rccl
from hetcoll.vendors.ccl.finding import Finder, loaded
from hetcoll.vendors.ccl.library import Island, Library
from hetcoll.vendors.ccl.native import BYTES, Native, native

FINDERS = {"cuda": nccl, "hip": rccl}
VERSIONS = {"cuda": "2.28.9", "hip": "2.27.7"}  # of the fakes
SECONDS = 10.0
_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_ALL_REDUCE = ctypes.CFUNCTYPE(_I, _P, _P, _Z, _I, _I, _P, _P)

# ------------------------------------------------------------------------------------------------ what they can reduce


def test_types_and_operations_of_their_own_have_their_numbers() -> None:
    for op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG):
        for number in range(10):
            assert native(DType(number), op, "sm_70", 21800) == (number, int(op), 1)
    assert BYTES.itemsize == 1


@pytest.mark.parametrize(
    ("arch", "version", "ocp", "fnuz"),
    [
        ("sm_90", 22400, True, False),
        ("sm_100a", 22800, True, False),
        ("sm_89", 22800, False, False),
        ("sm_90", 22307, False, False),
        ("gfx942:sramecc+:xnack-", 22400, False, True),
        ("gfx950", 22400, True, False),
        ("gfx1200", 22400, True, False),
        ("gfx90a", 22400, False, False),
        ("gfx942", 22203, False, False),
    ],
)
def test_fp8_is_the_gpus_own_kind(arch: str, version: int, ocp: bool, fnuz: bool) -> None:
    for dtype, number, there in (
        (DType.FLOAT8_E4M3FN, 10, ocp),
        (DType.FLOAT8_E5M2, 11, ocp),
        (DType.FLOAT8_E4M3FNUZ, 10, fnuz),
        (DType.FLOAT8_E5M2FNUZ, 11, fnuz),
    ):
        assert native(dtype, ReduceOp.SUM, arch, version) == (Native(number, 0) if there else None)


def test_other_reductions_are_the_same_as_ours_or_none() -> None:
    """Done with NumPy the way the library would: elements of its type, its operation, modulo 2**8 where it wraps."""
    rng = np.random.default_rng(0)
    ours = {
        ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum,
        ReduceOp.LAND: np.logical_and, ReduceOp.LOR: np.logical_or, ReduceOp.LXOR: np.logical_xor,
        ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor,
    }  # fmt: skip
    seen = set()
    for dtype in (DType.BOOL, *COMPLEX, DType.INT16, DType.UINT16, DType.INT32):
        for op in ours:
            if not supports(dtype, op):
                continue
            found = native(dtype, op, "sm_90", 22800)
            if found is None:
                seen.add((dtype, op))
                continue
            a, b = (rng.integers(0, 2, 64).astype(dtype.label) for _ in range(2))
            theirs = DType(found.dtype)
            assert found.elements * theirs.itemsize == dtype.itemsize
            result = ours[ReduceOp(found.op)](a.view(theirs.label), b.view(theirs.label)).astype(theirs.label)
            np.testing.assert_array_equal(result.view(dtype.label), ours[op](a, b))
    logical = {ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
    short = {(d, op) for d in (DType.INT16, DType.UINT16) for op in ours}
    products = {(d, ReduceOp.PROD) for d in COMPLEX}
    assert seen == {(DType.INT32, op) for op in logical} | short | products | {
        (DType.BOOL, ReduceOp.LXOR),
        (DType.BOOL, ReduceOp.BXOR),
    }


# ---------------------------------------------------------------------------------------------------------- finding


def test_loaded_libraries_are_known() -> None:
    assert list(loaded("libc.so.6", "libnothing-of-that-name.so.1")) == ["libc.so.6"]


def test_why_not_names_what_was_tried_first_and_what_helps() -> None:
    found = Finder("NCCL", lambda: ["/nowhere/libnccl.so.2", "libc.so.6"], "pip install it")
    reason = found.why_not()
    assert reason is not None
    assert "NCCL cannot be opened: /nowhere/libnccl.so.2" in reason
    assert reason.endswith("pip install it")
    with pytest.raises(DeviceError, match="/nowhere/libnccl"):
        found.library()
    assert Finder("NCCL", list, "pip install it").why_not() == "there is no NCCL: pip install it"
    with pytest.raises(DeviceError, match=r"libc.so.6 is not NCCL"):
        Library("NCCL", "libc.so.6")


OLD = """
extern "C" int ncclGetVersion(int* version) { *version = %d; return %d; }
extern "C" const char* ncclGetErrorString(int) { return "what happened"; }
"""


@pytest.mark.parametrize(
    ("version", "result", "problem"),
    [(21304, 0, r"RCCL 2\.13\.4 \(.*\): wanted 2.18 or newer, with ncclAllReduce"), (22800, 3, "is not RCCL")],
)
def test_old_libraries_are_refused(tmp_path: Path, version: int, result: int, problem: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ makes the library")
    library = tmp_path / "librccl.so.1"
    words = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(words, input=OLD % (version, result), text=True, check=True, timeout=DEADLINE)
    with pytest.raises(DeviceError, match=problem):
        Library("RCCL", str(library))


# ------------------------------------------------------------------------------------------------------ communicators

pytestmark = pytest.mark.fakes
Call = Callable[..., list[Any]]


@pytest.fixture(params=["cuda", "hip"])
def vendor(request: pytest.FixtureRequest) -> str:
    fakes.require(request.param)
    return str(request.param)


@pytest.fixture
def members(vendor: str) -> Iterator[Callable[..., Ranks]]:
    """Processes with a GPU each, of which rank 0 has made a unique id: ``members(3, fail="ncclAllReduce:1:3")``."""
    made: list[Ranks] = []

    def start(size: int, devices: int | None = None, **settings: object) -> Ranks:
        settings.setdefault("timeout", 8)
        ranks = Ranks(size, fakes.environment(vendor, devices=devices or size, **settings), join=False)
        made.append(ranks)
        ranks.run(_prepare, vendor)
        return ranks

    yield start
    close_all(made)


_here: dict[str, Any] = {}


def _prepare(job: Job, vendor: str) -> None:
    driver = importlib.import_module(f"hetcoll.vendors.devices.{vendor}")
    _here["library"] = FINDERS[vendor].library()
    _here["device"] = driver.device(job.rank % len(driver.devices()))


def _unique_id(job: Job) -> bytes:
    return _here["library"].unique_id() if job.rank == 0 else b""  # type: ignore[no-any-return]


def _gave_up() -> None:
    raise InitError("rank 2 gave up")


def _join(job: Job, unique_id: bytes, timeout: float = SECONDS, late: int = -1, *sound: Callable[[], None]) -> None:
    """Join the island, but for rank `late`, which does not come."""
    if job.rank != late:
        _here["island"] = Island(_here["library"], job.size, job.rank, unique_id, _here["device"], timeout, *sound)


def _allreduce(
    array: np.ndarray[Any, Any], op: int, dtype: int, count: int, then: Callable[[], None] = lambda: None
) -> np.ndarray[Any, Any]:
    """One all-reduce in place, by its address as the engine calls it; `then` is called when it is enqueued."""
    island, device = _here["island"], _here["device"]
    memory, stream = device.allocate(max(1, array.nbytes)), device.stream()
    try:
        device.copy(memory, array.ctypes.data, array.nbytes)
        function = _ALL_REDUCE(island.functions()["ncclAllReduce"])
        code = function(memory, memory, count, dtype, op, island.handle, stream)
        assert code == 0, island.library.words(code)
        then()
        device.synchronize(stream)
        out = np.empty_like(array)
        device.copy(out.ctypes.data, memory, array.nbytes)
        return out
    finally:
        device.destroy_stream(stream)
        device.free(memory)


def _reduces(job: Job) -> None:
    rng = np.random.default_rng(5)
    for dtype in DType:
        for op in ReduceOp:
            how = native(dtype, op, "sm_90", 22800) if supports(dtype, op) else None
            if how is None or how.dtype >= 10:  # the fake is old enough to have no fp8
                continue
            low = 0 if dtype is DType.BOOL or dtype.label.startswith("u") else -3
            terms = rng.integers(low, 2 if dtype is DType.BOOL else 4, (job.size, 33))
            kind = ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label
            terms = terms.astype(kind)
            got = _allreduce(terms[job.rank].copy(), how.op, how.dtype, 33 * how.elements)
            want = {
                ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum,
                ReduceOp.LOR: np.logical_or, ReduceOp.LAND: np.logical_and, ReduceOp.BOR: np.bitwise_or,
                ReduceOp.BAND: np.bitwise_and,
            }.get(op)  # fmt: skip
            if want is not None:
                np.testing.assert_array_equal(got, want.reduce(terms, axis=0, dtype=kind), f"{dtype.label} {op.label}")
            else:
                assert op is ReduceOp.AVG
                total = np.add.reduce(terms.astype("complex128"), axis=0) / job.size
                exact = total if dtype in COMPLEX or dtype in FLOATS else np.trunc(total.real)
                np.testing.assert_allclose(got.astype("complex128"), exact, rtol=0.02, atol=0.02)


def _about(job: Job) -> tuple[str, bool, str | None]:
    island = _here["island"]
    return island.library.version, island.handle > 0, island.async_error()


def _end(job: Job, how: str = "close") -> None:
    island = _here.pop("island")
    getattr(island, how)()
    assert island.handle == 0
    assert island.async_error() is None
    getattr(island, how)()  # again: nothing
    for call in (lambda: island.register(1, 1), lambda: island.weighted_sum(0.5, DType.FLOAT32)):
        with pytest.raises(CommunicationError, match=r"CCL among 3 ranks has ended"):
            call()


def _formed(members: Callable[..., Ranks], size: int = 3, **settings: object) -> Ranks:
    ranks = members(size, **settings)
    ranks.run(_join, ranks.run(_unique_id)[0])
    return ranks


@pytest.mark.parametrize("settings", [{}, {"jitter": "3:2000"}])
def test_an_island_reduces_and_ends(vendor: str, members: Callable[..., Ranks], settings: dict[str, object]) -> None:
    ranks = _formed(members, **settings)
    assert ranks.run(_about) == [(VERSIONS[vendor], True, None)] * 3
    ranks.run(_reduces)
    ranks.run(_end)


def test_several_islands_one_after_another(members: Callable[..., Ranks]) -> None:
    ranks = members(3)
    for how in ("close", "abort", "close"):
        ranks.run(_join, ranks.run(_unique_id)[0])
        ranks.run(_reduces)
        ranks.run(_end, how)


def test_those_who_wait_for_a_member_hear_that_it_gave_up(members: Callable[..., Ranks]) -> None:
    outcomes = (ranks := members(3)).outcomes(_join, ranks.run(_unique_id)[0], SECONDS, 2, _gave_up)
    assert ["rank 2 gave up" in str(outcome.error) for outcome in outcomes] == [True, True, False]


@pytest.mark.calm
def test_those_who_wait_for_a_member_give_up_in_time(members: Callable[..., Ranks]) -> None:
    ranks = members(3)
    outcomes = ranks.outcomes(_join, ranks.run(_unique_id)[0], 0.6, 2)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, InitError)
        assert "CCL among 3 ranks: not all have come within 0.6 s" in str(outcome.error)
        assert 0.5 < outcome.seconds < 3
    assert outcomes[2].error is None
    ranks.run(_join, ranks.run(_unique_id)[0])  # the next one works
    ranks.run(_end)
    ranks.broken = True  # the library keeps a unique id that not all have used


def test_two_on_one_gpu_are_refused_in_the_librarys_words(members: Callable[..., Ranks]) -> None:
    ranks = members(2, devices=1)
    for outcome in ranks.outcomes(_join, ranks.run(_unique_id)[0]):
        assert isinstance(outcome.error, InitError)
        assert "CCL 2.2" in str(outcome.error)
        assert ": invalid usage" in str(outcome.error)


@pytest.mark.parametrize("function", ["ncclCommInitRankConfig", "ncclCommSplit", "ncclCommFinalize"])
def test_what_the_library_refuses_leaves_nothing_behind(members: Callable[..., Ranks], function: str) -> None:
    ranks = members(3, fail=f"{function}:1:2")
    for outcome in ranks.outcomes(_join, ranks.run(_unique_id)[0]):
        assert isinstance(outcome.error, InitError)
        assert f"CCL among 3 ranks: {function}: " in str(outcome.error)
        assert ": unhandled system error" in str(outcome.error)
    ranks.broken = function == "ncclCommInitRankConfig"  # the library keeps a unique id that not all have used


def _hang_and_abort(job: Job) -> float:
    """Rank 0 calls a collective that nobody else does; another thread ends it."""
    if job.rank > 0:
        return 0.0
    other = threading.Thread(target=_here["island"].abort)
    with elapsed() as took, pytest.raises((DeviceError, AssertionError), match=r"cu|hip|equal"):
        np.testing.assert_array_equal(_allreduce(np.ones(4, np.float32), 0, 7, 4, other.start), 3)
    other.join()
    return took[0]


def test_abort_ends_what_waits_for_a_peer(members: Callable[..., Ranks]) -> None:
    ranks = _formed(members)
    assert ranks.run(_hang_and_abort)[0] < 7  # the fake itself would end it after 8
    ranks.run(_end_quietly)


def _end_quietly(job: Job) -> None:
    _here.pop("island").abort()


def _fails_late(job: Job) -> str:
    """What a watching thread hears of, before it ends the island."""
    island, heard = _here["island"], list[str]()

    def watch() -> None:
        heard.append(wait_until(island.async_error, 20.0))
        island.abort()

    watcher = threading.Thread(target=watch)
    with pytest.raises((DeviceError, AssertionError), match=r"cu|hip|equal"):
        np.testing.assert_array_equal(_allreduce(np.ones(4, np.float32), 0, 7, 4, watcher.start), 3)
    watcher.join()
    return heard[0]


def test_asynchronous_errors_come_in_the_librarys_words(members: Callable[..., Ranks]) -> None:
    ranks = _formed(members, fail="ncclAllReduce:1:late6", timeout=30)
    for problem in ranks.run(_fails_late):
        assert ": remote process exited or there was a network error" in problem


def _weights(job: Job) -> None:
    """Halves, thirds and so on, as ranks of islands of other sizes would weigh their terms."""
    island = _here["island"]
    for dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64):
        kind = ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label
        op = island.weighted_sum(1 / (2 + job.rank), dtype)
        got = _allreduce(np.full(5, 6, kind), op, int(dtype), 5)
        island.drop(op)
        np.testing.assert_allclose(got.astype(float), 6 / 2 + 6 / 3 + 6 / 4, rtol=0.02)
        with pytest.raises(CommunicationError, match=r"ncclRedOpDestroy: R?N?CCL .* invalid argument"):
            island.drop(op)
    with pytest.raises(ArgumentError, match="weights of int32 are not supported"):
        island.weighted_sum(0.5, DType.INT32)


def _registers(job: Job) -> None:
    island, device = _here["island"], _here["device"]
    memory = device.allocate(4096)
    island.deregister(island.register(memory, 4096))
    device.free(memory)
    with pytest.raises(CommunicationError, match=r"ncclCommRegister: .*not memory of this device"):
        island.register(memory, 4096)


def test_weights_and_registered_memory(members: Callable[..., Ranks]) -> None:
    ranks = _formed(members)
    ranks.run(_weights)
    ranks.run(_registers)
    ranks.run(_end)


@pytest.mark.parametrize(("rank", "nbytes"), [(3, 128), (-1, 128), (0, 127)])
def test_wrong_arguments_are_refused(rank: int, nbytes: int) -> None:
    with pytest.raises(ArgumentError, match="wanted 128 bytes and a rank below 3"):
        Island(None, 3, rank, bytes(nbytes), None, 1.0)  # type: ignore[arg-type]


def test_the_scalars_of_bfloat16_are_rounded_to_nearest() -> None:
    from hetcoll.vendors.ccl.library import _scalar

    for value in (1 / 3, 0.1, 1.0, 1e-3, 2 / 7):
        assert _scalar(value, DType.BFLOAT16) == ml_dtypes.bfloat16(value).tobytes()

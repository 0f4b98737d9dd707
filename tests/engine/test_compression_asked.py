"""Who may ask for compressed edges, how, and what they are told where there can be none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Ranks

import hetcoll
from hetcoll import ArgumentError
from hetcoll.config.env import read_config
from hetcoll.runtime.compression import LEAST_BYTES
from hetcoll.types import Format

Pool = Callable[..., Ranks]
Launch = Callable[..., Ranks]


def ask_wrongly(comm: hetcoll.Communicator) -> list[str]:
    f32, half = np.ones(8, np.float32), np.ones(8, np.float16)
    calls: list[Callable[[], object]] = [
        lambda: comm.allreduce(f32, compress="int4"),
        lambda: comm.allreduce(f32, compress=8),  # type: ignore[arg-type]
        lambda: comm.allreduce(f32, op="max", compress="int8"),
        lambda: comm.allreduce(np.ones(8, np.int32), compress="int8"),
        lambda: comm.allreduce(np.ones(8), compress="bf16"),
        lambda: comm.allreduce(half, compress="bf16"),
        lambda: comm.reduce_scatter(half, half[:4].copy(), "min", compress="fp8"),
        lambda: comm.split(0, compress="fp16"),
        lambda: comm.explain("allreduce", 8, compress=""),
    ]
    said = []
    for call in calls:
        with pytest.raises(ArgumentError) as caught:
            call()
        said.append(str(caught.value))
    comm.allreduce(f32)
    assert f32.tolist() == [2] * 8
    return said


def test_what_cannot_be_compressed_is_an_error(pool: Pool) -> None:
    for said in pool(2, HETCOLL_ISLANDS="0|1").run(ask_wrongly):
        assert said == [
            "compress: wanted one of none, bf16, fp8, int8, got 'int4'",
            "compress: wanted one of none, bf16, fp8, int8, got 8",
            "compress: int8 was asked for, but only sums and averages are compressed, not max",
            "compress: int8 was asked for, but only float32, float16, bfloat16 are compressed, not int32",
            "compress: bf16 was asked for, but only float32, float16, bfloat16 are compressed, not float64",
            "compress: bf16 was asked for, but float16 is not wider",
            "compress: fp8 was asked for, but only sums and averages are compressed, not min",
            "compress: wanted one of none, bf16, fp8, int8, got 'fp16'",
            "compress: wanted one of none, bf16, fp8, int8, got ''",
        ]


def ask_in_one_host(comm: hetcoll.Communicator) -> str:
    with pytest.raises(ArgumentError) as caught:
        comm.allreduce(np.ones(8, np.float32), compress="int8")
    return f"{caught.value}; {comm.explain('allreduce', 1 << 20, compress='int8').compress}"


def test_one_host_has_no_slow_edges(pool: Pool) -> None:
    why = "all 2 ranks are in one host"
    said = set(pool(2).run(ask_in_one_host))
    assert said == {f"compress: int8 was asked for, but {why}; int8: not compressed: {why}"}


def use_default(comm: hetcoll.Communicator) -> list[tuple[str, str]]:
    """Which calls the communicator's setting holds for, by the counter."""
    n, said = LEAST_BYTES // 4, []
    cases: dict[str, Callable[[], object]] = {
        "large": lambda: comm.allreduce(np.ones(n, np.float32)),
        "again": lambda: comm.allreduce(np.ones(n, np.float32)),
        "average of halves": lambda: comm.allreduce(np.ones(2 * n, np.float16), op="avg"),
        "shares": lambda: comm.reduce_scatter(np.ones(n, np.float32), np.ones(n // 2, np.float32)),
        "small": lambda: comm.allreduce(np.ones(n - 1, np.float32)),
        "small, asked for": lambda: comm.allreduce(np.ones(2, np.float32), compress="fp8"),
        "max": lambda: comm.allreduce(np.ones(n, np.float32), op="max"),
        "int32": lambda: comm.allreduce(np.ones(n, np.int32)),
        "declined": lambda: comm.allreduce(np.ones(n, np.float32), compress="none"),
        "after that": lambda: comm.allreduce(np.ones(n, np.float32)),
        "broadcast": lambda: comm.broadcast(np.ones(n, np.float32)),
    }
    for name, call in cases.items():
        before = comm.counters().get("compressed_before", 0)
        call()
        said.append((name, comm.counters().get("compressed_before", 0) > before))
    return [name for name, compressed in said if compressed]


def test_the_setting_of_a_communicator(pool: Pool) -> None:
    wanted = ["large", "again", "average of halves", "shares", "small, asked for", "after that"]
    assert pool(2, HETCOLL_ISLANDS="0|1", HETCOLL_COMPRESS="int8").run(use_default) == [wanted] * 2


def look_at_parts(comm: hetcoll.Communicator) -> list[str]:
    said = [comm.explain("allreduce", 1 << 20).compress, comm.explain("allreduce", 100).compress]
    said.append(comm.explain("broadcast", 1 << 20).compress)
    said.append(comm.explain("reduce_scatter", 1 << 20, compress="int8").compress)
    for color, form in ((comm.rank // 2, None), (0, None), (0, "bf16"), (0, "none")):
        part = comm.split(color, compress=form)
        assert part is not None
        said.append(part.explain("allreduce", 1 << 20).compress)
        part.close()
    return said


def test_what_is_told_and_parts(pool: Pool) -> None:
    said = pool(4, HETCOLL_ISLANDS="0,1|2,3", HETCOLL_COMPRESS="fp8").run(look_at_parts)
    fp8 = "0.258 of float32's bytes, with error feedback"
    assert said[1] == [
        f"fp8 to and from rank 3: {fp8}",
        "fp8: not compressed: less than 65536 bytes",
        "fp8: not compressed: broadcast is not compressed",
        f"int8 to and from rank 3: {fp8}",
        "fp8: not compressed: all 2 ranks are in one island",
        f"fp8 to and from rank 3: {fp8}",
        "bf16 to and from rank 3: 0.500 of float32's bytes, with error feedback",
        "",
    ]


def choose_another(comm: hetcoll.Communicator) -> str:
    with pytest.raises(ArgumentError) as caught:
        comm.allreduce(np.ones(8, np.float32), compress="int8")
    return str(caught.value)


def test_another_algorithm_was_asked_for(pool: Pool) -> None:
    said = pool(2, HETCOLL_ISLANDS="0|1", HETCOLL_ALGO="ring").run(choose_another)
    assert set(said) == {"compress: allreduce is compressed by direct, but HETCOLL_ALGO asks for ring"}


def test_the_environment() -> None:
    config = read_config({"HETCOLL_COMPRESS": "Int8", "HETCOLL_COMPRESS_FEEDBACK": "1M"})
    assert (config.compress, config.compress_feedback) == (Format.INT8, 1 << 20)
    assert read_config({"HETCOLL_COMPRESS_FEEDBACK": "0"}).compress_feedback == 0
    with pytest.raises(ArgumentError, match=re.escape("HETCOLL_COMPRESS: wanted none, bf16, fp8 or int8, got 'zip'")):
        read_config({"HETCOLL_COMPRESS": "zip"})


def init_with(job: Any, islands: str, form: str) -> str:
    from hetcoll import job as jobs

    with pytest.raises(ArgumentError) as caught:
        jobs.init(islands=islands, compress=form)
    return str(caught.value)


def test_init_checks_the_name(launch: Launch) -> None:
    (said,) = launch(1, join=False).run(init_with, "0", "gzip")
    assert said == "compress: wanted one of none, bf16, fp8, int8, got 'gzip'"

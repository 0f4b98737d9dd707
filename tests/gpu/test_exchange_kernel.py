"""The exchange kernel as plain C++: calls of all ways from all roots in any order, by ranks that wait for no call of
another."""

from __future__ import annotations

import random
import struct
import time
import types
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import run_sequence
from gpu_calls import any_cases
from kernel_checks import LINE, Launch
from patience import DEADLINE
from plain_kernels import PlainMachine
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll import calls
from hetcoll.gpu import slots
from hetcoll.gpu.one_kernel import STATE_BYTES, OneKernel
from hetcoll.gpu.slots import HOST_RINGS
from hetcoll.plan import one_kernel


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainMachine]:
    made = PlainMachine(tmp_path_factory.mktemp("kernels"), "-O1 -Werror")  # compiling takes most of the time
    yield made
    made.close()


class Rings:
    """What the ranks of a host share, and each one's own state."""

    def __init__(self, machine: PlainMachine, size: int) -> None:
        self.machine, self.size = machine, size
        self.rings = slots.Rings(HOST_RINGS, [self._zeros(HOST_RINGS.nbytes) for _ in range(size)])
        self.segment = types.SimpleNamespace(aborts=[self._zeros(LINE) for _ in range(size)])
        self.states = [self._zeros(STATE_BYTES) for _ in range(size)]

    def _zeros(self, nbytes: int) -> int:
        at = self.machine.allocate(nbytes)
        self.machine.write(at, np.zeros(nbytes, np.uint8))
        return at


class RankOfRings:
    """Collectives of one rank, each on its thread from begin to end."""

    def __init__(self, rings: Rings, rank: int, pause: Callable[[], None]) -> None:
        self.rank, self.size, self._machine, self._pause = rank, rings.size, rings.machine, pause
        kernels = types.SimpleNamespace(function=lambda name: name)
        device: Any = types.SimpleNamespace(kernels=lambda: kernels)
        share: Any = types.SimpleNamespace(segment=rings.segment, here=rank)
        queue: Any = types.SimpleNamespace(bind_kernel=dict)
        self._kernel = OneKernel(
            queue, device, share, [rings.rings], rings.states[rank], rank, rings.size, ordered=False
        )

    def __getattr__(self, name: str) -> Callable[..., hetcoll.Work]:
        def call(*args: Any, async_op: bool) -> hetcoll.Work:
            made: calls.Call = getattr(calls, name)(self.rank, self.size, *args)
            chosen = one_kernel.choose(made.collective, made.nbytes, self.size, self.size)
            assert chosen is not None, f"{made.describe()} is no kernel"
            bound: Any = self._kernel.bind(made, chosen)
            buffers = struct.pack("QQ", *(0 if buffer is None else buffer.ptr for buffer in (made.recv, made.send)))
            self._pause()
            arguments = buffers + bound["arguments"][len(buffers) :]
            self._machine.run([Launch(bound["function"], bound["blocks"], 1, arguments)])
            return hetcoll.Work()

        return call


def run(machine: PlainMachine, size: int, cases: list[Case], often: float) -> None:
    """Every rank is late at other calls. All all-reduces go by rings, among four and more most of them in two shots."""
    rings = Rings(machine, size)

    def on(rank: int) -> None:
        dice = random.Random(rank)

        def pause() -> None:
            if dice.random() < often:
                time.sleep(dice.random() * 0.01)

        run_sequence(RankOfRings(rings, rank, pause), [(case, False) for case in cases])  # type: ignore[arg-type]

    limits: Any = {
        "SMALL": 0,
        "ONE_SHOT": 1 << 12,
        "MOST_MOVED": 1 << 30,
        "MOST_ALONE": 1 << 30,
        "MOST_ONE_SHOT": 1 << 30,
    }
    with unittest.mock.patch.multiple(one_kernel, **limits), ThreadPoolExecutor(size) as threads:
        try:
            for ended in as_completed([threads.submit(on, rank) for rank in range(size)], DEADLINE):
                ended.result()  # of the first that failed
        finally:
            for at in rings.segment.aborts:  # kernels that wait give up
                machine.write(at, np.ones(1, np.uint8))
    numbers = {machine.read(state, STATE_BYTES).tobytes() for state in rings.states}
    assert len(numbers) == 1, "ranks have counted different messages"


@parametrize(("size", "number"), [(2, 60), (4, 60), (16, 15), (3, 60), (5, 60)], first=2)
def test_all_ways_in_a_row(machine: PlainMachine, size: int, number: int) -> None:
    for seed in range(2):
        run(machine, size, any_cases(size, seed, number, (128 << 10) // size), 0.5 * seed)


@pytest.mark.thorough
def test_slots_that_come_again_in_a_call(machine: PlainMachine) -> None:
    run(machine, 3, any_cases(3, 9, 30, 1 << 20), 0.0)


@pytest.mark.thorough
def test_no_behaviour_is_undefined(tmp_path: Path) -> None:
    machine = PlainMachine(tmp_path, "-O1 -fsanitize=undefined -fno-sanitize-recover=all")
    run(machine, 4, any_cases(4, 0, 30, 32 << 10), 0.0)
    machine.close()

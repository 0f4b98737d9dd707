"""The GPU kernels compiled as plain C++, and a machine that runs them: the shim of ``kernels/platform.h``."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from kernel_checks import Bytes, Launch
from patience import DEADLINE

from hetcoll.vendors.devices.kernels import source
from hetcoll.vendors.devices.kernels.source import module_of

FLAGS = "-std=c++20 -ffp-contract=off -Wall -Wextra -fPIC -shared -x c++"


def _compile(module: str, options: str, directory: Path) -> ctypes.CDLL:
    path = directory / f"{module}.so"
    words = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS.split(), *options.split(), "-", "-o", str(path)]
    done = subprocess.run(words, input=source(module), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))


class PlainMachine:
    """Host memory, and threads for streams. A module is compiled when something of it is launched first."""

    def __init__(self, directory: Path, options: str = "-O2 -Werror") -> None:
        self._memory: dict[int, Bytes] = {}
        self._streams = ThreadPoolExecutor(16)
        self._loading = threading.Lock()
        self._library = functools.cache(functools.partial(_compile, options=options, directory=directory))

    def close(self) -> None:
        self._streams.shutdown()

    def allocate(self, nbytes: int, shared: bool = False) -> int:
        memory = np.empty(nbytes + 255, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._memory[address] = memory
        return address

    def write(self, address: int, data: Bytes) -> None:
        ctypes.memmove(address, data.ctypes.data, data.size)

    def read(self, address: int, nbytes: int) -> Bytes:
        result = np.empty(nbytes, np.uint8)
        ctypes.memmove(result.ctypes.data, address, nbytes)
        return result

    def run(self, launches: Sequence[Launch]) -> None:
        calls = [self._prepare(each) for each in launches]
        if len(calls) == 1:
            return calls[0]()
        for future in [self._streams.submit(call) for call in calls]:
            future.result(DEADLINE)
        return None

    def _prepare(self, launch: Launch) -> Callable[[], None]:
        with self._loading:  # ranks of a test may have threads of their own
            library = self._library(module_of()[launch.name])
        entry = getattr(library, f"launch_{launch.name}")
        storage = [ctypes.create_string_buffer(x, len(x)) for x in launch.arguments]
        params = (ctypes.c_void_p * len(storage))(*map(ctypes.addressof, storage))
        grid, block = ((ctypes.c_uint * 3)(n, 1, 1) for n in (launch.grid, launch.block))

        def call(_keep: object = storage) -> None:
            entry(grid, block, params)

        return call

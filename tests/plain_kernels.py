"""The GPU kernels compiled as plain C++, and a machine that runs them: the shim of ``kernels/platform.h``."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from kernel_checks import Bytes, Launch

from hetcoll.devices.kernels import modules, source

FLAGS = "-std=c++20 -O2 -ffp-contract=off -Wall -Wextra -Werror -fPIC -shared -x c++"


def build(directory: Path) -> dict[str, ctypes.CDLL]:
    """Every module as a shared object."""

    def one(module: str) -> ctypes.CDLL:
        path = directory / f"{module}.so"
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        done = subprocess.run(
            [*compiler, *FLAGS.split(), "-", "-o", str(path)], input=source(module), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(path))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(modules(), pool.map(one, modules()), strict=True))


class PlainMachine:
    """Host memory, and threads for streams."""

    def __init__(self, libraries: dict[str, ctypes.CDLL]) -> None:
        self._entries = {
            name: getattr(libraries[module], f"launch_{name}") for module, names in modules().items() for name in names
        }
        self._memory: dict[int, Bytes] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(16)

    def close(self) -> None:
        self._pool.shutdown()

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
        if len(launches) == 1:
            return self._run(launches[0])
        for future in [self._pool.submit(self._run, each) for each in launches]:
            future.result(60)
        return None

    def _run(self, launch: Launch) -> None:
        storage = [ctypes.create_string_buffer(x, len(x)) for x in launch.arguments]
        params = (ctypes.c_void_p * len(storage))(*map(ctypes.addressof, storage))
        dims = [(ctypes.c_uint * 3)(n, 1, 1) for n in (launch.grid, launch.block)]
        self._entries[launch.name](*dims, params)

"""Ranks that run functions of tests/frameworks/torch_cases inside a process group of torch."""

from __future__ import annotations

import ast
import importlib
import tempfile
from datetime import timedelta
from functools import cache
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

from installed import import_torch
from ranks import PRELOADED, Env, Job, Ranks, forked_from

CASES = Path(__file__).with_name("torch_cases")
SIZE = 4
_TIMEOUT = 30.0


def names(module: str) -> list[str]:
    """The public functions of a module of torch_cases, without importing it: that needs torch."""
    tree = ast.parse((CASES / f"{module}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


class TorchRanks:
    """Four processes that have torch loaded. Each call gets a process group of its own."""

    def __init__(self, **env: str | tuple[str, ...]) -> None:
        self._env: Env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **env}
        self._calls = 0
        self._start()
        self._folder = tempfile.TemporaryDirectory(prefix="hetcoll-torch-")

    def _start(self) -> None:
        """torch takes its time to load, more so on few cores; the cases' time is for what they do."""
        with forked_from(_server()):
            self._ranks = Ranks(SIZE, self._env, join=False, tidy=False)
        try:
            self._ranks.run(load, timeout=200)
        except BaseException:
            self._ranks.kill_all()
            raise

    def run(
        self, module: str, name: str, *args: Any, backend: str | None = "hetcoll", timeout: float = 90
    ) -> list[Any]:
        """The function's results, rank by rank. `backend` None: the function makes its process group itself."""
        self._calls += 1
        if self._ranks.broken:
            self._ranks.kill_all()
            self._start()
        store = f"{self._folder.name}/{self._calls}"
        return self._ranks.run(run_case, store, module, name, args, backend, timeout=timeout)

    def close(self) -> None:
        (self._ranks.kill_all if self._ranks.broken else self._ranks.close)()
        self._folder.cleanup()


@cache
def _server() -> ForkServer:
    made = ForkServer()
    made.set_forkserver_preload([*PRELOADED, "torch_loaded"])
    return made


def load(_job: Job) -> None:
    """On a rank: import what takes long."""
    import_torch()
    for name in ("collectives", "messages", "failures", "training"):
        importlib.import_module(f"torch_cases.{name}")


def run_case(job: Job, store: str, module: str, name: str, args: tuple[Any, ...], backend: str | None) -> Any:
    """On a rank: `name` of torch_cases/`module`.py within a process group."""
    torch = import_torch()
    import hetcoll.torch

    hetcoll.torch.register()
    torch.set_num_threads(1)
    dist = torch.distributed
    function = getattr(importlib.import_module(f"torch_cases.{module}"), name)
    files = dist.FileStore(store, job.size)
    if backend is None:
        return function(files, job.rank, job.size, *args)
    dist.init_process_group(
        backend, store=files, rank=job.rank, world_size=job.size, timeout=timedelta(seconds=_TIMEOUT)
    )
    try:
        return function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

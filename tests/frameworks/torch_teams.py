"""Processes that run PyTorch's tests of a distributed backend one after the other: the inner half of torch_suite.py.

A team is a rank a process. PyTorch's own harness starts processes anew for each test; here a rank keeps its own as long
as tests pass or are skipped, and each test still makes and destroys its process group. A team whose test failed or hung
is ended, and another one, which has loaded PyTorch meanwhile, takes its place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
import traceback
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LOADING = 120.0  # seconds until a rank has loaded PyTorch
FOLDERS = ("barrier", "test_dir", "init_dir")  # that the tests want in TEMP_DIR
OTHERS = "Only MPI supports"  # what torch has no other backend for, and hetcoll can do: such tests are not skipped
SEED = 67280421310721  # that a process's generators begin with: tests count on ranks that draw the same numbers


@dataclass
class Found:
    """What came of a test: passed, skipped or failed, and why."""

    state: str
    reason: str = ""
    late: bool = False  # it had not ended in its time


def is_failure(answer: Any) -> bool:
    return isinstance(answer, Found) and answer.state == "failed"


def tests_of(backend: str, ranks: int, folder: Path | None, ours: bool) -> type[unittest.TestCase]:
    """The class of all tests, as for a job of so many ranks; the environment is read when it is imported."""
    os.environ |= {
        "BACKEND": backend, "WORLD_SIZE": str(ranks), "HETCOLL_REPLACE": backend if ours else "",
        "HETCOLL_LINGER": "0",
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        "TEMP_DIR": str(folder or ""), "INIT_METHOD": f"file://{folder}/shared_init_file",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0",
    }  # fmt: skip
    import torch

    import hetcoll.torch

    hetcoll.torch.register()
    torch.set_num_threads(1)
    from torch.testing._internal.distributed import distributed_test as theirs

    theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()  # they want the shapes of inputs in the profiler's events,
    call = theirs.DistributedTest._DistTestBase.call_dist_op  # which only backends in C++ can give: checked is the rest

    def call_dist_op(self: Any, *args: Any, tensor_shapes: Any = None, **options: Any) -> None:
        call(self, *args, **options)

    theirs.DistributedTest._DistTestBase.call_dist_op = call_dist_op

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        skipped = ""  # why, where a rank found out

        def run_test(self, name: str, pipe: Any) -> None:
            """On a rank. Torch loses the reasons of tests that find out here that they cannot run."""
            test = getattr(self, name)

            def told() -> None:
                if getattr(test, "__unittest_skip__", False):  # which only unittest's own runner looks at
                    why: str = test.__unittest_skip_why__
                    if not why.startswith(OTHERS):
                        Suite.skipped = why
                        raise unittest.SkipTest(why)
                try:
                    test()
                except unittest.SkipTest as skip:
                    Suite.skipped = str(skip)
                    raise

            setattr(self, name, told)
            super().run_test(name, pipe)

    return Suite


def serve(rank: int, ranks: int, backend: str, ours: bool, folder: Path, pipe: Connection) -> None:
    """A rank's process: runs the tests that it is told to, until it is told none."""
    os.setpgrp()  # so that whatever a test starts ends with it
    output = (folder / f"output.{rank}").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    stacks = (folder / f"stacks.{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    suite = tests_of(backend, ranks, folder, ours)
    pipe.send(None)
    while (told := pipe.recv()) is not None:
        pipe.send(one(suite, rank, *told))


def one(suite: Any, rank: int, name: str, file: str) -> Found:
    """On a rank: one test, in a process group of its own."""
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    distributed_test.Barrier.barrier_id = 0
    torch.manual_seed(SEED)
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # some tests set it and leave it
    torch.distributed.set_debug_level_from_env()
    suite.skipped = ""
    ours, theirs = mp.Pipe()
    code: Any = 0
    try:
        suite._run(rank, name, file, theirs)
    except SystemExit as end:
        code = end.code
    except BaseException:
        return Found("failed", traceback.format_exc())
    if code == common_distributed.MultiProcessTestCase.TEST_ERROR_EXIT_CODE:
        return Found("failed", ours.recv() if ours.poll(1) else "the test failed and did not say why")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # as in a process that has just begun
    if code == 0:
        return Found("passed")
    known = [skip.message for skip in common_distributed.TEST_SKIPS.values() if skip.exit_code == code]
    return Found("skipped", suite.skipped or known[0]) if known else Found("failed", f"ended with status {code}")


class Team:
    """The processes of one set of ranks."""

    def __init__(self, ranks: int, backend: str, ours: bool) -> None:
        # Forked ones have PyTorch loaded at once, but with hetcoll in it; and no fork can use a GPU of its parent's.
        context: Any = mp.get_context("fork" if ours and backend == "gloo" else "spawn")
        self._folder = Path(tempfile.mkdtemp(prefix="hetcoll-torch-suite-"))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            here, there = context.Pipe()
            arguments = (rank, ranks, backend, ours, self._folder, there)
            self._processes.append(context.Process(target=serve, args=arguments, daemon=False))
            self._processes[-1].start()
            there.close()
            self._pipes.append(here)

    def wait_until_loaded(self) -> None:
        found = self._answers(LOADING)
        if not all(isinstance(each, tuple) for each in found):
            outputs = "\n".join(path.read_text() for path in sorted(self._folder.glob("output.*")))
            raise RuntimeError(f"a rank did not load PyTorch in {LOADING:g} s:\n{outputs}")

    def run(self, name: str, seconds: float) -> Found:
        """One test on all ranks; after a failure the team is of no more use."""
        for folder in FOLDERS:
            shutil.rmtree(self._folder / folder, ignore_errors=True)
            (self._folder / folder).mkdir()
        (self._folder / "shared_init_file").unlink(missing_ok=True)
        handle, file = tempfile.mkstemp(dir=self._folder, prefix="store.")
        os.close(handle)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((name, file))
        answers = [each[0] if isinstance(each, tuple) else each for each in self._answers(seconds)]
        failed = [f"rank {rank}: {each.reason}" for rank, each in enumerate(answers) if is_failure(each)]
        if failed:
            return Found("failed", "\n".join(failed))
        if not all(isinstance(each, Found) for each in answers):
            return Found("failed", self._missing(answers, seconds), late=None in answers)
        return min(answers, key=lambda each: each.state == "passed")  # a skip, where there is one

    def _answers(self, seconds: float) -> list[Any]:
        """What each rank says, in a tuple; or how it ended; or None, if it did neither. The first failure ends it."""
        deadline = time.monotonic() + seconds
        found: list[Any] = [None] * len(self._pipes)
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_pipes and (ready := wait(list(open_pipes), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = open_pipes.pop(pipe)  # type: ignore[arg-type, call-overload]
                try:
                    found[rank] = (pipe.recv(),)  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    found[rank] = f"its process ended with status {self._processes[rank].exitcode}"
                if not isinstance(found[rank], tuple) or is_failure(found[rank][0]):
                    deadline = min(deadline, time.monotonic() + 1)  # what the others say of it
        return found

    def _missing(self, answers: list[Any], seconds: float) -> str:
        """Where the ranks stand that did not answer, and how those ended that ended."""
        for process, each in zip(self._processes, answers, strict=True):
            if each is None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        told = []
        for rank, each in enumerate(answers):
            if each is None:
                stacks = (self._folder / f"stacks.{rank}").read_text()
                told.append(f"rank {rank}: no answer in {seconds:.0f} s; it stood at\n{stacks}")
            elif isinstance(each, str):
                output = (self._folder / f"output.{rank}").read_text(errors="replace")[-3000:]
                told.append(f"rank {rank}: {output}\nDied: {each}")
        late = [rank for rank, each in enumerate(answers) if each is None]
        kind = f"TimeoutError: no answer of ranks {late} in {seconds:.0f} s" if late else ""
        return "\n".join(filter(None, (*told, kind)))

    def close(self, kind: bool = True) -> None:
        """End the processes: `kind` ones are asked to, others are killed with all that they started."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            if kind:
                process.join(10)
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Lasting:
    """A team that is replaced by a new one after each failure."""

    def __init__(self, teams: Teams) -> None:
        self._teams, self._team = teams, teams.get()

    def run(self, name: str, seconds: float) -> Found:
        found = self._team.run(name, seconds)
        if found.state == "failed":
            self._team.close(kind=False)
            self._teams.make()
            self._team = self._teams.get()
        return found

    def close(self) -> None:
        self._team.close()


class Teams:
    """Makes `count` teams, and has another one ready for when one fails."""

    def __init__(self, ranks: int, backend: str, count: int, ours: bool) -> None:
        self._ranks, self._backend, self._ours = ranks, backend, ours
        self._ready: queue.SimpleQueue[Team] = queue.SimpleQueue()
        self._making = threading.Lock()
        for _ in range(count + 1):
            self.make()

    def make(self) -> None:
        with self._making:
            self._ready.put(Team(self._ranks, self._backend, self._ours))

    def get(self) -> Team:
        team = self._ready.get(timeout=LOADING)
        team.wait_until_loaded()
        return team

    @contextlib.contextmanager
    def team(self) -> Iterator[Lasting]:
        lasting = Lasting(self)
        try:
            yield lasting
        finally:
            lasting.close()

    def __enter__(self) -> Teams:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait().close(kind=False)

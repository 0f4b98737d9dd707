"""Runs functions on ranks: real processes, forked from a server that has hetcoll loaded already.

A function is any function at the top level of a test module. It is called on every rank at once with the rank's
communicator (or with its `Job`, where it is to join by itself) and the arguments given, which travel by pickle, as do
its result and its exception. Every wait has a deadline; a rank that misses it is made to print where its threads
stand, and is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ParamSpec, Self

import fakes
from patience import PATIENCE

import hetcoll
from hetcoll import UniqueId, lifetime
from hetcoll.gpu import lent

P = ParamSpec("P")
Env = Mapping[str, str | tuple[str, ...]]

SECONDS = 30.0  # for a call, where the test does not say
_CLOSING = 10.0
context = mp.get_context("forkserver")


def preload(*modules: str) -> None:
    """What the ranks' processes have from the start; to be called before there are any."""
    context.set_forkserver_preload(list(modules))


VENDORS = ("cuda.bindings.driver", "cuda.bindings.nvrtc", "rocm.bindings.hip", "rocm.bindings.hiprtc")
"""What ranks with GPUs load, a third of what their start takes: where they are installed, without looking for a GPU."""

# Also what only some ranks load (rank 0 its store), and most of what tests' modules import.
PRELOADED = (
    "hetcoll", "hetcoll.runtime.host", "hetcoll.gpu.executor", "hetcoll.rendezvous.store.server",
    "hetcoll.vendors.devices.cuda", "hetcoll.vendors.devices.hip", "hetcoll.gpu.device_of", "hetcoll.cli.patterns",
    "hetcoll.experts", "hetcoll.links.verbs.local_nics", "hetcoll.runtime.one_sided", "hetcoll.serving",
    "ml_dtypes", "numpy.ma", "numpy.random", "numpy.testing", "pytest", "unittest.mock", *VENDORS,
    *(() if "TEST_PATIENCE" in os.environ else ("hypothesis",)),
    "ranks", "cases", "device_checks", "expert_calls", "found_once", "gpu_calls", "gpu_places",
    "reference", "verdicts",
)  # fmt: skip
preload(*PRELOADED)
_OURS = [str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1])]


_KEEPING = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""For glibc (mallopt(3)): what a rank's large arrays had is used by the next ones. Giving it back and taking it anew,
page by page, took a sixth of the time of tests on GPUs."""


def start_server() -> None:
    """Start what ranks are forked from, where it does not run yet. It finds modules by PYTHONPATH alone."""
    path = os.environ.get("PYTHONPATH")
    own = {"PYTHONPATH": os.pathsep.join([*_OURS, *([path] if path else [])]), **_KEEPING}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            _set_variable(name, value)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def forked_from(server: forkserver.ForkServer) -> Iterator[None]:
    """Ranks that are started meanwhile come from this server, which has loaded what others need not."""
    ours = {name: getattr(server, name) for name in ("ensure_running", "connect_to_new_process")}
    with unittest.mock.patch.multiple(forkserver, **ours):
        yield


@dataclass
class Job:
    """What a rank knows before it joins."""

    rank: int
    size: int
    unique_id: UniqueId
    comm: hetcoll.Communicator | None = None

    def join(self, timeout: float = SECONDS) -> hetcoll.Communicator:
        self.comm = hetcoll.Communicator.init(self.size, self.rank, self.unique_id, timeout=PATIENCE * timeout)
        return self.comm


@dataclass
class Outcome:
    """What a call came to on one rank. `died` is the exit status of a process that is gone; times are monotonic."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0
    ended: float = 0.0
    died: int | None = None

    def problem(self) -> str:
        if self.died is not None:
            return f"rank {self.rank}: its process ended with status {self.died}"
        return "" if self.error is None else f"rank {self.rank}: {self.trace}"


class RankError(AssertionError):
    """Something went wrong on a rank that should not have."""


def _problems(outcomes: Iterable[Outcome]) -> list[str]:
    return [outcome.problem() for outcome in outcomes if outcome.problem()]


class Ranks:
    """`size` processes. With `join`, functions get the communicator of all of them, else their `Job`.

    `env` is set before anything reads the environment; a tuple has a value for each rank. Rank 0 hosts the job's store,
    as in real life. In the end nothing may be left in the processes that was not there before they joined; unless
    `tidy` is false, for libraries that keep threads and files.
    """

    def __init__(self, size: int, env: Env | None = None, *, join: bool = True, tidy: bool = True) -> None:
        self.size, self.broken = size, False
        self._folder = tempfile.TemporaryDirectory(prefix="hetcoll-test-")
        self._pipes: list[Connection] = []
        self._processes = []
        self._stopped: set[int] = set()
        start_server()
        for rank in range(size):
            ours, theirs = context.Pipe()
            own = {name: value if isinstance(value, str) else value[rank] for name, value in (env or {}).items()}
            arguments = (theirs, rank, size, own, os.environ.get("PYTHONPATH"), self._output(rank), tidy)
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            found = self._receive([0], SECONDS)[0]
            self._raise([found])
            for pipe in self._pipes:
                pipe.send((found.value, join))
            self._raise(self._receive(range(size), 2 * SECONDS))
        except BaseException:
            self.kill_all()
            raise

    def _output(self, rank: int) -> str:
        return os.path.join(self._folder.name, str(rank))

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def output(self, rank: int) -> str:
        """What the rank has written to stdout and stderr."""
        path = Path(self._output(rank))
        return path.read_text(errors="replace") if path.exists() else ""

    # Calls.

    def start(self, function: Callable[..., Any], *args: Any, only: Sequence[int] | None = None) -> None:
        """Begin a call on all ranks, or on `only` these."""
        for rank in range(self.size) if only is None else only:
            self._pipes[rank].send((function, args))

    def finish(self, timeout: float = SECONDS, only: Sequence[int] | None = None) -> list[Outcome]:
        """What the call came to, rank by rank; RankError when a rank does not end in time."""
        return self._receive(range(self.size) if only is None else only, timeout)

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = SECONDS) -> list[Outcome]:
        """`start` and `finish`."""
        self.start(function, *args)
        return self.finish(timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = SECONDS) -> list[Any]:
        """The function's results; RankError with every rank's traceback where one failed."""
        self.start(function, *args)
        outcomes = self._receive(range(self.size), timeout, grace=3.0)
        self._raise(outcomes)
        return [outcome.value for outcome in outcomes]

    def _receive(self, ranks: Sequence[int] | range, seconds: float, *, grace: float | None = None) -> list[Outcome]:
        """One outcome a rank. After the first failure the others have `grace` seconds."""
        deadline = time.monotonic() + PATIENCE * seconds
        found: dict[int, Outcome] = {}
        while len(found) < len(ranks):
            waiting = {self._pipes[rank]: rank for rank in ranks if rank not in found}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.broken = True
                raise RankError("\n".join([*_problems(found.values()), self._hung(list(waiting.values()))]))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    found[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[rank].join(PATIENCE * _CLOSING)
                    found[rank] = Outcome(rank, died=self._processes[rank].exitcode)
                if grace is not None and found[rank].problem():
                    deadline = min(deadline, time.monotonic() + PATIENCE * grace)
        return [found[rank] for rank in ranks]

    def _raise(self, outcomes: Sequence[Outcome]) -> None:
        problems = _problems(outcomes)
        if problems:
            self.broken = True
            raise RankError("\n".join([*problems, *self._outputs()]))

    def _outputs(self) -> list[str]:
        texts = [(rank, self.output(rank).strip()) for rank in range(self.size)]
        return [f"--- output of rank {rank}:\n{text[-6000:]}" for rank, text in texts if text]

    def _hung(self, ranks: list[int]) -> str:
        for rank in ranks:
            self.signal(rank, signal.SIGCONT)
            self.signal(rank, signal.SIGUSR2)  # print all threads' stacks
        time.sleep(0.3)
        return "\n".join([f"ranks {ranks} did not end in time", *self._outputs()])

    # Ending.

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's process, if it still runs."""
        if self._processes[rank].exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, and only its parent knows so far
                os.kill(self.pid(rank), number)

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal(rank, signal.SIGKILL)
        self._processes[rank].join(PATIENCE * _CLOSING)
        self._stopped.add(rank)

    def end(self, rank: int) -> None:
        """Let a rank that is in no call come to its end as a program does, without closing anything itself."""
        self._pipes[rank].send("end")
        self._processes[rank].join(PATIENCE * _CLOSING)
        self._stopped.add(rank)
        if self._processes[rank].exitcode != 0:
            raise RankError(f"rank {rank}: exit status {self._processes[rank].exitcode}\n{self.output(rank)}")

    def close(self) -> None:
        """Close the communicators; nothing may be left of them, and every process must end in order."""
        alive = [rank for rank in range(self.size) if rank not in self._stopped]
        try:
            for rank in alive:
                with contextlib.suppress(OSError):
                    self._pipes[rank].send(None)
            self._raise(self._receive(alive, _CLOSING + 0.2 * self.size))
            for rank in alive:
                self._pipes[rank].send(None)
            for rank in alive:
                self._processes[rank].join(PATIENCE * _CLOSING)
            codes = {rank: self._processes[rank].exitcode for rank in alive}
            if any(codes.values()) or None in codes.values():
                raise RankError("\n".join([f"exit statuses {codes}", *self._outputs()]))
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """Leave nothing behind, whatever happened."""
        self.broken = True
        for rank, process in enumerate(self._processes):
            self.kill(rank)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill_all()


def close_all(ranks: Iterable[Ranks]) -> None:
    """Close all that are whole; what they find to complain about comes after the others were closed, too."""
    with contextlib.ExitStack() as stack:
        for each in ranks:
            stack.callback(each.kill_all if each.broken else each.close)


@contextlib.contextmanager
def kept(start: Callable[P, Ranks]) -> Iterator[Callable[P, Ranks]]:
    """`start` for tests that leave ranks whole: the same arguments give the same ranks, until one of them breaks."""
    made: dict[str, Ranks] = {}

    def get(*args: P.args, **kwargs: P.kwargs) -> Ranks:
        key = repr((args, sorted(kwargs.items())))
        if key in made and made[key].broken:
            made.pop(key).kill_all()
        if key not in made:
            made[key] = start(*args, **kwargs)
        return made[key]

    try:
        yield get
    finally:
        close_all(made.values())


# What follows runs in the ranks' processes.


_SHARED = re.compile(rb"s [0-9a-f]+ \S+ \S+ +(.+)\n")
"""The name of shared memory in a line of /proc/self/maps (proc(5))."""


@dataclass(frozen=True)
class Resources:
    """What this process holds: threads, children, descriptors by kind, mapped memory that has a name."""

    threads: int
    children: int
    descriptors: Counter[str] = field(default_factory=Counter)
    maps: Counter[bytes] = field(default_factory=Counter)

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        # /proc/self/task is not looked into: what the kernel remembers of each thread there is taken away when the
        # thread ends, and for so long the process that waits for this one spins.
        status = Path("/proc/self/status").read_text()
        threads = int(status.partition("\nThreads:")[2].split(maxsplit=1)[0])
        descriptors: Counter[str] = Counter()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that listed them
                descriptors[os.readlink(f"/proc/self/fd/{fd}").split("[")[0]] += 1
        return cls(threads, _children(), descriptors, Counter(_SHARED.findall(Path("/proc/self/maps").read_bytes())))

    def left_over(self, before: Resources) -> str:
        """What there is more of than `before`, or nothing."""
        parts = []
        for name, now, then in (
            ("threads", self.threads, before.threads),
            ("children", self.children, before.children),
        ):
            if now > then:
                parts.append(f"{now - then} {name}")
        for kind, held in (
            ("descriptors", self.descriptors - before.descriptors),
            ("mappings", self.maps - before.maps),
        ):
            # Kernels stay loaded until the process ends.
            parts += [f"{n} {kind} of {what}" for what, n in held.items() if "fake-module" not in str(what)]
        return ", ".join(parts)


def _children() -> int:
    """How many this process has, of any of its threads."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            found += len(Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    """The condition's value once it is true; RankError when that takes too long."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise RankError(f"not so after {PATIENCE * seconds:g} s: {condition}")
        time.sleep(0.002)
    return value


@contextlib.contextmanager
def elapsed() -> Iterator[list[float]]:
    """Gives a list that holds the seconds that the block took, once it is over."""
    took: list[float] = []
    start = time.monotonic()
    try:
        yield took
    finally:
        took.append(time.monotonic() - start)


def die_with_parent() -> None:
    """The server that forked this process ends with the last user of a pipe, which would be us although pytest was
    killed; and the kernel kills us when the server ends (prctl(2))."""
    alive: int = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    os.close(alive)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


_HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Of ranks that leave nothing: real GPUs, whose drivers do. Who wants fakes says which of these to see."""


def _main(
    pipe: Connection, rank: int, size: int, env: Mapping[str, str], path: str | None, output: str, tidy: bool
) -> None:
    die_with_parent()
    gc.freeze()  # what the server loaded is nobody's garbage, and 256 ranks would each look through it
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    _set_variable("PYTHONPATH", path)
    for name in _KEEPING:
        _set_variable(name, None)
    os.environ.update({"HETCOLL_LINGER": "0", **(_HIDDEN if tidy else {}), **env})
    fakes.load()
    if rank == 0:
        _answer(pipe, Outcome(0), hetcoll.get_unique_id)
    unique_id, join = pipe.recv()
    job = Job(rank, size, unique_id)
    before = Resources.now()
    _answer(pipe, Outcome(rank), lambda: bool(join and job.join()))
    while (request := pipe.recv()) is not None:
        if request == "end":
            return
        function, args = request
        _answer(pipe, Outcome(rank), lambda f=function, a=args: f(job.comm if join else job, *a))
    _answer(pipe, Outcome(rank), lambda: _leave(job, before if tidy else None))
    # No process ends before all have left: a successor would take the place of rank 0's store for those that have not.
    with contextlib.suppress(EOFError):
        pipe.recv()


def _answer(pipe: Connection, outcome: Outcome, call: Callable[[], Any]) -> None:
    start = time.monotonic()
    try:
        outcome.value = call()
    except BaseException as error:
        outcome.error, outcome.trace = error, traceback.format_exc()
    outcome.ended = time.monotonic()
    outcome.seconds = outcome.ended - start
    try:
        data = pickle.dumps(outcome)
    except Exception as error:
        data = pickle.dumps(Outcome(outcome.rank, error=RankError(str(error)), trace=f"{outcome}: {error}"))
    pipe.send_bytes(data)


def _leave(job: Job, before: Resources | None) -> None:
    """Close all communicators and look whether anything stayed."""
    job.comm = None
    for resource, _ in lifetime.opened():
        if isinstance(resource, hetcoll.Communicator):
            resource.close()
            del resource
    deadline = time.monotonic() + PATIENCE * (5.0 + 0.1 * job.size)
    if before is None:
        return
    while left := Resources.now().left_over(before):  # rank 0's store lets go of the others when they have left
        if time.monotonic() >= deadline:
            faulthandler.dump_traceback(all_threads=True)
            raise RankError(f"after close() there are still {left}")
        lent.free_left()  # what other ranks had open when this one closed
        time.sleep(0.01)

"""A simulated operating system's processes and threads: one thread runs at a time, and a seed says which.

Each simulated thread is a real one, which runs only while it has the baton. Whatever it asks of the system may hand the
baton on, and whatever blocks does. Where nobody can run the clock moves on to the next event. So a schedule is decided
by its seed alone, and plays again.
"""

from __future__ import annotations

import _thread
import itertools
import random
import traceback
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from typing import Any

Queue = dict["Task", None]
"""Who waits for something, in the order in which they came."""

_CALL = 1e-6  # virtual seconds that a call of the system takes
_EPOCH = 1000.0


class Killed(BaseException):
    """Unwinds the threads of a process that is dead. Nothing that they still do has an effect."""


class _Worker:
    """A real thread, which runs one simulated thread after another."""

    def __init__(self) -> None:
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.task: Task | None = None
        _thread.start_new_thread(self._loop, ())

    def _loop(self) -> None:
        while True:
            self.baton.acquire()
            assert self.task is not None
            self.task.kernel.play(self.task, self)


_idle: list[_Worker] = []


class Process:
    """Its open files by number, its threads, and what the modules of the product keep for it (`state`)."""

    def __init__(self, kernel: Kernel, name: str, host: Any) -> None:
        self.kernel, self.name, self.host = kernel, name, host
        self.pid = next(kernel.numbers) + 100
        self.files: dict[int, Any] = {}
        self.tasks: list[Task] = []
        self.state: dict[int, dict[Any, Any]] = {}
        self.dead = False
        self.frozen = False
        self.parked: list[Task] = []  # who could run if it were not frozen
        self.main: Task | None = None

    def spawn(self, run: Callable[[], object], name: str) -> Task:
        """A thread that begins some time."""
        task = Task(self, run, name)
        self.tasks.append(task)
        self.kernel.make_ready(task)
        return task

    def kill(self, *, close: bool = True) -> None:
        """End it at once. Its files are closed, as a system does it; not where the whole machine goes (`close`)."""
        if self.dead:
            return
        self.kernel.tell(self, "is killed" if close else "is switched off")
        self.dead = self.kernel.less = True
        if close:
            for file in list(self.files.values()):
                file.close()
        self.files.clear()
        self.thaw()
        for task in self.tasks:
            self.kernel.make_ready(task)

    def freeze(self) -> None:
        if not self.dead:
            self.kernel.tell(self, "is stopped")
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            self.kernel.tell(self, "goes on")
            self.frozen = False
            self.kernel.ready += self.parked
            self.parked = []


class Task:
    """A simulated thread."""

    __slots__ = ("baton", "done", "kernel", "late", "name", "process", "run", "token", "waits", "watchers")

    def __init__(self, process: Process, run: Callable[[], object], name: str) -> None:
        self.process, self.kernel, self.run, self.name = process, process.kernel, run, name
        self.baton: Any = None  # none as long as it has not begun
        self.waits = True  # it is not ready to run
        self.token = 0  # of its last wait
        self.late = False  # that one's time was over
        self.done = False
        self.watchers: Queue = {}


class Kernel:
    """All processes and the clock. `preempt`: how often a call that does not block lets another thread run.

    `trace` is told what happens, for people; `digest` is a number over all decisions.
    """

    def __init__(self, seed: int, preempt: float, trace: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.now = _EPOCH
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.decisions = self.digest = 0
        self.problems: list[str] = []
        self.trace = trace
        self.less = True
        """Whether a process or a thread has ended: only then the schedule may be over."""
        self._draw, self._preempt = self.random.random, preempt
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._main = _thread.allocate_lock()
        self._until: Callable[[], bool] = lambda: False
        self._limit = 0.0

    # Time.

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self.now - _EPOCH

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action`, which must not wait, so much later."""
        heappush(self._events, (self.now + seconds, next(self._order), action, arguments))

    def tell(self, process: Process | None, text: str) -> None:
        """For people."""
        if self.trace is not None:
            task = self.current
            thread = f" {task.name}" if task is not None and task.process is process else ""
            self.trace(f"{self.seconds:11.6f} {process.name if process else '':8}{thread} {text}")

    # What running threads call.

    def call(self) -> Task:
        """Each call of the system begins with it. Who calls; another thread may have run meanwhile."""
        task: Task = self.current  # type: ignore[assignment]
        if task.process.dead:
            raise Killed
        self.now += _CALL
        if self._preempt and self._draw() < self._preempt:
            self.ready.append(task)
            self._hand_on(task)
        return task

    def wait(self, queues: Collection[Queue], seconds: float | None) -> bool:
        """Sleep until one of `queues` is woken; False where so many seconds are over."""
        task: Task = self.current  # type: ignore[assignment]
        if task.process.dead:
            raise Killed
        for queue in queues:
            queue[task] = None
        task.token = token = task.token + 1
        task.waits = True
        task.late = False
        if seconds is not None:
            due = self.now + seconds if seconds > 0 else self.now
            heappush(self._events, (due, next(self._order), self._expire, (task, token)))
        self._hand_on(task)
        for queue in queues:
            queue.pop(task, None)
        return not task.late

    def wake(self, queue: Queue) -> None:
        """All who wait there look again."""
        for task in queue:
            self.make_ready(task)

    def make_ready(self, task: Task) -> None:
        if task.waits and not task.done:
            task.waits = False
            self.ready.append(task)

    def _expire(self, task: Task, token: int) -> None:
        if task.waits and task.token == token and not task.done:
            task.late, task.waits = True, False
            self.ready.append(task)

    # The baton.

    def _hand_on(self, task: Task) -> None:
        """Let somebody run, until it is this one's turn."""
        following = self._pick()
        if following is not task:
            self._pass_to(following)
            task.baton.acquire()
        if task.process.dead:
            raise Killed

    def _pass_to(self, following: Task | None) -> None:
        self.current = following
        if following is None:
            self._main.release()
            return
        if following.baton is None:
            worker = _idle.pop() if _idle else _Worker()
            worker.task, following.baton = following, worker.baton
        following.baton.release()

    def _pick(self) -> Task | None:
        """Who runs next; None: the schedule is over."""
        events = self._events
        while True:
            while events and events[0][0] <= self.now:
                _, _, action, arguments = heappop(events)
                action(*arguments)
            if self.less:
                self.less = False
                if self._until():
                    return None
            ready = self.ready
            while count := len(ready):
                self.decisions += 1
                task = ready.pop()
                if count > 1 and (index := int(self._draw() * count)) < count - 1:
                    task, ready[index] = ready[index], task
                process = task.process
                if not process.frozen:
                    self.digest = (self.digest * 31 + hash((process.pid, task.name, self.now))) & 0xFFFFFFFFFFFF
                    return task
                process.parked.append(task)
            if not events:
                self.problems.append("nobody can ever run again")
                return None
            self.now = events[0][0]
            if self.now > self._limit:
                self.problems.append(f"it is not over after {self.seconds:.0f} virtual seconds")
                return None

    def play(self, task: Task, worker: _Worker) -> None:
        """On a worker: the whole of a simulated thread."""
        try:
            if not task.process.dead:
                task.run()
        except Killed:
            pass
        except BaseException:
            self.problems.append(f"{task.process.name} {task.name} failed:\n{traceback.format_exc()}")
        task.done = self.less = True
        task.process.tasks.remove(task)
        self.wake(task.watchers)
        worker.task = None
        following = self._pick()
        _idle.append(worker)
        self._pass_to(following)

    # What the player calls, whose thread is none of the simulated ones.

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Let threads run until `until`, which is looked at when a process or a thread has ended, or for `limit`
        virtual seconds."""
        self._until, self._limit, self.less = until, self.now + limit, True
        if not self._main.locked():
            self._main.acquire()
        following = self._pick()
        if following is not None:
            self._pass_to(following)
            self._main.acquire()

    def unwind(self, processes: Iterable[Process]) -> None:
        """Kill all that is left, so that no real thread stays in this schedule."""
        processes = list(processes)
        for process in processes:
            process.kill()
            process.thaw()
        self._events.clear()
        self.run(lambda: not any(process.tasks for process in processes), 1e9)


class World:
    """The kernel of the schedule that is being played."""

    kernel: Kernel


def kernel() -> Kernel:
    return World.kernel


def process() -> Process:
    """Whose code runs now."""
    task = World.kernel.current
    assert task is not None
    return task.process

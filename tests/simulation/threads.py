"""Stand-ins for `threading` and `time`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .kernel import Queue, Task, World, process


def monotonic() -> float:
    """It grows with each call, as a real one does between two that matter."""
    kernel = World.kernel
    kernel.call()
    return kernel.now


def monotonic_ns() -> int:
    return int(monotonic() * 1e9)


def sleep(seconds: float) -> None:
    World.kernel.call()
    World.kernel.wait([], seconds)


class Lock:
    """As Python's."""

    def __init__(self) -> None:
        self._held = False
        self._queue: Queue = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = World.kernel
        kernel.call()
        until = kernel.now + timeout if timeout >= 0 else None
        while self._held:
            if not blocking or (until is not None and kernel.now >= until):
                return False
            kernel.wait([self._queue], None if until is None else until - kernel.now)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._queue:
            World.kernel.wake(self._queue)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """As Python's."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = World.kernel.current
        if self._owner is not task:
            if not super().acquire(blocking, timeout):
                return False
            self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Condition:
    """As Python's."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiters: list[Queue] = []

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        mine: Queue = {}
        self._waiters.append(mine)
        self._lock.release()
        try:
            return World.kernel.wait([mine], timeout)
        finally:
            if mine in self._waiters:
                self._waiters = [each for each in self._waiters if each is not mine]
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else World.kernel.now + timeout
        while not (found := predicate()):
            if until is not None and World.kernel.now >= until:
                break
            self.wait(None if until is None else until - World.kernel.now)
        return found

    def notify(self, count: int = 1) -> None:
        for queue in self._waiters[:count]:
            World.kernel.wake(queue)
        del self._waiters[:count]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """As Python's."""

    def __init__(self) -> None:
        self._set = False
        self._queue: Queue = {}

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        World.kernel.wake(self._queue)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel = World.kernel
        kernel.call()
        until = None if timeout is None else kernel.now + timeout
        while not self._set:
            if until is not None and kernel.now >= until:
                return False
            kernel.wait([self._queue], None if until is None else until - kernel.now)
        return True


class Thread:
    """As Python's."""

    def __init__(
        self,
        target: Callable[..., object] = lambda: None,
        name: str = "",
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._run = lambda: target(*args, **kwargs or {})
        self._task: Task | None = None

    def start(self) -> None:
        World.kernel.call()
        self._task = process().spawn(self._run, self.name)
        process().state.setdefault(id(Thread), {})[self._task] = self

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        kernel, task = World.kernel, self._task
        kernel.call()
        assert task is not None
        until = None if timeout is None else kernel.now + timeout
        while not task.done and (until is None or kernel.now < until):
            kernel.wait([task.watchers], None if until is None else until - kernel.now)


def current_thread() -> Any:
    task = World.kernel.current
    return process().state.get(id(Thread), {}).get(task, task)


def get_ident() -> int:
    return id(World.kernel.current)


def enumerate() -> list[Any]:
    """The threads of this process; its first one has no `Thread`."""
    known = process().state.get(id(Thread), {})
    return [known.get(task, task) for task in process().tasks]

"""``hetcoll run``: starts the ranks of a job on this host, shows their output, and leaves none of them behind."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import BinaryIO

from ..config.env import child_environment
from ..errors import ArgumentError
from . import watchdog

_CHUNK = 64 << 10
_LONGEST_LINE = 16 << 20  # bytes; a longer one is cut
_TAIL_LINES = 20
_DRAIN = 1.0  # seconds for output that comes after the ranks ended
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    command: Sequence[str],
    nproc: int,
    *,
    env: Mapping[str, str] | None = None,
    prefix: bool = True,
    grace: float = 5.0,
    bind: bool = True,
    keep_going: bool = False,
    restarts: int = 0,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
) -> int:
    """Run `command` as ranks 0 to `nproc` - 1 and return the job's exit code.

    A command whose first word ends in ``.py`` is run by this Python. Ranks get RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, HETCOLL_JOB and a random HETCOLL_SECRET on top of our environment and
    `env`; their stdin is empty. Where there are more ranks than cores that we may use, each is bound to one of them, by
    turns, unless `bind` is False: left to the kernel, three of four may share one of two for a second. Each is a
    process group of our session, not a session: Linux shares cores out among sessions (sched_autogroup_enabled), and
    a rank that has one to itself gives nothing away by sched_yield(2). Output goes to `stdout` and `stderr` (ours by
    default) in whole lines, with ``[rank]`` before each where `prefix`.

    The first rank that fails ends the others: SIGTERM to their process groups, and SIGKILL after `grace` seconds. Its
    last lines are shown last and its code is returned, 128 + n for signal n. SIGINT, SIGTERM and SIGHUP to us end the
    job in the same way (130, 143, 129), a second one at once; when we are killed, a watchdog process kills the ranks.
    What the ranks started and left running is killed when they have ended. 126 or 127: the command could not be
    started. 141: nobody reads our output any more.

    With `keep_going` a rank that fails is told of at once and does not end the others, so that they can go on by
    `Communicator.shrink`. The job's code is then rank 0's: the job's store is in its process, without which nobody can.

    A job that failed is started anew up to `restarts` times, all of its ranks, with another port and secret of ours.
    Not one that a signal to us ended, or whose command could not be started.
    """
    if nproc < 1:
        raise ArgumentError(f"nproc: wanted 1 or more, got {nproc}")
    if not command:
        raise ArgumentError("command: wanted a program or a script, got nothing")
    if restarts < 0:
        raise ArgumentError(f"restarts: wanted 0 or more, got {restarts}")
    words = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    out, err = stdout or sys.stdout.buffer, stderr or sys.stderr.buffer
    printer = _Printer(out, err, prefix)
    for left in range(restarts, -1, -1):
        with _Job(words, nproc, dict(env or {}), grace, bind, keep_going, printer) as job:
            code = job.run()
        if code == 0 or not left or not job.may_start_again:
            break
        printer.say(2, f"hetcoll run: starting all ranks anew, {left - 1} restarts left\n".encode())
    return code


class _Printer:
    """Writes whole lines, and stops where nobody reads any more."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO, prefix: bool) -> None:
        self._files = {1: stdout, 2: stderr}
        self._prefix = prefix
        self.broken = False

    def write(self, stream: int, rank: int, lines: list[bytes]) -> None:
        """Lines of `rank`, each with its newline, to stdout (1) or stderr (2)."""
        head = b"[%d] " % rank if self._prefix else b""
        self.say(stream, b"".join(head + line for line in lines))

    def say(self, stream: int, data: bytes) -> None:
        try:
            self._files[stream].write(data)
            self._files[stream].flush()
        except BrokenPipeError:
            self.broken = True


@dataclass(slots=True)
class _Stream:
    """One of a rank's two pipes, and its unfinished line."""

    rank: _Rank
    number: int
    pipe: int
    partial: bytes = b""


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    code: int | None = None
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))


class _Job:
    """The ranks while they run. They stay zombies until the end, so that their process groups' numbers stay theirs."""

    def __init__(
        self, words: list[str], nproc: int, env: dict[str, str], grace: float, bind: bool, goes_on: bool, out: _Printer
    ) -> None:
        self._words, self._nproc, self._env, self._grace, self._printer = words, nproc, env, grace, out
        self._keep_going = goes_on
        self._cores = sorted(os.sched_getaffinity(0))
        self._bind = bind and nproc > len(self._cores)
        self._name = secrets.token_hex(8)
        self._ranks: list[_Rank] = []
        self._streams: dict[int, _Stream] = {}  # by the descriptor of their pipe, while that is open
        self._failed: _Rank | None = None
        self._stopped_by = 0  # the signal that ended the job
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._old_handlers: dict[int, object] = {}

    def __enter__(self) -> _Job:
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._end_all()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()

    def run(self) -> int:
        """Start the ranks, serve them to their end, and give the job's code."""
        code = self._start_all()
        while code is None and any(rank.code is None for rank in self._ranks):
            self._turn()
        self._end_all()
        if code is not None:
            return code
        if self._failed is not None:
            self._show_failure(self._failed)
            return _shell_code(self._failed.code or 0)
        return 128 + self._stopped_by if self._stopped_by else 0

    @property
    def may_start_again(self) -> bool:
        """Whether it was ranks that failed, and not the command, or someone who ended the job."""
        return bool(self._ranks) and not self._stopped_by

    # Starting.

    def _start_all(self) -> int | None:
        """Start the watchdog and the ranks; a code where the command cannot be started."""
        script = [sys.executable, "-I", "-S", watchdog.__file__, self._name]
        self._watchdog = subprocess.Popen(
            script, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            bufsize=0,  # a word that it no longer reads is not tried again when its stdin is closed
        )  # fmt: skip
        common = self._environment()
        try:
            for number in range(self._nproc):
                if self._stopped_by:
                    break
                self._start(number, {**common, "RANK": str(number), "LOCAL_RANK": str(number)})
        except OSError as error:
            self._printer.say(2, f"hetcoll run: {self._words[0]}: {error.strerror}\n".encode())
            return 127 if isinstance(error, FileNotFoundError) else 126
        if self._stopped_by:
            self._terminate()  # the last rank may have started after the signal was handled
        return None

    def _environment(self) -> dict[str, str]:
        """What all ranks have in common: our own environment, the caller's changes, and where they meet."""
        common = child_environment(self._env)
        common.setdefault("PYTHONUNBUFFERED", "1")
        if not (common.get("HETCOLL_SECRET") or common.get("HETCOLL_SECRET_FILE")):
            common["HETCOLL_SECRET"] = secrets.token_hex(32)
        common["HETCOLL_JOB"] = self._name
        common["WORLD_SIZE"] = common["LOCAL_WORLD_SIZE"] = str(self._nproc)
        common["MASTER_ADDR"], common["MASTER_PORT"] = "127.0.0.1", str(_free_port())
        return common

    def _start(self, number: int, env: dict[str, str]) -> None:
        if self._bind:  # a child is where this thread is, with every thread that it will have
            os.sched_setaffinity(0, {self._cores[number % len(self._cores)]})
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                process_group=0,  # not a session: see `run`
            )
        finally:
            if self._bind:
                os.sched_setaffinity(0, self._cores)
        self._tell_watchdog(b"%d\n" % process.pid)
        rank = _Rank(number, process, os.pidfd_open(process.pid))
        self._ranks.append(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, pipe in ((1, process.stdout), (2, process.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._streams[pipe.fileno()] = _Stream(rank, stream, pipe.fileno())
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, self._streams[pipe.fileno()])

    def _tell_watchdog(self, word: bytes) -> None:
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        try:
            self._watchdog.stdin.write(word)
        except BrokenPipeError:
            self._printer.say(
                2, b"hetcoll run: the watchdog was killed: nothing ends the ranks if the launcher is too\n"
            )

    # Serving.

    def _turn(self, longest: float | None = None) -> None:
        """Sleep until something happens, and serve it."""
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_groups(signal.SIGKILL)
        waits = [longest, None if self._kill_at is None else self._kill_at - now]
        for key, _ in self._selector.select(min((wait for wait in waits if wait is not None), default=None)):
            if isinstance(key.data, _Stream):
                self._read(key.data)
            elif isinstance(key.data, _Rank):
                self._note_end(key.data)
            else:
                self._wake_read.recv(64)
        if self._printer.broken and not self._stopped_by:
            self._stop(signal.SIGPIPE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(number)
        with suppress(BlockingIOError):  # then it is full of wake-ups
            self._wake_write.send(b"\0")

    def _stop(self, number: int) -> None:
        """End the job because of a signal; at once when it is not the first."""
        again, self._stopped_by = bool(self._stopped_by), self._stopped_by or number
        if again:
            self._kill_at = 0.0
        else:
            self._terminate()

    def _terminate(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace
        self._signal_groups(signal.SIGTERM)

    def _signal_groups(self, number: int) -> None:
        for rank in self._ranks:
            os.killpg(rank.process.pid, number)  # a zombie, at least, is in it

    def _note_end(self, rank: _Rank) -> None:
        ended = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return
        self._selector.unregister(rank.pidfd)
        rank.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if rank.code == 0 or self._stopped_by:
            return
        if self._keep_going:
            text = f"hetcoll run: rank {rank.number} {_spell_code(rank.code)}; the others go on\n"
            self._printer.say(2, text.encode())
            self._failed = rank if rank.number == 0 else self._failed
        elif self._failed is None:
            self._failed = rank
            self._terminate()

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.pipe, _CHUNK)
        except BlockingIOError:
            return
        self._take(stream, data, not data)

    def _take(self, stream: _Stream, data: bytes, last: bool) -> None:
        """Show the lines that `data` completes; with `last` the unfinished one too."""
        if last:
            self._selector.unregister(stream.pipe)
            del self._streams[stream.pipe]
        *lines, partial = (stream.partial + data).split(b"\n")
        if partial and (last or len(partial) > _LONGEST_LINE):
            lines.append(partial)
            partial = b""
        stream.partial = partial
        if lines:
            whole = [line + b"\n" for line in lines]
            stream.rank.tail.extend(whole)
            self._printer.write(stream.number, stream.rank.number, whole)

    # Ending.

    def _end_all(self) -> None:
        """Whatever happened: no process of the job is left, no output lost, no descriptor open."""
        if self._watchdog is None:
            return
        if any(rank.code is None for rank in self._ranks):
            self._terminate()
            while any(rank.code is None for rank in self._ranks):
                self._turn()
        self._drain()
        watchdog.kill_job(self._name, [rank.process.pid for rank in self._ranks])
        self._drain()
        for stream in list(self._streams.values()):
            self._take(stream, b"", True)
        for rank in self._ranks:
            rank.process.wait()
            os.close(rank.pidfd)
            for pipe in (rank.process.stdout, rank.process.stderr):
                assert pipe is not None
                pipe.close()
        self._tell_watchdog(b"done\n")
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()
        self._watchdog = None

    def _drain(self) -> None:
        """Show what the ranks' pipes still hold, and wait a little for what descendants may add."""
        deadline = time.monotonic() + _DRAIN
        while self._streams and time.monotonic() < deadline:
            self._turn(max(0.0, deadline - time.monotonic()))

    def _show_failure(self, rank: _Rank) -> None:
        text = f"hetcoll run: rank {rank.number} {_spell_code(rank.code or 0)}"
        text += "; its last lines:\n" if rank.tail else "; it printed nothing\n"
        self._printer.say(2, text.encode())
        self._printer.write(2, rank.number, list(rank.tail))


def _free_port() -> int:
    """A port that is free now on all addresses, as some programs bind it there. If someone else takes it before rank 0
    does, the ranks meet at one of the next."""
    both = socket.has_dualstack_ipv6()
    with socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both) as sock:
        port: int = sock.getsockname()[1]
        return port


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _spell_code(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"

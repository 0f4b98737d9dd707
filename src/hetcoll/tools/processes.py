"""Processes of one job on this host: starts them, shows their output, and leaves none of them behind."""

from __future__ import annotations

import os
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
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import BinaryIO

from . import watchdog

_CHUNK = 64 << 10
_LONGEST_SLEEP = 3600.0  # seconds: a selector counts no more than some weeks
_LONGEST_LINE = 16 << 20  # bytes; a longer one is cut
_TAIL_LINES = 20
_DRAIN = 1.0  # seconds for output that comes after the processes ended
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a job: what runs it, and how it is shown.

    `name` is what messages call it ("rank 3", "host gpu07"), `prefix` stands before each of its lines. `stdin` is
    written to it at its start and then left open: its end tells the process to end, in the place of SIGTERM. Without
    it stdin is empty. `core` is the one that it is bound to. With `decides` its failure is the job's, whatever else
    goes on.
    """

    words: Sequence[str]
    env: Mapping[str, str]
    name: str
    prefix: bytes = b""
    stdin: bytes | None = None
    core: int | None = None
    decides: bool = False


class Printer:
    """Writes whole lines, and stops where nobody reads any more or there is no room."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self._files = {1: stdout, 2: stderr}
        self.broken = False

    def write(self, stream: int, prefix: bytes, lines: list[bytes]) -> None:
        """Lines, each with its newline and `prefix` before it, to stdout (1) or stderr (2)."""
        self.say(stream, b"".join(prefix + line for line in lines))

    def say(self, stream: int, data: bytes) -> None:
        try:
            self._files[stream].write(data)
            self._files[stream].flush()
        except OSError as error:  # nobody reads, or a disk is full: the ranks are to end in order
            told, self.broken = self.broken or isinstance(error, BrokenPipeError), True
            if not told and stream == 1:
                self.say(2, f"hetcoll run: stdout: {error.strerror}\n".encode())


@dataclass(slots=True)
class _Stream:
    """One of a process's two pipes, and its unfinished line."""

    owner: _Process
    number: int
    pipe: int
    partial: bytes = b""


@dataclass(slots=True)
class _Process:
    command: Command
    popen: subprocess.Popen[bytes]
    pidfd: int
    code: int | None = None
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))


class Job:
    """Processes while they run. They stay zombies until the end, so that their process groups' numbers stay theirs.

    `name` is the value of HETCOLL_RUN in the environment of all `commands`: what they start and leave running is found
    by it. With `keep_going` a process that fails does not end the others. With `respawns` it is started again, up to so
    many times in all, as a newcomer to its job, until one that decides has ended well. With `until_stdin_ends` the end
    of our own stdin ends the job, as SIGTERM does.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        name: str,
        printer: Printer,
        *,
        grace: float,
        keep_going: bool,
        respawns: int = 0,
        until_stdin_ends: bool = False,
    ) -> None:
        self._commands, self._name, self._printer = commands, name, printer
        self._grace, self._keep_going, self._respawns = grace, keep_going, respawns
        self._until_stdin_ends = until_stdin_ends
        self._processes: list[_Process] = []
        self._streams: dict[int, _Stream] = {}  # by the descriptor of their pipe, while that is open
        self._failed: _Process | None = None
        self._stopped_by = 0  # the signal that ended the job
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._old_handlers: dict[int, object] = {}

    def __enter__(self) -> Job:
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if self._until_stdin_ends:
            self._selector.register(0, selectors.EVENT_READ, "stdin")
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup(1): the job is to outlive its terminal
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
        """Start the processes, serve them to their end, and give the job's code."""
        code = self._start_all()
        while code is None and any(one.code is None for one in self._processes):
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
        """Whether it was processes that failed, and not the command, or someone who ended the job."""
        return bool(self._processes) and not self._stopped_by

    # Starting.

    def _start_all(self) -> int | None:
        """Start the watchdog and the processes; a code where the command cannot be started."""
        script = [sys.executable, "-I", "-S", watchdog.__file__, self._name]
        # Where another launcher started this one, its watchdog must not find ours: who would end our ranks then?
        env = {name: value for name, value in os.environ.items() if name != "HETCOLL_RUN"}
        self._watchdog = subprocess.Popen(
            script, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=env,
            bufsize=0,  # a word that it no longer reads is not tried again when its stdin is closed
        )  # fmt: skip
        try:
            for command in self._commands:
                if self._stopped_by:
                    break
                self._start(command)
        except OSError as error:
            self._printer.say(2, f"hetcoll run: {command.words[0]}: {error.strerror}\n".encode())
            return 127 if isinstance(error, FileNotFoundError) else 126
        if self._stopped_by:
            self._terminate()  # the last one may have started after the signal was handled
        return None

    def _start(self, command: Command) -> None:
        cores = os.sched_getaffinity(0)
        if command.core is not None:  # a child is where this thread is, with every thread that it will have
            os.sched_setaffinity(0, {command.core})
        try:
            popen = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL if command.stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=command.env,
                bufsize=0,
                process_group=0,  # not a session: see `launch.run`
            )
        finally:
            if command.core is not None:
                os.sched_setaffinity(0, cores)
        self._tell_watchdog(b"%d\n" % popen.pid)
        one = _Process(command, popen, os.pidfd_open(popen.pid))
        self._processes.append(one)
        self._selector.register(one.pidfd, selectors.EVENT_READ, one)
        assert popen.stdout is not None
        assert popen.stderr is not None
        for stream, pipe in ((1, popen.stdout), (2, popen.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._streams[pipe.fileno()] = _Stream(one, stream, pipe.fileno())
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, self._streams[pipe.fileno()])
        if command.stdin is not None:
            assert popen.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, and its code says more
                popen.stdin.write(command.stdin)

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
            self._kill_groups()
        waits = [longest, None if self._kill_at is None else min(self._kill_at - now, _LONGEST_SLEEP)]
        for key, _ in self._selector.select(min((wait for wait in waits if wait is not None), default=None)):
            if isinstance(key.data, _Stream):
                self._read(key.data)
            elif isinstance(key.data, _Process):
                self._note_end(key.data)
            elif key.data == "stdin":
                if not os.read(0, _CHUNK):
                    self._selector.unregister(0)
                    self._stop(signal.SIGTERM)
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
        for one in self._processes:
            if one.command.stdin is None:
                os.killpg(one.popen.pid, signal.SIGTERM)
            elif one.popen.stdin is not None:
                one.popen.stdin.close()

    def _kill_groups(self) -> None:
        for one in self._processes:
            os.killpg(one.popen.pid, signal.SIGKILL)  # a zombie, at least, is in it

    def _note_end(self, one: _Process) -> None:
        ended = os.waitid(os.P_PID, one.popen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return
        self._selector.unregister(one.pidfd)
        one.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if one.code == 0 or self._stopped_by:
            return
        if self._keep_going:
            over = any(each.command.decides and each.code == 0 for each in self._processes)
            again = self._respawns > 0 and not over
            then = f"starting it again, {self._respawns - 1} respawns left" if again else "the others go on"
            self._printer.say(2, f"hetcoll run: {one.command.name} {_spell_code(one.code)}; {then}\n".encode())
            self._failed = one if one.command.decides and not again else self._failed
            if again:
                self._respawns -= 1
                self._start_again(one)
        elif self._failed is None:
            self._failed = one
            self._terminate()

    def _start_again(self, one: _Process) -> None:
        """As a newcomer. Where the system refuses, the others go on all the same."""
        try:
            self._start(replace(one.command, env={**one.command.env, "HETCOLL_JOIN": "1"}))
        except OSError as error:
            self._printer.say(2, f"hetcoll run: {one.command.name} did not start: {error.strerror}\n".encode())
            self._failed = one if one.command.decides else self._failed

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
            stream.owner.tail.extend(whole)
            self._printer.write(stream.number, stream.owner.command.prefix, whole)

    # Ending.

    def _end_all(self) -> None:
        """Whatever happened: no process of the job is left, no output lost, no descriptor open."""
        if self._watchdog is None:
            return
        if any(one.code is None for one in self._processes):
            self._terminate()
            while any(one.code is None for one in self._processes):
                self._turn()
        self._drain()
        watchdog.kill_job(self._name, [one.popen.pid for one in self._processes])
        self._drain()
        for stream in list(self._streams.values()):
            self._take(stream, b"", True)
        for one in self._processes:
            one.popen.wait()
            os.close(one.pidfd)
            for pipe in (one.popen.stdin, one.popen.stdout, one.popen.stderr):
                if pipe is not None:
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

    def _show_failure(self, one: _Process) -> None:
        text = f"hetcoll run: {one.command.name} {_spell_code(one.code or 0)}"
        if one.command.stdin is not None:  # a launcher, which has said what its own process said
            self._printer.say(2, f"{text}\n".encode())
            return
        text += "; its last lines:\n" if one.tail else "; it printed nothing\n"
        self._printer.say(2, text.encode())
        self._printer.write(2, one.command.prefix, list(one.tail))


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

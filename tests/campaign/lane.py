"""Processes that stay for many programs: each rank's is forked from a lane, and plays a job of its own each time."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import fakes
import netns
from patience import PATIENCE
from ranks import Resources

import hetcoll
from hetcoll import lifetime
from hetcoll.config.env import configuration, environment
from hetcoll.gpu import lent
from hetcoll.rendezvous import succession
from hetcoll.rendezvous.connections import sockets

from .play import Player, Report
from .program import CUT, HARMLESS, NETWORK, Program
from .verdict import judge

ENOUGH = 90.0  # seconds for a program, far more than any error may take
CLEAR = 10.0  # until nothing is left of it
_VENDORS = {"c": None, "n": "cuda", "a": "hip"}
_VARIABLES = {"HETCOLL_TUNED": "none", "HETCOLL_LINGER": "0", "HETCOLL_DEBUG": "none"}
_PATIENCES = (  # of a cut: shorter
    (sockets._KEEP_ALIVE, sockets._VANISHED, sockets._USER_TIMEOUT, succession._UNSURE_GRACE),
    (1, 3.0, 3, 5.0),
)
_PDEATHSIG, _SUBREAPER = 1, 36  # linux/prctl.h


class Seat:
    """A process that can be a rank. `device`: its GPU's letter, or c."""

    def __init__(self, device: str, output: str, others: Iterable[Seat]) -> None:
        self.device = device
        self.pipe, theirs = mp.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for each in (self, *others):
                    each.pipe.close()
                _sit(theirs, device, output)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()

    def end(self) -> None:
        """Nothing of it stays."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


@dataclass
class Orders:
    program: Program
    rank: int
    pids: list[int]
    network: netns.Network | None


class Lane:
    """Plays programs one after another."""

    def __init__(self, output: str) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # what ranks leave behind becomes this process's
        self._output, self._read = output, 0
        self._idle: list[Seat] = []
        gc.collect()
        gc.freeze()  # or each rank would look through what is here

    def play(self, program: Program) -> list[str] | str:
        """What was wrong; or what the program wants and cannot be had here."""
        if any(fakes.why_not(_VENDORS[device]) for device in set(program.devices) - {"c"}):
            return "fakes of GPUs' drivers"
        if program.rdma and not Path("/sys/class/infiniband/rxe3").exists():
            return "RDMA devices, as tests/verbs/guest.py has them"
        if program.attack.kind == "resets" and os.geteuid() != 0:
            return "CAP_NET_ADMIN"
        if program.attack.kind not in NETWORK:
            return self._play(program, None)
        if netns.why_not():
            return netns.why_not()
        network = netns.Network(len(set(program.hosts)), "400mbit", named=False)
        try:
            network.make()
            return self._play(program, network)
        except subprocess.CalledProcessError as error:
            return f"network namespaces, or {error}: {error.stderr}"
        finally:
            network.close()

    def _play(self, program: Program, network: netns.Network | None) -> list[str]:
        size = program.size + program.newcomers
        seats = [self._seat(program.device(rank)) for rank in range(size)]
        for rank, seat in enumerate(seats):
            seat.pipe.send(Orders(program, rank, [each.pid for each in seats], network))
        try:
            unique_id = seats[0].pipe.recv()
        except (EOFError, OSError):
            unique_id = None
        ended = {0: unique_id} if isinstance(unique_id, Report) else {}  # it could not even say where it is
        unique_id = None if ended else unique_id
        for seat in seats[1:]:
            with contextlib.suppress(OSError):  # it was killed meanwhile
                seat.pipe.send(unique_id)
        reports = self._answers(seats, PATIENCE * ENOUGH, ended)
        problems = judge(program, reports)
        if program.attack.kind == "exec":
            problems += [kept for rank in program.attack.victims if (kept := _kept(seats[rank]))]
        there = [seat for seat, report in zip(seats, reports, strict=True) if isinstance(report, Report)]
        for seat in there:
            seat.pipe.send("leave")  # the store's process last, but for what is left of it by then
        problems += [left for left in self._answers(there, 2 * PATIENCE * CLEAR, {}) if left]
        for seat in seats:
            if problems or seat not in there or program.attack.kind in _SPOIL:
                seat.end()
            else:
                self._idle.append(seat)
        return problems + self._left_behind()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def _seat(self, device: str) -> Seat:
        for seat in self._idle:
            if seat.device == device:
                self._idle.remove(seat)
                return seat
        return Seat(device, self._output, self._idle)

    def _answers(self, seats: list[Seat], seconds: float, ended: Mapping[int, Any]) -> list[Any]:
        """Each one's, or why there is none; `ended` are known."""
        found = dict(ended)
        deadline = time.monotonic() + seconds
        while len(found) < len(seats):
            waiting = {seat.pipe: rank for rank, seat in enumerate(seats) if rank not in found}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                found |= {rank: f"did not end: {self._stacks(seats[rank])}" for rank in waiting.values()}
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[waiting[pipe]] = pipe.recv()
                except (EOFError, ConnectionError):
                    found[waiting[pipe]] = f"died: {self._said()}"
        return [found[rank] for rank in range(len(seats))]

    def _said(self) -> str:
        """What ranks have printed since this was asked last."""
        with open(self._output, "a+b") as file:
            file.seek(self._read)
            text = file.read()
            self._read += len(text)
        return text.decode(errors="replace")[-5000:]

    def _stacks(self, seat: Seat) -> str:
        """Where a rank's threads stand. Where its main thread runs no Python `faulthandler` says so, which reads what
        other threads change meanwhile: with Python 3.12 that may be the process's end."""
        os.kill(seat.pid, signal.SIGCONT)
        said = self._said()
        for ask in (signal.SIGUSR2, signal.SIGQUIT):
            os.kill(seat.pid, ask)
            deadline = time.monotonic() + PATIENCE
            while _STAND not in said and time.monotonic() < deadline:
                time.sleep(0.01)
                said += self._said()
        return said

    def _left_behind(self) -> list[str]:
        """Processes that do not end: a child that was forked when its parent was killed does so by itself."""
        seats, deadline = {seat.pid for seat in self._idle}, time.monotonic() + PATIENCE * CLEAR
        while more := set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())) - seats:
            late = time.monotonic() >= deadline
            for pid in more:
                if late:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0 if late else os.WNOHANG)
            if late:
                return [f"processes {sorted(more)} were left behind"]
            time.sleep(0.01)
        return []


def _kept(seat: Seat) -> str:
    """What another program has of the rank that became it: nothing but what the lane gave that."""
    more = _open(seat.pid, first=3) - _open(os.getpid())
    return f"the program that a rank became has {sorted(more)}" if more else ""


def _open(pid: int, first: int = 0) -> set[str]:
    found, folder = set(), f"/proc/{pid}/fd"
    for each in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # it ends, or is closed meanwhile
            found |= {os.readlink(f"{folder}/{each}")} if int(each) >= first else set()
    return found


_SPOIL = ("files", "memory", "sizes")  # limits stay as they are
_STAND = "(most recent call first)"


# In a rank's process.


def _sit(pipe: Connection, device: str, output: str) -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    fd = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    signal.signal(signal.SIGUSR2, _tell_stacks)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    if device != "c":
        os.environ.update(fakes.environment(_VENDORS[device], 8, timeout=120))
        fakes.load()
    before, home = Resources.now(), f"/proc/{os.getppid()}/ns/net"
    while True:
        orders = pipe.recv()
        _dress(orders)
        report = Player(orders.program, orders.rank, orders.pids, orders.network).play(lambda o=orders: _enter(pipe, o))
        if orders.program.attack.kind not in CUT:  # else who was cut off meets those that went on, not what they left
            _close(hetcoll.Communicator)
        pipe.send(report)
        pipe.recv()
        _close(hetcoll.Communicator)
        _close(object)  # the store of the job
        if orders.network is not None:
            netns.enter(home)
        if set(orders.program.devices) != {"c"} and orders.program.attack.kind not in HARMLESS:
            _allow_an_id(before)
        pipe.send(_left(before))


def _tell_stacks(*_: object) -> None:
    """In one write: a rank that hangs may be in the midst of another."""
    lines = []
    for thread, frame in sys._current_frames().items():
        lines.append(f"Thread {thread:#x} {_STAND}:")
        for each, line in traceback.walk_stack(frame):
            lines.append(f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}')
    os.write(2, "\n".join([*lines, ""]).encode())


def _dress(orders: Orders) -> None:
    """The environment of this program's job, and of no other."""
    for name in [name for name in os.environ if name.startswith("HETCOLL_")]:
        del os.environ[name]
    program = orders.program
    host = program.hosts[orders.rank % program.size]
    os.environ.update(_VARIABLES | program.env)
    patience = _PATIENCES[program.attack.kind in CUT]
    sockets._KEEP_ALIVE, sockets._VANISHED, sockets._USER_TIMEOUT, succession._UNSURE_GRACE = patience
    if orders.network is not None:
        netns.enter(orders.network.hosts["abcd".index(host)])
    elif len(set(program.hosts)) > 1:
        os.environ["HETCOLL_HOST_ID"] = host
    if set(program.devices) != {"c"}:
        os.environ["HETCOLL_DEVICE"] = _VENDORS[program.device(orders.rank)] or "cpu"
    if program.rdma:
        os.environ["HETCOLL_IB_HCA"] = ("=rxe0,rxe2", "=rxe1,rxe3")[orders.rank % 2]  # the ends of two cables
    environment.cache_clear()  # it is read once a process
    configuration.cache_clear()


def _enter(pipe: Connection, orders: Orders) -> hetcoll.Communicator:
    if orders.rank == 0:
        unique_id = hetcoll.get_unique_id()
        pipe.send(unique_id)
    else:
        unique_id = pipe.recv()
        if unique_id is None:
            raise hetcoll.InitError("rank 0 died before it could say where it is")
    size = orders.program.size
    if orders.rank >= size:
        return hetcoll.Communicator.join(unique_id, timeout=30)
    seconds = 3.0 if orders.program.attack.kind == "joining" else 30.0
    return hetcoll.Communicator.init(size, orders.rank, unique_id, timeout=seconds)


def _close(kind: type) -> None:
    """All that is open of this kind."""
    lifetime.await_drops()
    for resource, _ in lifetime.opened():
        if isinstance(resource, kind):
            resource.close()
            del resource


def _allow_an_id(before: Resources) -> None:
    """NCCL listens for the ranks of an id until all have come, or the process ends: nothing in its interface gives an
    id back. So who made one for ranks that were gone before they came, or gave up, keeps that one."""
    held = Resources.now().descriptors - before.descriptors
    before.descriptors.update([what for what in held if what.startswith("/memfd:fake-nccl-")][:1])


def _left(before: Resources) -> str:
    """What stays of a program, which is to be nothing."""
    deadline = time.monotonic() + PATIENCE * CLEAR
    while left := Resources.now().left_over(before):
        if time.monotonic() >= deadline:
            return f"afterwards there are still {left}; Python's threads are {threading.enumerate()}"
        lent.free_left()  # as a next communicator would what others had open for longer than this one
        time.sleep(0.005)
    return ""

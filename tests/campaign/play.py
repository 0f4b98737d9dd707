"""Plays a program on one rank: its steps, what is done to it, and how those that are left go on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from interrupting import act_at, interrupt_at
from netns import Network
from ranks import wait_until
from resetting import destroy, own_connections

import hetcoll

from .program import CUT, NETWORK, REGROUPS, Program, Step, other_case
from .steps import SECONDS, run

Comm = hetcoll.Communicator


@dataclass
class Phase:
    """What a communicator came to on this rank. `lost` is the rank that a PeerLostError names, among its `size`;
    `part`: the error is that of a part, which was made on some ranks before others failed, and left it."""

    rank: int = -1
    size: int = 0
    step: int = -1
    error: str = ""
    text: str = ""
    lost: int = -1
    part: bool = False
    agreed: int = -1
    seconds: float = 0.0


@dataclass
class Report:
    """What a program came to on a rank; `problem` is what no program may do."""

    phases: list[Phase] = field(default_factory=list)
    problem: str = ""


def shorten(error: BaseException) -> str:
    """Where it was raised, on one line, and what it says."""
    frames = traceback.extract_tb(error.__traceback__)[-9:]
    return f"{' '.join(f'{os.path.basename(each.filename)}:{each.lineno}' for each in frames)}: {error!r}"


class Left(Exception):  # noqa: N818
    """This rank has left the others, as the program says."""


@dataclass
class Player:
    """A process that takes part as `rank`; those from the program's size on are newcomers."""

    program: Program
    rank: int
    pids: Sequence[int]
    network: Network | None = None
    report: Report = field(default_factory=Report)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def victim(self) -> bool:
        return self.rank in self.program.attack.victims

    def play(self, enter: Callable[[], Comm]) -> Report:
        try:
            self._play(enter)
        except BaseException as error:
            self.report.problem = shorten(error)
        return self.report

    def _play(self, enter: Callable[[], Comm]) -> None:
        program, comm = self.program, None
        with self._phase() as phase:
            if self.victim and program.attack.kind == "joining":
                self._later(self._die)
            comm = enter()
            if self.rank >= program.size:
                return self._steps(comm, program.more(comm.size), phase)
            try:
                self._steps(comm, program.steps, phase, attacked=True)
            except (MemoryError, RuntimeError, AssertionError) as error:
                comm.__exit__(type(error), error, None)  # as a program that does not know what to do
                raise
        self._join()
        if self.victim and program.attack.kind in ("kill", "exec"):  # another victim was faster
            sys.setprofile(None)
            self._die() if program.attack.kind == "kill" else self._become()
        if comm is None or comm.closed:
            return None
        if program.attack.kind in REGROUPS or program.newcomers:
            self._go_on(comm, phase)
        return comm.close()

    @contextlib.contextmanager
    def _phase(self) -> Iterator[Phase]:
        """Notes the error that ends a communicator."""
        self.report.phases.append(phase := Phase())
        begin = time.monotonic()
        try:
            yield phase
        except Left:
            phase.error = "left"
        except (hetcoll.HetcollError, KeyboardInterrupt, MemoryError) as error:
            phase.error, phase.lost = type(error).__name__, getattr(error, "rank", -1)
            phase.text, phase.part = shorten(error), hasattr(error, "__notes__")
        except RuntimeError as error:
            if "can't start new thread" not in str(error) or "hetcoll/" in str(
                traceback.extract_tb(error.__traceback__)[-2]
            ):
                raise
            phase.error, phase.text = "MemoryError", shorten(error)  # of this program's own threads
        phase.seconds = time.monotonic() - begin

    def _steps(self, comm: Comm, steps: Sequence[Step], phase: Phase, *, attacked: bool = False) -> None:
        phase.rank, phase.size = comm.rank, comm.size
        try:
            for phase.step, step in enumerate(steps):
                if attacked and phase.step == self.program.attack.at:
                    self._attack(comm, step)
                if attacked and phase.step > self.program.attack.at and step.what == "fence":
                    self._await_attack()
                run(comm, step)
        except KeyboardInterrupt:
            comm.abort("interrupted")  # where that was not in a call
            raise

    def _go_on(self, comm: Comm, before: Phase) -> None:
        """As ULFM has it: agree whether all is well; if not, those that are left go on; and take newcomers in."""
        if self.program.attack.kind == "stop" and not self.victim:
            os.kill(self.pids[self.program.attack.victims[0]], signal.SIGCONT)
        with self._phase() as phase:
            before.agreed = comm.agree(not before.error, timeout=SECONDS)
            rest = comm if before.agreed else comm.shrink(timeout=SECONDS)
            if self.program.newcomers:
                rest = rest.grow(self.program.newcomers, timeout=SECONDS)
            if rest is not comm:
                comm.close()
            self._steps(rest, self.program.more(rest.size), phase)
            if self.program.attack.kind not in CUT:
                rest.close()

    # What is done to a rank.

    def _attack(self, comm: Comm, step: Step) -> None:
        kind, rank = self.program.attack.kind, self.rank
        if kind == "pause" and rank == (self.program.attack.victims[0] + 1) % self.program.size:
            self._later(self._hold_up)
        acts = rank == self.program.attack.victims[0] if kind in NETWORK else self.victim
        if acts and hasattr(self, f"_{kind}"):
            getattr(self, f"_{kind}")(comm, step)

    def _later(self, act: Callable[[], Any]) -> None:
        """At once, or on a thread while this one goes on."""
        delay = self.program.attack.delay
        if delay is None:
            return act()
        self.threads.append(threading.Timer(delay, act))
        return self.threads[-1].start()

    def _join(self) -> None:
        for thread in self.threads:
            thread.join()

    def _await_attack(self) -> None:
        """Before the end of the steps what was to happen must have happened."""
        self._join()
        sys.setprofile(None)
        if self.victim and self.program.attack.kind == "exec":  # there were not so many places
            self._become()
        while self.victim and self.program.attack.kind == "interrupt":  # Python ignores what is raised in a finalizer
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGINT)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill(self, comm: Comm, step: Step) -> None:
        self._later(self._die)

    def _become(self) -> None:
        """Another program in this process, which has nothing of the rank's: not its links, nor the store."""
        program = self.program.attack.how.split()[0]
        os.execv(f"/bin/{program}", [program, "600"])  # which `true` ignores

    def _exec(self, comm: Comm, step: Step) -> None:
        place = self.program.attack.how.split()[1:]
        if place:
            act_at(int(place[0]), self._become)
        else:
            self._later(self._become)

    def _exit(self, comm: Comm, step: Step) -> None:
        os._exit(3)

    def _raise(self, comm: Comm, step: Step) -> None:
        with contextlib.suppress(ArithmeticError), comm:
            raise ArithmeticError("as the program says")
        raise Left

    def _close(self, comm: Comm, step: Step) -> None:
        comm.close()
        raise Left

    def _abort(self, comm: Comm, step: Step) -> None:
        self._later(lambda: comm.abort("as the program says"))

    def _mismatch(self, comm: Comm, step: Step) -> None:
        ((case, _),), *rest = step.args
        other = other_case(case, random.Random(self.program.seed))
        run(comm, Step("calls", ([(other, False)], *rest)))

    def _interrupt(self, comm: Comm, step: Step) -> None:
        if self.program.attack.how:
            interrupt_at(int(self.program.attack.how))
        else:
            self._later(lambda: os.kill(os.getpid(), signal.SIGINT))

    def _resets(self, comm: Comm, step: Step) -> None:
        times, pause = map(float, self.program.attack.how.split())
        draw = random.Random(f"{self.program.seed} on rank {self.rank}")

        def run() -> None:
            try:
                for _ in range(int(times)):
                    with contextlib.ExitStack() as stack:
                        found = [stack.enter_context(each) for each in own_connections()]
                        if found:
                            destroy(draw.choice(found))
                    time.sleep(pause / 1000)
            except OSError as error:
                self.report.problem = shorten(error)

        self._later(run)

    def _late(self, comm: Comm, step: Step) -> None:
        time.sleep(0.05)

    def _signals(self, comm: Comm, step: Step) -> None:
        def send() -> None:
            for _ in range(20):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.0005)

        self._later(send)

    def _hold_up(self) -> None:
        pid = self.pids[self.program.attack.victims[0]]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)

    def _absent(self, comm: Comm, step: Step) -> None:
        """Does not call, and comes when the others have given up."""
        wait_until(lambda: comm.error is not None, SECONDS)

    def _stop(self, comm: Comm, step: Step) -> None:
        """Is stopped until the others have given up."""
        os.kill(os.getpid(), signal.SIGSTOP)

    # What is done to the network between hosts, by one of the ranks there.

    def _shape(self, comm: Comm, step: Step) -> None:
        for host in self._hosts():
            for net in range(2):
                self._net().set_rate(host, net, *self.program.attack.how.split())

    def _sever(self, comm: Comm, step: Step) -> None:
        way, *nets = self.program.attack.how.split()
        if way == "part":
            self._net().part(self._hosts(), *map(int, nets))
        else:
            for host in self._hosts():
                self._net().cut(host, *map(int, nets))
        if self.program.attack.delay is not None:
            self._later(self._net().mend)

    def _hosts(self) -> list[int]:
        return sorted({"abcd".index(self.program.hosts[rank]) for rank in self.program.attack.victims})

    def _net(self) -> Network:
        assert self.network is not None
        return self.network

    def _cables(self, comm: Comm, step: Step) -> None:
        import cables  # which there are in guests

        if self.rank == self.program.attack.victims[0]:
            for end in self.program.attack.how.split():
                cables.unplug(end)
            self._later(cables.all_plugged)

    _slow = _lossy = _shape
    _blink = _half = _rejoin = _partition = _sever

    # Limits, which the lane's processes do not keep: they end after such a program.

    def _files(self, comm: Comm, step: Step) -> None:
        held = len(os.listdir("/proc/self/fd")) + random.Random(self.program.seed).randrange(4)
        resource.setrlimit(resource.RLIMIT_NOFILE, (held, held))

    def _memory(self, comm: Comm, step: Step) -> None:
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        more = random.Random(self.program.seed).choice((3, 30, 80)) << 20  # less, and Python itself hangs
        resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))

    def _sizes(self, comm: Comm, step: Step) -> None:
        """No file may grow, and shared memory is one: as if /dev/shm were full."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

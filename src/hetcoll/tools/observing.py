"""Looking on at a job that runs, as none of its ranks: finding its store, and asking all of its processes."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..config.env import Config
from ..errors import ArgumentError, AuthenticationError, HetcollError, InitError
from ..rendezvous.bootstrap import PORTS, find_store
from ..rendezvous.connections.announcing import Announced, announced, fetch_locally
from ..rendezvous.connections.auth import HANDSHAKE_SECONDS
from ..rendezvous.connections.sockets import spell_error
from ..rendezvous.control import ControlClient
from ..rendezvous.protocol.unique_id import UniqueId
from ..rendezvous.protocol.wire import ACTIVITY, U32, Op, unpack
from ..rendezvous.uplink import read_places

_FIND_SECONDS = 5.0
_FOLLOW_SECONDS, _PAUSE = 10.0, 0.1
_GLANCE = 1.0  # seconds for the port that was named, before those after it
_MOST_NAMED = 8


class Told(NamedTuple):
    """What a process of the job answered as `rank` of `group`; `answer` is None from one that did not."""

    group: bytes
    rank: int
    answer: Any


class Observer:
    """A connection to a job's store, which makes this process no rank of it. InitError where there is none."""

    def __init__(self, unique_id: UniqueId) -> None:
        self._control = _connect(unique_id, _FIND_SECONDS)
        self._successors: list[UniqueId] = []  # as the store told last

    def activity(self, seconds: float) -> list[Told]:
        """What all processes have done: ``health/activity.py`` says what each answers. As `survey`."""
        return self.survey(ACTIVITY, seconds)

    def survey(self, question: str, seconds: float) -> list[Told]:
        """What all processes of the job answer to `question` (`Questions.answers`) within so many seconds.

        InitError where the store does not answer, PeerLostError where it has ended or was lost.
        """
        successors, *rows = self._control.decide(Op.SURVEY, (json.dumps(question).encode(),), seconds)
        unique_id = self._control.unique_id
        self._successors = [replace(unique_id, addresses=read_places(each)) for each in unpack(successors)[1:]]
        told = []
        for group, rank, answer in map(unpack, rows):
            told.append(Told(group, U32.unpack(rank)[0], json.loads(answer[1:]) if answer else None))
        return sorted(told, key=lambda each: each[:2])

    def follow(self) -> None:
        """Go to the store that has taken the place of the one that was lost. InitError where none does in time."""
        deadline = time.monotonic() + _FOLLOW_SECONDS
        lost, problem = self._control.unique_id, InitError("")
        while time.monotonic() < deadline:
            here = [each for each in announced() if each.name.endswith(lost.job_id[:8].hex())]
            for number, place in enumerate((lost, *self._successors)):
                try:
                    self._control = _connect(_here(here[-1]) if here and number == 0 else place, _GLANCE)
                    return
                except InitError as error:
                    problem = error
            time.sleep(_PAUSE)
        raise problem

    def close(self) -> None:
        """End the connection."""
        self._control.close()


def _connect(unique_id: UniqueId, seconds: float) -> ControlClient:
    """A size of 1: straight to the store, whatever the job's size is."""
    return ControlClient(unique_id, 0, 1, seconds, group=None)


def observe(job: str | None, config: Config) -> Observer:
    """Look on at a job that runs.

    `job` is ``HOST:PORT``, where its rank 0 listens (MASTER_ADDR and MASTER_PORT), or the number of a process on this
    host: rank 0's, or that of its launcher. None: the one job of this user whose rank 0 is on this host. InitError
    where it is not found, AuthenticationError where the secret of `config` is not the job's, ArgumentError where `job`
    is neither, or does not say which of several.
    """
    endpoint = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+):(\d{1,5})", job or "")
    if endpoint and 0 < int(endpoint[2]) < 1 << 16:
        unique_id = _at(endpoint[1].strip("[]"), int(endpoint[2]), config)
    elif job is None or job.isdecimal():
        unique_id = _here(_choose(announced(), job))
    else:
        raise ArgumentError(
            f"JOB: wanted HOST:PORT of rank 0, such as gpu07:29500, or the number of its process here, got {job!r}"
        )
    return Observer(unique_id)


def _at(host: str, port: int, config: Config) -> UniqueId:
    """At the port that was named; where nothing of ours listens there, at those that rank 0 may have taken instead."""
    ports = range(port, min(port + PORTS, 1 << 16))
    try:
        return find_store([(host, port)], config, time.monotonic() + _GLANCE)
    except AuthenticationError:
        raise
    except InitError:
        with contextlib.suppress(InitError):
            return find_store([(host, each) for each in ports[1:]], config, time.monotonic() + _GLANCE)
        raise


def _choose(found: Sequence[Announced], job: str | None) -> Announced:
    """The first store of the process that was meant, which is that of all of its ranks."""
    first = {each.pid: each for each in reversed(found)}
    if job is not None:
        meant = [first[pid] for pid in sorted(first) if int(job) in _ancestry(pid)]
        if not meant:
            raise InitError(
                f"process {job} is no rank 0 of a job here, nor what started one: wanted one of "
                f"{_spell(list(first)) or 'none, since there is no job of this user whose rank 0 is on this host'}"
            )
        return meant[0]
    if not first:
        raise InitError(
            "no job of this user has its rank 0 on this host: wanted HOST:PORT of rank 0 (MASTER_ADDR and MASTER_PORT)"
        )
    if len(first) > 1:
        raise ArgumentError(f"JOB: wanted one of several jobs on this host: {_spell(list(first))}")
    return next(iter(first.values()))


def _ancestry(pid: int) -> list[int]:
    """A process, the one that started it, and so on."""
    found = []
    while pid > 1:
        found.append(pid)
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            break
    return found


def _spell(pids: Sequence[int]) -> str:
    parts = []
    for pid in sorted(pids)[:_MOST_NAMED]:
        words = ""
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        parts.append(f"{pid} ({words[:60]})" if words else str(pid))
    return ", ".join(parts) + (", ..." if len(pids) > _MOST_NAMED else "")


def _here(found: Announced) -> UniqueId:
    """The unique id, as the store tells processes of its user."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            sock.connect(found.name)
            return fetch_locally(sock, deadline)
    except TimeoutError as error:
        text = f"process {found.pid}, which hosts the job's store, did not answer: it is stopped or busy"
        raise InitError(text) from error
    except (OSError, HetcollError, struct.error) as error:
        raise InitError(f"the store of process {found.pid}: {spell_error(error)}") from error

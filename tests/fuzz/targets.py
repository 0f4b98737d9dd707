"""What is fuzzed: functions of bytes, each with inputs that it takes, and the only errors that it may raise."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import hetcoll._native as _native
from hetcoll.cli import compare
from hetcoll.config.variables import DeviceChoice, DeviceFilter, InterfaceFilter, parse_format
from hetcoll.errors import ArgumentError, CommunicationError
from hetcoll.health.desync_report import Answer, Called, LastWords, Wait
from hetcoll.links.edges import Address, pack_addresses, unpack_addresses
from hetcoll.links.introduction import Process, Reach, read_cards
from hetcoll.plan import cluster, tuned
from hetcoll.plan.algorithms import find
from hetcoll.rendezvous.connections.auth import CLAIM, Challenge, Response, Service, greeting_context
from hetcoll.rendezvous.protocol.columns import Column, pack_columns, unpack_columns
from hetcoll.rendezvous.protocol.past import Answered, Past
from hetcoll.rendezvous.protocol.routes import Entry as Way
from hetcoll.rendezvous.protocol.routes import extend_up, pack_down, pack_up, unpack_down, unpack_up
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.protocol.wire import U32, Frame, FrameReader, Op, Status, header, pack, unpack
from hetcoll.rendezvous.uplink import Entry, Kind, pack_places, read_places
from hetcoll.types import Collective

SECRET = bytes(range(32))


class Target(NamedTuple):
    """`take` is given any bytes. Errors of other kinds than `refusals` are defects."""

    take: Callable[[bytes], Any]
    inputs: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...]

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(*self.refusals):
            self.take(data)


def _read_frames(data: bytes) -> None:
    """A stream that is cut at some places, and what is in its frames."""
    reader = FrameReader()
    for at in range(0, len(data), 7):
        for frame in reader.feed(data[at : at + 7]):
            _ = frame.fields


def _judge(claim: bytes) -> None:
    answer = Challenge(SECRET, Service.STORE, b"here").judge(claim[: CLAIM.size].ljust(CLAIM.size, b"\0"))
    assert not answer.accepted, "nobody who does not know the secret is let in"


def _greet(greeting: bytes) -> None:
    greeting = greeting.ljust(len(_GREETING), b"\0")[: len(_GREETING)]
    greeting_context(greeting, Service.STORE)
    assert len(Response(SECRET, greeting).claim) == CLAIM.size


def _text(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda data: read(data.decode(errors="replace"))


def _of_file(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    """For what reads a file by its path."""

    def take(data: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            read(file.name)

    return take


def _columns(data: bytes) -> None:
    for column in unpack_columns(data, 3):
        assert len(column) == len(list(column)) == 3


def _plan(data: bytes) -> None:
    _native.bind_plan(data, 3, 0, 300, 300)


_GREETING = Challenge(SECRET, Service.STORE, b"here").greeting
_FRAME = Frame(Op.PUT, 0, 7, pack([b"key", b"value"]))
_CALLED = Called("allreduce(...)", "train.py:12")
_ANSWER = Answer(3, {2: _CALLED}, _CALLED, waits=(Wait(1, 0, True, 3, 4, 5, 6),), handed=((1, 0, 5, 6),))
_ANSWERED = {Op.AGREE: (Answered(U32.pack(1), Status.OK, b"\1"), Answered(U32.pack(2), Status.TIMEOUT, b"late"))}
_PAST = Past(b"world", 1, 3, True, 1, {2: "it died"}, b"verdict", {b"tag": b"told"}, _ANSWERED)
_ENTRY = Entry(Kind.MEMBER, b"t" * 16, 40, failed=(b"u" * 16,), addresses=(("::1", 4000),))
_NCCL_TESTS = (
    b"# Collective test starting: all_reduce_perf\n     8   2  float  sum  -1  9.1  0.0  0.0  0  9.0  0.0  0.0  0\n"
)
_CLUSTER = (
    b'[[hosts]]\nname = "h"\ncount = 2\nranks = 4\nnic = "25 GB/s"\n[network]\nlatency = "2 us"\n[slow]\n"h/0" = 2\n'
)
_TUNED = (
    b'[[measured]]\ncollective = "allreduce"\nhosts = [2]\ncores = 2\ntransport = "shm"\nbytes = [8, 64]\n'
    b"[measured.us]\nring = [1.0, 2.0]\n"
    b'[[measured]]\ncollective = "reduce"\nhosts = [2, 1]\nislands = '
    b'["cuda 1 on host 0, 1 on host 1", "hip 1 on host 0"]\n'
    b'cores = 2\ntransport = "mapped"\nbytes = [8]\nus = { tree = [1.0] }\n'
    b'[[network]]\nhosts = [1, 1]\ntransport = "tcp"\nlatency = "5 us"\noverhead = "3 us"\nbandwidth = "1 GB/s"\n'
)

TARGETS: dict[str, Target] = {
    "a stream of frames": Target(_read_frames, (header(_FRAME.op, _FRAME.body) + _FRAME.body,), (CommunicationError,)),
    "fields": Target(unpack, (_FRAME.body,), (CommunicationError,)),
    "columns": Target(_columns, (pack_columns([[b"a", b"bb", b"a"], [b"c"] * 3], 3, 1),), (CommunicationError,)),
    "a way up": Target(unpack_up, (pack_up(3, _FRAME), extend_up(9, pack_up(3, _FRAME))), (CommunicationError,)),
    "a way up, extended": Target(lambda data: extend_up(9, data), (pack_up(3, _FRAME),), (CommunicationError,)),
    "a way down": Target(
        unpack_down, (pack_down(Op.LEFT, 0, [Way((1, 2), 7, 9), Way((3,), 0, 0)], b"body"),), (CommunicationError,)
    ),
    "who enters": Target(Entry.read, (_ENTRY.pack(),), (CommunicationError,)),
    "places": Target(read_places, (pack_places((("127.0.0.1", 29500), ("::1", 1))),), (CommunicationError,)),
    "a group's past": Target(Past.read, (_PAST.pack(),), (CommunicationError,)),
    "a unique id": Target(
        UniqueId.from_bytes, (UniqueId((("h", 1),), bytes(16), SECRET).to_bytes(),), (ArgumentError,)
    ),
    "a unique id's text": Target(
        _text(UniqueId.parse), (str(UniqueId((("h", 1),), bytes(16), SECRET)).encode(),), (ArgumentError,)
    ),
    "a claim": Target(_judge, (Response(bytes(32), _GREETING).claim,), ()),
    "a greeting": Target(_greet, (_GREETING,), ()),
    "addresses": Target(
        unpack_addresses, (pack_addresses([Address("127.0.0.1", 4000, "lo", b"t" * 16)]),), (CommunicationError,)
    ),
    "cards": Target(
        lambda data: read_cards(Column([data], [0])),
        (Reach((), (), "none", (1000, 0), False, 64).telling().shared[0],),
        (CommunicationError,),
    ),
    "a process": Target(Process.read, (bytes(24) + b"host",), (CommunicationError,)),
    "a status report": Target(Answer.decode, (_ANSWER.encode(),), (CommunicationError,)),
    "last words": Target(LastWords.decode, (LastWords(7, {"?": {"0": 1}}).encode(),), (CommunicationError,)),
    "a plan": Target(
        _plan,
        tuple(find(Collective.ALLREDUCE, name).build(3, 1).encode() for name in ("ring", "tree")),
        (_native.PlanError,),
    ),
    "a cluster": Target(_text(lambda text: cluster.read(text, "file")), (_CLUSTER,), (ArgumentError,)),
    "what was measured": Target(_text(lambda text: tuned.read(text, "file")), (_TUNED,), (ArgumentError,)),
    "others' benchmarks": Target(
        _of_file(compare.read),
        (
            json.dumps({"rows": [{"op": "allreduce", "nbytes": 8, "place": "out", "time_us": 2.0}]}).encode(),
            _NCCL_TESTS,
        ),
        (ArgumentError,),
    ),
    "a device": Target(_text(DeviceChoice.parse), (b"rocm:1",), (ValueError,)),
    "interfaces": Target(_text(InterfaceFilter.parse), (b"^=eth0,lo",), (ValueError,)),
    "RDMA devices": Target(_text(DeviceFilter.parse), (b"=mlx5_0:1,mlx5_2",), (ValueError,)),
    "a format": Target(_text(parse_format), (b"bf16",), (ArgumentError,)),
}

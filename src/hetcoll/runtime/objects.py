"""Collectives and messages of Python objects: pickled, proved by the job's secret, and moved as bytes of host memory.

Unpickling runs what the sender wants, so what comes is unpickled only after its proof: an HMAC-SHA256 (RFC 2104) under
the job's secret over the communicator, the call, the sender and the bytes. A job without a secret of its own tells
whoever asks how to join it, so there objects are refused, unless HETCOLL_OBJECTS allows them.

All ranks first agree on the longest of the pickles, and then move pieces of it: as many bytes from each rank, of sizes
that come again, since a plan is bound for each size. The calls have labels, as those that make communicators do: they
run on host memory also where the ranks' arrays are on GPUs.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import calls
from ..calls import check_int, check_rank
from ..errors import ArgumentError, AuthenticationError, BufferTypeError
from ..health.verdicts import Kind
from .core import Core

LIMIT = 64 << 20
"""Bytes that an object's pickle has at most, where the call does not say."""

_LEAST, _MOST = 256, 1 << 20  # bytes of a piece: powers of two
_HEAD = struct.Struct("<Q32s")  # of what moves: the length of the pickle and its proof

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def broadcast(core: Core, obj: Any, root: int, limit: int, timeout: float | None) -> Any:
    """See `Communicator.broadcast_object`."""
    at = check_rank(root, core.size, "root")
    label = _begin(core, f"broadcast_object(root={at}", limit)
    mine = _pack(core, obj, label, core.rank, limit) if core.rank == at else b""
    whole = _padded(mine, _longest_of_root(core, label, at, len(mine), limit, timeout))
    for piece in _pieces(len(whole)):
        core.launch(replace(calls.broadcast(core.rank, core.size, whole[piece], at), label=label), False, timeout)
    return obj if core.rank == at else _unpack(core, whole.tobytes(), label, at)


def allgather(core: Core, obj: Any, limit: int, timeout: float | None) -> list[Any]:
    """See `Communicator.allgather_object`."""
    label = _begin(core, "allgather_object(", limit)
    mine = _pack(core, obj, label, core.rank, limit)
    lengths = _lengths(core, label, len(mine), limit, timeout)
    whole, found = _padded(mine, max(lengths)), [bytearray() for _ in lengths]
    for piece in _pieces(len(whole)):
        rows = np.empty((core.size, piece.stop - piece.start), np.uint8)
        call = calls.allgather(core.rank, core.size, whole[piece], rows)
        core.launch(replace(call, label=label), False, timeout)
        _collect(rows, lengths, piece, found)
    return [_unpack(core, each, label, rank) for rank, each in enumerate(found)]


def gather(core: Core, obj: Any, root: int, limit: int, timeout: float | None) -> list[Any] | None:
    """See `Communicator.gather_object`."""
    at = check_rank(root, core.size, "root")
    label = _begin(core, f"gather_object(root={at}", limit)
    mine = _pack(core, obj, label, core.rank, limit)
    lengths = _lengths(core, label, len(mine), limit, timeout)
    whole, found = _padded(mine, max(lengths)), [bytearray() for _ in lengths]
    for piece in _pieces(len(whole)):
        rows = np.empty((core.size if core.rank == at else 0, piece.stop - piece.start), np.uint8)
        call = calls.gather(core.rank, core.size, whole[piece], rows, at)
        core.launch(replace(call, label=label), False, timeout)
        if core.rank == at:
            _collect(rows, lengths, piece, found)
    return [_unpack(core, each, label, rank) for rank, each in enumerate(found)] if core.rank == at else None


def scatter(core: Core, objs: Sequence[Any] | None, root: int, limit: int, timeout: float | None) -> Any:
    """See `Communicator.scatter_object`."""
    at = check_rank(root, core.size, "root")
    label = _begin(core, f"scatter_object(root={at}", limit)
    rows: list[bytes] = []
    if core.rank == at:
        try:
            got: object = None if objs is None else len(objs)
        except TypeError:  # it has no length
            got = repr(objs)
        if objs is None or got != core.size:
            raise ArgumentError(f"objs: wanted {core.size} objects on the root, one a rank, got {got}")
        rows = [_pack(core, each, f"{label} to {rank}", at, limit) for rank, each in enumerate(objs)]
    longest = _longest_of_root(core, label, at, max(map(len, rows), default=0), limit, timeout)
    whole, mine = [_padded(row, longest) for row in rows], _padded(b"", longest)
    for piece in _pieces(len(mine)):
        send = np.stack([row[piece] for row in whole]) if whole else None
        call = calls.scatter(core.rank, core.size, send, mine[piece], at)
        core.launch(replace(call, label=label), False, timeout)
    return _unpack(core, mine.tobytes(), f"{label} to {core.rank}", at)


def send(core: Core, obj: Any, peer: int, limit: int, timeout: float | None) -> None:
    """See `Communicator.send_object`."""
    to = _other(core, peer)
    _begin(core, "send_object(", limit)
    frame = _pack(core, obj, f"message to {to}", core.rank, limit)
    for piece in _message(len(frame)):
        core.host.send_bytes(_padded(frame[piece], piece.stop - piece.start), to, core.seconds(timeout))


def recv(core: Core, peer: int, limit: int, timeout: float | None) -> Any:
    """See `Communicator.recv_object`."""
    origin = _other(core, peer)
    _begin(core, "recv_object(", limit)
    first, *_ = _message(_LEAST)
    part = np.empty(_LEAST, np.uint8)
    core.host.recv_bytes(part, origin, core.seconds(timeout))
    frame, length = bytearray(part.tobytes()), int(_HEAD.unpack_from(part.data)[0])
    for piece in _message(_HEAD.size + length):
        if piece == first:
            continue
        part = np.empty(piece.stop - piece.start, np.uint8)
        core.host.recv_bytes(part, origin, core.seconds(timeout))
        if length <= limit:  # else it is received and dropped: what comes after it is another message
            frame += part.tobytes()
    if length > limit:
        raise ArgumentError(f"limit: wanted {length} bytes or more for the object of rank {origin}, got {limit}")
    return _unpack(core, frame, f"message to {core.rank}", origin)


def _begin(core: Core, what: str, limit: int) -> str:
    """The label of a call: what all ranks must agree on. ArgumentError where objects are not allowed."""
    core.check_outside_group(lambda: f"{what})")
    core.host.check_usable()
    if check_int(limit, "limit") < 1:
        raise ArgumentError(f"limit: wanted bytes above 0, got {limit}")
    allowed = core.config.secret is not None if core.config.objects is None else core.config.objects
    if not allowed and (core.size > 1 or core.config.objects is False):
        why = "this job has no secret" if core.config.objects is None else "HETCOLL_OBJECTS says so"
        raise ArgumentError(
            f"{what.partition('(')[0]}: objects are refused, since {why} and unpickling runs what a sender wants:"
            " wanted HETCOLL_SECRET on all ranks (`hetcoll run` makes one), or HETCOLL_OBJECTS=1 where nobody else"
            " reaches their network"
        )
    return f"{what}{'' if what.endswith('(') else ', '}limit={limit})"


def _other(core: Core, peer: int) -> int:
    found = check_rank(peer, core.size, "peer")
    if found == core.rank:
        raise ArgumentError(f"peer: rank {found} is this rank; wanted another one")
    return found


def _proof(core: Core, label: str, rank: int, data: bytes | bytearray | memoryview) -> bytes:
    """Of the pickle `data` from `rank`."""
    proof = hmac.new(core.session.control.unique_id.secret, core.group, hashlib.sha256)
    proof.update(f"object {label} from {rank} ".encode())
    proof.update(data)
    return proof.digest()


def _pack(core: Core, obj: Any, label: str, rank: int, limit: int) -> bytes:
    """What moves of an object. BufferTypeError for one that cannot be pickled, ArgumentError for one too long."""
    try:
        data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle has no error of its own for all of it
        raise BufferTypeError(f"obj: this {type(obj).__name__} cannot be pickled: {error}") from error
    if len(data) > limit:
        raise ArgumentError(f"limit: wanted {len(data)} bytes or more for this {type(obj).__name__}, got {limit}")
    return _HEAD.pack(len(data), _proof(core, label, rank, data)) + data


def _unpack(core: Core, frame: bytes | bytearray, label: str, rank: int) -> Any:
    """The object that `rank` has packed; AuthenticationError, and the end of the communicator, where it has not."""
    length, proof = _HEAD.unpack_from(frame)
    data = memoryview(frame)[_HEAD.size : _HEAD.size + length]
    if not hmac.compare_digest(proof, _proof(core, label, rank, data)):
        raise _forged(core, rank)
    return pickle.loads(data)


def _forged(core: Core, rank: int) -> AuthenticationError:
    """The communicator ends. What to raise."""
    text = f"rank {core.rank} got an object in the name of rank {rank} that does not prove the job's secret"
    core.fail(Kind.ABORTED, text)
    return AuthenticationError(f"{text}; it was not unpickled")


def _lengths(core: Core, label: str, mine: int, limit: int, timeout: float | None) -> list[int]:
    """What each rank is about to move, in bytes."""
    rows = np.empty(core.size, np.int64)
    core.launch(calls.meeting(core.rank, label, np.array([mine]), rows), False, timeout)
    return [_believed(core, int(length), rank, limit) for rank, length in enumerate(rows)]


def _longest_of_root(core: Core, label: str, root: int, mine: int, limit: int, timeout: float | None) -> int:
    length = np.array([mine])
    core.launch(replace(calls.broadcast(core.rank, core.size, length, root), label=label), False, timeout)
    return _believed(core, int(length[0]), root, limit)


def _believed(core: Core, length: int, rank: int, limit: int) -> int:
    """`length` has no proof: no memory is taken for one that no rank within the limit has."""
    if not 0 <= length - _HEAD.size <= limit:
        raise _forged(core, rank)
    return length


def _pieces(nbytes: int, start: int = 0) -> Iterator[slice]:
    """Of at least so many bytes from `start` on: whole ones of the largest size, and a last one that is not."""
    while nbytes > 0:
        size = min(_MOST, max(_LEAST, 1 << (nbytes - 1).bit_length()))
        yield slice(start, start + size)
        start, nbytes = start + size, nbytes - size


def _message(nbytes: int) -> Iterator[slice]:
    """The pieces of a message: the first one, which says how long it is, has one size."""
    yield slice(0, _LEAST)
    yield from _pieces(nbytes - _LEAST, _LEAST)


def _padded(frame: bytes, nbytes: int) -> Bytes:
    """`frame`, and zeros after it, for pieces of `nbytes`."""
    whole = np.zeros(max((piece.stop for piece in _pieces(nbytes)), default=0), np.uint8)
    whole[: len(frame)] = np.frombuffer(frame, np.uint8)
    return whole


def _collect(rows: Bytes, lengths: Sequence[int], piece: slice, found: Sequence[bytearray]) -> None:
    """Add a piece of every rank's to what has come of it; zeros at its end are nobody's."""
    for row, length, whole in zip(rows, lengths, found, strict=True):
        whole += row[: max(0, length - piece.start)].tobytes()

"""Every error hetcoll raises.

Argument errors are `ValueError` or `TypeError` subclasses, raised before anything is sent. The rest are what a job
meets: they name ranks, operations and edges, and leave the communicator unusable except for `close`, `agree` and
`shrink`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MOST_TOLD = 1 << 16  # characters of a reason


class HetcollError(Exception):
    """Base class of everything raised on purpose."""


class ArgumentError(HetcollError, ValueError):
    """An argument has a value that cannot work: says what was wanted and what came."""


class BufferTypeError(HetcollError, TypeError):
    """An object that cannot serve as a buffer: wrong type, strided, read-only, unsupported dtype."""


class ClosedError(HetcollError):
    """The communicator was closed, or belongs to the parent of this forked process."""


class DeviceError(HetcollError):
    """A GPU's driver or compiler refused a call, or is not there: names the call and the reason.

    `code` is the driver's word for the error (``CUDA_ERROR_OUT_OF_MEMORY``), where it gave one.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class InitError(HetcollError):
    """The job did not come together: names the ranks that are missing or what could not be reached."""


class AuthenticationError(InitError):
    """A connection could not prove that it knows the job's secret."""


class PlanError(HetcollError, AssertionError):
    """A set of plans is wrong: says which rank and step, what was wanted and what was found.

    `rank` and `step` say where; `step` is None where no one step is at fault.
    """

    def __init__(self, message: str, rank: int = -1, step: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


class RegistrationError(HetcollError):
    """Memory could not be registered with a device, most often for a limit: says which, and what to do about it."""


class CommunicationError(HetcollError):
    """An operation failed after it had begun; the communicator is poisoned."""


class PeerLostError(CommunicationError):
    """A rank died or left while others needed it. `rank` names it."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveMismatchError(CommunicationError):
    """Ranks called different operations, or the same with different types, counts, roots or orders."""


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """An operation did not finish in time: says who is missing, where it stands and over which edge."""


class AbortedError(CommunicationError):
    """`abort()` was called here or on a peer."""


def parser(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that reads what other processes told. Where it fails, `what` they told came garbled: that is a
    CommunicationError, whatever went wrong."""

    def wrap(read: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(read)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return read(*args, **kwargs)
            except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise CommunicationError(f"{what} came garbled: {error}") from error

        return checked

    return wrap


def spell_told(text: str) -> str:
    """A program's own words as all ranks can be told them: they may be no UTF-8, as names of files, or hold a whole
    array."""
    return text[:_MOST_TOLD].encode(errors="backslashreplace").decode()


def spell_gone(rank: int, reason: str) -> str:
    """What became of a rank; an empty reason is that it left in order."""
    return f"rank {rank} was lost: {reason}" if reason else f"rank {rank} has left"


def spell_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 3, 5-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    many = len(runs) > 1 or len(runs[0]) > 1 if runs else False
    return ("ranks " if many else "rank ") + ", ".join("-".join(map(str, run)) for run in runs)

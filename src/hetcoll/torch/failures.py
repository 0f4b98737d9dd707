"""Errors that are both hetcoll's and torch's: scripts that catch `torch.distributed.DistBackendError` see them."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

import hetcoll


class BackendError(hetcoll.CommunicationError, dist.DistBackendError):
    """An operation failed after it had begun. Subclasses say in which way; all are what hetcoll raises elsewhere, too.

    The group is good for `abort` and `torch.distributed.destroy_process_group` only.
    """


class PeerLostError(hetcoll.PeerLostError, BackendError):
    """A rank died or left. `rank` names it, as one of the group."""


class CollectiveMismatchError(hetcoll.CollectiveMismatchError, BackendError):
    """Ranks called different operations, or the same with different types, counts, roots or orders."""


class CollectiveTimeoutError(hetcoll.CollectiveTimeoutError, BackendError):
    """An operation did not finish in time."""


class AbortedError(hetcoll.AbortedError, BackendError):
    """The group was aborted, here or on another rank."""


def translate(error: Exception) -> Exception:
    """`error` as one that is torch's as well; errors about arguments are torch's already: ValueError, TypeError."""
    if isinstance(error, BackendError) or not isinstance(error, hetcoll.CommunicationError | hetcoll.ClosedError):
        return error
    for kind in (PeerLostError, CollectiveMismatchError, CollectiveTimeoutError, AbortedError):
        if isinstance(error, kind.__bases__[0]):
            text = str(error)
            found = kind(f"a timeout has passed: {text}" if kind is CollectiveTimeoutError else text)
            if isinstance(found, PeerLostError) and isinstance(error, hetcoll.PeerLostError):
                found.rank = error.rank
            return found
    return BackendError(*error.args)


class _Translated(contextlib.AbstractContextManager[None]):
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, hetcoll.HetcollError) and (found := translate(error)) is not error:
            raise found from error


translated = _Translated()
"""Of a ``with`` block: raises hetcoll's errors as torch's."""

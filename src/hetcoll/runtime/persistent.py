"""Persistent operations: a call that is described once and started again and again, over what the fast path keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hetcoll._native import Persistent

from ..calls import Call
from ..work import Work
from .core import Core


def persistent(
    core: Core, checked: Callable[..., Call], method: Callable[..., Work], *words: Any, stream: object = None
) -> Persistent:
    """The operation of these words: `checked` makes its call, and `method` begins it where the fast path does not
    know it."""
    call = checked(core.rank, core.size, *words)
    core.host.check_usable()
    first, second = call.send or call.recv, call.recv or call.send
    assert first is not None
    assert second is not None
    key, host = call.key, first.device == "cpu"
    options = {"async_op": True} if host else {} if stream is None else {"stream": stream}
    slow = partial(method, *words, **options)
    return Persistent(core.engine, *(key or (0,) * 6), host and key is not None, first.ptr, second.ptr, slow)

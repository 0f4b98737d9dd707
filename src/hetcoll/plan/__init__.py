"""Plans: who sends what to whom, and when. Pure: nothing here knows an engine, a device or a network."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The words of plans have moved to `hetcoll.plan.ir`; their old place still knows them."""
    if name not in ("Buf", "Builder", "Local", "Op", "Plan", "Span", "Step", "cut"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    from . import ir

    warnings.warn(f"{__name__}.{name} has moved: import {ir.__name__}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(ir, name)

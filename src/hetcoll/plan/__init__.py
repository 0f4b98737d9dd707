"""Plans: who sends what to whom, and when. Pure: nothing here knows an engine, a device or a network."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

IN_IR = ("Buf", "Builder", "Local", "Op", "Plan", "Span", "Step", "cut")
"""What was here once, and is in `ir` now."""

if not _TYPE_CHECKING:  # to which any name would be one of ours, then

    def __getattr__(name: str) -> object:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text + f"; it is '{__name__}.ir.{name}' now" if name in IN_IR else text, name=name)

"""Pieces that one-sided messages scatter over a window."""

from __future__ import annotations

from hypothesis import strategies as st

PART = 30_000  # elements of each rank's window that one rank writes
Piece = tuple[int, int, int]  # in the source, in the part of the window, length


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Some that touch, some that overlap, some empty."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        n = draw(st.sampled_from([0, 1, 3, 10, 11, 500, 9000]))
        found.append((draw(st.integers(0, PART - n)), draw(st.integers(0, PART - n)), n))
    return found

"""Every parser and every listener under any bytes: the right error or the right value, nothing else, for everybody."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .targets import TARGETS


@st.composite
def spoiled(draw: st.DrawFn, inputs: tuple[bytes, ...]) -> bytes:
    """One of the inputs with some of its bytes changed, left out, doubled, or followed by another one's."""
    data = bytearray(draw(st.sampled_from(inputs)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from([0, 1, 1, 2, 4, 8, 40])))
        data[at:end] = draw(
            st.one_of(
                st.binary(max_size=end - at + 1),
                st.sampled_from([b"", b"\0" * (end - at), b"\xff" * (end - at), bytes(data[at:end]) * 2]),
            )
        )
    if draw(st.booleans()):
        data += draw(st.sampled_from(inputs))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_what_is_right_and_refuses_the_rest(name: str) -> None:
    target = TARGETS[name]
    for data in target.inputs:
        try:
            target.take(data)
        except Exception as error:
            raise AssertionError(f"it is to take {data!r}") from error

    @settings(max_examples=300)
    @given(st.one_of(spoiled(target.inputs), st.binary(max_size=200)))
    def fuzz(data: bytes) -> None:
        target(data)

    fuzz()

"""Every parser and every listener under any bytes: the right error or the right value, nothing else, for everybody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import DEADLINE
from ports import free_port
from thorough import HOUSE

from .listening import LISTENERS, quiet
from .strangers import besiege
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


@HOUSE
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_what_is_right_and_refuses_the_rest(name: str) -> None:
    target = TARGETS[name]
    for data in target.inputs:
        try:
            target.take(data)
        except Exception as error:
            raise AssertionError(f"it is to take {data!r}") from error

    @settings(max_examples=50, deadline=None)
    @given(st.one_of(spoiled(target.inputs), st.binary(max_size=200)))
    def fuzz(data: bytes) -> None:
        target(data)

    fuzz()


@pytest.mark.parametrize("name", LISTENERS)
def test_a_listener_serves_the_others_whatever_one_says(name: str) -> None:
    with quiet(), LISTENERS[name]() as take:
        take(b"")

        @settings(max_examples=30, deadline=None)
        @given(st.one_of(st.binary(max_size=200), st.lists(st.integers(0, 255), max_size=40).map(bytes)))
        def fuzz(data: bytes) -> None:
            take(data)

        fuzz()


def test_what_failed_can_be_given_again(tmp_path: Path) -> None:
    found = tmp_path / "crash"
    found.write_bytes(b"\xff" * 9)
    command = [sys.executable, "-m", "fuzz", "--only", "fields", "--again", str(found)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fields: ok")


@pytest.mark.thorough
def test_jobs_with_a_secret_start_and_run_through_a_siege(tmp_path: Path) -> None:
    outcome = besiege(6000, tmp_path, free_port())
    assert outcome.problems == []
    assert outcome.connections >= 6000
    assert outcome.rounds >= 15
    bytes_more, descriptors_more = outcome.grown
    assert bytes_more < 32 << 20, outcome  # what they have to prove, at most, and not a byte for each
    # Connections that have yet to prove anything, at the store and two communicators' links; and links under way.
    assert descriptors_more <= 3 * 128 + 64, outcome

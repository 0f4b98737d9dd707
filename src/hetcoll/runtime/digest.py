"""HETCOLL_DIGEST=DIRECTORY: what each blocking collective was given and what it made, as hashes, so that two runs of a
program can be compared (`hetcoll digest`).

Each rank of the job writes a file, ``rank-7.txt``, a line for each call: which communicator of this rank, counted from
0, which of its calls, the call, where it was made, and the hashes of its input and its result; a ``-`` stands where
there is none.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import NamedTuple

from ..calls import Call
from ..errors import ArgumentError
from ..health.status_report import call_site
from ..types import Collective
from .crosscheck import given, hash_of

_NONE = "-"
_RESULT = "its inputs are the same, its result differs"


class Line(NamedTuple):
    """One call of one rank. `number` counts the calls of its communicator, which itself is a number."""

    communicator: int
    number: int
    given: str
    made: str
    call: str
    site: str


class Digest:
    """One communicator's calls. `process` is this rank's number in the job, `rank` the one in the communicator."""

    _numbers = itertools.count()

    def __init__(self, directory: str, process: int, rank: int) -> None:
        self._communicator, self._number, self._rank = next(Digest._numbers), 0, rank
        self._given = _NONE
        self._path = _begin(directory, process)

    def before(self, call: Call, converts: bool) -> None:
        """Note what this rank gives."""
        source = given(call, self._rank)
        self._given = _NONE if source is None else hash_of(source, converts)

    def after(self, call: Call, converts: bool) -> None:
        """Note what it has got, and write the line."""
        result = call.recv or call.send
        made = _NONE if result is None or call.collective is Collective.BARRIER else hash_of(result, converts)
        line = Line(self._communicator, self._number, self._given, made, call.describe(), call_site())
        self._number += 1
        with open(self._path, "a") as file:
            file.write("\t".join(map(str, line)) + "\n")


def _begin(directory: str, process: int) -> str:
    """The path of this process's file, which all of its communicators share; empty at first."""
    path = os.path.join(directory, f"rank-{process}.txt")
    if path not in _begun:
        try:
            os.makedirs(directory, exist_ok=True)
            open(path, "w").close()
        except OSError as error:
            raise ArgumentError(
                f"HETCOLL_DIGEST: wanted a directory to write to, got {directory!r}: {error}"
            ) from error
        _begun.add(path)
    return path


_begun: set[str] = set()


def read(directory: Path) -> dict[int, list[Line]]:
    """The calls of each rank, in their order."""
    found: dict[int, list[Line]] = {}
    for path in directory.glob("rank-*.txt"):
        try:
            rank, whole = int(path.stem.removeprefix("rank-")), path.read_text()
        except (OSError, ValueError) as error:  # of a name without a number, and of bytes that are no text
            raise ArgumentError(f"{path}: wanted a file of HETCOLL_DIGEST: {error}") from error
        found[rank] = []
        for number, text in enumerate(whole.splitlines(), 1):
            words = text.split("\t")
            if len(words) != len(Line._fields) or not all(map(str.isdecimal, words[:2])):
                raise ArgumentError(f"{path}, line {number}: wanted a line of HETCOLL_DIGEST, got {text!r}")
            found[rank].append(Line(int(words[0]), int(words[1]), *words[2:]))
    if not found:
        raise ArgumentError(
            f"wanted a directory that HETCOLL_DIGEST named, got {str(directory)!r}: no rank-*.txt in it"
        )
    return found


def first_difference(one: dict[int, list[Line]], other: dict[int, list[Line]]) -> str:
    """The first call that differs between two runs, and on which ranks; nothing where none does.

    The first is the one with the fewest calls before it on its rank. Where some ranks' inputs to it differ, the others'
    results do for that reason.
    """
    if one.keys() != other.keys():
        return f"one run had ranks {sorted(one)}, the other {sorted(other)}"
    found: list[tuple[int, bool, int, str, Line]] = []
    for rank in sorted(one):
        mine, theirs = one[rank], other[rank]
        for index, (a, b) in enumerate(itertools.zip_longest(mine, theirs)):
            what = _difference(a, b)
            if what:
                found.append((index, what == _RESULT, rank, what, a or b))
                break
    if not found:
        return ""
    index, _, _, what, line = min(found, key=lambda entry: entry[:3])
    ranks = [rank for at, _, rank, said, _ in found if (at, said) == (index, what)]
    where = f"communicator {line.communicator}, call {line.number}, {line.call} at {line.site}"
    return f"{where}: {what} (rank {', '.join(map(str, ranks))})"


def _difference(a: Line | None, b: Line | None) -> str:
    if a is None or b is None:
        return f"only the {'second' if a is None else 'first'} run made it"
    if a.call != b.call:
        return f"the second run called {b.call} at {b.site}"
    if a.given != b.given:
        return "its input differs"
    return _RESULT if a.made != b.made else ""

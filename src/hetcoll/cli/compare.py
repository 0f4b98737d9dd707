"""What `hetcoll perf --compare` reads: results of perf itself, nccl-tests, osu-micro-benchmarks and PARAM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import ArgumentError
from .report import Row, human_size


class Known(NamedTuple):
    """One measurement that somebody else made. `op` is "" where its file does not say it, `place` is "" for both.
    `share`: the bytes are those of one rank's part, or of one pair's."""

    op: str
    nbytes: int
    place: str
    time_us: float
    share: bool = False


_SPELLED = {
    "all_reduce": "allreduce", "all_gather": "allgather", "all_gather_base": "allgather", "bcast": "broadcast",
    "reduce_scatter_base": "reduce_scatter", "reducescatter": "reduce_scatter", "all_to_all": "alltoall",
    "all_to_allv": "alltoallv", "all_to_all_single": "alltoall", "all-to-all": "alltoall", "all-to-allv": "alltoallv",
    "ibcast": "broadcast", "latency": "pingpong",
}  # fmt: skip
_SHARES = frozenset({"allgather", "gather", "scatter", "alltoall", "allgatherv", "alltoallv"})  # to OSU
# Its own name in the first lines, or in those of newer versions ("Collective test starting: all_reduce_perf").
_NCCL_NAME = re.compile(r"\b(\w+?)_perf\b")
_OSU_NAME = re.compile(r"^#\s*OSU (?:MPI|NCCL|RCCL)[\w-]* (\S+) .*\bTest\b")


def read(path: str) -> list[Known]:
    """The measurements in a file.

    Raises
    ------
    ArgumentError
        It cannot be read, or is of none of the four.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--compare: wanted a readable file, got {path}: {error}") from None
    try:
        found = list(_reader(text)(text))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ArgumentError(f"--compare: {path}: {type(error).__name__}: {error}") from None
    if not found:
        raise ArgumentError(
            "--compare: wanted JSON of hetcoll perf or what nccl-tests, osu-micro-benchmarks or PARAM print,"
            f" got {path}, which has no measurement of theirs"
        )
    return found


def _reader(text: str) -> Callable[[str], Iterator[Known]]:
    if text.lstrip().startswith("{"):
        return _of_perf
    if "COMMS-RES" in text:
        return _of_param
    return _of_osu if re.search(r"^# OSU ", text, re.MULTILINE) else _of_nccl_tests


def _of_perf(text: str) -> Iterator[Known]:
    for row in json.loads(text)["rows"]:
        yield Known(str(row["op"]), int(row["nbytes"]), str(row["place"]), float(row["time_us"]))


def _of_nccl_tests(text: str) -> Iterator[Known]:
    """``size count type redop root  time algbw busbw #wrong  time algbw busbw #wrong``; some tests lack columns
    between the type and the times, which are counted from the end."""
    op = ""
    for line in text.splitlines():
        if line.startswith("#") or not line[:1].isspace():
            named = _NCCL_NAME.search(line)
            op = _plain(named.group(1)) if named else op
            continue
        words = line.split()
        if len(words) < 11 or not words[0].isdecimal():
            continue
        for place, time in (("out", words[-8]), ("in", words[-4])):
            if time != "N/A":
                yield Known(op, int(words[0]), place, float(time))


def _of_osu(text: str) -> Iterator[Known]:
    """``# OSU MPI Allreduce Latency Test``, then size and average latency in us. Bandwidth tests have MB/s and many
    messages in flight, which is no time of a call."""
    op, timed = "", False
    for line in text.splitlines():
        named = _OSU_NAME.match(line)
        if named:
            op, timed = _plain(named.group(1)), False
        elif line.startswith("# Size"):
            timed = "atency" in line
        words = line.split()
        if timed and len(words) >= 2 and words[0].isdecimal():
            yield Known(op, int(words[0]), "", float(words[1]), op in _SHARES)


def _of_param(text: str) -> Iterator[Known]:
    """``COMMS-RES-<op>-<type><tag>  total size, elements a rank, time p50 p75 p95 min max, algbw, busbw``. With --pair
    the elements of the other collective stand before the times."""
    time = 4 if "nElementsPairPerRank" in text else 3
    for line in text.splitlines():
        words = line.split()
        if words and words[0].startswith("COMMS-RES-") and len(words) >= 9 and words[1].isdecimal():
            yield Known(_plain(words[0].split("-")[2]), int(words[1]), "", float(words[time]))


def _plain(name: str) -> str:
    name = name.lower().removeprefix("mpi_")
    return _SPELLED.get(name, name)


def lines(rows: Sequence[Row], known: Sequence[Known]) -> list[str]:
    """A comment line for each row that the other has measured as well; above 1 this run is faster."""
    if not known:
        return []
    found = []
    for row in rows:
        for other in known:
            nbytes = other.nbytes * (row.ranks if other.share else 1)
            same = (other.op in ("", row.op), nbytes == row.nbytes, other.place in ("", row.place))
            if all(same) and row.time_us > 0:
                found.append(
                    f"# {row.op} {human_size(row.nbytes)} {row.place}: {row.time_us:.2f} us, was "
                    f"{other.time_us:.2f} us: {other.time_us / row.time_us:.2f} times as fast"
                )
                break
    head = f"# compared: {len(found)} of {len(rows)} measurements"
    return [head, *found]

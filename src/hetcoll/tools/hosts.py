"""The hosts of a job: `--hosts` and hostfiles, in the syntax of Open MPI's and MPICH's."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ArgumentError

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.%]+\w*\]|[^\s:\[\]]+)(?::(?P<ranks>\d+))?")


def read_hosts(text: str, ranks: int) -> list[tuple[str, int]]:
    """``a:2,b,[fd00::1]:4``: each host and its number of ranks, `ranks` where it has none of its own."""
    return [_host(part.strip(), ranks, f"--hosts {text}") for part in text.split(",")]


def read_hostfile(path: Path, ranks: int) -> list[tuple[str, int]]:
    """A host a line: ``a``, ``a:2`` (MPICH) or ``a slots=2`` (Open MPI); ``#`` begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--hostfile: wanted a readable file, got {str(path)!r}: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            text = re.sub(r"\s+slots=", ":", " ".join(words))
            hosts.append(_host(text, ranks, f"{path}, line {number}"))
    if not hosts:
        raise ArgumentError(f"--hostfile: wanted a host a line, got {str(path)!r}, which has none")
    return hosts


def _host(text: str, ranks: int, where: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if not found or text.startswith("-"):
        raise ArgumentError(f"{where}: wanted a host and its number of ranks, such as gpu07:8, got {text!r}")
    count = int(found["ranks"]) if found["ranks"] else ranks
    if count < 1:
        raise ArgumentError(f"{where}: wanted 1 rank or more on {found['name']}, got {count}")
    return found["name"].strip("[]"), count

"""The file with the times by which algorithms are chosen: HETCOLL_TUNED's, or what `hetcoll tune` kept here."""

from __future__ import annotations

import hashlib
import os
from functools import cache

from ..errors import ArgumentError

_HEAD = 4096  # bytes of /proc/cpuinfo, which has much to say of many processors
_NAMES = ("model name", "Model", "cpu model")
_NUMBERS = ("CPU implementer", "CPU part")  # of those that have no name there


def processor() -> str:
    """The processor's name as /proc/cpuinfo has it, or its numbers there, else the architecture's."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", "rb") as file:
            for line in file.read(_HEAD).decode(errors="replace").splitlines():
                key, _, value = line.partition(":")
                found.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # the architecture has to do
    named = next((found[key] for key in _NAMES if found.get(key)), "")
    return named or " ".join(found[key] for key in _NUMBERS if key in found) or os.uname().machine


def hardware() -> str:
    """The processors of this host, in words; what is measured on one such host holds for another."""
    return f"{os.cpu_count()} x {processor()}"


def place(kept: str) -> str:
    """Where what was measured on such hosts is kept, in the directory `kept` (`Config.cache`)."""
    return os.path.join(kept, f"tuned-{hashlib.blake2b(hardware().encode(), digest_size=6).hexdigest()}.toml")


@cache
def load(given: str | None, kept: str | None) -> tuple[str, str]:
    """A file's text and its name, both empty where there is none. `given` is HETCOLL_TUNED, `kept` as in `place`.

    Raises
    ------
    ArgumentError
        `given` cannot be read.
    """
    if given == "none" or (given is None and kept is None):
        return "", ""
    path = place(kept or "") if given is None else given
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(), path
    except (OSError, UnicodeDecodeError) as error:
        if given is None:
            return "", ""  # nobody has tuned here, or this user may not see it
        raise ArgumentError(f"HETCOLL_TUNED: wanted a readable file, or none, got {given!r}: {error}") from None

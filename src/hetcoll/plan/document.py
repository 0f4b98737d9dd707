"""TOML that people write and review: whatever is wrong in it is named with its line and with what was wanted."""

from __future__ import annotations

import re
import sys
import tomllib
from typing import Any, NoReturn

from ..errors import ArgumentError

_UNITS = {
    "bandwidth": {
        "B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
        "Kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "Tbit/s": 125e9,
    },
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "size": {"B": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "": 1.0},
}  # fmt: skip
_WANTED = {
    "bandwidth": 'a bandwidth in a string, such as "25 GB/s" or "10 Gbit/s"',
    "time": 'a time in a string, such as "2.5 us"',
    "size": 'bytes, such as 4096 or "512M"',
    "count": "a whole number from 0 on",
    "some": "a whole number from 1 on",
    "factor": "a number above 0",
    "part": "a number from 0 to 1",
    "islands": 'each place on a host once in a string, islands apart by |, such as "0,1|2,3"',
    "name": "letters, digits, '-' and '_' in a string",
}
_MOST = sys.float_info.max
_QUANTITY = re.compile(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*([A-Za-z/]*)\s*")


class Document:
    """A file's tables. `changes` are ``KEY=VALUE`` that hold instead of what the file says."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        try:
            self.tables: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ArgumentError(f"{name}: {error}") from None

    def refuse(self, path: tuple[str | int, ...], problem: str) -> NoReturn:
        """ArgumentError at the line of a key, or of the table that lacks it."""
        line = self._line(path)
        raise ArgumentError(f"{self.name}{f', line {line}' if line else ''}: {_spell(path)}: {problem}")

    def read(self, path: tuple[str | int, ...], kind: str, value: object) -> Any:
        """What a value means, in bytes and seconds; `kind` says what it has to be."""
        found: Any
        if kind in _UNITS:
            found = self._quantity(kind, value)
        elif kind in ("count", "some"):
            whole = value if isinstance(value, int) and not isinstance(value, bool) else -1
            found = whole if whole >= (kind == "some") else None
        elif kind in ("factor", "part"):
            real = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
            number = float(real) if abs(real) <= _MOST else -1.0
            right = number > 0 if kind == "factor" else 0 <= number <= 1
            found = number if right else None
        elif kind == "islands":
            words = [part.split(",") for part in value.split("|")] if isinstance(value, str) else [[""]]
            numbers = all(word.strip().isdecimal() for part in words for word in part)
            found = tuple(tuple(map(int, part)) for part in words) if numbers else None
        elif kind == "name":
            found = value if isinstance(value, str) and re.fullmatch(r"[\w-]+", value) else None
        else:
            choices = kind.split("|")
            found = value if value in choices else None
            if found is None:
                self.refuse(path, f"wanted {' or '.join(map(repr, choices))}, got {value!r}")
        if found is None:
            self.refuse(path, f"wanted {_WANTED[kind]}, got {value!r}")
        return found

    def table(self, path: tuple[str | int, ...], given: object, keys: dict[str, str]) -> dict[str, Any]:
        """A table's values by key; `keys` says of each what it has to be."""
        if not isinstance(given, dict):
            self.refuse(path, f"wanted a table of {', '.join(keys)}, got {given!r}")
        for key in given:
            if key not in keys:
                self.refuse((*path, key), f"is no key here: there are {', '.join(keys)}")
        return {key: self.read((*path, key), keys[key], value) for key, value in given.items()}

    def change(self, change: str) -> None:
        """Let ``KEY=VALUE`` hold. KEY is a path with dots; of tables in a list, one by its ``name``.

        Raises
        ------
        ArgumentError
            It has another form, or there is no such table.
        """
        key, equals, word = change.partition("=")
        *outer, last = key.strip().split(".")
        if not equals or not last:
            raise ArgumentError(f"wanted KEY=VALUE, such as hosts.NAME.count=0, got {change!r}")
        at: Any = self.tables
        for part in outer:
            if isinstance(at, list):
                found = next((one for one in at if isinstance(one, dict) and one.get("name") == part), None)
            else:
                found = at.setdefault(part, {}) if isinstance(at, dict) else None
            if found is None:
                raise ArgumentError(f"{change!r}: {self.name} has no table called {part!r} there")
            at = found
        if not isinstance(at, dict):
            raise ArgumentError(f"{change!r}: wanted the name of one table of {'.'.join(outer)}")
        try:
            at[last] = tomllib.loads(f"x = {word}")["x"]
        except tomllib.TOMLDecodeError:
            at[last] = word.strip()
        self.name = f"{self.name} with {change}" if " with " not in self.name else f"{self.name} and {change}"

    def _quantity(self, kind: str, value: object) -> float | None:
        if kind == "size" and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return float(value)
        found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if found is None or found[2] not in _UNITS[kind]:
            return None
        try:
            number = float(found[1]) * _UNITS[kind][found[2]]
        except ValueError:
            return None
        return number if number <= _MOST and (number > 0 or kind != "bandwidth") else None

    def _line(self, path: tuple[str | int, ...]) -> int:
        """Where a key is given, or its table begins; 0 where neither is in the file."""
        tables: dict[str, int] = {}
        here: tuple[str | int, ...] = ()
        best = (0, 0)
        for number, text in enumerate(self.text.splitlines(), 1):
            head = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", text)
            entry = re.match(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*=""", text)
            if head:
                here = tuple(part.strip(" \"'") for part in head[2].split("."))
                if head[1] == "[[":
                    tables[head[2]] = tables.get(head[2], -1) + 1
                    here = (*here, tables[head[2]])
                found = here
            elif entry:
                found = (*here, next(part for part in entry.groups() if part is not None))
            else:
                continue
            if path[: len(found)] == found:
                best = max(best, (len(found), number))
        return best[1]


def _spell(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in path)

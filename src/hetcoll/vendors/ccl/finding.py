"""Which of a vendor's libraries to open: the first that opens, looked for once a process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator

from ...errors import DeviceError
from .library import Library


def loaded(*names: str) -> Iterator[str]:
    """Those libraries that the process has loaded already."""
    for name in names:
        try:
            ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        yield name


class Finder:
    """Opens one of the `candidates`, which are paths or names for the loader, at the first question."""

    def __init__(self, name: str, candidates: Callable[[], Iterable[str]], install: str) -> None:
        self._name, self._candidates, self._install = name, candidates, install
        self._found: Library | str | None = None

    def why_not(self) -> str | None:
        """Why it cannot be used here; None when it can."""
        found = self._find()
        return found if isinstance(found, str) else None

    def library(self) -> Library:
        """The library. DeviceError where `why_not` says why."""
        found = self._find()
        if isinstance(found, str):
            raise DeviceError(found)
        return found

    def _find(self) -> Library | str:
        if self._found is None:
            self._found = self._open()
        return self._found

    def _open(self) -> Library | str:
        reasons: list[str] = []
        for path in self._candidates():
            try:
                return Library(self._name, path)
            except DeviceError as error:
                reasons.append(str(error))
        return f"{reasons[0] if reasons else f'there is no {self._name}'}: {self._install}"

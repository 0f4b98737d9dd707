"""Where compiled kernels stay between processes."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from ....config.env import configuration

log = logging.getLogger("hetcoll")

_DIGEST = 32  # bytes in front of the data


class Cache:
    """Files of a directory, by name; each appears as a whole or not at all, whoever else writes it, and bears a digest:
    a driver is not told how long an image is, and reads past the end of a torn one.

    What lies there runs on a GPU as it is, so a directory that others can write to is not used. A cache that cannot be
    used costs time and nothing else: it is said once, as a warning.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._broken = False

    def get(self, key: str) -> bytes | None:
        """What was put under `key`, or None."""
        if not self._usable():
            return None
        try:
            kept = (self._directory / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(f"cannot be read ({error.strerror})")
            return None
        digest, data = kept[:_DIGEST], kept[_DIGEST:]
        if hashlib.sha256(data).digest() != digest:
            log.warning("%s in %s is damaged: it is made anew", key, self._directory)
            return None
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`, in place of what was there."""
        if not self._usable():
            return
        try:
            descriptor, path = tempfile.mkstemp(dir=self._directory, prefix=".")
            try:
                with open(descriptor, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                os.replace(path, self._directory / key)
            except BaseException:
                os.unlink(path)
                raise
        except OSError as error:
            self._give_up(f"cannot be written ({error.strerror})")

    def _usable(self) -> bool:
        if self._broken:
            return False
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._directory.stat()
        except OSError as error:
            self._give_up(f"cannot be made ({error.strerror})")
            return False
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self._give_up("can be written to by others")
            return False
        return True

    def _give_up(self, why: str) -> None:
        self._broken = True
        log.warning("%s %s: every process compiles its GPU kernels anew (HETCOLL_CACHE)", self._directory, why)


def kept() -> Cache | None:
    """The cache that the environment asks for."""
    directory = configuration().cache
    return Cache(Path(directory)) if directory else None

"""Settings that hold for the whole process."""

from __future__ import annotations

import logging

import hetcoll._native as _native

from ..errors import ArgumentError, InitError
from .env import Config


class _Own(logging.StreamHandler):  # type: ignore[type-arg]
    """Lines on stderr, for programs that have set up no logging, by now or later: theirs would say each line again."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def configure(config: Config) -> None:
    """Set up logging and the kernels' instruction set. InitError where HETCOLL_TLS has no OpenSSL."""
    log = logging.getLogger("hetcoll")
    level = {"none": logging.CRITICAL, "warn": logging.WARNING, "info": logging.INFO}.get(config.debug, logging.DEBUG)
    if config.debug != "warn" and log.level == logging.NOTSET:  # else the program has set it
        log.setLevel(level)
        if config.debug != "none" and not log.handlers:
            log.addHandler(_Own())
    if config.tls:
        try:
            log.info("HETCOLL_TLS: %s", _native.tls_library())
        except RuntimeError as error:
            raise InitError(f"HETCOLL_TLS: {error}") from error
    if config.isa is not None and not _native.set_kernel_isa(config.isa):
        raise ArgumentError(f"HETCOLL_ISA: wanted an instruction set that this processor has, got {config.isa!r}")

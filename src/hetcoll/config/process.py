"""Settings that hold for the whole process."""

from __future__ import annotations

import logging

import hetcoll._native as _native

from ..errors import ArgumentError
from .env import Config


def configure(config: Config) -> None:
    """Set up logging and the kernels' instruction set."""
    log = logging.getLogger("hetcoll")
    level = {"none": logging.CRITICAL, "warn": logging.WARNING, "info": logging.INFO}.get(config.debug, logging.DEBUG)
    if config.debug != "warn" and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(level)
    if config.isa is not None and not _native.set_kernel_isa(config.isa):
        raise ArgumentError(f"HETCOLL_ISA: wanted an instruction set that this processor has, got {config.isa!r}")

"""Finding pyverbs, rdma-core's own Python binding: that of the environment, else the distribution's.

Two versions of it are supported: 44, Debian 12's ``python3-pyverbs``, and 59, the package index's ``pyverbs``. What is
used of them is the same in both. Constants are those of infiniband/verbs.h, since the modules that hold them differ.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import HetcollError

DISTRIBUTION = "/usr/lib/python3/dist-packages"
"""Where Debian and Ubuntu put modules for their own interpreter, which others of the same version can load as well."""

_INSTALL = "apt install python3-pyverbs (Debian 12, Python 3.11), or pip install 'hetcoll[rdma]'"


class UnavailableError(HetcollError):
    """RDMA, or a part of it, cannot be used here: says why, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of pyverbs that are used, and the folder that they come from.

    `error` is what its calls raise (its own class, which says errno in words). `poses`: 44 hands out a pointer, such as
    ``PD.pd``, as if it were a Python object, which nothing must touch; 59 its number.
    """

    device: Any
    pd: Any
    mr: Any
    error: type[Exception]
    origin: str
    poses: bool


@functools.cache
def load() -> Library:
    """pyverbs.

    Raises
    ------
    UnavailableError
        It is not installed, is for another Python, or lacks libibverbs.
    """
    try:
        with _logging_left_alone():
            if importlib.util.find_spec("pyverbs") is None and not _borrow():
                raise UnavailableError(f"pyverbs is not installed: {_INSTALL}")
            poses = importlib.util.find_spec("pyverbs.enums") is not None  # libibverbs_enums in 59
            parts = [importlib.import_module(f"pyverbs.{name}") for name in ("device", "pd", "mr", "pyverbs_error")]
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UnavailableError(f"pyverbs cannot be loaded by Python {version} ({error}): {_INSTALL}") from error
    device, pd, mr, errors = parts
    return Library(device, pd, mr, errors.PyverbsError, str(device.__file__).rpartition("/")[0], poses)


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """pyverbs configures the root logger when it is imported, which is the program's business."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _borrow() -> bool:
    """Make the distribution's pyverbs importable, and nothing else of what lies beside it."""
    spec = importlib.machinery.PathFinder.find_spec("pyverbs", [DISTRIBUTION])
    if spec is None or spec.loader is None:
        return False
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["pyverbs"]
        raise
    return True

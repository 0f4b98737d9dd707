"""Algorithms of packages that are installed beside this one. Their metadata names the modules that register them:

    [project.entry-points."hetcoll.algorithms"]
    star = "mypackage.star"

Whatever chooses among algorithms loads them first. All ranks of a job have the same packages, as they have the same
version of this one; where they have not, and choose different algorithms, that is a CollectiveMismatchError.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cache

from ...errors import ArgumentError

GROUP = "hetcoll.algorithms"


@cache
def load() -> None:
    """Import what is installed, once. ArgumentError for an entry point that cannot be loaded."""
    if not _any():
        return
    from importlib.metadata import entry_points  # 0.05 s, which jobs without own algorithms do not spend

    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # whatever the module does at its import
            package = "?" if entry.dist is None else entry.dist.name
            raise ArgumentError(
                f"the entry point {entry.name} = {entry.value!r} ({GROUP}) of the package {package} cannot be loaded:"
                f" {type(error).__name__}: {error}"
            ) from error


def _any() -> bool:
    """Whether some package on the path may have such an entry point: the metadata's files are looked at directly."""
    for folder in sys.path:
        with contextlib.suppress(OSError):  # what is no folder
            for name in os.listdir(folder or "."):
                if name.endswith((".dist-info", ".egg-info")) and _names_ours(os.path.join(folder, name)):
                    return True
    return False


def _names_ours(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "entry_points.txt"), "rb") as file:
            return GROUP.encode() in file.read()
    except OSError:
        return False

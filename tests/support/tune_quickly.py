"""`hetcoll` for ``python tune_quickly.py tune ...``, whose ranks measure a part, two turns of two algorithms of three
collectives, and keep it on a machine that is busy, too."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

from hetcoll.cli import main, tuning
from hetcoll.tools import launch
from hetcoll.types import Collective

_open, _run = tuning._open_on_gpus, launch.run


@functools.wraps(_open)
def _few(*args: Any) -> dict[Collective, tuning.Open]:
    return {kind: one._replace(names=one.names[:2]) for kind, one in _open(*args).items()}


@functools.wraps(_run)
def _likewise(command: Sequence[str], *args: Any, **options: Any) -> int:
    assert command[:3] == [sys.executable, "-m", "hetcoll"]
    return _run([sys.executable, __file__, *command[3:]], *args, **options)


if __name__ == "__main__":
    tuning._TURNS, tuning.KINDS = 2, (Collective.ALLREDUCE, Collective.BROADCAST, Collective.REDUCE)
    tuning._UNLIKE = math.inf
    tuning._open_on_gpus, launch.run = _few, _likewise
    sys.exit(main())

"""HETCOLL_REPLACE: groups that ask for another backend are made by this one, and still say what was asked for.

torch looks a group's backends up in a `BackendConfig`, once, where it makes the group. Ours answers with hetcoll's name
there and with the script's words everywhere else, so `torch.distributed.get_backend` is what the script expects.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .names import DEVICES, NAME

_NCCL_TIMEOUT = timedelta(minutes=10)  # torch's own default, which builds without NCCL do not have


def replace(backends: Collection[str]) -> None:
    """Take the place of these backends ("nccl", "gloo") in all groups that are made from now on."""
    theirs = distributed_c10d.BackendConfig

    class BackendConfig(theirs):  # type: ignore[misc, valid-type]
        def get_device_backend_map(self) -> dict[str, Any]:
            asked: dict[str, Any] = super().get_device_backend_map()
            if not any(name in backends for name in asked.values()):
                return asked
            kept = {device: name for device, name in asked.items() if name not in backends}
            return dict.fromkeys(DEVICES, NAME) | kept

    distributed_c10d.BackendConfig = BackendConfig
    if "nccl" in backends:
        _pretend_nccl()
    if "gloo" in backends:
        distributed_c10d._GLOO_AVAILABLE = True


def refuse(reason: Exception) -> None:
    """HETCOLL_REPLACE makes no sense: whoever makes a group is told so, whatever backend it is to have."""

    class BackendConfig(distributed_c10d.BackendConfig):
        def __init__(self, *_: Any) -> None:
            raise reason

    distributed_c10d.BackendConfig = BackendConfig


def _pretend_nccl() -> None:
    """Scripts look whether torch was built with NCCL before they ask for it."""
    distributed_c10d._NCCL_AVAILABLE = True
    if not isinstance(distributed_c10d.default_pg_nccl_timeout, timedelta):
        distributed_c10d.default_pg_nccl_timeout = _NCCL_TIMEOUT
    if not hasattr(distributed_c10d, "ProcessGroupNCCL"):
        # torch asks of objects whether they are one, where NCCL is available. None is.
        distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = NoProcessGroupNCCL


class NoProcessGroupNCCL:
    """Stands for a class that this build of torch lacks."""

    class Options:
        """Accepted as `pg_options`. Nothing in it concerns hetcoll."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = _NCCL_TIMEOUT

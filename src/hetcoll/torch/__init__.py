"""PyTorch: `torch.distributed` on hetcoll, for CPU, CUDA and ROCm tensors.

Where both packages are installed, ``import torch`` registers the backend ``hetcoll``:

    torch.distributed.init_process_group("hetcoll")

A job that says "nccl" or "gloo" runs on hetcoll unchanged under ``HETCOLL_REPLACE=nccl,gloo`` or
``hetcoll run --torch``. `docs/torch.md` says what is supported, `hetcoll.torch.balance` serves ranks of unequal speed,
`reshard` moves tensors from one layout to another.

This module itself imports neither torch nor the rest of the package: it is loaded by every ``import torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layouts import layout, reshard, reshard_all
    from .options import Options
    from .process_group import HetcollProcessGroup

__all__ = ["HetcollProcessGroup", "Options", "layout", "register", "reshard", "reshard_all"]


def register() -> None:
    """Make the backend known to torch. Called by ``import torch`` (entry point ``torch.backends``); twice is fine."""
    import torch.distributed as dist

    if dist.is_available() and "HETCOLL" not in dist.Backend._plugins:
        from .registry import install

        install()


def __getattr__(name: str) -> object:
    if name == "HetcollProcessGroup":
        from .process_group import HetcollProcessGroup

        return HetcollProcessGroup
    if name == "Options":
        from .options import Options

        return Options
    if name in ("layout", "reshard", "reshard_all"):
        from . import layouts

        return getattr(layouts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

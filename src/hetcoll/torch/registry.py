"""How torch comes to know the backend: its name, what makes a group, and under HETCOLL_REPLACE whose place it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .. import ArgumentError
from ..config.env import replaced_backends
from .names import DEVICES, NAME

if TYPE_CHECKING:
    from .process_group import HetcollProcessGroup


def install() -> None:
    """Register the backend; replace others where HETCOLL_REPLACE says so."""
    dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=DEVICES)
    try:
        replaced = replaced_backends()
    except ArgumentError as error:  # programs that make no group must be able to import torch
        from .replace import refuse

        refuse(error)
    else:
        if replaced:
            from .replace import replace

            replace(replaced)
    from . import wrappers

    wrappers.install()


def make_group(options: Any, ours: object = None) -> HetcollProcessGroup:
    """What `torch.distributed.new_group` and `init_process_group` call, on all ranks of the group. `ours` is what
    scripts gave as `pg_options`."""
    from .process_group import HetcollProcessGroup  # not before a group is wanted: it takes time

    return HetcollProcessGroup.make(options, ours)

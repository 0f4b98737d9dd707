"""What `init_process_group("hetcoll", pg_options=...)` and `new_group(pg_options=...)` take."""

from __future__ import annotations

from dataclasses import dataclass

from torch._C import _distributed_c10d as c10d

from ..config.variables import parse_format
from ..types import Format
from .replace import NoProcessGroupNCCL

_OTHERS = (c10d.Backend.Options, NoProcessGroupNCCL.Options)


@dataclass(frozen=True)
class Options:
    """Options of a process group.

    `compress` is how sums and averages of tensors of 64 KiB and more travel between hosts: ``"none"``, ``"bf16"``,
    ``"fp8"`` or ``"int8"``, the same on all ranks. Default: HETCOLL_COMPRESS. Groups split from this one have it, too.
    """

    compress: str | None = None

    def __post_init__(self) -> None:
        if self.compress is not None:
            parse_format(self.compress)


def asked_format(options: object) -> Format | None:
    """The format that a script asks for. Options of other backends, which HETCOLL_REPLACE's scripts have, are none of
    ours."""
    if isinstance(options, Options):
        return None if options.compress is None else parse_format(options.compress)
    if options is None or isinstance(options, _OTHERS):
        return None
    raise TypeError(f"pg_options: wanted hetcoll.torch.Options or none, got {options!r}")

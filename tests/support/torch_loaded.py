"""PyTorch, for the server that its ranks are forked from: it takes each process three seconds to load."""

from __future__ import annotations

import importlib
import os

from installed import import_torch

os.environ["OMP_NUM_THREADS"] = "1"
import_torch()
# What functional collectives load at the first call, and what trains models.
for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "hetcoll.torch"):
    importlib.import_module(name)

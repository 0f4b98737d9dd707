"""A program that shards a model by FSDP2, and destroys its groups or leaves them to torch's caches."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import hetcoll.torch

hetcoll.torch.register()
torch.set_num_threads(1)
dist.init_process_group("hetcoll")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
fully_shard(model, mesh=mesh)
model(torch.randn(4, 8)).sum().backward()
assert distribute_tensor(torch.ones(4, 4), mesh).full_tensor().sum().item() == 16
print("trained")
if "destroy" in sys.argv:
    dist.destroy_process_group()

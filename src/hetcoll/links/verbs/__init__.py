"""RDMA's control side: which devices and ports there are, which of them to use, and memory that they may touch.

Everything that happens once is here, on pyverbs; what happens for every message is the engine's (native/transport).

`library` finds pyverbs, `ports` asks it what the machine has and chooses, `pci` says how near a device is, `nics` makes
of it what a rank offers to the others, `rails` which port talks to which.
"""

"""Every rank adds its numbers to everyone else's: hetcoll run -n 3 docs/examples/five_lines.py"""

import numpy as np

import hetcoll

with hetcoll.init() as comm:
    x = np.full(4, comm.rank + 1.0)
    comm.allreduce(x)
    print(f"rank {comm.rank} of {comm.size}: {x}")

"""GPUs: memory, streams, events and kernels, on NVIDIA's driver (`cuda`) and AMD's runtime (`hip`).

Nothing of a vendor is imported before it is needed. `base` says what a device gives, `kernels` how its kernels come to
be; their source, one for all compilers, lies in ``kernels/``.
"""

"""Islands: the collectives of NCCL (`nccl`) and RCCL (`rccl`) among ranks whose GPUs one vendor made.

The two libraries have the same functions under the same names, so nearly all is in `library`; what each can reduce by
itself is in `native`. Nothing is opened before it is needed.
"""

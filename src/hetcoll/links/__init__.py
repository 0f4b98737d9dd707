"""What connects ranks: the engine's links over shared memory, TCP and RDMA."""

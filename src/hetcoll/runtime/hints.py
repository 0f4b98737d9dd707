"""What users of MPI, PyTorch and NCCL type first, and what it is called here; and where what has moved is now."""

from __future__ import annotations

from collections.abc import Container, Mapping

NAMES = {
    # mpi4py: capitals take buffers, as calls here do; the lower case takes objects, as those with `_object` do.
    "Allgather": "allgather", "Allgatherv": "allgatherv", "Allreduce": "allreduce", "Alltoall": "alltoall",
    "Alltoallv": "alltoall", "Barrier": "barrier", "Bcast": "broadcast", "Gather": "gather",
    "bcast": "broadcast_object",
    "Get_rank": "rank", "Get_size": "size", "Recv": "recv", "Reduce": "reduce", "Reduce_scatter": "reduce_scatterv",
    "Reduce_scatter_block": "reduce_scatter", "Scatter": "scatter", "Send": "send", "Sendrecv": "sendrecv",
    "Split": "split", "Free": "close", "Abort": "abort", "Iallreduce": "allreduce", "Ibcast": "broadcast",
    "Isend": "send", "Irecv": "recv", "isend": "send", "irecv": "recv", "Iallgather": "allgather",
    "Ialltoall": "alltoall", "Ibarrier": "barrier", "Ireduce": "reduce", "Igather": "gather", "Iscatter": "scatter",
    "Allreduce_init": "allreduce_init", "Allgather_init": "allgather_init", "Alltoall_init": "alltoall_init",
    "Bcast_init": "broadcast_init", "Reduce_scatter_block_init": "reduce_scatter_init", "Dup": "split",
    # torch.distributed.
    "all_gather": "allgather", "all_gather_into_tensor": "allgather", "all_reduce": "allreduce",
    "all_to_all": "alltoall", "all_to_all_single": "alltoall", "batch_isend_irecv": "group",
    "destroy_process_group": "close", "get_rank": "rank", "get_world_size": "size", "new_group": "split",
    "reduce_scatter_tensor": "reduce_scatter", "all_gather_object": "allgather_object",
    "broadcast_object_list": "broadcast_object", "scatter_object_list": "scatter_object",
    "send_object_list": "send_object", "recv_object_list": "recv_object", "monitored_barrier": "barrier",
    "world_size": "size",
    # NCCL.
    "all_gather_v": "allgatherv", "destroy": "close", "finalize": "close", "Finalize": "close", "group_start": "group",
    "nranks": "size", "get_async_error": "error", "register_buffer": "register", "register_window": "window",
    # Ours once.
    "ask": "allgather_object", "answer": "allgather_object", "leave_answers": "allgather_object",
}  # fmt: skip
OF_WORK = {
    "Wait": "wait", "Test": "done", "test": "done", "is_completed": "done", "exception": "error",
    "get_future": "add_done_callback", "source_rank": "source",
}  # fmt: skip
"""The same of a `Work`, which others call a request."""
_IN_FLIGHT = frozenset(name for name in NAMES if name[0] == "I") | {"isend", "irecv"}
OF_MODULE = {
    "init_process_group": "init", "COMM_WORLD": "init", "Init": "init", "MPI": "init", "ncclCommInitRank": "init",
    "ncclCommInitAll": "init", "ncclGetUniqueId": "get_unique_id", "SUM": "ReduceOp.SUM", "PROD": "ReduceOp.PROD",
    "MIN": "ReduceOp.MIN", "MAX": "ReduceOp.MAX", "AVG": "ReduceOp.AVG", "LAND": "ReduceOp.LAND", "LOR": "ReduceOp.LOR",
    "LXOR": "ReduceOp.LXOR", "BAND": "ReduceOp.BAND", "BOR": "ReduceOp.BOR", "BXOR": "ReduceOp.BXOR",
    "Experts": "experts.Experts", "LowLatencyExperts": "experts.LowLatencyExperts",
}  # fmt: skip
"""What stands in the place of a whole package's names, in `hetcoll`."""
MODULES = ("experts", "jax", "serving", "torch")
"""What users import themselves."""
MOVED = {
    "algorithms": "plan.algorithms", "devices": "vendors.devices", "launch": "tools.launch", "order": "plan.order",
    "pipeline": "plan.pipeline", "selection": "runtime.planner", "simulator": "plan.simulator",
    "topology": "plan.topology", "tuner": "plan.tuner",
}  # fmt: skip
"""Documented modules of `hetcoll` that have moved, and where they are."""


class Hint:
    """Stands in a class for a name that others use: it is no attribute, and says which one is.

    A `__getattr__` of the class would do the same, and make each of its attributes slower to find.
    """

    def __init__(self, owner: type, name: str, here: str) -> None:
        self._owner, self._name, self._here = owner.__name__, name, here

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError(f"{self._owner!r} object has no attribute {self._name!r}; {self}", name=self._name)

    def __str__(self) -> str:
        how = " with async_op=True" if self._name in _IN_FLIGHT else ""
        return f"it is {self._here!r} here{how}"

    def __repr__(self) -> str:
        return f"<no attribute: {self}>"


def give_hints(cls: type, names: Mapping[str, str]) -> None:
    """Let `cls` answer the names that it does not have by those that it has."""
    for name in names.keys() - vars(cls).keys():
        setattr(cls, name, Hint(cls, name, names[name]))


def missing(name: str, methods: Container[str]) -> AttributeError:
    """The error for a name that is none of the package's. `methods` are a communicator's own."""
    text = f"module 'hetcoll' has no attribute {name!r}"
    if name in MOVED:
        text += f"; it is 'hetcoll.{MOVED[name]}' now"
    elif name in MODULES:
        text += f"; write import hetcoll.{name}"
    elif name in OF_MODULE:
        text += f"; it is 'hetcoll.{OF_MODULE[name]}' here"
    elif (method := NAMES.get(name, name)) in methods and not name.startswith("_"):
        text += f"; it is {method!r} of a communicator, which hetcoll.init() makes"
    return AttributeError(text, name=name)

"""A user's program, as type checkers see it. A comment `# wrong` stands where they must object, and nowhere else.

It is read, never run.
"""

import array

import numpy as np
import numpy.typing as npt

import hetcoll
from hetcoll import Communicator, DType, ReduceOp


class Tensor:
    """As PyTorch's, CuPy's and JAX's."""

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> object:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError


class OldTensor:
    """As Numba's."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise NotImplementedError


def reductions(comm: Communicator, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> None:
    comm.allreduce(x)
    comm.allreduce(x, y, "max")
    comm.allreduce(x, op=ReduceOp.MAX)
    comm.reduce_scatter(x, y, ReduceOp.SUM)
    comm.reduce(x, None, "avg", 0)
    comm.allreduce(x, op="summ")  # wrong
    comm.allreduce(x, "max")  # wrong
    comm.reduce_scatter(x, y, op=3)  # wrong
    comm.reduce_scatterv(x, y, "mean", counts=[1, 2])  # wrong
    comm.allreduce(x, compress="bf16")
    comm.allreduce(x, compress="zip")  # wrong
    hetcoll.init(compress="gzip")  # wrong


def buffers(comm: Communicator, tensor: Tensor, old: OldTensor) -> None:
    comm.broadcast(tensor)
    comm.broadcast(old)
    comm.broadcast(bytearray(8))
    comm.broadcast(array.array("d", [1.0]))
    comm.send(b"read-only is enough", 1)
    comm.send(memoryview(b""), peer=1)
    comm.allgather(comm.empty(4), comm.empty(4 * comm.size, DType.BFLOAT16))
    comm.broadcast([1.0, 2.0])  # wrong
    comm.broadcast({"weight": 1.0})  # wrong
    comm.broadcast(1.0)  # wrong
    comm.gather(np.ones(1), root="first")  # wrong
    comm.send("text", 1)  # wrong


def results(comm: Communicator, x: npt.NDArray[np.float32]) -> None:
    every: npt.NDArray[np.float32] = comm.allgather(x)
    part: npt.NDArray[np.float32] = comm.reduce_scatter(every, op="max", timeout=3.0)
    work: hetcoll.Work = comm.alltoall(x, part)
    wrong: hetcoll.Work = comm.alltoall(x)  # wrong
    comm.allgather(x, async_op=True)  # wrong
    comm.allgather("text")  # wrong
    joined: npt.NDArray[np.float32] = comm.allgatherv(x, counts=[1, 2])
    mine: npt.NDArray[np.float32] = comm.reduce_scatterv(joined, op="max", counts=[1, 2])
    given: npt.NDArray[np.float32] | hetcoll.Work = comm.gather(mine, root=1)
    missing: npt.NDArray[np.float32] = comm.gather(x)  # wrong
    gathered: hetcoll.Work = comm.gather(x, every, async_op=True)
    names: list[str] = comm.allgather_object("name")
    parts: list[slice] = comm.shards(len(names), weight="much")  # wrong
    print(work, wrong, parts, given, missing, gathered)


def works(comm: Communicator, x: hetcoll.Array, op: hetcoll.OpName) -> bool:
    work: hetcoll.Work = comm.allreduce(x, None, op, async_op=True, timeout=3.0)
    work.wait()
    work.wait("soon")  # wrong
    with comm.group():
        comm.send(x, 0)
        comm.recv(x, "left")  # wrong
    return work.done

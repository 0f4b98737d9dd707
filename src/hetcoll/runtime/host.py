"""The host executor's plans: from a checked call on host memory to a plan that the engine has bound."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from .. import _native
from ..buffers import Buffer
from ..calls import Call, describe_message, descriptor, message_key
from ..links.wiring import Check, Wiring
from ..types import Collective, ReduceOp
from .planner import Drawing, Planner

if TYPE_CHECKING:
    from ..plan.ir import Plan


class HostPlans:
    """Binds calls for one communicator's engine, as its planner chooses, and connects what they need."""

    def __init__(self, wiring: Wiring, planner: Planner) -> None:
        self._wiring, self._engine, self._planner = wiring, wiring.engine, planner
        self._plans: dict[object, int] = {}  # the engine's numbers of what was drawn

    def shape(self, call: Call, timeout: float, check: Check) -> _native.Shape:
        """The bound plan of a call; connects what it needs within `timeout` seconds on the first use."""
        key = (
            call.collective,
            call.dtype,
            call.op,
            call.root,
            call.send_count,
            call.recv_count,
            call.send_table,
            call.recv_table,
            call.label,
            call.compress,
        )
        return self._planner.bound("host", key, lambda: self._bind(call, timeout, check))

    def _bind(self, call: Call, timeout: float, check: Check) -> _native.Shape:
        planner = self._planner
        name = planner.on_host(call.collective, call.nbytes, bool(call.compress))
        stretches = planner.stretches(call.collective, name, call.nbytes)
        scale = call.op is ReduceOp.AVG
        drawing = Drawing(call.collective.plain, name, call.root, scale, bool(call.compress), stretches)
        number = self._number(drawing, lambda: planner.draw(drawing), timeout, check)
        table = self._table(call.send_count, stretches)
        what = call.describe()
        shape = self._engine.bind(
            plan=number,
            dtype=call.dtype,
            op=call.op,
            send_count=call.send_count,
            recv_count=call.recv_count,
            send_table=table or call.send_table,
            recv_table=table or call.recv_table,
            descriptor=descriptor(f"{what} by {name}"),
            p2p=False,
            format=call.compress,
        )
        planner.note(shape.id, what)
        if (short := call.key) is not None:
            self._engine.remember(*short, shape)
        return shape

    def point(
        self, send: Buffer | None, dest: int, recv: Buffer | None, source: int, timeout: float, check: Check
    ) -> _native.Shape:
        """The bound plan of a message to `dest`, one from `source`, or both at once; of one type."""
        key = message_key(send, dest, recv, source)

        def bind() -> _native.Shape:
            from ..plan.algorithms import p2p

            sends, recvs = ((dest,) if send else (), (source,) if recv else ())
            rank, size = self._wiring.rank, self._wiring.size
            number = self._number((Collective.P2P, sends, recvs), lambda: p2p(size, rank, sends, recvs), timeout, check)
            shape = self._engine.bind(
                plan=number,
                dtype=key[1],
                op=ReduceOp.SUM,
                send_count=send.count if send else 0,
                recv_count=recv.count if recv else 0,
                send_table=(),
                recv_table=(),
                descriptor=descriptor(f"p2p {key[1].label}"),
                p2p=True,
            )
            self._planner.note(shape.id, describe_message(send, dest, recv, source))
            self._engine.remember(*key, shape)
            return shape

        return self._planner.bound("host message", key, bind)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """A message to oneself."""
        _native.copy_bytes(target.ptr, source.ptr, source.nbytes)

    def paths(self, peers: Collection[int]) -> tuple[str, tuple[str, ...]]:
        """What carries data to these ranks now, and, for people, how data goes to those that shared memory does not
        reach."""
        return self._wiring.transports(peers), self._wiring.paths(peers)

    def _table(self, count: int, stretches: int) -> tuple[int, ...]:
        from ..plan.algorithms.base import stretched

        return () if stretches == 1 else stretched(count, self._wiring.size, stretches)

    def _number(self, drawing: object, draw: Callable[[], Plan], timeout: float, check: Check) -> int:
        number = self._plans.get(drawing)
        if number is None:
            plan = draw()
            self._wiring.ensure(sorted(plan.edges), timeout, check)
            number = self._plans[drawing] = self._engine.add_plan(plan.encode())
        return number

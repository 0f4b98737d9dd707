"""Plans with one thing wrong: what a checker must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetcoll.plan.ir import Buf, Local, Op, Plan, Span, Step
from hetcoll.plan.simulator import PlanError, check
from hetcoll.types import Collective


def edited(plan: Plan, i: int, **changes: object) -> Plan:
    steps = list(plan.steps)
    steps[i] = replace(steps[i], **changes)  # type: ignore[arg-type]
    return replace(plan, steps=tuple(steps))


def reordered(plan: Plan, order: Sequence[int]) -> Plan:
    """The plan with its steps as listed, by their old indices; deps go with them, to the first of repeated steps."""
    new: dict[int, int] = {}
    for position, old in enumerate(order):
        new.setdefault(old, position)
    steps = [replace(plan.steps[i], deps=tuple(sorted(new[d] for d in plan.steps[i].deps if d in new))) for i in order]
    return replace(plan, steps=tuple(steps))


def commute(plan: Plan, a: Step, b: Step) -> bool:
    """Whether two steps of a lane may change places: they share no FIFO and no data, or add into the same place."""
    if a.op is b.op is Op.LOCAL:
        return False
    if a.peer >= 0 and (a.op is Op.SEND, a.peer, a.channel) == (b.op is Op.SEND, b.peer, b.channel):
        return False
    if a.op is b.op is Op.RECV_REDUCE and (a.src, a.dst) == (b.src, b.dst) and plan.algorithm != "oneshot":
        return True

    def first(x: Span) -> int:
        """Where a span begins in place, where the smaller buffer is this rank's part of the larger."""
        if x.buf is Buf.SCRATCH:
            return x.start - 1000
        smaller = plan.send_units < plan.recv_units if x.buf is Buf.SEND else plan.recv_units < plan.send_units
        return x.start + plan.rank * smaller

    def hits(x: Span | None, y: Span | None) -> bool:
        return x is not None and y is not None and first(x) < first(y) + y.count and first(y) < first(x) + x.count

    return not (hits(a.dst, b.src) or hits(a.src, b.dst) or hits(a.dst, b.dst))


def structural_mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Every plan with one step dropped, doubled, or exchanged with the next of its lane (unless these commute)."""
    n = len(plan.steps)
    for i, step in enumerate(plan.steps):
        yield f"without step {i}", reordered(plan, [j for j in range(n) if j != i])
        yield f"step {i} twice", reordered(plan, [*range(i + 1), i, *range(i + 1, n)])
        j = next((j for j in range(i + 1, n) if plan.steps[j].lane == step.lane), n)
        if j < n and plan.collective is not Collective.BARRIER and not commute(plan, step, plan.steps[j]):
            order = list(range(n))
            order[i], order[j] = j, i
            yield f"steps {i} and {j} exchanged", reordered(plan, order)


def field_mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Every plan with one field of one step changed, or with the peers of two steps exchanged."""
    same_memory = plan.collective in (Collective.BROADCAST, Collective.BARRIER)
    for i, step in enumerate(plan.steps):
        for d in step.deps:
            yield f"step {i} not after {d}", edited(plan, i, deps=tuple(x for x in step.deps if x != d))
        for op in Op:
            if op is not step.op:
                yield f"step {i} as {op.name}", edited(plan, i, op=op)
        for name in ("src", "dst"):
            span = getattr(step, name)
            for by in (-1, 1) if span else ():
                moved, resized = replace(span, start=span.start + by), replace(span, count=span.count + by)
                yield f"{name} of step {i} moved by {by}", edited(plan, i, **{name: moved})
                yield f"{name} of step {i} {by} units longer", edited(plan, i, **{name: resized})
            for buf in Buf if span else ():
                if span.buf is not buf and not (same_memory and buf is not Buf.SCRATCH):
                    yield f"{name} of step {i} in {buf.name}", edited(plan, i, **{name: replace(span, buf=buf)})
        if step.local is not None:
            for what, local in local_mutants(plan, step.local):
                yield f"step {i} {what}", edited(plan, i, local=local)
        if step.peer < 0:
            continue
        yield f"step {i} on another channel", edited(plan, i, channel=1 - step.channel)
        for peer in set(range(plan.size)) - {step.peer}:
            yield f"step {i} with peer {peer}", edited(plan, i, peer=peer)
        for j, other in enumerate(plan.steps[i + 1 :], i + 1):
            if other.peer >= 0 and other.peer != step.peer and not interchangeable(plan, step, other):
                first = edited(plan, i, peer=other.peer)
                yield f"peers of steps {i} and {j} exchanged", edited(first, j, peer=step.peer)


def local_mutants(plan: Plan, local: Local) -> Iterator[tuple[str, Local]]:
    """Every LOCAL step with one thing changed, or two parts exchanged."""
    for kind in Collective:
        if kind is not local.kind:
            yield f"as {kind.label}", replace(local, kind=kind)
    for root in {-1, *range(plan.size)} - {local.root}:
        yield f"with root {root}", replace(local, root=root)
    for j, part in enumerate(local.parts):
        others = (
            [Span(part.buf, part.start + 1, part.count), Span(part.buf, part.start, part.count + 1)] if part else []
        )
        if part and part.count > 1:
            others.append(Span(part.buf, part.start, part.count - 1))
        others += [Span(buf, part.start, part.count) for buf in Buf if part and buf is not part.buf]
        for other in (*others, None if part else Span(Buf.RECV, 0)):
            yield f"part {j} as {other}", replace(local, parts=(*local.parts[:j], other, *local.parts[j + 1 :]))
        yield f"without part {j}", replace(local, parts=(*local.parts[:j], *local.parts[j + 1 :]))
        for k in range(j + 1, len(local.parts)):
            parts = list(local.parts)
            parts[j], parts[k] = parts[k], parts[j]
            if parts[j] != parts[k]:
                yield f"parts {j} and {k} exchanged", replace(local, parts=tuple(parts))


def interchangeable(plan: Plan, a: Step, b: Step) -> bool:
    """Whether two messages mean the same: equal contents, terms of one sum, or the empty ones of a barrier."""
    if plan.collective is Collective.BARRIER:
        return True
    if a.op is b.op:
        return a.src == b.src if a.op is Op.SEND else a.dst == b.dst
    return Op.SEND not in (a.op, b.op) and a.dst == b.dst  # the first term comes alone: additions commute


def passes(plans: Sequence[Plan], scale: bool) -> bool:
    try:
        for inplace in (False, True):
            check(plans, inplace=inplace, scale=scale)
    except PlanError:
        return False
    return True


Mutants = Callable[[Plan], Iterator[tuple[str, Plan]]]


def edits(
    plans: Sequence[Plan], kinds: Sequence[Mutants] = (structural_mutants, field_mutants)
) -> Iterator[tuple[str, list[Plan]]]:
    """The plans of a job with one rank's edited."""
    for rank, plan in enumerate(plans):
        for mutants in kinds:
            for what, mutant in mutants(plan):
                yield f"rank {rank}: {what}", [*plans[:rank], mutant, *plans[rank + 1 :]]


def missed(
    plans: Sequence[Plan], *scales: bool, kinds: Sequence[Mutants] = (structural_mutants, field_mutants)
) -> list[str]:
    """Which edits are found neither where sums are wanted nor, with a scale, where averages are."""
    return [what for what, wrong in edits(plans, kinds) if all(passes(wrong, scale) for scale in scales)]

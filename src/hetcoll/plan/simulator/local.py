"""LOCAL steps: collectives among an island's members, as flows of data from some members to others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...types import ROOTED, Collective
from ..ir import Local, Op, Plan, Span, Step
from .node import Node, lengths, named_by_rank, wrong

PARTED = (Collective.ALLGATHER, Collective.REDUCE_SCATTER, Collective.GATHER, Collective.SCATTER)
KINDS = (*PARTED, Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST)


@dataclass(frozen=True, slots=True)
class Flow:
    """`target` of node `to` becomes the sum of what the nodes in `terms` give; a copy if it is one."""

    to: Node
    target: Span | None
    terms: tuple[tuple[Node, Span | None], ...]


def reads(step: Step) -> list[Span]:
    """What a step reads. A LOCAL step that puts together reads `src`, one that takes apart its parts."""
    spans = [step.src]
    if step.op in (Op.REDUCE, Op.SCALE):
        spans.append(step.dst)
    if step.local is not None and step.local.kind in (Collective.REDUCE_SCATTER, Collective.SCATTER):
        spans += step.local.parts
    return [span for span in spans if span is not None]


def writes(step: Step) -> list[Span]:
    """What a step writes, or would if it did not lie there already."""
    spans = [step.dst]
    if step.local is not None and step.local.kind in (Collective.ALLGATHER, Collective.GATHER):
        spans += step.local.parts
    return [span for span in spans if span is not None]


def flows(group: Sequence[Node]) -> Iterator[Flow]:
    """What one LOCAL step moves. `group` has the members in the order of their island."""
    parts = [_local(node).parts for node in group]
    root = [node for node in group if node.rank == _local(node).root]
    all_src = tuple((node, node.step.src) for node in group)
    match _local(group[0]).kind:
        case Collective.ALLREDUCE:
            yield from (Flow(node, node.step.dst, all_src) for node in group)
        case Collective.REDUCE:
            yield from (Flow(node, node.step.dst, all_src) for node in root)
        case Collective.BROADCAST:
            terms = tuple((node, node.step.src) for node in root)
            yield from (Flow(node, node.step.dst, terms) for node in group if node not in root)
        case Collective.ALLGATHER | Collective.GATHER:
            for node in root or group:
                for part, term in zip(_local(node).parts, all_src, strict=True):
                    yield Flow(node, part, (term,))
        case Collective.REDUCE_SCATTER:
            for node, given in zip(group, zip(*parts, strict=True), strict=True):
                yield Flow(node, node.step.dst, tuple(zip(group, given, strict=True)))
        case _:
            for node, share in zip(group, _local(root[0]).parts, strict=True):
                yield Flow(node, node.step.dst, ((root[0], share),))


def _local(node: Node) -> Local:
    assert node.step.local is not None
    return node.step.local


def check_local(plan: Plan, i: int) -> None:
    """Whether step `i` has what its kind of collective needs, on this rank."""
    step, local = plan.steps[i], plan.steps[i].local
    if local is None or local.kind not in KINDS or step.peer >= 0 or step.channel != 0:
        raise wrong(plan, i, "is no collective among the members of an island")
    if not plan.islands:
        raise wrong(plan, i, "is in a plan that knows no islands")
    if (local.root in plan.island) != (local.kind in ROOTED):
        raise wrong(plan, i, f"wanted a root on this island where the collective is rooted, got {local.root}")
    root = plan.rank == local.root
    parted = local.kind in PARTED and (root or local.kind not in ROOTED)
    if len(local.parts) != len(plan.island) * parted:
        raise wrong(plan, i, f"wanted {len(plan.island) * parted} parts, got {len(local.parts)}")
    mine = parted and local.parts[plan.island.index(plan.rank)] is not None
    has_src, has_dst = step.src is not None, step.dst is not None
    wanted = {
        Collective.ALLREDUCE: (True, True),
        Collective.REDUCE: (True, root),
        Collective.BROADCAST: (root, not root),
        Collective.ALLGATHER: (mine, False),
        Collective.REDUCE_SCATTER: (False, mine),
        Collective.GATHER: (mine if root else has_src, False),
        Collective.SCATTER: (False, mine if root else has_dst),
    }[local.kind]
    if (has_src, has_dst) != wanted:
        raise wrong(plan, i, f"wanted (src, dst) to be {wanted}")


def join(plans: Sequence[Plan], locals: dict[int, list[Node]]) -> None:
    """Make groups of each island's LOCAL steps: those of one lane a member, matched by order."""
    for island in plans[0].islands:
        if island[0] not in locals:  # another stands for it
            continue
        rows = [locals[rank] for rank in island]
        most = max(rows, key=len)
        for k, node in enumerate(most):
            for rank, row in zip(island, rows, strict=True):
                if k >= len(row):
                    raise wrong(plans[node.rank], node.index, f"rank {rank} has only {len(row)} local steps")
                if row[k].step.lane != row[0].step.lane:
                    raise wrong(plans[rank], row[k].index, "wanted all local steps in one lane")
            _join(plans, tuple(row[k] for row in rows))


def _join(plans: Sequence[Plan], group: tuple[Node, ...]) -> None:
    first = _local(group[0])
    for node in group:
        mine = _local(node)
        if (mine.kind, mine.root) != (first.kind, first.root):
            raise wrong(plans[node.rank], node.index, f"is {first} on rank {group[0].rank}")
        node.group = group
    sources: dict[int, dict[int, Node]] = {node.id: {} for node in group}
    by_rank, alike = named_by_rank(plans[group[0].rank]), set[tuple[int, ...]]()  # spans that all members have
    for flow in flows(group):
        plan, i, target, found = plans[flow.to.rank], flow.to.index, flow.target, sources[flow.to.id]
        to = flow.to.rank if target is not None and target.buf in by_rank else -1
        for node, term in flow.terms:
            found[node.id] = node
            pair = (id(target), to, id(term), node.rank if term is not None and term.buf in by_rank else -1)
            if pair in alike:
                continue
            alike.add(pair)
            if (term is None) != (target is None):
                raise wrong(plan, i, f"gets {target} where rank {node.rank} gives {term}")
            if term is not None and lengths(plans[node.rank], term) != lengths(plan, target):
                raise wrong(plan, i, f"{target} differs in length from {term} on rank {node.rank}")
    for node in group:
        node.sources = tuple(sources[node.id].values())

"""What every rank must have been told, by what was done to the job."""

from __future__ import annotations

from collections.abc import Sequence

from patience import PATIENCE

from .play import Phase, Report
from .program import CUT, HARMLESS, LOSING, PERHAPS, REGROUPS, WAITING, Program

SOON = 15.0  # seconds: many times what an error takes, and what ranks take that go on
CUT_OFF = 25.0  # the same, where it takes seconds to know that a network is cut
PUTS = ("put", "near", "pieces")  # steps whose windows all ranks close at the end
LOST, ABORTED, LATE = "PeerLostError", "AbortedError", "CollectiveTimeoutError"
_TOO_LITTLE = "in one piece of this rank's"  # `empty`: ranks share as much memory as the least of them has room for
ALLOWED = {
    **dict.fromkeys(CUT, (LOST, LATE, "InitError")),
    **dict.fromkeys(LOSING, (LOST,)),
    "abort": (ABORTED,),
    "interrupt": (ABORTED,),
    "mismatch": ("CollectiveMismatchError",),
    **dict.fromkeys(WAITING, (LATE,)),
    "stop": (LATE, "InitError"),  # the latter of a communicator that is made meanwhile
    "spoil": ("CommunicationError", LOST, LATE, "CollectiveMismatchError"),
    **dict.fromkeys(("files", "memory", "sizes"), ("CommunicationError", LOST, "InitError")),  # the last one in `split`
    "joining": ("InitError", LOST),
    "truncate": (LOST,),
}


def judge(program: Program, reports: Sequence[Report | str]) -> list[str]:
    """What was wrong, if anything."""
    problems = []
    kind, victims = program.attack.kind, program.attack.victims
    alive = {}
    for rank, report in enumerate(reports):
        if isinstance(report, str):
            if not (report.startswith("died") and rank in victims and kind in ("kill", "exit", "exec", "joining")):
                problems.append(f"rank {rank} {report}")
        elif report.problem:
            problems.append(f"rank {rank}: {report.problem}")
        else:
            alive[rank] = report.phases
    if problems:
        return problems
    told = {rank: phases[0] for rank, phases in alive.items() if rank < program.size}
    problems = [problem for rank, phase in told.items() if (problem := _first(program, rank, phase))]
    problems += _truncated(program, told) if kind == "truncate" else []
    failed = {rank for rank, phase in told.items() if phase.error}
    last = all(told[rank].step == len(program.steps) - 1 for rank in failed)  # who is through has no next call
    if kind in {*PERHAPS, "half"} and failed and failed != set(told) and not last:
        problems.append(f"only ranks {sorted(failed)} of {sorted(told)} were told: {told}")
    if len({phase.agreed for phase in told.values() if phase.error != "left"}) > 1 and kind not in CUT:
        problems.append(f"they do not agree: {told}")
    return problems or (_parts if kind in CUT else _second)(program, alive)


def _first(program: Program, rank: int, phase: Phase) -> str:
    """What is wrong with what a rank was told in the first communicator."""
    kind, victims = program.attack.kind, program.attack.victims
    what = f"rank {rank}: {phase.error} {phase.text}"
    unproved = set(program.devices) != {"c"} and kind in PERHAPS
    most = CUT_OFF if kind in CUT else SOON
    if phase.seconds > most * (PATIENCE if program.rdma else 1):
        return f"{what} after {phase.seconds:.1f} s"
    if kind in HARMLESS or kind == "cables":
        return what if phase.error else ""
    if rank in victims:
        own = {"raise": "left", "close": "left", "interrupt": "KeyboardInterrupt"}.get(kind)
        if phase.error == own or (kind == "memory" and phase.error == "MemoryError"):
            return ""
        if own and not (kind == "interrupt" and phase.error == ABORTED):
            return f"{what}, wanted {own}"
    if not phase.error:
        return "" if kind in {*PERHAPS, "half"} else f"rank {rank} was told nothing"
    if phase.part and phase.error == LOST:
        return ""
    if kind == "memory" and phase.error == "ArgumentError" and _TOO_LITTLE in phase.text:
        return ""
    puts = program.steps[phase.step].what in PUTS
    if kind == "interrupt" and puts and phase.error == "ClosedError" and rank not in victims:
        return ""  # who is interrupted closes its window on its way out, and then tells
    if phase.error not in ALLOWED[kind] and not (unproved and phase.error == "InitError"):
        return f"{what}, wanted one of {ALLOWED[kind]}"
    here = victims if rank in victims else set(range(program.size)) - set(victims)
    if kind == "partition" and phase.error == LOST and phase.lost in here and phase.lost != rank:
        return f"{what} names {phase.lost}, which is not cut off from it"
    if kind in LOSING and phase.lost not in victims:
        return f"{what} names {phase.lost}, wanted one of {victims}"
    return ""


def _truncated(program: Program, told: dict[int, Phase]) -> list[str]:
    """Whom ranks name where a stream has ended: the one that sent it; or one that was told so of a part, or a window,
    and then left. Any while GPUs' paths are proved, which both ends give up, and in messages: tagged ones go over two
    ranks' own communicator, where either may have that number, and of several threads one may hear first that another
    rank has given up."""
    lost = {rank: phase for rank, phase in told.items() if phase.error == LOST}
    sender = int(program.env["HETCOLL_FAULT"].split("rank=")[1])
    at = {rank: program.steps[phase.step].what for rank, phase in lost.items()}
    left = {rank for rank, phase in lost.items() if phase.part or (phase.lost == sender and at[rank] in PUTS)}
    return [
        f"rank {rank}: {phase.error} {phase.text} names {phase.lost}, wanted one of {sorted({sender, *left})}"
        for rank, phase in lost.items()
        if not phase.part
        and "path_probe.py" not in phase.text
        and at[rank] not in ("tagged", "messages", "passing")
        and phase.lost not in {sender, *left}
    ]


def _second(program: Program, alive: dict[int, list[Phase]]) -> list[str]:
    """What is wrong with the communicator that came after."""
    kind, problems = program.attack.kind, []
    if not (kind in REGROUPS or program.newcomers):
        return []
    gone = len(program.attack.victims) if kind in LOSING else 0
    size = program.size - gone + program.newcomers
    for rank, phases in alive.items():
        if phases[0].error == "left":
            continue
        phase = phases[-1]
        if len(phases) != (1 if rank >= program.size else 2) or phase.error or phase.size != size:
            problems.append(f"rank {rank} in the second communicator, wanted {size} ranks: {phase}\n{phase.text}")
        elif phase.seconds > 2 * SOON * (PATIENCE if program.rdma else 1):
            problems.append(f"rank {rank} took {phase.seconds:.1f} s to go on")
    return problems


def _parts(program: Program, alive: dict[int, list[Phase]]) -> list[str]:
    """What is wrong with how the parts of a network that was cut went on."""
    kind, victims, size = program.attack.kind, set(program.attack.victims), program.size
    parts = victims, set(range(size)) - victims
    with_store, off = parts if 0 in victims else parts[::-1]
    most = off if 2 * len(off) > size else with_store
    last = {rank: phases[-1] for rank, phases in alive.items()}
    on = {rank for rank, phases in alive.items() if len(phases) == 2 and phases[-1].size}
    problems = [f"rank {rank}: {phase} in the end" for rank, phase in last.items() if phase.seconds > 2 * CUT_OFF]
    problems += [
        f"rank {rank}: {last[rank].error} {last[rank].text} in the second communicator"
        for rank in last
        if last[rank].error not in (("", LATE) if rank in on else (LOST, "InitError"))  # there is little time
    ]
    if any(last[rank].size != len(on) for rank in on):
        problems.append(f"ranks {sorted(on)} went on, in more communicators than one")
    if kind == "partition" and on != most:
        problems.append(f"ranks {sorted(on)} went on, wanted {sorted(most)}")
    return [*problems, *map(str, last.values())] if problems else []

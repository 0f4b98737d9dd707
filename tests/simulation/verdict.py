"""What must hold at the end of every schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hetcoll.rendezvous.protocol.news import Lost, StoreLost
from hetcoll.rendezvous.store.successors import MOST

from .job import ROUGH, Job, address, new_address
from .rank import TIMEOUT, History

_FOUND = 6.0  # seconds in which ranks find out that one calls something else
_LATE = TIMEOUT + 3.0  # in which a call that one does not come to fails
_LATE_ENDS = "processes found each other where", "did not answer in"
"""How parts of a job with relays may end, where some notice long before others that a network is cut: two successors
may wait for more than half at a time, or one may for so long that a call's own time is over."""
_HOSTED = "its process hosted the job's store"
_KINDS = {"mismatch": "CollectiveMismatchError", "late": "CollectiveTimeoutError"}
_PROMPT = {"calm", "reset", "leave", "mismatch", "late"}
"""Where the store always answers within the seconds that a verdict waits for it."""
_NAMED = 6.0  # seconds in which a death is known, one after another
_SETTLED = 100.0  # seconds after which the parts of a job whose network was cut have settled who goes on
_FOLLOWED = 0.5  # seconds in which a store that takes another's place has successors
_ORPHANED = 40.0  # in which who finds none gives up
_UNDER_WAY = 1.0  # seconds that what was sent takes to come, at most
_UNNOTICED = 7.0  # in which a store that is cut off decides what all had said before: see `Successors.doubts`
_NOTICED = 15.0  # seconds between the first and the last whose silence is noticed
_PASSED = 15.0  # in which others pass over who is stopped; if it wakes meanwhile, some come to it and some do not
_NAMED_BEHIND = 45.0  # the same behind a relay that dies as well
_SUCCEEDED = 45.0  # in which a store whose host vanished is missed, and another one found


def judge(job: Job, history: History, gone: Mapping[str, float]) -> list[str]:
    """All that is wrong; `gone`: when which ranks were killed."""
    found = [*history.wrong]
    found += [f"{name} left open: {what}" for name, what in history.left_open.items()]
    found += _one_answer(job, history, gone)
    found += _ends(job, history, gone)
    found += _false_alarms(job, history, gone)
    found += _errors(job, history, gone)
    if job.kind == "kill":
        found += _named(job, history, gone)
    return found


def _one_answer(job: Job, history: History, gone: Mapping[str, float]) -> Iterator[str]:
    """What all of a group are told alike is the same for all who go on; and none of these is told that it failed. But
    who was stopped while others went on without it, and wakes when these are no more, cannot know that there were any.
    """
    for key, everybody in history.answers.items():
        told = {name: each for name, each in everybody.items() if history.ends.get(name) == ""}
        if key[1] == "shrink" and job.kind in ("cut", "vanish") and not job.few:
            # Who ends soon may have been told of more that go on, or to go on without these by a store that has noticed
            # of some of them, and not yet of most, that it hears nothing any more.
            told |= {
                name: ranks
                for name, ranks in everybody.items()
                if history.ended.get(name, 1e9) > history.times[key, name] + _NOTICED
                and not all(set(each) <= set(ranks) for each in told.values())
            }
        if key[1] == "verdict" and job.kind not in _PROMPT:
            continue
        if len(set(told.values())) > 1 and not _one_after_another(job, history, key, told, gone):
            yield f"different answers to {key}: {told}"
        for name, error in history.failures.get(key, {}).items():
            if "did not answer" in error and job.kind in ROUGH:
                continue  # it was not told
            deaths = _deaths_of_stores(history, name, gone) if job.kind == "vanish" else []
            if "did not answer" in error and any(0 < history.times[key, name] - each < _SUCCEEDED for each in deaths):
                continue  # its own time was over before another store could tell it
            if history.ends.get(name) == "" and told:
                if _one_after_another(job, history, key, {**told, name: error}, gone):
                    continue
                if _nobody_could_tell(job, history, key, name, gone):
                    continue
                yield f"{key} failed for {name} ({error}), and had an answer for {sorted(told)}"


def _one_after_another(
    job: Job, history: History, key: tuple[Any, ...], told: Mapping[str, Any], gone: Mapping[str, float]
) -> bool:
    """Whether some were stopped, and nobody was left of those that were told one answer when others were told another:
    they had died, ended, or heard that there is no store any more."""
    if all(fault.what != "freeze" for fault in job.faults):
        return False
    parts: dict[Any, list[str]] = {}
    for name in sorted(told, key=lambda name: history.times[key, name]):
        parts.setdefault(told[name], []).append(name)
    over = 0.0
    for names in parts.values():
        if history.times[key, names[0]] < over:
            return False
        over = max(over, *(_over(history, name, gone) for name in names))
    return True


def _nobody_could_tell(job: Job, history: History, key: tuple[Any, ...], name: str, gone: Mapping[str, float]) -> bool:
    """Whether an answer was under way when the store died, and with it or before it all who had it; or when the network
    was cut or a process stopped, and all who had it were lost to the others, and were told nothing more. Then this rank
    cannot know that there was one: it has nobody to ask, and sees what it would see if the store had died just before.
    Nor can the others know that it did not come: whatever they sent to make sure would be the last word in its turn,
    and may be lost."""
    times = {each: history.times[key, each] for each in history.answers[key]}
    first = _decided(history, key)
    for death in _deaths_of_stores(history, name, gone):
        if first > death - _UNDER_WAY and all(_went_with(history, each, death, gone) for each in times):
            return True
    begins = [each.at for each in job.faults if each.what in ("cut", "freeze")]
    under_way = any(first - _UNNOTICED < began < first + _UNDER_WAY for began in begins)
    return under_way and all(_left_behind(history, each, key, name) for each in times)


def _left_behind(history: History, name: str, key: tuple[Any, ...], other: str) -> bool:
    """Whether a rank that has an answer was lost to another one when that was told that it failed; and was told nothing
    that was decided later."""
    lost = any(
        (group, history.places[group].get(event.rank)) == (key[0], name) and when <= history.times[key, other]
        for when, group, event in history.news[other]
        if isinstance(event, Lost)
    )
    told = [each for each, answers in history.answers.items() if name in answers]
    return lost and max(_decided(history, each) for each in told) == _decided(history, key)


def _decided(history: History, key: tuple[Any, ...]) -> float:
    """When a store knew an answer, or the first rank did."""
    return min([history.decided.get(key, 1e9), *(history.times[key, each] for each in history.answers[key])])


def _went_with(history: History, name: str, death: float, gone: Mapping[str, float]) -> bool:
    """Whether a rank was over when a store died, or ended without going to another one."""
    ended = history.ended.get(name, 1e9) < death + _UNDER_WAY
    return _over(history, name, gone) <= death or (ended and death not in _deaths_of_stores(history, name, gone))


def _deaths_of_stores(history: History, name: str, gone: Mapping[str, float]) -> list[float]:
    """When those died of which a rank heard that they hosted the store."""
    lost = [(group, event) for _, group, event in history.news.get(name, ()) if isinstance(event, Lost)]
    hosts = {history.places.get(group, {}).get(event.rank, "?") for group, event in lost if _HOSTED in event.reason}
    return [gone[each] for each in hosts if each in gone]


def _machine(job: Job, name: str) -> str:
    return new_address(int(name[1:])) if name.startswith("+") else address(job.hosts[int(name)])


def _over(history: History, name: str, gone: Mapping[str, float]) -> float:
    lost = [when for when, _, event in history.news.get(name, ()) if isinstance(event, StoreLost)]
    return min([*lost, gone.get(name, 1e9), history.ended.get(name, 1e9)])


def _ends(job: Job, history: History, gone: Mapping[str, float]) -> Iterator[str]:
    """Who must go on to the end does. Where nobody can take the store's place, all are told whose loss ended them."""
    for name in _must(job, history, gone):
        end = history.ends.get(name, "not at all")
        orphaned = end.startswith("PeerLostError") and history.ended[name] < max(gone.values(), default=0.0) + _ORPHANED
        if (
            end in ("", "left")
            or (orphaned and _leaderless(history, gone))
            or (job.few and any(each in end for each in _LATE_ENDS))
        ):
            continue
        yield f"{name} ended: {end}"


def _leaderless(history: History, gone: Mapping[str, float]) -> bool:
    """Whether a store died, and all of its successors, or they ended well, before others were told to follow."""
    ended = {name: when for name, when in history.ended.items() if history.ends[name] == ""}
    times = sorted({**ended, **gone}.values())
    spans = [(first, last) for first, last in zip(times, times[MOST:], strict=False) if last - first < _FOLLOWED]
    return any(first <= death <= last for first, last in spans for death in gone.values())


def _must(job: Job, history: History, gone: Mapping[str, float]) -> list[str]:
    ranks = [str(rank) for rank in range(job.size) if str(rank) not in gone]
    if job.sound and not (job.kind == "stall" and _early(job, history, ranks)):
        return [*ranks, *(f"+{number}" for number in range(len(job.newcomers)))]
    if not job.faults:
        return ranks
    if _early(job, history, ranks):
        return []
    begin = min(fault.at for fault in job.faults)
    if job.kind == "stop":
        stopped = history.stopped and job.faults[0].what == "freeze" and job.faults[0].seconds > _PASSED
        # Who was taken in is one of the job's processes, and no help to its successor before it has heard of that.
        deaf = _taken_in(history, begin) - {name for (_, name), when in history.times.items() if when < begin}
        settled = stopped and 2 * (job.size - 2) > job.size - 1 + len(deaf) and not job.few
        return [name for name in ranks if name != history.stopped] if settled else []
    if job.kind in ("vanish", "cut"):
        if job.kind == "cut":
            if 0 < job.faults[0].seconds < _SETTLED:
                return []  # the parts meet again while they part: whom one of them has lost is lost
            inside = [str(rank) for rank, number in enumerate(job.hosts) if address(number) in job.faults[0].side]
            ranks = max([inside, [each for each in ranks if each not in inside]], key=len)
            if not {_machine(job, each) for each in ranks} & history.stores:
                return []  # nobody is among them who could serve
        late = any(when < begin + 1.0 for when in history.ended.values())
        few = 2 * len(ranks) <= job.size or job.newcomers
        return [] if late or few else ranks
    return [] if job.kind in ("storm", "away", "torn") else ranks


def _taken_in(history: History, before: float) -> set[str]:
    """Newcomers of which some had been told by then that they are of the group."""
    grown = [key for key in history.answers if key[1] == "grow"]
    groups = [
        answer[0] for key in grown for name, answer in history.answers[key].items() if history.times[key, name] < before
    ]
    return {name for group in groups for name in history.places[group].values() if name.startswith("+")}


def _early(job: Job, history: History, ranks: list[str]) -> bool:
    """Whether the job had not come together when it began."""
    return min(fault.at for fault in job.faults) < max(history.met.get(name, 1e9) for name in ranks or ["0"])


def _false_alarms(job: Job, history: History, gone: Mapping[str, float]) -> Iterator[str]:
    """Nobody is said to be lost to whom nothing was done."""
    must = _must(job, history, gone)
    if job.kind in ROUGH or (job.kind in ("vanish", "stall") and not must):
        return
    for name, news in history.news.items():
        for when, group, event in news:
            if isinstance(event, Lost):
                who = history.places[group].get(event.rank, "?")
                ended, deaths = history.ended.get(who, 0.0), _deaths_of_stores(history, name, gone)
                if any(ended > death - _UNDER_WAY and _went_with(history, who, death, gone) for death in deaths):
                    continue  # its goodbye died with the store
                if who not in must and history.ends.get(who, "").startswith("PeerLostError") and ended < when:
                    continue  # it knew of no other store that it might have told that it ends
                if min(gone.get(who, 1e9), history.again.get(who, 1e9)) > when:
                    yield f"{name} heard at {when:.3f} that {who} (rank {event.rank}) was lost: {event.reason}"


def _named(job: Job, history: History, gone: Mapping[str, float]) -> Iterator[str]:
    """Who was killed is named to all others of its group, in time."""
    for group, places in history.places.items():
        for rank, who in places.items():
            if who not in gone:
                continue
            for name in places.values():
                heard = [
                    when
                    for when, of, event in history.news[name]
                    if isinstance(event, Lost) and of == group and event.rank == rank
                ]
                limit = gone[who] + (_NAMED_BEHIND if job.few else _NAMED * len(gone))
                if heard and min(heard) > limit:
                    yield f"{name} heard {min(heard) - gone[who]:.1f} s after it that {who} was lost"


def _errors(job: Job, history: History, gone: Mapping[str, float]) -> Iterator[str]:
    """Collectives fail where they must, in time, and all ranks name the same."""
    for (group, step), told in history.errors.items():
        failed = {name: error for name, (error, _) in told.items() if error is not None}
        if history.mistake is not None and (group, step) == history.mistake[:2]:
            yield from _mistakes(job, told, history.mistake[2])
        elif failed and job.mistake is not None and all(error[0] == _KINDS[job.kind] for error in failed.values()):
            continue  # of the one before, where others had gone on to the mistake
        elif failed and (job.mistake is not None or (job.sound and _must(job, history, gone))):
            yield f"collective {step} of {group!r} failed: {failed}"
        elif job.kind == "kill":
            places = history.places[group]
            for name, (kind, rank, text) in failed.items():
                if kind != "PeerLostError" or (rank != -1 and places.get(rank) not in gone):
                    yield f"collective {step} of {group!r} failed for {name}: {kind} of rank {rank}: {text}"
                if told[name][1] > (_NAMED_BEHIND if job.few else _NAMED * len(gone)):
                    yield f"collective {step} of {group!r} failed for {name} after {told[name][1]:.1f} s"


def _mistakes(
    job: Job, told: Mapping[str, tuple[tuple[str, int | None, str] | None, float]], who: int
) -> Iterator[str]:
    kind, limit = _KINDS[job.kind], _FOUND if job.kind == "mismatch" else _LATE
    if len({error for error, _ in told.values()}) > 1:
        yield f"different errors where rank {who} made a mistake: {told}"
    for name, (error, seconds) in told.items():
        if error is None or error[0] != kind or str(who) not in error[2]:
            yield f"{name} was told {error} where rank {who} made a mistake"
        elif seconds > limit:
            yield f"{name} waited {seconds:.1f} s for {error}"

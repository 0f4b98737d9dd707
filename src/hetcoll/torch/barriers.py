"""`monitored_barrier`: a barrier through torch's store, so that ranks that do not come leave the group in order."""

from __future__ import annotations

import time

import torch.distributed as dist

_POLL = 0.005  # seconds between looks at the store: its own wait would keep other threads from it
_GRACE = 5.0  # seconds that rank 0's verdict may take longer than its wait


def monitored(store: dist.Store, rank: int, size: int, timeout: float, wait_all_ranks: bool) -> None:
    """Returns when all ranks have called it. RuntimeError on all who have, when others do not within `timeout` seconds;
    on rank 0 it names them: the first one only, unless `wait_all_ranks`.
    """
    if timeout <= 0:
        raise RuntimeError(f"[Rank {rank}]: Rank {rank} timed out in monitoredBarrier: it was given no time")
    number = store.add(f"hetcoll/barriers/{rank}", 1)
    prefix = f"hetcoll/barrier/{number}/"
    deadline = time.monotonic() + timeout
    if rank:
        store.set(f"{prefix}{rank}", "here")
        if not _await(store, [f"{prefix}go"], deadline + _GRACE):
            raise RuntimeError(_spell_rank_0(rank, f"no word from rank 0 in {timeout:g} s"))
        if verdict := store.get(f"{prefix}go").decode():
            raise RuntimeError(_spell_rank_0(rank, verdict))
        return
    missing = [r for r in range(1, size) if not _await(store, [f"{prefix}{r}"], deadline)]
    verdict = ""
    if missing:
        shown = missing if wait_all_ranks else missing[:1]
        names = ", ".join(map(str, shown))
        who = "Ranks" if len(shown) > 1 else "Rank"
        verdict = f"{who} {names} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms"
    store.set(f"{prefix}go", verdict)
    if verdict:
        raise RuntimeError(f"[Rank 0]: {verdict}")


def _spell_rank_0(rank: int, reason: str) -> str:
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank "
        f"0 ({reason}). Please check rank 0 logs for faulty rank."
    )


def _await(store: dist.Store, keys: list[str], deadline: float) -> bool:
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True

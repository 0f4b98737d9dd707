"""What ranks must have been told."""

from __future__ import annotations

from ranks import Outcome

from hetcoll import PeerLostError


def check_lost(outcomes: list[Outcome], rank: int, asked: float, within: float) -> None:
    """All but `rank` name it in a PeerLostError; `asked` is when it was killed (time.monotonic)."""
    for outcome in outcomes:
        if outcome.rank == rank:
            continue
        assert isinstance(outcome.error, PeerLostError), f"{outcome.value!r} {outcome.trace}"
        assert outcome.error.rank == rank, outcome.error
        assert f"rank {rank} was lost: " in str(outcome.error)
        assert outcome.ended - asked < within, f"rank {outcome.rank} took {outcome.ended - asked:.2f} s"

"""What programs of NIXL's agents wait for."""

from __future__ import annotations

from typing import Any

from ranks import wait_until


def over(agent: Any, handle: Any) -> str:
    """The state in which a transfer ends."""
    return str(wait_until(lambda: state if (state := agent.check_xfer_state(handle)) != "PROC" else None, 60))


def heard(agent: Any, count: int) -> list[bytes]:
    """So many messages of the other."""
    found: list[bytes] = []

    def look() -> bool:
        for messages in agent.get_new_notifs().values():
            found.extend(messages)
        return len(found) >= count

    wait_until(look, 60)
    return found

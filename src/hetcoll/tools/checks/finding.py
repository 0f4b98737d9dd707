"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. A NOTE costs speed or a feature that this machine may not be meant to have; a PROBLEM is
    something that is there and does not work."""

    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `hetcoll doctor`: about what, how bad, what was found, and what to do (empty where it is fine)."""

    about: str
    level: Level
    text: str
    advice: str = ""

"""Loads pyverbs, for the process that ranks are forked from: on an emulated processor that takes seconds."""

from __future__ import annotations

import contextlib

from hetcoll.links.verbs import library

with contextlib.suppress(library.UnavailableError):  # ranks find out, too
    library.load()

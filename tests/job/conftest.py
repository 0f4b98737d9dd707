"""Processes in which a store is hosted, and looked for, more than once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetcoll.config.env import Config
from hetcoll.rendezvous import bootstrap as rendezvous
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.store import server as store


@pytest.fixture
def clean_slate() -> Iterator[None]:
    """Each test is a process of its own, as far as stores go."""
    yield
    for server in list(store._hosted.values()):
        server.close()
    rendezvous._found.clear()


@pytest.fixture
def unique_id() -> Iterator[UniqueId]:
    """Of a job whose store is here, on all interfaces."""
    made = get_unique_id(Config(linger=0))
    yield made
    store._hosted[made.job_id].close()

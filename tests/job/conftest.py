"""Processes in which a store is hosted, and looked for, more than once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from light_ranks import Job

from hetcoll.config.env import Config
from hetcoll.rendezvous import bootstrap as rendezvous
from hetcoll.rendezvous import uplink
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.protocol import exchanges
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.store import server as store
from hetcoll.rendezvous.store import tree


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


@pytest.fixture
def small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of more than two ranks have trees, of four children a relay, and the ranks here are no rank 0's."""
    for module in (tree, exchanges, store):
        monkeypatch.setattr(module, "FEW", 2)
    monkeypatch.setattr(tree, "FAN", 4)
    monkeypatch.setattr(tree, "_PATIENCE", 0.1)
    monkeypatch.setattr(uplink, "hosted_here", lambda job_id: None)


@pytest.fixture
def job() -> Iterator[Job]:
    """Of light ranks, all of which have entered."""
    with ExitStack() as stack:
        made = Job()
        stack.callback(made.close)
        made.enter()
        yield made

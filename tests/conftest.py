"""Fixtures that give tests their ranks; `ranks.py` says how these work."""

from __future__ import annotations

import contextlib
import gc
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes.harness import on, vendor
from hypothesis import settings
from patience import PATIENCE
from ranks import Ranks, close_all

__all__ = ["on", "vendor"]

gc.disable()  # until all tests are found: a sixth of what that takes
os.environ["HETCOLL_TUNED"] = "none"  # not what somebody has measured here
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each process would have threads that spin for work
# An example that takes 0.2 s is no failure on a machine that others use, too. Before tests' modules are loaded.
settings.register_profile("patient", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("patient")
_LANES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_COSTS = {"verbs": 1000, "slow": 50, "fakes": 10}  # of a test with this mark, in tests without one
_FOLDERS = {"cli": 6, "transport": 6, "job": 4}  # the same of those that start programs
_MOST = 48 // _LANES  # idle processes kept for later tests, by each lane


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the fakes before the first test that uses them, so that its timeout is its own."""
    wanted = any(item.get_closest_marker("fakes") for item in session.items)
    if wanted and not session.config.option.collectonly and not all(map(fakes.why_not, ("cuda", "hip"))):
        fakes.build()
    gc.freeze()  # thousands of tests are nobody's garbage, and each full collection would look through them
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of what is thorough the slice that TEST_SLICE asks for: "2/4" is the third quarter, by the tests' names, and what
    is `whole`.

    In lanes the files that take longest come first: a virtual machine takes minutes, a test of GPU code seconds. One
    that takes half a minute would else begin when the others end.
    """
    if wanted := os.environ.get("TEST_SLICE"):
        number, slices = map(int, wanted.split("/"))
        left = {item for item in items if (mark := item.get_closest_marker("thorough")) and not mark.kwargs.get("whole")
                and zlib.crc32(item.nodeid.encode()) % slices != number % slices}  # fmt: skip
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    for item in items:
        own = item.get_closest_marker("timeout")
        seconds = float(own.args[0] if own else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)
    if hasattr(config, "workerinput"):
        cost: Counter[Path] = Counter()
        for item in items:
            plain = _FOLDERS.get(item.path.parent.name, 1)
            cost[item.path] += next((n for mark, n in _COSTS.items() if item.get_closest_marker(mark)), plain)
        items.sort(key=lambda item: (-cost[item.path], item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A lane takes a file at a time, and all of `verbs`: two virtual machines at once would starve each other."""
    from xdist.scheduler import LoadFileScheduling

    class Lanes(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/verbs" if nodeid.startswith("tests/verbs/") else super()._split_scope(nodeid)

    return Lanes(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What failed and was run once more: why it failed, which pytest-rerunfailures does not tell."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"RERUN {report.nodeid} ({report.when})")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[Any, Ranks]]:
    pools: dict[Any, Ranks] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: close_all(pools.values()))
        yield pools


@pytest.fixture
def pool(_pools: dict[Any, Ranks]) -> Callable[..., Ranks]:
    """Ranks that stay for the tests that follow: ``pool(3, HETCOLL_TRANSPORT="tcp")``. For what leaves them whole."""

    def get(size: int, *, join: bool = True, **env: str | tuple[str, ...]) -> Ranks:
        key = (size, join, *sorted(env.items()))
        found = _pools.pop(key, None)
        if found is not None and found.broken:
            found.kill_all()
            found = None
        while found is None and _pools and sum(p.size for p in _pools.values()) + size > _MOST:
            _pools.pop(next(iter(_pools))).close()  # the one used longest ago
        _pools[key] = found or Ranks(size, env, join=join)
        return _pools[key]

    return get


@pytest.fixture
def launch() -> Iterator[Callable[..., Ranks]]:
    """Ranks for one test, closed at its end: ``launch(3, join=False, HETCOLL_TIMEOUT="2")``."""
    launched: list[Ranks] = []

    def start(size: int, *, join: bool = True, **env: str | tuple[str, ...]) -> Ranks:
        launched.append(Ranks(size, env, join=join))
        return launched[-1]

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: close_all(launched))
        yield start

"""Ranks with GPUs that several modules ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu_kinds import start, start_gpus
from gpu_places import PLACES, ranks_on
from ranks import Ranks, close_all, kept


@pytest.fixture(scope="module", params=PLACES)
def gpus(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ranks with a GPU each: ``gpus(3)``, every one an island unless said otherwise.

    Settings are those of `fakes.environment`.
    """

    def start(size: int, islands: str | None = None, *, env: dict[str, str] | None = None, **settings: Any) -> Ranks:
        asked = "|".join(map(str, range(size))) if islands is None else islands
        more = {**(env or {}), **({"HETCOLL_ISLANDS": asked} if asked else {})}
        return ranks_on(request.param, ["cuda"] * size, more, **settings)

    with kept(start) as get:
        yield get


@pytest.fixture(scope="module")
def mixed() -> Iterator[Any]:
    """`start_gpus`, for ranks that stay whole: they are kept for later tests."""
    with kept(start_gpus) as get:
        yield get


@pytest.fixture(scope="module", params=PLACES)
def whole(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """`start`, for ranks that stay whole; "real" GPUs are NVIDIA's."""

    def begin(kinds: str, **more: Any) -> Ranks:
        words = {name: value[: len(kinds)] if isinstance(value, tuple) else value for name, value in more.items()}
        return start(kinds, place=request.param, **words)

    with kept(begin) as get:
        yield get


@pytest.fixture(params=PLACES)
def placed(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """The same, for one test."""
    made: list[Ranks] = []

    def begin(kinds: str, **more: Any) -> Ranks:
        made.append(start(kinds, place=request.param, **more))
        return made[-1]

    yield begin
    close_all(made)

"""What ranks do where somebody else listens at the port where they would meet: another job, an impostor, anything."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from meeting import foreign_service, meet, torch_style
from patience import DEADLINE
from ports import free_port
from thorough import parametrize

from hetcoll.config.env import Config
from hetcoll.errors import InitError
from hetcoll.rendezvous import bootstrap as rendezvous
from hetcoll.rendezvous.bootstrap import bootstrap
from hetcoll.rendezvous.connections import auth
from hetcoll.rendezvous.control import WORLD, ControlClient

pytestmark = pytest.mark.usefixtures("clean_slate")


@pytest.mark.parametrize("secret", [None, b"sesame"])
def test_a_taken_port_is_an_error_of_a_job_started_by_hand(secret: bytes | None) -> None:
    port = free_port()
    launches, config = torch_style(2, port, job=""), Config(secret=secret, init_timeout=1)
    with (
        foreign_service(port),
        pytest.raises(InitError, match=rf"127\.0\.0\.1:{port}: address already in use .*another MASTER_PORT"),
    ):
        bootstrap(launches[0], config)
    assert meet(launches, [config] * 2) == [[b"0", b"1"]] * 2


def by_hand(rank: int, size: int, port: int, **variables: str) -> str:
    """The last line of the errors of a rank in a process of its own, started as people do, that does not get in."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HETCOLL_", "MASTER_"))}
    env |= {"PYTHONPATH": str(Path(rendezvous.__file__).parents[2]), "RANK": str(rank), "WORLD_SIZE": str(size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HETCOLL_INIT_TIMEOUT": "20"} | variables
    done = subprocess.run(
        [sys.executable, "-c", "import hetcoll; hetcoll.init()"],
        env=env,
        capture_output=True,
        timeout=DEADLINE,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr.strip().rpartition("\n")[2]


@contextmanager
def forming(port: int, size: int, **settings: object) -> Iterator[list[Future[list[bytes]]]]:
    """All ranks but the last of a job that was started by hand, waiting for that; what becomes of their exchange."""
    launches, config = torch_style(size, port, job=""), Config(**settings)  # type: ignore[arg-type]
    clients = [ControlClient(bootstrap(each, config), each.rank, size, 20) for each in launches[:-1]]
    with ThreadPoolExecutor(size) as pool:
        yield [pool.submit(client.exchange, WORLD, b"introduce", b"") for client in clients]
        for client in clients:
            client.close()


@parametrize("variables", [{}, {"HETCOLL_SECRET": "sesame"}], first=1)
@pytest.mark.parametrize(
    ("rank", "size", "clash"),
    [
        (0, 3, "two processes say that they are rank 0: "),
        (1, 3, "two processes say that they are rank 1: "),
        (0, 4, "says that the job has 4 ranks; ranks 0-1 said 3"),
        (3, 4, "says that the job has 4 ranks; ranks 0-1 said 3"),
    ],
)
def test_a_second_job_at_one_port_is_an_error_on_every_rank(
    variables: dict[str, str], rank: int, size: int, clash: str
) -> None:
    port, secret = free_port(), variables.get("HETCOLL_SECRET", "").encode() or None
    with forming(port, 3, secret=secret) as first:
        error = by_hand(rank, size, port, **variables)
        assert clash in error
        assert "two jobs started with the same MASTER_ADDR and MASTER_PORT" in error
        assert ("address already in use (EADDRINUSE)" in error) == (rank == 0)
        for one in first:
            with pytest.raises(InitError, match=clash):
                one.result(20)


def test_a_second_rank_0_is_known_before_the_first_has_joined() -> None:
    port = free_port()
    launches = torch_style(2, port, job="")
    unique_id = bootstrap(launches[0], Config())
    assert "two processes say that they are rank 0: the one that hosts the job's store" in by_hand(0, 2, port)
    for rank in range(2):
        with pytest.raises(InitError, match="two processes say that they are rank 0"):
            ControlClient(unique_id, rank, 2, 20)


def test_a_job_that_stands_is_not_ended_by_one_that_comes_to_its_port(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    launches = torch_style(2, port, job="")
    unique_id = bootstrap(launches[0], Config())
    with ThreadPoolExecutor(2) as pool:
        clients = list(pool.map(lambda rank: ControlClient(unique_id, rank, 2, 20), range(2)))
        for tag in (b"first", b"second"):
            met = [pool.submit(client.exchange, WORLD, tag, b"") for client in clients]
            assert [each.result(20) for each in met] == [[b"", b""]] * 2
            for rank in range(2):
                assert f"two processes say that they are rank {rank}" in by_hand(rank, 2, port)
                assert f"two processes say that they are rank {rank}" in caplog.text
        for client in clients:
            client.close()


def test_a_named_job_finds_no_second_rank_0_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier run that hangs with the name of this one: neither mixed with nor silently avoided."""
    monkeypatch.setattr(rendezvous, "_GLANCE", DEADLINE)  # on a busy machine the first one's store answers late
    port = free_port()
    launch = torch_style(2, port)[0]
    bootstrap(launch, Config())
    rendezvous._found.clear()  # another process
    ports = rf"127\.0\.0\.1:{port}(?: to \d+)?"  # somebody may have the next ones
    with pytest.raises(InitError, match=rf"{ports}: address already in use .* is rank 0 of this job too"):
        bootstrap(launch, Config(init_timeout=DEADLINE))


@contextmanager
def impostor(port: int) -> Iterator[threading.Event]:
    """Repeats the greeting that this job's store would send, and answers no claim as it should."""
    key = rendezvous._key("j", 3)
    with foreign_service(port, auth.Challenge(bytes(32), auth.Service.STORE, os.urandom(16) + key).greeting) as (
        _,
        met,
    ):
        yield met


def test_a_job_with_a_secret_goes_on_after_an_impostor() -> None:
    port = free_port()
    with impostor(port) as met:
        config = Config(secret=b"sesame", init_timeout=40)
        assert meet(torch_style(3, port), [config] * 3) == [[b"0", b"1", b"2"]] * 3
        assert met.wait(5)


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", bytes(200)])
def test_a_foreign_service_at_the_master_port_is_passed_over_without_a_word(greeting: bytes) -> None:
    port = free_port()
    with foreign_service(port, greeting) as (heard, reached):
        assert meet(torch_style(3, port), [Config(init_timeout=20)] * 3) == [[b"0", b"1", b"2"]] * 3
        assert reached.wait(5)  # it was looked at
    assert not any(heard)


def test_the_port_of_torchruns_agent_is_not_touched() -> None:
    port = free_port()
    with foreign_service(port) as (_, reached):
        assert meet(torch_style(2, port, agent_store=True), [Config()] * 2) == [[b"0", b"1"]] * 2
    assert not reached.is_set()


def test_two_jobs_at_the_same_ports_do_not_mix() -> None:
    port = free_port()
    launches = [*torch_style(2, port, "one"), *torch_style(2, port, "two"), *torch_style(3, port, "one")]
    assert meet(launches, [Config(init_timeout=20)] * 7) == [[b"0", b"1"]] * 4 + [[b"0", b"1", b"2"]] * 3

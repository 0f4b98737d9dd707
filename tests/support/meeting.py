"""Ranks of a job that find rank 0's store, each in a thread, and what else may listen where they look."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hetcoll.config.env import Config, Launch
from hetcoll.rendezvous.bootstrap import bootstrap
from hetcoll.rendezvous.control import WORLD, ControlClient


def meet(launches: list[Launch], configs: list[Config]) -> list[list[bytes]]:
    """Every rank finds the store and joins; what each got from an exchange."""

    def one(launch: Launch, config: Config) -> list[bytes]:
        client = ControlClient(bootstrap(launch, config), launch.rank, launch.size, config.init_timeout)
        try:
            return client.exchange(WORLD, b"ranks", b"%d" % launch.rank)
        finally:
            client.exchange(WORLD, b"end", b"")
            client.close()

    with ThreadPoolExecutor(len(launches)) as pool:
        return [job.result(30) for job in [pool.submit(one, *each) for each in zip(launches, configs, strict=True)]]


def torch_style(size: int, port: int, job: str = "j", **changes: object) -> list[Launch]:
    """`job` "": started by hand."""
    return [Launch(r, size, r, size, ("127.0.0.1", port), "torchrun", job, **changes) for r in range(size)]  # type: ignore[arg-type]


@contextmanager
def foreign_service(port: int, greeting: bytes = b"") -> Iterator[tuple[list[bytes], threading.Event]]:
    """Something else that listens at a port; what its connections sent it."""
    heard: list[bytes] = []
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                reached.set()
                with sock:
                    sock.settimeout(0.5)
                    try:
                        sock.sendall(greeting)
                        while data := sock.recv(1000):
                            heard.append(data)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard, reached
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)

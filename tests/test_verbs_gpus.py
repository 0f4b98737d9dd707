"""Stand-in GPUs of both vendors that exchange their memory over real kernel verbs, in guests (tests/verbs)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import standins
from test_verbs import FOLDER, SECONDS, _guests, finish, run_suites, start_guest

__all__ = ["_guests"]

pytestmark = [pytest.mark.verbs, pytest.mark.standins, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module", autouse=True)
def _kernels(_guests: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What stand-in devices run, compiled before there are guests."""
    for vendor in ("cuda", "hip"):
        if why_not := standins.why_not(vendor):
            pytest.skip(why_not)
    standins.build()
    paths = [str(FOLDER.parent), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETCOLL_CACHE", str(tmp_path_factory.mktemp("cache") / "kernels"))
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run([sys.executable, str(FOLDER / "gpus.py")], check=True, env=environ, timeout=SECONDS)
        yield


def test_from_device_to_device() -> None:
    run_suites("suite_gpus.py")


def test_cables_between_devices_fail() -> None:
    run_suites("suite_gpus_cables.py")


def test_two_guests_as_two_hosts_with_two_gpus_each() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(FOLDER / "gpus_two_hosts.py"))
    finish(*(start_guest(script, str(host), group=f"{host}:{port}") for host in range(2)))

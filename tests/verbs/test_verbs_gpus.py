"""Fake GPUs of both vendors that exchange their memory over real kernel verbs, in guests (tests/verbs)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import fakes
import pytest
from guests import FOLDER, PATHS, SECONDS, run_hosts, run_suites

pytestmark = [
    pytest.mark.calm,
    pytest.mark.verbs,
    pytest.mark.fakes,
    pytest.mark.thorough(whole=True),
    pytest.mark.timeout(2 * SECONDS + 60),
]


@pytest.fixture(scope="module", autouse=True)
def _kernels(guests: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What fake devices run, compiled before there are guests."""
    fakes.require("both")
    fakes.build()
    paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETCOLL_CACHE", str(tmp_path_factory.mktemp("cache") / "kernels"))
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run([sys.executable, str(FOLDER / "gpus.py")], check=True, env=environ, timeout=SECONDS)
        yield


def test_from_device_to_device() -> None:
    run_suites("suite_gpus.py")


@pytest.mark.thorough
def test_cables_between_devices_fail() -> None:
    run_suites("suite_gpus_cables.py")


@pytest.mark.thorough
def test_two_guests_as_two_hosts_with_two_gpus_each() -> None:
    run_hosts("gpus_two_hosts.py")

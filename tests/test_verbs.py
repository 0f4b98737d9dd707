"""RDMA on real kernel verbs: suites that run in virtual machines with Soft-RoCE devices (tests/verbs/guest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("verbs")
GUEST = FOLDER / "guest.py"
SECONDS = 240

pytestmark = [pytest.mark.verbs, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module", autouse=True)
def _guests() -> None:
    done = subprocess.run([sys.executable, GUEST, "--check"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"no guests here: {done.stderr.strip()}")


def run_suite(name: str) -> None:
    """pytest on a file of tests/verbs, in a guest. Plugins are loaded by name, since imports take seconds there."""
    plain = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--color=no"]
    words = [sys.executable, str(GUEST), "--timeout", str(SECONDS), *plain, "--durations=5", str(FOLDER / name)]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS + 30, env=environ)
    print(done.stdout[-1500:])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_devices() -> None:
    run_suite("suite_devices.py")


def test_collectives() -> None:
    run_suite("suite_collectives.py")

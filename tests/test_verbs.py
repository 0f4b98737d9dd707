"""RDMA on real kernel verbs: suites that run in virtual machines with Soft-RoCE devices (tests/verbs/guest.py)."""

from __future__ import annotations

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


def run_suite(name: str, *, cpus: int = 2) -> None:
    """pytest on a file of tests/verbs, in a guest."""
    pytest_words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", str(FOLDER / name)]
    words = [sys.executable, str(GUEST), "--cpus", str(cpus), "--timeout", str(SECONDS), *pytest_words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS + 30)
    print(done.stdout[-400:])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_devices() -> None:
    run_suite("suite_devices.py")

"""Whether there can be guests."""

from __future__ import annotations

import subprocess
import sys

import pytest
from guests import GUEST
from patience import DEADLINE


@pytest.fixture(scope="session")
def guests() -> None:
    done = subprocess.run([sys.executable, GUEST, "--check"], capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode != 0:
        pytest.skip(f"no guests here: {done.stderr.strip()}")

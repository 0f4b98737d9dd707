"""What becomes of calls over kernel verbs when cables, devices and ranks fail: suites of tests/verbs, in a guest."""

from __future__ import annotations

import pytest
from guests import SECONDS, run_suites

pytestmark = [
    pytest.mark.verbs,
    pytest.mark.thorough(whole=True),
    pytest.mark.usefixtures("guests"),
    pytest.mark.timeout(2 * SECONDS + 60),
]


def test_faults() -> None:
    run_suites("suite_faults.py", "suite_mtu.py", "suite_campaign.py")

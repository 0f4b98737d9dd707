"""RDMA on real kernel verbs: suites that run in virtual machines with Soft-RoCE devices (tests/verbs/guest.py)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("verbs")
GUEST = FOLDER / "guest.py"
SECONDS = 420  # on an idle machine no guest needs a third of it

pytestmark = [pytest.mark.verbs, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module", autouse=True)
def _guests() -> None:
    done = subprocess.run([sys.executable, GUEST, "--check"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"no guests here: {done.stderr.strip()}")


def start_guest(*words: str, group: str = "", pyverbs: Path | None = None) -> subprocess.Popen[str]:
    """A guest with this test's Python path, and perhaps another pyverbs and its libraries.

    Plugins are loaded by name, since imports take seconds there.
    """
    options = ["--timeout", str(SECONDS), *(["--group", group] if group else [])]
    paths = [str(FOLDER.parent), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if pyverbs is not None:
        paths.append(str(pyverbs / "python"))
        environ["LD_LIBRARY_PATH"] = str(pyverbs / "lib")
        environ["IBV_DRIVERS"] = "rxe"  # it would look for a list of them where it was built
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.Popen(
        [sys.executable, str(GUEST), *options, sys.executable, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
    )  # fmt: skip


def finish(*guests: subprocess.Popen[str]) -> None:
    """Wait for guests; all must end with status 0."""
    try:
        outputs = [guest.communicate(timeout=SECONDS + 30)[0] for guest in guests]
    finally:
        for guest in guests:
            guest.kill()
    for guest, output in zip(guests, outputs, strict=True):
        print(output[-1500:])
        assert guest.returncode == 0, output


def run_suites(*names: str, pyverbs: Path | None = None) -> None:
    """pytest on files of tests/verbs, in a guest."""
    plain = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--color=no", "--durations=5"]
    finish(start_guest(*plain, *(str(FOLDER / name) for name in names), pyverbs=pyverbs))


def test_the_pyverbs_of_the_package_index() -> None:
    command = [sys.executable, FOLDER / "index_pyverbs.py", "--where"]
    pyverbs = Path(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip())
    if not pyverbs.exists():
        pytest.skip(f"no {pyverbs}: tests/verbs/index_pyverbs.py makes it")
    run_suites("suite_devices.py", "suite_memory.py", pyverbs=pyverbs)


def test_devices_memory_and_collectives() -> None:
    run_suites("suite_devices.py", "suite_memory.py", "suite_collectives.py")


def test_faults() -> None:
    run_suites("suite_faults.py", "suite_mtu.py")


def test_two_guests_as_two_hosts() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    finish(*(start_guest(str(FOLDER / "two_hosts.py"), str(host), group=f"{host}:{port}") for host in range(2)))

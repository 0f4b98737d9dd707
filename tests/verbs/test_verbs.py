"""RDMA on real kernel verbs: suites that run in virtual machines with Soft-RoCE devices (tests/verbs/guest.py)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
PATHS = [str(TESTS), str(TESTS / "support"), str(TESTS / "gpu"), str(FOLDER)]
GUEST = FOLDER / "guest.py"
SECONDS = 420  # on an idle machine no guest needs a third of it
CRASHED = 123  # guest.py's status where QEMU died of a signal

pytestmark = [pytest.mark.verbs, pytest.mark.timeout(2 * SECONDS + 60)]


@pytest.fixture(scope="module", autouse=True)
def _guests() -> None:
    done = subprocess.run([sys.executable, GUEST, "--check"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"no guests here: {done.stderr.strip()}")


def start_guest(words: Sequence[str], group: str, pyverbs: Path | None) -> subprocess.Popen[str]:
    """A guest with this test's Python path, and perhaps another pyverbs and its libraries.

    Plugins are loaded by name, since imports take seconds there.
    """
    options = ["--timeout", str(SECONDS), *(["--group", group] if group else [])]
    paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
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


def run_guests(*programs: Sequence[str], pyverbs: Path | None = None) -> None:
    """Each program in a guest, several in guests of one network; all must end with status 0.

    QEMU itself died of SIGSEGV once in some hundred guests. Then, and only then, all are started once more.
    """
    for again in (False, True):
        groups = [""]
        if len(programs) > 1:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
                free.bind(("127.0.0.1", 0))
                groups = [f"{host}:{free.getsockname()[1]}" for host in range(len(programs))]
        guests = [start_guest(*each, pyverbs) for each in zip(programs, groups, strict=True)]
        try:
            outputs = [guest.communicate(timeout=SECONDS + 30)[0] for guest in guests]
        finally:
            for guest in guests:
                guest.kill()
        if again or all(guest.returncode != CRASHED for guest in guests):
            break
        warnings.warn(f"QEMU died: {outputs}", stacklevel=2)
    for guest, output in zip(guests, outputs, strict=True):
        print(output[-1500:])
        assert guest.returncode == 0, output


def run_suites(*names: str, pyverbs: Path | None = None) -> None:
    """pytest on files of tests/verbs, in a guest."""
    plain = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--color=no", "--durations=5"]
    run_guests([*plain, *(str(FOLDER / name) for name in names)], pyverbs=pyverbs)


def run_hosts(name: str) -> None:
    """A program of tests/verbs in two guests, which are the hosts of one job."""
    run_guests(*([str(FOLDER / name), str(host)] for host in range(2)))


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
    run_hosts("two_hosts.py")


@pytest.mark.parametrize("times", [1, 2])
def test_guests_start_once_more_where_qemu_dies(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "qemu-system-x86_64"
    stand_in.write_text(f"""#!/bin/sh
        echo >>{tmp_path}/starts
        [ $(wc -l <{tmp_path}/starts) -gt {times} ] || kill -SEGV $$
        exec {shutil.which(stand_in.name)} "$@"
    """)
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    dies = contextlib.nullcontext() if times == 1 else pytest.raises(AssertionError, match="SIGSEGV")
    with dies, pytest.warns(UserWarning, match="QEMU died"):
        run_guests(["-c", "print('alive')"])

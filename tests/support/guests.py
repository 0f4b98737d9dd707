"""Suites and programs of tests/verbs, run in virtual machines with Soft-RoCE devices (tests/verbs/guest.py)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FOLDER = TESTS / "verbs"
PATHS = [str(TESTS), str(TESTS / "support"), str(FOLDER)]  # where programs in guests find what they import
GUEST = FOLDER / "guest.py"
SECONDS = 1200  # on an idle machine no guest needs a quarter of it
PATIENCE = 5  # its processors are emulated: so many times as long as elsewhere, for a test and all in it
CRASHED = 123  # guest.py's status where QEMU died of a signal, or the guest's kernel of itself


def start_guest(words: Sequence[str], group: str, pyverbs: Path | None) -> subprocess.Popen[str]:
    """A guest with this test's Python path, and perhaps another pyverbs and its libraries.

    Plugins are loaded by name, since imports take seconds there.
    """
    options = ["--timeout", str(SECONDS), *(["--group", group] if group else [])]
    paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TEST_PATIENCE": str(PATIENCE)}
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

    QEMU died of SIGSEGV once in some hundred guests, and a kernel (Linux 6.1) stood still once in as many, which
    no program may bring about. Then, and only then, all are started once more.
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
        warnings.warn(f"QEMU or a kernel died: {outputs}", stacklevel=2)
    for guest, output in zip(guests, outputs, strict=True):
        print(output[-1500:])
        assert guest.returncode == 0, output


def run_suites(*names: str, pyverbs: Path | None = None) -> None:
    """pytest on files of tests/verbs, in a guest."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--color=no", "--durations=5"]
    run_guests(["-m", "pytest", *options, *(str(FOLDER / name) for name in names)], pyverbs=pyverbs)


def run_hosts(name: str) -> None:
    """A program of tests/verbs in two guests, which are the hosts of one job."""
    run_guests(*([str(FOLDER / name), str(host)] for host in range(2)))

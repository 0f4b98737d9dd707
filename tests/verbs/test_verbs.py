"""RDMA on real kernel verbs: suites that run in virtual machines with Soft-RoCE devices (tests/verbs/guest.py)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from guests import FOLDER, GUEST, SECONDS, run_guests, run_hosts, run_suites
from patience import DEADLINE
from ranks import wait_until

pytestmark = [
    pytest.mark.verbs,
    pytest.mark.thorough(whole=True),
    pytest.mark.usefixtures("guests"),
    pytest.mark.timeout(2 * SECONDS + 60),
]


@pytest.mark.thorough
def test_the_pyverbs_of_the_package_index() -> None:
    command = [sys.executable, FOLDER / "index_pyverbs.py", "--where"]
    pyverbs = Path(subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout.strip())
    if not pyverbs.exists():
        pytest.skip(f"no {pyverbs}: tests/verbs/index_pyverbs.py makes it")
    run_suites("suite_devices.py", "suite_memory.py", pyverbs=pyverbs)


def test_devices_memory_and_collectives() -> None:
    run_suites("suite_devices.py", "suite_memory.py", "suite_windows.py", "suite_collectives.py")


def test_what_samples_of_checksums_cost() -> None:
    """Less than a hundredth of the instructions of an all-reduce over TCP, the kernel's included."""
    program = [str(FOLDER.parents[1] / "benchmarks/integrity.py"), "--ranks", "2", "--modes", "off", "sampled"]
    command = [sys.executable, str(GUEST), "--count", "--timeout", str(SECONDS), sys.executable, *program]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}  # dictionaries that collide cost a hundredth, too
    counted = [*command, "--most", "1.013", "--bytes", "8", "1024", "4096", "65536"]  # runs differ by 0.3 %
    done = subprocess.run(counted, env=environ, capture_output=True, text=True, timeout=SECONDS + 30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_guests_as_two_hosts() -> None:
    run_hosts("two_hosts.py")


@pytest.mark.parametrize("times", [1, 2])
def test_guests_start_once_more_where_qemu_dies(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = tmp_path / "qemu-system-x86_64"
    fakes.write_text(f"""#!/bin/sh
        echo >>{tmp_path}/starts
        [ $(wc -l <{tmp_path}/starts) -gt {times} ] || kill -SEGV $$
        exec {shutil.which(fakes.name)} "$@"
    """)
    fakes.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    dies = contextlib.nullcontext() if times == 1 else pytest.raises(AssertionError, match="SIGSEGV")
    with dies, pytest.warns(UserWarning, match="QEMU or a kernel died"):
        run_guests(["-c", "print('alive')"])


def test_guests_start_once_more_where_the_kernel_dies(tmp_path: Path) -> None:
    crash = "import os; os.sync(); open('/proc/sysrq-trigger', 'w').write('c')"
    with pytest.raises(AssertionError, match="Kernel panic"), pytest.warns(UserWarning, match="QEMU or a kernel died"):
        run_guests(["-c", crash])


def test_the_machine_ends_with_who_started_it(tmp_path: Path) -> None:
    fake, told = tmp_path / "qemu-system-x86_64", tmp_path / "pid"
    fake.write_text(f"#!/bin/sh\necho $$ >{told}.new && mv {told}.new {told} && exec sleep 600\n")
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, str(GUEST), "true"], env=environ) as guest:
        wait_until(told.exists, 60)
        guest.kill()
    status = Path(f"/proc/{told.read_text().strip()}/status")
    wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text(), 30)

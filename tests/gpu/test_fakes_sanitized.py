"""The fakes under the sanitizers: they are threads over shared memory, as what they test is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import fakes
import pytest
from patience import DEADLINE, PATIENCE

pytestmark = [pytest.mark.fakes, pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(400)]

SOURCE = Path(fakes.__file__).parent / "native" / "driver_test.cc"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_clean(sanitizer: str, tmp_path: Path) -> None:
    fakes.require("cuda")
    lib = fakes.build(sanitizer) / "lib"
    program = tmp_path / "driver_test"
    names = [f"-l:{name}" for name in ("libcuda.so.1", "libnvrtc.so.13", "libnccl.so.2")]
    words = [
        "-std=c++20",
        "-O1",
        "-g1",
        "-pthread",
        f"-fsanitize={sanitizer}",
        str(SOURCE),
        f"-L{lib}",
        f"-Wl,-rpath,{lib}",
    ]
    subprocess.run([os.environ.get("CXX") or "g++", *words, *names, "-o", str(program)], check=True, timeout=DEADLINE)
    settings = {"FAKE_DEVICES": "3", "FAKE_JITTER": "1:200", "FAKE_TIMEOUT": "60"}
    options = {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [str(program)],
        env={**os.environ, **settings, **options},
        capture_output=True,
        text=True,
        timeout=PATIENCE * 200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout

"""The harnesses of ``native/fuzz``: native parsers under any bytes, built with Clang's libFuzzer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "fuzz"
NAMES = tuple(sorted(f"native: {path.stem.removesuffix('_fuzz')}" for path in (ROOT / "native/fuzz").glob("*_fuzz.cc")))
MISSING = "no clang++ with libFuzzer (apt install clang-19), so these are left out: " + ", ".join(NAMES)

_OPTIONS = {"BUILD_FUZZERS": "ON", "SANITIZE": "fuzzer-no-link,address,undefined"}
_LONGEST = 800  # bytes of an input, which is a list of choices
_MEMORY = 2048  # MiB that a harness may take, of which ASan keeps what was freed


def compiler() -> str | None:
    """A Clang that can link libFuzzer, if there is one."""
    program = (
        b'#include <cstdint>\nextern "C" int LLVMFuzzerTestOneInput(const std::uint8_t*, unsigned long) { return 0; }'
    )
    for name in ("clang++-19", "clang++"):
        with tempfile.TemporaryDirectory() as folder:
            command = [name, "-xc++", "-fsanitize=fuzzer", "-o", f"{folder}/probe", "-"]
            if shutil.which(name) and subprocess.run(command, input=program, capture_output=True).returncode == 0:
                return name
    return None


def build(clang: str) -> None:
    """Build all, or what has changed since."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert cmake is not None, "CMake is missing: make .venv/dev"
    defined = [f"-DHETCOLL_{name}={value}" for name, value in _OPTIONS.items()]
    made = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0"]
    where = ["-S", str(ROOT / "native"), "-B", str(BUILD), f"-DCMAKE_CXX_COMPILER={clang}"]
    subprocess.run([cmake, *where, *defined, *made], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(BUILD), "--target", "fuzzers"], check=True)


def command(name: str, seconds: int, again: Path | None) -> list[str]:
    """What fuzzes, from where it had come before; or what gives this file to the harness alone."""
    short = name.removeprefix("native: ")
    harness = [str(BUILD / f"hetcoll_fuzz_{short}"), "-timeout=30", f"-rss_limit_mb={_MEMORY}"]
    if again is not None:
        return [*harness, str(again)]
    corpus = BUILD / "corpus" / short
    corpus.mkdir(parents=True, exist_ok=True)
    how = [f"-max_total_time={seconds}", f"-max_len={_LONGEST}", "-len_control=0", f"-artifact_prefix={BUILD}/found-"]
    return [*harness, *how, str(corpus)]

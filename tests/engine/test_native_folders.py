"""What the folders of the engine's source may include: each sees itself and those below it, and no others."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from patience import DEADLINE
from thorough import HOUSE

pytestmark = HOUSE

ROOT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake") or shutil.which("cmake", path=Path(sys.executable).parent) or ""
COMPILER = shutil.which("c++") or shutil.which("g++") or ""
FOLDERS = ("base", "kernels", "plan", "transport", "host", "proxy", "gpu")  # from the lowest up
PROBES = {  # a header of each
    "base": "base/clock.h",
    "kernels": "kernels/kernels.h",
    "plan": "plan/plan.h",
    "transport": "transport/transport.h",
    "host": "host/task.h",
    "proxy": "proxy/proxy.h",
    "gpu": "gpu/queue.h",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the engine's source in `native`, configured in `build`."""
    if not CMAKE or not COMPILER:
        pytest.skip("CMake (`pip install cmake`) and a C++ compiler are needed")
    folder = tmp_path_factory.mktemp("engine")
    shutil.copytree(ROOT / "native", folder / "native")
    command = [CMAKE, "-S", str(folder / "native"), "-B", str(folder / "build"), f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return folder


def compile_commands(copy: Path) -> dict[str, dict[str, str]]:
    """How a file of each folder is compiled."""
    commands = json.loads((copy / "build" / "compile_commands.json").read_text())
    native = copy / "native"
    return {Path(c["file"]).relative_to(native).parts[0]: c for c in commands}


def seen(copy: Path, folder: str) -> set[str]:
    """Whose headers are found where a file of this folder is compiled."""
    entry = compile_commands(copy)[folder]
    source = copy / "native" / folder / "probe_of_test.cc"
    source.write_text("".join(f'#if __has_include("{h}")\nsees {name}\n#endif\n' for name, h in PROBES.items()))
    words = shlex.split(entry["command"])
    command = [*words[: words.index("-o")], "-E", "-P", str(source)]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"sees (\w+)", done.stdout))


def test_each_folder_sees_itself_and_none_above(copy: Path) -> None:
    assert set(compile_commands(copy)) == set(FOLDERS), "a folder is missing here"
    assert all((ROOT / "native" / header).exists() for header in PROBES.values())
    sees = {folder: seen(copy, folder) for folder in FOLDERS}
    assert all({folder, "base"} <= sees[folder] for folder in FOLDERS)
    assert not [f"{low} sees {high}" for low, high in combinations(FOLDERS, 2) if high in sees[low]]
    # Plans and what carries them know nothing of each other, nor does the engine of GPUs.
    assert "plan" not in sees["transport"]
    assert "host" not in sees["proxy"] | sees["gpu"]


def test_a_wrong_include_does_not_compile(copy: Path) -> None:
    source = copy / "native" / "base" / "team.cc"
    build = [CMAKE, "--build", str(copy / "build"), "--target", "hetcoll_base"]
    assert subprocess.run(build, capture_output=True, timeout=DEADLINE).returncode == 0
    right = source.read_text()
    try:
        source.write_text('#include "plan/plan.h"\n' + right)
        done = subprocess.run(build, capture_output=True, text=True, timeout=DEADLINE)
    finally:
        source.write_text(right)
    assert done.returncode != 0
    assert "plan/plan.h" in done.stdout + done.stderr


def test_no_include_goes_around_the_folders() -> None:
    """What is included from the source's root, or from beside a test, cannot climb out with dots."""
    files = [f for f in (ROOT / "native").rglob("*") if f.suffix in (".h", ".cc")]
    assert files
    pattern = re.compile(r'^\s*#\s*include\s*"(?:[^"]*/)?\.\.?/', re.MULTILINE)
    assert not [str(f.relative_to(ROOT)) for f in files if pattern.search(f.read_text())]

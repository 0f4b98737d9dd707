"""What `packaging/wheels.py` finds wrong in what it has built, and what it asks pip for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from thorough import HOUSE

pytestmark = HOUSE

ROOT = Path(__file__).resolve().parents[2]
GOOD = "hetcoll-1.0-cp312-abi3-manylinux_2_28_aarch64.whl"
FILES = {"hetcoll/_native.abi3.so", "hetcoll/py.typed", "hetcoll-1.0.dist-info/licenses/LICENSE"}
SOURCES = {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO", "native/CMakeLists.txt", "src/hetcoll/py.typed"}


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hetcoll_packaging_wheels", ROOT / "packaging/wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_good_ones_have_no_faults(wheels: ModuleType) -> None:
    assert wheels.faults_of_wheel(GOOD, FILES) == []
    assert wheels.faults_of_wheel(GOOD.replace("2_28", "2_17"), FILES) == []
    old = FILES - {"hetcoll/_native.abi3.so"} | {"hetcoll/_native.cpython-311-aarch64-linux-gnu.so"}
    assert wheels.faults_of_wheel(GOOD.replace("cp312-abi3", "cp311-cp311"), old) == []
    no_gil = FILES - {"hetcoll/_native.abi3.so"} | {"hetcoll/_native.cpython-313t-x86_64-linux-gnu.so"}
    assert wheels.faults_of_wheel("hetcoll-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl", no_gil) == []
    assert wheels.faults_of_sdist(SOURCES, {"native/CMakeLists.txt"}) == []


@pytest.mark.parametrize(
    ("name", "files", "fault"),
    [
        (GOOD.replace("2_28", "2_35"), FILES, "glibc"),
        (GOOD.replace("manylinux_2_28", "linux"), FILES, "glibc"),
        (GOOD, FILES - {"hetcoll/py.typed"}, "py.typed"),
        (GOOD, {name for name in FILES if "LICENSE" not in name}, "licence"),
        (GOOD, FILES | {"hetcoll.libs/libstdc++.so"}, "modules"),
        (GOOD.replace("cp312-abi3", "cp311-cp311"), FILES, "modules"),
        (GOOD, {name for name in FILES if not name.endswith(".so")}, "modules"),
    ],
)
def test_faults_of_wheels(wheels: ModuleType, name: str, files: set[str], fault: str) -> None:
    (found,) = wheels.faults_of_wheel(name, files)
    assert fault in found


def test_faults_of_sdists(wheels: ModuleType) -> None:
    names = SOURCES - {"LICENSE"} | {"build/x/module.o", "src/hetcoll/_native.abi3.so"}
    faults = wheels.faults_of_sdist(names, {"native/base/clock.h"})
    assert {fault.split()[0] for fault in faults} == {
        "LICENSE", "native/base/clock.h", "build/x/module.o", "src/hetcoll/_native.abi3.so",
    }  # fmt: skip


def test_pip_is_asked_for_what_a_system_takes(wheels: ModuleType) -> None:
    words = wheels.installs("3.13", "aarch64")
    assert {"--only-binary=:all:", "--python-version=3.13", "--abi=cp313", "--abi=abi3", "--abi=none"} <= set(words)
    platforms = [word.partition("=")[2] for word in words if word.startswith("--platform=")]
    assert platforms[0] == "manylinux_2_28_aarch64"
    assert {"manylinux_2_17_aarch64", "manylinux2014_aarch64"} < set(platforms)
    assert "manylinux_2_29_aarch64" not in platforms

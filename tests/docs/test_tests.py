"""How tests lie: what two files need is in tests/support or beside them, and no file of tests needs another."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from thorough import HOUSE

pytestmark = HOUSE

TESTS = Path(__file__).resolve().parents[1]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_file_imports_a_file_of_tests() -> None:
    """It would bring that file's fixtures and marks along, and neither could be moved or read alone."""
    files = sorted(TESTS.rglob("*.py"))
    assert Path(__file__).resolve() in files
    found = {
        f"{path.relative_to(TESTS)} imports {name}"
        for path in files
        for name in imports(path)
        if name.rpartition(".")[2].startswith(("test_", "suite_"))
    }
    assert not found, "\n".join(sorted(found))


def test_files_of_tests_have_different_names() -> None:
    """Folders are no packages: of two modules of one name the ranks' processes would find the first."""
    modules = [path for path in TESTS.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in modules if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []

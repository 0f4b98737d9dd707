"""The rooms of a Python package and the arrows between them: python tests/support/house.py [FOLDER] [--each]

A room is a folder, or a file that lies in the package's own. An arrow leads from one room to another if a file of
the one imports something of the other's, wherever it does so and if only for types. The package's face, its
`__init__.py`, is no room: it names what users may. Folders within those of `WHOLE` are parts of these, unless `--each`
is said.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

WHOLE = ("rendezvous", "serving", "tools", "vendors/devices")
PACKAGE = Path(__file__).resolve().parents[2] / "src/hetcoll"


def _imported(file: Path, package: Path) -> Iterator[Path]:
    """The package's files that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            words = [alias.name.split(".") for alias in node.names]
            found = [package.parent.joinpath(*name) for name in words]
        elif isinstance(node, ast.ImportFrom):
            start = file.parents[node.level - 1] if node.level else package.parent
            module = start.joinpath(*(node.module or "").split("."))
            names = [module / alias.name for alias in node.names]
            found = [name if _source(name) else module for name in names]
        else:
            continue
        yield from (source for path in found if package in (path, *path.parents) and (source := _source(path)))


def _source(module: Path) -> Path | None:
    """The file of a module."""
    return next((file for file in (module / "__init__.py", Path(f"{module}.py")) if file.exists()), None)


def _room(file: Path, package: Path, whole: tuple[str, ...]) -> str:
    folder = file.parent.relative_to(package).as_posix()
    if folder == ".":
        return file.stem
    return next((name for name in whole if folder == name or folder.startswith(f"{name}/")), folder)


def draw(package: Path = PACKAGE, whole: tuple[str, ...] = WHOLE) -> tuple[set[str], set[tuple[str, str]]]:
    """The rooms of a package, and the arrows between them."""
    face = "__init__"
    files = {file: _room(file, package, whole) for file in sorted(package.rglob("*.py"))}
    arrows = {(room, files[other]) for file, room in files.items() for other in _imported(file, package)}
    return set(files.values()) - {face}, {(a, b) for a, b in arrows if a != b and face not in (a, b)}


if __name__ == "__main__":
    folders = [Path(word).resolve() for word in sys.argv[1:] if word != "--each"]
    rooms, arrows = draw(*folders, whole=() if "--each" in sys.argv else WHOLE)
    print(*(f"{a} -> {b}" for a, b in sorted(arrows)), sep="\n")
    print(f"{len(rooms)} rooms, {len(arrows)} arrows")

"""What a source file defines, as opposed to what it mentions: for documents that send their readers there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# What stands before a name in a statement that declares nothing.
_NO_TYPES = {
    "return", "co_return", "throw", "delete", "goto", "case", "else", "new", "typename", "using", "class", "struct",
    "enum", "union", "friend", "namespace",
}  # fmt: skip


@cache
def defines(path: Path, symbol: str) -> bool:
    """Whether `path` defines `symbol`: a Python function, class, method or assignment outside of functions, a C++
    function with its body, a type, constant, macro or member. ``Class::Method`` and ``Class.method`` name a part of a
    class; the file must have both."""
    *owners, name = re.split(r"::|\.", symbol)
    text = path.read_text()
    if path.suffix == ".py":
        return all(part in python_names(text) for part in (*owners, name))
    text = _without_comments(text)
    if owners and not re.search(rf"\b{'::'.join(owners)}::{name}\s*\(", text):
        return all(_cpp(text, part) for part in (*owners, name))
    return _cpp(text, name)


@cache
def python_names(text: str) -> frozenset[str]:
    """The functions, classes, methods and assigned names of a module; imported ones are others'."""
    return frozenset(_python_names(ast.parse(text).body, True))


def _python_names(body: list[ast.stmt], outside: bool) -> Iterator[str]:
    """`outside` of functions, where assignments count."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            yield from _python_names(node.body, isinstance(node, ast.ClassDef))
            continue
        if outside and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        for inner in ("body", "orelse", "finalbody"):
            yield from _python_names(getattr(node, inner, []), outside)


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def _cpp(text: str, name: str) -> bool:
    """Whether C++ without comments defines `name`."""
    kinds = (
        rf"\b(?:class|struct|union|enum|enum\s+class|concept|namespace)\s+(?:alignas\([^)]*\)\s*)?{name}\b(?!\s*[;,>*&(])",
        rf"\busing\s+{name}\s*=",
        rf"^\s*#\s*define\s+{name}\b",
    )
    if any(re.search(kind, text, re.MULTILINE) for kind in kinds):
        return True
    # A constant or a member: a type, the name, and what begins or ends a declaration.
    declared = (
        rf"^[ \t]*((?:[\w:<>,*&\[\]]+[ \t]+)+[*&]*)(?:\w+(?:[ \t]*=[^;,]*)?,[ \t]*)*{name}\s*(?:=(?!=)|;|\{{|\[|,)"
    )
    for found in re.finditer(declared, text, re.MULTILINE):
        if found[1].split()[0] not in _NO_TYPES:
            return True
    return any(_has_body(text, found.end() - 1) for found in re.finditer(rf"(?<![.>\w])~?{name}\s*\(", text))


def _has_body(text: str, start: int) -> bool:
    """Whether the parameters that begin at `start` are followed by a function's body."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            tail = (
                r"\s*(?:(?:const|noexcept|override|final|mutable|&&?)\s*)*(?:->[^;{]+|requires[^;{]+|:[^:;][^;]*?)?\{"
            )
            return re.match(tail, text[at + 1 :]) is not None
    return False

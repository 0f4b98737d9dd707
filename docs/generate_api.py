"""Write docs/api.md, the API reference, from the docstrings: python docs/generate_api.py"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("api.md")
# Module, heading, and which names; None: all of its __all__.
SECTIONS: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    ("hetcoll", "hetcoll", ("init", "from_mpi", "get_unique_id", "Communicator", "Work", "UniqueId")),
    ("hetcoll.types", "Types and reductions", ("DType", "ReduceOp", "supports", "Collective")),
    ("hetcoll.plan.topology", "Who is where", ("Topology", "RankInfo")),
    ("hetcoll.runtime.selection", "What a call will use", ("Explanation",)),
    ("hetcoll.errors", "Errors", None),
    ("hetcoll.plan", "Plans", ("Plan", "Step", "Span", "Op", "Buf", "cut")),
    (
        "hetcoll.plan.algorithms",
        "Algorithms",
        ("register", "Draft", "inp", "out", "tmp", "Cost", "Reach", "Algorithm", "find"),
    ),
    ("hetcoll.plan.simulator", "The simulator", ("check", "Report", "PlanError", "predict")),
    ("hetcoll.tools.launch", "Starting ranks", ("run",)),
)
INTERNAL = {"abandon", "session"}  # public to other modules of the package only
WIDTH = 110


class Source:
    """Text that stands for itself in a signature."""

    def __init__(self, text: object) -> None:
        text = text.__forward_arg__ if isinstance(text, typing.ForwardRef) else text
        self.text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self.text


def default(value: object) -> object:
    """A parameter's default as the source has it."""
    if isinstance(value, enum.Enum):
        return Source(f"{type(value).__name__}.{value.name}")
    if inspect.isfunction(value):
        return Source(value.__name__)
    return Source("...") if str(value) == "<factory>" else value


def signature(name: str, function: Any, *, returns: bool = True) -> str:
    """``name(a: int, b: str = 'x') -> bool``, without self; a parameter a line where one line is too long."""
    found = inspect.signature(function)
    parameters = [
        p.replace(
            annotation=p.annotation if p.annotation is p.empty else Source(p.annotation),
            default=p.default if p.default is p.empty else default(p.default),
        )
        for p in found.parameters.values()
        if p.name not in ("self", "cls")
    ]
    result = Source(found.return_annotation) if returns else found.empty
    line = name + str(found.replace(parameters=parameters, return_annotation=result))
    if len(line) <= WIDTH:
        return line
    words, keyword = [], False
    for p in parameters:
        words += ["*"] if p.kind is p.KEYWORD_ONLY and not keyword else []
        keyword |= p.kind is p.KEYWORD_ONLY
        words.append(str(p))
    end = f") -> {result!r}" if returns else ")"
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), end])


def markdown(text: str | None) -> str:
    """A docstring as Markdown: NumPy's section titles in bold, examples in fences."""
    lines = inspect.cleandoc(text or "").splitlines()
    out: list[str] = []
    i = 0
    while i < len(lines):
        line, after = lines[i], lines[i + 1] if i + 1 < len(lines) else ""
        if line and re.fullmatch(r"-{3,}", after):
            out += [f"**{line}**", ""]
            i += 2
        elif line and after.startswith("    ") and not line.startswith((" ", "`")):
            term, i = f"- `{line}`:", i + 1
            while i < len(lines) and lines[i].startswith("    "):
                term += " " + lines[i].strip()
                i += 1
            out.append(term)
        elif line.startswith(">>>"):
            example = []
            while i < len(lines) and lines[i]:
                example.append(lines[i])
                i += 1
            out += ["```pycon", *example, "```"]
        else:
            out.append(line)
            i += 1
    return "\n".join(out)


def entry(level: int, title: str, code: str | None, doc: str | None) -> list[str]:
    parts = ["#" * level + " " + title, ""]
    if code is not None:
        parts += ["```text", code, "```", ""]
    return [*parts, markdown(doc), ""]


def members(cls: type) -> list[tuple[str, Any]]:
    """The public functions and properties of a class and of its bases in the package, in the order of the source."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("hetcoll") and not issubclass(base, enum.Enum):
            for name, value in vars(base).items():
                if not name.startswith("_") and name not in INTERNAL:
                    found.setdefault(name, value)
        elif issubclass(base, enum.Enum) and base is cls:
            found.update({n: v for n, v in vars(base).items() if isinstance(v, property) and not n.startswith("_")})
    kinds = (property, classmethod, staticmethod)
    found = {n: inspect.unwrap(v) if callable(v) else v for n, v in found.items()}  # of native calls
    return [(n, v) for n, v in found.items() if isinstance(v, kinds) or inspect.isfunction(v)]


def describe_class(name: str, cls: type) -> list[str]:
    if issubclass(cls, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        return [f"### {name}", "", f"Base: {bases}. {markdown(cls.__doc__)}", ""]
    if issubclass(cls, enum.Enum):
        values = ", ".join(
            f"`{m.name}`" + (f" = {m.value}" if isinstance(m.value, int) else f": {m.value}") for m in cls
        )
        out = [*entry(3, name, None, cls.__doc__), values, ""]
    elif dataclasses.is_dataclass(cls) or issubclass(cls, tuple):
        out = entry(3, name, signature(name, cls, returns=False), cls.__doc__)
    else:
        out = entry(3, name, None, cls.__doc__)
    for member, value in members(cls):
        if isinstance(value, property):
            result = inspect.signature(value.fget).return_annotation if value.fget else ""
            out += entry(4, f"{name}.{member}", f"{member}: {result}", value.__doc__)
        else:
            function = getattr(cls, member)
            out += entry(4, f"{name}.{member}", signature(member, function), function.__doc__)
    return out


def describe(name: str, thing: Any) -> list[str]:
    if inspect.isclass(thing):
        return describe_class(name, thing)
    return entry(3, name, signature(name, thing), thing.__doc__)


def names_of(module: ModuleType, names: tuple[str, ...] | None) -> tuple[str, ...]:
    if names is not None:
        return names
    return tuple(n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__)


def generate() -> str:
    """The page."""
    parts = [
        "# API reference",
        "",
        "Made from the docstrings by `python docs/generate_api.py`; do not edit it. All of the first section, and all",
        "errors, are names of `hetcoll` itself.",
        "",
    ]
    for module_name, title, names in SECTIONS:
        module = importlib.import_module(module_name)
        parts += [f"## {title}", ""]
        if module_name not in ("hetcoll", "hetcoll.errors"):
            parts += [f"Import from `{module_name}`.", ""]
        for name in names_of(module, names):
            parts += describe(name, getattr(module, name))
    text = "\n".join(parts)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(generate())

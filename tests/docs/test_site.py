"""The site: each public name is documented in the API's pages, links lead on, schedules show what the plans do."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from patience import DEADLINE
from thorough import HOUSE

import hetcoll
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.plan.ir import Op
from hetcoll.types import Collective

pytestmark = HOUSE

ROOT = Path(__file__).parents[2]
API = sorted((ROOT / "docs/api").glob("*.md"))
DIRECTIVES = [name for page in API for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]
INTERNAL = {"abandon", "enter", "session"}  # public to other modules of the package only: mkdocs.yml leaves them out


def load(name: str) -> Any:
    """A module, or what stands in one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules that mkdocs runs."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/site"))
    return {name: importlib.import_module(name) for name in ("hook", "schedules")}


def test_each_public_name_is_in_the_api_pages() -> None:
    found = [re.fullmatch(r"hetcoll\.(?:_native\.)?(\w+)", name) for name in DIRECTIVES]
    direct = {name[1] for name in found if name}
    whole = (
        {name for name in vars(hetcoll.errors) if name.endswith("Error")} if "hetcoll.errors" in DIRECTIVES else set()
    )
    assert set(hetcoll.__all__) - {"__version__"} <= direct | whole


def undocumented(kind: type) -> list[str]:
    """The public functions and properties of a class without docstrings; a base's counts for what is overridden."""
    told = {name for base in inspect.getmro(kind)[1:] for name, value in vars(base).items() if value.__doc__}
    public = [(name, value) for name, value in vars(kind).items() if not name.startswith("_") and name not in INTERNAL]
    calls = [(name, value) for name, value in public if inspect.isroutine(value) or isinstance(value, property)]
    return [name for name, value in calls if not value.__doc__ and name not in told]


HERE = [name for name in DIRECTIVES if not name.startswith(("hetcoll.jax", "hetcoll.serving.vllm"))]  # no JAX, no vLLM


@pytest.mark.parametrize("name", HERE)
def test_what_the_api_pages_name_has_docstrings(name: str) -> None:
    module, _, last = name.rpartition(".")
    if module == "hetcoll._native":  # its stubs are its documents
        stubs = ast.parse((ROOT / "src/hetcoll/_native.pyi").read_text())
        assert any(isinstance(x, ast.ClassDef) and x.name == last and ast.get_docstring(x) for x in stubs.body)
        return
    thing = load(name)
    if inspect.ismodule(thing):
        kinds = [value for value in vars(thing).values() if inspect.isclass(value) and value.__module__ == name]
        assert kinds
        assert [kind.__name__ for kind in kinds if not kind.__doc__] == []
    elif inspect.isclass(thing):
        assert thing.__doc__
        assert undocumented(thing) == []
    elif inspect.isfunction(thing):
        assert thing.__doc__
    else:  # a constant or an alias of a type: a text stands below it where it is defined
        texts = [path.read_text() for path in (ROOT / "src/hetcoll").rglob("*.py")]
        assert any(re.search(rf'^{last}\b[^\n]*=(.|\n)*?\n"""', text, re.MULTILINE) for text in texts)


MADE_BY_CALLS = {
    "Communicator", "Work", "Window", "Transfer", "Sending", "Receiving", "Persistent", "UniqueId", "ExpertLayout",
    "LowLatencyLayout", "Draft",
}  # fmt: skip
"""Classes whose arguments are nobody's business: a user gets these from a call."""


def options(name: str) -> set[str]:
    """Those that are true of what a page names."""
    text = "\n".join(page.read_text() for page in API)
    found = re.search(rf"^::: {re.escape(name)}\n((?: .*\n?)*)", text, re.MULTILINE)
    assert found is not None
    return set(re.findall(r"^ +(\w+): true$", found[1], re.MULTILINE))


@pytest.mark.parametrize("name", HERE)
def test_the_api_pages_show_what_a_class_is_made_of_and_its_fields(name: str) -> None:
    """mkdocstrings leaves out what has no docstring of its own, and what a base of the package has."""
    if name.rpartition(".")[2] in MADE_BY_CALLS or not inspect.isclass(thing := load(name)):
        return
    shown = options(name)
    fields = hasattr(thing, "_fields") or issubclass(thing, Enum)
    made = dataclasses.is_dataclass(thing) or (not fields and thing.__init__ is not object.__init__)
    if fields or made:
        assert shown & {"merge_init_into_class", "show_if_no_docstring"}, name


def test_the_api_page_of_a_draft_shows_its_steps() -> None:
    assert "inherited_members" in options("hetcoll.plan.algorithms.Draft")


def test_the_site_lists_each_page() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = [*(ROOT / "docs").glob("*.md"), *API]
    assert {str(page.relative_to(ROOT / "docs")) for page in pages} <= listed


def test_links_of_the_repository_lead_on_at_the_site(site: dict[str, ModuleType]) -> None:
    rewritten = site["hook"].rewritten
    text = "[a](docs/start.md) [b](LICENSE) ![c](docs/figures/parts.svg) [d](https://example.org)"
    wanted = "[a](start.md) [b](source/LICENSE.md) ![c](figures/parts.svg) [d](https://example.org)"
    assert rewritten("README.md", text) == wanted
    assert rewritten("docs/start.md", "[a](../README.md)") == "[a](index.md)"
    assert rewritten("docs/api/jax.md", "[a](../../src/hetcoll/work.py)") == "[a](../source/src/hetcoll/work.py.md)"
    assert (
        rewritten("docs/start.md", "[a](../src) and\n```text\n[a](../src)\n```") == "a and\n```text\n[a](../src)\n```"
    )


def test_long_names_in_tables_may_be_cut(site: dict[str, ModuleType]) -> None:
    html = "<p><code>a_b</code></p><td><code>c_d.py</code> a_b <code>src/a</code></td>"
    wanted = "<p><code>a_b</code></p><td><code>c_<wbr>d.py</code> a_b <code>src/<wbr>a</code></td>"
    assert site["hook"].on_page_content(html) == wanted


MARKS = [
    mark
    for page in sorted((ROOT / "docs").glob("*.md"))
    for mark in re.findall(r"^<!-- schedule: (\w+) (\w+) ([\d+]+) -->$", page.read_text(), re.MULTILINE)
]
EVERY = [
    (collective.label, name, "5" if entry.supports(5) else "4")
    for collective, table in ALGORITHMS.items()
    for name, entry in table.items()
    if entry.draw.__module__.startswith("hetcoll.") and collective is not Collective.P2P
]


@pytest.mark.parametrize(("collective", "algorithm", "ranks"), [*MARKS, *EVERY])
def test_a_schedule_shows_all_messages_and_ends_with_the_result(
    site: dict[str, ModuleType], collective: str, algorithm: str, ranks: str
) -> None:
    shown = site["schedules"].schedule(collective, algorithm, ranks)
    size = len(shown.plans)
    assert len(shown.messages) == sum(step.op is Op.SEND for plan in shown.plans for step in plan.steps)
    everyone = frozenset(range(size))
    if collective in ("allreduce", "reduce_scatter"):
        assert all(terms == everyone for rank in shown.states[-1] for terms in rank)
    if collective == "reduce":
        assert all(terms == everyone for terms in shown.states[-1][0])
    if collective == "broadcast":
        assert all(terms == {0} for rank in shown.states[-1] for terms in rank)
    figure = ElementTree.fromstring(site["schedules"].draw(collective, algorithm, ranks))
    assert len(list(figure.iter("line"))) == len(shown.messages)


def test_the_documents_draw_a_ring_a_tree_and_two_levels() -> None:
    assert {("ring", "4"), ("tree", "4"), ("direct", "2+2")} <= {(algorithm, ranks) for _, algorithm, ranks in MARKS}


def test_drawing_imports_no_mkdocs() -> None:
    code = "import sys; sys.path.insert(0, 'docs/site'); import hook; sys.exit('mkdocs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=DEADLINE).returncode == 0

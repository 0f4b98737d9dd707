"""The documents: every Python snippet runs, marked console blocks print what they say, links and tables are right.

A Python fence is a program; ``# ranks: 3`` in its first line runs it under `hetcoll run`. A comment before a fence
marks it: ``<!-- run -->`` runs a console block and compares its output if there is any, ``<!-- run: any order -->`` as
a set of lines, ``<!-- run: first and last -->`` what stands before and after a line of three dots;
``<!-- from FILE -->`` says that the text is a part of FILE.
"""

from __future__ import annotations

import builtins
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from definitions import defines, python_names
from installed import need_jax, need_ray, torch_folder
from thorough import HOUSE, parametrize

import hetcoll
from hetcoll import errors
from hetcoll.cli import build_parser
from hetcoll.config import env
from hetcoll.plan.algorithms import ALGORITHMS

pytestmark = HOUSE

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NOTES = sorted((ROOT / "docs/measurements").glob("*.md"))  # dated: their paths and names are those of their day
SECONDS = 100.0


@dataclass(frozen=True)
class Fence:
    """One fenced block, and the comment before it."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path) -> list[Fence]:
    found: list[Fence] = []
    lines = page.read_text().splitlines()
    start = None
    for i, line in enumerate(lines):
        if line.startswith("```") and start is None:
            start = i
        elif line == "```" and start is not None:
            mark = re.fullmatch(r"<!-- (.*) -->", lines[start - 1])
            text = "\n".join(lines[start + 1 : i]) + "\n"
            found.append(Fence(page, start + 1, lines[start][3:], mark[1] if mark else "", text))
            start = None
    assert start is None, f"{page}: the fence of line {start} does not end"
    return found


FENCES = [fence for page in PAGES for fence in fences(page)]
PROGRAMS = [f for f in FENCES if f.language == "python" and not f.mark.startswith("from ")]
EXCERPTS = [f for f in FENCES if f.mark.startswith("from ")]
CONSOLE = [f for f in FENCES if f.language == "console"]
READ_FIRST = (ROOT / "README.md", ROOT / "docs/start.md")


def each(found: list[Fence]) -> pytest.MarkDecorator:
    """Those of the pages that are read first before the others, which are thorough."""
    first = [fence for fence in found if fence.page in READ_FIRST]
    others = [fence for fence in found if fence.page not in READ_FIRST]
    return parametrize("fence", [*first, *others], first=len(first), ids=str)


def run(words: list[str], **variables: str) -> list[str]:
    """The lines that a command prints; the test fails where it does. `hetcoll` and `python` are those under test."""
    ours = {"hetcoll": [sys.executable, "-m", "hetcoll"], "python": [sys.executable]}
    words = [*ours.get(words[0], words[:1]), *words[1:]]
    launchers = ("HETCOLL_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
    single = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers) and k not in single}
    clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=clean | variables, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


@each(PROGRAMS)
def test_every_python_snippet_runs(fence: Fence, tmp_path: Path) -> None:
    if "import jax" in fence.text:
        need_jax()
    text = fence.text
    if re.search("^import torch", text, re.M):  # which may be in an environment of its own
        text = f"import sys\n\nsys.path.append({str(torch_folder())!r})\n{text}"
    script = tmp_path / "snippet.py"
    script.write_text(text)
    ranks = re.match(r"# ranks: (\d+)\n", fence.text)
    run(["hetcoll", "run", "-n", ranks[1], str(script)] if ranks else ["python", str(script)])


@each([fence for fence in CONSOLE if fence.mark.startswith("run")])
def test_marked_console_blocks_print_what_they_say(fence: Fence) -> None:
    first, *wanted = fence.text.splitlines()
    assert first.startswith("$ ")
    words = shlex.split(first[2:])
    if any("/jax_" in word for word in words):
        need_jax()
    if any("/ray_" in word for word in words):
        need_ray()
    if any("/fit_digits" in word for word in words):
        pytest.importorskip("sklearn", reason="its images come with scikit-learn: make .venv/docs")
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    found = run(words, **variables)
    match fence.mark:
        case "run":
            assert not wanted or found == wanted
        case "run: any order":
            assert sorted(found) == sorted(wanted)
        case "run: first and last":
            cut = wanted.index("...")
            assert found[:cut] == wanted[:cut]
            assert found[-len(wanted[cut + 1 :]) :] == wanted[cut + 1 :]
        case _:
            raise AssertionError(f"{fence}: unknown mark {fence.mark!r}")


@pytest.mark.parametrize("fence", [f for f in CONSOLE if not f.mark], ids=str)
def test_commands_that_are_not_run_exist(fence: Fence) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in fence.text.splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        match words:
            case ["make", *targets]:
                assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
            case ["hetcoll", *arguments]:
                build_parser(arguments[0]).parse_args(arguments)
            case ["python", "-c", *_] | ["pip", "install", *_] | ["export", *_]:
                pass
            case [path, *_] if "/" in path:
                assert (ROOT / path).exists()
            case ["python", path, *_]:
                assert (ROOT / path).exists()
            case _:
                raise AssertionError(f"{fence}: what is {line!r}?")


@pytest.mark.parametrize("fence", EXCERPTS, ids=str)
def test_excerpts_are_parts_of_their_files(fence: Fence) -> None:
    assert fence.text in (ROOT / fence.mark.removeprefix("from ")).read_text()


def test_every_example_is_run_and_the_readme_shows_the_first() -> None:
    commands = " ".join(f.text for f in CONSOLE if f.mark)
    for example in (ROOT / "docs/examples").glob("*.py"):
        assert f"docs/examples/{example.name}" in commands
    programs = [f.text for f in PROGRAMS if f.page.name == "README.md"]
    assert programs == [(ROOT / "docs/examples/five_lines.py").read_text()]


def links(page: Path) -> set[str]:
    """The targets of a page's links, as it spells them; those in fences are none."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    measured = "Not measured yet." not in (ROOT / "docs/benchmarks.md").read_text()
    for target in links(page):
        path, _, anchor = target.partition("#")
        if path.endswith("figures/sweep.svg") and not measured:
            continue  # drawn with the tables
        assert (page.parent / path).exists(), target
        assert not anchor, f"{target}: headings change; link to the page"


def test_the_readme_leads_to_every_page() -> None:
    pages = {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md"}
    assert pages <= links(ROOT / "README.md")


def test_measurements_are_listed_and_one_reference_page_leads_to_them() -> None:
    folder = ROOT / "docs/measurements"
    assert {note.name for note in NOTES} - {"README.md"} <= links(folder / "README.md")
    assert "measurements/README.md" in links(ROOT / "docs/performance.md")


# Tables and references that must agree with the code ----------------------------------------------------------------


def rows(page: str, header: str) -> list[list[str]]:
    """The cells of the tables of a page whose first row begins with `header`."""
    found: list[list[str]] = []
    inside = False
    for line in (ROOT / page).read_text().splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.startswith(f"| {header} |"):
            inside = True
        elif inside and not line.startswith("| ---"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    assert found, f"{page} has no table of {header}"
    return found


def test_the_table_of_variables_is_that_of_env_py() -> None:
    table = rows("docs/start.md", "Variable")
    assert sorted(row[0].strip("`") for row in table) == sorted(env._VARIABLES)
    for name, default, _ in table:
        if default != "-":
            value = {name.strip("`"): default.strip("`")}
            assert env.read_config(value) == env.read_config({}) == env.Config(), value


def test_the_table_of_errors_has_them_all() -> None:
    classes = {c.__name__ for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.HetcollError)}
    named = [re.match(r"`(\w+)`(?: \(an? `(\w+)`\))?$", row[0]) for row in rows("docs/start.md", "Error")]
    assert {found[1] for found in named if found} == classes - {"HetcollError"}
    for found in named:
        assert found
        assert not found[2] or found[2] in [base.__name__ for base in getattr(errors, found[1]).__mro__]


def test_every_failure_names_a_test_that_shows_it() -> None:
    table = rows("docs/failures.md", "What happens | What the ranks see | When | Shown by")
    there = {name for path in (ROOT / "tests").rglob("test_*.py") for name in python_names(path.read_text())}
    for row in table:
        named = re.findall(r"`(\w+)`", row[3])
        assert named, row[0]
        assert [name for name in named if name not in there] == []


def test_the_table_of_algorithms_has_them_all() -> None:
    wanted = {
        kind.label: sorted(name for name, entry in table.items() if entry.draw.__module__.startswith("hetcoll."))
        for kind, table in ALGORITHMS.items()
    }
    assert {row[0]: row[1].split(", ") for row in rows("docs/concepts.md", "Collective")} == wanted


def test_concepts_are_few_and_have_one_sentence() -> None:
    """Who needs another one takes one away."""
    table = rows("docs/concepts.md", "Concept | In one sentence")
    assert len(table) <= 45
    assert [row[0] for row in table if ". " in row[1] or not row[1].endswith(".")] == []


# What documents say of files ------------------------------------------------------------------------------------------

FOLDERS = ("src", "native", "tests", "docs", "benchmarks", ".ci")
PATH = rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./]+\w"
NAMED = rf"(?:`({PATH})`|\[[^\]]*\]\((?:\.\./)?({PATH})\))"  # a code span or a link


def without_fences(page: Path) -> str:
    """A page's text, with empty lines where its fences are, so that lines keep their numbers."""
    return re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.MULTILINE | re.DOTALL)


def symbols(text: str) -> list[tuple[int, str, str]]:
    """(line, path, symbol) of all that a text places in a file.

    It does so by tables whose columns are "File" and "Look for", and in sentences by "`path`: `symbol`, `symbol`" and
    by "`symbol` in `path`"; the path may be a link.
    """
    found: list[tuple[int, str, str]] = []
    table = False
    symbol = r"`([A-Za-z_][\w.:]*)(?:\(\))?`"
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[:2] == ["File", "Look for"]:
                table = True
            elif table and not cells[0].startswith("---"):
                path = re.fullmatch(NAMED, cells[0])
                assert path, f"line {number}: {cells[0]!r} is no path"
                found += [(number, path[1] or path[2], name) for name in re.findall(symbol, cells[1])]
            continue
        table = False
        for pair in re.finditer(rf"{NAMED}: ({symbol}(?:, {symbol})*)", line):
            found += [(number, pair[1] or pair[2], name) for name in re.findall(symbol, pair[3])]
        for pair in re.finditer(rf"{symbol} in {NAMED}", line):
            found.append((number, pair[2] or pair[3], pair[1]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_places_in_a_file_is_defined_there(page: Path) -> None:
    """Defined, not mentioned: who looks it up there must find it."""
    wrong = []
    for line, path, name in symbols(without_fences(page)):
        if not (ROOT / path).exists():
            wrong.append(f"{page.name}:{line}: there is no {path}")
        elif not defines(ROOT / path, name):
            sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "native").rglob("*.h"), *(ROOT / "native").rglob("*.cc")]
            places = [str(source.relative_to(ROOT)) for source in sorted(sources) if defines(source, name)]
            wrong.append(f"{page.name}:{line}: {path} does not define {name}; {', '.join(places) or 'no file'} does")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page: Path) -> None:
    text = without_fences(page)
    named = {(text[: m.start()].count("\n") + 1, m[1]) for m in re.finditer(rf"`({PATH})/?`", text)}
    missing = [f"{page.name}:{line}: there is no {path}" for line, path in sorted(named) if not (ROOT / path).exists()]
    missing = [told for told in missing if "NAME" not in told]  # stands for one that a reader chooses
    assert not missing, "\n".join(missing)


def test_the_picture_names_files_that_exist() -> None:
    words = re.findall(r"[\w/]+(?:\.py|/)(?=[\s,<:])|native/\w+", (ROOT / "docs/figures/parts.svg").read_text())
    assert len(words) > 10
    beside = ("src/hetcoll", "src/hetcoll/config", ".")  # "config/env.py, launchers.py"
    assert [word for word in words if not any((ROOT / folder / word).exists() for folder in beside)] == []


def test_comments_cite_documents_that_exist() -> None:
    sources = [path for folder in ("src", "native", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    for path in sources:
        if path.suffix in {".py", ".pyi", ".h", ".cc", ".c", ".txt"}:
            text = path.read_text()
            missing = [cited for cited in re.findall(r"\bdocs/[\w/-]+\.md\b", text) if not (ROOT / cited).exists()]
            assert not missing, f"{path.relative_to(ROOT)} cites {missing}"
            assert not re.search(r"\bDESIGN\s+[A-Z]\d", text), f"{path.relative_to(ROOT)} cites a design document"


def test_the_walkthrough_has_its_reader_open_few_files() -> None:
    """As many as it says. Who needs another one takes one away."""
    text = without_fences(ROOT / "docs/walkthrough-cpu.md")
    files = {path for _, path, _ in symbols(text)}
    assert 5 <= len(files) <= 15, sorted(files)
    assert f"Open {len(files)} files" in text


def test_places_are_read_from_tables_and_sentences() -> None:
    text = """
| File | Look for | Why |
| --- | --- | --- |
| `src/a.py` | `one`, `Two.three` | `not_this` |
| [b](../native/b.h) | `B::C()` | |

`src/a.py`: `four`, `five`. And (`Six` in [`c.h`](../native/c.h)), but `seven` is `eight`.
"""
    assert symbols(text) == [
        (4, "src/a.py", "one"), (4, "src/a.py", "Two.three"), (5, "native/b.h", "B::C"),
        (7, "src/a.py", "four"), (7, "src/a.py", "five"), (7, "native/c.h", "Six"),
    ]  # fmt: skip


PYTHON = """
from elsewhere import imported
LIMIT: int = mentioned(7)
if True:
    first, second = 1, 2
class Class:
    member = 3
    def method(self):
        local = called()
        def inner(): ...
"""
CPP = """
// commented() { }
#pragma once
#define MACRO 1
class Forward;
inline constexpr int kLimit = 7;
using Alias = std::vector<Other>;
struct Record : Base {
  std::uint64_t member = 0;
  bool fuse = false, stream = false;
  int Short() const { return Called(member); }
  void Declared(int x);
};
template <class T>
static int Free(T x, int (*f)(int)) noexcept {
  if (Tested(x)) { return kUsed; }
  object.Sent(x);
  return Assigned;
}
Record::Record(int a) : Base(a), member(Given(a)) {}
std::ptrdiff_t Record::Push(const Message& m) {
  throw Thrown{};
}
"""


def test_what_a_file_defines_is_told_from_what_it_mentions(tmp_path: Path) -> None:
    python, cpp = tmp_path / "a.py", tmp_path / "a.h"
    python.write_text(PYTHON)
    cpp.write_text(CPP)
    for path, names in (
        (python, "LIMIT first second Class member method Class.method inner"),
        (cpp, "MACRO kLimit Alias Record member fuse stream Short Free Push Record::Push Record::Short"),
    ):
        assert [name for name in names.split() if not defines(path, name)] == []
    for path, names in (
        (python, "imported mentioned local called Other.method self elsewhere"),
        (
            cpp,
            "commented Forward Other Called Declared Tested kUsed Sent Assigned Given Thrown Message Base Other::Push",
        ),
    ):
        assert [name for name in names.split() if defines(path, name)] == []


def test_the_table_of_tests_has_every_folder_and_each_file_says_what_it_shows() -> None:
    files = sorted((ROOT / "tests").glob("*/test_*.py"))
    named = {row[0].strip("`") for row in rows("docs/testing.md", "Folder")}
    assert named - {"native/tests"} == {path.parent.name for path in files}
    assert [path.name for path in files if not re.match(r'"""\S', path.read_text())] == []


DOCTESTS = """
import doctest, importlib, pkgutil, sys
import hetcoll
names = [m.name for m in pkgutil.walk_packages(hetcoll.__path__, "hetcoll.")]
failed = ran = 0
for name in ["hetcoll", *names]:
    needs_more = name.startswith(("hetcoll.jax", "hetcoll.torch.", "hetcoll.serving.vllm"))
    if needs_more or name.endswith(("__main__", "_native")):
        continue
    result = doctest.testmod(importlib.import_module(name))
    failed, ran = failed + result.failed, ran + result.attempted
print(ran)
sys.exit(failed > 0)
"""


def test_the_examples_of_docstrings_run() -> None:
    assert int(run(["python", "-c", DOCTESTS])[-1]) > 10


def test_every_error_in_the_documents_is_a_name_in_hetcoll() -> None:
    """But for Python's own and those of the frameworks."""
    theirs = {"DistBackendError", "JaxRuntimeError"}
    named = {name for page in PAGES for name in re.findall(r"\b[A-Z]\w*Error\b", page.read_text())}
    missing = {name for name in named - theirs if not hasattr(builtins, name) and not hasattr(hetcoll, name)}
    assert not missing
    ours = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert ours <= set(hetcoll.__all__)

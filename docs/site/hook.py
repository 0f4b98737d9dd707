"""What mkdocs does not do by itself: README as the first page, source files that pages link to, drawn schedules.

The pages are written to be read in the repository. Their links are followed from there: one to a page becomes a link
to it, one to a source file leads to a copy of that file on the site, and one to a folder becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules import draw

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
SCHEDULE = re.compile(r"^<!-- schedule: (\w+) (\w+) ([\d+]+) -->$", re.MULTILINE)
CELL, CODE = re.compile(r"<td.*?</td>", re.DOTALL), re.compile(r"(?<=<code>).*?(?=</code>)", re.DOTALL)
LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".toml": "toml", ".sbatch": "bash"}


def place(page: str, target: str) -> str | None:
    """Where on the site the file is to which the page `page`, a path in the repository, links; None: nowhere."""
    path = os.path.normpath(os.path.join(os.path.dirname(page), target))
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/") and not path.endswith((".py", ".toml", ".sbatch")):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if (ROOT / path).is_file() else None


def rewritten(page: str, text: str) -> str:
    """The text of a page with the links of the site."""
    here = os.path.dirname(place("", page) or "")

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if "://" in target:
            return found[0]
        there = place(page, target)
        return words if there is None else f"{picture}[{words}]({os.path.relpath(there, here or '.')})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    pages = [*OUTSIDE, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by)]
    for page in pages:
        for _, _, target in LINK.findall((ROOT / page).read_text()):
            uri = place(page, target) or ""
            if uri.startswith("source/") and files.get_file_from_path(uri) is None:
                path = os.path.normpath(os.path.join(os.path.dirname(page), target))
                files.append(File.generated(config, uri, content=source(path)))
    return files


def source(path: str) -> str:
    """A page that shows a source file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    head = "---\nsearch:\n  exclude: true\n---\n"
    return f'{head}# {path}\n\n````{language} linenums="1"\n{(ROOT / path).read_text()}````\n'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    name = {there: here for here, there in OUTSIDE.items()}.get(uri, f"docs/{uri}")
    return SCHEDULE.sub(lambda found: draw(found[1], found[2], found[3]), rewritten(name, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Long names in tables may be cut after their underscores and slashes, and nowhere else."""

    def breakable(code: re.Match[str]) -> str:
        return re.sub(r"([_/])(?=[\w.])", r"\1<wbr>", code[0])

    return CELL.sub(lambda cell: CODE.sub(breakable, cell[0]), html)

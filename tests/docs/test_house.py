"""The package's house: so many rooms and arrows between them as someone new can hold, and how they are counted."""

from __future__ import annotations

from pathlib import Path

from house import draw
from thorough import HOUSE

pytestmark = HOUSE


def test_rooms_and_arrows_are_few() -> None:
    """Who needs another one takes one away."""
    rooms, arrows = draw()
    assert len(rooms) <= 28, sorted(rooms)
    assert len(arrows) <= 110, sorted(arrows)


def test_every_import_between_rooms_is_an_arrow_once(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from .a.one import f",  # the face
        "flat.py": "import numpy\nfrom . import a, _native",
        "a/__init__.py": "",
        "a/one.py": "from .two import g\nfrom ..b import three\nfrom ..b.three import h",
        "a/two.py": "def g():\n    import house.flat\n    from house.b import c\n    import house",
        "b/__init__.py": "from .c.deep import x",
        "b/three.py": "if TYPE_CHECKING:\n    from ..flat import T",
        "b/c/__init__.py": "",
        "b/c/deep.py": "from ...a import one\nfrom ... import flat",
    }
    package = tmp_path / "house"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    arrows = {("flat", "a"), ("a", "b"), ("a", "flat"), ("b", "flat"), ("b", "a")}
    assert draw(package, whole=("b",)) == ({"flat", "a", "b"}, arrows)
    each = arrows | {("a", "b/c"), ("b", "b/c"), ("b/c", "a"), ("b/c", "flat")}
    assert draw(package, whole=()) == ({"flat", "a", "b", "b/c"}, each - {("b", "a")})

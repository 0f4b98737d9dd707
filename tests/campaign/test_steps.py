"""Every call of the public interface is in a step of the campaign, and every step can be drawn."""

from __future__ import annotations

import ast
from inspect import isclass, isfunction
from pathlib import Path

import hetcoll
from hetcoll import experts, serving
from hetcoll.runtime.one_sided import Window
from hetcoll.types import Collective

from . import program, steps

FOLDER = Path(__file__).parent
CALLING = (*FOLDER.glob("[!t]*.py"), *(FOLDER.parent / "support" / name for name in ("cases.py", "expert_calls.py")))
OTHERWISE = {
    "abandon": "what a forked child does, in `fork`",
    "enter": "what `init` and `join` do",
    "allgatherv": "called by its name (`cases`), as is each of `Collective`",
    "epoch": "a number",
    "local_rank": "a number",
    "session": "what communicators share",
    "flush": "what `Sending.close` does",
    "arrived": "what `Receiving.complete` asks of each layer",
    "ended": "what `Receiving.wait` asks",
    "done": "of one request: it does not wait",
    "give_up": "what `cancel` does",
    "cancelled": "what `layer` asks",
}


def test_every_public_call_has_a_step() -> None:
    nodes = [node for path in CALLING for node in ast.walk(ast.parse(path.read_text()))]
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    called |= {kind.label for kind in Collective} | OTHERWISE.keys()
    packages = [vars(each)[name] for each in (experts, serving) for name in each.__all__]
    kinds = (hetcoll.Communicator, Window, *filter(isclass, packages))
    missing = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, what in vars(kind).items()
        if name[0] != "_" and (isinstance(what, classmethod) or isfunction(what)) and name not in called
    ]
    assert not missing, f"no step of the campaign calls {missing}"


def test_every_step_is_drawn_and_every_one_drawn_there() -> None:
    drawn = program.STEPS.keys() | program.STEPS_ON_GPUS.keys() | program.WIDER.keys() | {"passing"}
    assert drawn == steps.STEPS.keys() - {"fence", "hurry"}

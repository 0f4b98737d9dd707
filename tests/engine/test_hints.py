"""Names that users of MPI, PyTorch and NCCL type first, and old names of ours, are answered by what they are here."""

from __future__ import annotations

import importlib
import pydoc
import re
import subprocess
import sys

import pytest
from patience import DEADLINE

import hetcoll
from hetcoll.runtime.hints import MODULES, MOVED, NAMES, OF_MODULE, OF_WORK


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_others_gets_a_hint_that_is_right(name: str) -> None:
    comm = hetcoll.Communicator.__new__(hetcoll.Communicator)
    assert not hasattr(comm, name)
    wanted = f"'Communicator' object has no attribute '{name}'; it is '{NAMES[name]}' here"
    with pytest.raises(AttributeError, match=wanted):
        getattr(comm, name)
    assert NAMES[name] in vars(hetcoll.Communicator)
    assert NAMES[name] not in NAMES


@pytest.mark.parametrize("name", OF_WORK)
def test_a_work_answers_names_of_others_too(name: str) -> None:
    work = hetcoll.Work()
    wanted = f"'Work' object has no attribute '{name}'; it is '{OF_WORK[name]}' here$"
    with pytest.raises(AttributeError, match=wanted):
        getattr(work, name)
    assert OF_WORK[name] in vars(hetcoll.Work)


def test_operations_in_flight_are_asked_for_by_a_keyword() -> None:
    comm = hetcoll.Communicator.__new__(hetcoll.Communicator)
    with pytest.raises(AttributeError, match="it is 'send' here with async_op=True"):
        comm.isend  # type: ignore[attr-defined]  # noqa: B018


def test_other_names_are_missing_as_ever() -> None:
    comm = hetcoll.Communicator.__new__(hetcoll.Communicator)
    with pytest.raises(AttributeError, match=r"no attribute 'frobnicate'$"):
        comm.frobnicate  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(("name", "wanted"), OF_MODULE.items())
def test_a_name_of_a_package_of_others_gets_one_too(name: str, wanted: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; it is 'hetcoll.{wanted}' here"):
        getattr(hetcoll, name)
    found: object = importlib.import_module("hetcoll.experts") if wanted.startswith("experts.") else hetcoll
    for part in wanted.removeprefix("experts.").split("."):
        found = getattr(found, part)


@pytest.mark.parametrize(
    ("name", "method"), [("all_reduce", "allreduce"), ("get_rank", "rank"), ("barrier", "barrier")]
)
def test_what_is_a_communicators_is_not_the_packages(name: str, method: str) -> None:
    with pytest.raises(AttributeError, match=f"it is '{method}' of a communicator, which hetcoll.init\\(\\) makes"):
        getattr(hetcoll, name)
    for other in ("frobnicate", "__frobnicate__", "_core", "_call"):
        with pytest.raises(AttributeError, match=rf"no attribute '{other}'$"):
            getattr(hetcoll, other)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_nobody_has_imported_is_named(name: str) -> None:
    program = f"import hetcoll\nhetcoll.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE)
    assert done.stderr.endswith(f"module 'hetcoll' has no attribute '{name}'; write import hetcoll.{name}\n")


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_module_that_has_moved_is_answered_by_where_it_is(old: str, new: str) -> None:
    importlib.import_module(f"hetcoll.{new}")
    with pytest.raises(AttributeError, match=rf"it is 'hetcoll\.{new}' now$"):
        getattr(hetcoll, old)


def test_help_shows_the_calls_and_their_documents() -> None:
    page = pydoc.render_doc(hetcoll.Communicator, renderer=pydoc.plaintext)
    # Python 3.13 gives each parameter of a long signature a line, and 3.14 no quotes to its type.
    assert "allreduce(self,sendbuf:Array,recvbuf:ArrayNone=None" in re.sub(r"[\s|']+", "", page)
    assert "Reduce `sendbuf` over all ranks, element by element" in page
    page = pydoc.render_doc(hetcoll.Communicator.allreduce, renderer=pydoc.plaintext)
    assert "Reduce `sendbuf` over all ranks, element by element" in page

"""The order in which calls on a GPU's tensors use streams, with streams that only note what is asked of them.

Tensors are on torch's device "meta": they have no memory, and no call of the communicator looks for any here.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from installed import import_torch

import hetcoll

Notes = list[str]


class Stream:
    def __init__(self, notes: Notes, name: str) -> None:
        self.notes, self.name, self.device, self.done = notes, name, "meta", False

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Any:
        self.notes.append(f"event on {self.name}")
        return SimpleNamespace(query=lambda: self.done, name=self.name)

    def wait_event(self, event: Any) -> None:
        self.notes.append(f"{self.name} waits for the event on {event.name}")

    def synchronize(self) -> None:
        self.notes.append(f"host waits for {self.name}")


class Comm:
    """What a group calls of a communicator; each call notes the stream that is current."""

    rank, size, error = 0, 2, None

    def __init__(self, notes: Notes, here: list[Stream]) -> None:
        self.notes, self.here = notes, here

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self.notes.append("group begins")
        yield
        self.notes.append("group ends")

    def answer(self, question: str, function: Any) -> None:
        """No rank asks."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **how: self.notes.append(f"{name} on {self.here[-1].name} {how}")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group on such streams: its notes, its current streams, and itself."""
    torch = import_torch()
    from hetcoll.torch.collectives import Collectives
    from hetcoll.torch.messages import Messages

    class Group(Collectives, Messages):
        pass

    notes: Notes = []
    here = [Stream(notes, "current")]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        here.append(stream)
        yield
        here.pop()

    names = iter(["own", "sends", "receives"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: here[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(notes, next(names)))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    group = Group(Comm(notes, here), None, 10.0)
    return SimpleNamespace(torch=torch, notes=notes, here=here, group=group)


def options(made: Any, background: bool) -> Any:
    opts = made.torch.distributed.AllreduceOptions()
    opts.asyncOp = background
    return opts


def test_a_blocking_call_is_enqueued_on_the_current_stream(made: Any) -> None:
    work = made.group.allreduce([made.torch.empty(3, device="meta")], options(made, False))
    assert work.wait()
    assert made.notes == ["allreduce on current {'op': 'sum'}"]
    made.here.append(Stream(made.notes, "another"))
    assert work.wait()
    assert not work.is_completed()
    assert made.notes[1:] == ["event on current", "another waits for the event on current"]


def test_an_asynchronous_call_has_a_stream_of_its_own(made: Any) -> None:
    work = made.group.allreduce([made.torch.empty(3, device="meta")], options(made, True))
    assert made.notes == ["own waits for current", "allreduce on own {'op': 'sum'}", "event on own"]
    made.notes.clear()
    assert work.wait()
    assert made.notes == ["current waits for the event on own"]
    made.here.append(Stream(made.notes, "another"))
    work.wait()
    assert made.notes[-1] == "another waits for the event on own"


def test_what_was_staged_is_copied_on_the_same_stream(made: Any) -> None:
    outputs = [made.torch.empty(3, device="meta") for _ in range(2)]
    real = made.torch.Tensor.copy_

    def copy(self: Any, *args: Any) -> Any:
        made.notes.append(f"copy on {made.here[-1].name}")
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.torch.Tensor, "copy_", copy)
        made.group.allgather([outputs], [made.torch.empty(3, device="meta")])
    assert made.notes == [
        "own waits for current", "allgather on own {}", "copy on own", "copy on own", "event on own",
    ]  # fmt: skip


def test_tensors_live_until_the_gpu_is_done(made: Any) -> None:
    tensor = made.torch.empty(3, device="meta")
    alive = weakref.ref(tensor)
    made.group.allreduce([tensor], options(made, True))  # nobody keeps the work
    del tensor
    gc.collect()
    assert alive() is not None
    made.group._streams["collectives", made.torch.device("meta")].done = True
    made.group.allreduce([made.torch.empty(1, device="meta")], options(made, True))
    gc.collect()
    assert alive() is None


def test_messages_have_streams_of_their_own(made: Any) -> None:
    made.group._streams["collectives", made.torch.device("meta")] = made.here[0]
    made.group.send([made.torch.empty(3, device="meta")], 1)
    made.group.recv([made.torch.empty(3, device="meta")], 1)
    assert [note for note in made.notes if "waits" in note] == ["own waits for current", "sends waits for current"]
    assert made.group._streams["send", made.torch.device("meta")].name == "own"
    assert made.group._streams["recv", made.torch.device("meta")].name == "sends"


def test_a_batch_is_one_group_on_one_stream(made: Any) -> None:
    dist, tensor = made.torch.distributed, made.torch.empty(3, device="meta")
    batch = [SimpleNamespace(op=op, tensor=tensor, group_peer=1, tag=0) for op in (dist.irecv, dist.isend)]
    (work,) = made.group.batch(batch)
    assert made.notes == [
        "own waits for current", "group begins", "recv on own {}", "send on own {}", "group ends", "event on own",
    ]  # fmt: skip
    work.wait()
    assert made.notes[-1] == "current waits for the event on own"


def test_messages_to_oneself_in_a_batch_need_no_other_rank(made: Any) -> None:
    """They are copied here: the communicator's first call on a GPU would wait for all ranks."""
    dist, tensor = made.torch.distributed, made.torch.empty(3, device="meta")
    batch = [SimpleNamespace(op=op, tensor=tensor, group_peer=0, tag=0) for op in (dist.irecv, dist.isend)]
    for work in made.group.batch(batch):
        assert work.wait()
    assert made.notes == []


def test_a_wait_that_takes_too_long_says_so_in_torchs_words(made: Any) -> None:
    work = made.group.allreduce([made.torch.empty(3, device="meta")], options(made, True))
    with pytest.raises(RuntimeError, match=r"Timed out waiting.*caught collective operation timeout.*after 0.01 s"):
        work.wait(timedelta(seconds=0.01))


def test_a_failed_group_is_told_by_wait_and_never_hangs(made: Any) -> None:
    work = made.group.allreduce([made.torch.empty(3, device="meta")], options(made, True))
    made.group.comm.error = hetcoll.PeerLostError("rank 1 was lost", 1)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(made.torch.distributed.DistBackendError, match="rank 1 was lost"):
        work.wait()

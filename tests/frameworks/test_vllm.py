"""vLLM's KV connector: requests that one instance prefills and another decodes, on real ranks, with every byte told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from ranks import Ranks, kept, wait_until
from thorough import parametrize
from vllm_engine import TOKENS, Instance, Shape

import hetcoll
from hetcoll import ArgumentError, lifetime
from hetcoll.serving.vllm.prefilling import PrefillWorker
from hetcoll.serving.vllm.steps import Prefill, Step

HND, NHD = (0, 1, 2, 3), (0, 2, 1, 3)
SHAPES = {
    "2 to 1": (Shape(2), Shape(1, order=NHD)),
    "4 to 2": (Shape(4, order=NHD), Shape(2, block=2 * TOKENS, blocks=36)),
    "1 to 2": (Shape(1, block=2 * TOKENS), Shape(2)),
}
P, D = {"do_remote_decode": True}, {"do_remote_prefill": True}


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Not tidy: the first rank of the connectors' jobs hosts their stores until its process ends."""
    with kept(lambda size: Ranks(size, tidy=False)) as get:
        yield get


def start(comm: hetcoll.Communicator, port: int, shapes: tuple[Shape, Shape], **extra: Any) -> tuple[Instance, bool]:
    """This rank's instance, and whether it prefills."""
    prefills = comm.rank < shapes[0].ranks
    side = comm.split(int(prefills))
    assert side is not None
    return begin(side, port, shapes, prefills, **extra), prefills


def begin(side: hetcoll.Communicator, port: int, shapes: tuple[Shape, Shape], prefills: bool, **extra: Any) -> Instance:
    """One rank of an instance."""
    ranks = {"prefill_ranks": shapes[0].ranks, "decode_ranks": shapes[1].ranks}
    settings = {"address": f"127.0.0.1:{port}", "timeout": 30.0, "slots": 3, **ranks, **extra}
    return Instance(side, shapes[not prefills], "kv_producer" if prefills else "kv_consumer", settings)


def until(instance: Instance, state: Callable[[], bool], chunk: int = 64) -> None:
    """Steps, on all ranks of an instance alike, until it is so."""

    def look() -> bool:
        instance.step(chunk)
        return state()

    wait_until(look, 60)


def end(comm: hetcoll.Communicator, instance: Instance) -> None:
    comm.barrier()
    assert len(instance.free) == instance.shape.blocks * TOKENS // instance.shape.block, "blocks were not given back"
    instance.close()
    instance.side.close()
    comm.barrier()


def hand_over(comm: hetcoll.Communicator, port: int, shapes: tuple[Shape, Shape], layerwise: bool) -> None:
    """A request that was prefilled before; two at once, in chunks, of which the decoder has a part; one in slots that
    are used again. One whose blocks the prefiller loses on the way."""
    instance, prefills = start(comm, port, shapes, layerwise=layerwise)
    tokens = {"a": 13, "b": 22, "c": 9, "d": 17, "e": 14, "f": 1}
    if prefills:
        instance.add("a", tokens["a"], 1, dict(P))
        instance.step()
        instance.finish("a")
        instance.step()
        params = comm.broadcast_object(instance.params["a"], root=0)
        for seed, name in enumerate("bcdef", 2):
            instance.add(name, tokens[name], seed, P | {"transfer_id": f"t{name}"})
        until(instance, lambda: instance.requests["b"].computed >= 10, chunk=5)
        instance.preempt("b")
        until(instance, lambda: all(r.computed >= r.num_prompt_tokens for r in instance.requests.values()), chunk=5)
        for name in "bcdef":
            instance.finish(name)
        until(instance, lambda: not instance.requests)
        assert set(instance.sent) == set("abcdef")
    else:
        params = comm.broadcast_object(None, root=0)
        assert params["do_remote_prefill"]
        instance.add("a", tokens["a"], 1, params)
        for seed, name in enumerate("bcdef", 2):
            local = 2 * TOKENS if name == "d" else 0
            instance.add(name, tokens[name], seed, D | {"transfer_id": f"t{name}"}, local)
        until(instance, lambda: all(r.computed >= r.num_prompt_tokens for r in instance.requests.values()))
        for request in list(instance.requests.values()):
            assert instance.wrong(request, 0, request.num_prompt_tokens) == []
            instance.finish(request.request_id)
        assert not instance.early
        assert not instance.bad
        assert set(instance.came) == (set() if layerwise else set("abcde"))
        until(instance, lambda: len(instance.scheduler._scheduling._free) == 3)
    end(comm, instance)


@pytest.mark.parametrize("layerwise", [False, True])
@parametrize("shapes", list(SHAPES), first=2)
def test_caches_change_hands(ranks_of: Callable[[int], Ranks], shapes: str, layerwise: bool) -> None:
    pair = SHAPES[shapes]
    ranks_of(sum(shape.ranks for shape in pair)).run(hand_over, free_port(), pair, layerwise, timeout=90)


def give_up(comm: hetcoll.Communicator, port: int, shapes: tuple[Shape, Shape], layerwise: bool) -> None:
    """The prefiller aborts one that the decoder waits for; the decoder aborts one that is on its way; one is never
    prefilled, and one never fetched, by their timeouts. Then a request goes as ever, in the same slots."""
    instance, prefills = start(comm, port, shapes, layerwise=layerwise, timeout=2.0)
    name, there = "x", {"transfer_id": "x"}
    if prefills:
        instance.add(name, 20, 1, P | there)
        instance.step(chunk=9)
        if not layerwise:
            comm.barrier()  # the decoder has asked
        instance.finish(name, "FINISHED_ABORTED")
        until(instance, lambda: not instance.requests)
        comm.barrier()
        instance.add("y", 20, 2, P | {"transfer_id": "y"})
        instance.step(chunk=9)
        comm.barrier()
        until(instance, lambda: instance.worker._worker._requests["y"].over, chunk=0)  # the decoder gave it up
        instance.finish("y")
        instance.add("z", 20, 3, P | {"transfer_id": "z"})
        instance.step()
        instance.finish("z")
        until(instance, lambda: not instance.requests)
        comm.barrier()
        instance.add("last", 11, 4, P | {"transfer_id": "last"})
        instance.step()
        instance.finish("last")
        until(instance, lambda: not instance.requests)
        assert instance.params == {"x": None, "y": instance.params["y"], "z": instance.params["z"]} | {
            "last": {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "last"}
        }
    else:
        failed(instance, instance.add(name, 20, 1, D | there), None if layerwise else comm.barrier)
        comm.barrier()
        comm.barrier()  # the next one has begun
        request = instance.add("y", 20, 2, D | {"transfer_id": "y"})
        if layerwise:
            failed(instance, request, None)
        else:
            instance.step()
            instance.finish("y", "FINISHED_ABORTED")
            assert request.blocks, "they may still be written"
            until(instance, lambda: not instance.requests)
        failed(instance, instance.add("never", 20, 5, D | {"transfer_id": "never"}), None)
        comm.barrier()
        request = instance.add("last", 11, 4, D | {"transfer_id": "last"})
        until(instance, lambda: request.computed == 11)
        assert instance.wrong(request, 0, 11) == []
        instance.finish("last")
        until(instance, lambda: len(instance.scheduler._scheduling._free) == 3)
    end(comm, instance)


def failed(instance: Instance, request: Any, meanwhile: Callable[[], object] | None) -> None:
    """Its blocks are told to be bad, and those of no other."""
    instance.bad = set()
    instance.step()
    if meanwhile is not None:
        meanwhile()
    until(instance, lambda: bool(instance.bad))
    assert instance.bad == set(request.blocks[: -(-(request.num_prompt_tokens - 1) // instance.shape.block)])
    assert request.state in ("loaded", "running")
    until(instance, lambda: len(instance.scheduler._scheduling._free) == 3)
    instance.finish(request.request_id, "FINISHED_ABORTED")


@pytest.mark.parametrize("layerwise", [False, True])
def test_requests_that_come_to_nothing(ranks_of: Callable[[int], Ranks], layerwise: bool) -> None:
    ranks_of(3).run(give_up, free_port(), SHAPES["2 to 1"], layerwise, timeout=90)


def lose(comm: hetcoll.Communicator, port: int, dies: int) -> Any:
    """Ranks 0 and 1 prefill for rank 2. One dies while a request is on its way: the others go on by themselves."""
    instance, prefills = start(comm, port, SHAPES["2 to 1"])
    if prefills:
        instance.add("x", 20, 1, P | {"transfer_id": "x"})
        instance.step(chunk=9)
    else:
        instance.add("x", 20, 1, D | {"transfer_id": "x"})
        instance.step()
    comm.barrier()
    if comm.rank == dies:
        os._exit(7)

    def step_until(state: Callable[[], bool]) -> None:
        def look() -> bool:
            instance.step(alone=True)
            return state()

        wait_until(look, 60)

    if prefills:
        instance.step(alone=True)
        instance.finish("x")
        step_until(lambda: not instance.requests)
        instance.add("y", 6, 2, P | {"transfer_id": "y"})  # it prefills on, and nobody has it
        instance.step(alone=True)
        instance.finish("y")
        step_until(lambda: not instance.requests)
    else:
        request = instance.requests["x"]
        step_until(lambda: request.state == "loaded")
        assert instance.bad == set(request.blocks[: -(-19 // TOKENS)])
        other = instance.add("y", 20, 2, D | {"transfer_id": "y"})
        step_until(lambda: other.computed == 20)
        assert instance.wrong(other, 0, 20) == []  # computed here
        for name in ("x", "y"):
            instance.finish(name)
        assert instance.requests == {}
    lost = instance.worker._worker.lost
    instance.close()
    instance.side.close()
    return lost


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_rank_that_dies_costs_no_more_than_the_hand_off(dies: int) -> None:
    with Ranks(3, tidy=False) as ranks:
        outcomes = ranks.outcomes(lose, free_port(), dies, timeout=90)
        assert outcomes[dies].died == 7
        for rank in {0, 1, 2} - {dies}:
            assert outcomes[rank].error is None, outcomes[rank].trace
            assert f"PeerLostError: rank {dies}" in outcomes[rank].value
        ranks.kill_all()


def differ(comm: hetcoll.Communicator, port: int) -> None:
    def opened() -> int:
        return sum(isinstance(resource, hetcoll.Communicator) for resource, _ in lifetime.opened())

    side = comm.split(comm.rank)
    assert side is not None
    before = opened()
    with pytest.raises(ArgumentError, match=r"HetcollConnector: wanted one settings, got rank 0 .*, rank 1 ") as raised:
        begin(side, port, (Shape(1), Shape(1)), comm.rank == 0, slots=3 + comm.rank)
    assert opened() == before, f"the job that came to nothing is open: {raised.value}"
    side.close()


def test_sides_that_differ_leave_the_job(ranks_of: Callable[[int], Ranks]) -> None:
    ranks_of(2).run(differ, free_port(), timeout=60)


def test_a_thread_that_fails_loses_what_is_under_way() -> None:
    """It is an error of no kind that is expected: requests end all the same."""

    def wait(seconds: float) -> None:
        raise ValueError("odd")

    closed: list[str] = []
    handoff = SimpleNamespace(
        src=SimpleNamespace(layers=1, block_tokens=TOKENS), close=lambda: closed.append("handoff")
    )
    mailbox = SimpleNamespace(wait=wait, close=lambda: closed.append("mailbox"))
    worker = PrefillWorker(SimpleNamespace(error=None), handoff, mailbox, list, 5.0)  # type: ignore[arg-type]
    wait_until(lambda: worker.lost != "", 20)
    assert worker.lost == "ValueError: odd"
    worker.begin(Step(prefills=[Prefill("x", "x", [0], anew=True, computed=TOKENS)]))
    worker.save_rest(None)
    assert worker.results({"x"})[0] == {"x"}
    worker.close()
    assert {*closed} == {"handoff", "mailbox"}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"port": 1}, "kv_connector_extra_config: wanted .*, got port"),
        ({"slots": 0}, "kv_connector_extra_config: slots: wanted 1 or more, got 0"),
        ({"prefill_ranks": 3}, "tensor_parallel_size: wanted 3, as prefill_ranks says, got 2"),
        ({"timeout": 0}, "timeout: wanted seconds above 0, got 0"),
        ({"timeout": "60"}, "timeout: wanted seconds above 0, got '60'"),
        ({"layerwise": "false"}, "layerwise: wanted a bool, got 'false'"),
        ({"address": 29600}, "address: wanted a str, got 29600"),
        ({"address": "here"}, "address: wanted host:port of rank 0, here or in HETCOLL_MASTER"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], wanted: str) -> None:
    settings = {"address": "127.0.0.1:1", "prefill_ranks": 2, "decode_ranks": 1} | changes
    with hetcoll.Communicator.init(1, 0, hetcoll.get_unique_id()) as side, pytest.raises(ArgumentError, match=wanted):
        Instance(side, Shape(2), "kv_producer", settings)

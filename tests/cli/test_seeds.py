"""The experiments of published systems (benchmarks/seeds.py): each runs to its end in its small form, verified."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fakes
import netns
import pytest
from installed import import_torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpus
import places
import seeds
import seeds_models
from shapes import Shape

PIECES = ("--batch", "4", "--pieces", "2")
TINY = ("--models", "tiny", "--turns", "1", "--steps", "2")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("fakes", marks=pytest.mark.fakes)])
MIXED = places.Halves("fake cuda", "cpu", "a fake of NVIDIA's GPU beside a CPU, whose times mean nothing")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs an experiment: its status, its heading, its table as rows by column, and its figures."""

    def one(*words: str) -> SimpleNamespace:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where PyTorch may be
        file = tmp_path / "figures.json"
        status = seeds.main([*words, "--json", str(file)])
        said = capsys.readouterr().out.split("\n\n")
        head, dashes, *rows = (line.strip("| ").split(" | ") for line in said[2].splitlines())
        assert len(dashes) == len(head)
        kept = json.loads(file.read_text())
        table = [dict(zip(head, row, strict=True)) for row in rows]
        assert len(table) == len(kept["figures"])
        return SimpleNamespace(status=status, heading=said[1], table=table, told=said[3], **kept)

    return one


def test_every_experiment_is_listed_with_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert seeds.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name, each in seeds.EXPERIMENTS.items():
        assert f"| {name} | {each.title} |" in listed
    for source in ("2601.22585", "2602.18007", "2605.31000", "ucc"):
        assert source.lower() in listed.lower()
    for name, halves in places.DEVICES.items():
        assert f"| {name} | {halves.proof} |" in listed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "wanted an experiment"),
        (["halves", "--list"], "wanted an experiment"),
        (["x"], "choice"),
        (["halves", "--ranks", "3"], "--ranks: wanted an even number, got 3"),
    ],
)
def test_words_that_are_none(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        seeds.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_where_the_halves_are() -> None:
    kinds = {name: [(each.kind, each.index) for each in halves.places(4)] for name, halves in places.DEVICES.items()}
    assert kinds["vendors"] == [("cuda", 0), ("cuda", 1), ("hip", 0), ("hip", 1)]
    assert [each.python for each in places.DEVICES["vendors"].places(2, "a/python")] == [sys.executable, "a/python"]
    assert kinds["posing"] == [("cuda", 0), ("cuda", 1), ("posing", 2), ("posing", 3)]
    assert [places.DEVICES[name].islands for name in ("cpu", "cuda", "posing", "mixed")] == [False, True, False, False]
    assert places.islands_of(2) == {"HETCOLL_ISLANDS": "0|1"}
    assert places.islands_of(4) == {"HETCOLL_ISLANDS": "0-1|2-3"}
    where = [places.Place(host=host) for host in ("a", "a", "b")]
    (words, _), *_, (last, env) = places.commands([["x"], ["y"], ["z"]], {"OURS": "1"}, where)
    assert (words, last) == (["ip", "netns", "exec", "a", "x"], ["ip", "netns", "exec", "b", "z"])
    assert [env[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OURS")] == ["2", "0", "1", "1"]
    (_, first), (_, second) = places.commands([["x"], ["y"]], {}, [places.Place("cuda", host_id="far"), places.Place()])
    assert (first["HETCOLL_DEVICE"], first["HETCOLL_HOST_ID"], second["HETCOLL_DEVICE"]) == ("cuda:0", "far", "cpu")
    assert second.get("HETCOLL_HOST_ID") == os.environ.get("HETCOLL_HOST_ID")


def test_collectives_of_cpus(run: Any) -> None:
    found = run("collectives", "--sizes", "8", "4096", "--rounds", "1", "--peers")
    assert found.status == 0
    assert "GPUs' figures are still to come" in found.heading
    assert [(row["operation"], row["bytes"]) for row in found.table[:2]] == [
        ("allreduce", "8 B"),
        ("allreduce", "4 KiB"),
    ]
    assert len(found.table) == 6
    assert all(float(row["hetcoll, µs"]) > 0 for row in found.table)
    assert "Every result was verified." in found.told


@pytest.mark.fakes
def test_collectives_over_fakes_of_two_vendors(run: Any) -> None:
    fakes.require("both")
    found = run("collectives", "--device", "fakes", "--sizes", "4096", "--rounds", "1", "--ops", "allgather", "--peers")
    assert (found.status, len(found.table)) == (0, 1)
    assert "fakes of both vendors' GPUs, whose times mean nothing" in found.heading


def test_what_comes_wrong_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoiled:
        @classmethod
        def at(cls, *_: object) -> Spoiled:
            return cls()

        def close(self) -> None: ...
        def perf(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(time_us=5.0, wrong=3)

    monkeypatch.setattr(gpus, "PerfRanks", Spoiled)
    found = run("collectives", "--sizes", "4096", "--rounds", "1", "--ops", "allgather")
    assert found.status == 1
    assert "WRONG: hetcoll, allgather of 4096 B: 3 elements" in found.told


@DEVICES
def test_latency_over_slow_links(run: Any, device: str) -> None:
    fakes.require("both" if device == "fakes" else None)
    with netns.network(2):  # or the test is skipped
        pass
    sizes = ("--sizes", "8", "1048576", "--budget-ms", "20")
    found = run("latency", "--device", device, "--rounds", "1", "--peers", *sizes)
    assert found.status == 0
    assert [(row["bytes"], row["published, µs"]) for row in found.table] == [("8 B", "175"), ("1 MiB", "3370")]
    assert (
        float(found.table[1]["hetcoll, µs"]) > (1 << 20) / 1.25e3 / 2
    )  # half of what the links need, as a burst passes


class Told:
    """In the place of a job that trains or decodes: a step takes as long as the job's name says; losses are `loss`."""

    seconds: ClassVar = {"first": 1.0, "second": 2.0, "both": 1.25}
    loss = 2.0
    made: ClassVar[dict[str, dict[str, Any]]] = {}  # what each was told last
    dtypes: ClassVar[dict[str, str]] = {}

    def __init__(self, name: str, how: str, those: list[places.Place], *_: object, dtype: str, **__: object) -> None:
        self.name, self.how, self.ranks = name, how, len(those)
        self.dtypes[name] = dtype

    def close(self) -> None: ...

    def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        if question["do"] == "make":
            self.made[self.name] = question
        if question["do"] == "decode":
            tokens = [[1, 2, 3]] if question["way"] != "stages" else [[1, 2, 4]]
            return [{"tokens": tokens, "seconds": 0.5, "gap": 0.1}] * self.ranks
        losses = [self.loss] * question.get("steps", 0)
        return [{"seconds": self.seconds.get(self.name, 1.0), "losses": losses}] * self.ranks


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds_models, "Job", Told)

    def losses_of_one(shapes: list[Shape], *_: object, steps: int, dtype: str, **__: object) -> list[list[float]]:
        Told.dtypes["one process"] = dtype
        return [[2.0] * steps for _ in shapes]

    Told.dtypes.clear()
    monkeypatch.setattr(seeds_models, "losses_of_one", losses_of_one)


@pytest.mark.usefixtures("told")
def test_table_of_halves(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the ranks train 128 tokens a step in one second and in two, both train 256 in 1.25."""
    found = run("halves", "--device", "posing", *TINY)
    (row,) = found.table
    assert [row[name] for name in ("first half alone", "second half alone", "their sum")] == ["128", "64", "192"]
    assert [row[f"times the {which}"] for which in ("first", "second")] == ["1.60", "3.20"]
    assert (found.status, row["of the sum"]) == (0, "1.07")
    assert "(2 ranks: NVIDIA GPUs, half of which pose as AMD's)" in found.heading
    assert "1.48 times NVIDIA's half and 2.97 times AMD's" in found.told
    monkeypatch.setattr(Told, "loss", 2.1)
    assert run("halves", *TINY).status == 1


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(("device", "dtype"), [("posing", "bfloat16"), ("mixed", "float32")])
def test_halves_train_in_one_type(run: Any, device: str, dtype: str) -> None:
    """Alone, together and in one process: what a CPU does not train in, a GPU beside it does not either."""
    run("halves", "--device", device, "--ranks", "2", *TINY)
    assert Told.dtypes == dict.fromkeys(("first", "second", "both", "one process"), dtype)


@pytest.mark.usefixtures("told")
def test_a_half_of_one_rank_is_no_pipeline(run: Any) -> None:
    """It has no second stage, and cuts its batch into as many pieces."""
    for ranks, way in ((2, "ddp"), (4, "pipeline")):
        run("halves", "--way", "pipeline", "--ranks", str(ranks), "--batch", "8", "--pieces", "4", *TINY)
        assert [Told.made[name]["way"] for name in ("first", "second", "both")] == [way, way, "pipeline"]
        assert (Told.made["both"]["stages"], Told.made["both"]["samples"]) == (2, 2)
    run("halves", "--way", "pipeline", "--ranks", "2", "--batch", "8", "--pieces", "4", *TINY)
    assert Told.made["first"]["pieces"] == 4


@pytest.mark.usefixtures("told")
def test_table_of_forwarding(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(hosts=list("abcd"))
    monkeypatch.setattr(seeds_models, "shaped", lambda *_, **__: contextlib.nullcontext(names))
    found = run("forwarding", "--device", "posing", *TINY)
    published = [row["published, TFLOPS a GPU"] for row in found.table]
    assert published == ["11.1", "160.8", "236.5", "539.6"]
    assert [row["part of one vendor's 549.7"] for row in found.table] == ["0.02", "0.29", "0.43", "0.98"]
    with pytest.raises(SystemExit, match="so that stages have several, got 2"):
        run("forwarding", "--ranks", "2")


def test_what_goes_through_which_cards() -> None:
    four = [places.Place() for _ in range(4)]
    each, half, none = (seeds_models.FORWARDING[at] for at in (1, 3, 4))
    assert [place.host for place in each.places(four, "abcd")] == list("abcd")
    assert [place.host for place in half.places(four, "abcd")] == list("aabb")
    assert [place.host for place in none.places(four, "abcd")] == [""] * 4
    assert each.environment["HETCOLL_SOCKET_IFNAME"] == "=eth0"
    assert half.environment["HETCOLL_SOCKET_STRIPES"] == "2"
    assert none.environment == {}


@pytest.mark.usefixtures("told")
def test_a_token_that_differs_fails(run: Any) -> None:
    found = run("inference", "--models", "tiny")
    assert found.status == 1
    assert [row["same tokens"] for row in found.table] == ["yes", "yes", "NO"]
    assert "WRONG: tiny, pipeline parallel: the tokens are not one process's" in found.told


@pytest.mark.thorough
@pytest.mark.timeout(600)
@DEVICES
def test_decoding_in_parts_gives_the_tokens_of_one_process(run: Any, device: str) -> None:
    import_torch()
    fakes.require("both" if device == "fakes" else None)
    found = run("inference", "--device", device, "--models", "tiny", "--tokens", "8")
    assert found.status == 0
    assert [row["how"] for row in found.table] == ["one process", "tensor parallel", "pipeline parallel"]
    tokens = [each["tokens"] for each in found.figures]
    assert [[len(row) for row in each] for each in tokens] == [[8] * 4] * 3
    assert len({token for row in tokens[0] for token in row}) > 4, "a model that says one thing proves little"
    assert all(float(row["least gap of logits"]) > 1e-4 for row in found.table)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [["ddp"], ["balanced"], ["ddp", *PIECES], ["fsdp2", *PIECES], ["pipeline", *PIECES]])
def test_halves_of_cpus(run: Any, words: list[str]) -> None:
    import_torch()
    found = run("halves", "--models", "tiny", "--turns", "2", "--steps", "3", "--way", *words)
    assert found.status == 0
    assert min(float(row["of the sum"]) for row in found.table) > 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.fakes
def test_halves_over_fakes_of_two_vendors(run: Any) -> None:
    import_torch()
    fakes.require("both")
    found = run("halves", "--device", "fakes", "--way", "ddp", *TINY)
    assert found.status == 0
    assert "fakes of both vendors' GPUs, whose times mean nothing" in found.heading


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.fakes
@pytest.mark.parametrize("words", [["halves", *TINY], ["inference", "--models", "tiny", "--tokens", "8"]])
def test_a_gpu_beside_a_cpu(run: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """As on one GPU, but that the fake has the tensors of a CPU."""
    import_torch()
    fakes.require("cuda")
    monkeypatch.setitem(places.DEVICES, "mixed", MIXED)
    found = run(*words, "--device", "mixed")
    assert found.status == 0, found.told
    assert MIXED.proof in found.heading


def test_weights_are_the_same_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU draws other numbers than a CPU from the same seed."""
    torch = import_torch()
    import llama
    import shapes

    def made() -> list[Any]:
        parts = llama.layers(shapes.SHAPES["tiny"])
        return [weight for part in parts for weight in part.parameters()]

    first, seed = made(), torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda number: seed(number + 1))
    for one, other in zip(first, made(), strict=True):
        assert torch.equal(one, other)
    some = [float(weight.detach().flatten()[3]) for weight in first if weight.dim() == 2]
    assert len(set(some)) == len(some), "weights of one number are no model"


@pytest.mark.thorough
@pytest.mark.timeout(600)
@DEVICES
def test_a_pipeline_whose_stages_are_wide_between_hosts(run: Any, device: str) -> None:
    import_torch()
    fakes.require("both" if device == "fakes" else None)
    with netns.network(2):  # or the test is skipped
        pass
    which = {"cpu": "3", "fakes": "2"}[device]  # Gloo has no GPUs, so there is one way less
    found = run("forwarding", "--device", device, "--only", which, "--rate", "1gbit", *TINY)
    assert found.status == 0
    assert found.table[0]["how"] == "by the CPU for the pipeline only, all cards"

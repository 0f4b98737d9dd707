"""The benchmark against peers: from the ranks' files to tables, the limits' probe, and the worker over hetcoll."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fakes
import netns
import pytest
from installed import import_torch
from patience import DEADLINE
from thorough import HOUSE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_limits  # noqa: E402
import gpu_tables  # noqa: E402
import gpus  # noqa: E402
import instructions  # noqa: E402
import libraries  # noqa: E402
import peers  # noqa: E402
import results  # noqa: E402
import shapes  # noqa: E402
import training  # noqa: E402

pytestmark = HOUSE

LIMITS = {
    "memcpy_gbs": {"65536": {"one": 40.0, "both": 32.0}, "1048576": {"one": 20.0, "both": 10.0}},
    "add_gbs": {"65536": {"one": 30.0, "both": 16.0}, "1048576": {"one": 20.0, "both": 5.0}},
    "loopback_gbs": {"one_way": 5.0, "each_way": 2.5},
    "loopback_latency_us": 5.0,
    "flag_us": 0.05,
}


def point(name: str, median: float, nbytes: int = 8, transport: str = "shm", wrong: int = 0) -> results.Point:
    return results.Point(name, "1", transport, 2, "allreduce", nbytes, median, wrong)


def write_ranks(folder: Path, medians: list[list[float]]) -> Path:
    for rank, row in enumerate(medians):
        rows = [{"op": "allreduce", "nbytes": 8 << i, "median_us": m, "wrong": rank} for i, m in enumerate(row)]
        (folder / f"x.{rank}.json").write_text(json.dumps({"version": "9", "rows": rows}))
    return folder / "x"


def test_a_point_is_the_slowest_ranks_and_everyones_errors(tmp_path: Path) -> None:
    points = results.read_launch(write_ranks(tmp_path, [[1.0, 5.0], [2.0, 4.0]]), "MPICH", "tcp", 2)
    assert [(p.nbytes, p.median_us, p.wrong, p.version) for p in points] == [(8, 2.0, 1, "9"), (16, 5.0, 1, "9")]


def test_a_launch_without_all_ranks_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 2 of 3 wrote no results"):
        results.read_launch(write_ranks(tmp_path, [[1.0], [2.0]]), "MPICH", "tcp", 3)


def test_the_ratio_is_to_the_best_round_of_the_best_peer() -> None:
    points = [point("hetcoll", us) for us in (0.5, 0.4, 0.9)]
    points += [point("MPICH", us) for us in (1.0, 0.8, 3.0)] + [point("Gloo", us) for us in (0.9, 0.9, 0.9)]
    (line,) = results.summarise(points, LIMITS)
    assert (line.best_us, line.mid_us) == (0.4, 0.5)
    assert line.peers == {"MPICH": (0.8, 1.0), "Gloo": (0.9, 0.9)}
    assert line.best_peer == "MPICH"
    assert line.ratio == pytest.approx(2.0)
    assert line.ratio_mid == pytest.approx(0.9 / 0.5)


def test_without_us_there_is_no_line_and_without_peers_no_ratio() -> None:
    assert results.summarise([point("MPICH", 1.0)], LIMITS) == []
    (line,) = results.summarise([point("hetcoll", 1.0)], LIMITS)
    assert (line.ratio, line.best_peer) == (0.0, "")


def test_limits_follow_the_model() -> None:
    mib = 1 << 20
    shm = results.limit_us(LIMITS, "allreduce", "shm", 2, mib)
    assert shm == pytest.approx(0.05 + mib / 2 / 10e3 + mib / 2 / 5e3)  # half is copied, half is added
    assert results.limit_us(LIMITS, "allgather", "shm", 2, 4096) == pytest.approx(0.05 + 4096 / 32e3)
    assert results.limit_us(LIMITS, "allreduce", "tcp", 2, mib) == pytest.approx(5.0 + mib / 2.5e3)
    assert results.limit_us(LIMITS, "allgather", "tcp", 2, mib) == pytest.approx(5.0 + mib / 2 / 2.5e3)
    assert results.limit_us(LIMITS, "broadcast", "tcp", 2, mib) == pytest.approx(5.0 + mib / 5e3)
    assert results.limit_us(LIMITS, "allreduce", "shm", 4, mib) == 0.0


def test_the_best_limits_are_the_largest_rates_and_the_smallest_times() -> None:
    other = json.loads(json.dumps(LIMITS))
    other["flag_us"], other["loopback_gbs"]["one_way"], other["add_gbs"]["65536"]["both"] = 0.04, 6.0, 3.0
    best = results.best_limits([LIMITS, other])
    assert (best["flag_us"], best["loopback_gbs"]["one_way"], best["add_gbs"]["65536"]["both"]) == (0.04, 6.0, 16.0)


def test_a_sweep_may_be_joined_from_parts(tmp_path: Path) -> None:
    """With no round of its own the command only puts the parts together, as often as it likes."""
    part, other, whole = (tmp_path / f"{name}.json" for name in ("part", "other", "whole"))
    for path, us, flag in ((part, 0.5, 0.05), (other, 0.4, 0.06)):
        points = [point("hetcoll", us), point("MPICH", 2 * us)]
        path.write_text(json.dumps(results.document({}, LIMITS | {"flag_us": flag}, points, [], ["a failure"])))
    words = [sys.executable, str(BENCHMARKS / "peers.py"), "--rounds", "0", "--json", str(whole)]
    ended = subprocess.run([*words, "--join", part, other, tmp_path / "absent"], timeout=DEADLINE, check=False)
    assert ended.returncode == 1  # the parts' failures stay failures
    joined = json.loads(whole.read_text())
    assert [p["median_us"] for p in joined["points"]] == [0.5, 1.0, 0.4, 0.8]
    assert (joined["env"]["rounds"], joined["limits"]["flag_us"], len(joined["failures"])) == (2, 0.05, 2)
    assert joined["table"][0]["ratio"] == 2.0


def test_markdown_has_a_table_for_each_question_of_each_transport() -> None:
    points = [point(name, us, transport=t) for t in ("shm", "tcp") for name, us in (("hetcoll", 0.5), ("Gloo", 100.0))]
    points += [point(name, us, 65536, "tcp") for name, us in (("hetcoll", 50.0), ("Gloo", 100.0), ("MPICH", 60.0))]
    lines = results.summarise(points, LIMITS)
    text = f"{results.ratios(lines)}\n{results.of_limits(lines)}"
    assert [line for line in text.splitlines() if line and not line.startswith("| ---")] == [
        "### 2 ranks, shm: how many times as fast as the best peer",
        "| operation | 8 B |",
        "| allreduce | 200.00 |",
        "### 2 ranks, tcp: how many times as fast as the best peer",
        "| operation | 8 B | 64 KiB |",
        "| allreduce | 200.00 | 1.20 |",
        "### 2 ranks, shm: per cent of the limit",
        "| operation | 8 B |",
        "| allreduce | 10 |",
        "### 2 ranks, tcp: per cent of the limit",
        "| operation | 8 B | 64 KiB |",
        "| allreduce | 1001 | 62 |",
    ]


def test_a_size_that_was_not_measured_is_an_empty_cell() -> None:
    points = [point("hetcoll", 1.0), point("Gloo", 3.0), point("hetcoll", 1.0, 16)]
    text = results.ratios(results.summarise(points, {}))
    assert "| operation | 8 B |" in text
    assert "16 B" not in text
    assert "limit" not in text


def test_what_a_page_does_not_show_is_kept_beside_it(tmp_path: Path) -> None:
    (tmp_path / "measurements").mkdir()
    link = results.keep('{"a": 1}', tmp_path, "2026-01-02", "sweep")
    assert link == "[measurements/2026-01-02-sweep.json](measurements/2026-01-02-sweep.json)"
    assert json.loads((tmp_path / "measurements/2026-01-02-sweep.json").read_text()) == {"a": 1}
    link = results.keep('{"a": 2}', tmp_path / "measurements", "2026-01-02", "gpus-2")
    assert link == "[2026-01-02-gpus-2.json](2026-01-02-gpus-2.json)"
    assert json.loads((tmp_path / "measurements/2026-01-02-gpus-2.json").read_text()) == {"a": 2}


def test_table_of_gpus() -> None:
    product = {"alone": 100.0, "beside": 125.0, "call": 10.0, "call_beside": 20.0}
    found = [
        ("allreduce", 8, {"hetcoll": {"us": 5.0}, "NCCL without P2P": {"us": 10.0}}),
        (
            "allreduce",
            1 << 20,
            {"hetcoll": {"us": 50.0}, "NCCL without P2P": {"us": 60.0}, gpu_tables.COPIES: {"us": 40.0}},
        ),
        ("sendrecv", 8, {"hetcoll": {"us": 20.0}, "NCCL without P2P": {"us": 10.0}}),
        (
            "product allgather",
            1 << 20,
            {"hetcoll": product},
        ),
        ("nothing", 0, {"hetcoll": {"us": 5.0, "sync": 12.0, "wrong": 0.0}}),
    ]
    assert gpu_tables.line(*found[-1]).split() == ["nothing", "0", "B", "|", "hetcoll:", "5.0", "us", "sync", "12.0"]
    assert gpu_tables.markdown("2 GPUs, islands 0|1", "2026-01-02, here.", found).splitlines() == [
        "### 2 GPUs, islands 0\\|1",
        "",
        "2026-01-02, here.",
        "",
        "| operation |  | 8 B | 1 MiB |",
        "| --- | --- | ---: | ---: |",
        "| allreduce | us | 5 | 50 |",
        "|  | times NCCL without P2P | 2.00 | 1.20 |",
        "|  | of the limit |  | 0.80 |",
        "| sendrecv | us | 20 |  |",
        "|  | times NCCL without P2P | 0.50 |  |",
        "",
        "Calls of allgather with 1 MiB beside products of 8192 x 8192 matrices in bfloat16 make these slower by: "
        "hetcoll 25.0 % (100 to 125 us; a call 10 us alone, 20 beside, 4 taken from products).",
        "",
        "An empty kernel, by the driver's C function: 5.0 us, 12.0 with a wait.",
    ]


def test_a_run_replaces_the_tables_of_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measurements").mkdir()
    for name, at in (("PAGE", "measurements/gpu-tables.md"), ("CHOSEN", "benchmarks.md")):
        (tmp_path / at).write_text(getattr(gpu_tables, name).read_text())
        monkeypatch.setattr(gpu_tables, name, tmp_path / at)
    before = gpu_tables.PAGE.read_text()
    row = {"hetcoll": {"us": 5.0}, "NCCL": {"us": 61.7}, "PyTorch's NCCL": {"us": 10.0}}
    told = '2031-01-02, a GPU. `python benchmarks/gpus.py --gpus 2 --only "one island"`.'
    points = [("allreduce", n, row) for n in (8, 1 << 20)]
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"schema": 1, "about": told, "settings": [{"setting": "one island", "points": points}]}))
    assert gpus.main(["--gpus", "2", "--figures", str(file), "--write-docs"]) == 0
    page = gpu_tables.PAGE.read_text()
    old, new = (gpu_tables._tables(text) for text in (before, page))
    assert [name for name in old if old[name] != new[name]] == ["2 GPUs, one island"]
    assert list(old) == list(new)
    link = "2031-01-02-gpus-2-one-island.json"
    assert new["2 GPUs, one island"].split("\n\n")[1] == f"{told} Everything: [{link}]({link})."
    assert json.loads((gpu_tables.PAGE.parent / link).read_text())["about"] == told
    assert "| 2 | NVLink | NCCL | 12.34 |  | 12.34 |  |" in gpu_tables.CHOSEN.read_text()
    for words, why in ((["--gpus", "4", "--write-docs"], "has other figures"), ([], "wanted with --write-docs")):
        with pytest.raises(SystemExit):
            gpus.main([*words, "--figures", str(file)])
        assert why in capsys.readouterr().err


def test_settings_are_found_by_title() -> None:
    assert [each.title for each in gpus.asked(2, "one island")] == ["one island"]
    assert [each.title for each in gpus.asked(2, "copy engines")] == [
        "one island, by copy engines",
        "one island, by copy engines beside NCCL's",
    ]
    assert len(gpus.asked(2, "")) == len(list(gpus.settings(2)))


def test_rows_of_gpus_are_those_of_the_whole_tables() -> None:
    there = results.between_marks(gpu_tables.CHOSEN.read_text(), "GPUs", gpu_tables.SCRIPT)
    assert there.strip() == gpu_tables.chosen(gpu_tables.PAGE.read_text())


def test_gpus_that_ranks_share_count_once() -> None:
    shared = [
        gpu_tables.heading(each.gpus, each.title)
        for n in gpus.GPUS
        for each in gpus.settings(n)
        if len(each.places) > each.gpus
    ]
    assert shared[:2] == ["1 GPU, and a rank without one", "1 GPU, messages between islands 0|1"]
    assert "2 GPUs, four ranks on two GPUs, islands 0|1|2|3, by algorithm" in shared
    assert not any(heading.startswith("4 GPUs") for heading in shared)


def test_text_between_marks_is_replaced_and_nothing_else() -> None:
    begin, end = (
        results.MARK.format(which=f"sweep {what}: output", script="benchmarks/peers.py") for what in ("begins", "ends")
    )
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    once = results.replace_between_marks(page, "sweep", "new")
    assert once == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert results.replace_between_marks(once, "sweep", "new") == once
    with pytest.raises(ValueError, match="found none of them"):
        results.replace_between_marks("no marks", "sweep", "new")


def test_what_benchmarks_write_has_marks_in_the_documents() -> None:
    """Each section that one can write, once."""
    docs = BENCHMARKS.parent / "docs"
    sections = {
        "gpus.py": [(gpu_tables.CHOSEN, "GPUs"), *((gpu_tables.PAGE, gpu_tables.section(n)) for n in gpus.GPUS)],
        "peers.py": [(page, peers.SECTION) for page in (docs / "benchmarks.md", peers.LIMITS_PAGE)],
        "training.py": [(training.PAGE, training.section(n)) for n in training.GPUS],
    }
    assert {path.name for path in BENCHMARKS.glob("*.py") if '"--write-docs"' in path.read_text()} == set(sections)
    for script, places in sections.items():
        for path, name in places:
            page = path.read_text()
            assert "\nnew\n" in results.replace_between_marks(page, name, "new", f"benchmarks/{script}")
            assert page.count(results.MARK.format(which=f"{name} begins: output", script=f"benchmarks/{script}")) == 1


def test_training_writes_no_table_of_what_is_not_on_gpus() -> None:
    command = [sys.executable, str(BENCHMARKS / "training.py"), "--write-docs"]
    ended = subprocess.run(command, timeout=DEADLINE, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--write-docs: wanted with --gpus" in ended.stderr


def test_every_transport_has_us_and_every_peer() -> None:
    for transport in libraries.TRANSPORTS:
        names = {variant.name for variant in libraries.VARIANTS if transport in variant.transports}
        assert names >= {"hetcoll", "Gloo", "Open MPI", "MPICH", "Intel MPI"}
    assert all(v.environment in libraries.ENVIRONMENTS for v in libraries.VARIANTS if v.environment)


def test_a_hanging_launch_ends_and_leaves_nothing(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"""
import pathlib, subprocess, sys
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({str(child)!r}).write_text(str(process.pid))
process.wait()
"""
    with pytest.raises(subprocess.TimeoutExpired):
        libraries.run_group([sys.executable, "-c", script], {}, 2.0)
    stat = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # init has yet to bury it
        assert time.monotonic() < deadline, "the launched process's own child still runs"
        time.sleep(0.01)


def test_the_reason_of_a_failed_launch_is_what_it_said() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        libraries.run_group([sys.executable, "-c", "import sys; sys.exit('no such fabric')"], {}, 30.0)
    assert peers.reason(caught.value) == "exit status 1: no such fabric"


@pytest.mark.calm
@pytest.mark.timeout(330)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_limits_probe_measures(tmp_path: Path) -> None:
    probe = peers.build_limits(tmp_path)
    limits = json.loads(libraries.run_group([str(probe)], {}, 300.0))
    rates = [r for key in ("memcpy_gbs", "add_gbs") for sizes in limits[key].values() for r in sizes.values()]
    assert len(rates) == 20
    assert [r for r in [*rates, *limits["loopback_gbs"].values()] if not 0 < r < 2000] == []
    assert 0 < limits["flag_us"] < 10000
    assert results.limit_us(limits, "allreduce", "shm", 2, 1 << 20) > 0


def test_a_rise_of_more_than_three_per_cent_is_told() -> None:
    then = {"small": 1000.0, "large": 200.0}
    assert instructions.compare({"small": 1029.0, "large": 100.0}, then) == []
    (line,) = instructions.compare({"small": 1031.0, "large": 200.0}, then)
    assert line == "small: 1031.0 instructions, 1000.0 before: +3.1 %"


def test_the_total_of_a_callgrind_file() -> None:
    assert instructions.total("events: Ir\nfn=(1) main\n7 12\ntotals: 4242\n") == 4242
    with pytest.raises(ValueError, match="no callgrind file"):
        instructions.total("")


def test_table_of_training() -> None:
    t = training
    found = {
        "nccl": t.Found([1.0, 1.1, 0.9], [5.0, 2.0]),
        "islands": t.Found([1.25, 9.0, 1.0], [5.0, 2.002]),
        "gloo": t.Found([2.0, 2.0, 3.0], [5.0, 2.1]),
    }
    told = t.judge("ddp", found, [5.0, 2.0], 1000, t.PEERS)
    assert [round(each.error, 6) for each in found.values()] == [0, 0.001, 0.05]
    assert "800 tokens/s, of NCCL 0.800, of NCCL inside, Gloo between the halves 1.600" in told
    text = t.markdown({"ddp": found}, {}, 1000, 4)
    assert text.splitlines()[2:] == [
        "| carried by | ddp |",
        "| --- | ---: |",
        "| NCCL, tokens/s | 1000 |",
        "| NCCL | 1.000 (2.00) |",
        "| hetcoll, two islands | 0.800 (1.60) |",
        "| NCCL inside, Gloo between the halves | 0.500 (1.00) |",
        "",
        "The largest error of a loss: 5.0e-02.",
    ]
    balanced = {"even": 1.0, "slowed": 2.0, "balanced": 1.25, "shares": [3, 3, 3, 2]}
    told = t.balance_text(balanced | {f"loss {phase}": 2.0 for phase in t.PHASES}, 4)
    assert "50 % of the tokens/s of equal GPUs with equal parts, 80 % with" in told
    assert "the GPUs leave 88 %, so balance reaches 0.914 of its share" in told


@pytest.mark.thorough
def test_weights_between_hosts(tmp_path: Path) -> None:
    """Two hosts of two ranks: what none of a host's ranks holds is the limit, and groups of servers are a case."""
    import_torch()
    if why := netns.why_not():
        pytest.skip(why)
    words = ["--ranks", "4", "--hosts", "2", "--models", "tiny", "--rounds", "1", "--json", str(tmp_path / "found")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(BENCHMARKS / "weights.py"), *words]
    ended = subprocess.run(command, env=env, timeout=DEADLINE, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads((tmp_path / "found").read_text())["figures"]
    assert figures[-1]["case"] == "4 ranks, Shard(0) to Shard(1) in each of 2 groups"
    assert all("plain send" not in each["seconds"] for each in figures)
    nbytes = 2 * shapes.SHAPES["tiny"].parameters
    lacked = [each["lacked"] for each in figures]
    assert lacked[2:4] == [nbytes, nbytes]  # the servers' host has nothing
    assert lacked[1] == lacked[4] == nbytes // 2  # each host has half


@pytest.mark.thorough
def test_weights_are_moved_rightly_by_all_ways(tmp_path: Path) -> None:
    """Three ranks, one of which trains where servers are others. What no rank compares would be no benchmark."""
    import_torch()
    words = ["--ranks", "3", "--trainers", "1", "--models", "tiny", "--rounds", "1", "--json", str(tmp_path / "found")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # where PyTorch may be
    command = [sys.executable, str(BENCHMARKS / "weights.py"), *words]
    ended = subprocess.run(command, env=env, timeout=DEADLINE, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads((tmp_path / "found").read_text())["figures"]
    assert [each["case"] for each in figures] == [
        "3 ranks, Shard(0) to Shard(1)",
        "3 ranks, Shard(0) to Replicate()",
        "1 to 2 other ranks, Shard(0) to Shard(1)",
        "1 to 2 other ranks, Shard(0) to Replicate()",
    ]
    ways = {"hetcoll", "hetcoll, in place", "hetcoll, weight by weight", "hetcoll's broadcast", "redistribute, Gloo",
            "broadcast, Gloo", "plain send", "plain copy"}  # fmt: skip
    assert [set(each["seconds"]) for each in figures] == [ways] * 2 + [ways - {"redistribute, Gloo"}] * 2
    assert [each["busiest"] for each in figures[2:]] == [
        2 * shapes.SHAPES["tiny"].parameters
    ] * 2  # sent once, bfloat16


@pytest.mark.parametrize(
    ("islands", "rank", "op", "bytes_"),
    [
        ([[0], [1]], 0, "allreduce", (240, 240)),
        ([[0, 1], [2, 3]], 3, "allreduce", (120, 120)),
        ([[0, 1, 2], [3]], 3, "allreduce", (240, 240)),
        ([[0, 1, 2], [3]], 0, "allreduce", (80, 80)),
        ([[0], [1], [2, 3]], 1, "allreduce", (320, 320)),
        ([[0], [1], [2, 3]], 2, "allreduce", (160, 160)),
        ([[0], [1]], 0, "allgather", (120, 120)),
        ([[0], [1], [2, 3]], 2, "allgather", (120, 60)),
        ([[0], [1], [2, 3]], 0, "reduce_scatter", (180, 120)),
    ],
)
def test_what_must_cross_between_islands(islands: list[list[int]], rank: int, op: str, bytes_: tuple[int, int]) -> None:
    assert gpu_limits.crossing(op, islands, rank, 240) == bytes_


@pytest.mark.thorough
@pytest.mark.parametrize(("gpus", "calls"), [(0, 50_000), (2, 4_000)])
def test_nothing_grows_under_load(gpus: int, calls: int) -> None:
    """In small. It says so itself, by its status, where anything does; all calls are checked."""
    words = [sys.executable, "-m", "hetcoll", "run", "-n", "4", str(BENCHMARKS / "load.py"), "--calls", str(calls)]
    words += ["-g", str(gpus)]
    env = os.environ | (fakes.environment("hip", devices=2, timeout=60) if gpus else {})
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(r"\[0\] +[0-9,]+ +[0-9.]+ ", line)]
    assert len(rows) == 11
    assert int(rows[-1].split()[1].replace(",", "")) > calls
    assert (float(rows[-1].split()[5]) > 0) == (gpus > 0)  # what is held of a GPU

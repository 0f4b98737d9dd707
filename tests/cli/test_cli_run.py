"""`hetcoll run`, `topo`, `simulate` and the command itself, as a shell sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import star
from thorough import parametrize

from hetcoll.cli import main, simulate
from hetcoll.cli.topo import text
from hetcoll.links.introduction import Process
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.plan.simulator.node import wrong
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.types import Collective


def command(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")}
    return subprocess.run(
        [sys.executable, "-m", "hetcoll", *words],
        env=env | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_the_commands_and_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"\n    {name}" in said for name in ("perf", "run", "topo", "simulate"))
    assert main([]) == 2
    assert tuple(capsys.readouterr()) == ("", said)
    import hetcoll

    assert command("--version").stdout == f"hetcoll {hetcoll.__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["launch"])


# run ----------------------------------------------------------------------------------------------------------------


def test_a_script_runs_as_ranks_with_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import sys, numpy as np, hetcoll\n"
        "with hetcoll.init() as comm:\n"
        "    x = np.full(3, comm.rank + 1.0)\n"
        "    comm.allreduce(x)\n"
        "    print(comm.rank, 'of', comm.size, x.tolist(), sys.argv[1:])\n"
    )
    done = command("run", "-n", "2", str(script), "-n", "7", "--flag")
    assert done.returncode == 0, done.stderr
    want = [f"[{r}] {r} of 2 [3.0, 3.0, 3.0] ['-n', '7', '--flag']" for r in range(2)]
    assert sorted(done.stdout.splitlines()) == want


def test_variables_are_given_to_ranks_of_this_host_too(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("import os\nprint(os.environ['MINE'], os.environ['OTHER'])\n")
    done = command("run", "-n", "2", "--no-prefix", "-x", "MINE=a=b", "-x", "OTHER", "say.py", cwd=tmp_path, OTHER="c")
    assert (done.returncode, done.stdout) == (0, "a=b c\n" * 2), done.stderr


def test_two_dashes_end_the_launchers_options(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    done = command("run", "-n", "1", "--restart", "1", "--keep-going", "--", str(script), "--", "-n", "7")
    assert (done.returncode, done.stdout) == (0, "[0] ['--', '-n', '7']\n"), done.stderr


def test_output_without_prefix_and_a_module(tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text("import os, sys\nprint(os.environ['RANK'], *sys.argv[1:])\n")
    done = command("run", "-n", "2", "--no-prefix", "-m", "who", "a", "--b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 a --b", "1 a --b"]


@parametrize("words", [["--b", "-n", "3", "--", "--torch"], ["a", "--", "-n"], ["--help"]], first=1)
def test_what_follows_a_module_is_its_own(words: list[str], tmp_path: Path) -> None:
    """As Python has it."""
    (tmp_path / "say.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    for before in ([], ["--"]):
        done = command("run", "-n", "1", "--no-prefix", *before, "-m", "say", *words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, " ".join(words) + "\n"), done.stderr


def test_the_first_failure_is_the_status_and_what_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit('rank one has had enough')\n"
        "time.sleep(600)\n"
    )  # fmt: skip
    done = command("run", "-n", "3", "--grace", "0.5", str(script))
    assert done.returncode == 1
    assert "rank 1 failed with exit code 1" in done.stderr
    assert done.stderr.rstrip().endswith("rank one has had enough")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "wanted a program or a script"),
        (["-n", "0", "x.py"], "1 or more"),
        (["-m"], "wanted a module, got nothing"),
    ],
)
def test_nothing_to_run_is_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 1
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_a_program_that_is_not_there_is_127() -> None:
    assert command("run", "/no/such/program").returncode == 127


# topo ---------------------------------------------------------------------------------------------------------------


def test_topo_shows_a_real_job() -> None:
    done = command("topo", "-n", "2", "--transport", "tcp", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["hosts"] == [[0, 1]]
    assert len({rank["pid"] for rank in document["ranks"]}) == 2
    assert document["transports"] == [["-", "tcp"], ["tcp", "-"]]


def test_topo_for_people() -> None:
    ranks = (RankInfo(0, "a", cores=2), RankInfo(1, "b", cores=8), RankInfo(2, "a", cores=2), RankInfo(3, "a", cores=2))
    processes = [Process(7, b"", rank.host) for rank in ranks]
    lines = text(Topology(ranks), processes).splitlines()
    assert lines[0] == "4 ranks on 2 hosts, transport auto"
    assert lines[1] == "host 0 (a), 2 cores: ranks 0, 2-3"
    assert lines[2] == "host 1 (b), 8 cores: ranks 1"
    assert lines[3].startswith("1.5 ranks share a core")
    assert lines[5].split() == ["0", "-", "tcp", "shm", "shm"]
    assert lines[6].split() == ["1", "tcp", "-", "tcp", "tcp"]


def test_explain_says_what_the_communicator_says() -> None:
    done = command("explain", "allreduce", "8", "64M", "-n", "2", "--transport", "tcp")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first.startswith("allreduce of 8 bytes: ")
    assert " over tcp, " in first
    assert f"allreduce of {64 << 20} bytes: " in done.stdout, second


# simulate -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "name"), [(c.label, name) for c, table in ALGORITHMS.items() for name in sorted(table)]
)
def test_every_algorithm_is_printed_and_proved(collective: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", collective, name, "-n", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"{collective} by {name}: rank ") == 4
    assert "proved for every timing" in out


def test_simulate_lists_names_and_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "allreduce"]) == 0
    assert capsys.readouterr().out.split() == sorted(ALGORITHMS[Collective.ALLREDUCE])
    assert main(["simulate", "allreduce", "ring", "-n", "3", "--avg", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["proved"], document["ranks"], document["problem"]) == (True, 3, "")
    assert document["report"]["sent"] == [4, 4, 4]  # 2 (n - 1) units a rank
    assert any("scale" in step for step in document["plans"][0]["steps"])


def test_simulate_says_what_the_checker_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = simulate.check

    def refuse(plans, **options):  # type: ignore[no-untyped-def]
        right(plans, **options)
        raise wrong(plans[1], 0, "wanted a peer")

    monkeypatch.setattr(simulate, "check", refuse)
    assert main(["simulate", "allreduce", "ring", "-n", "2"]) == 1
    assert "REFUSED: allreduce by ring, rank 1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["allreduce", "circle"], "no algorithm 'circle' for allreduce: there are"),
        (["allreduce", "--import", ""], "--import: wanted a module or a file NAME.py, got ''"),
        (["allreduce", "--import", ".star"], "--import: wanted a module or a file NAME.py, got '.star'"),
        (["allreduce", "ring", "-n", "0"], "from 1"), (["broadcast", "direct", "-n", "2", "-r", "2"], "root 2"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 1
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert len(captured.err.splitlines()) == 1


def test_algorithms_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a module's name and by a file's, in this folder or with its path; perf runs them on all ranks, and a cluster's
    are simulated."""
    (tmp_path / "mine.py").write_text(star.source())
    done = command("simulate", "allreduce", "star", "-n", "3", "--import", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "proved for every timing" in done.stdout
    (tmp_path / "cluster.toml").write_text('[[hosts]]\nname = "a"\ncount = 1\nranks = 4\nnic = "10 Gbit/s"\n')
    words = ("simulate", "cluster.toml", "allreduce", "--algo", "star", "--sizes", "8")
    words = (*words, "--import", str(tmp_path / "mine.py"))
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines() if line.split()[:1] == ["8"]] == ["star"]
    words = ("perf", "allreduce", "-n", "2", "-b", "8", "-e", "8", "--iters", "5", "--import", "mine.py")
    done = command(*words, cwd=tmp_path, HETCOLL_ALGO="allreduce:star")
    assert done.returncode == 0, done.stderr
    assert "# plan allreduce 8 B: star over shm" in done.stdout
    assert main(["simulate", "allreduce", "--import", "no_such_module"]) == 1
    assert "--import: wanted a module or a file NAME.py, got 'no_such_module'" in capsys.readouterr().err


@pytest.mark.thorough
def test_algorithms_of_a_package(tmp_path: Path) -> None:
    """By its entry point, without a word on the command line."""
    (tmp_path / "stars.py").write_text(star.source())
    about = tmp_path / "stars-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stars\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hetcoll.algorithms]\nstar = stars\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("perf", "allreduce", "-n", "2", "-b", "8", "-e", "8", "--iters", "5")
    done = command(*words, PYTHONPATH=path, HETCOLL_ALGO="allreduce:star")
    assert done.returncode == 0, done.stderr
    assert "# plan allreduce 8 B: star over shm" in done.stdout
    done = command("simulate", "allreduce", "star", "-n", "3", PYTHONPATH=path)
    assert "proved for every timing" in done.stdout
    (tmp_path / "stars.py").write_text("raise RuntimeError('broken')")
    done = command("simulate", "allreduce", "star", PYTHONPATH=path)
    assert done.returncode == 1
    wanted = "star = 'stars' (hetcoll.algorithms) of the package stars cannot be loaded: RuntimeError: broken"
    assert wanted in done.stderr


# The command line itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["perf", "doctor", "selftest", "topo", "simulate"])
def test_a_wrong_option_gets_the_usage_of_its_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    operands = {"perf": ["allreduce"], "simulate": ["allreduce"]}.get(name, [])
    with pytest.raises(SystemExit, match="2"):
        main([name, *operands, "--no-such-option"])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: hetcoll {name} ")
    assert said.endswith("error: unrecognized arguments: --no-such-option\n")


@pytest.mark.parametrize("words", ["topo -n 0", "selftest -n 0", "explain allreduce 8 -n -1", "perf allreduce -n none"])
def test_no_ranks_are_too_few(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert f"-n/--ranks: wanted a whole number from 1, got '{words.split()[-1]}'" in capsys.readouterr().err


def test_nobody_reads_to_the_end_of_simulate() -> None:
    words = [sys.executable, "-m", "hetcoll", "simulate", "allreduce", "ring", "-n", "40"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"allreduce by ring: rank 0 of 40\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141

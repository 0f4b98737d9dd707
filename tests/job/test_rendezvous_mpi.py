"""How ranks that MPIs and torchrun started find rank 0's store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from installed import find_mpi4py, find_program
from meeting import meet
from patience import DEADLINE
from ports import free_port

from hetcoll.config.env import Config, Launch
from hetcoll.errors import InitError
from hetcoll.rendezvous import bootstrap as rendezvous
from hetcoll.rendezvous.bootstrap import bootstrap

pytestmark = pytest.mark.usefixtures("clean_slate")

SCRIPT = """
import os
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.config.env import environment
from hetcoll.rendezvous.bootstrap import bootstrap

launch, config = environment().launch, environment().config
client = ControlClient(bootstrap(launch, config), launch.rank, launch.size, config.init_timeout)
ranks = client.exchange(WORLD, b"ranks", str(launch.rank).encode())
os.write(1, f"{launch.launcher} {launch.rank} sees {b' '.join(ranks).decode()}\\n".encode())  # untorn
client.close()
"""


def test_mpi_ranks_of_one_host_need_no_address() -> None:
    launches = [Launch(r, 3, r, 3, None, "openmpi", f"openmpi test-{os.getpid()}") for r in range(3)]
    assert meet(launches, [Config()] * 3) == [[b"0", b"1", b"2"]] * 3


@contextmanager
def squatter(name: str) -> Iterator[None]:
    """A process of another user that listens at an abstract name before the ranks do."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end[1])
        os.setresuid(65534, 65534, 65534)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(name)
        sock.listen()
        os.write(ready[1], b"r")
        os.read(end[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"r"
        yield
    finally:
        for fd in (*ready, *end):
            os.close(fd)
        os.waitpid(child, 0)


def test_mpi_ranks_of_one_host_go_on_after_another_user_who_took_their_name() -> None:
    job = f"openmpi squatted-{os.getpid()}"
    launches = [Launch(r, 3, r, 3, None, "openmpi", job) for r in range(3)]
    with squatter(f"\0hetcoll-{os.getuid()}-{rendezvous._key(job, 3).hex()}"):
        assert meet(launches, [Config(init_timeout=20)] * 3) == [[b"0", b"1", b"2"]] * 3


def test_mpi_ranks_of_one_host_that_have_no_rank_0() -> None:
    launch = Launch(1, 3, 1, 3, None, "openmpi", f"openmpi absent-{os.getpid()}")
    with pytest.raises(InitError, match="rank 0 did not announce its store on this host"):
        bootstrap(launch, Config(init_timeout=0.2))


def test_mpi_on_several_hosts_needs_mpi4py_or_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InitError, match="HETCOLL_MASTER=host:port"):
        bootstrap(Launch(1, 4, 1, 2, None, "hydra"), Config(init_timeout=5))
    port = free_port()
    launches = [Launch(r, 2, 0, 1, None, "hydra") for r in range(2)]
    assert meet(launches, [Config(master=("127.0.0.1", port))] * 2) == [[b"0", b"1"]] * 2


def run_ranks(command: list[str], tmp_path: Path, **variables: str) -> list[str]:
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    source = str(Path(rendezvous.__file__).parents[2])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HETCOLL_", "MASTER_"))}
    done = subprocess.run(
        [*command, str(script)],
        env=env | {"PYTHONPATH": source} | variables,
        capture_output=True,
        timeout=DEADLINE,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if " sees " in line)


def test_open_mpi_itself(tmp_path: Path) -> None:
    mpirun = find_program("mpirun", "openmpi", lambda version: "Open MPI" in version)
    command = [mpirun, "--allow-run-as-root", "-n", "3", "--map-by", ":OVERSUBSCRIBE", sys.executable]
    assert run_ranks(command, tmp_path) == [f"openmpi {rank} sees 0 1 2" for rank in range(3)]


def test_mpich_itself_also_through_a_shell(tmp_path: Path) -> None:
    mpirun = find_program("mpirun", "mpich", lambda version: "HYDRA" in version)
    expected = [f"hydra {rank} sees 0 1 2" for rank in range(3)]
    assert run_ranks([mpirun, "-n", "3", sys.executable], tmp_path) == expected
    shell = [mpirun, "-n", "3", "sh", "-c", f"{sys.executable} $0; true"]
    assert run_ranks(shell, tmp_path) == expected


def test_intel_mpi_itself(tmp_path: Path) -> None:
    mpirun = find_program("mpirun", "impi", lambda version: "Intel" in version)
    home = Path(mpirun).parents[1]
    variables = {"I_MPI_ROOT": str(home), "I_MPI_FABRICS": "shm", "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    found = run_ranks([mpirun, "-n", "3", sys.executable], tmp_path, **variables)
    assert found == [f"hydra {rank} sees 0 1 2" for rank in range(3)]


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_a_broadcast_through_mpi4py(tmp_path: Path, name: str) -> None:
    """What ranks on several hosts do: each is told that it is alone on its host."""
    mpirun = find_program("mpirun", name, lambda version: ("Open MPI" in version) == (name == "openmpi"))
    python = find_mpi4py(mpirun)
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"] if name == "openmpi" else []
    alone = "import os, sys; os.environ |= {'OMPI_COMM_WORLD_LOCAL_SIZE': '1', 'MPI_LOCALNRANKS': '1'}; "
    script = [python, "-c", alone + "exec(open(sys.argv[1]).read())"]
    launcher = "openmpi" if name == "openmpi" else "hydra"
    found = run_ranks([mpirun, *options, "-n", "3", *script], tmp_path)
    assert found == [f"{launcher} {rank} sees 0 1 2" for rank in range(3)]


def test_torchrun_itself(tmp_path: Path) -> None:
    torchrun = find_program("torchrun", "gloo")
    # It may be another Python's, which must not find this one's packages.
    launcher = ["env", "-u", "PYTHONPATH", torchrun]
    command = [*launcher, "--standalone", "--nproc-per-node", "3", "--no-python", sys.executable]
    assert run_ranks(command, tmp_path) == [f"torchrun {rank} sees 0 1 2" for rank in range(3)]

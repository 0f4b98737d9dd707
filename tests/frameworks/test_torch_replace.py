"""Programs that ask PyTorch for other backends, under ``import torch`` alone: nothing in them names hetcoll."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed import find_program, import_torch
from patience import PATIENCE
from thorough import parametrize

import hetcoll

PROGRAM = str(Path(__file__).with_name("torch_cases") / "unchanged.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One where torch finds hetcoll's entry point, also where hetcoll is run from its sources."""
    torch = import_torch()
    paths = [str(Path(hetcoll.__file__).parents[1])]
    if not importlib.metadata.entry_points(group="torch.backends", name="hetcoll"):
        info = tmp_path / f"hetcoll-{hetcoll.__version__}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hetcoll\nVersion: {hetcoll.__version__}\n")
        (info / "entry_points.txt").write_text("[torch.backends]\nhetcoll = hetcoll.torch:register\n")
        paths.append(str(tmp_path))
    paths.append(str(Path(torch.__file__).parents[1]))  # last: what it brings along must not hide ours
    ours = {k: v for k, v in os.environ.items() if not k.startswith("HETCOLL_")}
    return ours | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HETCOLL_LINGER": "0"}


def run(words: list[str], environment: dict[str, str]) -> list[str]:
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE * 250)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if " is " in line)


def test_hetcoll_run_torch(environment: dict[str, str]) -> None:
    asked = ["nccl", "gloo", "cpu:gloo,cuda:nccl", "none", "hetcoll"]
    words = [sys.executable, "-m", "hetcoll", "run", "-n", "2", "--torch", "--no-prefix", PROGRAM, *asked]
    names = [None if name == "none" else name for name in asked]
    assert run(words, environment) == sorted(f"{name} is HetcollProcessGroup" for name in names for _ in range(2))


def test_torchrun(environment: dict[str, str]) -> None:
    torchrun = find_program("torchrun", "gloo")
    words = [torchrun, "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, PROGRAM, "nccl"]
    assert run(words, environment | {"HETCOLL_REPLACE": "nccl"}) == ["nccl is HetcollProcessGroup"] * 2


def test_a_wrong_name_is_told_to_who_makes_a_group(environment: dict[str, str]) -> None:
    """Other programs import torch, too, and the environment may be somebody else's."""
    wrong = environment | {"HETCOLL_REPLACE": "mpi"}
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env=wrong, capture_output=True, text=True, timeout=PATIENCE * 250
    )
    assert (done.returncode, done.stderr) == (0, "")
    for backend in ("gloo", "hetcoll"):
        program = f"import torch.distributed as d; d.init_process_group('{backend}', init_method='tcp://127.0.0.1:0', "
        words = [sys.executable, "-c", f"{program} rank=0, world_size=1)"]
        done = subprocess.run(words, env=wrong, capture_output=True, text=True, timeout=PATIENCE * 250)
        assert done.returncode != 0
        assert "HETCOLL_REPLACE: wanted nccl, gloo or both: nccl,gloo, got 'mpi'" in done.stderr


@parametrize("how", ["leave", "destroy"], first=1)
def test_sharded_models_end_without_a_word(environment: dict[str, str], how: str) -> None:
    """torch keeps groups until the interpreter is gone; nothing of the engine's may be among what it finds then."""
    program = str(Path(PROGRAM).with_name("end.py"))
    words = [sys.executable, "-m", "hetcoll", "run", "-n", "2", "--no-prefix", program, how]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE * 250)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n" * 2, "")

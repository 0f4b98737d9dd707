"""Training under torchft goes on without a replica that died, and takes it back, with one process's losses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from gpu_places import need_gpus
from installed import torch_folder
from patience import DEADLINE
from ranks import wait_until

import hetcoll

PROGRAM = str(Path(__file__).with_name("torch_cases") / "torchft_training.py")
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=3000)
print(server.address().rsplit(":", 1)[1], flush=True)
sys.stdin.read()
server.shutdown()
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Step(NamedTuple):
    number: int
    loss: float
    rank: int
    size: int


class Replica:
    """A process that trains; what it prints is in a file."""

    def __init__(self, words: list[str], env: dict[str, str], folder: Path, name: str) -> None:
        self._said = folder / f"{name}.out"
        with self._said.open("w") as out, (folder / f"{name}.err").open("w") as err:
            self.process = subprocess.Popen([sys.executable, PROGRAM, *words], env=env, stdout=out, stderr=err)

    def lines(self) -> list[str]:
        return [line for line in self._said.read_text().splitlines(keepends=True) if line.startswith("[")]

    def steps(self) -> list[Step]:
        return [Step(*json.loads(line)) for line in self.lines() if line.endswith("]\n") and line[1] not in '"]']

    def together(self, size: int, since: int = 0) -> Callable[[], bool]:
        """Whether five steps counted with so many replicas."""
        return lambda: self._runs() and sum(step.size == size for step in self.steps()[since:]) >= 5

    def _runs(self) -> bool:
        assert self.process.poll() is None, self._said.with_suffix(".err").read_text()[-5000:]
        return True


@pytest.fixture
def environment() -> dict[str, str]:
    folder = torch_folder()
    if not (folder / "torchft").exists() and importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed; `make launchers` does it")
    paths = [str(Path(hetcoll.__file__).parents[1]), str(folder)]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HETCOLL_")}
    return ours | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HETCOLL_LINGER": "0"}


@contextmanager
def lighthouse(env: dict[str, str]) -> Iterator[str]:
    """Where replicas find each other."""
    words = [sys.executable, "-c", LIGHTHOUSE]
    with subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = next(line.strip() for line in process.stdout if line.strip().isdigit())
        yield f"http://127.0.0.1:{port}"
        process.stdin.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_replica_dies_and_comes_back(environment: dict[str, str], tmp_path: Path, device: str) -> None:
    """On GPUs, of which several replicas may share one."""
    gpus = need_gpus(1) if device == "cuda" else 0
    stop = tmp_path / "stop"
    with ExitStack() as stack:
        where = stack.enter_context(lighthouse(environment))

        def start(name: str) -> Replica:
            place = f"cuda:{'abcd'.index(name) % gpus}" if gpus else "cpu"
            replica = Replica([where, name, str(stop), place], environment, tmp_path, name)
            stack.callback(replica.process.wait)
            stack.callback(replica.process.kill)
            return replica

        replicas = [start(name) for name in ("a", "b", "c")]
        for each in replicas:
            wait_until(each.together(3), DEADLINE)
        first = next(each for each in replicas if each.steps()[-1].rank == 0)  # its process hosts the store
        first.process.kill()
        left = [each for each in replicas if each is not first]
        for each in left:
            wait_until(each.together(2, len(each.steps())), DEADLINE)
        new = start("d")
        for each in (*left, new):
            wait_until(each.together(3, len(each.steps())), DEADLINE)
        stop.touch()
        for each in (*left, new):
            assert each.process.wait(DEADLINE) == 0
            assert json.loads(each.lines()[-1]) == [], "the group has left threads behind"

        counted = {step.number: step.loss for each in (*replicas, new) for step in each.steps()}
        last = max(counted)
        told = subprocess.run(
            [sys.executable, PROGRAM, str(last + 1)], env=environment, capture_output=True, text=True, timeout=DEADLINE
        )
        alone = json.loads(told.stdout)
        assert sorted(counted) == list(range(last + 1)), "each step counted"
        for each in (*replicas, new):
            for step in each.steps():
                assert step.loss == pytest.approx(alone[step.number], rel=1e-4), step

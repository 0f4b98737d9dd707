"""Other libraries, from where `make launchers` (or `make bench`) installs them: an environment for each."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import DEADLINE

PEERS = Path(os.environ.get("PEERS_CACHE", Path.home() / ".cache/hetcoll-bench"))


def find_program(program: str, environment: str, accept: Callable[[str], bool] = lambda _: True) -> str:
    """A launcher of another library; skips the test where it is not installed."""
    for path in (PEERS / environment / "bin" / program, Path(shutil.which(program) or "/nonexistent")):
        if path.exists():
            env = os.environ | {"PATH": f"{path.parent}:{os.environ['PATH']}"}
            version = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=DEADLINE, env=env
            ).stdout
            if accept(version):
                return str(path)
    pytest.skip(f"{program} of {environment} is not installed; `make launchers` does it")


def find_mpi4py(launcher: str) -> str:
    """The Python beside this launcher, which has mpi4py and loads what is installed for this one; skips the test where
    there is none."""
    python, wanted = str(Path(launcher).parent / "python"), sys.version_info[:2]
    script = f"import mpi4py, sys; sys.exit(sys.version_info[:2] != {wanted})"
    if subprocess.run([python, "-c", script], capture_output=True, timeout=DEADLINE).returncode:
        pytest.skip(f"{python} has no mpi4py, or is not Python {'.'.join(map(str, wanted))}")
    return python


def torch_folder() -> Path:
    """Where PyTorch is installed, here or in its environment; skips the test where it is in neither."""
    if (found := importlib.util.find_spec("torch")) is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = PEERS / "gloo/lib" / version / "site-packages"
    if not (folder / "torch").exists():
        pytest.skip("PyTorch is not installed; `make launchers` does it")
    return folder


def import_torch() -> Any:
    """PyTorch, here or in its environment; skips the test where it is in neither."""
    if (folder := str(torch_folder())) not in sys.path:
        sys.path.append(folder)
    import torch

    return torch


def need_jax() -> None:
    """Skips the test where JAX is not installed. It is not imported here: it warns of every fork from then on."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed; `make jax` does it")


def need_ray() -> None:
    """Skips the test where Ray is not installed, as in CI."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")


def why_no_jax_gpus() -> str:
    """What is missing for two GPUs in JAX, or nothing."""
    from hetcoll.vendors.devices import cuda

    if (why := cuda.why_not()) is not None:
        return str(why)
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "JAX has no CUDA 13 plugin"
    found = len(cuda.devices())
    return "" if found > 1 else f"two GPUs are wanted, {found} found"

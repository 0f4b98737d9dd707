"""The batch script for Slurm, with a stand-in for srun: it sets the variables that srun sets, and runs the tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import DEADLINE

import hetcoll

ROOT = Path(__file__).parents[2]
SRUN = """#!{python}
import os, subprocess, sys
step = {{"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
         "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}}
assert os.environ["HETCOLL_SECRET"]
tasks = [subprocess.Popen(sys.argv[1:], env=os.environ | step | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
         for i in range(4)]
sys.exit(max(task.wait() for task in tasks))
"""


def test_the_batch_script_runs_its_ranks(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    gone = ("HETCOLL_", "SLURM_", "PMI", "OMPI_", "PYTHONUNBUFFERED")  # the last one tears lines of several ranks
    env = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    env |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{env['PATH']}"}
    env |= {"PYTHONPATH": str(Path(hetcoll.__file__).parents[1])}
    script = ROOT / "docs/examples/five_lines.sbatch"
    done = subprocess.run(["bash", str(script)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4: [10. 10. 10. 10.]" for rank in range(4)]

"""`hetcoll deploy`: manifests that the engines' published schemas accept, whose pods know their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import DEADLINE
from thorough import parametrize

from hetcoll.cli import main

yaml = pytest.importorskip("yaml")
SCHEMAS = Path(__file__).parents[3] / "shared" / "schemas"
WORDS = ["--nvidia", "2x8", "--amd", "1x4", "--image-nvidia", "a/nv:1", "--image-amd", "a/amd:1"]
FILES = {"volcano": "volcano-job.crd.yaml", "jobset": "jobset.crd.yaml"}


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["deploy", "kubernetes", *words]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def pods(document: Any) -> list[tuple[str, int, Any]]:
    """Name, number and container of each group."""
    spec = document["spec"]
    if "tasks" in spec:
        found = [(task["name"], task["replicas"], task["template"]) for task in spec["tasks"]]
    else:
        jobs = [(job["name"], job["template"]["spec"]) for job in spec["replicatedJobs"]]
        found = [(name, job["completions"], job["template"]) for name, job in jobs]
    return [(name, count, template["spec"]["containers"][0]) for name, count, template in found]


@pytest.mark.parametrize("engine", FILES)
def test_the_published_schema_accepts_it(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    file = SCHEMAS / FILES[engine]
    if not file.exists():
        pytest.skip("the engines' schemas are not beside the repository")
    document = manifest(capsys, "--name", "train", "--engine", engine, *WORDS, "--secret", "s", "--rdma", "rdma/hca=1",
                        "--restarts", "2", "--", "python", "train.py")  # fmt: skip
    group, _, version = document["apiVersion"].partition("/")
    definition = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]
    assert (definition["group"], definition["names"]["kind"]) == (group, document["kind"])
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in definition["versions"] if v["name"] == version]
    jsonschema.validate(document, strict(schema))


def strict(schema: Any) -> Any:
    """The schema, which refuses what it does not name, as Kubernetes does with strict validation."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    if "x-kubernetes-int-or-string" in schema:
        made.pop("type", None)
    return made


@parametrize(("engine", "variable"), [("volcano", "VC_TASK_INDEX"), ("jobset", "JOB_COMPLETION_INDEX")], first=1)
def test_every_pod_starts_its_ranks(engine: str, variable: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The pods' own command lines run here, with an environment as the engine makes it."""
    document = manifest(
        capsys, "--name", "train", "--engine", engine, *WORDS, "--", "sh", "-c", 'echo "$RANK" of $WORLD_SIZE'
    )
    master = {"volcano": "train-nvidia-0.train", "jobset": "train-nvidia-0-0.train"}[engine]
    ranks = []
    env = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for name, count, container in pods(document):
        resource, device, amount = {"nvidia": ("nvidia.com/gpu", "cuda", 8), "amd": ("amd.com/gpu", "hip", 4)}[name]
        assert container["resources"]["limits"] == {resource: amount}
        assert {"name": "HETCOLL_DEVICE", "value": device} in container["env"]
        for index in range(count):
            words = container["command"]
            assert f"--master {master}:29500" in words[2]
            done = subprocess.run(words, env=env | {variable: str(index)}, capture_output=True, text=True,
                                  timeout=DEADLINE)  # fmt: skip
            assert done.returncode == 0, done.stderr
            ranks += [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert sorted(ranks) == sorted(f"{rank} of 20" for rank in range(20))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "wanted one of --nvidia, --amd, --cpu, such as --nvidia 2x8"),
        (["--cpu", "2"], "--cpu: wanted pods and ranks of each, such as 2x8, got '2'"),
        (["--cpu", "2x2"], "--image-cpu: wanted the image of the cpu pods, got nothing"),
        (["--name", "Train", "--cpu", "2x2", "--image-cpu", "a"], "--name: wanted at most 40 of a-z"),
        (["--cpu", "2x2", "--image-cpu", "a", "--rdma", "hca"], "--rdma: wanted a resource and how many"),
        (["--cpu", "2x2", "--image-cpu", "a", "--rdma", "hca=²"], "--rdma: wanted a resource and how many"),
        (["--cpu", "2x2", "--image-cpu", "a", "--restarts", "-1"], "--restarts: wanted 0 or more, got -1"),
    ],
)
def test_deploys_mistakes_are_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "kubernetes", *words, "--", "train.py"]) == 1
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1
    assert main(["deploy", "kubernetes", "--cpu", "1x1", "--image-cpu", "a"]) == 1
    assert "command: wanted a program" in capsys.readouterr().err

"""`hetcoll deploy`: the manifest of a job on a cluster, for engines that others keep."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import ArgumentError

_PORT = 29500
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # a DNS label, with room for what the engines append
_KINDS = {  # what the pods ask for, and HETCOLL_DEVICE of their ranks
    "nvidia": ("nvidia.com/gpu", "cuda"),
    "amd": ("amd.com/gpu", "hip"),
    "cpu": ("cpu", "cpu"),
}


@dataclass(frozen=True)
class Group:
    """Pods that are alike: `pods` of them with `ranks` each, one a GPU or processor. `first`: the node of the first."""

    kind: str
    pods: int
    ranks: int
    image: str
    first: int


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The kind of cluster; the pods, and what runs in them."""
    platforms = command.add_subparsers(dest="platform", required=True, metavar="PLATFORM")
    parser = platforms.add_parser("kubernetes", help="by Volcano or JobSet", description="The manifest of a job.")
    parser.set_defaults(refuse=parser.error)
    parser.usage = "hetcoll deploy kubernetes [OPTION ...] -- PROGRAM [ARGUMENT ...]"
    parser.epilog = (
        "The manifest goes to stdout: ... | kubectl apply -f -. The pods find the job's secret in the Secret that "
        "--secret names; kubectl create secret generic NAME --from-literal=secret=$(openssl rand -hex 32) makes one."
    )
    parser.add_argument("--name", default="hetcoll", help="of the job (default hetcoll)")
    parser.add_argument("--engine", choices=sorted(_ENGINES), default="volcano", help="default volcano")
    for kind, (resource, _) in _KINDS.items():
        parser.add_argument(f"--{kind}", metavar="PODSxRANKS", help=f"pods with a rank for each {resource}: 2x8")
    for kind in _KINDS:
        parser.add_argument(f"--image-{kind}", metavar="IMAGE", help=f"the container image of the {kind} pods")
    parser.add_argument("--secret", metavar="NAME", help="the Secret whose key `secret` is the job's")
    parser.add_argument("--rdma", metavar="RESOURCE=N", help="RDMA devices of each pod: rdma/hca=1")
    parser.add_argument("--shm", default="16Gi", metavar="SIZE", help="of /dev/shm in each pod (default 16Gi)")
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="of the whole job (default 0)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program of all ranks")


def main(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    """Print the manifest."""
    try:
        import yaml
    except ImportError:
        raise ArgumentError("deploy: wanted PyYAML: pip install 'hetcoll[kubernetes]'") from None
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ArgumentError("command: wanted a program or a script, got nothing")
    if not _NAME.fullmatch(args.name):
        raise ArgumentError(f"--name: wanted at most 40 of a-z, 0-9 and -, from a letter on, got {args.name!r}")
    if args.restarts < 0:
        raise ArgumentError(f"--restarts: wanted 0 or more, got {args.restarts}")
    groups = _groups(args)
    document = _ENGINES[args.engine](args.name, groups, _pods(args, groups, command), args.restarts)
    print(yaml.safe_dump(document, sort_keys=False, width=120), end="")
    return 0


def _groups(args: argparse.Namespace) -> list[Group]:
    groups: list[Group] = []
    for kind in _KINDS:
        text, image = getattr(args, kind), getattr(args, f"image_{kind}")
        if text is None:
            continue
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not found:
            raise ArgumentError(f"--{kind}: wanted pods and ranks of each, such as 2x8, got {text!r}")
        if not image:
            raise ArgumentError(f"--image-{kind}: wanted the image of the {kind} pods, got nothing")
        groups.append(Group(kind, int(found[1]), int(found[2]), image, sum(group.pods for group in groups)))
    if not groups:
        raise ArgumentError(f"wanted one of {', '.join(f'--{kind}' for kind in _KINDS)}, such as --nvidia 2x8")
    return groups


def _pods(args: argparse.Namespace, groups: Sequence[Group], command: Sequence[str]) -> list[dict[str, Any]]:
    """The pod template of each group."""
    index, master = _PLACES[args.engine]
    address = master.format(name=args.name, group=groups[0].kind)
    counts = ",".join(str(group.ranks) for group in groups for _ in range(group.pods))
    if counts.count(",") and len(set(counts.split(","))) == 1:
        nodes = f"-n {groups[0].ranks} --nnodes {counts.count(',') + 1}"
    else:
        nodes = f"-n {counts}"
    return [_pod(args, group, f"{nodes} --node-rank $(({group.first} + {index})) --master {address}:{_PORT}", command)
            for group in groups]  # fmt: skip


def _pod(args: argparse.Namespace, group: Group, place: str, command: Sequence[str]) -> dict[str, Any]:
    resource, device = _KINDS[group.kind]
    limits: dict[str, Any] = {resource: group.ranks}
    environment = [{"name": "HETCOLL_DEVICE", "value": device}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": args.shm}}]
    container: dict[str, Any] = {"name": "ranks", "image": group.image}
    if args.secret:
        environment.append({"name": "HETCOLL_SECRET_FILE", "value": "/run/hetcoll/secret"})
        mounts.append({"name": "secret", "mountPath": "/run/hetcoll"})
        volumes.append({"name": "secret", "secret": {"secretName": args.secret, "defaultMode": 0o400}})
    if args.rdma:
        name, _, count = args.rdma.rpartition("=")
        if not name or not count.isdecimal():
            raise ArgumentError(f"--rdma: wanted a resource and how many, such as rdma/hca=1, got {args.rdma!r}")
        limits[name] = int(count)
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # registered memory is locked
    line = f"exec hetcoll run {place} -- {shlex.join(command)}"
    container |= {
        "command": ["sh", "-c", line],
        "env": environment,
        "resources": {"limits": limits},
        "ports": [{"name": "store", "containerPort": _PORT}],
        "volumeMounts": mounts,
    }
    return {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes}}


def _volcano(name: str, groups: Sequence[Group], pods: Sequence[dict[str, Any]], restarts: int) -> Mapping[str, Any]:
    """A Job of Volcano, batch.volcano.sh/v1alpha1: all pods or none. Its plugin svc makes the pods' host names, and env
    their VC_TASK_INDEX."""
    restart = [{"event": "PodFailed", "action": "RestartJob"}, {"event": "PodEvicted", "action": "RestartJob"}]
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": sum(group.pods for group in groups),
            "maxRetry": restarts,
            "plugins": {"svc": [], "env": []},
            "policies": restart if restarts else [{"event": "PodFailed", "action": "AbortJob"}],
            "tasks": [
                {"name": group.kind, "replicas": group.pods, "template": pod}
                for group, pod in zip(groups, pods, strict=True)
            ],
        },
    }


def _jobset(name: str, groups: Sequence[Group], pods: Sequence[dict[str, Any]], restarts: int) -> Mapping[str, Any]:
    """A JobSet, jobset.x-k8s.io/v1alpha2, of indexed Jobs: their pods have host names and JOB_COMPLETION_INDEX."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": restarts},
            "replicatedJobs": [
                {
                    "name": group.kind,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "completionMode": "Indexed",
                            "parallelism": group.pods,
                            "completions": group.pods,
                            "backoffLimit": 0,
                            "template": pod,
                        }
                    },
                }
                for group, pod in zip(groups, pods, strict=True)
            ],
        },
    }


_ENGINES = {"volcano": _volcano, "jobset": _jobset}
_PLACES = {  # the variable with a pod's number in its group, and the host name of a group's first pod
    "volcano": ("VC_TASK_INDEX", "{name}-{group}-0.{name}"),
    "jobset": ("JOB_COMPLETION_INDEX", "{name}-{group}-0-0.{name}"),
}

"""The one place that reads the environment, once, into frozen dataclasses.

`Config` is what a user sets (``HETCOLL_*``), `Launch` is what a launcher says about this process. Both come from pure
functions of a mapping; `environment()` applies them to ``os.environ`` and remembers the answer.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from ..errors import ArgumentError
from ..types import Format
from .launchers import Launch, read_launch
from .variables import (
    DeviceChoice,
    DeviceFilter,
    Environ,
    InterfaceFilter,
    auto,
    choice,
    choices,
    endpoint,
    flag,
    islands,
    nbytes,
    read,
    seconds,
    span,
    whole,
)

__all__ = [
    "Config",
    "DeviceChoice",
    "DeviceFilter",
    "Environment",
    "InterfaceFilter",
    "Launch",
    "environment",
    "read_config",
    "read_launch",
]

log = logging.getLogger("hetcoll")

Transport = Literal["auto", "shm", "tcp", "verbs"]
Cross = Literal["auto", "direct", "mapped", "staged"]
Check = Literal["0", "sampled", "1"]
Debug = Literal["none", "warn", "info", "debug", "trace"]
FORMATS = tuple(found.label for found in Format)
REPLACEABLE = ("nccl", "gloo")  # backends of torch.distributed
DEVICES = "auto, cpu, cuda, hip, or a GPU such as cuda:1"
SHM_STORES = ("auto", "cached", "streaming", "claimed")  # in the order of native/transport/shm/shm.h
SHM_READ = ("auto", "always", "never")  # the same
INTEGRITY = ("off", "sampled", "all")  # in the order of native/transport/integrity.h


@dataclass(frozen=True, slots=True)
class Config:
    """What the user chose. `None` means that the library chooses.

    Times are seconds, sizes bytes. `socket_stripes` is the number of sockets of one TCP edge. `secret` authenticates
    every connection of the job. `linger` is how long the process with the job's store outlives its own work for others.
    `fault` configures the fault-injecting transport of the tests. `master` is where
    rank 0 listens for the others, when the launcher cannot say it. `cache` is the directory of compiled GPU kernels,
    None: they are not kept. `ib_timeout` is InfiniBand's code for an acknowledgement's time,
    4.096 us << code; 16 are 0.27 s. `islands` are the ranks of each island. `device` is what this rank's buffers are
    on, None: what its first call's are. `cross` is the way between GPUs that no library joins. `compress` is how sums
    travel over slow edges, `compress_feedback` how much memory the residuals may take, 0: there is no error feedback.
    `reproducible`: every reduction is in the order of ranks. ArgumentError where it is compressed as well.
    `warn_after` is how long a call waits before a warning says for whom, 0: there is none. `sigusr2`: that signal
    prints the last calls. `pinned_bytes` is what all ranks of a host may pin for GPUs.
    `objects`: whether calls may move pickled objects, None: in jobs that have a secret.
    `nvtx`: calls are ranges in a profiler's timeline. `tuned` is the file with times by which algorithms are chosen,
    None: the one that `hetcoll tune` kept for such hosts, if it did. `tls`: what goes over TCP is encrypted.
    """

    debug: Debug = "warn"
    algo: str | None = None
    transport: Transport = "auto"
    socket_ifname: InterfaceFilter = field(default_factory=InterfaceFilter)
    socket_stripes: int | None = None
    timeout: float = 300.0
    init_timeout: float = 120.0
    linger: float = 10.0
    secret: bytes | None = field(default=None, repr=False)
    islands: tuple[tuple[int, ...], ...] | None = None
    device: DeviceChoice | None = None
    cross: Cross = "auto"
    compress: Format = Format.NONE
    compress_feedback: int = 4 << 30
    reproducible: bool = False
    fault: str | None = None
    shm_bytes: int | None = None
    shm_stores: str = "auto"
    shm_read: str = "auto"
    host_id: str | None = None
    isa: str | None = None
    check: Check = "sampled"
    digest: str | None = None
    integrity: str = "sampled"
    tls: bool = False
    spin_us: int | None = None
    master: tuple[str, int] | None = None
    cache: str | None = None
    ib_hca: DeviceFilter | None = None
    ib_gid_index: int | None = None
    ib_timeout: int = 16
    ib_retry_cnt: int = 7
    ib_sl: int = 0
    ib_tc: int = 0
    ib_bytes: int | None = None
    pinned_bytes: int = 1 << 30
    warn_after: float = 10.0
    sigusr2: bool = False
    objects: bool | None = None
    nvtx: bool = False
    tuned: str | None = None

    def __post_init__(self) -> None:
        if self.reproducible and self.compress is not Format.NONE:
            raise ArgumentError(
                "reproducible: wanted compress=none with it, since which edges are slow must not change bits, got"
                f" compress={self.compress.label}"
            )


def read_config(environ: Environ) -> Config:
    """`environ`'s ``HETCOLL_*`` variables. A value that cannot be read is an ArgumentError that names it."""

    def word(name: str, wanted: str) -> str | None:
        return read(environ, name, wanted, auto(str), None)

    debug = choice("none", "warn", "info", "debug", "trace")
    names = "interface names such as eth,ib or ^docker or =eth0"
    return Config(
        debug=cast(Debug, read(environ, "HETCOLL_DEBUG", "none, warn, info, debug or trace", debug, "warn")),
        algo=word("HETCOLL_ALGO", "an algorithm's name"),
        transport=cast(
            Transport,
            read(
                environ, "HETCOLL_TRANSPORT", "auto, shm, tcp or verbs", choice("auto", "shm", "tcp", "verbs"), "auto"
            ),
        ),
        socket_ifname=read(environ, "HETCOLL_SOCKET_IFNAME", names, InterfaceFilter.parse, InterfaceFilter()),
        socket_stripes=read(environ, "HETCOLL_SOCKET_STRIPES", "auto or 1 to 64", auto(whole(1, 64)), None),
        timeout=read(environ, "HETCOLL_TIMEOUT", "seconds above 0", seconds, 300.0),
        init_timeout=read(environ, "HETCOLL_INIT_TIMEOUT", "seconds above 0", seconds, 120.0),
        linger=read(environ, "HETCOLL_LINGER", "seconds, 0 or more", span, 10.0),
        secret=_secret(environ),
        islands=read(environ, "HETCOLL_ISLANDS", "auto or ranks such as 0,1|2,3 or 0-3|4-7", auto(islands), None),
        device=read(environ, "HETCOLL_DEVICE", DEVICES, auto(DeviceChoice.parse), None),
        cross=cast(
            Cross,
            read(
                environ,
                "HETCOLL_CROSS",
                "auto, direct, mapped or staged",
                choice("auto", "direct", "mapped", "staged"),
                "auto",
            ),
        ),
        compress=Format[
            read(
                environ, "HETCOLL_COMPRESS", ", ".join(FORMATS[:-1]) + f" or {FORMATS[-1]}", choice(*FORMATS), "none"
            ).upper()
        ],
        compress_feedback=read(environ, "HETCOLL_COMPRESS_FEEDBACK", "bytes such as 4G, or 0", _feedback, 4 << 30),
        reproducible=read(environ, "HETCOLL_REPRODUCIBLE", "0 or 1", flag, False),
        fault=word("HETCOLL_FAULT", "a fault to inject"),
        shm_bytes=read(environ, "HETCOLL_SHM_BYTES", "bytes such as 4194304 or 4M", auto(nbytes), None),
        shm_stores=read(
            environ, "HETCOLL_SHM_STORES", "auto, cached, streaming or claimed", choice(*SHM_STORES), "auto"
        ),
        shm_read=read(environ, "HETCOLL_SHM_READ", "auto, always or never", choice(*SHM_READ), "auto"),
        host_id=word("HETCOLL_HOST_ID", "a host's name"),
        isa=word("HETCOLL_ISA", "an instruction set"),
        check=read(environ, "HETCOLL_CHECK", "0, sampled or 1", _check, "sampled"),
        digest=word("HETCOLL_DIGEST", "a directory"),
        integrity=read(environ, "HETCOLL_INTEGRITY", "off, sampled or all", choice(*INTEGRITY), "sampled"),
        tls=_tls(environ),
        spin_us=read(environ, "HETCOLL_SPIN_US", "whole microseconds, 0 or more", auto(whole(0, 10**9)), None),
        master=read(environ, "HETCOLL_MASTER", "host:port", endpoint, None),
        cache=_cache(environ),
        ib_hca=read(environ, "HETCOLL_IB_HCA", "devices such as mlx5_0:1,mlx5_2 or ^mlx5_3", DeviceFilter.parse, None),
        ib_gid_index=read(environ, "HETCOLL_IB_GID_INDEX", "auto, -1 for the same, or 0 to 255", _gid_index, None),
        ib_timeout=read(environ, "HETCOLL_IB_TIMEOUT", "1 to 31", whole(1, 31), 16),
        ib_retry_cnt=read(environ, "HETCOLL_IB_RETRY_CNT", "0 to 7", whole(0, 7), 7),
        ib_sl=read(environ, "HETCOLL_IB_SL", "0 to 15", whole(0, 15), 0),
        ib_tc=read(environ, "HETCOLL_IB_TC", "0 to 255", whole(0, 255), 0),
        ib_bytes=read(environ, "HETCOLL_IB_BYTES", "bytes such as 1048576 or 1M", auto(nbytes), None),
        pinned_bytes=read(environ, "HETCOLL_PINNED_BYTES", "bytes such as 1073741824 or 1G", nbytes, 1 << 30),
        warn_after=read(environ, "HETCOLL_WARN_AFTER", "seconds, 0 for never", span, 10.0),
        sigusr2=read(environ, "HETCOLL_SIGUSR2", "0 or 1", flag, False),
        objects=read(environ, "HETCOLL_OBJECTS", "auto, 0 or 1", auto(flag), None),
        nvtx=_nvtx(environ),
        tuned=word("HETCOLL_TUNED", "a file, or none"),
    )


def _check(text: str) -> Check:
    if text.lower() == "sampled":
        return "sampled"
    return "1" if flag(text) else "0"


def _nvtx(environ: Environ) -> bool:
    found = read(environ, "HETCOLL_NVTX", "auto, 0 or 1", auto(flag), None)
    return "NVTX_INJECTION64_PATH" in environ if found is None else found  # a profiler of NVIDIA's sets it


def _tls(environ: Environ) -> bool:
    asked = read(environ, "HETCOLL_TLS", "0 or 1", flag, False)
    if asked and environ.get("HETCOLL_TRANSPORT", "").strip().lower() == "verbs":
        raise ArgumentError("HETCOLL_TLS: wanted another HETCOLL_TRANSPORT than verbs: RDMA is not encrypted")
    return asked


def _feedback(text: str) -> int:
    return 0 if text == "0" else nbytes(text)


def _gid_index(text: str) -> int | None:
    return None if text == "-1" else auto(whole(0, 255))(text)


def _secret(environ: Environ) -> bytes | None:
    text, path = environ.get("HETCOLL_SECRET", "").strip(), environ.get("HETCOLL_SECRET_FILE", "").strip()
    if text and path:
        raise ArgumentError("HETCOLL_SECRET, HETCOLL_SECRET_FILE: wanted one of them, got both")
    if not path:
        return os.fsencode(text) or None  # the bytes that were set, whatever the locale of this rank
    try:
        with open(path, "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise ArgumentError(f"HETCOLL_SECRET_FILE: wanted a readable file, got {path!r}: {error.strerror}") from error
    if mode & 0o007:
        raise ArgumentError(
            f"HETCOLL_SECRET_FILE: wanted a file that only you can read, got {path!r} with mode {mode & 0o777:o}: "
            f"chmod 600 {path}, and make a new secret if others may have read it"
        )
    if not secret:
        raise ArgumentError(f"HETCOLL_SECRET_FILE: wanted a file that holds the secret, got {path!r}, which is empty")
    return secret


def _cache(environ: Environ) -> str | None:
    """Where compiled kernels and measured times are kept: XDG's place, unless HETCOLL_CACHE names another or none."""
    text = environ.get("HETCOLL_CACHE", "").strip()
    if text:
        return None if text.lower() == "none" else os.path.abspath(text)
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if base.startswith("/"):  # the specification: a relative path is to be ignored
        return os.path.join(base, "hetcoll")
    return os.path.join(home, ".cache", "hetcoll") if home else None


_NAMES = """
    DEBUG ALGO TRANSPORT SOCKET_IFNAME SOCKET_STRIPES TIMEOUT INIT_TIMEOUT LINGER SECRET SECRET_FILE ISLANDS DEVICE
    CROSS COMPRESS COMPRESS_FEEDBACK REPRODUCIBLE FAULT SHM_BYTES SHM_STORES SHM_READ HOST_ID ISA CHECK DIGEST INTEGRITY
    SPIN_US MASTER JOB JOIN RUN REPLACE CACHE IB_HCA IB_GID_INDEX IB_TIMEOUT IB_RETRY_CNT IB_SL IB_TC IB_BYTES
    PINNED_BYTES WARN_AFTER SIGUSR2 OBJECTS NVTX TUNED TLS
"""
_VARIABLES = frozenset(f"HETCOLL_{name}" for name in _NAMES.split())


def unknown_variables(environ: Environ) -> list[str]:
    """What to say about each ``HETCOLL_*`` variable that nothing reads: most often a misspelt name."""
    messages = []
    for name in sorted(set(environ) - _VARIABLES):
        if name.startswith("HETCOLL_"):
            import difflib  # imports count, and most environments are in order

            near = difflib.get_close_matches(name, sorted(_VARIABLES), 1)
            messages.append(f"{name} is not a variable of hetcoll" + (f"; is it {near[0]}?" if near else ""))
    return messages


class Environment(NamedTuple):
    """Both halves of what the environment says."""

    config: Config
    launch: Launch


@functools.cache
def environment() -> Environment:
    """This process's environment, read at the first call; later changes of ``os.environ`` are not seen."""
    return Environment(configuration(), read_launch(os.environ))


@functools.cache
def configuration() -> Config:
    """Its first half, for processes that are told by other means than a launcher's variables who they are."""
    for message in unknown_variables(os.environ):
        log.warning("%s", message)
    return read_config(os.environ)


def replaced_backends() -> tuple[str, ...]:
    """HETCOLL_REPLACE: the backends of torch.distributed whose place this library takes.

    Read by itself: ``import torch`` asks for it, and programs set other variables after that.
    """
    return read(os.environ, "HETCOLL_REPLACE", "nccl, gloo or both: nccl,gloo", choices(*REPLACEABLE), ())


_SHOWN = ("HETCOLL_", "CUDA_", "HIP_", "ROCR_", "GPU_", "HSA_", "NCCL_", "RCCL_")
_HIDDEN = ("HETCOLL_SECRET", "HETCOLL_SECRET_FILE", "HETCOLL_JOB", "HETCOLL_RUN", "HETCOLL_MASTER")


def shown_variables() -> list[tuple[str, str]]:
    """What of the environment may have to do with how collectives run, and is no secret: for reports."""
    return [(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(_SHOWN) and name not in _HIDDEN]


def forwarded_variables(words: Sequence[str]) -> dict[str, str]:
    """What ranks on other hosts are to have of our environment: all of hetcoll's, and ``NAME`` or ``NAME=VALUE``."""
    found = {name: value for name, value in os.environ.items() if name.startswith("HETCOLL_")}
    for word in words:
        name, given, value = word.partition("=")
        if not name or not (given or name in os.environ):
            raise ArgumentError(f"-x: wanted NAME=VALUE, or the name of a variable that is set here, got {word!r}")
        found[name] = value if given else os.environ[name]
    return found


def child_environment(changes: Environ) -> dict[str, str]:
    """The environment for a process that we start: ours with `changes`."""
    return {**os.environ, **changes}

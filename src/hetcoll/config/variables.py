"""How the text of an environment variable becomes a value. Pure functions; `env.py` is what reads the environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..errors import ArgumentError
from ..types import LONGEST, Format

Environ = Mapping[str, str]
T = TypeVar("T")

_MOST_BYTES = 1 << 47  # of an address space
_MOST_RANK = 1 << 20
_SUFFIX = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read(environ: Environ, name: str, wanted: str, parse: Callable[[str], T], default: T) -> T:
    """The variable `name` of `environ`, parsed; `default` when it is unset or blank.

    `parse` raises ValueError or KeyError for what it cannot read, which becomes an ArgumentError that says what was
    `wanted` and what came.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except (ValueError, KeyError) as error:
        raise ArgumentError(f"{name}: wanted {wanted}, got {text!r}") from error


def auto(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """The parser that also takes ``auto``, which is `None`: the library chooses."""
    return lambda text: None if text.lower() == "auto" else parse(text)


def whole(low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        value = int(text, 10)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def choice(*choices: str) -> Callable[[str], str]:
    """A parser of one word out of `choices`, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    return parse


def choices(*words: str) -> Callable[[str], tuple[str, ...]]:
    """A parser of some of `words`, in any case, with commas between them."""
    one = choice(*words)
    return lambda text: tuple(one(word.strip()) for word in text.split(","))


def seconds(text: str) -> float:
    """A finite time above 0, of at most LONGEST."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return min(value, LONGEST)


def span(text: str) -> float:
    """A finite time of 0 or more, of at most LONGEST."""
    value = float(text)
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(text)
    return min(value, LONGEST)


def nbytes(text: str) -> int:
    """A size above 0 that an address space has room for: ``4194304``, ``4096K``, ``4M``, ``4MiB``."""
    digits = text.upper().removesuffix("B").removesuffix("I")
    suffix = digits[-1:] if digits[-1:].isalpha() else ""
    value = int(digits.removesuffix(suffix), 10) * _SUFFIX[suffix]
    if not 0 < value < _MOST_BYTES:
        raise ValueError(text)
    return value


def flag(text: str) -> bool:
    """0 or 1, and the usual words for them."""
    return _FLAGS[text.lower()]


def endpoint(text: str) -> tuple[str, int]:
    """``host:port`` or ``[IPv6 address]:port``."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(text)
    if not host:
        raise ValueError(text)
    return host, whole(1, 65535)(port)


def islands(text: str) -> tuple[tuple[int, ...], ...]:
    """Ranks of each island, islands apart by ``|``: ``0,1|2,3`` or ``0-3|4-7``.

    Examples
    --------
    >>> islands("0-2,5|3,4")
    ((0, 1, 2, 5), (3, 4))
    """
    return tuple(tuple(rank for word in part.split(",") for rank in _ranks(word)) for part in text.split("|"))


def _ranks(word: str) -> range:
    low, dash, high = word.strip().partition("-")
    rank = whole(0, _MOST_RANK)
    found = range(rank(low), rank(high if dash else low) + 1)
    if not found:
        raise ValueError(word)
    return found


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What a rank's buffers are on: `kind` is cpu, cuda or hip, `index` which GPU that the process sees, None: any.

    Examples
    --------
    >>> DeviceChoice.parse("rocm:1")
    DeviceChoice(kind='hip', index=1)
    """

    kind: str
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        word, colon, index = text.lower().partition(":")
        kind = choice("cpu", "cuda", "hip")("hip" if word == "rocm" else word)
        if kind == "cpu" and colon:
            raise ValueError(text)
        return cls(kind, whole(0, 1 << 16)(index) if colon else None)

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class InterfaceFilter:
    """Which network interfaces to use, in NCCL's syntax: a list of prefixes; ``^`` leaves out, ``=`` means whole names.

    Examples
    --------
    >>> InterfaceFilter.parse("^docker,lo").allows("docker0")
    False
    >>> InterfaceFilter.parse("=eth0").allows("eth01")
    False
    """

    names: tuple[str, ...] = ()
    exclude: bool = False
    exact: bool = False

    @classmethod
    def parse(cls, text: str) -> InterfaceFilter:
        names, exclude, exact = _names(text)
        return cls(names, exclude, exact)

    def allows(self, name: str) -> bool:
        """Whether the interface `name` may be used. The empty filter allows all."""
        if not self.names:
            return True
        found = name in self.names if self.exact else name.startswith(self.names)
        return found != self.exclude

    def __str__(self) -> str:
        return ("^" if self.exclude else "") + ("=" if self.exact else "") + ",".join(self.names)


@dataclass(frozen=True, slots=True)
class DeviceFilter:
    """Which ports of RDMA devices to use, in NCCL's syntax: as an `InterfaceFilter`, and each name may have a port.

    Examples
    --------
    >>> DeviceFilter.parse("=mlx5_0:1,mlx5_2").allows("mlx5_0", 2)
    False
    >>> DeviceFilter.parse("^mlx5_1:2").allows("mlx5_1", 1)
    True
    """

    names: tuple[tuple[str, int | None], ...]
    exclude: bool = False
    exact: bool = False

    @classmethod
    def parse(cls, text: str) -> DeviceFilter:
        names, exclude, exact = _names(text)
        pairs = [name.partition(":") for name in names]
        if not all(device for device, _, _ in pairs):
            raise ValueError(text)
        return cls(tuple((d, whole(1, 255)(port) if colon else None) for d, colon, port in pairs), exclude, exact)

    def allows(self, device: str, port: int) -> bool:
        """Whether the `port` (from 1 on) of `device` may be used."""
        found = any(
            (device == name if self.exact else device.startswith(name)) and number in (None, port)
            for name, number in self.names
        )
        return found != self.exclude

    def __str__(self) -> str:
        names = ",".join(name if port is None else f"{name}:{port}" for name, port in self.names)
        return ("^" if self.exclude else "") + ("=" if self.exact else "") + names


def _names(text: str) -> tuple[tuple[str, ...], bool, bool]:
    """The names of a list in NCCL's syntax, whether they are to be left out, and whether they are whole names."""
    exclude = text.startswith("^")
    rest = text[1:] if exclude else text
    exact = rest.startswith("=")
    names = tuple(name.strip() for name in rest.removeprefix("=").split(",") if name.strip())
    if not names:
        raise ValueError(text)
    return names, exclude, exact


def parse_format(compress: object) -> Format:
    """A format by its name."""
    labels = [known.label for known in Format]
    if not isinstance(compress, str) or compress.lower() not in labels:
        raise ArgumentError(f"compress: wanted one of {', '.join(labels)}, got {compress!r}")
    return Format[compress.upper()]

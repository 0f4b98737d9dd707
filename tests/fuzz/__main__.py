"""``python -m fuzz``: every parser and listener for some seconds, each where new code is reached (atheris, libFuzzer).
``--native``: those of the native code alone, beside each other. ``--strangers 1000000``: a siege of jobs by so many
connections instead.

What a target fails on is left in a file whose name is printed; ``--again FILE`` gives it to that target alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import native


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target (%(default)s)")
    parser.add_argument("--only", help="this target alone")
    parser.add_argument("--again", type=Path, help="give what is in this file to the target")
    parser.add_argument("--strangers", type=int, help="so many connections of strangers")
    parser.add_argument("--native", action="store_true", help="the native code's alone")
    parser.add_argument("--build", action="store_true", help="build these, and fuzz nothing")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.strangers is not None:
        from .strangers import main as besiege

        with tempfile.TemporaryDirectory() as folder:
            return besiege(asked.strangers, Path(folder))
    if asked.here:
        return _fuzz(asked.here, asked.seconds, asked.again)
    names = [asked.only] if asked.only else [] if asked.native or asked.build else _names()
    natives = [name for name in ([asked.only] if asked.only else native.NAMES) if name in native.NAMES]
    if natives:
        if (clang := native.compiler()) is None:
            print(native.MISSING)
            natives = []
        else:
            native.build(clang)
        if asked.build:
            return 0
    said = [_run(name, _command(name, asked.seconds, asked.again)) for name in names if name not in native.NAMES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [native.command(name, asked.seconds, asked.again) for name in natives]
        said += pool.map(_run, natives, commands)
    failed = [name for name in said if name]
    print(f"{len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return bool(failed)


def _command(name: str, seconds: int, again: Path | None) -> list[str]:
    command = [sys.executable, "-m", "fuzz", "--here", name, "--seconds", str(seconds)]
    return [*command, "--again", str(again)] if again else command


def _run(name: str, command: list[str]) -> str:
    """`name` where it failed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines = done.stdout.splitlines()
    runs = next((line for line in reversed(lines) if line.startswith("Done ")), "")
    said = [] if done.returncode == 0 else lines[-40:]
    print("\n".join([f"{name}: {'ok' if done.returncode == 0 else 'FAILED'} {runs}", *said]), flush=True)
    return name if done.returncode != 0 else ""


def _names() -> list[str]:
    from .listening import LISTENERS
    from .targets import TARGETS

    return [*TARGETS, *LISTENERS]


def _fuzz(name: str, seconds: int, again: Path | None) -> int:
    """In a process of its own: libFuzzer ends it."""
    if again is not None:
        with _target(name) as (take, _):
            take(again.read_bytes())
        return 0
    import atheris

    with (
        atheris.instrument_imports(include=["hetcoll"]),
        _target(name) as (take, inputs),
        tempfile.TemporaryDirectory() as corpus,
    ):
        for number, data in enumerate(inputs):
            (Path(corpus) / str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-timeout=30", "-rss_limit_mb=4096", corpus], take)
        atheris.Fuzz()
    return 0


@contextlib.contextmanager
def _target(name: str) -> Iterator[tuple[Callable[[bytes], None], tuple[bytes, ...]]]:
    """What is given bytes, and some to begin with."""
    from .listening import LISTENERS, quiet
    from .targets import TARGETS

    if name in TARGETS:
        yield TARGETS[name], TARGETS[name].inputs
        return
    with LISTENERS[name]() as take:

        def quietly(data: bytes) -> None:
            with quiet():
                take(data)

        yield quietly, (b"",)


if __name__ == "__main__":
    sys.exit(main())

"""Count what the verbs transport itself executes for each message, with callgrind: where it is sent, and at both ends.

    python benchmarks/verbs_instructions.py [--bench build/.../hetcoll_verbs_bench]

The transport runs over fake devices in memory. What they cost, and copying payload, is left out: a real device has its
own costs for posting and polling. Without --bench the executable is built first, which takes cmake and g++.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "small": "8 bytes",
    "copied": "64 KiB through slots",
    "lent": "64 KiB from registered memory",
    "direct": "64 KiB from and to registered memory",
}
COUNTS = (100, 600)
SENDING = ("--toggle-collect=*VerbsSend::Push(*", "--toggle-collect=*VerbsSend::Lent(*")  # what a sender calls
_FUNCTION = re.compile(r"fn=\((\d+)\)(?: (.*))?")
_OTHERS = re.compile(r"^hetcoll::(testing::|CopyBytes|.*::Copy\()")


def build(directory: Path) -> Path:
    """Build the executable as the package is built, and return where it is."""
    options = ["-DHETCOLL_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(["cmake", "-S", ROOT / "native", "-B", directory, *options], check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", str(directory), "--target", "hetcoll_verbs_bench", "--parallel", "2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory / "hetcoll_verbs_bench"


def own_instructions(profile: str) -> int:
    """Instructions of functions in namespace hetcoll, but for the fake devices and copying: callgrind's own format."""
    names: dict[str, str] = {}
    total, counts, called = 0, False, False
    for line in profile.splitlines():
        if match := _FUNCTION.match(line):
            names.setdefault(match[1], match[2] or "")
            name = names[match[1]]
            counts = name.startswith("hetcoll::") and not _OTHERS.match(name)
        elif match := re.match(r"cfn=\((\d+)\) (.*)", line):
            names.setdefault(match[1], match[2])
        elif line.startswith("calls="):
            called = True  # the next line is what the called function cost
        elif line[:1].isdigit() or line.startswith(("+", "-", "*")):
            if counts and not called:
                total += int(line.split()[-1])
            called = False
    return total


def count(bench: Path, case: str, messages: int, *only: str) -> int:
    """Instructions of one run, or of what callgrind's options `only` say."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            *only,
            str(bench),
            case,
            str(messages),
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if run.returncode != 0:
            raise SystemExit(f"{bench} {case} {messages} failed:\n{run.stderr}")
        return own_instructions(out.read_text())


def report(bench: Path | None) -> list[str]:
    """A line a case. Each message is one posted chunk, and where it is written straight to its place, two."""
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is needed (Debian: apt install valgrind)")
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        found = bench or build(Path(scratch))
        for case, what in CASES.items():
            each = []
            for only in (SENDING, ()):
                low, high = (count(found, case, n, *only) for n in COUNTS)
                each.append((high - low) / (COUNTS[1] - COUNTS[0]))
            lines.append(f"{what:38} {each[0]:6.0f} instructions to send it, {each[1]:6.0f} at both ends")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description="instructions of the verbs transport for each message")
    parser.add_argument("--bench", type=Path, help="the executable hetcoll_verbs_bench")
    args = parser.parse_args(argv)
    print("\n".join(report(args.bench)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run PyTorch's own tests of a distributed backend (torch.testing._internal.distributed.distributed_test) on hetcoll.

    python tests/torch_suite.py [--write-docs] [--ranks 3] [--backend nccl] [PART OF A NAME ...]

They are Gloo's tests: the program asks for "gloo" and gets hetcoll (HETCOLL_REPLACE); or, on a machine with a GPU a
rank, NCCL's. Needs PyTorch and `expecttest`.
What the tests want to see in the profiler's events is left out.
The ranks are forked from this process, which has PyTorch loaded, rather than spawned: that saves minutes. Where there
are GPUs they must be spawned.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/torch.md"
BEGIN, END = "<!-- suite begin -->", "<!-- suite end -->"
SECONDS = 100  # for one test
MANY = 8  # ranks for the tests that want so many


def prepare(ranks: int, backend: str) -> None:
    """What the tests read from the environment, before they are imported."""
    folder = tempfile.mkdtemp(prefix="hetcoll-torch-suite-")
    os.environ |= {
        "BACKEND": backend, "WORLD_SIZE": str(ranks), "TEMP_DIR": folder, "HETCOLL_REPLACE": backend,
        "HETCOLL_LINGER": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        "INIT_METHOD": f"file://{folder}/shared_init_file",
    }  # fmt: skip
    for name in ("barrier", "test_dir", "init_dir"):
        (Path(folder) / name).mkdir()


def cases() -> type[unittest.TestCase]:
    """The class of all tests."""
    import torch

    import hetcoll.torch

    hetcoll.torch.register()
    torch.set_num_threads(1)
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as theirs

    common_distributed.TIMEOUT_DEFAULT = SECONDS
    for profiled in (theirs.PROFILING_SUPPORTED_BACKENDS, theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        profiled.clear()  # what they want of events in profiles, only backends in C++ can do
    context = torch.multiprocessing.get_context("spawn" if os.environ["BACKEND"] == "nccl" else "fork")

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(context.Process)

        def run_test(self, name: str, pipe: Any) -> None:
            """On a rank. Torch loses the reasons of tests that find out here that they cannot run."""
            test = getattr(self, name)

            def told() -> None:
                try:
                    test()
                except unittest.SkipTest as skip:
                    reason_file(name).write_text(str(skip))
                    raise

            setattr(self, name, told)
            super().run_test(name, pipe)

    Suite.__qualname__ = "Suite"  # by which spawned ranks find it here
    return Suite


def __getattr__(name: str) -> Any:
    if name != "Suite":
        raise AttributeError(name)
    globals()[name] = cases()
    return globals()[name]


def reason_file(name: str) -> Path:
    """Where a rank writes why it skipped a test."""
    return Path(os.environ["TEMP_DIR"]).with_suffix(f".{name}")


def last_words(reason: str) -> str:
    """What a trace ends with, or the only line of a reason."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1]


class Result(unittest.TestResult):
    """One line a test, as it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, str]] = {}

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._start = time.monotonic()

    def _note(self, test: Any, state: str, reason: str) -> None:
        name = test._testMethodName
        self.found[name] = state, reason
        print(f"{time.monotonic() - self._start:6.1f} s {state:7} {name} {last_words(reason)}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._note(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        file = reason_file(test._testMethodName)
        if file.exists():
            reason = file.read_text()
            file.unlink()
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        self._note(test, "failed", str(error[1]))

    addError = addFailure  # noqa: N815


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="run only tests whose names contain one of these")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="what the tests believe to run on")
    parser.add_argument("--write-docs", action="store_true", help="write the table of docs/torch.md (of Gloo's tests)")
    parser.add_argument("--save", help="also write the results to this file, as JSON")
    args = parser.parse_args()
    prepare(args.ranks, args.backend)
    kind = getattr(sys.modules[__name__], "Suite")  # noqa: B009
    names = [name for name in unittest.TestLoader().getTestCaseNames(kind)
             if not args.names or any(part in name for part in args.names)]  # fmt: skip
    result = Result()
    for name in names:
        kind(name).run(result)
    os.environ["WORLD_SIZE"] = str(MANY)
    small = [name for name, (_, reason) in result.found.items() if "small world size" in reason]
    for name in small if args.backend == "gloo" else ():
        kind(name).run(result)
    states = collections.Counter(state for state, _ in result.found.values())
    print(dict(states))
    if args.save:
        Path(args.save).write_text(json.dumps(result.found))
    if args.write_docs:
        write(result.found, args.ranks)
    return int(bool(states["failed"]))


def write(found: dict[str, tuple[str, str]], ranks: int) -> None:
    """The table between the marks in docs/torch.md."""
    import torch

    states = collections.Counter(state for state, _ in found.values())
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name, (state, reason) in found.items():
        if state != "passed":
            reasons[state, last_words(reason)[:160].replace("|", "/")].append(name)
    lines = [
        f"Of {len(found)} tests of torch {torch.__version__} with CPU tensors on {ranks} ranks, or {MANY} where a test "
        "wants them: "
        + ", ".join(f"{states[state]} {state}" for state in ("passed", "skipped", "failed")) + ".",
        "", "| Not run or failed, and why | Tests |", "| --- | --- |",
    ]  # fmt: skip
    for (state, text), names in sorted(reasons.items(), key=lambda pair: (pair[0][0], -len(pair[1]))):
        shown = ", ".join(f"`{name.removeprefix('test_')}`" for name in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"| {state}: {text} | {shown}{more} |")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    sys.exit(main())

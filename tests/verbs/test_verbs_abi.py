"""Our declarations of libibverbs' structs against its own header, where that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from patience import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or ""


def compile_check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [COMPILER, "-std=c++20", "-fsyntax-only", *flags, "-I", str(ROOT / "native"), "-I", str(ROOT / "tests")]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)


@pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")
def test_structs_are_as_in_the_header(tmp_path: Path) -> None:
    probe = tmp_path / "probe.cc"
    probe.write_text("#include <infiniband/verbs.h>\n")
    if compile_check(str(probe)).returncode != 0:
        pytest.skip("libibverbs' header is not installed (Debian: libibverbs-dev)")
    check = ROOT / "tests" / "verbs" / "abi_check.cc"
    result = compile_check(str(check))
    assert result.returncode == 0, result.stderr
    # The same with a field gone must not pass.
    wrong = tmp_path / "transport" / "verbs" / "abi.h"
    wrong.parent.mkdir(parents=True)
    text = (ROOT / "native" / "transport" / "verbs" / "abi.h").read_text()
    wrong.write_text(text.replace("  std::uint32_t vendor_err;\n", ""))
    refused = compile_check("-I", str(tmp_path), str(check))
    assert "static assertion failed" in refused.stderr, refused.stderr

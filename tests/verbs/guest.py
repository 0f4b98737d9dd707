#!/usr/bin/env python3
"""Run a command in a small virtual machine with RDMA devices: QEMU, Debian's own kernel, Soft-RoCE.

    guest.py [--cpus N] [--memory MIB] [--timeout S] [--group RANK:PORT] [--write DIR] [--count] COMMAND [ARG...]
    guest.py --prepare      install what is needed (Debian, as root)
    guest.py --check        say what is missing

The guest sees this machine's files (through 9p, under an overlay in its memory), so it has the same interpreters and
packages; what it writes is dropped, except below DIR. The kernel is fetched with apt-get once and never installed.

Alone, a guest has two cables: rxe0 (10.77.0.1) to rxe1 (10.77.0.2), and rxe2 (10.77.1.1) to rxe3 (10.77.1.2). They lie
on the Ethernet devices veth0 to veth3. Each device reaches itself and the one at the other end of its cable.

In a group, which is made of guests that were started with one PORT (a free UDP port) and RANKs of their own, a guest
has rxe0 (10.78.0.RANK+1) on eth0 and rxe1 (10.78.1.RANK+1) on eth1, and reaches the others over both.

With --count there is one processor, and by its clock each instruction takes a nanosecond, those of the kernel, too.

The exit status is the command's; 124 after the timeout, 125 when there was no guest, 123 when QEMU died of a signal.
Processors are emulated in software, since nested virtualisation is not to be had everywhere, and a /dev/kvm does not
say that it runs this kernel (KVM for guests that know of it, PVM, does not). It is for finding out what works, not how
fast.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import lzma
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = (
    *("qemu-system-x86", "busybox-static", "iproute2"),
    *("libibverbs1", "libibverbs-dev", "ibverbs-providers", "ibverbs-utils", "python3-pyverbs", "perftest"),
)
_TOOLS = ("qemu-system-x86_64", "busybox", "ip", "rdma", "tc")
_MODULES = (
    *("virtio_pci", "virtio_console", "virtio_net", "9p", "9pnet_virtio", "overlay"),
    *("veth", "sch_netem", "crc32_generic", "ib_uverbs", "rdma_rxe"),
)
_FAILED, _TIMED_OUT, _CRASHED = 125, 124, 123
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class GuestError(Exception):
    """There is no guest, and why."""


# The guest's first process: modules, the root, then `inside`. busybox sh.
_INIT = r"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "insmod $module failed"; done </modules/order
nine=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,$nine,cache=loose root /lower
mount -t tmpfs tmpfs /upper; mkdir /upper/root /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/root,workdir=/upper/work root /root
for fs in proc sys dev; do mount --move /$fs /root/$fs; done
cd /root
mkdir -p dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts devpts dev/pts
mount -t tmpfs tmpfs run
ln -s /proc/self/fd dev/fd
mkdir run/guest
mount -t 9p -o $nine,cache=none guest run/guest
if [ -e run/guest/writable ]; then
    mount -t 9p -o $nine,cache=loose writable "/root$(cat run/guest/writable)"
fi
hostname guest$(cat run/guest/rank)
chroot . /bin/bash /run/guest/inside >dev/console 2>&1
umount "/root$(cat run/guest/writable)" 2>/dev/null
sync
echo b >proc/sysrq-trigger
sleep 60
"""

# Then: Ethernet devices, RDMA devices on them, and the command. bash, with this machine's tools.
_INSIDE = r"""
run=/run/guest rank=$(<$run/rank)
ip link set lo up
join() { # join NUMBER ETHERNET ADDRESS
    ip link set "$2" up
    ip addr add "$3/24" dev "$2"
    rdma link add "rxe$1" type rxe netdev "$2"
}
if [ -n "$rank" ]; then
    for i in 0 1; do join $i eth$i 10.78.$i.$((rank + 1)) || exit; done
else
    echo 1 >/proc/sys/net/ipv4/conf/all/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    for cable in 0 1; do
        a=$((2 * cable)) b=$((2 * cable + 1))
        ip link add veth$a address 02:77:00:00:0$cable:01 mtu 4200 type veth \
            peer name veth$b address 02:77:00:00:0$cable:02 mtu 4200 || exit
        for i in $a $b; do
            echo 1 >/proc/sys/net/ipv4/conf/veth$i/accept_local
            echo 0 >/proc/sys/net/ipv4/conf/veth$i/rp_filter
        done
        join $a veth$a 10.77.$cable.1 && join $b veth$b 10.77.$cable.2 || exit
        # Both ends are this machine's: it would not ask itself for their hardware addresses.
        ip neigh replace 10.77.$cable.2 lladdr 02:77:00:00:0$cable:02 dev veth$a nud permanent
        ip neigh replace 10.77.$cable.1 lladdr 02:77:00:00:0$cable:01 dev veth$b nud permanent
    done
fi
ulimit -l unlimited
bash $run/command </dev/null >/dev/vport0p1 2>&1
echo $? >$run/status
"""


def missing() -> str:
    """What this machine lacks for a guest; empty when there is nothing."""
    lacking = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if lacking:
        return f"no {', '.join(lacking)}: guest.py --prepare installs them"
    return "" if _kernel() is not None else "no kernel for the guest: guest.py --prepare fetches it"


def prepare() -> None:
    """Install the packages that are missing and fetch the kernel. Debian only, as root."""
    lacking = [p for p in PACKAGES if subprocess.run(["dpkg", "-s", p], capture_output=True).returncode != 0]
    if lacking:
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=True, timeout=300)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *lacking]
        subprocess.run(install, check=True, env=environ, stdout=subprocess.DEVNULL, timeout=600)
    folder = _cache()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _kernel() is None:
            _fetch_kernel(folder)
        _make_initramfs(folder)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hetcoll-guest"


def _kernel() -> Path | None:
    found = _cache() / "vmlinux"
    return found if found.exists() else None


def kernel_module(name: str) -> Path:
    """The file of one that guests have not loaded, such as ``net/sched/act_police``."""
    return _cache() / "modules" / f"{name}.ko"


def _fetch_kernel(folder: Path) -> None:
    """What linux-image-amd64 depends on; of the kernel the image inside its compression, which boots sooner."""
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    package = re.search(r"Depends: (linux-image-\S+)", depends)
    if package is None:
        raise GuestError("apt knows no linux-image-amd64")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        download = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package[1]]
        subprocess.run(download, check=True, cwd=work, stdout=subprocess.DEVNULL, timeout=300)
        (deb,) = Path(work).glob("*.deb")
        subprocess.run(["dpkg", "-x", deb, f"{work}/tree"], check=True, timeout=120)
        (packed,) = Path(work, "tree/boot").glob("vmlinuz-*")
        (modules,) = Path(work, "tree/lib/modules").iterdir()
        shutil.rmtree(folder / "modules", ignore_errors=True)
        shutil.copytree(modules / "kernel", folder / "modules")
        data = packed.read_bytes()
        image = lzma.LZMADecompressor().decompress(data[data.index(b"\xfd7zXZ\0") :])
        if image[:4] != b"\x7fELF":
            raise GuestError(f"{package[1]}: wanted an xz-compressed kernel")
        Path(work, "vmlinux").write_bytes(image)
        os.replace(f"{work}/vmlinux", folder / "vmlinux")


def _make_initramfs(folder: Path) -> None:
    """busybox, the modules in an order in which they can be loaded, and the first process."""
    files = {path.stem.replace("-", "_"): path for path in (folder / "modules").rglob("*.ko")}
    order: list[str] = []

    def need(name: str) -> None:
        if name in order:
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for each in depends[1].decode().split(",") if depends and depends[1] else ():
            need(each.replace("-", "_"))
        order.append(name)

    for name in _MODULES:
        need(name)
    busybox = shutil.which("busybox", path=_PATH)
    assert busybox is not None
    folders = ("bin", "modules", "proc", "sys", "dev", "lower", "upper", "root")
    entries: list[tuple[str, int, bytes]] = [(name, stat.S_IFDIR | 0o755, b"") for name in folders]
    entries += [("init", stat.S_IFREG | 0o755, _INIT.encode())]
    entries += [("bin/busybox", stat.S_IFREG | 0o755, Path(busybox).read_bytes())]
    entries += [(f"modules/{name}.ko", stat.S_IFREG | 0o644, files[name].read_bytes()) for name in order]
    entries += [("modules/order", stat.S_IFREG | 0o644, "".join(f"{name}.ko\n" for name in order).encode())]
    (folder / "initramfs.new").write_bytes(b"".join(_archive(entries)))
    os.replace(folder / "initramfs.new", folder / "initramfs")


def _archive(entries: Sequence[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """cpio's newc format, of Documentation/driver-api/early-userspace/buffer-format.rst in the kernel."""
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        words = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08x" % word for word in words) + name.encode() + b"\0"
        yield head + b"\0" * (-len(head) % 4)
        yield data + b"\0" * (-len(data) % 4)


def run(
    command: Sequence[str],
    *,
    cpus: int = 2,
    memory: int = 2048,
    timeout: float = 600.0,
    group: tuple[int, int] | None = None,
    write: Path | None = None,
    count: bool = False,
) -> int:
    """`command` in a guest, with this process's environment, directory and standard output; its exit status.

    `memory` is in MiB, `timeout` in seconds, `group` a rank and a port, `write` a directory whose changes stay.
    `count`: each instruction takes a nanosecond.
    """
    reason = missing()
    if reason:
        raise GuestError(reason)
    with tempfile.TemporaryDirectory(prefix="hetcoll-guest-") as folder:
        shared = Path(folder)
        variables = "".join(
            f"export {name}={shlex.quote(v)}\n" for name, v in os.environ.items() if name.isidentifier()
        )
        (shared / "command").write_text(f"{variables}cd {shlex.quote(os.getcwd())} && {shlex.join(command)}\n")
        (shared / "inside").write_text(f"export PATH={_PATH}\n{_INSIDE}")
        (shared / "rank").write_text("" if group is None else str(group[0]))
        shares = {"root": "/", "guest": folder}
        if write is not None:
            (shared / "writable").write_text(str(write.resolve()))
            shares["writable"] = str(write.resolve())
        machine = _machine(_cache(), 1 if count else cpus, memory, shares, group, f"{folder}/console", count)
        quiet, open_end = os.pipe()  # the guest's output stops when its input ends, so that must not
        try:
            sys.stdout.flush()
            subprocess.run(machine, stdin=quiet, timeout=timeout, check=True, preexec_fn=_in_qemu)
            return int((shared / "status").read_text())
        except subprocess.TimeoutExpired:
            why, status = f"no end after {timeout:g} s", _TIMED_OUT
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            died = isinstance(error, subprocess.CalledProcessError) and error.returncode < 0
            why, status = f"it ended without a status ({error})", _CRASHED if died else _FAILED
        finally:
            os.close(quiet)
            os.close(open_end)
        console = Path(f"{folder}/console")
        told = console.read_text(errors="replace") if console.exists() else ""
        if "Kernel panic" in told:
            status = _CRASHED
        print("guest:", why, *told.splitlines()[-80:], sep="\n  ", file=sys.stderr, flush=True)
        return status


def _in_qemu() -> None:
    """The kernel ends this process when its parent ends, however that comes (prctl(2)). Where it may, it goes before
    others: a whole machine is one process here, beside tests whose every rank is one."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.nice(-10)


def _machine(
    cache: Path,
    cpus: int,
    memory: int,
    shares: dict[str, str],
    group: tuple[int, int] | None,
    console: str,
    count: bool,
) -> list[str]:
    """The words that start QEMU."""
    words = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    words += ["-machine", "pc", "-accel", f"tcg,thread={'single' if count else 'multi'},tb-size=512"]
    words += ["-icount", "shift=0,sleep=on"] if count else []
    # Emulated, copies by `rep movsb` and by vectors of 32 bytes take longer than others.
    words += ["-cpu", "max,-erms,-fsrm,-avx,-avx2"]
    words += ["-smp", str(cpus), "-m", str(memory), "-kernel", f"{cache}/vmlinux", "-initrd", f"{cache}/initramfs"]
    # Where other work delays this process, the kernel would take its timer for broken, and stop.
    # Where the kernel stands still for two minutes it dies, and says where.
    options = "panic=-1 softlockup_panic=1 watchdog_thresh=60 mitigations=off no_timer_check"
    options += " clocksource=hpet" if count else " tsc=unstable"
    words += ["-append", f"console=ttyS0 quiet {options}"]
    words += ["-chardev", f"file,id=console,path={console}", "-serial", "chardev:console"]
    words += ["-device", "virtio-serial-pci", "-chardev", "stdio,id=out,signal=off"]
    words += ["-device", "virtserialport,nr=1,chardev=out"]
    for tag, path in shares.items():
        access = ",readonly=on" if tag == "root" else ""
        words += ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap{access}"]
    if group is not None:
        rank, port = group
        for net in range(2):
            words += ["-netdev", f"socket,id=net{net},mcast=230.77.{net}.1:{port},localaddr=127.0.0.1"]
            address = f"02:78:00:00:0{net}:{rank + 1:02x}"
            words += ["-device", f"virtio-net-pci,netdev=net{net},romfile=,host_mtu=4200,mac={address}"]
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="install what is needed, fetch the kernel, and end")
    parser.add_argument("--check", action="store_true", help="say what is missing on stderr, with status 125")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--memory", type=int, default=2048, help="MiB")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("--group", metavar="RANK:PORT", help="join the guests with this PORT")
    parser.add_argument("--write", type=Path, metavar="DIR", help="a directory whose changes stay")
    parser.add_argument("--count", action="store_true", help="each instruction takes a nanosecond")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    try:
        if args.prepare:
            prepare()
            return 0
        if args.check:
            reason = missing()
            if reason:
                raise GuestError(reason)
            return 0
        if not args.command:
            parser.error("no command")
        group = None
        if args.group:
            rank, port = map(int, args.group.split(":"))
            group = (rank, port)
        return run(
            args.command,
            cpus=args.cpus,
            memory=args.memory,
            timeout=args.timeout,
            group=group,
            write=args.write,
            count=args.count,
        )
    except (GuestError, subprocess.SubprocessError) as error:
        print(f"guest: {error}", file=sys.stderr)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main())

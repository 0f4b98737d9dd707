"""What ranks tell each other of their GPUs when a communicator comes to be, and what cannot work then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any, cast

import pytest
from gpu_kinds import start
from patience import DEADLINE
from ranks import Job

import hetcoll
from hetcoll.errors import ArgumentError, HetcollError, InitError
from hetcoll.gpu.vendor_comm import unlike_float8
from hetcoll.links.facts import Facts, Gpu, check_digests
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.vendors.ccl.native import float8_kind

H200 = Gpu("cuda", "0000:1a:00.0", "sm_90", "NVIDIA H200", "x", 22809, "OCP", True)
MI300X = Gpu("hip", "0000:0c:00.0", "gfx942", "AMD Instinct MI300X", "y", 22707, "fnuz", True)


@pytest.mark.parametrize(
    ("arch", "kind"), [("sm_90", "OCP"), ("sm_80", ""), ("gfx942:sramecc+", "fnuz"), ("gfx950", "OCP"), ("gfx90a", "")]
)
def test_kinds_of_8_bit_floats(arch: str, kind: str) -> None:
    assert float8_kind(arch) == kind


def test_unlike_kinds_are_told() -> None:
    assert unlike_float8([H200, H200]) == ""
    assert unlike_float8([H200, Gpu.none("z")]) == ""
    assert unlike_float8([MI300X, Gpu.none("z"), MI300X]) == ""
    said = unlike_float8([MI300X, H200, Gpu.none("z")])
    assert said.startswith("8-bit floats: rank 0 fnuz, rank 1 not; calls on them run in OCP's kind")


def facts(gpus: list[list[Gpu]], *, problems: tuple[str, ...] = (), **more: Any) -> Facts:
    wishes = tuple("hip" if problem else "" for problem in problems) or ("",) * len(gpus)
    ranks = tuple(RankInfo(r, "h", wish=wish) for r, wish in enumerate(wishes))
    return Facts(Topology(ranks, **more), gpus, problems or ("",) * len(gpus))


def at(place: int, gpu: Gpu = H200, **more: Any) -> Gpu:
    return replace(gpu, bus=f"0000:{place:02x}:00.0", **more)


class Device:
    """One of a process."""

    def __init__(self, gpu: Gpu) -> None:
        self.vendor, self.bus_id = gpu.vendor, gpu.bus


def test_the_first_call_says_which_gpu_it_is() -> None:
    known = facts([[at(1), at(2)], [MI300X], []])
    told = [
        ["cuda", "0000:02:00.0", "a", "no", False, [7, 0, 1]],
        ["hip", MI300X.bus, "b", "", True, [8, 2, 1], 1, 0],
        ["", "", "c", "", False, [9, 0, 1]],
    ]

    def meet(label: str, blob: bytes) -> list[bytes]:
        assert json.loads(blob) == ["cuda", "0000:02:00.0", "a", "no", False, [7, 0, 1], 2, 0, 1]
        return [json.dumps(each).encode() for each in told]

    chosen = known.choose(cast("Any", Device(at(2))), "a", "no", False, (7, 0, 1), (2, 0, 1), meet)
    theirs = replace(MI300X, memory="b", kernels=True, pinned=(8, 2, 1), ports=(1, 0))
    assert chosen == [at(2, memory="a", no_direct="no", pinned=(7, 0, 1)), theirs, Gpu.none("c")]
    told[1][1] = "0000:99:00.0"
    with pytest.raises(InitError, match=r"rank 1 uses GPU 0000:99:00.0 of hip, which it did not see .* HETCOLL_DEVICE"):
        known.choose(cast("Any", Device(at(2))), "a", "no", False, (7, 0, 1), (2, 0, 1), meet)


def test_all_ranks_know_the_same() -> None:
    known, other = facts([[at(1)], [MI300X]]), facts([[at(1)], [at(0, MI300X)]])
    assert known.digest == facts([[at(1)], [MI300X]]).digest != other.digest
    assert facts([[], []]).digest == b"", "ranks without GPUs have nothing to compare"
    check_digests([known.digest] * 3)
    with pytest.raises(InitError, match="rank 1 and rank 0 were not told the same"):
        check_digests([known.digest, other.digest])


def test_two_versions_of_a_library_in_one_island() -> None:
    gpus = [[at(r, library=code)] for r, code in enumerate((22809, 22809, 22304))]
    with pytest.raises(InitError, match="ranks 0 and 2 have versions 22809 and 22304"):
        facts(gpus)
    with pytest.raises(InitError, match="ranks 0 and 2 have versions"):
        facts([[one[0], at(10 + r, library=one[0].library)] for r, one in enumerate(gpus)])
    facts(gpus, asked=((0, 1), (2,)))
    facts([*gpus[:2], [at(2, library=0)]])  # that has none: no library serves any of them
    facts([gpus[0], [*gpus[2], MI300X]])  # which of the two it uses is not known yet


def test_islands_that_no_library_serves() -> None:
    with pytest.raises(ArgumentError, match="no one library serves cuda and hip"):
        facts([[at(1)], [MI300X]], asked=((0, 1),))
    with pytest.raises(ArgumentError, match="a library takes each GPU once"):
        facts([[at(1)], [at(1)]], asked=((0, 1),))
    facts([[at(1), at(2)], [at(1), at(2)]], asked=((0, 1),))


def test_a_rank_without_the_gpu_that_it_was_told_to_use() -> None:
    with pytest.raises(InitError, match="rank 1 was told to use hip, but there is none; rank 2"):
        facts([[at(1)], [], []], problems=("", "there is none", "nor here"))


def test_hosts_without_a_driver_import_nothing_of_a_vendors() -> None:
    """Nor do ranks that use a CPU."""
    code = """
import sys
from hetcoll.links.facts import visible
from hetcoll.config.variables import DeviceChoice
assert visible(DeviceChoice("cpu")) == ([], "")
assert visible(None) == ([], "")
assert not [name for name in sys.modules if name.startswith(("cuda", "hip", "rocm", "hetcoll.vendors.devices.cuda"))]
found, why = visible(DeviceChoice("cuda"))
assert not found and why, why
"""
    if os.path.exists("/dev/kfd") or os.path.exists("/dev/nvidiactl"):
        pytest.skip("this host has a GPU")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)


def what_is_known(comm: hetcoll.Communicator) -> list[list[str]]:
    return [[gpu.arch for gpu in one] for one in comm._wiring.facts.gpus]


@pytest.mark.fakes
def test_all_is_known_at_init() -> None:
    """Before any call: of those that were told which, and of those that see some."""
    with start("nac") as ranks:
        assert ranks.run(what_is_known, timeout=60) == [[["sm_90"] * 3, ["gfx942"] * 3, []]] * 3
    with start("nac", HETCOLL_DEVICE=("cuda:1", "hip:0", "cpu")) as ranks:
        assert ranks.run(what_is_known, timeout=60) == [[["sm_90"], ["gfx942"], []]] * 3
    with start("na", HETCOLL_DEVICE="auto") as ranks:
        assert ranks.run(what_is_known, timeout=60) == [[["sm_90"] * 2, ["gfx942"] * 2]] * 2


def join_and_leave(job: Job) -> None:
    job.join()


@pytest.mark.fakes
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"HETCOLL_DEVICE": ("cuda", "hip:7")}, "rank 1 was told to use hip, but wanted one of 2 HIP devices, got 7"),
        ({"HETCOLL_DEVICE": ("hip", "hip")}, "rank 0 was told to use hip, but"),
        ({"HETCOLL_ISLANDS": "0,1"}, "has ranks 0 and 1 in one island, but no one library serves"),
        ({"HETCOLL_CROSS": "mapped", "HETCOLL_HOST_ID": ("a", "b")}, "HETCOLL_CROSS=mapped: ranks 0 and 1 share no"),
        ({"HETCOLL_CROSS": "direct", "HETCOLL_HOST_ID": ("a", "b")}, "HETCOLL_CROSS=direct: rank 0: "),
    ],
)
def test_what_cannot_work_is_said_at_init(settings: dict[str, Any], said: str) -> None:
    """On all ranks."""
    with start("na", join=False, **settings) as ranks:
        for outcome in ranks.outcomes(join_and_leave):
            assert isinstance(outcome.error, HetcollError), outcome.trace
            assert said in str(outcome.error)

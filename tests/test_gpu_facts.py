"""What ranks tell each other of their GPUs before the first call on them, and what cannot work then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetcoll.errors import InitError
from hetcoll.gpu_islands import Gpu, GpuIslands, tell_all, unlike_float8
from hetcoll.islands.native import float8_kind
from hetcoll.topology import RankInfo, Topology

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


class Meeting:
    """Two ranks, of which the other one has a GPU too, and may have been told something else."""

    def __init__(self, same: bool) -> None:
        self.labels: list[str] = []
        self._same = same

    def __call__(self, label: str, blob: bytes) -> list[bytes]:
        self.labels.append(label)
        return [blob, blob.replace(b"1a", b"1b") if len(self.labels) == 1 else blob if self._same else b"other"]


def test_all_ranks_know_the_same() -> None:
    meeting = Meeting(same=True)
    assert tell_all(H200, meeting) == [H200, replace(H200, bus="0000:1b:00.0")]
    assert len(set(meeting.labels)) == 2
    with pytest.raises(InitError, match="rank 1 and rank 0 were not told the same"):
        tell_all(H200, Meeting(same=False))


def test_two_versions_of_a_library_in_one_island() -> None:
    def meet(label: str, blob: bytes) -> list[bytes]:
        raise AssertionError(f"{label}: nobody is met before this is found")

    topology = Topology(tuple(RankInfo(r, "h") for r in range(3)))
    gpus = [replace(H200, bus=f"0000:{r:02x}:00.0", library=code) for r, code in enumerate((22809, 22809, 22304))]
    with pytest.raises(InitError, match="ranks 0 and 2 have versions 22809 and 22304"):
        GpuIslands(topology, 1, gpus, None, meet, 1.0)
    apart = Topology(topology.ranks, asked=((0, 1), (2,)))
    with pytest.raises(AssertionError, match="islands"):
        GpuIslands(apart, 2, gpus, None, meet, 1.0)

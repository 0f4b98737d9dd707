"""The connector has the methods of vLLM's interface, with its arguments: the real one's where vLLM is installed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import vllm_or_fake
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from hetcoll import ArgumentError
from hetcoll.calls.buffers import read_buffer
from hetcoll.serving.vllm import HetcollConnector
from hetcoll.serving.vllm.meeting import in_memory_order, layout_of

OWN = [
    name
    for name, each in vars(HetcollConnector).items()
    if not name.startswith("_") and callable(getattr(HetcollConnector, name))
]


def parameters(function: Any) -> list[tuple[str, Any, bool]]:
    """Names, kinds, and which have defaults."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default is not each.empty) for each in found]


def interface(name: str) -> Any:
    owner = base.SupportsHMA if name == "request_finished_all_groups" else base.KVConnectorBase_V1
    return getattr(owner, name)


@pytest.mark.parametrize("name", ["__init__", *OWN])
def test_a_method_takes_what_vllm_gives(name: str) -> None:
    assert parameters(getattr(HetcollConnector, name)) == parameters(interface(name))


def test_nothing_of_the_interface_is_left_abstract() -> None:
    assert not HetcollConnector.__abstractmethods__
    abstract = base.KVConnectorBase_V1.__abstractmethods__ | base.SupportsHMA.__abstractmethods__
    assert abstract <= set(OWN)


@pytest.mark.skipif(not vllm_or_fake.REAL, reason="vLLM is not installed")
def test_the_fake_has_the_signatures_of_vllm() -> None:
    fake = vllm_or_fake.load_fake()
    for kind in ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorWorkerMetadata"):
        ours, theirs = getattr(fake, kind), getattr(base, kind)
        assert ours.__abstractmethods__ == theirs.__abstractmethods__, kind
        for name, each in vars(ours).items():
            if inspect.isfunction(each) or isinstance(each, classmethod):
                assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name)), (kind, name)
    assert [each.name for each in fake.KVConnectorRole] == [each.name for each in base.KVConnectorRole]


@pytest.mark.skipif(not vllm_or_fake.REAL, reason="vLLM is not installed")
def test_vllm_finds_it_by_its_module_path() -> None:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    names = {"kv_connector": "HetcollConnector", "kv_connector_module_path": "hetcoll.serving.vllm"}
    config = KVTransferConfig(**names, kv_role="kv_producer", kv_buffer_device="cpu")
    assert KVConnectorFactory.get_connector_class(config) is HetcollConnector
    assert KVConnectorFactory.supports_hma_config(config)


@pytest.mark.skipif(not vllm_or_fake.REAL, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("LBHNC", ("block", "head", "token", "dim")),
        ("LBNHC", ("block", "token", "head", "dim")),
        ("LHBNC", ("head", "block", "token", "dim")),
        ("BLHNC", None),  # layers lie in one another
    ],
)
def test_caches_as_vllm_makes_them(layout: str, axes: tuple[str, ...] | None) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layers, blocks, spec = 2, 5, FullAttentionSpec(4, num_kv_heads=3, head_size=8, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    apart = axes is not None
    strides = {"layer_stride": page * blocks if apart else page, "block_stride": page if apart else page * layers}
    if layout == "LHBNC":
        strides["block_stride"] = page // 3
    tensor = KVCacheTensor(size=page * layers * blocks, layers=["0", "1"], **strides)
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, blocks, KVCacheLayout[layout], tensor)
    if axes is None:
        with pytest.raises(ArgumentError, match="layer: wanted a layer in one piece, got shape"):
            in_memory_order("layer", views[1])
        return
    array, found = in_memory_order("layer", views[1])
    assert found == axes
    buffer = read_buffer(array, "layer", writable=True)
    assert (buffer.ptr, buffer.nbytes) == (raw.data_ptr() + page * blocks, page * blocks)
    made = layout_of(array.shape, found, layers, heads=6, ranks=2)
    assert dict(zip(made.axes, made.shape, strict=True)) == {
        "layer": 1, "kv": 1, "block": blocks, "head": 3, "token": 4, "dim": 16,
    }  # fmt: skip

"""The connector has the methods of vLLM's interface, with its arguments: the real one's where vLLM is installed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import vllm_or_fake
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from hetcoll.vllm import HetcollConnector

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

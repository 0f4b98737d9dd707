"""Import this before `hetcoll.serving.vllm`: where vLLM is not installed, its place has a fake of the interface."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

_FAKE = Path(__file__).with_name("fake_vllm")

if str(_FAKE) not in sys.path:
    sys.path.append(str(_FAKE))  # behind what is installed

with warnings.catch_warnings(action="ignore"):  # those of what vLLM imports
    REAL = importlib.util.find_spec("vllm.logger") is not None
    importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")


def load_fake() -> Any:
    """The fake interface, beside the real one."""
    path = _FAKE / "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
    spec = importlib.util.spec_from_file_location("fake_vllm_base", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

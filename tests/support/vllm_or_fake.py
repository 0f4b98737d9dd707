"""Import this before `hetcoll.vllm`: where vLLM is not installed, its place has a fake of the interface."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

REAL = importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm.logger") is not None

if not REAL and (folder := str(Path(__file__).with_name("fake_vllm"))) not in sys.path:
    sys.path.append(folder)

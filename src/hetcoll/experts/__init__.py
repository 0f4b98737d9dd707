"""Dispatch and combine for mixture-of-experts (MoE): tokens go to the ranks of their experts, and what these make of
them comes back as weighted sums.

Ranks may be GPUs of any vendor and CPUs in one job. No token is dropped, whatever the routing. `Experts` is for
prefill and training: only the tokens that are routed travel, each once to a rank, and the host waits for counts.
`LowLatencyExperts` is for decoding: results have fixed shapes, and no host waits for a GPU.
"""

from __future__ import annotations

from .low_latency import LowLatencyExperts, LowLatencyLayout
from .throughput import ExpertLayout, Experts

__all__ = ["ExpertLayout", "Experts", "LowLatencyExperts", "LowLatencyLayout"]

"""The hand-off of paged KV caches, from the ranks that prefill to those that decode, over one-sided messages.

The two groups may hold the cache in different orders and share its heads among different numbers of ranks. Each layer
is sent as soon as it is computed, and may be waited for by itself.
"""

from .handoff import Handoff, Receiving, Sending
from .layouts import CacheLayout, Cut, cuts, pieces

__all__ = ["CacheLayout", "Cut", "Handoff", "Receiving", "Sending", "cuts", "pieces"]

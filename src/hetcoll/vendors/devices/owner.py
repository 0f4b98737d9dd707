"""Whose an address is."""

from __future__ import annotations

import importlib

from .base import Pointer, Vendor

_VENDORS: tuple[Vendor, ...] = ("cuda", "hip")


def owner(address: int) -> tuple[Vendor, Pointer]:
    """The vendor whose driver knows the address, and what it knows. Asks every driver that there is.

    Host memory that no driver knows is ``("cuda", Pointer("unknown", ...))``.
    """
    for vendor in _VENDORS:
        driver = importlib.import_module(f"{__package__}.{vendor}")
        if driver.why_not() is None:
            found: Pointer = driver.current().pointer(address)
            if found.kind != "unknown":
                return vendor, found
    return "cuda", Pointer("unknown", -1, address, 0)

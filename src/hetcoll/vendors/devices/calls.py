"""How a vendor's Python package is called: an error becomes an exception, what is left becomes the result."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from ...errors import DeviceError


class Calls:
    """The functions of cuda-python's or hip-python's modules, which return ``(error, value...)``.

    ``calls("cuMemAlloc", 64)`` is the value, a tuple of several, or None; `DeviceError` names the function and the
    driver's word for the error.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def __call__(self, name: str, *arguments: Any) -> Any:
        code, values = self._call(name, arguments)
        if code:
            raise DeviceError(f"{name}: {code}", code)
        return values[0] if len(values) == 1 else values or None

    def status(self, name: str, *arguments: Any) -> str:
        """The word for the error, empty for none: of calls whose answer it is."""
        return self._call(name, arguments)[0]

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        try:
            error, *values = getattr(self.module, name)(*arguments)
        except (AttributeError, RuntimeError) as problem:  # the package, the library or its symbol is too old
            raise DeviceError(f"{name}: {problem}") from problem
        return (error.name if int(error) else ""), tuple(values)


class Arguments:
    """A kernel's arguments in memory; `address` is that of the array of their addresses, until the launch returned."""

    def __init__(self, values: list[bytes]) -> None:
        self._values = [ctypes.create_string_buffer(x, len(x)) for x in values]
        self._pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self._values))
        self.address = ctypes.addressof(self._pointers)

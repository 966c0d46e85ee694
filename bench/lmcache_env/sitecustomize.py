"""Lets vLLM 0.32 start on a CPU where llvmlite is imported, which LMCache does by way of numba.

vLLM calls `vars(value).get` on every value of every module that has a `__dict__`. llvmlite's
library object invents attributes of any name, `__dict__` among them. Python imports this module at
its start.
"""

import contextlib

with contextlib.suppress(ImportError):
    from llvmlite.binding import ffi

    _invent = ffi._lib_wrapper.__getattr__  # noqa: SLF001  # no public name has it

    def _getattr(self: object, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return _invent(self, name)

    ffi._lib_wrapper.__getattr__ = _getattr  # noqa: SLF001

"""Let SGLang be imported, and its Triton kernels be interpreted, on a machine without a GPU."""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_OPERATORS = ("nms", "qnms")
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_KEPT: list[Any] = []  # definitions last as long as their library


class _AtImport(MetaPathFinder):
    """Does something once, before or after a module is imported; finds nothing itself.

    Args:
        name: of the module.
        before: done when it is about to be imported.
        after: done to it when it has been.
    """

    def __init__(
        self,
        name: str,
        before: Callable[[], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        self._name, self._before, self._after = name, before, after

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        if self._before is not None:
            self._before()
        spec, after = importlib.util.find_spec(fullname), self._after
        if after is None or spec is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_more(module: Any) -> None:
            execute(module)
            after(module)

        loader.exec_module = execute_and_more
        return spec


def _define_operators() -> None:
    """Define two operators of torchvision's that cannot be loaded for want of CUDA.

    It registers how they behave without data, and fails where nobody has defined them. They are
    never called: text models use torchvision's image transforms at most by name.
    """
    import torch.library  # noqa: PLC0415  # takes seconds, and few processes need it

    library: Any = torch.library
    library = library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


def _allow_any_mask(interpreter: Any) -> None:
    """Let the interpreter take masks of numbers: other than 0 is true.

    `(token < end) & mask` is one, where the first comparison is Python's own.
    """
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        return load(self, pointers, _true_or_false(mask), *more)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        return store(self, pointers, value, _true_or_false(mask), *more)

    def _true_or_false(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _measure_nothing(autotuner: Any) -> None:
    """Let every kernel take the first of its configurations: there is no driver to measure them."""
    tuner = autotuner.Autotuner
    initialize = tuner.__init__

    def initialize_with_one(self: Any, *arguments: Any, **more: Any) -> None:
        initialize(self, *arguments, **more)
        self.configs = self.configs[:1]

    tuner.__init__ = initialize_with_one


def _select_the_only_device(cpu: Any) -> None:
    """Let kernels be started "on the device of their tensors", of which there is one."""
    cpu.device = nullcontext


def _take_triton_convolutions(mixer: Any) -> None:
    """Give Mamba's mixer SGLang's convolutions in Triton, as SGLang does for Intel's GPUs."""
    from sglang.kernels.ops.mamba import causal_conv1d_triton  # noqa: PLC0415  # of its environment

    for name in _CONVOLUTIONS:
        function = getattr(causal_conv1d_triton, name)
        setattr(mixer, name, function)
        setattr(mixer, f"{name}_triton", function)


sys.meta_path.insert(0, _AtImport("torchvision", before=_define_operators))
if os.environ.get("TRITON_INTERPRET") == "1":
    for _module, _change in (
        ("torch.cpu", _select_the_only_device),
        ("triton.runtime.autotuner", _measure_nothing),
        ("triton.runtime.interpreter", _allow_any_mask),
        ("sglang.srt.layers.attention.mamba.mamba", _take_triton_convolutions),
    ):
        sys.meta_path.insert(0, _AtImport(_module, after=_change))

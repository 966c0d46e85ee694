"""Let torchvision be imported where its compiled operators cannot be loaded, for want of CUDA.

It registers how two of them behave without data, and fails where nobody has defined these. They
are never called: text models use torchvision's image transforms at most by name.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_OPERATORS = ("nms", "qnms")
_KEPT: list[Any] = []  # definitions last as long as their library


class _BeforeTorchvision(MetaPathFinder):
    """Defines the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        del path, target
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch.library  # noqa: PLC0415  # takes seconds, and few processes need it

        library: Any = torch.library
        library = library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())

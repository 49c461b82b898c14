"""torchvision: its transforms, where torch is built for CPUs and torchvision for CUDA.

Processors of images import torchvision. PyPI has it for CUDA only, and beside a torch for CPUs its
import fails, since it describes two compiled operators that its library would bring. With both
declared the import succeeds, and its transforms, which need neither, work. The declarations have to
come first, whoever imports it: Transformers does in many places.
"""

import sys

_declared: list[object] = []  # torch forgets what is declared with the object that declares it


class _Declaring:
    """Finder that declares the operators when torchvision is first imported; it finds nothing."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            from importlib.metadata import PackageNotFoundError, version  # tens of milliseconds

            try:
                built = version("torchvision")
            except PackageNotFoundError:
                return
            import torch

            if "+cpu" in torch.__version__ and "+cpu" not in built:
                library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
                _declared.append(library)
                parameters = "Tensor dets, Tensor scores, float iou_threshold"
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}({parameters}) -> Tensor")  # type: ignore[no-untyped-call]


def declare_operators() -> None:
    """Declare them when torchvision is imported, if it is built for CUDA and torch for CPUs."""
    if not any(isinstance(each, _Declaring) for each in sys.meta_path):
        sys.meta_path.insert(0, _Declaring())

"""torchvision: its transforms, where torch is built for CPUs and torchvision for CUDA.

Image processors import torchvision, but PyPI has only a torchvision for CUDA. Together with a torch
for CPUs, the import of torchvision fails, because it refers to two compiled operators whose library
cannot be loaded. If both operators are declared, the import succeeds, and the transforms work,
because they need neither operator. The declarations must come before the first import of
torchvision, which Transformers imports in many places. So torch calls this module when torch itself
is imported, through torch's entry point for extensions (`torch.backends`).
"""

from importlib.metadata import PackageNotFoundError, version

_declared: list[object] = []  # keeps the library alive, and with it torch's declarations


def declare_operators() -> None:
    """Declare the two operators if torchvision is built for CUDA, and torch is built for CPUs."""
    import torch

    if _declared or "+cpu" not in torch.__version__:
        return
    try:
        built = version("torchvision")
    except PackageNotFoundError:
        return
    if "+cpu" not in built:
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        _declared.append(library)
        parameters = "Tensor dets, Tensor scores, float iou_threshold"
        for operator in ("nms", "qnms"):
            library.define(f"{operator}({parameters}) -> Tensor")  # type: ignore[no-untyped-call]

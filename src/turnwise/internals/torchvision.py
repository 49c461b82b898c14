"""torchvision: its transforms, where torch is built for CPUs and torchvision for CUDA.

Image processors import torchvision. PyPI has torchvision for CUDA only. With a torch for CPUs its
import fails, because it refers to two compiled operators that its library cannot load. With both
operators declared, the import succeeds; the transforms work, because they need neither. The
declarations must come before the first import of torchvision, and Transformers imports it in many
places. So torch itself calls this module on its own import, by its entry point for extensions
(`torch.backends`).
"""

from importlib.metadata import PackageNotFoundError, version

_declared: list[object] = []  # torch removes the declarations when their library is collected


def declare_operators() -> None:
    """Declare the two operators if torchvision is built for CUDA and torch for CPUs."""
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

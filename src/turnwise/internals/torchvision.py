"""torchvision: its transforms, where torch is built for CPUs and torchvision for CUDA.

Processors of images import torchvision. PyPI has it for CUDA only, and beside a torch for CPUs its
import fails, since it describes two compiled operators that its library would bring. With both
declared the import succeeds, and its transforms, which need neither, work. The declarations have to
come first, whoever imports it, and Transformers does in many places; so torch itself calls this
module when it is imported, by its entry point for packages that extend it (`torch.backends`).
"""

from importlib.metadata import PackageNotFoundError, version

_declared: list[object] = []  # torch forgets what is declared with the object that declares it


def declare_operators() -> None:
    """Declare them if torchvision is built for CUDA and torch for CPUs."""
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

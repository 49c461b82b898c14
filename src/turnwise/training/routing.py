"""Routing replay: the trainer's routers repeat the engine's choice of experts (R3).

A mixture of experts amplifies rounding: where two experts are almost equally likely, engine and
trainer may choose differently, and the log-probs of the token differ at once. Here each router
computes its own probabilities, and takes them at the recorded experts, so that its gradient is that
of this choice (https://arxiv.org/abs/2510.11370). Tokens without a record are routed as ever.
"""

import re
from functools import partial

import torch
from torch.overrides import TorchFunctionMode

from turnwise.errors import InputError
from turnwise.training.lora import Untyped

KEY = "engine.routing_replay"
_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)
"""Names of the classes of routers in Transformers."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NARROW = 256  # most experts whose numbers are one byte each


class RoutingReplay:
    """The routers of a model, which repeat recorded choices."""

    def __init__(self, model: Untyped) -> None:
        text = model.config.get_text_config()
        self._layers: int = text.num_hidden_layers
        self._recorded: tuple[torch.Tensor, torch.Tensor] | None = None
        """The choices of each token, layer and rank among its experts [N, L, K], and whether the
        token has any [N, 1]."""
        self._experts = self._each = 0
        for name, module in model.named_modules():
            layer = _LAYER.search(f".{name}.")
            if layer is not None and _ROUTER.search(type(module).__name__):
                self._each, self._experts = module.top_k, module.weight.shape[0]
                module.forward = partial(self._route, int(layer[1]), module.forward)
        if not self._experts:
            raise InputError(f"{KEY}: a {text.model_type} model has no routers that are known")

    def use(self, experts_BTR: torch.Tensor | None) -> None:
        """Set the choices of the next forward and backward pass; None: none are recorded."""
        self._recorded = None
        if experts_BTR is None:
            return
        kind = torch.uint8 if self._experts <= _NARROW else torch.uint16
        size = self._layers * self._each * kind.itemsize
        if experts_BTR.shape[-1] != 1 + size:
            raise InputError(
                f"{KEY}: the engine recorded {experts_BTR.shape[-1] - 1} bytes for each token, and "
                f"{self._layers} layers of the trainer's model have {size}"
            )
        rows_NR = experts_BTR.flatten(0, 1)
        chosen_NC = rows_NR[:, 1:].contiguous().view(kind).long()
        chosen_NLK = chosen_NC.view(-1, self._layers, self._each)
        self._recorded = chosen_NLK, rows_NR[:, :1].bool()

    def _route(self, layer: int, route: Untyped, *arguments: Untyped) -> Untyped:
        """Compute one router, with the recorded choice in the place of its own."""
        if self._recorded is None:
            return route(*arguments)
        chosen_NLK, known_N1 = self._recorded
        with _Choice(chosen_NLK[:, layer], known_N1, self._experts) as choice:
            result = route(*arguments)
        if choice.made != 1:
            raise InputError(f"{KEY}: this model's routers choose in a way that is not known")
        return result


class _Choice(TorchFunctionMode):
    """The recorded experts as the result of a router's top-k over all experts."""

    def __init__(self, chosen_NK: torch.Tensor, known_N1: torch.Tensor, experts: int) -> None:
        super().__init__()
        self.made = 0
        self._chosen_NK, self._known_N1, self._experts = chosen_NK, known_N1, experts

    def __torch_function__(
        self,
        func: Untyped,
        types: Untyped,
        args: Untyped = (),
        kwargs: dict[str, Untyped] | None = None,
    ) -> Untyped:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._experts:
            return result
        if result.indices.shape != self._chosen_NK.shape:
            return result
        self.made += 1
        indices_NK = torch.where(self._known_N1, self._chosen_NK, result.indices)
        return torch.return_types.topk((args[0].gather(-1, indices_NK), indices_NK))

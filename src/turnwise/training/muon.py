"""Muon: matrices move by orthogonal steps, and AdamW trains what is not a matrix of a layer.

    B_t = 0.95 B_{t-1} + 0.05 g_t            momentum
    O_t = orthogonalised(g_t + 0.95 (B_t - g_t))
    W_t = (1 - rate * decay) W_{t-1} - rate * 0.2 sqrt(max(rows, columns)) O_t

Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024,
kellerjordan.github.io/posts/muon); the factor, by which steps have the size of AdamW's, and rates
can be AdamW's: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982). Both as in
`torch.optim.Muon`. As O_t does not depend on the size of the momentum, `training.max_grad_norm`
changes only how much a gradient counts beside earlier ones.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from turnwise.core.optional import Foreign
from turnwise.internals.torch import whole_matrices


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups of parameters that are matrices, AdamW for the others; one state."""

    def __init__(
        self,
        matrices: list[dict[str, Foreign]],
        others: list[dict[str, Foreign]],
        rate: float,
        betas: tuple[float, float],
    ) -> None:
        super().__init__([{**group} for group in (*matrices, *others)], {"lr": rate})
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=rate, betas=betas))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "steps follow a backward pass"
        with whole_matrices():
            for part in self._parts:
                part.step()


def matrices_of(module: nn.Module) -> set[int]:
    """Return the `id` of each parameter that Muon trains: matrices other than those of embeddings
    and heads. Experts that a model keeps in one tensor of three dimensions are none."""
    parts: list[nn.Module] = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    parts += [head for model in models if (head := model.get_output_embeddings()) is not None]
    spared = {id(parameter) for part in parts for parameter in part.parameters()}
    return {
        id(parameter)
        for name, parameter in module.named_parameters()
        if parameter.ndim == 2
        and id(parameter) not in spared
        and not name.startswith(("head.", "head/"))  # of a value model
    }

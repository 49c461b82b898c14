"""Communication between the ranks that share sequences (`training.context_parallel`)."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share this rank's sequences; they all make the same calls in the same order.

    Each rank computes an equal share of the columns. Only attention needs all columns. For it, the
    ranks exchange columns for heads, each rank attends with some heads over all columns, and the
    ranks exchange heads for columns again (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).
    Each rank computes the same loss from all log-probs, and the ranks' gradients add up to the
    gradient of a single rank with all columns.
    """

    ranks: dist.ProcessGroup
    size: int
    number: int  # number of this rank in the group, from 0

    @classmethod
    def of_this_rank(cls, size: int, limit: timedelta) -> "ContextGroup":
        """Divide all ranks into groups of `size` consecutive ranks, and return this rank's group.
        `limit` is the timeout of an exchange. Every rank must call this."""
        ranks, _ = dist.new_subgroups(size, timeout=limit)  # type: ignore[no-untyped-call]
        assert ranks is not None
        return cls(ranks, size, dist.get_rank(ranks))

    def heads(self, tensor_BHTD: torch.Tensor) -> torch.Tensor:
        """Exchange all heads of this rank's columns for its share of the heads over all columns:
        [B, H / C, T * C, D]. If there are fewer heads than ranks, several ranks get the same
        head."""
        repeats = max(1, self.size // tensor_BHTD.shape[1])
        tensor_BHTD = tensor_BHTD.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor_BHTD
        parts_CBHTD = torch.stack(tensor_BHTD.chunk(self.size, dim=1))
        columns_CBHTD = _Exchange.apply(parts_CBHTD, self.ranks)  # type: ignore[no-untyped-call]
        whole_BHTD: torch.Tensor = columns_CBHTD.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return whole_BHTD

    def columns(self, tensor_BHTD: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's columns: the inverse of `heads`."""
        parts_CBHTD = torch.stack(tensor_BHTD.chunk(self.size, dim=2))
        heads_CBHTD = _Exchange.apply(parts_CBHTD, self.ranks)  # type: ignore[no-untyped-call]
        own_BHTD: torch.Tensor = heads_CBHTD.transpose(0, 1).flatten(1, 2)
        return own_BHTD

    def union(self, values_N: torch.Tensor, number_N: torch.Tensor, total: int) -> torch.Tensor:
        """Return the values of all ranks, each at the index of its target among all targets:
        [total], or [total, K]."""
        own_N = values_N.new_zeros(total, *values_N.shape[1:]).index_copy(0, number_N, values_N)
        whole_N = own_N.detach().clone()
        dist.all_reduce(whole_N, group=self.ranks)
        # All ranks compute the same loss from the union, so the gradient of this rank's own values
        # is complete.
        is_own_N = torch.zeros_like(whole_N, dtype=torch.bool).index_fill(0, number_N, True)
        return torch.where(is_own_N, own_N, whole_N)


class _Exchange(torch.autograd.Function):
    """An exchange of equal parts: part i goes to rank i. Its gradient is exchanged in the same
    way."""

    @staticmethod
    def forward(ctx: Any, parts_CBHTD: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks = ranks
        parts = parts_CBHTD.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=ranks)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.forward(ctx, gradients[0], ctx.ranks), None

"""What the trainer's processes hold for clients: one frozen model, and an adapter for each client.

A pass adds up gradients of one adapter, until a step uses them. Optimizer states are those of
torch's AdamW and belong to the adapter. Nothing here knows of requests, sessions or engines, and
the driver imports this file only for its plain classes: torch comes with `rank`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from turnwise.tinker.wire import Array, Datum


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter as a client asks for it."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The settings of one step of AdamW; the names are the protocol's."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """Largest norm of the gradient; 0 does not clip."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass over some data, and the loss of it."""

    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    """Whether the gradient is added to the adapter's."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """The outcome of a pass."""

    outputs: Sequence[Mapping[str, Array]]
    """For each datum arrays [T] by name: the `logprobs` of its targets."""
    metrics: Mapping[str, float]
    """Metrics whose names end in the way in which a client joins those of several passes, such as
    `loss:sum`."""


class AdapterTrainer(Protocol):
    """All ranks of the trainer as one, in the view of the server; one call runs at a time.

    Every call names an adapter. It raises `InputError` where the client is wrong, and
    `TrainerError` or `DeadlineError` where a rank failed.
    """

    async def create(self, name: str, spec: AdapterSpec) -> int:
        """Add an adapter, and return the number of its parameters."""

    async def run(self, name: str, run: Pass) -> PassResult:
        """Run a pass with an adapter."""

    async def step(self, name: str, step: AdamStep) -> Mapping[str, float]:
        """Take an optimizer step with the gradients since the last one; return its metrics."""

    async def write(self, name: str, folder: Path) -> None:
        """Write an adapter in PEFT's format into a folder."""

    async def remove(self, name: str) -> None:
        """Forget an adapter, its gradients and its optimizer's state."""

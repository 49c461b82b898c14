"""What the tests of every transport share: a model in training, and trainers that die."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from turnwise.config import SamplingConfig
from turnwise.training.scoring import token_logprobs
from turnwise.weights.canary import canary_prompt
from turnwise.weights.stream import Sender

PROMPT = list(range(5, 45))
Named = list[tuple[str, torch.Tensor]]


class Model:
    """A model whose weights a test changes."""

    def __init__(self, path: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.original = {k: v.detach().clone() for k, v in self.model.named_parameters()}
        self.canary = canary_prompt(self.model.config.vocab_size)

    @property
    def tensors(self) -> Named:
        return list(self.model.named_parameters())

    def perturb(self, scale: float) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.original[name])
                parameter.add_(torch.randn_like(parameter), alpha=scale)

    def logprobs(self, ids: list[int], start: int) -> list[float]:
        ids_1T = torch.tensor([ids])
        mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
        mask_1T[:, start:] = True
        with torch.no_grad():
            values: list[float] = token_logprobs(
                self.model, ids_1T, mask_1T, SamplingConfig()
            ).tolist()
        return values


def send_and_die(kind: type[Sender], tensors: Named, after: int, options: dict[str, Any]) -> None:
    """A trainer's process that is killed once it has packed `after` tensors."""

    def until_death() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors[:after]
        os.kill(os.getpid(), signal.SIGKILL)

    sender = kind(tensors, **options)  # type: ignore[call-arg]
    sender.send(1, until_death())

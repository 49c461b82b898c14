"""What the tests of every transport share: a model in training, and trainers that die."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from turnwise.config import SamplingConfig
from turnwise.training.scoring import token_logprobs
from turnwise.weights.canary import canary_prompt
from turnwise.weights.outlet import make_outlet
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


class OneRank:
    """A model and its outlet in this process, as `Delivery` sees a trainer."""

    def __init__(self, path: str, transport: str = "shm", folder: Path | str = "") -> None:
        self.model = Model(path)
        self.version = 0
        self.outlet = make_outlet(transport, self.model.tensors, folder=folder, timeout=30)

    def train(self, version: int) -> None:
        self.version = version
        self.model.perturb(0.05)

    async def publish(self) -> dict[str, Any]:
        return self.outlet.publish(self.version, self.model.tensors)

    async def send(self, devices: Sequence[str]) -> None:
        await asyncio.to_thread(self.outlet.send, self.version, self.model.tensors, devices)

    async def rendezvous(self) -> tuple[str, int]:
        return self.outlet.rendezvous()

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await asyncio.to_thread(self.outlet.join, ip, port, engine_workers, timeout)


def send_and_die(kind: type[Sender], tensors: Named, after: int, options: dict[str, Any]) -> None:
    """A trainer's process that is killed once it has packed `after` tensors."""

    def until_death() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors[:after]
        os.kill(os.getpid(), signal.SIGKILL)

    sender = kind(tensors, **options)  # type: ignore[call-arg]
    sender.send(1, until_death())

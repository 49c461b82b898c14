"""What the tests of every transport share: a model in training, and trainers that die."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from tests.plain_scoring import token_logprobs
from turnwise.config import SamplingConfig
from turnwise.engine import Completion, Request
from turnwise.engine.protocol import Chunk, collect
from turnwise.training.shards import full_tensors
from turnwise.weights.collective import CollectiveSender
from turnwise.weights.delta import with_deltas
from turnwise.weights.manifest import Manifest, canary_prompt
from turnwise.weights.process_group import free_address
from turnwise.weights.transport import SenderOptions, StreamSender, make_sender

if TYPE_CHECKING:
    from turnwise.serving.worker_handle import WorkerHandle

PROMPT = list(range(5, 45))
JOIN_SECONDS = 240.0
"""For all ranks of a process group to come: one may have to start and import torch first."""
Named = list[tuple[str, torch.Tensor]]


class Run(NamedTuple):
    """Tokens `start` to `end` (exclusive) of a completion, sampled by weight `version`."""

    version: int
    start: int
    end: int


def version_runs(completion: Completion) -> list[Run]:
    """The runs of tokens that one version sampled."""
    runs, start = [], 0
    for version, tokens in groupby(completion.weight_versions):
        runs.append(Run(version, start, start := start + len(list(tokens))))
    return runs


async def completed_across(
    engine: "WorkerHandle", tokens: int, name: str, update: Callable[[], Awaitable[object]]
) -> Completion:
    """A request of so many tokens, which an update meets after its first ones if it is in time."""
    sampling = SamplingConfig(max_tokens=tokens, ignore_eos=True)
    chunks = engine.stream(Request(PROMPT, sampling, name))
    begun: list[Chunk] = []
    while sum(len(chunk.token_ids) for chunk in begun) < 8:
        begun.append(await anext(chunks))
    updating = asyncio.ensure_future(update())

    async def all_of_them() -> AsyncIterator[Chunk]:
        for chunk in begun:
            yield chunk
        async for chunk in chunks:
            yield chunk

    completion = await collect(all_of_them(), engine.name)
    await updating
    return completion


class Model:
    """A model whose weights a test changes."""

    def __init__(self, path: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.original = {k: v.detach().clone() for k, v in self.model.named_parameters()}
        self.canary = canary_prompt(self.model.config.vocab_size)

    @property
    def tensors(self) -> Named:
        return list(full_tensors(self.model))

    def perturb(self, scale: float) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.original[name])
                parameter.add_(torch.randn_like(parameter), alpha=scale)

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """Take the weights that `state` returned."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.tensors}

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """Return the tokens that are likeliest after a prompt, one after another."""
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(tokens):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

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
    """A model and its sender in this process, as `WeightSync` sees a trainer."""

    def __init__(
        self, path: str, transport: str = "shm", folder: Path | str = "", delta: bool = False
    ) -> None:
        self.model = Model(path)
        self.version = 0
        sender = make_sender(transport, self.model.tensors, folder=folder, timeout=240)
        self.sender = with_deltas(sender) if delta else sender

    def train(self, version: int) -> None:
        self.version = version
        self.model.perturb(0.05)

    async def publish(self) -> Manifest:
        return self.sender.publish(self.version, self.model.tensors)

    async def send(self, devices: Sequence[str]) -> None:
        await asyncio.to_thread(self.sender.send, self.version, self.model.tensors, devices)

    async def rendezvous(self) -> tuple[str, int]:
        return free_address()

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await asyncio.to_thread(self.sender.join, ip, port, engine_workers, timeout)


class Sparse(OneRank):
    """A trainer that changes few values in a step."""

    def train(self, version: int, part: str = "") -> None:
        """Change values of the tensors with this part in their names."""
        self.version = version
        share = 0.2 if part else 0.02
        with torch.no_grad():
            for name, parameter in self.model.model.named_parameters():
                if part in name:
                    chosen = torch.rand_like(parameter) < share
                    parameter.add_(chosen * torch.randn_like(parameter), alpha=0.3)


def open_collective(
    tensors: Named, ip: str, port: int, engine_workers: int = 1, **options: Any
) -> CollectiveSender:
    """A sender that has joined its engines, however short the `timeout` for their answers is."""
    sender = CollectiveSender(SenderOptions(tensors, **options))
    answers, sender._timeout = sender._timeout, JOIN_SECONDS
    sender.join(ip, port, engine_workers)
    sender._timeout = answers
    return sender


def send_and_die(
    open_sender: Callable[..., StreamSender], tensors: Named, after: int, options: dict[str, Any]
) -> None:
    """A trainer's process that is killed once it has packed `after` tensors."""

    def until_death() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors[:after]
        os.kill(os.getpid(), signal.SIGKILL)

    open_sender(tensors, **options).send(1, until_death())

"""A trainer of several ranks, each a Ray actor with its shards of a model."""

import asyncio
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from turnwise.core.actor import get_with_deadline
from turnwise.weights.delta import with_deltas
from turnwise.weights.manifest import Manifest, canary_prompt
from turnwise.weights.process_group import free_address
from turnwise.weights.transport import make_sender


@ray.remote(num_cpus=0)
class Rank:
    """One rank; it holds whole tensors only while they travel."""

    def __init__(self, model: Any, rank: int, world: int, meeting: str) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(meeting, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        if isinstance(model, str):
            self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            layers = self.model.model.layers
        else:
            count, width = model
            linear = [torch.nn.Linear(width, width, bias=False) for _ in range(count)]
            self.model = layers = torch.nn.Sequential(*linear)
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.version = 0
        self.rank = rank
        self.sender: Any = None

    def open(self, transport: str, folder: str, delta: bool = False) -> None:
        """Begin to use a transport, instead of the one before."""
        if self.sender is not None:
            self.sender.close()
        tensors = self.model.named_parameters()
        options: dict[str, Any] = {"buffer_bytes": 2**20, "timeout": 240}
        sender = make_sender(transport, tensors, rank=self.rank, folder=folder, **options)
        self.sender = with_deltas(sender) if delta else sender

    def tensors(self, fail_at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name if name != fail_at else "stranger", parameter.full_tensor()

    def train(self, scale: float) -> None:
        """Another version."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()
                local.add_(torch.randn_like(local), alpha=scale)

    def publish(self, fail_at: str = "") -> Manifest:
        return self.sender.publish(self.version, self.tensors(fail_at))

    def send(self, devices: list[str], fail_at: str = "") -> None:
        self.sender.send(self.version, self.tensors(fail_at), devices)

    def rendezvous(self) -> tuple[str, int]:
        return free_address()

    def join(self, *args: Any) -> None:
        self.sender.join(*args)

    def canary(self) -> tuple[list[int], list[float]]:
        """The prompt, and this model's log-probs of its tokens from the second on."""
        prompt = canary_prompt(self.model.config.vocab_size)
        ids_1T = torch.tensor([prompt])
        with torch.no_grad():
            logprobs_TV = self.model(ids_1T).logits[0, :-1].log_softmax(-1)
        self.model.reshard()  # FSDP leaves the root's own parameters whole
        return prompt, logprobs_TV.gather(-1, ids_1T.T[1:]).squeeze(-1).tolist()

    def run_loop(self, folder: str, worker: Any, transport: str, address: tuple[str, int]) -> None:
        """Train by the loop of docs/how-to/your-trainer.md, which is in a folder."""
        sys.path.insert(0, folder)
        page = importlib.import_module("my_trainer")
        batch = {"input_ids": torch.tensor([[5, 6, 7 + self.rank]] * 2)}
        batch["input_lengths"] = torch.full((2,), 3)
        training = page.train(
            *(self.model, worker, batch, lambda row: 1.0, 2, transport, address, self.rank)
        )
        asyncio.run(training)

    def growth(self, method: str, *args: Any) -> float:
        """Bytes by which a method raised this process's memory at its peak."""
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak()
        getattr(self, method)(*args)
        return _peak() - before


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


class Ranks:
    """All ranks as one, for `WeightSync`.

    Args:
        model: A model's folder, or the number and the width of square matrices.
    """

    def __init__(self, model: Any, folder: Path, world: int = 2) -> None:
        meeting = str(folder / "meeting")
        self.actors = [Rank.remote(model, rank, world, meeting) for rank in range(world)]

    async def all(self, method: str, *args: Any) -> list[Any]:
        replies = [getattr(actor, method).remote(*args) for actor in self.actors]
        return await asyncio.gather(
            *(
                get_with_deadline(reply, f"trainer rank {rank}", method, 400)
                for rank, reply in enumerate(replies)
            )
        )

    async def publish(self) -> Manifest:
        manifest: Manifest = (await self.all("publish"))[0]
        return manifest

    async def send(self, devices: Sequence[str]) -> None:
        await self.all("send", list(devices))

    async def rendezvous(self) -> tuple[str, int]:
        met: tuple[str, int] = await self.actors[0].rendezvous.remote()
        return met

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await self.all("join", ip, port, engine_workers, timeout)

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

"""Lines of large models: routing replay of a mixture of experts, and sequences over two ranks."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import NotRun, Place, close, require
from benchmarks.gpu.training import (
    configuration,
    grad_norm,
    logprobs,
    make_rank,
    samples,
    speed,
)
from turnwise.training import Sample
from turnwise.weights.process_group import LOOPBACK, open_store

RANKS = 2


def routing(place: Place) -> Iterator[str]:
    """Compute with recorded experts: packed as padded, and otherwise than the routers choose."""
    model = {"path": str(mixture(place))}
    config = configuration(place, "float32", model=model, engine={"routing_replay": True})
    rank, plain = make_rank(place, config), samples(place, place.size(16, 8))
    shape = rank._scorer.model.config
    given = [recorded(sample, shape) for sample in plain]
    free = logprobs(rank, plain, "packed")
    padded = logprobs(rank, given, "padded")
    packed = logprobs(rank, given, "packed")
    largest = float((packed - padded).abs().max())
    require(largest < 1e-3, f"a log-prob differs by {largest:.2g}, packed and padded")
    moved = float((packed - free).abs().max())
    require(moved > 10 * largest, f"other experts change log-probs by {moved:.2g} only")
    yield f"packed against padded {largest:.2g}, {speed(place, rank, given)}"


def mixture(place: Place) -> Path:
    """Return the folder of a Qwen3-MoE with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    names: tuple[str, ...] = ("hidden_size", "moe_intermediate_size", "num_hidden_layers")
    names += ("num_experts", "num_experts_per_tok", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "vocab_size")
    tiny, full = (64, 32, 2, 8, 2, 4, 2, 16, 512), (1024, 768, 4, 64, 8, 16, 8, 128, 151936)
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(**dict(zip(names, tiny if place.tiny else full, strict=True)))
    with place.device:
        model = Qwen3MoeForCausalLM(shape)
    path = place.folder / "mixture"
    model.save_pretrained(path)
    return path


def recorded(sample: Sample, shape: Any) -> Sample:
    """Return a sample with a random record of experts."""
    draw = random.Random(sample.sequence)
    experts, each = shape.num_experts, shape.num_experts_per_tok
    rows = (sample.length - 1) * shape.num_hidden_layers
    record = b"".join(bytes(draw.sample(range(experts), each)) for _ in range(rows))
    return replace(sample, experts=record)


def context(place: Place) -> Iterator[str]:
    """Train on sequences that two ranks share; the gradient is that of one rank."""
    if place.gpu and torch.cuda.device_count() < RANKS:
        raise NotRun("there is one GPU, and each rank needs its own")
    store = open_store(LOOPBACK, 0)
    address = f"{LOOPBACK}:{store.port}"
    place.model()
    ranks = [place.start(_share, place, number, address) for number in range(RANKS)]
    for rank in ranks:
        rank.join()
        require(rank.exitcode == 0, f"a rank ended with exit code {rank.exitcode}")
    expected = grad_norm(make_rank(place, configuration(place)), samples(place))
    made = [json.loads((place.folder / f"rank-{n}.json").read_text()) for n in range(RANKS)]
    for norm, _ in made:
        close("the gradient's norm", norm, expected, 0.02)
    yield f"{RANKS} ranks, {made[0][1]}"


def _share(place: Place, number: int, address: str) -> None:
    if place.gpu:
        torch.cuda.set_device(number)
        place = replace(place, device=torch.device("cuda", number))
    training = {"ranks": RANKS, "context_parallel": RANKS}
    config = configuration(place, training=training)
    rank = make_rank(place, config, rank=number, ranks=RANKS, address=address)
    norm = grad_norm(rank, samples(place))
    figure = speed(place, rank, samples(place))
    (place.folder / f"rank-{number}.json").write_text(json.dumps([norm, figure]))
    dist.destroy_process_group()

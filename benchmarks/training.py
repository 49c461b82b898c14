"""What the trainer costs, and a weight update: `python -m benchmarks.training [--quick]`.

Tokens per second of the policy (one rank: samples in, optimizer step, metrics out) against a bare
PyTorch loop over the same model, the same sequences in the same micro-batches, and the same
clipped loss, AdamW and gradient clipping; the bare loop's tensors are made beforehand, and it
measures nothing. The two take turns, so that the machine's mood cancels out; each round's data is
new. Then `benchmarks.weights`: an update by each transport against a plain copy of its bytes.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks import weights
from turnwise.config import Config, parse_config
from turnwise.training import Sample
from turnwise.training.batching import make_micro_batch, plan
from turnwise.training.policy import Policy

CPU = torch.device("cpu")
SHAPES = {
    "0.7 M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256},
    "5 M": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768},
}
SEQUENCES = {"0.7 M": 192, "5 M": 48}
VOCABULARY = 512
PROMPT = 48


def make_model(size: str, folder: Path) -> Path:
    """A random Qwen3 of about `size` parameters, saved where a policy can load it."""
    shape = SHAPES[size]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape["hidden_size"] // 4,
        tie_word_embeddings=True,
        **shape,
    )
    path = folder / size.replace(" ", "")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def make_samples(count: int) -> list[Sample]:
    """Sequences as of short conversations: a prompt, then sampled and given tokens in turn."""
    samples = []
    for number in range(count):
        length = random.randint(100, 240)
        mask = [0] * PROMPT + [int(t % 48 < 30) for t in range(length - PROMPT)]
        ids = np.random.randint(0, VOCABULARY, length).tolist()
        logprobs = [-6.2 * m for m in mask]
        versions = [m - 1 for m in mask]
        samples.append(Sample.of(ids, mask, logprobs, versions, random.choice((-1.0, 1.0)), number))
    return samples


def configuration(path: Path) -> Config:
    return parse_config(
        {
            "environment": "none:None",
            "model": {"path": str(path)},
            "data": {"path": "none"},
            "training": {"learning_rate": 1e-5, "micro_batch_tokens": 8192},
        }
    )


class Bare:
    """The loop that one writes by hand."""

    def __init__(self, path: Path, config: Config) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, weight_decay=0.0, betas=(0.9, 0.95)
        )
        self.budget = config.training.micro_batch_tokens

    def prepare(self, samples: list[Sample]) -> list[tuple[torch.Tensor, ...]]:
        (((share),),) = plan(samples, 1, 1, self.budget, packed=False)
        batches = [make_micro_batch(s, packed=False, device=CPU) for s in share.micro_batches]
        return [(b.token_ids_BT, b.mask_BT, b.engine_logprobs_N, b.advantages_N) for b in batches]

    def step(self, batches: list[tuple[torch.Tensor, ...]]) -> None:
        total = sum(len(advantages_N) for *_, advantages_N in batches)
        for ids_BT, mask_BT, old_N, advantages_N in batches:
            hidden_BTH = self.model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
            logits_NV = self.model.lm_head(hidden_BTH[:, :-1][mask_BT[:, 1:]])
            picked_N = logits_NV.gather(-1, ids_BT[mask_BT][:, None])[:, 0]
            ratio_N = torch.exp(picked_N - logits_NV.logsumexp(-1) - old_N)
            clipped_N = ratio_N.clamp(0.8, 1.28)
            loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
            (loss_N.sum() / total).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(size: str, rounds: int, folder: Path, table: Table) -> None:
    """Add a size's row."""
    path = make_model(size, folder)
    config = configuration(path)
    policy, bare = Policy(config), Bare(path, config)
    ours, theirs = [], []
    for number in range(rounds + 1):
        samples = make_samples(SEQUENCES[size])
        tokens = sum(sample.length for sample in samples)
        batches = bare.prepare(samples)
        for way in random.sample(("policy", "bare"), 2):
            started = time.perf_counter()
            if way == "bare":
                bare.step(batches)
            else:
                (shares,) = plan(samples, 1, 1, config.training.micro_batch_tokens, packed=False)
                policy.train(shares)
            if number:  # the first round warms up
                (theirs if way == "bare" else ours).append(tokens / (time.perf_counter() - started))
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    table.add_row(
        size,
        f"{statistics.median(theirs):,.0f}",
        f"{statistics.median(ours):,.0f}",
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
    )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, few rounds")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    seed = time.time_ns() % 2**32
    random.seed(seed)
    np.random.seed(seed)
    table = Table("parameters", "bare tokens/s", "policy tokens/s", "policy / bare (range)")
    with tempfile.TemporaryDirectory() as folder:
        for size in ["0.7 M"] if options.quick else SHAPES:
            measure(size, 3 if options.quick else options.rounds, Path(folder), table)
    Console().print(table)
    sys.argv = [sys.argv[0], *(["--quick"] if options.quick else [])]
    weights.main()


if __name__ == "__main__":
    main()

"""Cost of the trainer: `python -m benchmarks.training [--quick]`.

Tokens per second of the policy (one rank: samples in, optimizer step, metrics out) against a bare
PyTorch loop over the same model, the same sequences in the same micro-batches, and the same
clipped loss, AdamW and gradient clipping; the bare loop's tensors are prepared in advance, and
it computes no metrics. The two alternate, so that slow phases of the machine cancel out; each
round's data is new. The policy's micro-batches have the default layout (`training.packing: auto`).
In "groups of 8", each 8 samples begin with the same prompt, half of their tokens, which the policy
then computes only once.

TRL's trainer (`benchmarks.peers.trl_training`) gets the same groups of 8 and takes turns with the
policy; its time begins when its loop has the step's data and ends after the optimizer's step. The
rows "supervised" compare in the same way with its SFTTrainer (`benchmarks.peers.trl_sft`): the same
sequences and masks with cross-entropy, without groups.

The peak memory of the loss covers log-probs, entropies and their gradients from the last hidden
states of 2,048 tokens, with a vocabulary of 150,000. It is the rise of a process's resident set
above its size before. The counterpart computes only the log-probs, by `log_softmax` of all logits.
"""

import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.loading import in_processes, peak_of, resident
from benchmarks.models import make_model
from benchmarks.report import Claim, parser, quotients, report
from turnwise.config import Config, SamplingConfig, parse_config
from turnwise.config.supervised import supervised_config
from turnwise.training import Sample
from turnwise.training.batching import make_micro_batch, plan_micro_batches
from turnwise.training.model import score_hidden
from turnwise.training.rank import TrainerRank

CPU = torch.device("cpu")
SEQUENCES = {"0.7 M": 96, "5 M": 24}
BUDGET = 8192
"""Tokens of a micro-batch."""
VOCABULARY = 512
GROUP = 8
PROMPT, MEAN = 48, 170
LARGE_VOCABULARY, LARGE_TOKENS, WIDTH = 150_000, 2048, 64


def make_samples(count: int, group: int = 1) -> list[Sample]:
    """Make sequences like short conversations: a prompt, then sampled and given tokens in turn.

    Args:
        group: Number of sequences with the same prompt; above 1, the prompt is as long as the rest.
    """
    samples = []
    for number in range(count):
        length = random.randint(100, 240)
        size = PROMPT if group == 1 else MEAN // 2
        if number % group == 0:
            prompt = np.random.randint(0, VOCABULARY, size).tolist()
        length = length if group == 1 else size + random.randint(size // 2, size + size // 2)
        mask = [0] * size + [int(t % 48 < 30) for t in range(length - size)]
        ids = [*prompt, *np.random.randint(0, VOCABULARY, length - size).tolist()]
        logprobs = [-6.2 * m for m in mask]
        versions = [m - 1 for m in mask]
        samples.append(Sample.of(ids, mask, logprobs, versions, random.choice((-1.0, 1.0)), number))
    return samples


def configuration(path: Path, budget: int = BUDGET) -> Config:
    return parse_config(
        {
            "environment": "none:None",
            "model": {"path": str(path)},
            "data": {"path": "none"},
            "training": {"learning_rate": 1e-5, "micro_batch_tokens": budget},
        }
    )


class Bare:
    """A training loop in plain PyTorch, as written by hand."""

    def __init__(self, path: Path, budget: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, weight_decay=0.0, betas=(0.9, 0.95)
        )
        self.budget = budget

    def prepare(self, samples: list[Sample]) -> list[tuple[torch.Tensor, ...]]:
        (((share),),) = plan_micro_batches(samples, 1, 1, self.budget, "padded")
        batches = [
            make_micro_batch(s, share.trajectory_tokens, 0, "padded", device=CPU)
            for s in share.micro_batches
        ]
        return [
            (
                b.columns.token_ids_BT,
                b.columns.before_N,
                b.columns.targets_N,
                b.tokens.engine_logprobs_N,
                b.tokens.advantages_N,
            )
            for b in batches
        ]

    def step(self, batches: list[tuple[torch.Tensor, ...]]) -> None:
        total = sum(len(advantages_N) for *_, advantages_N in batches)
        for ids_BT, before_N, targets_N, old_N, advantages_N in batches:
            hidden_BTH = self.model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
            logits_NV = self.model.lm_head(hidden_BTH.flatten(0, 1)[before_N])
            picked_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
            ratio_N = torch.exp(picked_N - logits_NV.logsumexp(-1) - old_N)
            clipped_N = ratio_N.clamp(0.8, 1.28)
            loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
            (loss_N.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(
    name: str, path: Path, count: int, rounds: int, group: int = 1, budget: int = BUDGET
) -> Claim:
    """Measure the tokens per second of a model.

    Args:
        name: Its name in the claim.
        count: Sequences of a step.
        group: Number of sequences with the same prompt.
        budget: Tokens of a micro-batch.
    """
    policy, bare = TrainerRank(configuration(path, budget)), Bare(path, budget)
    ours, theirs = list[float](), list[float]()
    for number in range(rounds + 1):
        samples = make_samples(count, group)
        tokens = sum(sample.length for sample in samples)
        batches = bare.prepare(samples)
        for way in random.sample(("policy", "bare"), 2):
            started = time.perf_counter()
            if way == "bare":
                bare.step(batches)
            else:
                (shares,) = plan_micro_batches(samples, 1, 1, budget, policy.layouts)
                policy.train(shares)
            if number:  # the first round warms up
                (theirs if way == "bare" else ours).append(tokens / (time.perf_counter() - started))
    return Claim(
        f"training, {name} parameters" + (f", groups of {group}" if group > 1 else ""),
        "tokens/s",
        ours,
        "bare PyTorch loop",
        theirs,
        quotients(ours, theirs),
        at_least=1.0 if group == 1 else 1.3,
    )


def measure_trl(name: str, path: Path, count: int, rounds: int, budget: int = BUDGET) -> Claim:
    """Measure a model's tokens per second against TRL's trainer; arguments as of `measure`."""
    from benchmarks.peers import trl_training  # imports TRL, which takes seconds

    config = configuration(path, budget)
    policy = TrainerRank(config)
    steps = [make_samples(count, GROUP) for _ in range(rounds + 1)]
    ours = []

    def train(number: int) -> None:
        started = time.perf_counter()
        (shares,) = plan_micro_batches(steps[number], 1, 1, budget, policy.layouts)
        policy.train(shares)
        ours.append(time.perf_counter() - started)

    rows = trl_training.ROWS * budget // BUDGET
    rate = config.learning_rate
    theirs = trl_training.train(path, steps, rate, GROUP, train, rows)
    tokens = [sum(sample.length for sample in samples) for samples in steps]
    # The first round warms up.
    rates = [
        [count / second for count, second in zip(tokens[1:], seconds[1:], strict=True)]
        for seconds in (ours, theirs)
    ]
    return Claim(
        f"training, {name} parameters, groups of {GROUP}",
        "tokens/s",
        rates[0],
        "TRL's trainer",
        rates[1],
        quotients(*rates),
        at_least=1.5,
    )


def measure_sft(name: str, path: Path, count: int, rounds: int, budget: int = BUDGET) -> Claim:
    """Measure supervised training against TRL's SFTTrainer; for the arguments see `measure`."""
    from benchmarks.peers import trl_sft, trl_training  # imports TRL, which takes seconds

    config = supervised_config(configuration(path, budget))
    policy = TrainerRank(config)
    steps = [make_samples(count) for _ in range(rounds + 1)]
    ours = []

    def train(number: int) -> None:
        started = time.perf_counter()
        (shares,) = plan_micro_batches(steps[number], 1, 1, budget, policy.layouts)
        policy.train(shares)
        ours.append(time.perf_counter() - started)

    rows = trl_training.ROWS * budget // BUDGET
    theirs = trl_sft.train(path, steps, config.learning_rate, train, rows)
    tokens = [sum(sample.length for sample in samples) for samples in steps]
    # The first round warms up.
    rates = [
        [number / second for number, second in zip(tokens[1:], seconds[1:], strict=True)]
        for seconds in (ours, theirs)
    ]
    return Claim(
        f"supervised training, {name} parameters",
        "tokens/s",
        rates[0],
        "TRL's SFTTrainer",
        rates[1],
        quotients(*rates),
        at_least=1.2,
    )


def loss_peak(chunked: bool, tokens: int, words: int, reply: Connection) -> None:
    """Compute log-probs and their gradients; send the peak memory."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=words,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(shape)
    hidden_NH = torch.randn(tokens, WIDTH, requires_grad=True)
    targets_N = torch.randint(words, (tokens,))

    def loss() -> None:
        if chunked:
            logprobs_N = score_hidden(model, hidden_NH, targets_N, SamplingConfig())[0]
        else:
            logprobs_NV = torch.log_softmax(model.lm_head(hidden_NH), dim=-1)
            logprobs_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
        logprobs_N.sum().backward()

    reply.send(peak_of(loss, resident("VmRSS")))


def measure_loss(quick: bool) -> Claim:
    """Measure the peak memory of the loss."""
    tokens, words = (128, 20_000) if quick else (LARGE_TOKENS, LARGE_VOCABULARY)
    peaks = [
        in_processes([(loss_peak, chunked, tokens, words)])[0][0] / 2**30
        for chunked in (True, False)
    ]
    return Claim(
        f"peak memory of the loss, {tokens:,} tokens, vocabulary of {words:,}",
        "GiB",
        peaks[:1],
        "log_softmax of all logits",
        peaks[1:],
        [peaks[0] / peaks[1]],
        at_most=None if quick else 0.3,
    )


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("training", __doc__)
    made.add_argument("--rounds", type=int, default=3)
    options = made.parse_args()
    seed = time.time_ns() % 2**32
    random.seed(seed)
    np.random.seed(seed)
    sizes, rounds = (["0.7 M"], 1) if options.quick else (list(SEQUENCES), options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        models = [(size, make_model(size, Path(folder)), SEQUENCES[size]) for size in sizes]
        claims = [measure(*model, rounds, group) for model in models for group in (1, GROUP)]
        claims += [measure_trl(*model, rounds) for model in models]
        claims += [measure_sft(*model, rounds) for model in models]
    report([*claims, measure_loss(options.quick)], options)


if __name__ == "__main__":
    main()

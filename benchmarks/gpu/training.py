"""The training plane on one device: `TrainerRank` with a Qwen3 of random weights."""

import importlib.util
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.gpu.device import GIB, Place, close, require
from turnwise.config import Config, parse_config
from turnwise.training import Sample, checkpoint
from turnwise.training import model as models
from turnwise.training.attention import use_packed_attention
from turnwise.training.batching import (
    Layout,
    Layouts,
    MicroBatch,
    RankBatches,
    make_micro_batch,
    micro_batch_tokens,
    plan_micro_batches,
)
from turnwise.training.rank import TrainerRank
from turnwise.training.reports import StepReport
from turnwise.weights import disk
from turnwise.weights.process_group import LOOPBACK, open_store

Tree = dict[str, Any]
ALGORITHMS: dict[str, Tree] = {
    "grpo": {},
    "grpo with kl": {"kl": {"coef": 0.05}},
    "kl as reward": {"kl": {"coef": 0.05, "where": "reward"}},
    "gspo": {"loss": {"name": "gspo"}, "reduction": "sequence_mean"},
    "cispo": {"loss": {"name": "cispo"}},
    "dpo": {"loss": {"name": "dpo"}},
    "ppo": {"advantage": {"name": "gae"}},
    "token_tis": {"correction": {"name": "token_tis"}},
}


def configuration(place: Place, dtype: str = "bfloat16", **sections: Any) -> Config:
    """Return a configuration of the model; weights are published to files."""
    tree: Tree = {
        "environment": "none:None",
        "name": "kit",
        "output_dir": str(place.folder),
        "data": {"path": "none"},
        "model": {"path": str(place.model()), "dtype": dtype, **sections.pop("model", {})},
        "weights": {"transport": "disk", "folder": str(place.folder / "weights")},
    }
    training = {
        "learning_rate": 1e-4,
        "micro_batch_tokens": place.size(8192, 256),
        "threads": 1 if place.tiny else 0,
        "packing": "packed",
        **sections.pop("training", {}),
    }
    return parse_config({**tree, "training": training, **sections})


def make_rank(place: Place, config: Config, **among: Any) -> TrainerRank:
    folder = place.folder / "run"
    folder.mkdir(exist_ok=True)
    return TrainerRank(config, folder, **among)


def samples(place: Place, count: int = 0) -> list[Sample]:
    """Return sequences of mixed lengths, the same in every process; pairs share a prompt."""
    draw = random.Random(0)
    shortest, longest = (256, 2048) if not place.tiny else (16, 64)
    vocabulary, made = place.size(151_000, 512), list[Sample]()
    for number in range(count or place.size(32, 8)):
        length = draw.randint(shortest, longest)
        prompt = length // 3
        mask = [0] * prompt + [1] * (length - prompt)
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        if number % 2:
            common = min(prompt, made[-1].length // 3)
            ids[:common] = made[-1].token_ids_T[:common].tolist()
        logprobs = [-math.log(vocabulary) * m for m in mask]
        versions = [m - 1 for m in mask]
        advantage = 1.0 if number % 2 else -1.0
        made.append(
            Sample.of(ids, mask, logprobs, versions, advantage, number, pair_id=number // 2)
        )
    return made


def shares_of(
    rank: TrainerRank, given: Sequence[Sample], layouts: Layouts | Layout
) -> list[RankBatches]:
    tokens = micro_batch_tokens(rank._training, rank.device.type == "cuda")
    (shares,) = plan_micro_batches(given, 1, 1, tokens, layouts)
    return shares


def take_step(rank: TrainerRank, given: Sequence[Sample]) -> StepReport:
    """Take one optimizer step; require that it changed the weights."""
    version = rank.version
    report = rank.train(shares_of(rank, given, rank.layouts))
    norm = report.updates[0].grad_norm
    require(math.isfinite(norm) and norm > 0, f"the gradient's norm is {norm}")
    require(rank.version == version + 1, "the step was skipped")
    require(math.isfinite(report.updates[0].loss), f"the loss is {report.updates[0].loss}")
    return report


def grad_norm(rank: TrainerRank, given: Sequence[Sample]) -> float:
    return take_step(rank, given).updates[0].grad_norm


def speed(place: Place, rank: TrainerRank, given: Sequence[Sample]) -> str:
    return speed_of(place, partial(take_step, rank, given), given)


def speed_of(place: Place, step: Callable[[], object], given: Sequence[Sample]) -> str:
    """Take a step to warm up and some more; return tokens per second and the peak memory."""
    step()
    count = place.size(3, 1)
    times: list[float] = []
    _, peak = place.peak(lambda: times.extend(place.seconds(step) for _ in range(count)))
    tokens = sum(sample.length for sample in given)
    return f"{tokens / sorted(times)[count // 2]:,.0f} tokens/s, {peak}"


def logprobs(rank: TrainerRank, given: Sequence[Sample], layout: Layout) -> torch.Tensor:
    """Return the log-probs of all trained tokens, in the order of the sequences."""
    scored = dict(rank.forward("policy", shares_of(rank, given, layout)[0]))
    return torch.tensor([value for key in sorted(scored) for value in scored[key]])


def parameters(rank: TrainerRank) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in rank._scorer.parameters()]


def step(place: Place) -> Iterator[str]:
    """Train in bf16 with packed micro-batches."""
    rank = make_rank(place, configuration(place))
    require(rank.device == place.device, f"the rank is on {rank.device}, not {place.device}")
    require(all(p.dtype == torch.float32 for p in parameters(rank)), "a weight is not float32")
    yield speed(place, rank, samples(place))


def bare(place: Place) -> Iterator[str]:
    """Take the same steps by a loop as one writes it by hand: padded rows, all logits at once, and
    no metrics."""
    from transformers import AutoModelForCausalLM

    rank, given = make_rank(place, configuration(place)), samples(place)
    ours = speed(place, rank, given)
    (share,) = shares_of(rank, given, "padded")
    batches = [
        make_micro_batch(s, share.trajectory_tokens, 0, "padded", device=place.device)
        for s in share.micro_batches
    ]
    del rank
    if place.gpu:
        torch.cuda.empty_cache()
    model: Any = AutoModelForCausalLM.from_pretrained(place.model(), dtype=torch.float32)
    model = model.to(place.device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, betas=(0.9, 0.95))

    def step() -> None:
        for batch in batches:
            columns, advantages_N = batch.columns, batch.tokens.advantages_N
            with torch.autocast(place.device.type, dtype=torch.bfloat16):
                hidden_BTH = model.model(columns.token_ids_BT, use_cache=False).last_hidden_state
                logits_NV = model.lm_head(hidden_BTH.flatten(0, 1)[columns.before_N]).float()
            picked_N = logits_NV.gather(-1, columns.targets_N[:, None])[:, 0]
            logprobs_N = picked_N - logits_NV.logsumexp(-1)
            ratio_N = torch.exp(logprobs_N - batch.tokens.engine_logprobs_N)
            clipped_N = ratio_N.clamp(0.8, 1.28)
            loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
            (loss_N.sum() / share.total_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield f"{ours}; bare {speed_of(place, step, given)}"


def fsdp2(place: Place) -> Iterator[str]:
    """Train as `step` does, sharded over a group of one; and publish the gathered weights."""
    config, given = configuration(place), samples(place)
    plain = make_rank(place, config)
    expected = grad_norm(plain, given)
    del plain
    if place.gpu:
        torch.cuda.empty_cache()
    store = open_store(LOOPBACK, 0)
    rank = make_rank(place, config, address=f"{LOOPBACK}:{store.port}")
    backend = "nccl" if place.gpu else dist.get_backend()
    require(all(isinstance(p, DTensor) for p in parameters(rank)), "a weight is not sharded")
    close("the gradient's norm", grad_norm(rank, given), expected, 0.02)
    figure = f"{speed(place, rank, given)}, {backend}"
    manifest = rank.publish()
    whole = dict(rank._tensors())
    for name, tensor in disk.load(manifest):
        same = torch.equal(tensor, whole[name].cpu().to(tensor.dtype))
        require(same, f"{name} was published with other values")
    dist.destroy_process_group()
    yield figure


def packing(place: Place) -> Iterator[str]:
    """Compare the log-probs of packed rows, and of those with shared columns, with padded ones."""
    rank = make_rank(place, configuration(place, "float32"))
    given = samples(place, place.size(8, 8))
    padded = logprobs(rank, given, "padded")
    others = [logprobs(rank, given, layout) for layout in ("packed", "shared")]
    largest = max(float((other - padded).abs().max()) for other in others)
    require(largest < 1e-3, f"a log-prob differs by {largest:.2g}")
    yield f"largest difference {largest:.2g}"


def precision(place: Place) -> Iterator[str]:
    """Compare the log-probs of forward passes in bf16 with those in float32."""
    given, made = samples(place, place.size(8, 8)), []
    for dtype in ("float32", "bfloat16"):
        rank = make_rank(place, configuration(place, dtype))
        made.append(logprobs(rank, given, "packed"))
        scores = rank._models.score("policy", _batch(rank, given).columns)
        require(scores[0].dtype == torch.float32, "log-probs are not float32")
        del rank, scores
    difference = (made[0] - made[1]).abs()
    require(bool(torch.isfinite(difference).all()), "a log-prob is not finite")
    mean, largest = float(difference.mean()), float(difference.max())
    require(mean < 0.02 and largest < 0.2, f"off by {mean:.2g} on average, {largest:.2g} at most")
    yield f"mean {mean:.2g}, largest {largest:.2g}"


def rounding(place: Place) -> Iterator[str]:
    """Train without float32 copies of the weights."""
    rank = make_rank(place, configuration(place, training={"weights_dtype": "bfloat16"}))
    require(all(p.dtype == torch.bfloat16 for p in parameters(rank)), "a weight is not bfloat16")
    yield speed(place, rank, samples(place))


def attention(place: Place) -> Iterator[str]:
    """Compare the log-probs of Transformers' attention kernels with those of torch's."""
    rank, given = make_rank(place, configuration(place)), samples(place, 8)
    model, expected = rank._scorer.get_submodule("model"), logprobs(rank, given, "packed")
    names = ["flex_attention"]
    if place.gpu and importlib.util.find_spec("flash_attn") is not None:
        names.append("flash_attention_2")
    figures = []
    for name in names:
        use_packed_attention(model, name)
        difference = (logprobs(rank, given, "packed") - expected).abs()
        mean, largest = float(difference.mean()), float(difference.max())
        require(mean < 0.02 and largest < 0.2, f"{name}: mean {mean:.2g}, largest {largest:.2g}")
        figures.append(f"{name}: mean {mean:.2g}, largest {largest:.2g}")
    for number, name in enumerate(names if place.gpu else ()):  # a CPU has no gradients of it
        use_packed_attention(model, name)
        figures[number] += f", {speed(place, rank, given)}"
    yield "; ".join(figures)


def lora(place: Place) -> Iterator[str]:
    """Train adapters alone."""
    rank = make_rank(place, configuration(place, model={"lora": {"rank": 16}}))
    before = {n: p.detach().clone() for n, p in rank._scorer.named_parameters()}
    figure = speed(place, rank, samples(place))
    changed = {n for n, p in rank._scorer.named_parameters() if not torch.equal(p, before[n])}
    require(changed, "no adapter has changed")
    require(all(".lora_" in name for name in changed), "a weight of the base model has changed")
    learning = sum(p.numel() for p in rank._scorer.parameters() if p.requires_grad)
    yield f"{figure}, {learning / 1e6:.2f} M parameters learn"


def checkpointing(place: Place) -> Iterator[str]:
    """Recompute activations instead of storing them."""
    given, norms, peaks = samples(place), [], []
    for kept in (True, False):
        config = configuration(place, training={"activation_checkpointing": not kept})
        rank = make_rank(place, config)
        norms.append(grad_norm(rank, given))
        peaks.append(place.peak(partial(take_step, rank, given)))
        seconds = place.seconds(partial(take_step, rank, given))
        del rank
    close("the gradient's norm", norms[1], norms[0], 0.02)
    (kept_gib, kept_text), (gib, text) = peaks
    require(not place.gpu or gib < kept_gib, f"{text}, and {kept_text} without it")
    tokens = sum(sample.length for sample in given)
    yield f"{tokens / seconds:,.0f} tokens/s, {text}; without it {kept_text}"


def chunks(place: Place) -> Iterator[str]:
    """Compare the loss in chunks of logits with the loss over all logits at once."""
    given = samples(place)[: place.size(4, 2)]
    training = {"micro_batch_tokens": place.size(8192, 256), "activation_checkpointing": True}
    rank = make_rank(place, configuration(place, training=training))
    batch = _batch(rank, given)
    made = []
    for elements in (place.size(models.CHUNK_ELEMENTS, 16 * 512), 2**62):
        models.CHUNK_ELEMENTS = elements
        gib, text = place.peak(
            lambda: rank._models.score("policy", batch.columns)[0].sum().backward()
        )
        norms = [p.grad.float().norm() for p in rank._scorer.parameters() if p.grad is not None]
        made.append((float(torch.stack(norms).norm()), gib, text))
        rank._learners["policy"].optimizer.zero_grad()
    (norm, gib, text), (expected, whole_gib, whole_text) = made
    close("the gradient's norm", norm, expected, 0.01)
    require(not place.gpu or gib < whole_gib, f"{text}, and {whole_text} at once")
    logits = 4 * len(batch.tokens.advantages_N) * rank._scorer.model.config.vocab_size / GIB
    yield f"{text}; at once {whole_text}, {logits:.3g} GiB of logits"


def _batch(rank: TrainerRank, given: Sequence[Sample]) -> MicroBatch:
    (share,) = shares_of(rank, given, "packed")
    return make_micro_batch(
        share.micro_batches[0], share.trajectory_tokens, 0, "packed", device=rank.device
    )


def offload(place: Place) -> Iterator[str]:
    """Put weights and moments away, and bring them back."""
    config = configuration(place, training={"offload": ["params"], "colocated": True})
    rank, given = make_rank(place, config), samples(place)
    take_step(rank, given)
    before = [p.clone().cpu() for p in (*parameters(rank), *rank._moments())]
    kinds = ("params", "optimizer")
    if place.gpu:
        torch.cuda.empty_cache()
    used = place.used()
    away = 0

    def put_away() -> None:
        nonlocal away
        away = rank._offload.put_away(kinds)

    out = place.seconds(put_away)
    freed = used - place.used()
    held = sum(t.nbytes for t in before)
    require(away >= 0.99 * held, f"{away} bytes are away, of {held}")
    require(not place.gpu or freed > 0.9 * away, f"{freed} of {away} bytes are free on the device")
    back = place.seconds(lambda: rank._offload.bring_back(kinds))
    after = (*parameters(rank), *rank._moments())
    same = all(torch.equal(a, b.cpu()) for a, b in zip(before, after, strict=True))
    require(same, "a value changed while it was away")
    take_step(rank, given)
    figure = f"{away / GIB:.3g} GiB away in {out:.2f} s, back in {back:.2f} s"
    yield f"{figure}; {freed / GIB:.3g} GiB free again on the device" if place.gpu else figure


def deterministic(place: Place) -> Iterator[str]:
    """Repeat steps bit for bit: in a new rank, and in one that loads a checkpoint."""
    sampling = {"top_p": 0.9, "top_k": 50, "temperature": 0.7}
    config = configuration(place, deterministic=True, sampling=sampling)
    given, folder = samples(place)[: place.size(8, 8)], place.folder / "checkpoint"
    states: list[list[torch.Tensor]] = []
    for run in range(2):
        rank = make_rank(place, config)
        take_step(rank, given)
        if not run:
            rank.save(checkpoint.begin(folder))
            checkpoint.commit(folder)
        take_step(rank, given)
        states.append([p.cpu() for p in parameters(rank)])
    _require_equal(states[0], states[1], "a repeated run")
    yield "two steps, top-k and top-p"
    resumed = make_rank(place, config)
    resumed.load(folder)
    take_step(resumed, given)
    _require_equal(states[0], [p.cpu() for p in parameters(resumed)], "the resumed run")
    yield "one step, checkpoint, one step"


def _require_equal(one: list[torch.Tensor], other: list[torch.Tensor], run: str) -> None:
    differ = sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    require(not differ, f"{differ} of {len(one)} tensors differ in {run}")


def algorithms(place: Place) -> Iterator[str]:
    """Compare each algorithm's gradient of a tiny model with that on the CPU."""
    tiny = replace(place, tiny=True, shared=place.folder)
    norms = tiny.folder / "norms.json"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    process = place.start(_norms_on_a_cpu, tiny, norms)
    del os.environ["CUDA_VISIBLE_DEVICES"]
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    process.join()
    require(process.exitcode == 0, f"the CPU's process ended with exit code {process.exitcode}")
    expected = json.loads(norms.read_text())
    for name, norm in _norms(tiny).items():
        close(f"{name}: the gradient's norm", norm, expected[name], 2e-3)
    yield ", ".join(ALGORITHMS)


def _norms_on_a_cpu(place: Place, path: Path) -> None:
    torch.set_num_threads(1)
    path.write_text(json.dumps(_norms(replace(place, device=torch.device("cpu")))))


def _norms(place: Place) -> dict[str, float]:
    given = samples(place)
    return {
        name: grad_norm(make_rank(place, configuration(place, "float32", algorithm=tree)), given)
        for name, tree in ALGORITHMS.items()
    }

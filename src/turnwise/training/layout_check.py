"""Check before training that the trainer's log-probs in the run's layout are the model's own.

A few random sequences are scored one by one, with the attention that Transformers chose, and the
log-probs of one sequence are compared with the model's own logits. Then all sequences are scored in
the layout of the run. In any architecture, three errors show as a difference: states that leak into
the next sequence of a row, masks that ignore where sequences begin, and sliding windows that are
not applied.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from turnwise.chat.vision import ModelImages
from turnwise.config import EngineConfig, ModelConfig, SamplingConfig, TrainingConfig
from turnwise.errors import InputError, describe_error
from turnwise.training.attention import (
    CONTEXT_KEY,
    attention_costs,
    is_packed,
    set_packed,
    use_packed_attention,
)
from turnwise.training.batching import Layout, Layouts, make_micro_batch
from turnwise.training.context import ContextGroup
from turnwise.training.loading import dtype_of, load_model
from turnwise.training.lora import ModelName
from turnwise.training.model import Critic, Models, Scorer
from turnwise.training.sample import Sample
from turnwise.training.vision import TYPES, patches_per_token, probe, sees
from turnwise.trajectory import Prompt

_PLAIN = SamplingConfig()
_LENGTHS = (25, 22, 17)
"""Minimum lengths of the sequences in tokens; the first two sequences have a common prefix. In a
packed row, the sequences begin at odd columns, where no chunk of a model begins."""
_COMMON = 11  # tokens of the common prefix
_LONGEST = 16384
_BLOCK = 8
"""Number of tokens over which differences are averaged. If tokens see a sequence that is not their
own, all tokens of a block differ; if rounding changes a router's choice, only single tokens do."""
_ROUNDING = {torch.float32: (3e-5, 0.02), torch.bfloat16: (0.03, 0.25)}
"""Lower and upper limit of the largest difference that counts as rounding, relative to the spread
of the log-probs. In 100 architectures, tokens that saw another sequence differed by at least 0.29
(less if weights are as small as before training), while rounding made differences of 1e-6 in
float32 and 0.03 in bfloat16. Between the limits, the largest difference is `_TIMES` the difference
that a change of the batch shape makes: sums are then rounded in a different order, and the routers
of a mixture of experts amplify this."""
_TIMES = 3
_MIN_SPREAD = 1e-3
"""Differences are divided by the standard deviation of the log-probs, but by at least this number,
in nats. An untrained model gives all tokens nearly the same log-prob, so its standard deviation may
be smaller."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between computed log-probs and the expected ones."""

    nats: float
    """Largest mean difference over a block of tokens; inf if log-probs are not finite, or cannot be
    computed."""
    relative: float  # `nats` relative to the spread of the model's log-probs
    rounding: float  # maximum of `relative` that counts as rounding
    error: str = ""  # the reason why log-probs cannot be computed

    @property
    def small(self) -> bool:
        """Whether the difference counts as rounding."""
        return self.relative <= self.rounding

    def __str__(self) -> str:
        if isfinite(self.nats):
            return f"{self.nats:.2g} nats"
        return f"cannot be computed: {self.error}" if self.error else "not finite"


class ModelCheck:
    """The check of one model. All ranks make the same calls and get the same results."""

    @torch.no_grad()
    def __init__(
        self, models: Models, module: Scorer | Critic, max_length: int, images: bool = False
    ) -> None:
        self._models, self._module = models, module
        self._model = _checked(module)
        self.kind: str = self._model.config.model_type
        self._samples = samples = _samples(self._model.config, max_length)
        if images:
            assert module.images is not None, "a model without a processor"
            self._samples = samples = _with_images(samples, module.images)
        self._rounding, largest = _ROUNDING[module.dtype]
        packed = is_packed(self._model)
        # Score the samples one by one, on each rank alone, with the attention that Transformers
        # chose.
        self._group: ContextGroup | None = None
        set_packed(self._model, False)
        self._alone, why = _attempt(lambda: [self._values([s], "padded")[0] for s in samples])
        # The strict bound applies here, because both batches have the same shape.
        by_logits = _attempt(self._by_logits) if self._alone else ([], why)
        self.own = self._difference(by_logits, self._alone[-1:])
        """Difference between one sequence's log-probs and those from the model's own logits."""
        # Score the samples again, followed by tokens that are not scored. The difference that this
        # change of the batch shape makes widens the bound from here on.
        followed = [_followed(sample) for sample in samples[1:]]
        found = _attempt(lambda: self._values(followed, "padded"))
        again = self._difference(found, self._alone[1:])
        self._rounding = max(self._rounding, min(_TIMES * again.relative, largest))
        set_packed(self._model, packed)
        self._group = models.group

    @torch.no_grad()
    def compare_and_choose_attention(self, layout: Layout) -> Difference:
        """Return the difference between log-probs in a layout and log-probs computed one by one. If
        the trainer's attention causes a difference, switch the model back to its own attention."""
        found = self._compared(layout)
        if found.small or not is_packed(self._model):
            return found
        if layout != "padded" and self._compared("padded").small:
            return found
        set_packed(self._model, False)
        return self._compared(layout)

    def _compared(self, layout: Layout) -> Difference:
        parts = [self._samples]
        if layout == "padded":  # the first sample may be long, and pads all rows to its length
            parts = [self._samples[:1], self._samples[1:]]
        found = _attempt(lambda: [v for part in parts for v in self._values(part, layout)])
        return self._difference(found, self._alone)

    def _values(self, samples: Sequence[Sample], layout: Layout) -> list[torch.Tensor]:
        """Return each sample's log-probs, or a value model's estimates, from one micro-batch."""
        tokens = {sample.trajectory: sample.trained for sample in samples}
        batch = make_micro_batch(samples, tokens, 0, layout, self._models.device, self._group)
        if isinstance(self._module, Critic):
            # Use a head that distinguishes hidden states, as a new head predicts 0 for all of them.
            weight = self._module.head.weight.detach()
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            before = own.clone()
            own.copy_(torch.arange(own.numel(), device=own.device).cos().view_as(own))
            try:
                values_N = self._models.estimate(batch.columns)
            finally:
                own.copy_(before)
        else:
            role: ModelName = "policy" if self._module is self._models.policy else "reference"
            values_N, _ = self._models.score(role, batch.columns, _PLAIN)
        return list(torch.split(values_N.float().cpu(), [sample.trained for sample in samples]))

    def _by_logits(self) -> list[torch.Tensor]:
        """Return the last sample's log-probs from the model's own logits."""
        if isinstance(self._module, Critic):
            return self._alone[-1:]  # it has no logits
        sample, device = self._samples[-1], self._models.device
        ids_1T = torch.from_numpy(sample.token_ids_T.astype(np.int64))[None].to(device)
        given: dict[str, torch.Tensor] = {}
        if sample.images and self._module.images is not None:
            made = self._module.images.processed(sample.images[0].image).tensors
            types_1T = (ids_1T == self._model.config.image_token_id).long()
            taken = inspect.signature(self._model.forward).parameters
            given = dict.fromkeys(TYPES, types_1T) | {n: t.to(device) for n, t in made.items()}
            given = {name: tensor for name, tensor in given.items() if name in taken}
        with self._models.computing(self._module):
            if isinstance(self._module, FSDPModule):
                self._module.unshard()  # gather the head's weights; layers gather their own
            logits = self._model(input_ids=ids_1T, use_cache=False, **given).logits
        logprobs_T = logits[0, :-1].float().log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]
        return [logprobs_T.cpu()[torch.from_numpy(sample.response_mask_T[1:])]]

    def _difference(
        self, found: tuple[list[torch.Tensor], str], expected: Sequence[torch.Tensor]
    ) -> Difference:
        """Return the largest difference over all samples and ranks."""
        values, error = found
        nats = inf if error else 0.0
        for ours_T, theirs_T in zip(values, expected, strict=False):
            # If a model gives a token the probability 0, both log-probs are -inf.
            apart_T = torch.where(ours_T == theirs_T, 0.0, (ours_T - theirs_T).abs())
            blocks = apart_T.tensor_split(max(1, len(apart_T) // _BLOCK))
            nats = max(nats, *(float(block.mean().nan_to_num(inf, inf)) for block in blocks))
        alone = torch.cat(self._alone) if self._alone else torch.zeros(0)
        finite = alone[alone.isfinite()]
        spread = float(finite.std()) if len(finite) > 1 else 0.0
        worst_2 = torch.tensor([nats, nats / max(spread, _MIN_SPREAD)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(worst_2, dist.ReduceOp.MAX)  # so that all ranks decide the same
        nats, relative = worst_2.tolist()
        return Difference(nats, relative, self._rounding, error)


def possible_layouts(training: TrainingConfig, *, replays_routing: bool) -> tuple[Layout, ...]:
    """Return the layouts that a run may have if they change no log-probs: the configured layout, or
    all layouts that the run's other settings allow."""
    if training.packing != "auto":
        return (training.packing,)
    refused = training.context_parallel > 1 or training.attention != "auto"
    refused |= replays_routing
    return ("padded", "packed") if refused else ("padded", "packed", "shared")


def agreed_layouts(
    checks: Sequence[ModelCheck], training: TrainingConfig, possible: Sequence[Layout]
) -> tuple[tuple[Layout, ...], list[str]]:
    """Return the possible layouts that change no model's log-probs, and a sentence about each of
    the remaining layouts.

    Raises:
        InputError: if no layout is left, or if log-probs differ from a model's own logits.
    """
    for check in checks:
        if not check.own.small:
            raise InputError(
                f"a {check.kind} model cannot be trained: the trainer's log-probs are not those of "
                f"the model's own logits ({check.own})"
            )
    # Keep the order: the check of the first layout, if padded, decides a model's attention.
    wrong = {layout: _wrong(checks, layout) for layout in possible}
    agreed = tuple(layout for layout in possible if not wrong[layout])
    layout, why = next(iter(wrong.items()))
    if not agreed and training.context_parallel > 1:
        raise InputError(f"{CONTEXT_KEY}: ranks that share sequences change {why}: set it to 1")
    if not agreed and layout != "padded":
        raise InputError(f"training.packing: {layout} changes {why}: set it to padded")
    if not agreed:
        raise InputError(f"padded micro-batches change {why}, which cannot be trained then")
    torch.cuda.empty_cache()  # an engine in this process may need the memory
    return agreed, [f"{layout} ones would change {why}" for layout, why in wrong.items() if why]


def check_run(
    models: Models, model: ModelConfig, training: TrainingConfig, engine: EngineConfig
) -> tuple[Layouts, str, str]:
    """Check all models of a run, with images if they can have any.

    Returns:
        The layouts that change no log-probs, of text and, if samples can have images, of samples
        with images; a sentence about the layouts; and why no sample may have an image, or "".
    """
    patches, left = 0.0, list[str]()
    possible = possible_layouts(training, replays_routing=engine.routing_replay)
    length, why = model.max_length, _without_images(models, model.path, engine, training)
    try:  # images first, because their check may change the attention for the checks that follow
        if not why and (reader := models.policy.images) is not None:
            patches = patches_per_token(models.policy.model, reader.processed(probe(0)))
            checks = [ModelCheck(models, module, length, True) for module in models.modules()]
            possible, left = agreed_layouts(checks, training, possible)
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # not the model's fault
    except Exception as error:  # raised by code that supports only some models with images
        for module in models.modules():  # undo what these checks changed
            use_packed_attention(_checked(module), training.attention)
        why = str(error) if isinstance(error, InputError) else describe_error(error)
    checks = [ModelCheck(models, module, length) for module in models.modules()]
    agreed, more = agreed_layouts(checks, training, possible)
    costs = attention_costs(_checked(models.policy), models.device)
    which = ", whichever costs least" if len(agreed) > 1 else ""
    said = "; ".join([f"micro-batches are {' or '.join(agreed)}{which}", *left, *more])
    return Layouts(agreed, patches, costs), said, why and f"a sample has an image: {why}"


def _without_images(
    models: Models, path: str, engine: EngineConfig, training: TrainingConfig
) -> str:
    """Return the reason why no sample of a run may have an image, or ""."""
    if not sees(models.policy.get_submodule("model").config):
        return f"model.path: {path} is trained as a model of text alone"
    if not engine.images_per_prompt:
        return "engine.images_per_prompt is 0"
    if training.context_parallel > 1:
        return f"{CONTEXT_KEY}: ranks that share sequences cannot read images: set it to 1"
    return ""


def _checked(module: Scorer | Critic) -> PreTrainedModel:
    model: PreTrainedModel = module.model if isinstance(module, Scorer) else module.backbone
    return model


def _wrong(checks: Sequence[ModelCheck], layout: Layout) -> str:
    """Return which model's log-probs a layout changes the most, and by how much; "" if the layout
    changes no log-probs."""
    found = [(check.kind, check.compare_and_choose_attention(layout)) for check in checks]
    kind, worst = max(found, key=lambda each: (not each[1].small, each[1].nats))
    return "" if worst.small else f"the log-probs of a {kind} model ({worst})"


def check_policy(
    model: ModelConfig, training: TrainingConfig, sampling: SamplingConfig, device: torch.device
) -> ModelCheck:
    """Load only the policy, without an optimizer or other models, and return its check."""
    dtype = dtype_of(model)
    scorer = Scorer(load_model(model, training, dtype=dtype), sampling, dtype)
    models = Models(scorer.to(device), None, None, device)
    return ModelCheck(models, models.policy, model.max_length)


def _samples(shape: PretrainedConfig, max_length: int) -> list[Sample]:
    """Return three sequences of random tokens; the first is about twice as long as the longest
    attention window."""
    text = shape.get_text_config()
    values = text.to_dict()
    positions = getattr(text, "max_position_embeddings", None) or max_length
    limit = min(max_length, positions, _LONGEST)
    windows = [
        number
        for name, number in values.items()  # sliding_window, attention_chunk_size, window_size ...
        if ("window" in name or "chunk" in name) and isinstance(number, int) and number < limit
    ]
    first = max(_LENGTHS[0], min(2 * max(windows, default=0) - 1, limit))
    special = {
        number
        for name, number in (shape.to_dict() | values).items()  # images, for instance
        if name.endswith(("_token_id", "_token_index")) and isinstance(number, int)
    }
    ordinary = np.setdiff1d(np.arange(text.vocab_size), [*special])
    generator = np.random.default_rng(0)
    rows = [generator.choice(ordinary, length) for length in (first, *_LENGTHS[1:])]
    rows[1][:_COMMON] = rows[0][:_COMMON]
    return [Sample.to_score(row.tolist(), [1] * len(row), n) for n, row in enumerate(rows)]


def _with_images(samples: Sequence[Sample], images: ModelImages) -> list[Sample]:
    """Return the last two samples, each with an image after the common prefix, and a copy of the
    last sample in which only the image's pixels differ."""
    text, others = samples[0].ids[:_COMMON], samples[1:]
    made = []
    for number, (sample, picture) in enumerate(zip((*others, others[-1]), (0, 0, 1), strict=True)):
        rest, own = sample.ids[_COMMON:], images.ids_of(probe(picture))
        ids = Prompt.joined(text, own, rest)
        scored = [1] * len(text) + [0] * len(own) + [1] * len(rest)
        made.append(Sample.to_score(ids, scored, number))
    return made


def _followed(sample: Sample) -> Sample:
    """Return a sample with additional tokens at its end that are not scored."""
    more, mask = sample.ids.ids[:_BLOCK], [1, *sample.response_mask_T.tolist()[1:]]
    return Sample.to_score(sample.ids + more, mask + [0] * len(more), sample.sequence)


def _attempt(compute: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], str]:
    """Return a call's result and "", or an empty list and the reason why the call failed."""
    try:
        return compute(), ""
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # not the model's fault
    except Exception as error:
        return [], str(error) if isinstance(error, InputError) else describe_error(error)

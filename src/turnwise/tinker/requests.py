"""Tinker's requests in JSON, and their checks.

Unknown keys are ignored, because the protocol grows. A mistake raises an `InputError` that uses the
protocol's names.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from turnwise.config import SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Request, Route, Sampling
from turnwise.engine.vllm_requests import sampling_params
from turnwise.errors import InputError
from turnwise.internals.pydantic import bound
from turnwise.serving.openai.errors import errors_of, explain
from turnwise.tinker.images import ImageChunk
from turnwise.tinker.losses import TinkerLoss, loss_named
from turnwise.tinker.wire import MAX_VALUES, Datum, JoinChunks, TrainingRequest
from turnwise.training.reports import OptimSettings
from turnwise.trajectory import Prompt

_Id = Annotated[str, Field(max_length=300)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Tokens = Annotated[list[int], Field(max_length=2**21, fail_fast=True)]
_Seconds = Annotated[int, Field(ge=3600, le=3653 * 86_400)] | None
"""Seconds for which a checkpoint is kept, from 1 hour to 10 years; None keeps it for ever."""
_MAX_STOPS = 1000
_LONG_ANSWER = 2**14  # maximum tokens per answer in the estimate of a request's size
_ID_BYTES = 5  # per id of a prompt, in a message to an engine
_TOKEN_BYTES, _LIKELY_BYTES = 80, 130  # per sampled token, and per alternative token
MAX_SAMPLES = 4096
"""Largest `num_samples` of one request."""
TURN_TOKENS = 32_768
"""Tokens of one client that the trainer computes before it turns to the next client."""


class BaseRequest(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="allow")
    body_bytes: int = 0
    """Length of the request's body."""
    absent: ClassVar[Mapping[str, str]] = {}
    """Keys that this server does not support, each with the reason."""

    def check(self) -> None:
        """Raise an `InputError` if the request needs something that this server does not have."""
        asked = self.model_extra or {}
        for key, why in self.absent.items():
            if asked.get(key):
                raise InputError(f"{key}: {why}")
        kind = asked.get("optimizer_config") or "adamw"
        kind = kind.get("type", "adamw") if isinstance(kind, dict) else kind
        if kind != "adamw":
            raise InputError(f"optimizer {str(kind)[:80]!r}: this server has adamw")


_Kind = TypeVar("_Kind", bound=BaseRequest)


def parsed(kind: type[_Kind], tree: JsonObject) -> _Kind:
    """Parse a request from plain values; raise InputError that names the first wrong key."""
    try:
        read: _Kind = _reader(kind).validate_python(tree)
    except ValidationError as error:
        raise InputError(explain(errors_of(error), tree)[0]) from error
    return read


@cache
def _reader(kind: type[_Kind]) -> TypeAdapter[_Kind]:
    reader = TypeAdapter(kind)
    bound(reader)
    return reader


class OfSession(BaseRequest):
    session_id: _Id


class Named(BaseRequest):
    """A request about one named thing: a sampler, a request or a checkpoint."""

    sampler_id: _Id = ""
    request_id: _Id = ""
    tinker_path: str = ""
    ttl_seconds: _Seconds = None
    base_url: str = ""
    """URL of the server, as its client writes it."""


class LoraSpec(BaseRequest):
    """A client's settings for a new adapter. The output head is never trained."""

    model_config = ConfigDict(extra="ignore")
    rank: int
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OfNewModel(OfSession):
    model_seq_id: _Count


class CreateModel(OfNewModel):
    base_model: str
    user_metadata: dict[str, str] | None = None
    lora_config: LoraSpec | None = None


class GetInfo(BaseRequest):
    model_id: _Id


class OfModel(GetInfo):
    seq_id: Annotated[int, Field(ge=1, lt=2**31)]


class AdamStep(BaseRequest):
    """The settings for one step of AdamW; a `grad_clip_norm` of 0 does not clip."""

    type: Literal["adamw"] = "adamw"
    learning_rate: Annotated[_Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[_Finite, Field(gt=0)] = 1e-12
    weight_decay: Annotated[_Finite, Field(ge=0)] = 0.0
    grad_clip_norm: _Finite = 0.0

    @property
    def settings(self) -> OptimSettings:
        limit = self.grad_clip_norm if self.grad_clip_norm > 0 else math.inf
        betas = self.beta1, self.beta2
        return OptimSettings(self.learning_rate, betas, self.eps, self.weight_decay, limit)


class OptimStep(OfModel):
    adam_params: AdamStep = Field(validation_alias=AliasChoices("adam_params", "optimizer_params"))


class Saving(BaseRequest):
    ttl_seconds: _Seconds = None
    user_metadata: dict[str, str] | None = None
    overwrite: bool = False


class SaveForSampler(Saving):
    path: str | None = None
    sampling_session_seq_id: _Count | None = None


class SaveWeights(Saving):
    absent = {
        "age_encryption_recipients": "this server encrypts no files; download those that "
        "save_weights_external saved without it"
    }
    path: str


class LoadWeights(BaseRequest):
    absent = {
        "weights_access_token": "this server has none, and its checkpoints belong to the key that "
        "saved them"
    }
    path: str
    optimizer: bool = False
    base_model: str | None = None
    user_metadata: dict[str, str] | None = None


class CopyWeights(BaseRequest):
    ttl_seconds: _Seconds = None
    source_path: str
    idempotency_key: _Id = ""
    """The header x-idempotency-key: requests with the same key make one copy."""


class Page(BaseRequest):
    """A request for one page of a list, of all runs or of one run."""

    run: str = "*"
    limit: Annotated[int, Field(ge=0)] = 100
    offset: _Count = 0


class CreateSamplingSession(OfSession):
    sampling_session_seq_id: _Count
    base_model: str | None = None
    model_path: str | None = None


class _Chunk(BaseModel):
    type: str = "encoded_text"
    tokens: _Tokens = []
    data: str = ""
    expected_tokens: _Count | None = None


class _ModelInput(BaseModel):
    chunks: Annotated[list[_Chunk], Field(max_length=4096, fail_fast=True)]


class _Sampling(BaseModel):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | _Tokens | None = None
    temperature: Annotated[_Finite, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleRequest(BaseRequest):
    """A request for samples of one prompt."""

    absent = {
        "prompt_alt_tokens_k": "vLLM draws no tokens at positions of the prompt",
        "target_prompt_logprobs": "engines score the prompt's own tokens and the likeliest ones; a "
        "training client's forward(cross_entropy) scores any, [N, K] of them",
    }
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: _ModelInput
    sampling_params: _Sampling
    sampling_session_id: _Id
    seq_id: _Count
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    @property
    def size(self) -> int:
        """Estimated bytes of the request and of its results, as Python objects."""
        longest = min(self.sampling_params.max_tokens or _LONG_ANSWER, _LONG_ANSWER)
        rows, count = self.num_samples * longest, self.topk_sample_logprobs
        prompt = sum(len(each.tokens) for each in self.prompt.chunks)
        copies = _ID_BYTES * prompt * self.num_samples  # one in each message to an engine
        likeliest = _LIKELY_BYTES * (rows * count + prompt * self.topk_prompt_logprobs)
        return 8 * self.body_bytes + copies + _TOKEN_BYTES * rows + likeliest

    def tokens(self, vocabulary: int, join_chunks: JoinChunks) -> Prompt:
        """Return the prompt, with checked ids."""
        if odd := {c.type for c in self.prompt.chunks} - {"encoded_text", "image"}:
            kind = min(odd)[:80]
            raise InputError(f"prompt: this server reads tokens and images, not {kind!r}")
        ids = join_chunks(
            [
                ImageChunk(c.data, c.expected_tokens or 0) if c.type == "image" else c.tokens
                for c in self.prompt.chunks
            ],
            "prompt",
        )
        if not len(ids):
            raise InputError("prompt: it has no tokens")
        if not 0 <= ids.ids.min() <= ids.ids.max() < vocabulary:
            raise InputError(f"prompt: ids must be from 0 to {vocabulary - 1:,}")
        return ids

    def scored(self, length: int) -> int:
        """Return the number of tokens at the end of a prompt whose log-probs are asked for."""
        if not (self.prompt_logprobs or self.topk_prompt_logprobs):
            return 0
        last = self.prompt_logprobs_last_n
        if last is not None and not 1 <= last < length:
            raise InputError(f"prompt_logprobs_last_n: {last} is not from 1 to {length - 1}")
        return last or length

    def requests(self, ids: Prompt, name: str, route: Route, longest: int) -> list[Request]:
        """Return the engine request of each sample of a prompt, in a context of `longest` tokens.
        Only the first request also asks for the prompt's log-probs."""
        self.check()
        first = self._sampling(len(ids), longest)
        other = first.model_copy(update={"prompt_logprobs": False})
        return [
            Request(
                ids,
                self._with_likeliest(other if number else first, number),
                f"{name}:{number}",
                self._seed(number),
                route,
            )
            for number in range(self.num_samples)
        ]

    def _sampling(self, length: int, longest: int) -> SamplingConfig:
        if length >= longest:
            raise InputError(f"prompt: {length:,} tokens leave no room for another in {longest:,}")
        # Leave room for one more token, because an engine samples one when it scores the sequence.
        room = max(1, longest - 1 - length)
        given = self.sampling_params
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
        texts = [each for each in stop if isinstance(each, str)]
        ids = [each for each in stop if isinstance(each, int)]
        odd = any(not 1 <= len(text) <= _MAX_STOPS for text in texts)
        if odd or len(stop) > _MAX_STOPS or any(not 0 <= each < 2**31 for each in ids):
            raise InputError(
                f"sampling_params: stop may have {_MAX_STOPS:,} ids from 0 on, or texts of 1 to "
                f"{_MAX_STOPS:,} characters"
            )
        return SamplingConfig(
            n=1,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            max_tokens=min(given.max_tokens or room, room),
            stop=texts,
            stop_token_ids=ids,
            ignore_eos=given.stop == [],
            prompt_logprobs=bool(self.scored(length)),
        )

    def _with_likeliest(self, sampling: SamplingConfig, number: int) -> Sampling:
        """Return vLLM's own parameters if the client asks for the most likely tokens."""
        top = self.topk_prompt_logprobs if sampling.prompt_logprobs else None
        if not (top or self.topk_sample_logprobs):
            return sampling
        params = sampling_params(sampling, self._seed(number))
        params.prompt_logprobs, params.logprobs = top, self.topk_sample_logprobs
        return params

    def _seed(self, number: int) -> int | None:
        first = self.sampling_params.seed
        return None if first is None else (first + number) % 2**63


def check_training(request: TrainingRequest, vocabulary: int, longest: int) -> None:
    """Raise an `InputError` for the first datum that the model or the loss cannot read."""
    if request.mistake:
        raise InputError(request.mistake)
    loss = loss_named(request.loss, request.loss_config)
    if not request.data:
        raise InputError("forward_backward: there are no data")
    for number, datum in enumerate(request.data):
        _check_datum(datum, f"datum {number}", loss, vocabulary, longest)
    wide = max(d.inputs["target_tokens"].size // len(d.ids) for d in request.data)
    if wide > 1 and wide * sum(len(d.ids) for d in request.data) > MAX_VALUES:
        raise InputError(
            f"forward_backward: with {wide:,} targets for every token there are more than "
            f"{MAX_VALUES:,} values: send the data with {wide:,} targets in a request of their own"
        )


def _check_datum(datum: Datum, what: str, loss: TinkerLoss, vocabulary: int, longest: int) -> None:
    ids, length = datum.ids.ids, len(datum.ids)
    if not 1 <= length < longest:
        raise InputError(f"{what}: it has {length:,} tokens, and may have 1 to {longest - 1:,}")
    shape: tuple[int, ...] = (length,)
    for name in ("target_tokens", *loss.needs, *loss.defaults):
        if (values := datum.inputs.get(name)) is None:
            if name in loss.defaults:
                continue
            raise InputError(f"{what}: the loss needs loss_fn_inputs[{name!r}]")
        if name == "target_tokens" and loss.several and values.size:
            shape = (length, *values.shape[1:2])
        if values.shape != shape:
            own, needed = list(values.shape), list(shape)
            raise InputError(f"{what}: {name} is {own}, and the {length} tokens need {needed}")
        if not np.isfinite(values).all():
            raise InputError(f"{what}: {name} has a value that is no finite number")
    for name, tokens in (("model_input", ids), ("target_tokens", datum.inputs["target_tokens"])):
        if tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= vocabulary:
            raise InputError(f"{what}: {name} must have ids from 0 to {vocabulary - 1:,}")


def turns_of(request: TrainingRequest) -> Iterator[TrainingRequest]:
    """Divide a pass into parts, so that other clients' requests can run between them. The results
    of the parts add up to the results of the whole pass."""
    part, tokens = list[Datum](), 0
    for datum in request.data:
        if part and tokens + len(datum.ids) > TURN_TOKENS:
            yield replace(request, data=part)
            part, tokens = [], 0
        part.append(datum)
        tokens += len(datum.ids)
    yield replace(request, data=part)

"""Adapter of plain callables to vLLM's batch interface of logits processors, in engine processes.

If a callable raises an exception, only the callable's request fails. The sampler cannot end a
request, so all logits of the request's row in the batch are set to minus infinity. The token's
log-prob is then NaN; `VllmEngine` treats that as a failure, and fetches the reason from this
module.

When a processor allows only one token, it sets its attribute `forced`. `VllmEngine` fetches the
positions of such tokens from this module, and gives the tokens the weight version `FORCED`.
"""

import inspect
from functools import cached_property
from types import ModuleType
from typing import TypeVar

import torch

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign, load_object
from turnwise.engine.logits_processors import (
    EXTRA_ARG,
    KEY,
    SETTINGS,
    Call,
    name_of,
    with_request,
)
from turnwise.errors import InputError, describe_error, ordinary_error
from turnwise.internals import vllm

_Step = tuple[str, Foreign, bool, bool]
"""The name of a processor, the processor itself, whether it takes the prompt's ids, and whether it
can force tokens."""
_Value = TypeVar("_Value")
_MAX_FAILURES = 1024
_MAX_FORCED = 65_536  # requests; far more than can be in flight, so the oldest have ended
_MAX_LEFT = 256
_failures: dict[str, str] = {}  # reasons of failures by request id, until they are read
_forced: dict[str, list[int]] = {}
"""Positions of forced tokens that were not read yet, by request id; only requests with a processor
that can force tokens have an entry."""


def take_failure(request_id: str) -> str:
    """Remove and return the reason why a processor failed in a request; "" if none failed."""
    return _failures.pop(request_id, "")


def take_forced(request_id: str) -> list[int] | None:
    """Remove and return the positions (from 0, in the completion) of a request's forced tokens;
    None if the request does not have a processor that can force tokens."""
    if (places := _forced.get(request_id)) is not None:
        _forced[request_id] = []
    return places


class CallableProcessors(vllm.LogitsProcessor):  # type: ignore[misc]
    """Applies the callables of `engine.logits_processors`, then each request's own callables."""

    def __init__(
        self, vllm_config: vllm.VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        settings = vllm_config.additional_config[SETTINGS]
        self._config = vllm_config
        self._always: list[str] = settings["always"]
        self._allowed: str | None = settings["allowed"]
        self._rows: dict[int, _Row] = {}
        self._left: dict[str, list[_Step]] = {}
        """Processors of the rows that left the batch last, by request, because a preempted request
        comes back and continues with its processors."""
        for name in self._always:
            if "tokenizer" in _parameters(load_object(name, KEY)):
                _ = self._tokenizer  # load it now, so that no request waits for it later

    @cached_property
    def _tokenizer(self) -> Foreign:
        """The engine's tokenizer, for processors with such a parameter; each process loads it
        once."""
        return vllm.cached_tokenizer_from_config(self._config.model_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: vllm.BatchUpdate | None) -> None:
        if batch_update is not None:
            # A row that leaves may be missing in `removed`, if another row takes its index.
            gone = [*batch_update.removed, *(index for index, *_ in batch_update.added)]
            gone += [index for _, index, _ in batch_update.moved]
            for row in (self._rows[index] for index in gone if index in self._rows):
                _keep(self._left, row.request_id, row.steps, _MAX_LEFT)
        vllm.process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self._rows.items():
            logits[index] = row.apply(logits[index])
        return logits

    def _row(
        self, params: vllm.SamplingParams, prompt: list[int] | None, sampled: list[int]
    ) -> "_Row | None":
        given = (params.extra_args or {}).get(EXTRA_ARG) or {}
        request_id = str(given.get("request", ""))
        row = _Row(request_id, prompt or [], sampled)
        if sampled and request_id and (steps := self._left.pop(request_id, None)):
            row.steps = steps  # the processors continue with their state
            return row
        try:  # the server has already checked the names; this is a second check
            _, chosen = with_request(params.extra_args, "", self._allowed)
            row.steps = [self._step(name, load_object(name, KEY)) for name in self._always]
            for call in chosen:
                name = name_of(call)
                processor, module = load_object(name, "logits_processors"), name.partition(":")[0]
                home = getattr(processor, "__module__", None)
                if callable(processor) and home != module:
                    raise InputError(
                        f"the logits processor {name} is refused: {module} imports it and does not "
                        f"define it; name it in {home}"
                    )
                row.steps.append(self._step(call, processor))
            if any(forces for *_, forces in row.steps):
                _keep(_forced, request_id, [], _MAX_FORCED)
        except InputError as error:
            row.fail(str(error))
        return row if row.steps or row.failed else None

    def _step(self, call: Call, processor: Foreign) -> _Step:
        name = name_of(call)
        if isinstance(processor, ModuleType):
            defined = [n for n, one in vars(processor).items() if isinstance(one, type)
                       and one.__module__ == processor.__name__]  # fmt: skip
            raise InputError(
                f"the logits processor {name} is a module: name the class or function in it, as "
                f"{processor.__name__}:{min(defined, default='NAME')}"
            )
        given: JsonObject = {} if isinstance(call, str) else call
        args, kwargs = given.get("args") or (), dict(given.get("kwargs") or {})
        try:
            makes = _parameters(processor, required=True) == ["tokenizer"]
            if makes or isinstance(processor, type) or isinstance(call, dict):
                if "tokenizer" in _parameters(processor)[len(args) :] and "tokenizer" not in kwargs:
                    kwargs["tokenizer"] = self._tokenizer
                processor = processor(*args, **kwargs)
            elif callable(clone := getattr(processor, "clone", None)):  # as older versions of vLLM
                processor = clone()
            forces = hasattr(processor, "forced")
        except BaseException as error:
            why = describe_error(ordinary_error(error))
            raise InputError(f"the logits processor {name} cannot be made: {why}") from error
        if not callable(processor):
            raise InputError(f"the logits processor {name} is not callable")
        return name, processor, len(_parameters(processor, required=True)) == 3, forces


class _Row:
    """One request's row in the batch."""

    def __init__(self, request_id: str, prompt: list[int], sampled: list[int]) -> None:
        self.steps: list[_Step] = []
        self.failed = False
        self.request_id = request_id
        self._prompt = prompt
        self._sampled = sampled  # vLLM's own list, which grows as tokens are sampled

    def apply(self, logits_V: torch.Tensor) -> torch.Tensor:
        processed_V, forced = logits_V, False
        for name, function, wants_prompt, forces in () if self.failed else self.steps:
            before = (list(self._prompt),) if wants_prompt else ()
            try:
                made = function(*before, list(self._sampled), processed_V)
                if not isinstance(made, torch.Tensor) or made.shape != logits_V.shape:
                    shape = list(made.shape) if isinstance(made, torch.Tensor) else None
                    got = f"a tensor {shape}" if shape is not None else type(made).__name__
                    raise TypeError(f"it returned {got} instead of logits {list(logits_V.shape)}")
                processed_V = made
                forced = forced or (forces and bool(function.forced))
            except BaseException as error:  # a user's code may raise anything, even SystemExit
                why = describe_error(ordinary_error(error))
                self.fail(f"the logits processor {name} failed: {why}")
                break
        if self.failed:
            return torch.full_like(logits_V, -torch.inf)
        if forced and (places := _forced.get(self.request_id)) is not None:
            places.append(len(self._sampled))
        return processed_V

    def fail(self, why: str) -> None:
        self.failed = True
        _keep(_failures, self.request_id, why, _MAX_FAILURES)


def _keep(kept: dict[str, _Value], key: str, value: _Value, limit: int) -> None:
    """Set an entry as the newest, and drop the oldest if there are more than `limit` entries."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > limit:
        del kept[next(iter(kept))]


def _parameters(processor: Foreign, required: bool = False) -> list[str]:
    """Return the names of a callable's parameters; if `required`, only the names of positional
    parameters without a default."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = (p.kind in positional and p.default is p.empty for p in parameters)
    return [p.name for p, needs in zip(parameters, needed, strict=True) if needs or not required]

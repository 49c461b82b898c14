"""Adapter of plain callables to vLLM's batch interface of logits processors, in engine processes.

A callable that raises fails only its own request. The sampler cannot end a request, so the row's
logits are all set to minus infinity: the token's log-prob is then NaN, which `VllmEngine` treats as
a failure, and it fetches the reason from here.
"""

import inspect
from collections.abc import Callable

import torch

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

_Step = tuple[str, Callable[..., object], bool]
"""A processor's name, the processor, and whether it takes the prompt's ids."""
_MOST_FAILURES = 1024
_failures: dict[str, str] = {}  # reasons of failed requests by their ids, until they are read


def take_failure(request_id: str) -> str:
    """Remove and return the reason why a request's processor failed; "" when none did."""
    return _failures.pop(request_id, "")


class CallableProcessors(vllm.LogitsProcessor):  # type: ignore[misc]
    """Applies the callables of `engine.logits_processors`, then those of each request."""

    def __init__(
        self, vllm_config: vllm.VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        settings = vllm_config.additional_config[SETTINGS]
        self._always: list[str] = settings["always"]
        self._allowed: str | None = settings["allowed"]
        self._rows: dict[int, _Row] = {}
        for name in self._always:
            load_object(name, KEY)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: vllm.BatchUpdate | None) -> None:
        vllm.process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self._rows.items():
            logits[index] = row.apply(logits[index])
        return logits

    def _row(
        self, params: vllm.SamplingParams, prompt: list[int] | None, sampled: list[int]
    ) -> "_Row | None":
        given = (params.extra_args or {}).get(EXTRA_ARG) or {}
        row = _Row(str(given.get("request", "")), prompt or [], sampled)
        try:  # what is allowed is checked here as well as in the server
            _, chosen = with_request(params.extra_args, "", self._allowed)
            row.steps = [_step(name, load_object(name, KEY)) for name in self._always]
            for call in chosen:
                name = name_of(call)
                processor, module = load_object(name, "logits_processors"), name.partition(":")[0]
                if callable(processor) and getattr(processor, "__module__", None) != module:
                    raise InputError(
                        f"the logits processor {name} is refused: {module} imports it and does not "
                        "define it"
                    )
                row.steps.append(_step(call, processor))
        except InputError as error:
            row.fail(str(error))
        return row if row.steps or row.failed else None


class _Row:
    """One request's row in the batch."""

    def __init__(self, request_id: str, prompt: list[int], sampled: list[int]) -> None:
        self.steps: list[_Step] = []
        self.failed = False
        self._request_id = request_id
        self._prompt = prompt
        self._sampled = sampled  # vLLM's own list, which grows as tokens are sampled

    def apply(self, logits_V: torch.Tensor) -> torch.Tensor:
        processed_V = logits_V
        for name, function, wants_prompt in () if self.failed else self.steps:
            before = (list(self._prompt),) if wants_prompt else ()
            try:
                made = function(*before, list(self._sampled), processed_V)
                if not isinstance(made, torch.Tensor) or made.shape != logits_V.shape:
                    shape = list(made.shape) if isinstance(made, torch.Tensor) else None
                    got = f"a tensor {shape}" if shape is not None else type(made).__name__
                    raise TypeError(f"it returned {got} instead of logits {list(logits_V.shape)}")
                processed_V = made
            except BaseException as error:  # a user's code may raise anything, SystemExit too
                why = describe_error(ordinary_error(error))
                self.fail(f"the logits processor {name} failed: {why}")
                break
        return torch.full_like(logits_V, -torch.inf) if self.failed else processed_V

    def fail(self, why: str) -> None:
        self.failed = True
        _failures[self._request_id] = why
        if len(_failures) > _MOST_FAILURES:
            del _failures[next(iter(_failures))]  # the oldest


def _step(call: Call, processor: Foreign) -> _Step:
    name = name_of(call)
    if isinstance(call, dict) or isinstance(processor, type):
        made = {} if isinstance(call, str) else call
        try:
            processor = processor(*made.get("args", ()), **made.get("kwargs", {}))
        except BaseException as error:
            why = describe_error(ordinary_error(error))
            raise InputError(f"the logits processor {name} cannot be made: {why}") from error
    if not callable(processor):
        raise InputError(f"the logits processor {name} is not callable")
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return name, processor, False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.kind in positional and p.default is p.empty for p in parameters)
    return name, processor, required == 3

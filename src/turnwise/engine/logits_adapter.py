"""Adapter of plain callables to vLLM's batch interface of logits processors, in engine processes.

A callable that raises fails only its own request. The sampler cannot end a request, so the row's
logits are all set to minus infinity: the token's log-prob is then NaN, which `VllmEngine` treats as
a failure, and it fetches the reason from here.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from turnwise.engine import vllm_api as vllm
from turnwise.engine.logits_processors import (
    EXTRA_ARG,
    SETTINGS,
    Call,
    load_processor,
    with_request,
)
from turnwise.errors import InputError, describe_error, ordinary_error

_Step = tuple[str, Callable[..., torch.Tensor], bool]
"""A processor's name, the processor, and whether it takes the prompt's ids."""
_MOST_FAILURES = 1024
_failures: "OrderedDict[str, str]" = OrderedDict()
"""Reasons of failed requests by their ids, until they are read."""


def take_failure(request_id: str) -> str:
    """Remove and return the reason why a request's processor failed; "" when none did."""
    return _failures.pop(request_id, "")


class CallableProcessors(vllm.LogitsProcessor):  # type: ignore[misc]
    """Applies the callables of `engine.logits_processors`, then those of each request.

    Example:
        AsyncEngineArgs(logits_processors=[ADAPTER], ...)  # vLLM creates it by name
    """

    def __init__(
        self, vllm_config: vllm.VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        settings = vllm_config.additional_config[SETTINGS]
        self._always: list[str] = settings["always"]
        self._allowed: str | None = settings["allowed"]
        self._rows: dict[int, _Row] = {}
        for name in self._always:
            load_processor(name, "engine.logits_processors")

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
        row.prepare(lambda: self._steps(params))
        return row if row.steps or row.failed else None

    def _steps(self, params: vllm.SamplingParams) -> list[_Step]:
        """Return the processors of one request.

        Raises:
            InputError: when one is not allowed; checked here as well as in the server.
        """
        extra, _ = with_request(params.extra_args, "", self._allowed)
        always = [_step(name, load_processor(name)) for name in self._always]
        return [*always, *map(_chosen_step, extra[EXTRA_ARG]["processors"])]


class _Row:
    """One request's row in the batch."""

    def __init__(self, request_id: str, prompt: list[int], sampled: list[int]) -> None:
        self.steps: list[_Step] = []
        self.failed = False
        self._request_id = request_id
        self._prompt = prompt
        self._sampled = sampled
        """vLLM's own list, which grows as tokens are sampled."""

    def prepare(self, make: Callable[[], list[_Step]]) -> None:
        try:
            self.steps = make()
        except InputError as error:
            self._fail(str(error))

    def apply(self, logits_V: torch.Tensor) -> torch.Tensor:
        processed_V = logits_V
        for name, function, wants_prompt in () if self.failed else self.steps:
            before = (list(self._prompt),) if wants_prompt else ()
            try:
                processed_V = function(*before, list(self._sampled), processed_V)
                _check(processed_V, logits_V)
            except BaseException as error:  # a user's code may raise anything, SystemExit too
                why = describe_error(ordinary_error(error))
                self._fail(f"the logits processor {name} failed: {why}")
                break
        return torch.full_like(logits_V, -torch.inf) if self.failed else processed_V

    def _fail(self, why: str) -> None:
        self.failed = True
        _failures[self._request_id] = why
        if len(_failures) > _MOST_FAILURES:
            _failures.popitem(last=False)


def _check(processed: object, logits_V: torch.Tensor) -> None:
    if not isinstance(processed, torch.Tensor) or processed.shape != logits_V.shape:
        shape = list(processed.shape) if isinstance(processed, torch.Tensor) else None
        got = f"a tensor {shape}" if shape is not None else type(processed).__name__
        raise TypeError(f"it returned {got} instead of logits {list(logits_V.shape)}")


def _chosen_step(call: Call) -> _Step:
    """Load a processor that a request chose; its module must define it, not only import it."""
    name = call if isinstance(call, str) else call["qualname"]
    processor, module = load_processor(name), name.partition(":")[0]
    if callable(processor) and getattr(processor, "__module__", None) != module:
        raise InputError(
            f"the logits processor {name} is refused: {module} imports it and does not define it"
        )
    return _step(call, processor)


def _step(call: Call, processor: Any) -> _Step:
    name = call if isinstance(call, str) else call["qualname"]
    if isinstance(call, dict) or isinstance(processor, type):
        made = {} if isinstance(call, str) else call
        try:
            processor = processor(*made.get("args", ()), **made.get("kwargs", {}))
        except BaseException as error:
            why = describe_error(ordinary_error(error))
            raise InputError(f"the logits processor {name} cannot be made: {why}") from error
    if not callable(processor):
        raise InputError(f"the logits processor {name} is not callable")
    return name, processor, _required_parameters(processor) == 3


def _required_parameters(function: Callable[..., object]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)

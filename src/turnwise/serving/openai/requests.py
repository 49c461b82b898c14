"""The parameters that requests of vLLM's application may have.

The configuration's values are the defaults. Requests of a training session may not deviate from
them, because the trainer assumes that their tokens were sampled as configured.
"""

from typing import TYPE_CHECKING, NoReturn

from turnwise.chat.prompts import RefusedParameter
from turnwise.config import Config, SamplingConfig
from turnwise.engine.logits_processors import EXTRA_ARG, plain_calls, written
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.internals.vllm_server import SamplingRequest

MAX_CHOICES = 128
MAX_COMPLETIONS = 1_024
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
OWN_NAMES = (*_DISTRIBUTION, "min_tokens", "ignore_eos")
"""Sampling parameters that the configuration calls by the same names."""
_NEUTRAL: dict[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "repetition_detection": None,
    "watermarking": None,
    "logit_bias": None,
    "bad_words": [],
    "allowed_token_ids": None,
    "structured_outputs": None,
    "use_beam_search": False,
    "thinking_token_budget": None,
}


def settle(request: "SamplingRequest", own: SamplingConfig | None, config: Config) -> None:
    """Set the sampling parameters that a request does not set to the configured ones, but for `n`,
    and lower limits of tokens to the context, as vLLM does to what the prompt leaves. Refuse those
    that cannot be served; `own` is the sampling of a training session."""
    n, listed = getattr(request, "n", None) or 1, getattr(request, "prompt", None)
    prompts = 1
    if isinstance(listed, list) and listed and not isinstance(listed[0], int):
        prompts = len(listed)
    if n > MAX_CHOICES:
        raise RefusedParameter("n", f"n={n} is more than {MAX_CHOICES}: ask several times")
    if n * prompts > MAX_COMPLETIONS:
        raise RefusedParameter(
            "prompt",
            f"{prompts} prompts with n={n} are more than {MAX_COMPLETIONS} completions: ask "
            "several times",
        )
    if own is not None:
        _keep_on_policy(request, own)
    sampling, fields = own or config.sampling, type(request).model_fields
    if "vllm_xargs" in fields:  # logits processors move to where the engine expects them
        arguments = dict(request.vllm_xargs or {})
        if not isinstance(arguments.pop(EXTRA_ARG, {}), dict):  # only ours is a dictionary
            raise RefusedParameter("vllm_xargs", f"vllm_xargs.{EXTRA_ARG} cannot be set by clients")
        if not _sets(request, "vllm_xargs"):
            arguments = dict(sampling.logits_processor_args)
        chosen = (request.model_extra or {}).get("logits_processors")
        chosen = written(sampling) if chosen is None else chosen
        try:
            calls = plain_calls(chosen, config.engine.logits_processors_allowed)
        except InputError as error:
            raise RefusedParameter("logits_processors", str(error)) from error
        if calls:
            arguments[EXTRA_ARG] = {"processors": calls}
        request.vllm_xargs = arguments or None
    for name in (*_DISTRIBUTION, "stop", "stop_token_ids"):
        if name in fields and not _sets(request, name):
            setattr(request, name, getattr(sampling, name))
    limits = [name for name in _LIMITS if name in fields]
    given = {name: getattr(request, name) for name in limits if _sets(request, name)}
    for name, limit in (given or dict.fromkeys(limits, sampling.max_tokens)).items():
        setattr(request, name, min(limit, config.model.max_length))


def _sets(request: "SamplingRequest", name: str) -> bool:
    return name in request.model_fields_set and getattr(request, name) not in (None, [])


def _keep_on_policy(request: "SamplingRequest", sampling: SamplingConfig) -> None:
    """Refuse parameters that would make the tokens of a training session off-policy."""

    def refuse(name: str, advice: str) -> NoReturn:
        raise RefusedParameter(
            name,
            f"{name}={getattr(request, name)!r} would make the tokens of this training session "
            f"off-policy: {advice}",
        )

    wanted: dict[str, object] = {
        "logits_processors": written(sampling),
        "vllm_xargs": sampling.logits_processor_args or None,
        **{name: getattr(sampling, name) for name in OWN_NAMES},
        **_NEUTRAL,
    }
    for name, value in wanted.items():
        if name in request.model_fields_set and getattr(request, name) not in (None, value):
            shown = f"{value:g}" if isinstance(value, float) else repr(value)
            refuse(name, "leave it out" + ("" if value is None else f", or set it to {shown}"))
    if getattr(request, "parallel_tool_calls", True) is False and request.tools:
        refuse("parallel_tool_calls", "a grammar changes what is sampled; leave it out")
    for name in ("response_format", "text"):  # the second is Responses'
        grammar = getattr(request, name, None)
        grammar = getattr(grammar, "format", grammar)
        if getattr(grammar, "type", "text") != "text":
            refuse(name, "a grammar changes what is sampled; leave it out")
    if getattr(request, "tools", None) and request.tool_choice not in (None, "auto", "none"):
        refuse("tool_choice", "a forced call changes what is sampled; use auto")

"""The adapter of a request: by the name that the request gives as its `model`.

A request of a session that names no model keeps the adapter of the session's last turn. A training
session is sampled by the policy alone.
"""

from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import State

from turnwise.engine.adapters import POLICY
from turnwise.errors import InputError
from turnwise.serving.openai.request_context import CURRENT
from turnwise.serving.openai.vllm_api import LoRARequest, SamplingRequest, VLLMValidationError


def serve_adapters(state: State, adapters: Mapping[str, str], names: Sequence[str]) -> None:
    """List adapters beside the model in vLLM's application, and let requests choose one.

    Without adapters a request may name any model.

    Args:
        state: State of vLLM's application.
        adapters: Paths of adapters by name.
        names: Names of the model itself.

    Raises:
        InputError: when an adapter has the model's name.
    """
    models = state.openai_serving_models
    if not adapters:
        models.is_base_model = lambda name: True
        return
    if same := [name for name in adapters if name in names or not name]:
        raise InputError(f"serving.adapters: {same[0]!r} is the model's own name")
    models.is_base_model = lambda name: name in names
    for number, (name, path) in enumerate(adapters.items(), start=1):
        models.lora_requests[name] = LoRARequest(name, number, path, names[0])
    for attribute in _SERVING:
        if (serving := getattr(state, attribute, None)) is not None:
            serving._maybe_get_adapters = _chooser(state)


_SERVING = (
    "openai_serving_chat",
    "openai_serving_completion",
    "openai_serving_responses",
    "anthropic_serving_messages",
)
"""Parts of vLLM's application that sample, which each look up their request's adapter."""


def _chooser(state: State) -> Callable[..., LoRARequest | None]:
    requests = state.openai_serving_models.lora_requests

    def choose(request: SamplingRequest, **options: object) -> LoRARequest | None:
        context = CURRENT.get()
        if context is not None and not request.model:
            request.model = context.session.adapter or None
        chosen = requests.get(request.model)
        if context is not None:
            if chosen is not None and context.session.sampling is not None:
                raise VLLMValidationError(
                    f"model={request.model!r} would make the tokens of this training session "
                    "off-policy: leave it out, or name the model itself",
                    parameter="model",
                )
            context.adapter = chosen.lora_name if chosen is not None else POLICY
        return chosen

    return choose

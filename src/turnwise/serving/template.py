"""The configured model's chat template, and its work kept off the event loop."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from turnwise.config import Config
from turnwise.tasks import run_in_thread
from turnwise.trajectory import ChatTemplate, Message

_Result = TypeVar("_Result")
_LONG = 16_384
"""Characters that are tokenised in some milliseconds; more of them would delay the others."""


def load_template(config: Config, tokenizer: Any) -> ChatTemplate:
    """The template, and the ids at which the model's own settings and ours end a turn.

    Raises:
        InputError: when the tokenizer has no template.
    """
    template = ChatTemplate(
        tokenizer,
        escape_special_tokens=config.model.escape_special_tokens,
        **config.model.template_args,
    )
    template.stop_token_ids |= {*config.sampling.stop_token_ids, *_stops_of(config)}
    return template


def _stops_of(config: Config) -> list[int]:
    """The end-of-turn ids in the model's own generation settings, where it has any."""
    from transformers import GenerationConfig  # a second to import

    try:
        stops = GenerationConfig.from_pretrained(config.model.path).eos_token_id
    except OSError:
        return []
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


async def off_loop(messages: Sequence[Message], work: Callable[[], _Result]) -> _Result:
    """Do what takes long in a thread, so that other trajectories go on."""
    if sum(len(str(message)) for message in messages) < _LONG:
        return work()
    return await run_in_thread(work)

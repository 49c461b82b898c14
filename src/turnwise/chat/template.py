"""The configured model's chat template, and threads for long renderings."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from turnwise.config import Config
from turnwise.core.aio import run_in_thread
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.sources import check_model, check_tokenizer
from turnwise.errors import InputError, first_line
from turnwise.trajectory import ChatTemplate, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_Result = TypeVar("_Result")
_LONG = 16_384
"""Characters that take a few milliseconds to tokenise; longer texts would delay other requests."""


def load_tokenizer(config: Config) -> "Tokenizer":
    """Load the tokenizer of `model.path`, or of `model.tokenizer`.

    Raises:
        InputError: when it does not exist, or cannot be loaded.
    """
    from transformers import AutoTokenizer

    model = config.model
    check_model(model.path)
    key, path = "model.path", model.path
    if model.tokenizer is not None:
        key, path = "model.tokenizer", model.tokenizer
        check_tokenizer(path)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            resolve_tokenizer(model), trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        why = first_line(error)
        raise InputError(f"{key}: the tokenizer of {path} cannot be loaded: {why}") from error
    return tokenizer


def load_template(config: Config, tokenizer: "Tokenizer") -> ChatTemplate:
    """Return the model's template, with the stop tokens of the model and of the configuration.

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
    """Return the end-of-turn ids in the model's generation settings."""
    from transformers import GenerationConfig  # a second to import

    try:
        stops = GenerationConfig.from_pretrained(resolve_model(config.model.path)).eos_token_id
    except OSError:
        return []
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


async def in_thread_if_long(messages: Sequence[Message], work: Callable[[], _Result]) -> _Result:
    """Call `work`, in a thread if the messages are long, so as not to delay other trajectories."""
    if sum(len(str(message)) for message in messages) < _LONG:
        return work()
    return await run_in_thread(work)

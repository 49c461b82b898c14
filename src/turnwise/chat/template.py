"""The configured model's tokenizer and chat template."""

import json
from typing import TYPE_CHECKING

from turnwise.chat.vision import ModelImages
from turnwise.config import EngineConfig, ModelConfig, SamplingConfig
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.sources import check_model, check_tokenizer
from turnwise.errors import InputError, first_line
from turnwise.trajectory import ChatTemplate
from turnwise.trajectory.bridge import find_seam

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def load_tokenizer(model: ModelConfig) -> "Tokenizer":
    """Load the tokenizer from `model.tokenizer`, or else from `model.path`, with
    `model.chat_template`. Raise InputError if the tokenizer does not exist or cannot be loaded, or
    the template is not valid Jinja."""
    check_model(model.path)
    key, path = "model.path", model.path
    if model.tokenizer is not None:
        key, path = "model.tokenizer", model.tokenizer
        check_tokenizer(path)
    try:
        tokenizer = read_tokenizer(model)
    except Exception as error:
        why = first_line(error)
        raise InputError(f"{key}: the tokenizer of {path} cannot be loaded: {why}") from error
    if model.chat_template is not None:
        from jinja2 import TemplateSyntaxError

        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise InputError(
                f"model.chat_template: line {error.lineno} is not Jinja: {error.message}"
            ) from error
        except Exception:  # the template may need a different conversation, or tools
            pass
    return tokenizer


def read_tokenizer(model: ModelConfig) -> "Tokenizer":
    """Load the tokenizer as `load_tokenizer` does, without its checks and error messages; it raises
    whatever Transformers raises."""
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
        resolve_tokenizer(model), trust_remote_code=model.trust_remote_code
    )
    if model.template_text is not None:
        tokenizer.chat_template = model.template_text
    return tokenizer


def load_template(
    model: ModelConfig, sampling: SamplingConfig, engine: EngineConfig, tokenizer: "Tokenizer"
) -> ChatTemplate:
    """Return the model's template, with the stop tokens of the model and of the configuration."""
    from transformers import GenerationConfig  # a second to import

    template = ChatTemplate(
        tokenizer,
        chat_template=model.template_text,
        escape_special_tokens=model.escape_special_tokens,
        images=ModelImages(model) if engine.images_per_prompt else None,
        **model.template_args,
    )
    template.stop_token_ids.update(sampling.stop_token_ids)
    try:
        stops = GenerationConfig.from_pretrained(resolve_model(model.path)).eos_token_id
    except OSError:  # the model has no generation settings
        return template
    template.stop_token_ids.update(
        [] if stops is None else stops if isinstance(stops, list) else [stops]
    )
    return template


def missing_stop(model: ModelConfig, sampling: SamplingConfig, template: ChatTemplate) -> str:
    """Return a sentence if sampling does not stop where `model.chat_template` ends a turn; else
    ""."""
    if model.chat_template is None:  # the tokenizer's template fits its generation settings
        return ""
    try:
        seam = find_seam(template, [{"role": "user", "content": ""}], None)
        end = seam.turn_end or seam.header(template) or ""
    except Exception:  # a template may raise anything; `check_template` reports it
        return ""
    found = template.special_token_pattern.search(end)
    if found is None:
        mark = end.strip()
        known = not mark or mark in sampling.stop
        named = f"{mark}, which is plain text for this tokenizer"
        advice = (
            f"sampling.stop to [{json.dumps(mark)}], or choose a template for this model, such as "
            "the one that its tokenizer may have"
        )
    else:
        mark = named = found.group()
        token = next(index for index, text in template.special_tokens.items() if text == mark)
        known = token in template.stop_token_ids or mark in sampling.stop
        advice = f"sampling.stop_token_ids to [{token}]"
    if known:
        return ""
    return (
        f"model.chat_template ends turns with {named}, but answers do not stop there: set {advice}"
    )

"""The warning about a template whose end of turn does not stop sampling."""

import copy
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken

from turnwise.chat.template import load_template, missing_stop
from turnwise.config import Config
from turnwise.config.data import template_text


def test_a_foreign_templates_turn_end_must_be_a_stop_text(
    make_config: Callable[..., Config], model_path: str, tokenizer: Any
) -> None:
    """Gemma's tokenizer has none of the marks of hermes, and a token of each line break."""
    made = copy.deepcopy(tokenizer)
    made.add_tokens(AddedToken("\n", normalized=False))
    text = template_text("hermes").replace("im_", "turn_")
    model = {"path": model_path, "chat_template": text}
    for stop in ([], ["<|turn_end|>"]):
        config = make_config(model=model, sampling={"stop": stop})
        why = missing_stop(
            config.model,
            config.sampling,
            load_template(config.model, config.sampling, config.engine, made),
        )
        assert bool(why) == (not stop)
        assert stop or 'set sampling.stop to ["<|turn_end|>"], or choose a template' in why

"""Checks of a configuration that need no model, rows or engines, but more than its own classes.

Commands make them before they start anything, and `turnwise config` makes them alone.
"""

from turnwise.chat.tool_parser import check_parser_name
from turnwise.config import Config
from turnwise.errors import InputError


def check_sampled(config: Config) -> None:
    """Raise an `InputError` if training would get answers that were not sampled."""
    if config.sampling.use_beam_search:
        raise InputError(
            "sampling.use_beam_search: answers that a search found were not sampled, and cannot be "
            "trained on; set it in eval.sampling alone"
        )


def check_trainable(config: Config) -> None:
    """Raise an `InputError` for a configuration that `turnwise train` refuses.

    Seconds to import; imports the user's own advantage, loss or transport, if it names any.
    """
    from turnwise.training.algorithms import make_algorithm
    from turnwise.training.attention import check_attention_name
    from turnwise.training.samples import check_group_size
    from turnwise.weights.sync import check_transport

    check_sampled(config)
    check_parser_name(config.rollout.tool_parser)
    check_adapters(config)
    check_group_size(config, make_algorithm(config.algorithm))
    check_attention_name(config.training.attention)
    check_transport(config)


def check_adapters(config: Config) -> None:
    """Raise an `InputError` if adapters are loaded on weights that training replaces."""
    if config.model.adapter is not None:
        raise InputError(
            "model.adapter: training does not start from an adapter; merge it into a model first"
        )
    adapter = config.model.lora.rank and config.weights.lora == "adapter"
    if config.serving.adapters and not adapter:
        raise InputError(
            "serving.adapters: training replaces the weights under the adapters, unless it trains "
            "an adapter itself (model.lora.rank) and weights.lora is adapter"
        )

"""Checks of a configuration that need modules outside `config`, but no model, rows or engines.

Commands run these checks before they start anything; `turnwise config` runs no others.
"""

from typing import TYPE_CHECKING

from turnwise.chat.tool_parser import check_parser_name
from turnwise.config import Config
from turnwise.config.schema import stream_mistake
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.training.algorithms import Algorithm


def check_sampled(config: Config) -> None:
    """Raise an `InputError` if training would get answers that were not sampled."""
    if config.sampling.use_beam_search:
        raise InputError(
            "sampling.use_beam_search: answers that a search found were not sampled, and cannot be "
            "trained on; set it in eval.sampling alone"
        )


def check_trainable(config: Config) -> None:
    """Raise an `InputError` for a configuration that `turnwise train` refuses.

    Its imports take seconds, and include the user's own advantage, loss or transport, if any.
    """
    from turnwise.training.algorithms import make_algorithm

    check_sampled(config)
    check_parser_name(config.rollout.tool_parser)
    check_adapters(config)
    check_group_size(config, make_algorithm(config.algorithm))
    if ":" in config.weights.transport:
        from turnwise.weights.sync import check_transport  # does not exist on every system

        check_transport(config.weights.transport, stream_mistake(config))
    if config.training.attention != "auto":
        from turnwise.training.attention import check_attention_name

        check_attention_name(config.training.attention)


def check_adapters(config: Config) -> None:
    """Raise an `InputError` if adapters are loaded on weights that training replaces."""
    if config.model.adapter is not None:
        raise InputError(
            "model.adapter: training does not start from an adapter; merge it into a model first"
        )
    adapter = config.model.lora.rank and config.weights.lora == "adapter"
    if served := [name for name in config.rollout.policies if name in config.serving.adapters]:
        raise InputError(f"serving.adapters: {served[0]} is a policy that training makes itself")
    if config.serving.adapters and not adapter:
        raise InputError(
            "serving.adapters: training replaces the weights under the adapters, unless it trains "
            "an adapter itself (model.lora.rank) and weights.lora is adapter"
        )


def check_group_size(config: Config, algorithm: "Algorithm") -> None:
    """Check that a group contains something to compare, if the algorithm compares within groups."""
    parts = config.algorithm
    if config.sampling.n > 1:
        return
    if algorithm.loss.needs_pairs:
        compares = f"algorithm.loss {parts.loss.name}"
    elif parts.dynamic_sampling:
        compares = "algorithm.dynamic_sampling"
    elif config.data.curriculum:
        compares = "data.curriculum"
    else:
        advantage, compares = algorithm.advantage, f"algorithm.advantage {parts.advantage.name}"
        try:
            if advantage.per_turn:
                trains_alone = advantage.of_turns([[1.0]]) is not None
            else:
                trains_alone = advantage.of_groups([[1.0]])[0] is not None
        except Exception:  # such as a standard deviation of one number, in the user's `Advantage`
            trains_alone = False
        if trains_alone:
            return
    alone = "; or set algorithm.advantage to none, to learn from the teacher alone"
    raise InputError(
        f"{compares} compares the trajectories of a group, and sampling.n 1 has nothing to "
        f"compare: raise sampling.n{alone if config.teachers() else ''}"
    )

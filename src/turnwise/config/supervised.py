"""Supervised training's configuration, made from a reinforcement-learning run's configuration."""

from turnwise.config.algorithm import AlgorithmConfig, CrossEntropy, OwnLoss
from turnwise.config.rollout import SamplingConfig
from turnwise.config.schema import Config
from turnwise.errors import InputError


def supervised_config(config: Config) -> Config:
    """Return the configuration of a supervised run: plain log-probs and `cross_entropy`, or the
    user's own loss. Only the reduction of `algorithm` and the stops of `sampling` are kept. Rows
    are read a step ahead, except in deterministic runs."""
    if config.model.adapter is not None:
        raise InputError("model.adapter: training starts from a whole model; merge it into one")
    own, sampling = config.algorithm.loss, config.sampling
    loss = own if isinstance(own, OwnLoss) else CrossEntropy()
    ahead = int(not config.deterministic)  # deterministic runs are synchronous
    stops = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
    each, rate = config.environments.items(), config.training.learning_rate
    learning = {"learning_rate": rate or 10 * config.learning_rate}
    return config.changed(
        {
            "data": {"curriculum": False},
            "environments": {name: entry.changed({"teacher": None}) for name, entry in each},
            "rollout": {"oversample": 0.0, "policies": []},
            "sampling": SamplingConfig(n=1).changed(stops),
            "eval": {"background": False, "target": None},
            "algorithm": AlgorithmConfig(loss=loss, reduction=config.algorithm.reduction),
            "training": {"colocated": False, "offload": [], "max_staleness": ahead, **learning},
            # There is no engine; transports other than collective take memory or write files.
            "weights": {"transport": "collective", "delta": False},
        }
    )

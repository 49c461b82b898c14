"""Typed configuration of a run: its sections, and the functions that load and explain it.

Every key either has a default or is required. Its docstring is its documentation, which `turnwise
config` prints, and a test checks that the code reads it. This package imports neither torch, vLLM
nor Ray, and only `errors` from the rest of turnwise.
"""

from turnwise.config.algorithm import (
    PARTS,
    AlgorithmConfig,
    OwnAdvantage,
    OwnLoss,
    TeacherConfig,
)
from turnwise.config.aliases import ALIASES, REPLACED_KEYS, UNNEEDED_KEYS, has_no_effect
from turnwise.config.base import NO_DEADLINE
from turnwise.config.data import LoraConfig, ModelConfig, OtherModel
from turnwise.config.explain import known_keys
from turnwise.config.load import (
    ConfigSource,
    apply_override,
    dump_config,
    load_config,
    make_config,
    parse_config,
    set_key,
)
from turnwise.config.rollout import (
    LOOP_NAMES,
    AgentSamplingRule,
    JudgeConfig,
    McpConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ToolConfig,
)
from turnwise.config.schema import Config
from turnwise.config.serving import EngineConfig, ServingConfig, WeightsConfig
from turnwise.config.training import TrainingConfig

__all__ = [
    "ALIASES",
    "LOOP_NAMES",
    "NO_DEADLINE",
    "PARTS",
    "REPLACED_KEYS",
    "UNNEEDED_KEYS",
    "AgentSamplingRule",
    "AlgorithmConfig",
    "Config",
    "ConfigSource",
    "EngineConfig",
    "JudgeConfig",
    "LoraConfig",
    "McpConfig",
    "ModelConfig",
    "OtherModel",
    "OwnAdvantage",
    "OwnLoss",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServingConfig",
    "TeacherConfig",
    "ToolConfig",
    "TrainingConfig",
    "WeightsConfig",
    "apply_override",
    "dump_config",
    "has_no_effect",
    "known_keys",
    "load_config",
    "make_config",
    "parse_config",
    "set_key",
]

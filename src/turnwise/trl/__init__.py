"""TRL's GRPO trainer, run by Turnwise. A script for TRL only has to change its import to this one:

from turnwise.trl import GRPOConfig, GRPOTrainer
"""

from turnwise.compat.trl.config import GRPOConfig
from turnwise.compat.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

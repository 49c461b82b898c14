"""TRL's trainer for GRPO, run by Turnwise: a script changes one import.

from turnwise.trl import GRPOConfig, GRPOTrainer
"""

from turnwise.compat.trl.config import GRPOConfig
from turnwise.compat.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

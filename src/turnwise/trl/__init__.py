"""TRL's trainer for GRPO, run by Turnwise: a script changes one import.

from turnwise.trl import GRPOConfig, GRPOTrainer
"""

from turnwise.trl.config import GRPOConfig
from turnwise.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

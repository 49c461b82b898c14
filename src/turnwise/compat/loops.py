"""Agent loops of other systems, under their names in `rollout.loop`."""

from turnwise.compat.verl.loop import ChatSchedulerLoop as chat_scheduler

__all__ = ["chat_scheduler"]

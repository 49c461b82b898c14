"""Tokens as truth: trajectories of exact ids, and the chat template that leads between turns."""

from turnwise.trajectory.chat_template import ChatTemplate
from turnwise.trajectory.trajectory import (
    Message,
    Status,
    Trajectory,
    Turn,
    read_jsonl,
    write_jsonl,
)

__all__ = ["ChatTemplate", "Message", "Status", "Trajectory", "Turn", "read_jsonl", "write_jsonl"]

"""Trajectories of exact token ids, and the bridge from one turn to the next."""

from turnwise.trajectory.allowed import allowed_bits, pack_allowed
from turnwise.trajectory.audit import ExactnessReport, audit
from turnwise.trajectory.bridge import Bridge, bridge
from turnwise.trajectory.chat_template import ChatTemplate
from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.files import read_jsonl, write_jsonl
from turnwise.trajectory.images import Image
from turnwise.trajectory.outcome import MAX_REWARD, Outcome
from turnwise.trajectory.prefix import replace_prefix_tokens
from turnwise.trajectory.prompt import PlacedImage, Prompt, PromptLike
from turnwise.trajectory.trajectory import Status, Trajectory, status_after
from turnwise.trajectory.turn import FORCED, Branch, Message, Turn

__all__ = [
    "FORCED",
    "MAX_REWARD",
    "Branch",
    "Bridge",
    "ChatTemplate",
    "Distribution",
    "ExactnessReport",
    "Image",
    "Message",
    "Outcome",
    "PlacedImage",
    "Prompt",
    "PromptLike",
    "Status",
    "Trajectory",
    "Turn",
    "allowed_bits",
    "audit",
    "bridge",
    "pack_allowed",
    "read_jsonl",
    "replace_prefix_tokens",
    "status_after",
    "write_jsonl",
]

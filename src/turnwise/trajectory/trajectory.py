"""A trajectory: every token of one attempt at one problem, exactly as the engine saw it.

It is built from the ids that went into the engine and the ids that came out, turn by turn; each
turn stores only what it adds. Sampled tokens carry their log-probs and the weight version that
sampled them. Messages hang beside the tokens as a view for people and rewards: no id is ever
made from them. Knows no tokenizer, no engine and no file but JSON Lines.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import TrajectoryError

Message = dict[str, Any]
Status = Literal["running", "completed", "length", "max_turns", "context_full"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the engine: the unsampled ids that it added, and the ids that it sampled."""

    added_token_ids: list[int]
    """Ids between the previous turn's last token and this turn's first sampled one."""
    completion_token_ids: list[int]
    logprobs: list[float]
    """Natural log of each sampled token's probability under the sampling distribution."""
    weight_versions: list[int]
    """The weight version that sampled each token."""
    finish_reason: str
    added_logprobs: list[float | None] | None = None
    """Log-probs of the added ids where they were asked for; a sequence's first has none."""

    def __post_init__(self) -> None:
        lengths = {
            "completion_token_ids": len(self.completion_token_ids),
            "logprobs": len(self.logprobs),
            "weight_versions": len(self.weight_versions),
        }
        if len(set(lengths.values())) != 1:
            raise TrajectoryError("inconsistent_turn", f"a turn's lengths differ: {lengths}")


@dataclass(slots=True)
class Trajectory:
    """All turns of one attempt, in order, with what became of it."""

    problem_id: str
    """Names the problem; the trajectories of one group share it."""
    sample_index: int = 0
    """Position within the group, from 0."""
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    status: Status = "running"
    events: Counter[str] = field(default_factory=Counter)
    """How often what happened: tool_call, tool_unknown, tool_error, tool_timeout ..."""

    def add_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: list[int],
        logprobs: list[float],
        weight_versions: list[int],
        finish_reason: str,
        prompt_logprobs: list[float | None] | None = None,
    ) -> Turn:
        """Append one call of the engine.

        Raises:
            TrajectoryError: when the prompt does not begin with every id of the turns before,
                or the lengths of ids, log-probs and versions differ.
        """
        known = self.token_ids
        if list(prompt_token_ids[: len(known)]) != known:
            raise TrajectoryError(
                "prefix_changed",
                f"turn {len(self.turns)} of {self.problem_id} does not continue the "
                f"{len(known)} tokens before it",
            )
        turn = Turn(
            added_token_ids=list(prompt_token_ids[len(known) :]),
            completion_token_ids=completion_token_ids,
            logprobs=logprobs,
            weight_versions=weight_versions,
            finish_reason=finish_reason,
            added_logprobs=prompt_logprobs[len(known) :] if prompt_logprobs else None,
        )
        self.turns.append(turn)
        return turn

    @property
    def token_ids(self) -> list[int]:
        """Every id in order, unsampled and sampled: `T` of them."""
        return [i for t in self.turns for i in (*t.added_token_ids, *t.completion_token_ids)]

    @property
    def response_mask(self) -> list[int]:
        """`T` flags: 1 on sampled tokens, 0 on all else."""
        return self._aligned(lambda turn: [1] * len(turn.completion_token_ids), 0)

    @property
    def logprobs(self) -> list[float]:
        """`T` log-probs as the engine recorded them; 0.0 where the response mask is 0."""
        return self._aligned(lambda turn: turn.logprobs, 0.0)

    @property
    def weight_versions(self) -> list[int]:
        """`T` versions; -1 where the response mask is 0."""
        return self._aligned(lambda turn: turn.weight_versions, -1)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.completion_token_ids) for turn in self.turns)

    @property
    def final_text(self) -> str:
        """The text of the last assistant message, without special tokens; "" if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message.get("content") or "")
        return ""

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads back without loss."""
        tree = _plain(self) | {"turns": [_plain(turn) for turn in self.turns]}
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Trajectory":
        tree = json.loads(line)
        tree["turns"] = [Turn(**turn) for turn in tree["turns"]]
        tree["events"] = Counter(tree["events"])
        return cls(**tree)

    def _aligned(self, sampled: Any, filler: Any) -> list[Any]:
        values: list[Any] = []
        for turn in self.turns:
            values += [filler] * len(turn.added_token_ids)
            values += sampled(turn)
        return values


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as a dictionary of its own fields (`asdict` would copy every list)."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory a line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(trajectory.to_json() + "\n")
    temporary.replace(path)


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Read what `write_jsonl` wrote."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Trajectory.from_json(line)

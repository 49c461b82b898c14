"""A trajectory: every token of one attempt at one problem, exactly as the engine saw it.

It is the tree of the attempt's turns. A turn is built from the ids that went into the engine and
the ids that came out; it finds its parent by comparing ids and stores only what it adds. Mostly
the tree is a line; sub-agents, retries and edited histories make branches, and each branch is a
training sample in which the tokens that another branch trains on already are context. Messages
hang beside the tokens as a view for people and rewards: no id is ever made from them. Knows no
tokenizer, no engine and no file but JSON Lines.
"""

import json
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import TrajectoryError, told_when_unwritable

MAX_REWARD = 1e6
"""Largest reward of either sign: squares and sums of rewards stay far from overflow."""

Message = dict[str, Any]
Status = Literal["running", "completed", "length", "max_turns", "context_full"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the engine: the unsampled ids that it added, and the ids that it sampled.

    Its path, all ids from the conversation's start to its end, is the first `prefix_length` ids
    of its parent's path, then `added_token_ids`, then `completion_token_ids`.
    """

    added_token_ids: list[int]
    """Ids between what the parent's path gave and this turn's first sampled one."""
    completion_token_ids: list[int]
    logprobs: list[float]
    """Natural log of each sampled token's probability under the sampling distribution."""
    weight_versions: list[int]
    """The weight version that sampled each token."""
    finish_reason: str
    added_logprobs: list[float | None] | None = None
    """Log-probs of the added ids where they were asked for; a sequence's first has none."""
    parent: int | None = None
    """Index of the turn whose path this one begins with; None where it shares nothing."""
    prefix_length: int = 0
    """How many ids of the parent's path this turn begins with; all of them in a bridged turn."""
    fork_reason: str | None = None
    """Why this turn does not continue one before it."""
    sums: tuple[int, int] = (0, 0)
    """`checksums` of added and completion ids together, taken when the turn was recorded."""
    record: tuple[int, int, int] = (0, 0, 0)
    """`fingerprint` of the call of the engine, taken from what it got and gave."""
    messages: list[Message] = field(default_factory=list)
    """The messages that led here, where there is more than one conversation; a view."""

    def __post_init__(self) -> None:
        lengths = {
            "completion_token_ids": len(self.completion_token_ids),
            "logprobs": len(self.logprobs),
            "weight_versions": len(self.weight_versions),
        }
        if len(set(lengths.values())) != 1:
            raise TrajectoryError("inconsistent_turn", f"a turn's lengths differ: {lengths}")

    @property
    def path_length(self) -> int:
        return self.prefix_length + len(self.added_token_ids) + len(self.completion_token_ids)


@dataclass(frozen=True, slots=True)
class Branch:
    """A path from the conversation's start to the end of a turn that no other continues.

    Lists of `T` entries, one for each token.
    """

    leaf: int
    """Index of the last turn."""
    token_ids: list[int]
    response_mask: list[int]
    """1 on sampled tokens, 0 on all else."""
    logprobs: list[float]
    """As the engine recorded them; 0.0 where the response mask is 0."""
    weight_versions: list[int]
    """-1 where the response mask is 0."""


@dataclass(slots=True)
class Trajectory:
    """All turns of one attempt, in the order of their calls, with what became of it."""

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
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What each part of the reward gave, before its weight."""
    _last_path: list[int] = field(default_factory=list, repr=False, compare=False)
    """The path of the last turn; kept because the next turn nearly always continues it."""

    def add_turn(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: list[int],
        logprobs: list[float],
        weight_versions: list[int],
        finish_reason: str,
        prompt_logprobs: list[float | None] | None = None,
        *,
        fork_reason: str | None = None,
        messages: Sequence[Message] = (),
    ) -> Turn:
        """Append one call of the engine: below the last turn if it continues that, otherwise
        below the turn that shares the longest beginning with it.

        Args:
            prompt_token_ids: The whole prompt.
            completion_token_ids: What was sampled, with one log-prob and one version each.
            finish_reason: The engine's: stop, length ...
            prompt_logprobs: One for each prompt id, where they were asked for.
            fork_reason: Why the prompt continues no turn, for the one who counts forks;
                `new_conversation` when it is not told.
            messages: A view of the messages that led to this turn.

        Raises:
            TrajectoryError: when the lengths of ids, log-probs and versions differ.
        """
        prompt = list(prompt_token_ids)
        parent, shared = self._find_parent(prompt)
        added = prompt[shared:]
        continues = parent is not None and shared == self.turns[parent].path_length
        turn = Turn(
            added_token_ids=added,
            completion_token_ids=completion_token_ids,
            logprobs=logprobs,
            weight_versions=weight_versions,
            finish_reason=finish_reason,
            added_logprobs=prompt_logprobs[shared:] if prompt_logprobs else None,
            parent=parent,
            prefix_length=shared,
            fork_reason=None if continues or not self.turns else fork_reason or "new_conversation",
            sums=checksums([*added, *completion_token_ids]),
            record=fingerprint(prompt, completion_token_ids, logprobs, weight_versions),
            messages=list(messages),
        )
        self.turns.append(turn)
        prompt += completion_token_ids
        self._last_path = prompt
        return turn

    def _find_parent(self, prompt: list[int]) -> tuple[int | None, int]:
        """The turn to append below, and how much of its path the prompt begins with."""
        last = self._last_path
        if self.turns and prompt[: len(last)] == last:
            return len(self.turns) - 1, len(last)
        shared: list[int] = []
        for turn in self.turns:
            start = turn.prefix_length
            above = 0 if turn.parent is None else min(shared[turn.parent], start)
            if above == start:
                own = [*turn.added_token_ids, *turn.completion_token_ids]
                above += common_prefix(prompt[start : start + len(own)], own)
            shared.append(above)
        longest = max(shared, default=0)
        return (shared.index(longest) if longest else None), longest

    def branches(self) -> list[Branch]:
        """Every branch, each with all that was sampled on it, in the order of their last turns."""
        return [self._branch(leaf, {}) for leaf in self._leaves()]

    def samples(self) -> list[Branch]:
        """The branches as training samples: each sampled token is masked 1 in exactly one.

        A token on several branches belongs to the first; branches that would train nothing are
        left out.
        """
        trained: dict[int, int] = {}
        samples = [self._branch(leaf, trained) for leaf in self._leaves()]
        return [sample for sample in samples if any(sample.response_mask)]

    def prompt_token_ids(self, index: int) -> list[int]:
        """The whole prompt of a turn, as the engine had it."""
        ids: list[int] = []
        for turn, length in self._path(index):
            own = [*self.turns[turn].added_token_ids, *self.turns[turn].completion_token_ids]
            ids += self.turns[turn].added_token_ids if turn == index else own[:length]
        return ids

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

    def _leaves(self) -> list[int]:
        continued = {
            turn.parent
            for turn in self.turns
            if turn.parent is not None and turn.prefix_length == self.turns[turn.parent].path_length
        }
        return [index for index in range(len(self.turns)) if index not in continued]

    def _branch(self, leaf: int, trained: dict[int, int]) -> Branch:
        """`trained` counts, for each turn, the sampled tokens that earlier branches hold."""
        branch = Branch(leaf, [], [], [], [])
        for index, length in self._path(leaf):
            turn = self.turns[index]
            added = turn.added_token_ids[:length]
            sampled = max(0, length - len(turn.added_token_ids))
            known = min(trained.get(index, 0), sampled)
            branch.token_ids.extend(added)
            branch.token_ids.extend(turn.completion_token_ids[:sampled])
            unsampled = len(added) + known
            branch.response_mask.extend([0] * unsampled + [1] * (sampled - known))
            branch.logprobs.extend([0.0] * unsampled)
            branch.logprobs.extend(turn.logprobs[known:sampled])
            branch.weight_versions.extend([-1] * unsampled)
            branch.weight_versions.extend(turn.weight_versions[known:sampled])
            trained[index] = max(trained.get(index, 0), sampled)
        return branch

    def _path(self, leaf: int) -> list[tuple[int, int]]:
        """The turns from the conversation's start to `leaf`, and how many own ids each gives."""
        path: list[tuple[int, int]] = []
        index: int | None = leaf
        end = self.turns[leaf].path_length
        while index is not None:
            turn = self.turns[index]
            if end > turn.prefix_length:
                path.append((index, end - turn.prefix_length))
                end = turn.prefix_length
            index = turn.parent
        return path[::-1]

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads back without loss."""
        tree = _plain(self) | {"turns": [_plain(turn) for turn in self.turns]}
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Trajectory":
        """What `to_json` wrote.

        Raises:
            TrajectoryError: when the turns are no tree.
        """
        tree = json.loads(line)
        turns = [
            Turn(**turn | {"sums": tuple(turn["sums"]), "record": tuple(turn["record"])})
            for turn in tree.pop("turns")
        ]
        for index, turn in enumerate(turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise TrajectoryError(
                    "inconsistent_turn", f"turn {index}'s parent {turn.parent} is none before it"
                )
        tree["events"] = Counter(tree["events"])
        trajectory = cls(turns=turns, **tree)
        if turns:
            last = len(turns) - 1
            trajectory._last_path = [
                *trajectory.prompt_token_ids(last), *turns[last].completion_token_ids,
            ]  # fmt: skip
        return trajectory


def checksums(token_ids: Sequence[int]) -> tuple[int, int]:
    """The sum of the ids, and the sum of each id times its position from 1.

    Two sums tell of one changed id where it is and what it was: the first differs by the change,
    the second by the change times the position.
    """
    return sum(token_ids), sum(i * token for i, token in enumerate(token_ids, start=1))


def fingerprint(
    prompt_token_ids: Sequence[int],
    completion_token_ids: Sequence[int],
    logprobs: Sequence[float],
    weight_versions: Sequence[int],
) -> tuple[int, int, int]:
    """The prompt's length, the sum of its ids, and a checksum of all that was sampled."""
    sampled = array("q", [*completion_token_ids, *weight_versions]).tobytes()
    sampled += array("d", logprobs).tobytes()
    return len(prompt_token_ids), sum(prompt_token_ids), zlib.crc32(sampled)


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many ids, or characters, two sequences share at their beginnings."""
    length, step = 0, 64
    limit = min(len(a), len(b))
    while length < limit:
        step = min(step, limit - length)
        if a[length : length + step] == b[length : length + step]:
            length, step = length + step, step * 2
        elif step == 1:
            break
        else:
            step //= 2
    return length


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as a dictionary of its own fields (`asdict` would copy every list)."""
    return {
        item.name: getattr(record, item.name)
        for item in fields(record)
        if not item.name.startswith("_")
    }


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory a line; the file appears whole or not at all.

    Raises:
        TurnwiseError: when it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    with told_when_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            for trajectory in trajectories:
                file.write(trajectory.to_json() + "\n")
        temporary.replace(path)


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Read what `write_jsonl` wrote."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Trajectory.from_json(line)

"""A trajectory: every token of one attempt at one problem, exactly as the engine saw it.

It is a tree of turns. Each turn stores the ids that it adds to its parent's path; the parent is
found by comparing ids. Sub-agents, retries and edited histories make branches. Each branch is a
training sample, in which tokens that an earlier branch trains are context. Token ids are never made
from the texts of messages.

In a mixture-of-experts model, a few experts of each layer compute a token. The indices of these
experts in all layers are stored as a *row* of bytes. All rows of a model have the same length. A
request has a row for each id of its prompt and completion except the last id, which no layer has
computed yet; the row of that id belongs to the conversation's next turn.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from turnwise.core.json_types import JsonObject
from turnwise.errors import TrajectoryError
from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.images import (
    Image,
    as_json,
    image_records,
    images_in,
    images_of,
    restored,
)
from turnwise.trajectory.outcome import Outcome
from turnwise.trajectory.prompt import PlacedImage, Prompt, PromptLike, common_length
from turnwise.trajectory.provenance import Provenance
from turnwise.trajectory.records import checksums, fingerprint
from turnwise.trajectory.turn import (
    MASK,
    TEACHER,
    Branch,
    BranchPart,
    Message,
    Turn,
    turn_of,
    turn_tree,
)

Status = Literal["running", "completed", "length", "max_turns", "context_full"]


def status_after(finish_reason: str) -> Status:
    """Return the status of a trajectory whose last turn has this `finish_reason`."""
    return "length" if finish_reason == "length" else "completed"


_T = TypeVar("_T")


@dataclass(slots=True)
class Trajectory:
    """All turns of one attempt, in the order of their calls, with the attempt's status and outcome.

    Agent loops record turns and events; rewards and verdicts are the outcome (`set_outcome`).

    Example:
        >>> trajectory = Trajectory("math:1", sample_index=0)
        >>> _ = trajectory.add_turn([11, 12], [7, 2], [-0.5, -0.1], [3, 3], "stop")
        >>> _ = trajectory.add_turn([11, 12, 7, 2, 13], [8, 2], [-0.2, -0.1], [3, 4], "stop")
        >>> trajectory.turns[1].added_token_ids, trajectory.sampled_tokens
        ([13], 4)
    """

    problem_id: str
    """Name of the problem; the trajectories of one group share it."""
    sample_index: int = 0
    """Position within the group, from 0."""
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    status: Status = "running"
    """`running`, or the reason why the trajectory ended."""
    events: Counter[str] = field(default_factory=Counter)
    """Number of occurrences by kind: tool_call, tool_unknown, tool_error ..."""
    row: dict[str, str] = field(default_factory=dict)
    """Fields of the problem's data row that no message has, such as the answer, as texts for
    people."""
    turn_players: list[str] = field(default_factory=list)
    """The player of each turn, in a game that the policy plays for each player; otherwise empty."""
    environment: str = ""
    """Name of the environment, in a run with several environments."""
    outcome: Outcome = field(default_factory=Outcome)
    _last: tuple[int, Prompt] = field(
        default_factory=lambda: (-1, Prompt()), repr=False, compare=False
    )
    """Index and path of the last turn, which the next turn nearly always continues. They are in one
    tuple, because another thread may ask for a prompt while a turn is recorded."""
    _calls: dict[bool, Provenance] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def reward(self) -> float | None:
        """The outcome's reward; None until the trajectory has been judged."""
        return self.outcome.reward

    @property
    def reward_parts(self) -> Mapping[str, float]:
        return self.outcome.parts

    @property
    def turn_rewards(self) -> Sequence[float]:
        return self.outcome.turns

    @property
    def player_rewards(self) -> Mapping[str, float]:
        return self.outcome.players

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.outcome.metrics

    @property
    def judgements(self) -> Sequence[JsonObject]:
        return self.outcome.verdicts

    def set_outcome(self, **changes: object) -> None:
        """Replace parts of the outcome.

        Example:
            >>> trajectory = Trajectory("math:1")
            >>> trajectory.set_outcome(reward=1.0, metrics={"steps": 3.0})
            >>> trajectory.reward
            1.0
        """
        self.outcome = replace(self.outcome, **changes)  # type: ignore[arg-type]

    def add_turn(
        self,
        prompt: PromptLike,
        completion_token_ids: list[int],
        logprobs: list[float],
        weight_versions: list[int],
        finish_reason: str,
        prompt_logprobs: list[float | None] | None = None,
        *,
        fork_reason: str | None = None,
        messages: Sequence[Message] = (),
        adapter: str = "",
        experts: bytes = b"",
        allowed: Sequence[bytes] = (),
        distribution: Distribution | None = None,
        untrained: str = "",
    ) -> Turn:
        """Append one call of the engine; its parent is the turn with the longest common prefix.

        Args:
            prompt: The whole prompt.
            completion_token_ids: The ids after the prompt, with one log-prob and one version each.
                An id with the version `FORCED` was not sampled, and is context.
            prompt_logprobs: One log-prob for each prompt id; None if they were not requested.
            fork_reason: Reason to record if the prompt does not continue its parent; None records
                `image_changed` if only an image differs, `branched` if the prompt continues a turn
                before its parent, or else `new_conversation`.
            messages: The messages that led to this turn, for people.
            experts: A row of experts for each id of prompt and completion except the last.
            allowed: See `Turn`, also for `distribution` and `untrained`.

        Raises:
            TrajectoryError: when the lengths of ids, log-probs and versions differ.

        Example:
            >>> turn = Trajectory("math:1").add_turn([11], [7, 2], [-0.5, -0.1], [3, 3], "stop")
            >>> turn.parent, turn.fork_reason
            (None, None)
        """
        whole = Prompt.of(prompt)
        row = _row_size(experts, len(whole) + len(completion_token_ids) - 1)
        parent, shared = self.find_parent(whole)
        added = whole[shared:]
        continued = self.continued_turn(parent, shared)
        if not self.turns or (parent is not None and continued == parent):
            fork_reason = None
        elif fork_reason is None:
            fork_reason = "new_conversation" if continued is None else "branched"
            if self.continued_turn(*self.find_parent(whole, images=False)) != continued:
                fork_reason = "image_changed"
        turn = Turn(
            added,
            completion_token_ids,
            logprobs,
            weight_versions,
            finish_reason,
            prompt_logprobs[shared:] if prompt_logprobs else None,
            parent,
            shared,
            fork_reason,
            sums=checksums((added + completion_token_ids).ids),
            record=fingerprint(
                *(whole, completion_token_ids, logprobs, weight_versions, distribution, allowed)
            ),
            messages=list(messages),
            adapter=adapter,
            experts=experts[row * max(0, shared - 1) :],
            distribution=distribution,
            untrained=untrained,
            allowed=tuple(allowed),
        )
        self.turns.append(turn)
        self._last = len(self.turns) - 1, whole + completion_token_ids
        return turn

    def find_parent(self, given: PromptLike, *, images: bool = True) -> tuple[int | None, int]:
        """Return the index of a prompt's parent, and the length of the prefix that the prompt
        shares with the parent's path. `images=False` compares only the ids, not the images."""
        prompt, (index, last) = Prompt.of(given), self._last
        common = prompt.common_prefix(last) if images else common_length(prompt.ids, last.ids)
        if index >= 0 and common == len(last):
            return index, common
        after = index if index >= 0 else None
        return self.provenance(images=images).find(prompt, after, common)

    def provenance(self, *, images: bool = True) -> Provenance:
        """Return an index of the turns by their prompt and sampled ids; see `Provenance`."""
        calls = self._calls.setdefault(images, Provenance(images=images))
        for turn in self.turns[len(calls) :]:
            calls.add(turn.added, turn.completion_token_ids, turn.parent, turn.prefix_length)
        return calls

    def continued_turn(self, index: int | None, shared: int) -> int | None:
        """Return the last turn whose whole path is within the first `shared` ids of the path of
        turn `index`, or None."""
        while index is not None and shared < self.turns[index].path_length:
            shared = min(shared, self.turns[index].prefix_length)
            index = self.turns[index].parent
        return index

    def branches(self) -> list[Branch]:
        """Return every branch with all tokens sampled on it, in the order of their last turns."""
        return [self._branch(leaf, {}) for leaf in self._leaves()]

    def samples(self, oldest: int = 0) -> list[Branch]:
        """Return the branches as training samples: each token that may be trained has mask 1 in
        exactly one sample.

        A token on several branches belongs to the first of them; branches that would train no token
        are left out.

        Args:
            oldest: Oldest weight version whose tokens are trained.
        """
        trained: dict[int, int] = {}
        ends = [self._last_trainable(leaf, oldest) for leaf in self._leaves()]
        samples = [self._branch(end, trained, oldest) for end in ends]
        return [sample for sample in samples if any(sample.response_mask)]

    def choose(self, rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Train only the tokens that rows made by user code select: set the turns' stream `mask`.

        A row has the token ids of a path, or of the path's beginning, and a mask, which is 1 where
        a token is trained. Tokens that were not sampled are context whatever their mask.

        Raises:
            TrajectoryError: when a row differs from the conversation before the row's last trained
                token.

        Example:
            >>> trajectory = Trajectory("math:1")
            >>> _ = trajectory.add_turn([11, 12], [7, 2], [-0.5, -0.1], [3, 3], "stop")
            >>> trajectory.choose([([11, 12, 7, 2], [0, 0, 1, 0])])
            >>> trajectory.samples()[0].response_mask
            [0, 0, 1, 0]
        """
        calls = self.provenance(images=False)
        masks = [np.zeros(len(turn.completion_token_ids), np.float32) for turn in self.turns]
        for number, (token_ids, row_mask) in enumerate(rows):
            ids, mask_T = Prompt(token_ids), np.asarray(row_mask, np.bool_)
            place = calls.find(ids)
            there, last = (
                calls.after(place),
                int(np.flatnonzero(mask_T)[-1]) if mask_T.any() else -1,
            )
            if there is not None and place[1] < len(ids) and last >= place[1]:
                raise TrajectoryError(
                    "inexact_rows",
                    f"row {number} has token {ids.ids[place[1]]} at position {place[1]}, where the "
                    f"conversation has {there}: make rows of the answers' own ids "
                    "(prompt_token_ids and generation_token_ids of their messages)",
                )
            for index, start, count in calls.attribute(ids):
                mask_N = masks[index][:count]
                np.maximum(mask_N, mask_T[start : start + count], out=mask_N)
        for turn, mask_N in zip(self.turns, masks, strict=True):
            turn.streams[MASK] = mask_N

    def prompt(self, index: int) -> Prompt:
        """Return the whole prompt of a turn, as the engine received it."""
        end, (last, path) = self.turns[index].prompt_length, self._last
        return path[:end] if index == last else self._ids(index, end)

    def prompt_token_ids(self, index: int) -> list[int]:
        """Return the ids of a turn's prompt."""
        return self.prompt(index).tolist()

    @property
    def images(self) -> dict[str, Image]:
        """All images of turns and messages, by hash."""
        messages = [self.messages, *(turn.messages for turn in self.turns)]
        found = [each.image for turn in self.turns for each in turn.added.images]
        found += (image for each in messages for image in images_in(each))
        return {image.hash: image for image in found}

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that all turns sampled."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def final_text(self) -> str:
        """Text of the last assistant message, without special tokens; "" without such a message."""
        said = (m.get("content") for m in reversed(self.messages) if m["role"] == "assistant")
        return str(next(said, None) or "")

    def _leaves(self) -> list[int]:
        continued = {
            turn.parent
            for turn in self.turns
            if turn.parent is not None and turn.prefix_length == self.turns[turn.parent].path_length
        }
        return [index for index in range(len(self.turns)) if index not in continued]

    def _last_trainable(self, leaf: int, oldest: int) -> int:
        """Return a branch's last turn that has a token to train; later turns are left out."""
        while not any(self.turns[leaf].trainable(oldest)):
            turn = self.turns[leaf]
            if turn.parent is None or turn.prefix_length < self.turns[turn.parent].path_length:
                break
            leaf = turn.parent
        return leaf

    def _branch(self, leaf: int, trained: dict[int, int], oldest: int = 0) -> Branch:
        """Build one branch; `trained` has, for each turn, the number of its completion tokens on
        earlier branches."""
        path = self._path(leaf)
        rows: list[bytes] = []  # rows of experts, in parts; empty if a turn has no rows
        for index, length in path:
            turn = self.turns[index]
            first = int(turn.prefix_length == 0)  # 1 if there is no row of an earlier path
            count = turn.path_length - turn.prefix_length - first
            if not turn.experts and count > 0:
                rows.clear()
                break
            rows.append(turn.experts[: _row_size(turn.experts, count) * (length - first)])
        mask, logprobs, versions = list[int](), list[float](), list[int]()
        turns, allowed, parts = list[int](), dict[int, bytes](), list[BranchPart]()
        for index, length in path:
            turn = self.turns[index]
            before = min(length, len(turn.added))
            count, start = length - before, len(mask) + before
            known = min(trained.get(index, 0), count)
            own = [0] * known + turn.trainable(oldest)[known:count]
            whole = 0 not in own
            mask += [0] * before + own
            logprobs += [0.0] * before + _kept(turn.logprobs[:count], own, 0.0, whole)
            versions += [-1] * before + _kept(turn.weight_versions[:count], own, -1, whole)
            turns += [-1] * before + _kept([index] * count, own, -1, whole)
            sets = enumerate(zip(turn.allowed[:count], own, strict=True)) if turn.allowed else ()
            allowed |= {start + at: each for at, (each, is_own) in sets if each and is_own}
            trained[index] = max(trained.get(index, 0), count)
            parts.append(BranchPart(turn, start, count))
        ids, experts = self._ids(leaf), b"".join(rows)
        return Branch(leaf, ids, mask, logprobs, versions, turns, experts, allowed, tuple(parts))

    def _ids(self, leaf: int, end: int | None = None) -> Prompt:
        """Return the path of a turn, or the path's first `end` ids."""
        ids, images = array("i"), list[PlacedImage]()
        for index, length in self._path(leaf, end):
            turn, before = self.turns[index], len(self.turns[index].added)
            added = turn.added if length >= before else turn.added[:length]
            images += (each._replace(start=each.start + len(ids)) for each in added.images)
            ids.frombytes(added.ids.tobytes())
            ids.extend(turn.completion_token_ids[: max(0, length - before)])
        return Prompt(np.frombuffer(ids, np.int32), images)

    def _path(self, leaf: int, end: int | None = None) -> list[tuple[int, int]]:
        """Return the turns from the conversation's start to `leaf`, or to position `end`, each with
        the number of its own ids on the path."""
        path: list[tuple[int, int]] = []
        index: int | None = leaf
        end = self.turns[leaf].path_length if end is None else end
        while index is not None:
            turn = self.turns[index]
            if end > turn.prefix_length:
                path.append((index, end - turn.prefix_length))
                end = turn.prefix_length
            index = turn.parent
        return path[::-1]

    def to_json(self, *, whole: bool = False) -> str:
        """Return one line of JSON that `from_json` reads back without loss. If `whole`, the line
        has the bytes of the images; otherwise `save_images` writes them to files."""
        outcome = self.outcome
        tree: JsonObject = {
            "problem_id": self.problem_id,
            "sample_index": self.sample_index,
            "turns": list(map(turn_tree, self.turns)),
            "messages": self.messages,
            "reward": outcome.reward,
            "status": self.status,
            "events": self.events,
            "reward_parts": outcome.parts,
            "turn_rewards": outcome.turns,
            "row": self.row,
            "metrics": outcome.metrics,
            "judgements": outcome.verdicts,
            "turn_players": self.turn_players,
            "player_rewards": outcome.players,
            "environment": self.environment,
        }
        if images := self.images:
            tree["images"] = image_records(images, whole=whole)
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"), default=as_json)

    @classmethod
    def from_json(cls, line: str, folder: Path | None = None) -> "Trajectory":
        """Read a line that `to_json` wrote; `folder` has the images that are not in the line. Raise
        TrajectoryError when a turn's parent is not before the turn."""
        return cls.from_tree(json.loads(line), folder)

    @classmethod
    def from_tree(cls, tree: JsonObject, folder: Path | None = None) -> "Trajectory":
        """Make a trajectory from the JSON object of a line, without changing the object."""
        tree = dict(tree)
        images = images_of(tree.pop("images", {}), folder)
        turns = [turn_of(each, images) for each in tree.pop("turns")]
        for index, turn in enumerate(turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise TrajectoryError(
                    "inconsistent_turn", f"turn {index}: parent {turn.parent} is not before it"
                )
        tree["messages"] = restored(tree.get("messages", []), images)
        tree["events"] = Counter(tree["events"])
        judged = {name: tree.pop(key) for key, name in _OUTCOME.items() if key in tree}
        chosen, taught = tree.pop("chosen", None), tree.pop("teacher_logprobs", ())
        trajectory = cls(turns=turns, outcome=Outcome(**judged), **tree)
        if turns:
            trajectory._last = len(turns) - 1, trajectory._ids(len(turns) - 1)
        # Files of older runs have masks and teachers' log-probs by sample.
        if chosen is not None:
            branches = [(trajectory._branch(leaf, {}), mask) for leaf, mask in chosen]
            trajectory.choose((branch.token_ids, mask) for branch, mask in branches)
        for branch, values in zip(trajectory.samples() if taught else (), taught, strict=False):
            branch.scatter(TEACHER, values)
        return trajectory


_OUTCOME = {
    "reward": "reward",
    "reward_parts": "parts",
    "turn_rewards": "turns",
    "player_rewards": "players",
    "metrics": "metrics",
    "judgements": "verdicts",
}
"""Fields of `Outcome` by their names in files."""


def _kept(values: list[_T], own: Sequence[int], other: _T, whole: bool) -> list[_T]:
    """Return values, with `other` where `own` is 0; `whole` means that `own` is 1 everywhere."""
    return values if whole else [v if m else other for v, m in zip(values, own, strict=True)]


def _row_size(rows: bytes, count: int) -> int:
    return len(rows) // count if count else 0

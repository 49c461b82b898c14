"""A trajectory: every token of one attempt at one problem, exactly as the engine saw it.

It is a tree of turns, of which each stores the ids that it adds to those of its parent, which is
found by comparing ids. Sub-agents, retries and edited histories make branches; each is a training
sample, in which tokens that an earlier branch trains are context. No id is made from messages.
The experts of a mixture that computed a token are a *row* of bytes: their numbers in each layer.
All rows of a model have one length. A request has one for each id of its prompt and completion but
the last, which no layer has computed yet: the next turn of the conversation has it.
"""

import base64
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from turnwise.core.json_types import JsonObject
from turnwise.errors import TrajectoryError
from turnwise.trajectory.allowed import described_sets, sets_of
from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.images import (
    Image,
    PlacedImage,
    PromptIds,
    as_json,
    as_seen,
    described,
    extended,
    images_in,
    of_described,
    placed,
    restored,
)
from turnwise.trajectory.parents import Parents, common_prefix
from turnwise.trajectory.records import checksums, fingerprint

MAX_REWARD = 1e6
"""Largest absolute reward, so that squares and sums of rewards cannot overflow."""

Message = JsonObject
"""A message in OpenAI's format: `{"role": "user", "content": "..."}`."""
Status = Literal["running", "completed", "length", "max_turns", "context_full"]


def status_after(finish_reason: str) -> Status:
    """Return the status of a trajectory whose last turn has this `finish_reason`."""
    return "length" if finish_reason == "length" else "completed"


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the engine, or a part of one between tokens that a logits processor forced: the
    unsampled ids that it added, and the ids that it sampled.

    Its path, all ids from the conversation's start to its end, is the first `prefix_length` ids
    of its parent's path, then `added_token_ids`, then `completion_token_ids`.
    """

    added_token_ids: list[int]
    """Ids between the end of the parent's path and this turn's first sampled one."""
    completion_token_ids: list[int]
    logprobs: list[float]
    """Natural log of each sampled token's probability under the sampling distribution."""
    weight_versions: list[int]
    """The weight version that sampled each token."""
    finish_reason: str
    added_logprobs: list[float | None] | None = None
    """Those of the added ids, None for the first token of a sequence; None as a whole if they were
    not requested."""
    parent: int | None = None
    """Index of the turn whose path this one begins with; None if it shares no id with any."""
    prefix_length: int = 0
    """Number of ids of the parent's path that this turn begins with; all of them if bridged."""
    fork_reason: str | None = None
    """Reason why this turn continues no earlier one; None for a first or a bridged turn."""
    sums: tuple[int, int] = (0, 0)
    """`checksums` of added and completion ids together, taken when the turn was recorded."""
    record: tuple[int, int, int] = (0, 0, 0)
    """`fingerprint` of the engine's call, taken from the ids that it received and sampled."""
    messages: list[Message] = field(default_factory=list)
    """The messages that led here, for people; empty if the trajectory is one conversation."""
    adapter: str = ""
    """Name in `serving.adapters`, or in `rollout.policies`, of the adapter that sampled; "" for the
    policy of a run that has one."""
    experts: bytes = b""
    """A row for each position from the last one of the parent's path on, except for the last one of
    this path; empty if the engine returned none."""
    images: list[PlacedImage] = field(default_factory=list)
    """Images among the added ids, at their positions on this path."""
    same_call: bool = False
    """Whether it is a further part of the call of the turn before it; see `Trajectory.calls`."""
    distribution: Distribution | None = None
    """Parameters that its tokens were drawn under, if its request set any; None: those of the run's
    `sampling`."""
    untrained: str = ""
    """Reason why its tokens are context, and never trained; "" if they are trained."""
    allowed: tuple[bytes, ...] = ()
    """For each sampled token the ids that a grammar allowed there, as `pack_allowed` returns them;
    empty without a grammar."""

    def __post_init__(self) -> None:
        names = ["completion_token_ids", "logprobs", "weight_versions"]
        names += ["allowed"] if self.allowed else []
        lengths = {name: len(getattr(self, name)) for name in names}
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
    """1 on tokens that this branch trains, 0 on all others."""
    logprobs: list[float]
    """The engine's log-probs; 0.0 where the response mask is 0."""
    weight_versions: list[int]
    """-1 where the response mask is 0."""
    turns: list[int] = field(default_factory=list)
    """Index of the turn that sampled each token; -1 where the response mask is 0."""
    experts: bytes = b""
    """T - 1 rows; empty if the engine returned none for some turn."""
    images: list[PlacedImage] = field(default_factory=list)
    """Images, in the order of their positions."""
    allowed: dict[int, bytes] = field(default_factory=dict)
    """By position, the `Turn.allowed` of the trained tokens that a grammar restricted."""

    def masked(self, mask: Sequence[int]) -> "Branch":
        """Return the branch with a response mask of which each 1 is one of its own."""
        versions = [v if m else -1 for v, m in zip(self.weight_versions, mask, strict=True)]
        logprobs = [p if m else 0.0 for p, m in zip(self.logprobs, mask, strict=True)]
        turns = [turn if m else -1 for turn, m in zip(self.turns, mask, strict=True)]
        return replace(
            self, response_mask=list(mask), logprobs=logprobs, weight_versions=versions, turns=turns
        )


@dataclass(slots=True)
class Trajectory:
    """All turns of one attempt, in the order of their calls, with status and reward.

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
    reward: float | None = None
    """Weighted sum of the reward's parts; None until the trajectory has been judged."""
    status: Status = "running"
    """`running`, or the reason why it ended."""
    events: Counter[str] = field(default_factory=Counter)
    """Number of occurrences by kind: tool_call, tool_unknown, tool_error ..."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Value of each part of the reward, before its weight."""
    turn_rewards: list[float] = field(default_factory=list)
    """Share of the reward that each call earned; empty if none did. The end earned the rest."""
    row: dict[str, str] = field(default_factory=dict)
    """Fields of the problem's row that no message has, such as the answer, as texts for people."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment reported, by name."""
    judgements: list[JsonObject] = field(default_factory=list)
    """Verdicts of judges: the `judge`, its `score` from 0 to 1, `why` in its words, and the key of
    the `request` in the run's judge.jsonl."""
    turn_players: list[str] = field(default_factory=list)
    """The player of each call, in a game whose sides the policy plays; otherwise empty."""
    player_rewards: dict[str, float] = field(default_factory=dict)
    """Reward of each player of a game; `reward` is their mean."""
    environment: str = ""
    """Its name, in a run with several."""
    chosen: list[tuple[int, list[int]]] | None = None
    """Samples that user code chose: the last turn and the response mask of each; None trains every
    sampled token."""
    teacher_logprobs: list[list[float]] = field(default_factory=list)
    """A teacher's log-probs of the tokens of each of `samples`, 0.0 where the response mask is 0;
    empty if no teacher has scored them."""
    _last_path: list[int] = field(default_factory=list, repr=False, compare=False)
    """Path of the last turn; cached because the next turn nearly always continues it."""
    _parents: dict[bool, Parents] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        adapter: str = "",
        experts: bytes = b"",
        allowed: Sequence[bytes] = (),
        distribution: Distribution | None = None,
        untrained: str = "",
    ) -> Turn:
        """Append one call of the engine; its parent is the turn with the longest common prefix.

        Args:
            prompt_token_ids: The whole prompt; one with images is `PromptIds`.
            completion_token_ids: The sampled ids, with one log-prob and one version each. Ids with
                a negative version were not sampled, but forced: they are context, and divide the
                call into several turns, of which the last is returned.
            prompt_logprobs: One for each prompt id; None if they were not requested.
            fork_reason: Reason to record if the prompt does not continue its parent; None records
                `image_changed` if only an image differs, `branched` if it continues a turn before
                that, or else `new_conversation`.
            messages: The messages that led to this turn, for people.
            experts: A row for each id of prompt and completion but the last.
            allowed: See `Turn`, as for `distribution` and `untrained`.

        Raises:
            TrajectoryError: when the lengths of ids, log-probs and versions differ.

        Example:
            >>> turn = Trajectory("math:1").add_turn([11], [7, 2], [-0.5, -0.1], [3, 3], "stop")
            >>> turn.parent, turn.fork_reason
            (None, None)
        """
        prompt, images = list(prompt_token_ids), placed(prompt_token_ids)
        row = _row_size(experts, len(prompt) + len(completion_token_ids) - 1)
        lengths = {len(completion_token_ids), len(logprobs), len(weight_versions)}
        if min(weight_versions, default=0) < 0 and len(lengths) == 1:
            first = len(self.turns)
            for start, end in _sampled_parts(weight_versions):
                known = None if prompt_logprobs is None else [*prompt_logprobs, *[None] * start]
                self.add_turn(
                    extended(prompt_token_ids, completion_token_ids[:start]),
                    *(completion_token_ids[start:end], logprobs[start:end]),
                    weight_versions[start:end],
                    finish_reason if end == len(weight_versions) else "stop",
                    known,
                    fork_reason=fork_reason,
                    messages=messages,
                    adapter=adapter,
                    experts=experts[: row * (len(prompt) + end - 1)],
                    allowed=allowed[start:end],
                    distribution=distribution,
                    untrained=untrained,
                )
                prompt_logprobs, messages = None, ()
            self.turns[first + 1 :] = [replace(t, same_call=True) for t in self.turns[first + 1 :]]
            return self.turns[-1]
        parent, shared = self.find_parent(prompt_token_ids)
        added = prompt[shared:]
        continued = self.continued_turn(parent, shared)
        if not self.turns or (parent is not None and continued == parent):
            fork_reason = None
        elif fork_reason is None:
            fork_reason = "new_conversation" if continued is None else "branched"
            if self.continued_turn(*self.find_parent(prompt, images=False)) != continued:
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
            sums=checksums([*added, *completion_token_ids]),
            record=fingerprint(
                *(prompt, completion_token_ids, logprobs, weight_versions, images),
                *(distribution, allowed),
            ),
            messages=list(messages),
            adapter=adapter,
            experts=experts[row * max(0, shared - 1) :],
            images=[each for each in images if each.start >= shared],
            distribution=distribution,
            untrained=untrained,
            allowed=tuple(allowed),
        )
        self.turns.append(turn)
        self._last_path = extended(prompt_token_ids, completion_token_ids)
        return turn

    def set_reward(
        self,
        reward: float,
        parts: Mapping[str, float] | None = None,
        turns: Sequence[float] = (),
        players: Mapping[str, float] | None = None,
    ) -> None:
        """Set the reward and all that it consists of, so that nothing of an earlier one is left:
        `reward_parts`, `turn_rewards`, of each call, and `player_rewards`."""
        self.reward = reward
        self.reward_parts = dict(parts or {})
        self.turn_rewards = list(turns) if any(turns) else []
        self.player_rewards = dict(players or {})

    def calls(self) -> list[range]:
        """Return the indices of the turns of each call of the engine; what has a value for each
        call (`turn_rewards`, `turn_players`, advantages) is in their order.

        Example:
            >>> trajectory = Trajectory("math:1")
            >>> _ = trajectory.add_turn([11], [7, 8, 2], [-0.5, 0.0, -0.1], [3, -1, 3], "stop")
            >>> _ = trajectory.add_turn([11, 7, 8, 2, 12], [9], [-0.5], [3], "stop")
            >>> trajectory.calls()
            [range(0, 2), range(2, 3)]
        """
        starts = [index for index, turn in enumerate(self.turns) if not turn.same_call]
        return list(map(range, starts, [*starts[1:], len(self.turns)]))

    def call_of_turns(self) -> list[int]:
        """Return the number of the call of each turn."""
        return [number for number, turns in enumerate(self.calls()) for _ in turns]

    def find_parent(self, prompt: Sequence[int], *, images: bool = True) -> tuple[int | None, int]:
        """Return the parent's index, and the number of ids of its path the prompt begins with, with
        the same images; `images=False` compares the ids alone."""
        last, given = (
            as_seen(ids, placed(ids) if images else ()) for ids in (self._last_path, prompt)
        )
        shared = common_prefix(given, last)
        if self.turns and shared == len(last):
            return len(self.turns) - 1, shared
        if images not in self._parents:
            self._parents[images] = Parents(images=images)
        return self._parents[images].find(self.turns, given, shared)

    def continued_turn(self, index: int | None, shared: int) -> int | None:
        """Return the last turn whose path is in the first `shared` ids of a turn's, or None."""
        while index is not None and shared < self.turns[index].path_length:
            shared = min(shared, self.turns[index].prefix_length)
            index = self.turns[index].parent
        return index

    def branches(self) -> list[Branch]:
        """Return every branch with all tokens sampled on it, in the order of their last turns."""
        return [self._branch(leaf, {}) for leaf in self._leaves()]

    def samples(self) -> list[Branch]:
        """Return the branches as training samples: each sampled token has mask 1 in exactly one.

        A token on several branches belongs to the first; branches that would train no token are
        left out. After `choose`, they are the chosen ones.
        """
        if self.chosen is not None:
            return [self._branch(leaf, {}).masked(mask) for leaf, mask in self.chosen]
        trained: dict[int, int] = {}
        samples = [self._branch(leaf, trained) for leaf in self._leaves()]
        return [sample for sample in samples if any(sample.response_mask)]

    def choose(self, rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Train only rows of user code: token ids, each with a mask of 1 where it is trained.

        A row is the beginning of what the engine had and sampled. Tokens that were not sampled, or
        that an earlier row trains, are context whatever their mask; what follows the last trained
        token is left out.

        Raises:
            TrajectoryError: when a row differs from what was sampled before its last trained token.

        Example:
            >>> trajectory = Trajectory("math:1")
            >>> _ = trajectory.add_turn([11, 12], [7, 2], [-0.5, -0.1], [3, 3], "stop")
            >>> trajectory.choose([([11, 12, 7, 2], [0, 0, 1, 0])])
            >>> trajectory.samples()[0].response_mask
            [0, 0, 1, 0]
        """
        branches = (self._branch(leaf, {}) for leaf in range(len(self.turns)))
        paths = [(branch.token_ids, branch.turns) for branch in branches]
        chosen: list[tuple[int, list[int]]] = []
        trained: set[tuple[int, int]] = set()  # turns, and positions on their paths
        for number, (token_ids, row_mask) in enumerate(rows):
            ids, wanted = list(token_ids), [at for at, m in enumerate(row_mask) if m]
            shared = [common_prefix(ids, path) for path, _ in paths]
            longest = max(shared, default=0)
            others = [p for (p, _), n in zip(paths, shared, strict=True) if n == longest < len(p)]
            if others and longest < len(ids) and wanted[-1:] >= [longest]:
                raise TrajectoryError(
                    "inexact_rows",
                    f"row {number} has token {ids[longest]} at position {longest}, where the "
                    f"conversation has {others[0][longest]}: make rows of the answers' own ids "
                    "(prompt_token_ids and generation_token_ids of their messages)",
                )
            # Paths may have equal ids of which only one's were sampled; else the shortest is meant.
            best: tuple[int, int, int, set[int]] = (0, 0, -1, set())
            wanted = [at for at in wanted if at < longest]
            for leaf, (path, turns) in enumerate(paths):
                if wanted and shared[leaf] > wanted[-1]:
                    kept = {a for a in wanted if turns[a] >= 0 and (turns[a], a) not in trained}
                    best = max(best, (len(kept), -len(path), leaf, kept), key=lambda one: one[:2])
            _, _, leaf, kept = best
            if kept:
                path, turns = paths[leaf]
                trained |= {(turns[at], at) for at in kept}
                chosen.append((leaf, [int(at in kept) for at in range(len(path))]))
        self.chosen = chosen

    def prompt_token_ids(self, index: int) -> list[int]:
        """Return the whole prompt of a turn, as the engine received it."""
        ids: list[int] = []
        for turn, length in self._path(index):
            own = [*self.turns[turn].added_token_ids, *self.turns[turn].completion_token_ids]
            ids += self.turns[turn].added_token_ids if turn == index else own[:length]
        images = self.images_of(index)
        return PromptIds(ids, images) if images else ids

    def images_of(self, index: int) -> list[PlacedImage]:
        """Return the images on the path of a turn, in the order of their positions."""
        images, end = list[PlacedImage](), 0
        for turn, length in self._path(index):
            end += length
            images += [each for each in self.turns[turn].images if each.start < end]
        return images

    @property
    def images(self) -> dict[str, Image]:
        """All images of turns and messages, by hash."""
        messages = [self.messages, *(turn.messages for turn in self.turns)]
        found = [each.image for turn in self.turns for each in turn.images]
        found += (image for each in messages for image in images_in(each))
        return {image.hash: image for image in found}

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that all turns sampled."""
        return sum(len(turn.completion_token_ids) for turn in self.turns)

    @property
    def final_text(self) -> str:
        """Text of the last assistant message, without special tokens; "" if there is none."""
        said = (m.get("content") for m in reversed(self.messages) if m["role"] == "assistant")
        return str(next(said, None) or "")

    def _leaves(self) -> list[int]:
        continued = {
            turn.parent
            for turn in self.turns
            if turn.parent is not None and turn.prefix_length == self.turns[turn.parent].path_length
        }
        return [index for index in range(len(self.turns)) if index not in continued]

    def _branch(self, leaf: int, trained: dict[int, int]) -> Branch:
        """Build one branch; `trained` counts, by turn, the sampled tokens of earlier branches."""
        path = self._path(leaf)
        rows: list[bytes] = []  # of experts, for each id but the last; none if a turn has none
        for index, length in path:
            turn = self.turns[index]
            first = int(turn.prefix_length == 0)  # no row of an earlier path
            count = turn.path_length - turn.prefix_length - first
            if not turn.experts and count > 0:
                rows.clear()
                break
            rows.append(turn.experts[: _row_size(turn.experts, count) * (length - first)])
        branch = Branch(leaf, [], [], [], [], experts=b"".join(rows), images=self.images_of(leaf))
        for index, length in path:
            turn = self.turns[index]
            added = turn.added_token_ids[:length]
            sampled = max(0, length - len(turn.added_token_ids))
            known = sampled if turn.untrained else min(trained.get(index, 0), sampled)
            context = len(added) + known
            first = len(branch.token_ids) + len(added)
            for k in range(known, sampled if turn.allowed else 0):
                if turn.allowed[k]:
                    branch.allowed[first + k] = turn.allowed[k]
            branch.token_ids.extend([*added, *turn.completion_token_ids[:sampled]])
            branch.response_mask.extend([0] * context + [1] * (sampled - known))
            branch.logprobs.extend([0.0] * context + turn.logprobs[known:sampled])
            branch.weight_versions.extend([-1] * context + turn.weight_versions[known:sampled])
            branch.turns.extend([-1] * context + [index] * (sampled - known))
            trained[index] = max(trained.get(index, 0), sampled)
        return branch

    def _path(self, leaf: int) -> list[tuple[int, int]]:
        """Return the turns from the conversation's start to `leaf`, each with the number of its
        own ids on the path."""
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

    def to_json(self, *, whole: bool = False) -> str:
        """Return one line of JSON that `from_json` reads back without loss, with the bytes of the
        images if it is `whole`; otherwise `save_images` writes them beside."""
        tree = _shallow_dict(self)
        tree["turns"] = [_shallow_dict(turn) for turn in self.turns]
        for turn in tree["turns"]:
            if rows := turn.pop("experts"):
                turn["experts"] = base64.b64encode(rows).decode()
            for name in ("images", "same_call", "distribution", "untrained"):
                if not turn[name]:
                    del turn[name]
            if allowed := turn.pop("allowed"):
                turn["allowed"] = described_sets(allowed)
        if images := self.images:
            tree["images"] = described(images, whole=whole)
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"), default=as_json)

    @classmethod
    def from_json(cls, line: str, folder: Path | None = None) -> "Trajectory":
        """Read a line that `to_json` wrote; `folder` has the images that are not in it.
        TrajectoryError when a turn's parent is not before it."""
        return cls.from_tree(json.loads(line), folder)

    @classmethod
    def from_tree(cls, tree: JsonObject, folder: Path | None = None) -> "Trajectory":
        """Make a trajectory of such a line's JSON object, which is left as it is."""
        tree = dict(tree)
        images = of_described(tree.pop("images", {}), folder)
        turns = [
            Turn(
                **turn
                | {"sums": tuple(turn["sums"]), "record": tuple(turn["record"])}
                | {"experts": base64.b64decode(turn.get("experts", ""))}
                | {"images": [PlacedImage(images[k], *at) for k, *at in turn.get("images", ())]}
                | {"messages": restored(turn.get("messages", []), images)}
                | {"distribution": Distribution.of(turn.get("distribution"))}
                | {"allowed": sets_of(turn.get("allowed"))}
            )
            for turn in tree.pop("turns")
        ]
        tree["messages"] = restored(tree.get("messages", []), images)
        for index, turn in enumerate(turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise TrajectoryError(
                    "inconsistent_turn", f"turn {index}: parent {turn.parent} is not before it"
                )
        tree["events"] = Counter(tree["events"])
        if tree.get("chosen") is not None:
            tree["chosen"] = [*map(tuple, tree["chosen"])]
        trajectory = cls(turns=turns, **tree)
        if turns:
            prompt = trajectory.prompt_token_ids(len(turns) - 1)
            trajectory._last_path = extended(prompt, turns[-1].completion_token_ids)
        return trajectory


def _shallow_dict(record: Turn | Trajectory) -> JsonObject:
    """Return a dataclass as a dictionary of its public fields (`asdict` would copy every list)."""
    names = (item.name for item in fields(record))
    return {name: getattr(record, name) for name in names if not name.startswith("_")}


def _sampled_parts(weight_versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bounds of each run of sampled ids; an empty one follows forced ids at the end."""
    parts, end = list[tuple[int, int]](), 0
    for forced, run in itertools.groupby(weight_versions, lambda version: version < 0):
        start, end = end, end + sum(1 for _ in run)
        parts.append((end, end) if forced else (start, end))
    return [part for part in parts if part[0] < part[1] or part is parts[-1]]


def _row_size(rows: bytes, count: int) -> int:
    return len(rows) // count if count else 0

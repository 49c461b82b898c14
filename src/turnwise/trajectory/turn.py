"""Turns (one engine call each) and branches (paths over turns), with values of their tokens."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from turnwise.core.json_types import JsonObject
from turnwise.errors import TrajectoryError
from turnwise.trajectory.allowed import described_sets, sets_of
from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.images import Image, restored
from turnwise.trajectory.prompt import PlacedImage, Prompt

FORCED = -1
"""The weight version of a token that was not sampled, but forced by a logits processor."""
MASK, ADVANTAGE, TEACHER = "mask", "advantage", "teacher"
"""Names of turns' streams (values of completion tokens): the mask, which is 0 where a sampled token
is not trained, the advantage of each token, and a teacher's log-probs."""

Message = JsonObject
"""A message in OpenAI's format: `{"role": "user", "content": "..."}`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the engine: the ids that it added to its parent's path, and what it sampled.

    Its path, all ids from the conversation's start to the turn's end, is the first `prefix_length`
    ids of its parent's path, then `added`, then `completion_token_ids`.
    """

    added: Prompt
    """Ids of the prompt after the first `prefix_length` ids, which the parent's path has, too."""
    completion_token_ids: list[int]
    logprobs: list[float]
    """Natural log of each sampled token's probability under the sampling distribution."""
    weight_versions: list[int]
    """The weight version that sampled each token; `FORCED` for a token that was not sampled."""
    finish_reason: str
    added_logprobs: list[float | None] | None = None
    """Log-probs of the added ids, with None for the first token of a sequence; None if they were
    not requested."""
    parent: int | None = None
    """Index of the turn that shares the longest prefix with this one; None if no turn shares an
    id."""
    prefix_length: int = 0
    """Number of ids of the parent's path that this turn begins with; the whole path if bridged."""
    fork_reason: str | None = None
    """Reason why this turn does not continue an earlier turn; None for a first or a bridged
    turn."""
    sums: tuple[int, int] = (0, 0)
    """`checksums` of added and completion ids together, taken when the turn was recorded."""
    record: tuple[int, int, int] = (0, 0, 0)
    """`fingerprint` of the engine's call, taken from the ids that it received and sampled."""
    messages: list[Message] = field(default_factory=list)
    """The messages that led to this turn, for people; empty if the trajectory is one
    conversation."""
    adapter: str = ""
    """Name in `serving.adapters`, or in `rollout.policies`, of the adapter that sampled the turn;
    "" for the policy of a run with a single policy."""
    experts: bytes = b""
    """Rows of experts, one per position, from the last position shared with the parent's path to
    the last but one position of this path; empty if the engine returned none."""
    distribution: Distribution | None = None
    """Sampling parameters of the turn's tokens, if its request set any; None means the run's
    `sampling`."""
    untrained: str = ""
    """Reason why the turn's tokens are context, and never trained; "" if they are trained."""
    allowed: tuple[bytes, ...] = ()
    """For each sampled token the ids that a grammar allowed there, as `pack_allowed` returns them;
    empty without a grammar."""
    streams: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict, compare=False)
    """Values of the turn's `N` completion tokens by name, each [N]: `mask`, `advantage`, `teacher`,
    and whatever an algorithm adds for its loss (`Tokens.streams`)."""

    def __post_init__(self) -> None:
        names = ["completion_token_ids", "logprobs", "weight_versions"]
        names += ["allowed"] if self.allowed else []
        lengths = {name: len(getattr(self, name)) for name in names}
        lengths |= {name: len(values) for name, values in self.streams.items()}
        if len(set(lengths.values())) != 1:
            raise TrajectoryError("inconsistent_turn", f"a turn's lengths differ: {lengths}")

    # Turns are pickled on their way to the driver; dataclass's own methods look up the fields of
    # each turn again.

    def __getstate__(self) -> list[object]:
        return [getattr(self, name) for name in _FIELDS]

    def __setstate__(self, state: list[object]) -> None:
        for name, value in zip(_FIELDS, state, strict=True):
            object.__setattr__(self, name, value)

    @property
    def added_token_ids(self) -> list[int]:
        return self.added.tolist()

    @property
    def prompt_length(self) -> int:
        """Number of ids of the engine's prompt."""
        return self.prefix_length + len(self.added)

    @property
    def path_length(self) -> int:
        return self.prompt_length + len(self.completion_token_ids)

    @property
    def sampled_tokens(self) -> int:
        """Number of completion tokens that were sampled, not forced."""
        return len(self.completion_token_ids) - self.weight_versions.count(FORCED)

    @property
    def images(self) -> list[PlacedImage]:
        """Images among the added ids, at their positions on this path."""
        return [each._replace(start=each.start + self.prefix_length) for each in self.added.images]

    def trainable(self, oldest: int = 0) -> list[int]:
        """Return 1 for each completion token that may be trained, else 0. A token may be trained if
        weights of version `oldest` or later sampled it, and neither `untrained` nor the mask
        excludes it."""
        size, mask_N = len(self.completion_token_ids), self.streams.get(MASK)
        if self.untrained:
            return [0] * size
        first = max(0, oldest)
        if mask_N is None and min(self.weight_versions, default=first) >= first:
            return [1] * size
        wanted = [int(version >= first) for version in self.weight_versions]
        if mask_N is None:
            return wanted
        return [own * int(kept > 0) for own, kept in zip(wanted, mask_N, strict=True)]


class BranchPart(NamedTuple):
    """The first `length` completion tokens of a turn, from position `start` of a branch on."""

    turn: Turn
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A path from the conversation's start to the end of a turn that no other turn continues.

    Its lists have `T` entries, one for each token.
    """

    leaf: int
    """Index of the last turn."""
    ids: Prompt
    response_mask: list[int]
    """1 on tokens that this branch trains, 0 on all others."""
    logprobs: list[float]
    """The engine's log-probs; 0.0 where the response mask is 0."""
    weight_versions: list[int]
    """-1 where the response mask is 0."""
    turns: list[int] = field(default_factory=list)
    """Index of the turn that sampled each token; -1 where the response mask is 0."""
    experts: bytes = b""
    """T - 1 rows of experts; empty if the engine returned none for some turn."""
    allowed: dict[int, bytes] = field(default_factory=dict)
    """The ids allowed (`Turn.allowed`) at each trained token that a grammar restricted, by position
    on the path."""
    parts: tuple[BranchPart, ...] = ()
    """The branch's turns in order, each with its completion tokens on the branch."""

    @property
    def token_ids(self) -> list[int]:
        return self.ids.tolist()

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        return self.ids.images

    def gather(self, stream: str) -> npt.NDArray[np.float32]:
        """Return a stream of the turns: [T], 0.0 where the response mask is 0 or a turn lacks the
        stream.

        Example:
            >>> trajectory = Trajectory("math:1")
            >>> turn = trajectory.add_turn([11, 12], [7, 2], [-0.5, -0.1], [3, 3], "stop")
            >>> turn.streams["advantage"] = np.array([0.5, 1.0], np.float32)
            >>> trajectory.samples()[0].gather("advantage").tolist()
            [0.0, 0.0, 0.5, 1.0]
        """
        values_T = np.zeros(len(self.ids), np.float32)
        for turn, start, count in self.parts:
            if (values_N := turn.streams.get(stream)) is not None:
                values_T[start : start + count] = values_N[:count]
        return np.where(np.asarray(self.response_mask, np.bool_), values_T, np.float32(0.0))

    def scatter(self, stream: str, values_T: npt.ArrayLike) -> None:
        """Write values of the branch's trained tokens, [T], to a stream of their turns."""
        given_T, mask_T = np.asarray(values_T, np.float32), np.asarray(self.response_mask, np.bool_)
        for turn, start, count in self.parts:
            size = len(turn.completion_token_ids)
            values_N = turn.streams.setdefault(stream, np.zeros(size, np.float32))
            place, own = slice(start, start + count), mask_T[start : start + count]
            values_N[:count][own] = given_T[place][own]


_OPTIONAL: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "experts": (lambda rows: base64.b64encode(rows).decode(), base64.b64decode),
    "distribution": (lambda values: values, Distribution.of),
    "untrained": (str, str),
    "allowed": (described_sets, sets_of),
    "streams": (
        lambda streams: {name: values_N.tolist() for name, values_N in streams.items()},
        lambda tree: {name: np.asarray(values, np.float32) for name, values in tree.items()},
    ),
}
"""Fields of turns that files leave out where they are empty, with the functions that write and read
them."""
_FIELDS = tuple(item.name for item in fields(Turn))
_ALWAYS = tuple(name for name in _FIELDS if name not in ("added", *_OPTIONAL))
"""Fields of turns that files always have."""


def turn_tree(turn: Turn) -> JsonObject:
    """Return a turn as JSON (`asdict` would copy every list), without the advantages, which are in
    the run's files of token values."""
    tree: JsonObject = {"added_token_ids": turn.added_token_ids}
    tree |= {name: getattr(turn, name) for name in _ALWAYS}
    if images := turn.images:
        tree["images"] = images
    for name, (write, _) in _OPTIONAL.items():
        value = getattr(turn, name)
        if name == "streams":
            value = {key: each for key, each in value.items() if key != ADVANTAGE}
        if value:
            tree[name] = write(value)
    return tree


def turn_of(tree: JsonObject, images: Mapping[str, Image]) -> Turn:
    """Read a turn that `turn_tree` made; the field `same_call` of older files is ignored."""
    tree = {name: value for name, value in tree.items() if name != "same_call"}
    start = tree.get("prefix_length", 0)
    placed = [PlacedImage(images[key], at - start, n) for key, at, n in tree.pop("images", ())]
    read = {name: read(tree[name]) for name, (_, read) in _OPTIONAL.items() if name in tree}
    tree |= read | {"sums": tuple(tree["sums"]), "record": tuple(tree["record"])}
    tree["messages"] = restored(tree.get("messages", []), images)
    return Turn(Prompt(tree.pop("added_token_ids"), placed), **tree)

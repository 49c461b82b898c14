"""The exactness audit: checks that every trained token was sampled.

It replays a trajectory's turns independently of the code that makes samples, and compares every
token of every sample with the engine's record. Reports can be added to get the report of a whole
run.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from turnwise.core.json_types import JsonObject
from turnwise.trajectory.prompt import Prompt
from turnwise.trajectory.records import checksums, fingerprint
from turnwise.trajectory.trajectory import Trajectory
from turnwise.trajectory.turn import FORCED, MASK, Branch, Turn


@dataclass(slots=True)
class ExactnessReport:
    """Counts of sampled, trained and exact tokens; reports of several trajectories can be added."""

    trajectories: int = 0
    turns: int = 0
    bridged: int = 0
    """Turns whose prompt begins with every token of the parent's path."""
    forked: Counter[str] = field(default_factory=Counter)
    """Turns that began a new branch, by reason."""
    tokens_sampled: int = 0
    tokens_trained: int = 0
    """Tokens with response mask 1 in the samples."""
    tokens_exact: int = 0
    """Trained tokens whose id, log-prob, version and whole context match the engine's record."""
    masked: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that are not trained, by reason."""
    violations: int = 0
    """Number of differences found."""
    first_violation: str | None = None
    """Description of the first difference; None if nothing differs."""

    def __iadd__(self, other: "ExactnessReport") -> "ExactnessReport":
        first = self.first_violation or other.first_violation
        for item in fields(self):
            if item.name != "first_violation":
                ours, theirs = getattr(self, item.name), getattr(other, item.name)
                setattr(self, item.name, ours + theirs)
        self.first_violation = first
        return self

    @property
    def percent(self) -> float:
        """Share of trained tokens that are exact, from 0 to 100."""
        return 100.0 * self.tokens_exact / self.tokens_trained if self.tokens_trained else 100.0

    def to_dict(self) -> JsonObject:
        """Return all fields and `exact_percent` as plain values, for metrics and checkpoints."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        counters = {key: dict(sorted(values[key].items())) for key in ("masked", "forked")}
        return {"exact_percent": self.percent, **values, **counters}

    @classmethod
    def from_dict(cls, tree: JsonObject) -> "ExactnessReport":
        """Build a report from the values that `to_dict` returned."""
        values = {key: value for key, value in tree.items() if key != "exact_percent"}
        counters = {key: Counter(values[key]) for key in ("masked", "forked")}
        return cls(**{**values, **counters})

    def __str__(self) -> str:
        """Return two lines for people, or three if there is a violation."""
        # Rounded down, so that 100 % means that all tokens are exact.
        percent = "100" if self.percent == 100.0 else f"{math.floor(self.percent * 100) / 100:.2f}"
        trained = f"{percent} % of {self.tokens_trained:,} trained tokens"
        if not self.tokens_trained:
            trained = "no token was trained"
        masked, forked = (
            ", ".join(f"{n:,} {why}" for why, n in counts.items())
            for counts in (self.masked, self.forked)
        )
        text = f"exact      {trained}; {self.tokens_sampled:,} sampled"
        text += f", not trained: {masked}" if masked else ""
        text += f"\n           {self.turns:,} turns, {self.bridged:,} bridged, "
        text += f"forked: {forked}" if forked else "none forked"
        if self.first_violation is not None:
            text += f"\n           {self.violations} violations; first: {self.first_violation}"
        return text


def audit(
    trajectory: Trajectory,
    samples: Sequence[Branch] | None = None,
    *,
    masked: str | None = None,
) -> ExactnessReport:
    """Replay a trajectory's turns, and compare its training samples with them.

    Lengths must agree, and each turn's ids must be the recorded ids. Each trained token must have
    been sampled in the context that the engine had, including images. It must be trained only once,
    and as a token of its own turn. Tokens of an `untrained` turn, and tokens that a mask leaves
    out, must not be trained. Log-probs must be finite, and weight versions valid.

    Args:
        samples: The training samples; None takes `trajectory.samples()`.
        masked: Reason why sampled tokens are in no sample; None makes such tokens a violation.

    Example:
        >>> report = audit(trajectory)
        >>> assert report.violations == 0, report.first_violation
    """
    turns = trajectory.turns
    found = list(_check_turns(turns))
    would_train = trajectory.sampled_tokens
    if samples is None:
        samples = [] if found else trajectory.samples()
    if not found:
        would_train = sum(sum(sample.response_mask) for sample in samples)
    report = ExactnessReport(
        trajectories=1,
        turns=len(turns),
        bridged=sum(_continues(turns, turn) for turn in turns),
        forked=Counter(turn.fork_reason for turn in turns if turn.fork_reason is not None),
        tokens_sampled=trajectory.sampled_tokens,
        tokens_trained=would_train,
    )
    name = f"{trajectory.problem_id} sample {trajectory.sample_index}"
    trained: dict[int, set[int]] = {}
    # An inconsistent record proves nothing about samples.
    for index, sample in enumerate([] if found else samples):
        exact, problems = _check_sample(turns, sample, trained)
        report.tokens_exact += exact
        found += [f"training sample {index}: {problem}" for problem in problems]
    for turn in turns if not found else ():
        left_out = turn.sampled_tokens - sum(turn.trainable())
        if left_out:
            report.masked[turn.untrained or "not_chosen"] += left_out
    missing = report.tokens_sampled - report.masked.total()
    missing -= sum(len(known) for known in trained.values())
    if missing and masked is not None:
        report.masked[masked] += missing
    elif missing and not found:
        found.append(f"{missing} sampled tokens are in no training sample")
    report.violations = len(found)
    report.first_violation = f"{name}, {found[0]}" if found else None
    return report


def _check_turns(turns: Sequence[Turn]) -> Iterator[str]:
    totals: list[int] = []  # for each turn, the recorded sum of the ids on its path
    seen = False
    for index, turn in enumerate(turns):
        if turn.parent is not None and not 0 <= turn.parent < index:
            yield f"turn {index}: its parent {turn.parent} is not a turn before it"
            return
        available = 0 if turn.parent is None else turns[turn.parent].path_length
        if not 0 <= turn.prefix_length <= available:
            yield f"turn {index}: shares {turn.prefix_length} tokens with a path of {available}"
            return
        lengths = len(turn.completion_token_ids), len(turn.logprobs), len(turn.weight_versions)
        if len(set(lengths)) != 1:
            yield f"turn {index}: tokens, log-probs and versions are {lengths}"
            return
        before = 0  # sum of the ids that its prompt shares with the parent's path
        if _continues(turns, turn):
            before = totals[turn.parent or 0]
        elif turn.parent is not None:
            before = int(_path(turns, turn.parent).ids[: turn.prefix_length].sum(dtype=np.int64))
        totals.append(before + turn.sums[0])
        seen = seen or bool(turn.added.images)
        prompt = _path(turns, index)[: turn.prompt_length] if seen else Prompt()
        for problem in _differences(turn, prompt, before):
            yield f"turn {index}: {problem}"
        if any(one.start < 0 or one.end > len(turn.added) for one in turn.added.images):
            yield f"turn {index}: an image of its prompt is not among the ids that it added"


def _differences(turn: Turn, prompt: Prompt, total_before: int) -> list[str]:
    """Return the differences of a stored turn from its record. `prompt` has the images of the
    turn's prompt; `total_before` is the sum of the ids that the prompt shares with the parent's
    path."""
    added, sampled = turn.added.ids, Prompt(turn.completion_token_ids).ids
    ids_T = np.concatenate([added, sampled])
    total, weighted = checksums(ids_T)
    change, moment = total - turn.sums[0], weighted - turn.sums[1]
    if change or moment:
        position = moment // change - 1 if change and moment % change == 0 else -1
        if not 0 <= position < len(ids_T):
            return [f"several of its {len(ids_T)} token ids are not those recorded"]
        at = position - len(added)
        where = f"sampled token {at}" if at >= 0 else f"added token {position}"
        right = int(ids_T[position]) - change
        return [f"{where} is {ids_T[position]}, where {right} was recorded"]
    # A forced token has no log-prob of its own.
    found = [
        f"sampled token {position} has log-prob {logprob}"
        for position, logprob in enumerate(turn.logprobs)
        if not (math.isfinite(logprob) and logprob <= 1e-4)
        and turn.weight_versions[position] != FORCED
    ]
    # Versions may fall, because a turn may move to an engine that has not loaded an update yet.
    found += [
        f"sampled token {position} has weight version {version}"
        for position, version in enumerate(turn.weight_versions)
        if version < FORCED
    ]
    if found:
        return found
    length = turn.prompt_length
    if (length, total_before + int(added.sum(dtype=np.int64))) != turn.record[:2]:
        engines = turn.record[0]
        return [f"its prompt of {length} tokens is not the prompt of {engines} that the engine had"]
    made = turn.completion_token_ids, turn.logprobs, turn.weight_versions
    if fingerprint(prompt, *made, turn.distribution, turn.allowed)[2] != turn.record[2]:
        what = "images, sampled tokens, log-probs, versions or sampling parameters"
        return [f"its {what} are not those recorded"]
    return []


def _continues(turns: Sequence[Turn], turn: Turn) -> bool:
    return turn.parent is not None and turn.prefix_length == turns[turn.parent].path_length


def _segments(turns: Sequence[Turn], leaf: int) -> list[tuple[int, Prompt]]:
    """Return the turns from the conversation's start to a leaf, each with its ids on the path."""
    segments: list[tuple[int, Prompt]] = []
    index: int | None = leaf
    end = turns[leaf].path_length
    while index is not None:
        turn = turns[index]
        length = max(0, end - turn.prefix_length)
        own = turn.added + turn.completion_token_ids
        segments.append((index, own[:length]))
        end, index = min(end, turn.prefix_length), turn.parent
    return segments[::-1]


def _path(turns: Sequence[Turn], leaf: int) -> Prompt:
    return Prompt.joined(*(own for _, own in _segments(turns, leaf)))


def _check_sample(
    turns: Sequence[Turn], sample: Branch, trained: dict[int, set[int]]
) -> tuple[int, list[str]]:
    """Return the number of exact tokens, and a sentence about each difference. `trained` has the
    sampled tokens that earlier samples train, by turn; add this sample's tokens to it."""
    length = len(sample.ids)
    lists = (sample.response_mask, sample.logprobs, sample.weight_versions, sample.turns)
    if (lengths := {len(values) for values in lists}) != {length}:
        what = "masks, log-probs, versions and turns"
        return 0, [f"{length} tokens, but {what} of {sorted(lengths)}"]
    if not 0 <= sample.leaf < len(turns) or turns[sample.leaf].path_length != length:
        return 0, [f"{length} tokens are no branch that ends with turn {sample.leaf}"]
    segments, token_ids = _segments(turns, sample.leaf), sample.token_ids
    if sample.images != Prompt.joined(*(own for _, own in segments)).images:
        return 0, [f"its images are not those that turn {sample.leaf} had"]
    problems: list[str] = []
    exact = start = 0
    for index, own in segments:
        turn, ids = turns[index], own.tolist()
        first = start + min(len(ids), len(turn.added))
        end = start + len(ids)
        known = trained.setdefault(index, set())
        whole = (
            not known
            and 0 not in turn.trainable()[: end - first]
            and token_ids[start:end] == ids
            and not any(sample.response_mask[start:first])
            and all(sample.response_mask[first:end])
            and sample.logprobs[first:end] == turn.logprobs[: end - first]
            and sample.weight_versions[first:end] == turn.weight_versions[: end - first]
            and sample.turns[first:end] == [index] * (end - first)
        )
        if whole:
            known.update(range(end - first))
            exact += 0 if problems else end - first
        for position in () if whole else range(start, end):
            origin = index, position - first, ids[position - start]
            token = token_ids[position]
            if problem := _check_token(turn, origin, sample, (position, token), known):
                problems.append(problem)
            exact += bool(sample.response_mask[position]) and not problems
        start = end
    return exact, problems


def _check_token(
    turn: Turn,
    origin: tuple[int, int, int],
    sample: Branch,
    place: tuple[int, int],
    trained: set[int],
) -> str | None:
    """Return a sentence about the first difference of one token; None if the token is exact.
    `origin` has the token's turn, its index among the turn's sampled tokens (negative in the
    prompt), and its recorded id; `place` has its position in the sample, and the id at that
    position."""
    (position, token), (index, sampled, recorded_id) = place, origin
    if token != recorded_id:
        source = "sampled" if sampled >= 0 else "had in its prompt"
        return f"token {position} is {token}, where turn {index} {source} {recorded_id}"
    if not sample.response_mask[position]:
        return None
    if sampled < 0 or turn.weight_versions[sampled] == FORCED:
        return f"token {position} ({token}) is trained but was not sampled"
    if sampled in trained:
        return f"token {position} ({token}) is trained twice"
    if turn.untrained:
        return f"token {position} ({token}) is trained, and its turn is context: {turn.untrained}"
    if MASK in turn.streams and not turn.streams[MASK][sampled]:
        return f"token {position} ({token}) is trained, and its mask leaves it out"
    trained.add(sampled)
    for name, ours, recorded in (
        ("log-prob", sample.logprobs[position], turn.logprobs[sampled]),
        ("weight version", sample.weight_versions[position], turn.weight_versions[sampled]),
        ("turn", sample.turns[position], index),
    ):
        if ours != recorded:
            return f"token {position} ({token}) has {name} {ours}, where {recorded} was sampled"
    return None

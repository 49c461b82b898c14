"""A training sample: one branch of a trajectory, with everything that the loss needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from turnwise.trajectory import Distribution, Prompt, PromptLike
from turnwise.trajectory.prompt import Ids, PlacedImage

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Sample:
    """`T` tokens of one branch, trained where `response_mask_T` is True."""

    ids: Prompt
    """Prompt, answers and tool results, as the engine saw them."""
    response_mask_T: npt.NDArray[np.bool_]
    """True at trained tokens; never at the first token, which has no prefix."""
    logprobs_T: npt.NDArray[np.float32]
    """The engine's log-probs; 0.0 where the mask is False."""
    weight_versions_T: npt.NDArray[np.int64]
    """Weight version that sampled each token; -1 where the mask is False."""
    advantages_T: npt.NDArray[np.float32]
    """Advantage of each trained token; with a value model, the token's reward. 0.0 where the mask
    is False."""
    calls_T: npt.NDArray[np.int64]
    """Index of the engine call that sampled each trained token; -1 where the mask is False."""
    sequence: int
    """Number of the sequence. Samples of one sequence share one ratio if the loss has a ratio per
    sequence, and share one weight if the correction has a weight per sequence."""
    pair_id: int
    """Number of the pair of a chosen and a rejected trajectory (DPO); samples of one pair stay in
    one micro-batch. Without pairs, each sequence has its own number."""
    trajectory: int
    """Number of the trajectory. Samples of one trajectory count as one in the batch's mean and stay
    in one update. The two sequences of a pair have one trajectory number, so they count as one."""
    counted_only: bool
    """Whether the sample only counts in the batch's totals, without being computed."""
    experts: bytes = b""
    """T - 1 rows of `Turn.experts` (the experts that the engine chose for each token), which the
    trainer's routers repeat; empty if the routers choose for themselves."""
    teacher_weights: tuple[float, float] = (0.0, 0.0)
    """Factors of the divergence from the teacher, in the advantages and in the loss."""
    distributions: Mapping[int, Distribution] = field(default_factory=dict)
    """Distributions that tokens were drawn from, by the index of the engine call; tokens of all
    other calls were drawn under the run's `sampling`."""
    allowed: Mapping[int, bytes] = field(default_factory=dict)
    """`Turn.allowed` (the ids that a grammar allowed) by position, for each restricted trained
    token."""
    targets_T: npt.NDArray[np.int64] | None = None
    """Ids to score in place of the trained tokens: [T], or [T, K] for `K` ids at each token.
    Advantages, log-probs and streams then have this shape. None: score the tokens themselves."""
    policy: str = "policy"
    """Name of the policy that the sample trains."""
    streams: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Additional values of each trained token, by name, for losses (`Tokens.streams`); `teacher`
    has the log-probs of a teacher that runs outside the trainer's ranks."""

    @classmethod
    def of(
        cls,
        ids: PromptLike,
        response_mask: Sequence[int],
        logprobs: Sequence[float],
        weight_versions: Sequence[int],
        advantage: npt.ArrayLike,
        sequence: int,
        pair_id: int | None = None,
        trajectory: int | None = None,
        counted_only: bool = False,
        calls: npt.ArrayLike | None = None,
        experts: bytes = b"",
        teacher_weights: tuple[float, float] = (0.0, 0.0),
        distributions: Mapping[int, Distribution] | None = None,
        allowed: Mapping[int, bytes] | None = None,
        policy: str = "policy",
        streams: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> "Sample":
        """Make a sample from lists of equal length; `advantage` is one value for all tokens, or one
        value for each token. By default, all tokens come from one call, and the numbers of the pair
        and the trajectory are the sequence's."""
        lengths = {len(x) for x in (ids, response_mask, logprobs, weight_versions)}
        assert len(lengths) == 1, f"a sample's lengths differ: {sorted(lengths)}"
        mask = np.asarray(response_mask, dtype=np.bool_)
        mask[:1] = False
        pair_id = sequence if pair_id is None else pair_id
        return cls(
            Prompt.of(ids),
            mask,
            np.asarray(logprobs, dtype=np.float32),
            np.asarray(weight_versions, dtype=np.int64),
            np.where(mask, np.asarray(advantage, dtype=np.float32), np.float32(0.0)),
            np.where(mask, np.asarray(0 if calls is None else calls, dtype=np.int64), -1),
            sequence,
            pair_id,
            pair_id if trajectory is None else trajectory,
            counted_only,
            experts,
            teacher_weights,
            distributions or {},
            allowed or {},
            policy=policy,
            streams=streams or {},
        )

    @classmethod
    def to_score(cls, ids: PromptLike, mask: Sequence[int], number: int = 0) -> "Sample":
        """Make a sample whose tokens with `mask` 1 are scored but not trained."""
        none = [0] * len(ids)
        return cls.of(ids, mask, none, none, 0.0, number)

    @property
    def token_ids_T(self) -> Ids:
        return self.ids.ids

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        return self.ids.images

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def advantage(self) -> float:
        """Mean advantage of the trained tokens; 0 if no token is trained."""
        return float(self.advantages_T.sum() / max(1, self.trained))

    @property
    def trained(self) -> int:
        return int(self.response_mask_T.sum())

    @property
    def width(self) -> int:
        """Number of targets of each trained token, `K`."""
        return 1 if self.targets_T is None else self.targets_T[0].size

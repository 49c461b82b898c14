"""The section `algorithm`: advantage, loss, KL penalty and corrections."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from turnwise.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Section,
)
from turnwise.config.data import OtherModel


class Grpo(Section):
    """(r - mean) / std within the group."""

    name: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch"] = "group"
    """Rewards whose standard deviation is the divisor: the rewards of the group (group), or of the
    whole batch (batch)."""


class DrGrpo(Section):
    """r - mean within the group."""

    name: Literal["dr_grpo"] = "dr_grpo"


class Rloo(Section):
    """r - mean of the other rewards in the group."""

    name: Literal["rloo"] = "rloo"


class ReinforcePP(Section):
    """r, minus the group mean if `baseline` is group, normalised over the batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "group"
    """Baseline subtracted from each reward: the mean of its group (group), or none."""


class Gdpo(Section):
    """Reward parts normalised within the group; their weighted sum normalised over the batch."""

    name: Literal["gdpo"] = "gdpo"


class TurnReturns(Section):
    """Discounted return from each turn on, minus the group's mean return at the same turn."""

    name: Literal["turn_returns"] = "turn_returns"
    gamma: Fraction = 1.0
    """Discount per turn."""
    scale: bool = True
    """Divide by the standard deviation over the group, as grpo does."""


class MtGrpo(Section):
    """GRPO's outcome advantage; turns before the last also have one for their own rewards."""

    name: Literal["mt_grpo"] = "mt_grpo"
    outcome_weight: NonNegativeFloat = 1.0
    """Weight of the outcome's advantage in the turns before the last."""


class Gae(Section):
    """Generalised advantage estimation with a value model, as in PPO; normalised over the batch."""

    name: Literal["gae"] = "gae"
    level: Literal["token", "turn"] = "token"
    """Time step: a token (token), or a turn (turn), whose tokens all have the turn's advantage."""
    gamma: Fraction = 1.0
    """Discount per time step."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of GAE: 0 relies on the value model, 1 on the rewards."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate of the value model."""
    clip: PositiveFloat = 0.2
    """Largest change of a value in one step."""
    warmup_steps: NonNegativeInt = 0
    """Number of initial training steps that train only the value model."""
    model: OtherModel = OtherModel()
    """Initial value model: a causal language model, to which a head that predicts 0 is added, or a
    reward model (sequence classification, one output), which keeps its own head."""


class NoAdvantage(Section):
    """0 for every trajectory: only algorithm.teacher or penalties train; rewards are measured."""

    name: Literal["none"] = "none"


class PpoClip(Section):
    """Clipped ratio per token."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio where the advantage is negative; null sets no bound."""


class Gspo(Section):
    """Clipped ratio per sequence."""

    name: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence's ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio where the advantage is negative; null sets no bound."""


class Cispo(Section):
    """Clipped importance weights; every token keeps its gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 1.0
    """The weight is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=-1)] = 0.28
    """The weight is clipped above 1 + clip_high."""
    level: Literal["token", "sequence"] = "token"
    """Ratio that is clipped: the token's (token); or its sequence's (sequence), as in gspo."""

    def mistakes(self) -> Iterator[str]:
        if self.clip_high + self.clip_low <= 0:
            yield f"1 + clip_high {self.clip_high:g} must exceed 1 - clip_low {self.clip_low:g}"


class Sapo(Section):
    """Smooth gate around a ratio of 1 in place of a clip."""

    name: Literal["sapo"] = "sapo"
    temperature_pos: PositiveFloat = 1.0
    """Steepness of the gate where the advantage is positive."""
    temperature_neg: PositiveFloat = 1.05
    """Steepness of the gate where the advantage is not positive."""
    level: Literal["token", "sequence"] = "token"
    """Ratio that is gated: the token's (token); or its sequence's (sequence), as in gspo."""


class Vespo(Section):
    """Smooth weight of a sequence's whole ratio; every token keeps its gradient."""

    name: Literal["vespo"] = "vespo"
    k_pos: NonNegativeFloat = 2.0
    """Exponent of the ratio where the advantage is not negative. A higher value lowers the weights
    of ratios below 1."""
    lambda_pos: PositiveFloat = 3.0
    """Rate of decay with the ratio where the advantage is not negative. A higher value lowers the
    weights of ratios above 1."""
    k_neg: NonNegativeFloat = 3.0
    """Exponent of the ratio where the advantage is negative; see k_pos."""
    lambda_neg: PositiveFloat = 2.0
    """Rate of decay with the ratio where the advantage is negative; see lambda_pos."""


class Dppo(Section):
    """Importance weights without a clip; tokens whose probability moved too far are masked."""

    name: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between the trainer's and the engine's policy at a token, over two outcomes (the
    sampled token, and all other tokens together): total variation (tv), or Kullback-Leibler in nats
    (kl)."""
    delta: PositiveFloat | None = None
    """Divergence above which a token is masked, if its probability has moved in the direction of
    its advantage; null is 0.2 for tv and 0.05 for kl."""


class Dpo(Section):
    """Online DPO: each group's best and worst trajectories form a pair; advantages are not used."""

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model."""


class CrossEntropy(Section):
    """Log-likelihood weighted by the advantage, without a ratio: the loss of `turnwise sft`."""

    name: Literal["cross_entropy"] = "cross_entropy"


OWN_CLASS = "package.module:Class"  # form of a name that refers to a user-defined class


class OwnAdvantage(Section):
    """Your own `Advantage`; all keys except name are passed to its constructor."""

    model_config = ConfigDict(extra="allow")
    name: str = OWN_CLASS


class OwnLoss(Section):
    """Your own `Loss`; all keys except name are passed to its constructor."""

    model_config = ConfigDict(extra="allow")
    name: str = OWN_CLASS


PARTS = ("algorithm.advantage", "algorithm.loss")  # sections that may be a bare name


def _kind_of(part: object) -> str | None:
    """Return a built-in part's name, `OWN_CLASS` for a user-defined one, None for anything else."""
    name = part.get("name") if isinstance(part, dict) else getattr(part, "name", None)
    return OWN_CLASS if isinstance(name, str) and ":" in name else name


class KlConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight of the KL penalty towards the reference model."""
    model: OtherModel = OtherModel()
    """Reference model for the KL penalty and for loss dpo. It is loaded if one of them needs it, or
    if its path is set."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence, in Schulman's notation."""
    where: Literal["loss", "reward"] = "loss"
    """Place of the penalty: added to the loss, or subtracted from each token's reward."""
    importance_weight: bool = False
    """Multiply a token's divergence in the loss by its importance ratio and its correction. This
    makes k3 and its gradient unbiased for off-policy tokens, as far as the correction is
    unbiased."""
    sync_steps: NonNegativeInt = 0
    """Number of optimizer steps between moves of the reference model towards the policy (TR-DPO),
    without model.lora; 0 never moves it."""
    mixup_alpha: Fraction = 0.6
    """Share of the policy in each move: ref = alpha * policy + (1 - alpha) * ref."""

    def mistakes(self) -> Iterator[str]:
        if self.importance_weight and self.where != "loss":
            yield "importance_weight needs the penalty in the loss: set where to loss"
        if self.coef and self.estimator == "k1" and self.where == "loss":
            yield (
                "estimator k1 in the loss has zero gradient on average: set estimator to k2 or k3, "
                "or where to reward"
            )


class TeacherConfig(Section):
    """A model from which the policy learns how likely each of its own tokens should be."""

    model: str | None = None
    """Folder or Hugging Face name of a model with the policy's tokenizer; with url, the model's
    name at the server (null sends no name)."""
    url: str | None = None
    """URL of a server, up to and including /v1, whose completions API returns the log-probs of a
    prompt (echo with logprobs); null loads the model."""
    api_key_variable: str | None = None
    """Name of the environment variable with the server's key; null sends no key."""
    engines: NonNegativeInt = 0
    """Number of engines that load the model and score trajectories while other trajectories run. 0
    loads the model into the trainer's ranks, in place of a reference model, and scores before each
    step."""
    weight: PositiveFloat = 1.0
    """Factor of the reverse KL divergence from the teacher."""
    where: Literal["advantage", "loss"] = "advantage"
    """Place of the divergence: subtracted from each token's advantage, or added to its loss."""

    @property
    def in_ranks(self) -> bool:
        return self.url is None and not self.engines

    @property
    def source(self) -> tuple[object, ...]:
        """Identity of the scorer: teachers with equal sources share one scorer."""
        return self.model, self.url, self.engines, self.api_key_variable

    @property
    def weights(self) -> tuple[float, float]:
        """Factors of the divergence in the advantages, and in the loss."""
        return (self.weight, 0.0) if self.where == "advantage" else (0.0, self.weight)

    def mistakes(self) -> Iterator[str]:
        if self.model is None and self.url is None:
            yield "a teacher is a model, or the url of a server: set one of them"
        if (self.engines and self.url) or (self.api_key_variable and not self.url):
            yield "api_key_variable applies to a url, engines to a model without one"


class CorrectionConfig(Section):
    name: Literal[
        "none", "token_tis", "sequence_tis", "geometric_tis", "mask", "token_mask", "icepop",
        "sequence_mask", "geometric_mask",
    ] = "none"  # fmt: skip
    """Correction for the mismatch between engine and trainer. none computes the importance ratio
    against the engine's log-probs. All other values compute this ratio against the trainer's
    log-probs before the step, and multiply each token by a weight that depends on the token's ratio
    w = trainer / engine. For token_tis, the weight is min(w, `high`). If w is between `low` and
    `high`, the weight is 1 for mask, and w for token_mask and icepop (whose default bounds are
    those of its paper); for any other w, it is 0. sequence_tis and sequence_mask are token_tis and
    token_mask with the product of w over the sequence in place of w; geometric_tis and
    geometric_mask are token_tis and mask with the geometric mean of w over the sequence."""
    low: PositiveFloat | None = None
    """Smallest trainer / engine ratio that the masks keep; null is 0.5, or 0.99 for
    geometric_mask."""
    high: PositiveFloat | None = None
    """Largest weight of the three tis corrections, and largest trainer / engine ratio that the
    masks keep; null is 2, or 5 for icepop and 1.01 for geometric_mask."""
    stale_only: bool = False
    """Correct only tokens sampled from weights older than those at the start of the step."""

    def mistakes(self) -> Iterator[str]:
        if self.low is not None and self.low > 1:
            yield f"low {self.low:g} must be at most 1"
        if self.high is not None and self.high < 1:
            yield f"high {self.high:g} must be at least 1"


class EntropyConfig(Section):
    """The policy's entropy at trained tokens: as a bonus in the loss, and as a filter of tokens."""

    coef: NonNegativeFloat = 0.0
    """Weight of the bonus: the loss is lowered by coef times the mean entropy, in nats, of the
    update's trained tokens. If adaptive is true, this is the initial coef."""
    adaptive: bool = False
    """Adapt coef after each update: add coef_delta if the mean entropy was at most target, or else
    subtract it. The bonus is part of the loss only after an update at or below target."""
    target: PositiveFloat = 0.2
    """Mean entropy in nats at and below which an adaptive bonus applies; choose it below the
    metric `entropy` of the first steps."""
    coef_delta: PositiveFloat = 0.005
    """Change of an adaptive coef after each update."""
    coef_min: NonNegativeFloat = 0.0
    """Smallest value of an adaptive coef."""
    coef_max: PositiveFloat = 1.0
    """Largest value of an adaptive coef."""
    top_quantile: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of an update's tokens that train the policy and count in the bonus: the tokens of the
    highest entropy. 1 trains all tokens. Below 1, each update computes the policy's entropies once
    more."""

    @property
    def has_bonus(self) -> bool:
        return self.adaptive or self.coef > 0

    def mistakes(self) -> Iterator[str]:
        if self.coef_min > self.coef_max:
            yield f"coef_min {self.coef_min:g} exceeds coef_max {self.coef_max:g}"


class AlgorithmConfig(Section):
    """Advantage, loss, KL penalty, corrections, and tokens left out of the loss."""

    advantage: Annotated[
        Annotated[Grpo, Tag("grpo")]
        | Annotated[DrGrpo, Tag("dr_grpo")]
        | Annotated[Rloo, Tag("rloo")]
        | Annotated[ReinforcePP, Tag("reinforce_pp")]
        | Annotated[Gdpo, Tag("gdpo")]
        | Annotated[TurnReturns, Tag("turn_returns")]
        | Annotated[MtGrpo, Tag("mt_grpo")]
        | Annotated[Gae, Tag("gae")]
        | Annotated[NoAdvantage, Tag("none")]
        | Annotated[OwnAdvantage, Tag(OWN_CLASS)],
        Discriminator(_kind_of),
    ] = Grpo()
    """Estimator of each token's advantage from the rewards."""
    loss: Annotated[
        Annotated[PpoClip, Tag("ppo_clip")]
        | Annotated[Gspo, Tag("gspo")]
        | Annotated[Cispo, Tag("cispo")]
        | Annotated[Sapo, Tag("sapo")]
        | Annotated[Vespo, Tag("vespo")]
        | Annotated[Dppo, Tag("dppo")]
        | Annotated[Dpo, Tag("dpo")]
        | Annotated[CrossEntropy, Tag("cross_entropy")]
        | Annotated[OwnLoss, Tag(OWN_CLASS)],
        Discriminator(_kind_of),
    ] = PpoClip()
    """Loss that the trainer minimises."""
    reduction: Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "sum"] = (
        "token_mean"
    )
    """Reduction of token losses to the batch's loss. token_mean: mean over all tokens (DAPO).
    sequence_mean: mean over trajectories of the mean over each trajectory's tokens (GRPO; dpo
    always uses it). sequence_sum: mean over trajectories of the sum over each trajectory's tokens
    (LUSPO with loss gspo). constant: sequence_sum divided by the longest response (Dr. GRPO), which
    is rollout.max_response_tokens, or else sampling.max_tokens * rollout.max_turns (loop
    single_turn has one turn). sum: sum over all tokens, for advantages that are scaled already."""
    kl: KlConfig = KlConfig()
    teacher: TeacherConfig | None = None
    """Teacher of on-policy distillation: {model: PATH} or {url: http://host:8000/v1}, with its
    weight, where (advantage or loss) and engines; null uses no teacher. Each entry of environments
    may have a teacher of its own."""
    entropy: EntropyConfig = EntropyConfig()
    correction: CorrectionConfig = CorrectionConfig()
    off_policy_mask_threshold: PositiveFloat | None = None
    """Largest mean of log pi_engine - log pi, in nats, over a sequence's trained tokens. If the
    mean is larger, the sequence's tokens with negative advantages are left out of the loss
    (DeepSeek-V3.2). null leaves out no tokens."""
    mask_truncated: bool = False
    """Leave trajectories that end at their maximum length (status length or context_full) out of
    the loss (DAPO's overlong filtering). They still count in the baseline of the group and in the
    number of trajectories."""
    dynamic_sampling: bool = False
    """Replace groups without signal by groups of other problems (DAPO): groups whose rewards,
    overlong_penalty included, are all equal; with an advantage per turn, groups in which all turns
    have advantage 0. If false, such groups count in the batch's mean with advantage 0."""
    overlong_tokens: NonNegativeInt = 0
    """Number of tokens before model.max_length over which the penalty for long trajectories rises
    to overlong_penalty (DAPO); 0 disables the penalty."""
    overlong_penalty: PositiveFloat = 1.0
    """Penalty subtracted from the reward of a trajectory of model.max_length tokens."""

    @property
    def has_penalties(self) -> bool:
        """Whether the loss has terms that train even groups without signal."""
        return self.kl.coef > 0 or self.entropy.has_bonus

    def mistakes(self) -> Iterator[str]:
        if isinstance(self.loss, Vespo) and self.correction.name.startswith("sequence"):
            yield (
                "loss vespo multiplies the weights of a sequence's tokens: set correction.name to "
                "token_tis, token_mask, mask or none"
            )
        if isinstance(self.loss, Dpo):
            if isinstance(self.advantage, Gae | TurnReturns | MtGrpo):
                name = self.advantage.name
                yield f"loss dpo compares trajectories and cannot use advantage {name}"
            if self.correction.name != "none":
                yield "loss dpo has no importance ratio to correct: set correction.name to none"

    @model_validator(mode="before")
    @classmethod
    def _names(cls, tree: object) -> object:
        """Accept a bare name in place of a section, and add the default name to a section without a
        name."""
        if not isinstance(tree, dict):
            return tree
        named = dict(tree)
        for key, name in (("advantage", "grpo"), ("loss", "ppo_clip")):
            if isinstance(part := tree.get(key), dict):
                named[key] = {"name": name, **part}
            elif isinstance(part, str):
                named[key] = {"name": part}
        return named

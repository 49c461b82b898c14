"""Our configuration's section `algorithm`, from the fields of TRL's `GRPOConfig`."""

import logging
from dataclasses import dataclass

from turnwise.compat.trl.refusals import check

logger = logging.getLogger(__name__)

_REDUCTIONS = {
    **{"dapo": "token_mean", "bnpo": "token_mean", "cispo": "token_mean", "vespo": "token_mean"},
    **{"grpo": "sequence_mean", "sapo": "sequence_mean", "luspo": "sequence_sum"},
    "dr_grpo": "constant",
}
_SUMMED = ("bnpo", "dr_grpo", "dapo", "cispo")
"""Loss types that weight a sequence by its length; sequence-level ratios are not meant for them."""
TYPES_OF_FIELDS = {
    "epsilon": ("bnpo", "dapo", "dr_grpo", "grpo", "luspo"),
    "epsilon_high": ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo"),
    "delta": ("bnpo", "dapo", "dr_grpo", "grpo", "luspo"),
    "sapo_temperature_neg": ("sapo",),
    "sapo_temperature_pos": ("sapo",),
    **{f"vespo_{name}": ("vespo",) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
"""For each field, the loss types that use it."""
ADAPTIVE = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
_CORRECTIONS = {
    **{"token_truncate": "token_tis", "sequence_truncate": "sequence_tis"},
    **{"token_mask": "token_mask", "sequence_mask": "sequence_mask"},
}
_UNBOUNDED = 1e9


@dataclass(kw_only=True)
class LossFields:
    """Fields of `GRPOConfig` that set the section `algorithm`, with TRL's defaults."""

    gradient_accumulation_steps: int = 1
    use_vllm: bool = False
    beta: float = 0.0
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    importance_sampling_level: str = "token"
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str | bool = "group"
    loss_type: str = "dapo"
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    mask_truncated_completions: bool = False
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    use_bias_correction_kl: bool = True


def algorithm_settings(args: LossFields) -> dict[str, object]:
    name, level = args.loss_type, args.importance_sampling_level
    why = "it must be token or sequence"
    check(level in ("token", "sequence"), "importance_sampling_level", level, why)
    check(name in _REDUCTIONS, "loss_type", name, f"it must be one of {', '.join(_REDUCTIONS)}")
    _warn_about_loss(args)
    values: dict[str, object] = {
        "advantage": _advantage(args),
        "loss": _loss(args, name, level),
        "reduction": _REDUCTIONS[name],
        "mask_truncated": args.mask_truncated_completions,
        "off_policy_mask_threshold": args.off_policy_mask_threshold,
        "kl.coef": args.beta,
        "kl.importance_weight": args.use_bias_correction_kl,
        "entropy.coef": args.entropy_coef,
        "entropy.adaptive": args.use_adaptive_entropy,
        "entropy.top_quantile": args.top_entropy_quantile,
        **{f"correction.{key}": value for key, value in _correction(args).items()},
    }
    if args.sync_ref_model:
        why = "with beta 0 there is no reference model to synchronize"
        check(args.beta != 0, "sync_ref_model", True, why)
        values["kl.sync_steps"] = args.ref_model_sync_steps
        values["kl.mixup_alpha"] = args.ref_model_mixup_alpha
    if args.use_adaptive_entropy:
        values |= {name.replace("_", ".", 1): getattr(args, name) for name in ADAPTIVE}
    return {f"algorithm.{key}": value for key, value in values.items()}


def _warn_about_loss(args: LossFields) -> None:
    """Log the effect of unusual combinations of loss type and ratio level, as TRL does."""
    name, level = args.loss_type, args.importance_sampling_level
    for applies, meaning in (
        (
            level == "sequence" and name in _SUMMED,
            f"with importance_sampling_level='sequence', loss_type={name!r} effectively weights "
            "each sequence by its completion length; GSPO's is 'grpo'",
        ),
        ((name, level) == ("luspo", "token"), "LUSPO's importance_sampling_level is 'sequence'"),
        ((name, level) == ("vespo", "sequence"), "vespo always takes the ratio of whole sequences"),
        (
            name == "bnpo" and args.gradient_accumulation_steps > 1,
            "loss_type='bnpo' is the mean over the tokens of the whole update, as dapo is: "
            "micro-batches do not change a loss in Turnwise",
        ),
    ):
        if applies:
            logger.warning("GRPOConfig: %s", meaning)


def _advantage(args: LossFields) -> dict[str, object]:
    scale, aggregation = args.scale_rewards, args.multi_objective_aggregation
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    names: dict[object, dict[str, object]] = {
        "group": {"name": "grpo"},
        "batch": {"name": "grpo", "scale": "batch"},
        "none": {"name": "dr_grpo"},
    }
    check(scale in names, "scale_rewards", scale, "it must be group, batch or none")
    known = ("sum_then_normalize", "normalize_then_sum")
    why = f"it must be {' or '.join(known)}"
    check(aggregation in known, "multi_objective_aggregation", aggregation, why)
    return {"name": "gdpo"} if aggregation == "normalize_then_sum" else names[scale]


def _correction(args: LossFields) -> dict[str, object]:
    # By default we correct nothing between engine and trainer, because ratios are relative to the
    # engine's own log-probs. So TRL's default mode means no correction, unless its bounds differ
    # from TRL's defaults.
    mode, low = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
    high, usual = args.vllm_importance_sampling_clip_max, LossFields()
    bounds = (usual.vllm_importance_sampling_clip_min, usual.vllm_importance_sampling_clip_max)
    unchanged = (mode, low, high) == (usual.vllm_importance_sampling_mode, *bounds)
    if unchanged or not (args.use_vllm and args.vllm_importance_sampling_correction):
        return {}
    why = f"it must be one of {', '.join(_CORRECTIONS)}"
    check(mode in _CORRECTIONS, "vllm_importance_sampling_mode", mode, why)
    values: dict[str, object] = {"name": _CORRECTIONS[mode], "high": high or _UNBOUNDED}
    if mode.endswith("mask"):
        return {**values, "low": low or 1 / _UNBOUNDED}
    why = "only clip_max bounds a weight that is truncated"
    check(low is None and high is not None, "vllm_importance_sampling_clip_min", low, why)
    return values


def _loss(args: LossFields, name: str, level: str) -> dict[str, object]:
    """Return the section `algorithm.loss`."""
    high, delta = args.epsilon if args.epsilon_high is None else args.epsilon_high, args.delta
    if name == "cispo":
        check(high > 0, "epsilon_high", high, "it is the bound of cispo's weight")
        return {"name": "cispo", "clip_low": 1.0, "clip_high": high - 1, "level": level}
    if name in ("sapo", "vespo"):
        fields = [field for field, types in TYPES_OF_FIELDS.items() if types == (name,)]
        values = {field.removeprefix(f"{name}_"): getattr(args, field) for field in fields}
        return {"name": name, **values, **({"level": level} if name == "sapo" else {})}
    bounds: dict[str, object] = {"clip_low": args.epsilon, "clip_high": high}
    if delta is not None:
        check(delta > 1, "delta", delta, "it must be above 1")
        bounds["dual_clip"] = max(delta, 1 + high)
        if delta < 1 + high:  # if the advantage is positive, the smaller bound applies
            bounds["clip_high"] = delta - 1
    return {"name": "gspo" if level == "sequence" else "ppo_clip", **bounds}

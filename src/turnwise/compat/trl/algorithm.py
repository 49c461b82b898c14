"""The section `algorithm` of our configuration from the fields of TRL's `GRPOConfig`."""

import logging

from turnwise.compat.trl.refusals import check
from turnwise.core.optional import Foreign

logger = logging.getLogger(__name__)

_REDUCTIONS = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "token_mean"),
    **{"grpo": "sequence_mean", "sapo": "sequence_mean", "luspo": "sequence_sum"},
    "dr_grpo": "constant",
}
_CLIPPED = ("bnpo", "dapo", "dr_grpo", "grpo", "luspo")
LOSS_FIELDS = {
    **{"epsilon": _CLIPPED, "epsilon_high": (*_CLIPPED, "cispo"), "delta": _CLIPPED},
    **{f"sapo_temperature_{sign}": ("sapo",) for sign in ("neg", "pos")},
    **{f"vespo_{name}": ("vespo",) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
"""Loss types that have a field."""
ADAPTIVE = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
_SCALES: dict[object, dict[str, object]] = {
    "group": {"name": "grpo"},
    "batch": {"name": "grpo", "scale": "batch"},
    "none": {"name": "dr_grpo"},
}
_AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
_CORRECTIONS = {
    **{"token_truncate": "token_tis", "sequence_truncate": "sequence_tis"},
    **{"token_mask": "token_mask", "sequence_mask": "sequence_mask"},
}
_UNBOUNDED = 1e9


def algorithm_settings(args: Foreign) -> dict[str, object]:
    """Return the values that a `GRPOConfig` stands for, by their keys."""
    scale = args.scale_rewards
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    for name, value, known in (
        ("importance_sampling_level", args.importance_sampling_level, ("token", "sequence")),
        ("loss_type", args.loss_type, (*_REDUCTIONS,)),
        ("scale_rewards", scale, (*_SCALES,)),
        ("multi_objective_aggregation", args.multi_objective_aggregation, _AGGREGATIONS),
    ):
        check(value in known, name, value, f"it must be one of {', '.join(map(str, known))}")
    _warn_about_loss(args)
    objectives = args.multi_objective_aggregation == _AGGREGATIONS[1]
    sections = {"kl": _kl(args), "entropy": _entropy(args), "correction": _correction(args)}
    return {
        "algorithm.advantage": {"name": "gdpo"} if objectives else {**_SCALES[scale]},
        "algorithm.loss": _loss(args),
        "algorithm.reduction": _REDUCTIONS[args.loss_type],
        "algorithm.mask_truncated": args.mask_truncated_completions,
        "algorithm.off_policy_mask_threshold": args.off_policy_mask_threshold,
        **{
            f"algorithm.{section}.{key}": value
            for section, values in sections.items()
            for key, value in values.items()
        },
    }


def _warn_about_loss(args: Foreign) -> None:
    """Log what a combination of loss and ratio means, as TRL does."""
    name, level = args.loss_type, args.importance_sampling_level
    if level == "sequence" and name in ("bnpo", "dr_grpo", "dapo", "cispo"):
        logger.warning(
            "GRPOConfig: with importance_sampling_level='sequence', loss_type=%r effectively "
            "weights each sequence by its completion length; GSPO's is 'grpo'",
            name,
        )
    elif (name, level) == ("luspo", "token"):
        logger.warning("GRPOConfig: LUSPO's importance_sampling_level is 'sequence'")
    elif (name, level) == ("vespo", "sequence"):
        logger.warning("GRPOConfig: vespo always takes the ratio of whole sequences")
    if name == "bnpo" and args.gradient_accumulation_steps > 1:
        logger.warning(
            "GRPOConfig: loss_type='bnpo' is the mean over the tokens of the whole update, as dapo "
            "is: micro-batches do not change a loss in Turnwise"
        )


def _kl(args: Foreign) -> dict[str, object]:
    values = {"coef": args.beta, "importance_weight": args.use_bias_correction_kl}
    if args.sync_ref_model:
        why = "with beta 0 there is no reference model to synchronize"
        check(args.beta != 0, "sync_ref_model", True, why)
        values["sync_steps"] = args.ref_model_sync_steps
        values["mixup_alpha"] = args.ref_model_mixup_alpha
    return values


def _entropy(args: Foreign) -> dict[str, object]:
    adaptive, top = args.use_adaptive_entropy, args.top_entropy_quantile
    values = {"coef": args.entropy_coef, "adaptive": adaptive, "top_quantile": top}
    fields = ADAPTIVE if adaptive else ()
    return values | {name.removeprefix("entropy_"): getattr(args, name) for name in fields}


def _correction(args: Foreign) -> dict[str, object]:
    # No correction for the mismatch of engine and trainer by default: ratios are those to the
    # engine's own log-probs. So TRL's default mode stands for it, unless its bounds are set.
    prefix = "vllm_importance_sampling"
    fields = (f"{prefix}_{name}" for name in ("mode", "clip_min", "clip_max"))
    given, usual = zip(*((getattr(args, f), getattr(type(args), f)) for f in fields), strict=True)
    if not (args.use_vllm and args.vllm_importance_sampling_correction) or given == usual:
        return {}
    mode, low, high = given
    why = f"it must be one of {', '.join(_CORRECTIONS)}"
    check(mode in _CORRECTIONS, f"{prefix}_mode", mode, why)
    values = {"name": _CORRECTIONS[mode], "high": high or _UNBOUNDED}
    if mode.endswith("mask"):
        return values | {"low": low or 1 / _UNBOUNDED}
    why = "only clip_max bounds a weight that is truncated"
    check(low is None and high is not None, f"{prefix}_clip_min", low, why)
    return values


def _loss(args: Foreign) -> dict[str, object]:
    """Return the section of a loss."""
    name, level = args.loss_type, args.importance_sampling_level
    high, delta = args.epsilon if args.epsilon_high is None else args.epsilon_high, args.delta
    if name == "cispo":
        check(high > 0, "epsilon_high", high, "it is the bound of cispo's weight")
        return {"name": name, "clip_low": 1.0, "clip_high": high - 1, "level": level}
    if name in ("sapo", "vespo"):
        fields = [field for field, types in LOSS_FIELDS.items() if types == (name,)]
        values = {field.removeprefix(f"{name}_"): getattr(args, field) for field in fields}
        return {"name": name, **values, **({"level": level} if name == "sapo" else {})}
    bounds = {"clip_low": args.epsilon, "clip_high": high}
    if delta is not None:
        check(delta > 1, "delta", delta, "it must be above 1")
        bounds["dual_clip"] = max(delta, 1 + high)
        if delta < 1 + high:  # the lower bound counts where the advantage is positive
            bounds["clip_high"] = delta - 1
    return {"name": "gspo" if level == "sequence" else "ppo_clip", **bounds}

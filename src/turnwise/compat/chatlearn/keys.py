"""ChatLearn's flat keys for a model's settings, and the keys that they stand for.

    n: 1                       # sampling.n, times num_inference_per_prompt in training
    eval_temperature: 0.6      # eval.sampling.temperature; so for every key of sampling
    stop_token_list: <EOS>;</s>
    new_token_limit: true      # sampling.max_tokens is max_new_tokens, not the whole context
    tokenizer: some/tokenizer  # model.tokenizer

A value of null, or the text None, means that the key is not set.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator

import yaml

from turnwise.config import Config, SamplingConfig
from turnwise.config.base import Tree

Args = Tree
"""Values by ChatLearn's flat keys."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::(.*))?\}")
_BOTH = ("sampling", "eval.sampling")

_KEYS: dict[str, tuple[str, ...]] = {
    **{name: (f"sampling.{name}",) for name in ("temperature", "top_k", "top_p")},
    **{f"eval_{name}": (f"eval.sampling.{name}",) for name in SamplingConfig.model_fields},
    **{name: tuple(f"{s}.{name}" for s in _BOTH) for name in ("ignore_eos", "prompt_logprobs")},
    "block_size": ("engine.vllm_args.block_size",),
    "dtype": ("model.dtype",),
    "enable_thinking": ("model.template_args.enable_thinking",),
    "generation_batch_size": ("engine.max_num_seqs",),
    "gpu_memory_utilization": ("engine.vllm_args.gpu_memory_utilization",),
    "load": ("model.path",),
    "max_num_batched_tokens": ("engine.max_num_batched_tokens",),
    "max_num_seqs": ("engine.max_num_seqs",),
    "pipeline_model_parallel_size": ("engine.pipeline_parallel_size",),
    "seed": ("seed",),
    "seq_length": ("model.max_length",),
    "tensor_model_parallel_size": ("engine.tensor_parallel_size",),
    "tokenizer": ("model.tokenizer",),
    "trust_remote_code": ("model.trust_remote_code",),
}
"""Flat keys that stand for one key of the configuration, or for several."""

_TOGETHER = ("n", "num_inference_per_prompt", "stop_token_list", "max_new_tokens")
"""Keys that `settings_of` computes settings from."""

MODULE_KEYS = ("prompt_key", "vllm_input_ids_key", "vllm_prompt_key")
"""Keys of the module itself: the names of fields in its prompts."""

_FIXED: dict[str, tuple[Callable[[object], bool], str]] = {
    "apply_replica_id_to_seed": (bool, "every engine has its own seed, derived from seed"),
    "bf16": (
        lambda value: isinstance(value, bool),
        "set it to true for model.dtype bfloat16, or to false",
    ),
    "enable_stage_resume": (lambda value: not value, "set training.checkpoint_every"),
    "enforce_eager": (lambda value: isinstance(value, bool), "set it to true or false"),
    "fp16": (lambda value: not value, "model.dtype is bfloat16 or float32"),
    "include_prompt": (
        bool,
        "all_tokens begin with the prompt; cut them at prompt_token_length in decode_internal",
    ),
    "init_shuffle_prompts": (
        lambda value: value == 0,
        "pass the prompts to build_dataset in the desired order",
    ),
    "new_token_limit": (lambda value: isinstance(value, bool), "set it to true or false"),
}
"""Flat keys that accept only some values: a test of the value, and advice for the others."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MEGATRON = _words(
    """
    adaptive_parallel_strategy_on_checkpoint add_bias_linear add_position_embedding
    apply_query_key_layer_scaling attention_dropout attention_softmax_in_fp32 build_path
    distributed_timeout_minutes exit_on_missing_checkpoint ffn_hidden_size finetune
    gradient_accumulation_fusion group_query_attention hidden_dropout hidden_size hysteresis
    inference_batch_times_seqlen_threshold load_iteration log_num_zeros_in_grad
    make_vocab_size_divisible_by masked_softmax_fusion max_position_embeddings max_tokens_to_oom
    no_load_args no_load_optim no_load_rng no_load_scheduler normalization num_attention_heads
    num_layers num_query_groups numerical_stable retro_encoder_attention_dropout
    retro_encoder_hidden_dropout swiglu tokenizer_model tokenizer_type transformer_impl
    untie_embeddings_and_output_weights use_attn_acc use_checkpoint_args
    use_distributed_optimizer use_flash_attn use_legacy_models use_rotary_position_embeddings
    """
)
_TRAINER = _words(
    """
    clipped_value_only cliprange cliprange_reward cliprange_value do_math_eval dpo_weight
    fix_kl_coef gamma horizon init_kl_coef lam lm_coef log_entropy log_interval loss_on_prompts
    math_coef ngram_coef raw_reward_coeff save_interval scale_reward target
    train_to_compare_num_responses trainer_engine use_ipo
    """
)
_GROUPS = {
    _MEGATRON: "describe a model and its checkpoint to Megatron; here the folder of load "
    "(model.path), in Hugging Face's format, contains all of this: leave them out",
    _TRAINER: "belong to the trainer, not to a model's file; see algorithm and training in "
    "the pipeline's configuration",
}
KNOWN = frozenset({*_KEYS, *_TOGETHER, *MODULE_KEYS, *_FIXED, *_MEGATRON, *_TRAINER})
"""All flat keys."""


def expand(value: object) -> object:
    """Replace the `${NAME:default}` texts of a YAML value, at any depth, by environment variables.

    A variable's text is read as a Python or YAML value. One that is not set and has no default is
    null.
    """
    if isinstance(value, dict):
        return {key: expand(below) for key, below in value.items()}
    if isinstance(value, list):
        return [expand(below) for below in value]
    if not isinstance(value, str) or not (found := _VARIABLE.fullmatch(value.strip())):
        return value
    text: str | None = os.environ.get(found[1], found[2])
    if text is None:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        loaded: object = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return loaded


def mistakes(args: Args) -> Iterator[str]:
    """Yield a sentence for each key, or group of keys, whose value has no meaning here."""
    for keys, what in _GROUPS.items():
        named = sorted(key for key in keys & args.keys() if args[key])
        if named:
            yield f"{', '.join(named)} {what}"
    for key, (is_meant, instead) in _FIXED.items():
        if key in args and not is_meant(args[key]):
            yield f"{key} {args[key]!r} is not supported: {instead}"
    for key in ("n", "num_inference_per_prompt", "max_new_tokens"):
        if key in args and (not isinstance(args[key], int) or args[key] < 1):
            yield f"{key} must be a whole number of 1 or more, not {args[key]!r}"
    if args.get("new_token_limit") is False and "seq_length" not in args:
        yield "new_token_limit false samples up to seq_length, which is not set"


def settings_of(args: Args) -> Tree:
    """Return the values, by dotted keys of the configuration, of flat keys without `mistakes`."""
    settings = {key: value for name, value in args.items() for key in _KEYS.get(name, ())}
    if settings.get("engine.max_num_seqs") == -1:
        del settings["engine.max_num_seqs"]
    if "n" in args or "num_inference_per_prompt" in args:
        n = args.get("n", 1)
        settings["sampling.n"] = n * args.get("num_inference_per_prompt", 1)
        if "n" in args:
            settings["eval.sampling.n"] = n
    if "stop_token_list" in args:
        stop = args["stop_token_list"]
        stop = [text for text in stop.split(";") if text] if isinstance(stop, str) else stop
        settings |= {f"{sampling}.stop": stop for sampling in _BOTH}
    new = args.get("max_new_tokens")
    if args.get("new_token_limit") is False:
        if new is not None:
            settings["data.max_prompt_tokens"] = args["seq_length"] - new
        new = args["seq_length"]
    if new is not None:
        settings |= {f"{sampling}.max_tokens": new for sampling in _BOTH}
    if args.get("bf16"):
        settings["model.dtype"] = "bfloat16"
    if args.get("enforce_eager"):
        settings["engine.vllm_args.enforce_eager"] = True
    return settings


def args_of(config: Config, own: Args) -> Args:
    """Return a configuration under ChatLearn's names, with the other flat keys of a model's file.

    `num_inference_per_prompt` is 1, because `n` holds it.
    """
    sampling, held_out = config.sampling, config.eval.sampling
    both = {"temperature", "top_k", "top_p"}
    return {
        "prompt_key": None,
        "vllm_prompt_key": "prompt",
        "vllm_input_ids_key": "input_ids",
        "init_shuffle_prompts": 0,
        **own,
        "num_inference_per_prompt": 1,
        "seq_length": config.model.max_length,
        "max_new_tokens": sampling.max_tokens,
        "n": sampling.n,
        "ignore_eos": sampling.ignore_eos,
        "prompt_logprobs": 1 if sampling.prompt_logprobs else None,
        "stop_token_list": list(sampling.stop),
        **sampling.model_dump(include=both),
        **{f"eval_{key}": value for key, value in held_out.model_dump(include=both).items()},
    }

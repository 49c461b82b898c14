import ast
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

import turnwise
from docs.reference import TABLES
from turnwise.compat.keys import answer as foreign_answer
from turnwise.compat.other_keys import OTHER_KEYS
from turnwise.compat.verl.keys import VERL_KEYS
from turnwise.config import (
    ALIASES,
    LOOP_NAMES,
    REPLACED_KEYS,
    ModelConfig,
    SamplingConfig,
    dump_config,
    known_keys,
    load_config,
    make_config,
    parse_config,
)
from turnwise.config.base import NEEDED_KEYS
from turnwise.config.explain import CHOICES, describe_keys, explain_config
from turnwise.config.load import masked, masked_value
from turnwise.config.resume import RULES, check_unchanged, rule_of
from turnwise.config.yaml_text import read_yaml
from turnwise.errors import InputError

SOURCES = Path(turnwise.__file__).parent


def minimal(**more: Any) -> dict[str, Any]:
    return {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}, **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(minimal()))
    return path


def test_an_override_reaches_its_key_as_yaml(file: Path) -> None:
    config = load_config(
        file, ["training.steps=7", "sampling.stop=[a, b]", "data.limit=null", "name=x=y"]
    )
    assert config.training.steps == 7
    assert config.sampling.stop == ["a", "b"]
    assert config.data.limit is None
    assert config.name == "x=y"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sampling.temprature", "sampling.temperature"),
        ("training.step", "training.steps"),
        ("samplng", "sampling"),
        ("temperature", "sampling.temperature"),
        ("eval.sampling.topp", "eval.sampling.top_p"),
        ("eval.sampling.max_new_tokens", "eval.sampling.max_tokens"),
        ("sampling.stop_token_list", "sampling.stop"),
        ("sampling.new_token_limit", "sampling.max_tokens"),
        ("max_response_length", "rollout.max_response_tokens"),
        ("engine.disable_log_stats", "engine.metrics"),
        ("sampling.eval_temperature", "eval.sampling.temperature"),
        ("eval.sampling.stop_token_list", "eval.sampling.stop"),
        ("eval_top_p", "eval.sampling.top_p"),
        ("training.lr", "training.learning_rate"),
        ("training.batch_size", "rollout.prompts_per_step"),
        ("training.epochs", "training.steps"),
        ("rollout.n", "sampling.n"),
        ("num_generations", "sampling.n"),
        ("training.kl_coef", "algorithm.kl.coef"),
        ("training.num_iterations", "training.epochs_per_step"),
        ("training.ppo_epochs", "training.epochs_per_step"),
        ("algorithm.entropy_coeff", "algorithm.entropy.coef"),
        ("algorithm.top_entropy_quantile", "algorithm.entropy.top_quantile"),
        ("algorithm.mask_truncated_completions", "algorithm.mask_truncated"),
        ("algorithm.kl.ref_model_sync_steps", "algorithm.kl.sync_steps"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(file: Path, key: str, meant: str) -> None:
    with pytest.raises(InputError, match=rf"there is no key {key}; did you mean {meant}\?"):
        load_config(file, [f"{key}=1"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.loss.name=pop"], r"algorithm\.loss\.name must be one of .*, not 'pop'"),
        (["algorithm.loss.clip_hihg=1"], r"did you mean algorithm\.loss\.clip_high\?"),
        (
            ["algorithm.loss={name: cispo, dual_clip: 3}"],
            r"algorithm\.loss\.dual_clip belongs to ppo_clip and gspo, not to cispo",
        ),
        (["algorithm.advantage={name: gae, lam: 2}"], r"algorithm\.advantage\.lam: .* less than"),
    ],
)
def test_a_section_with_kinds_is_checked_as_its_chosen_kind(
    file: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_config(file, changes)
    assert load_config(file, ["algorithm.loss.clip_high=0.3"]).algorithm.loss.name == "ppo_clip"


@pytest.mark.parametrize("key", sorted(REPLACED_KEYS))
def test_a_key_that_vllm_lost_says_what_took_its_place(file: Path, key: str) -> None:
    """`best_of`, `early_stopping`, `length_penalty` and others; one whose value asks for nothing is
    no mistake."""
    with pytest.raises(InputError, match=rf"engine\.{key} is not supported: .*(sampling|engine)"):
        load_config(file, [f"engine.{key}=7"])
    for value in ("false", "null", "0", "[]", "{ranking: false}", "None"):
        assert load_config(file, [f"engine.{key}={value}"]) == load_config(file)


def test_refused_keys_are_found_in_vllm_args_too(file: Path) -> None:
    with pytest.raises(InputError, match=r"engine\.vllm_args\.swap_space is not supported"):
        load_config(file, ["engine.vllm_args={swap_space: 4}"])
    with pytest.raises(
        InputError, match=r"vllm_args\.max_model_len has its own key: set model\.max"
    ):
        load_config(file, ["engine.vllm_args={max_model_len: 64}"])
    with pytest.raises(InputError, match=r"vllm_args\.logprobs_mode: training needs the log-probs"):
        load_config(file, ["engine.vllm_args={logprobs_mode: raw_logprobs}"])
    assert load_config(file, ["engine.vllm_args={swap_space: 0}"]).engine.vllm_args == {}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("sampling.top_k=-1", 0),
        ("sampling.top_p=0", 1.0),
        ("sampling.top_p=0.0", 1.0),
        ("sampling.prompt_logprobs=null", False),
        ("sampling.prompt_logprobs=1", True),
        ("eval.sampling.top_k=-1", 0),
        ("sampling.temperature=2", 2.0),
    ],
)
def test_values_of_other_systems_mean_what_they_mean_there(
    file: Path, override: str, value: object
) -> None:
    section: Any = load_config(file, [override])
    for name in override.partition("=")[0].split("."):
        section = getattr(section, name)
    assert section == value


@pytest.mark.parametrize("override", ["top_k=-2", "top_p=-0.1", "temperature=2.1"])
def test_sampling_that_vllm_always_refuses_is_refused_on_load(file: Path, override: str) -> None:
    with pytest.raises(InputError, match=rf"sampling\.{override.partition('=')[0]}: "):
        load_config(file, [f"sampling.{override}"])


@pytest.mark.parametrize("wrong", [1.5, 0, -1, "half"])
def test_a_share_of_memory_is_above_0_and_at_most_1(file: Path, wrong: object) -> None:
    assert load_config(file, ["engine.vllm_args={gpu_memory_utilization: 1}"])
    with pytest.raises(
        InputError, match=r"engine\.vllm_args: gpu_memory_utilization must be above"
    ):
        load_config(file, [f"engine.vllm_args={{gpu_memory_utilization: {wrong}}}"])


def test_prompts_may_be_longer_than_what_is_computed_together(file: Path) -> None:
    """But where they must not be computed in parts."""
    overrides = ["engine.max_num_batched_tokens=256", "model.max_length=1024"]
    assert load_config(file, overrides).engine.max_num_batched_tokens == 256
    with pytest.raises(InputError, match=r"256 is below model\.max_length 1024, and .*chunked"):
        load_config(file, [*overrides, "engine.vllm_args={enable_chunked_prefill: false}"])


def test_other_trainers_key_names_lead_to_existing_keys() -> None:
    known = known_keys()
    assert [alias for alias, key in ALIASES.items() if key not in known] == []
    assert [alias for alias in ALIASES if alias in known] == []


VERLS_PAGE = {
    "data": """tokenizer train_files val_files train_max_samples val_max_samples prompt_key
        reward_fn_key max_prompt_length max_response_length train_batch_size val_batch_size
        return_raw_input_ids return_raw_chat return_full_prompt shuffle seed
        filter_overlong_prompts filter_overlong_prompts_workers truncation image_key video_key
        trust_remote_code custom_cls.path custom_cls.name""",
    "actor_rollout_ref": "hybrid_engine",
    "actor_rollout_ref.model": """path external_lib override_config.attn_implementation
        override_config.model_config override_config.moe_config.freeze_moe_router
        enable_gradient_checkpointing enable_activation_offload trust_remote_code
        use_remove_padding use_liger use_fused_kernels fused_kernel_options.impl_backend
        tiled_mlp.enabled tiled_mlp.num_shards lora_rank lora_alpha target_modules""",
    "actor_rollout_ref.actor": """strategy ppo_mini_batch_size ppo_micro_batch_size
        ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu grad_clip clip_ratio
        clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode entropy_coeff use_kl_loss
        rollout_correction.rollout_is rollout_correction.rollout_is_threshold
        rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold use_torch_compile
        kl_loss_coef kl_loss_type ppo_epochs data_loader_seed shuffle
        ulysses_sequence_parallel_size optim.lr optim.lr_warmup_steps optim.lr_warmup_steps_ratio
        optim.min_lr_ratio optim.num_cycles optim.warmup_style optim.lr_scheduler_type
        optim.total_training_steps optim.weight_decay fsdp_config.wrap_policy.min_num_params
        fsdp_config.param_offload fsdp_config.optimizer_offload fsdp_config.offload_policy
        fsdp_config.reshard_after_forward fsdp_config.fsdp_size fsdp_config.model_dtype
        checkpoint.contents checkpoint.save_contents checkpoint.load_contents""",
    "actor_rollout_ref.ref": """strategy fsdp_config.param_offload
        fsdp_config.reshard_after_forward fsdp_config.wrap_policy.min_num_params use_torch_compile
        log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
        log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size""",
    "actor_rollout_ref.rollout": """name mode chat_scheduler temperature top_k top_p
        use_fire_sampling prompt_length response_length dtype gpu_memory_utilization ignore_eos
        enforce_eager free_cache_engine load_format tensor_model_parallel_size
        max_num_batched_tokens max_model_len max_num_seqs log_prob_micro_batch_size
        log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu
        disable_log_stats enable_chunked_prefill do_sample n engine_kwargs.vllm.swap_space
        engine_kwargs.sglang.attention_backend calculate_log_probs val_kwargs.top_k
        val_kwargs.top_p val_kwargs.temperature val_kwargs.n val_kwargs.do_sample multi_turn.enable
        multi_turn.max_turns multi_turn.tool_config_path multi_turn.format
        multi_turn.completion_callback agent.custom_async_server.path
        agent.custom_async_server.name""",
    "critic": """rollout_n strategy optim.lr optim.lr_warmup_steps_ratio optim.weight_decay
        model.path model.tokenizer_path model.enable_gradient_checkpointing
        model.fsdp_config.param_offload ppo_mini_batch_size ppo_micro_batch_size_per_gpu
        forward_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu
        forward_max_token_len_per_gpu ulysses_sequence_parallel_size ppo_epochs shuffle grad_clip
        cliprange_value checkpoint.contents""",
    "reward_model": """enable strategy model.input_tokenizer model.path model.external_lib
        model.trust_remote_code model.fsdp_config.min_num_params micro_batch_size
        micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu
        reward_manager launch_reward_fn_async""",
    "custom_reward_function": "path name",
    "algorithm": """gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty
        kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl""",
    "trainer": """balance_batch total_epochs total_training_steps project_name experiment_name
        logger log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node
        save_freq resume_mode resume_from_path val_before_train test_freq critic_warmup
        default_hdfs_dir default_local_dir remove_previous_ckpt_in_save del_local_ckpt_after_load
        max_actor_ckpt_to_keep max_critic_ckpt_to_keep ray_wait_register_center_timeout""",
    "ray_init": "num_cpus runtime_env.env_vars",
}
"""Keys of `ppo_trainer.yaml`, as verl's page has them, now and when it had chat schedulers."""
VERLS_KEYS = [f"{section}.{name}" for section, all_ in VERLS_PAGE.items() for name in all_.split()]


def test_every_key_of_verls_page_is_answered_from_one_table() -> None:
    """Those of `ppo_trainer.yaml`, by a key or by a sentence whose keys are there."""
    known = known_keys()
    named = re.compile(rf"\b(?:{'|'.join(dict.fromkeys(k.partition('.')[0] for k in known))})\.\S+")
    assert [key for key in VERLS_KEYS if foreign_answer(key) is None] == []
    for theirs, answer in (VERL_KEYS | OTHER_KEYS).items():
        if " " not in answer:
            assert answer in known, theirs
        for key in named.findall(answer):
            key = key.strip(".,:;(){}")
            assert any(each == key or each.startswith(f"{key}.") for each in known), (theirs, key)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor_rollout_ref.rollout.mode", ": rollouts are always asynchronous"),
        ("rollout.mode", ": rollouts are always asynchronous"),
        ("actor_rollout_ref.rollout.n", "; did you mean sampling.n?"),
        ("actor_rollout_ref.rollout.chat_scheduler", "; did you mean rollout.chat_scheduler?"),
        ("actor_rollout_ref.rollout.prompt_length", "; did you mean data.max_prompt_tokens?"),
        ("actor_rollout_ref.rollout.response_length", "; did you mean rollout.max_response_tokens"),
        ("rollout.response_length", "; did you mean rollout.max_response_tokens?"),
        ("data.max_response_length", "; did you mean rollout.max_response_tokens?"),
        ("rollout.disable_log_stats", ": engine.metrics collects them, and is the opposite"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", ": list it in training.offload"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", "; did you mean training.ranks?"),
        ("actor_rollout_ref.actor.fsdp_config.forward_prefetch", ": there is one trainer with FSD"),
        ("trainer.total_training_steps", "; did you mean training.steps?"),
        ("distillation", "; did you mean algorithm.teacher?"),
        ("actor_rollout_ref.no_such_key", "; `turnwise config` prints all keys"),
    ],
)
def test_a_key_of_verl_is_answered_by_the_key_that_does_it(
    file: Path, key: str, words: str
) -> None:
    with pytest.raises(InputError, match=re.escape(f"there is no key {key}{words}")):
        load_config(file, [f"{key}=1"])


def test_a_whole_file_of_verl_is_answered_key_by_key(file: Path) -> None:
    with pytest.raises(InputError) as failure:
        load_config(file, [f"{key}=1" for key in VERLS_KEYS if key not in known_keys()])
    said = str(failure.value)
    for key in VERLS_KEYS:
        parents = [key.rsplit(".", depth)[0] for depth in range(key.count(".") + 1)]
        assert any(f"no key {each}" in said for each in parents) or key in known_keys(), key


WHOLE_FILES = json.loads(Path(__file__).with_name("other_systems.json").read_text())
"""Keys and values of whole files of other systems (of slime, the flags of a script)."""


def leaves(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield from leaves(value, f"{above}{name}.") if isinstance(value, dict) else [above + name]


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_whole_files_of_others_are_answered_key_by_key(name: str) -> None:
    with pytest.raises(InputError) as failure:
        parse_config(WHOLE_FILES[name], NEEDED_KEYS)
    said = str(failure.value)
    assert "prints all keys" not in said
    for key in leaves(WHOLE_FILES[name]):
        parents = [key.rsplit(".", depth)[0] for depth in range(key.count(".") + 1)]
        named = any(re.search(rf"[ ,]{each}[;:, ]", said) for each in parents)
        assert named or key in known_keys() or key.rpartition(".")[2] in REPLACED_KEYS, key


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("grpo.num_prompts_per_step", "rollout.prompts_per_step"),
        ("grpo.async_grpo.max_trajectory_age_steps", "training.max_staleness"),
        ("loss_fn.ratio_clip_min", "algorithm.loss.clip_low"),
        ("policy.model_name", "model.path"),
        ("policy.generation.temperature", "sampling.temperature"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", "engine.tensor_parallel_size"),
        ("policy.generation.colocated.enabled", "training.colocated"),
        ("trainer.policy.optimizer_config.lr", "training.learning_rate"),
        ("trainer.fully_async.max_staleness_steps", "training.max_staleness"),
        ("generator.sampling_params.max_generate_length", "sampling.max_tokens"),
        ("generator.inference_engine.num_engines", "serving.workers"),
        ("trainer.algorithm.advantage_estimator", "algorithm.advantage.name"),
        ("orchestrator.group_size", "sampling.n"),
        ("orchestrator.max_off_policy_steps", "training.max_staleness"),
        ("trainer.optim.lr", "training.learning_rate"),
        ("seq_len", "model.max_length"),
        ("rollout_batch_size", "rollout.prompts_per_step"),
        ("eps_clip_high", "algorithm.loss.clip_high"),
        ("hf_checkpoint", "model.path"),
    ],
)
def test_a_key_of_a_whole_file_leads_to_ours(file: Path, theirs: str, ours: str) -> None:
    with pytest.raises(InputError, match=rf"no key {theirs}; did you mean {re.escape(ours)}\?"):
        load_config(file, [f"{theirs}=1"])


def test_a_variable_that_the_run_sets_itself_is_refused(file: Path) -> None:
    for name in ("PYTHONPATH", "TURNWISE_SECRET"):
        with pytest.raises(InputError, match=f"ray_env: {name} is set by the run itself"):
            load_config(file, [f"ray_env={{{name}: x}}"])
    config = load_config(file, ["ray_env={HF_TOKEN: LITERAL}"])
    assert masked(config)["ray_env"] == {"HF_TOKEN": "***"}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_prompts_per_step", "rollout.prompts_per_step"),
        ("num_generations_per_prompt", "sampling.n"),
        ("max_trajectory_age_steps", "training.max_staleness"),
        ("reference_policy_kl_penalty", "algorithm.kl.coef"),
        ("ratio_clip_min", "algorithm.loss.clip_low"),
        ("ratio_clip_max", "algorithm.loss.clip_high"),
        ("token_level_loss", "algorithm.reduction"),
        ("expose_http_server", "serving.worker_servers"),
    ],
)
def test_a_key_of_nemo_rl_leads_to_ours(file: Path, theirs: str, ours: str) -> None:
    with pytest.raises(InputError, match=rf"no key {theirs}; did you mean {re.escape(ours)}\?"):
        load_config(file, [f"{theirs}=1"])


def test_a_key_that_resembles_nothing_gets_no_suggestion(file: Path) -> None:
    with pytest.raises(InputError, match=r"no key xyzzy; `turnwise config` prints all keys$"):
        load_config(file, ["xyzzy=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("weights.transport=rdma", "transport must be shm, ipc, .*, not 'rdma'"),
        (
            "rollout.loop=toolcalling",
            f"{', '.join(LOOP_NAMES)}, or package.module:Class, not 'toolc",
        ),
        ("training=3", "training must be a section with its own keys, not 3"),
        ("training.steps=many", "training.steps: .* valid integer.*, not 'many'"),
        ("data.path=", r"data\.path must be set \(Training rows"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(file: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(file, [override])


def test_custom_loops_and_empty_sections_are_accepted(file: Path) -> None:
    assert load_config(file, ["rollout.loop=my.loops:Mine"]).rollout.loop == "my.loops:Mine"
    weights = load_config(file, ["weights.transport=my.links:Mine"]).weights
    assert weights.transport == "my.links:Mine"
    assert load_config(file, ["training="]) == load_config(file)
    file.write_text(file.read_text() + "training:\n")
    assert load_config(file, ["training.steps=3"]).training.steps == 3


@dataclass
class OwnModel:
    path: str = "m"


@dataclass
class OwnConfig:
    """A user's own class, whose fields are our keys."""

    model: OwnModel = field(default_factory=OwnModel)
    environment: str = "a:B"
    data: dict[str, Any] = field(default_factory=lambda: {"path": "d"})


def test_a_configuration_is_a_file_or_any_keys_and_values(file: Path) -> None:
    expected = load_config(file)
    for source in (file, str(file), expected, minimal(), MappingProxyType(minimal()), OwnConfig()):
        assert load_config(source) == expected, type(source)
        assert load_config(source, ["seed=4"]).seed == 4
    with pytest.raises(InputError, match=r"a configuration is a YAML file, .* dataclass, not int"):
        load_config(3)  # type: ignore[arg-type]


OMEGACONF = """
from omegaconf import OmegaConf
from turnwise.config import load_config
made = OmegaConf.create(
    {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}, "seed": 4}
)
made.sampling = {"stop": ["x"], "n": "${seed}"}
config = load_config(made, ["seed=5"])
assert (config.seed, config.sampling.n, config.sampling.stop) == (5, 4, ["x"])
"""


@pytest.mark.slow
def test_a_dict_config_of_omegaconf_is_a_configuration() -> None:
    """A `DictConfig` with an interpolation, by the real package."""
    root = SOURCES.parents[1]
    subprocess.run(["make", "-s", ".venv-interop/.installed"], cwd=root, check=True, timeout=900)
    python = root / ".venv-interop" / "bin" / "python"
    environment = os.environ | {"PYTHONPATH": str(SOURCES.parent)}
    subprocess.run([python, "-c", OMEGACONF], env=environment, check=True, timeout=300)


def test_a_chat_template_is_a_name_a_file_or_a_text(file: Path, tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(text)

    def model(value: str) -> ModelConfig:
        return load_config(file, settings={"model.chat_template": value}).model

    assert load_config(file).model.template_text is None
    assert model(text).template_text == text
    own = model(str(tmp_path / "own.jinja"))
    assert own.chat_template == own.template_text == text, "the file may change, or be elsewhere"
    hermes = model("hermes")
    assert hermes.chat_template == "hermes"
    assert "<tool_call>" in (hermes.template_text or "")
    (tmp_path / "no.jinja").write_text("Hello.")
    for value, message in (
        (
            "hermez",
            r"model\.chat_template: there is no template 'hermez': it may be chatml, hermes,",
        ),
        (str(tmp_path), r"there is no template '/"),
        (str(tmp_path / "no.jinja"), r"no\.jinja is no chat template: it has neither \{\{ nor \{%"),
    ):
        with pytest.raises(InputError, match=message):
            model(value)


def test_every_mistake_is_named_at_once(file: Path) -> None:
    with pytest.raises(InputError) as error:
        load_config(file, ["training.steps=many", "sampling.top_p=2", "no.such=1"])
    for part in ("training.steps", "sampling.top_p", "no"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read"),
        ("- 1", "must hold keys and values"),
        ("environment: a:B\ndata: {path: d}", r"model\.path must be set"),
        ("model: {}\nenvironment: a:B\ndata: {path: d}", r"model\.path must be set"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {steps: 3}\neval: {every: 1}\ntraining: {seed: 1}", "3: the key training is"),
        ("a:\n  b:\n  - c: 1\n    d: 2\n    c: 3", "5: the key a.b.0.c is .*.first in line 3"),
        ("eval: {every: 1, 'every': 2}", "1: the key eval.every is given twice: keep one"),
        ("a: {1: x, 01: y}", "1: the key a.01 is given twice"),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  <<: {y: 1}", "4: the key b.<< is given twice"),
    ],
)
def test_a_key_that_a_file_has_twice_is_named_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^{path}, line {message}"):
        load_config(path)


def test_a_key_that_an_override_has_twice_is_named(file: Path) -> None:
    message = r"^the override of eval: the key eval\.sampling\.n is given twice"
    with pytest.raises(InputError, match=message):
        load_config(file, ["eval={sampling: {n: 1, n: 2}}"])
    assert load_config(file, ["seed=1", "seed=2"]).seed == 2, "the last of several overrides counts"


def test_a_key_may_recur_in_sections_and_override_merged_ones() -> None:
    text = "a: &a {x: 1, y: {x: 2}}\nb: {<<: *a, x: 3}\nc: [{x: 1}, {x: 2}]"
    assert read_yaml(text, "") == yaml.safe_load(text)
    assert read_yaml("a: {b: [1, x]}\na: {b: [1, x]}", "") == {"a": {"b": [1, "x"]}}, "no doubt"


@pytest.mark.parametrize(
    "override",
    [
        *("eval.every=true", "training.steps=yes", "alarms.idle=false", "serving.workers=true"),
        *("training.resources={trainers: true}", "sampling.stop_token_ids=[1, true]"),
        *("training.step_timeout=false", "sampling.temperature=on", "sampling.top_k=false"),
        *("algorithm.loss.dual_clip=true", "eval.sampling.n=true"),
    ],
)
def test_true_and_false_are_no_numbers(file: Path, override: str) -> None:
    with pytest.raises(InputError, match=r"must be a number, not (true|false)$"):
        load_config(file, [override])


def test_plain_values_are_read_where_nothing_is_lost(file: Path) -> None:
    config = load_config(
        file,
        [
            *("training.steps=2.0", "training.learning_rate=1e-6", "eval.every='3'"),
            *("data.shuffle=0", "eval.background=1", "model.trust_remote_code='yes'"),
            *("training.activation_checkpointing=true", "environment_args={x: true}"),
        ],
    )
    assert (config.training.steps, config.training.learning_rate, config.eval.every) == (2, 1e-6, 3)
    assert not config.data.shuffle
    assert config.eval.background
    assert config.model.trust_remote_code
    assert config.training.activation_checkpointing is True
    assert load_config(file, ["training.activation_checkpointing=1"]).training == (
        config.training.model_copy(
            update={"steps": 100, "learning_rate": None, "activation_checkpointing": 1}
        )
    )
    for lossy in ("training.steps=2.5", "data.shuffle=2", "eval.every=many"):
        with pytest.raises(InputError, match=r"Input should be a valid (integer|boolean)"):
            load_config(file, [lossy])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no configuration file .*nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_an_override_reaches_the_options_of_a_bare_name(file: Path) -> None:
    overrides = ["algorithm.advantage=turn_returns", "algorithm.advantage.gamma=0.5"]
    advantage = load_config(file, overrides).algorithm.advantage
    assert (advantage.name, advantage.model_dump()["gamma"]) == ("turn_returns", 0.5)
    with pytest.raises(InputError, match=r"kl is a value, not a section, and has no keys"):
        load_config(file, ["algorithm.kl=k3", "algorithm.kl.coef=0.5"])


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": {"min_tokens": 9, "max_tokens": 8}},
        {"engine": {"max_num_batched_tokens": 16}},
        {"deterministic": True, "training": {"max_staleness": 1}},
        {"training": {"colocated": True, "ranks": 2}},
        {
            "training": {"colocated": True, "ranks": 2},
            "serving": {"workers": 2},
            "weights": {"transport": "ipc"},
        },
        {"eval": {"target": 0.9}},
        {"eval": {"target": 0.9, "every": 0}, "data": {"path": "d", "eval_path": "e"}},
        {"algorithm": {"kl": {"coef": 0.1, "estimator": "k1"}}},
        {"algorithm": {"kl": {"where": "reward", "importance_weight": True}}},
        {
            "algorithm": {"kl": {"coef": 0.1, "sync_steps": 8}},
            "model": {"path": "m", "lora": {"rank": 8}},
        },
        {"algorithm": {"entropy": {"coef_min": 0.5, "coef_max": 0.1}}},
        {"algorithm": {"loss": {"name": "cispo", "clip_low": 0.2, "clip_high": -0.5}}},
        {"algorithm": {"loss": "vespo", "correction": {"name": "sequence_tis"}}},
        {"rollout": {"rewards": [{"function": "a:b", "model": "m"}]}},
    ],
)
def test_values_that_contradict_each_other_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        parse_config(minimal(**more))


def test_the_resolved_configuration_reads_back(tmp_path: Path) -> None:
    config = parse_config(minimal(sampling={"stop": ["\n", "é"], "top_p": 0.5}))
    for text in (dump_config(config), explain_config(config)):
        path = tmp_path / "again.yaml"
        path.write_text(text)
        assert load_config(path) == config


def test_the_servers_key_is_not_written_unless_asked_for(tmp_path: Path) -> None:
    config = parse_config(minimal(serving={"api_key": "hush-hush", "port": 0}))
    assert "hush-hush" not in dump_config(config)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path).serving.api_key is None
    assert load_config(path, ["serving.api_key=other"]).serving.api_key == "other"
    path.write_text(dump_config(config, secrets=True))
    assert load_config(path) == config


def test_the_defaults_mark_what_must_be_set(tmp_path: Path) -> None:
    text = explain_config()
    marked = [line for line in text.splitlines() if "# (required)" in line]
    assert len(marked) == text.count("(required)") == 3
    assert "  # (required) Folder or Hugging Face name of the model" in text
    path = tmp_path / "defaults.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"environment must be set .*; model\.path must be set"):
        load_config(path)
    changes = ["environment=a:B", "model.path=m", "data.path=d"]
    assert load_config(path, changes) == parse_config(minimal())
    unneeded = {"environment": "a:B", "data": {"path": "d"}}
    assert load_config(path, ["model.path=m"], unneeded) == parse_config(minimal())


def test_a_key_of_several_kinds_prints_each_with_its_meaning() -> None:
    text = explain_config(parse_config(minimal()))
    assert "  #   rloo: r - mean of the other rewards in the group.\n" in text
    assert "  #   cispo: Clipped importance weights" in text
    meaning = known_keys()["algorithm.loss.name"]
    assert all(f"{name}: " in meaning for name in ("ppo_clip", "gspo", "cispo", "dpo"))
    assert "or debug if this is debug. Values: debug, info, warning, error." in text


def test_the_reference_has_types_bounds_and_defaults_per_kind() -> None:
    keys = {(key.name, key.kind): key for key in describe_keys()}
    assert {name for name, _ in keys} == set(known_keys())
    shown = {
        ("training.steps", ""): ("int > 0", "100"),
        ("environment", ""): ("str", None),
        ("eval.sampling.temperature", ""): ("float ≥ 0, ≤ 2", "0.0"),
        ("rollout.tool_timeout", ""): ("float > 0 | null", "30.0"),
        ("data.limit", ""): ("int > 0 | null", "null"),
        ("weights.in_flight", ""): ("drain | abort | keep | keep_cache", "keep"),
        ("algorithm.loss.clip_high", "gspo"): ("float > 0", "0.0004"),
        ("rollout.rewards", ""): ("list of mapping", "[]"),
    }
    for name, (kind, default) in shown.items():
        assert (keys[name].type, keys[name].default) == (kind, default), name
    loss = keys["algorithm.loss.name", ""]
    assert loss.type.startswith("ppo_clip | gspo | cispo | sapo | vespo | dppo | dpo")
    assert loss.default == "ppo_clip"


def test_the_reference_has_keys_of_entries_and_nullable_sections() -> None:
    items = {key.name: key for key in describe_keys(items=True)}
    assert {*known_keys()} < {*items}
    assert all(key.meaning for key in items.values())
    page = TABLES["configuration"]()
    for name in ("rollout.rewards[].judge.rubric", "rollout.tools[].python.timeout"):
        assert f"| `{name}` | {items[name].type}" in page
    assert "| `environments.NAME.data.path` |" in page
    assert "| `algorithm.teacher.weight` | float > 0 | `1.0` |" in page
    assert "environments.NAME.teacher.weight" not in page


@pytest.mark.parametrize("key", ["environment", "data.path", "data.eval_path"])
def test_a_key_that_a_caller_gives_otherwise_may_stay_unset(key: str) -> None:
    tree = minimal(eval={"target": 0.5, "every": 1})
    tree["data"]["eval_path"] = "e"
    section = tree if key == "environment" else tree["data"]
    del section[key.rpartition(".")[2]]
    with pytest.raises(InputError, match=rf"{key}"):
        parse_config(tree)
    assert parse_config(tree, optional=[key]).eval.target == 0.5


def several(**more: Any) -> dict[str, Any]:
    """Two environments, and changes to the first."""
    shop = {"environment": "a:Shop", "data": {"path": "shop"}} | more
    return {
        "model": {"path": "m"},
        "environments": {"shop": shop, "sums": {"environment": "a:Sums", "data": {"path": "s"}}},
    }


def test_each_of_several_environments_has_its_own_configuration() -> None:
    tools: list[dict[str, Any]] = [{"use": "a:look"}]
    tree = several(weight=2, loop="single_turn", environment_args={"size": 3}, tools=tools)
    tree |= {"rollout": {"max_turns": 5}, "data": {"max_prompt_tokens": 99}}
    config = parse_config(tree)
    shop, sums = config.parts().values()
    assert (shop.environment, shop.data.path, sums.data.path) == ("a:Shop", "shop", "s")
    assert (shop.rollout.loop, sums.rollout.loop) == ("single_turn", "tool_calling")
    assert ([t.use for t in shop.rollout.tools], sums.rollout.tools) == (["a:look"], [])
    assert (shop.environment_args, sums.environment_args) == ({"size": 3}, {})
    assert {part.data.max_prompt_tokens for part in (shop, sums)} == {99}
    assert {part.rollout.max_turns for part in (shop, sums)} == {5}
    assert config.loops == {"single_turn", "tool_calling"}
    assert list(config.only(["sums"]).parts()) == ["sums"]
    few = config.with_row_limit(4)
    assert [part.data.limit for part in few.parts().values()] == [4, 4]
    single = parse_config(minimal(data={"path": "d", "limit": 3}))
    assert list(single.parts().values()) == [single] == [single.only([])]
    assert single.with_row_limit(4) == single
    assert single.with_row_limit(2).data.limit == 2
    target = {"eval": {"target": 0.5, "every": 1}}
    with pytest.raises(InputError, match=r"eval\.target needs evaluations"):
        parse_config(several() | target)
    assert parse_config(several(data={"path": "s", "eval_path": "e"}) | target).eval.target == 0.5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"environment": "a:B"}, "its own environments and rows, and environment is set too: mov"),
        ({"environment_args": {"a": 1}}, "and environment_args is set too: move it into an entry"),
        ({"data": {"path": "d"}}, r"and data\.path is set too"),
        ({"data": {"limit": 9}}, r"and data\.limit is set too"),
        ({"environments": {"a/b": {"environment": "a:B", "data": {}}}}, "the name 'a/b' must have"),
        ({"environments": {"a": {"data": {"path": "d"}}}}, r"environments\.a\.environment must be"),
        ({"environments": {"a": {"environment": "a:B"}}}, r"environments\.a\.data must be set"),
        (several(wieght=2), r"there is no key environments\.shop\.wieght"),
        (several(weight=0), r"environments\.shop\.weight: .*greater than 0"),
        (several(loop="chats"), r"environments\.shop\.loop: loop must be tool_calling, .*'chats'"),
        (
            several(loop="chat_scheduler"),
            r"shop\.loop chat_scheduler needs rollout\.chat_scheduler",
        ),
        (several(data={"paht": "d"}), r"there is no key environments\.shop\.data\.paht"),
    ],
)
def test_a_mistake_in_several_environments_names_the_key(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        parse_config(several() | more)


def test_several_environments_may_change_on_resume_by_their_rule() -> None:
    check_unchanged(parse_config(several()), parse_config(several(weight=3)))
    for key in ("environments", "data.curriculum", "data.max_rest"):
        assert (rule := rule_of(key)) is not None
        assert rule[0]


def test_entries_are_explained_as_plain_values() -> None:
    text = explain_config(parse_config(minimal(rollout={"tools": [{"use": "a:look"}]})))
    assert "use: 'a:look'" in text
    assert "environments: {shop: {data: {" in explain_config(parse_config(several()))


def test_every_key_has_a_meaning_and_there_are_not_too_many() -> None:
    keys = known_keys()
    assert all(keys.values()), [key for key, meaning in keys.items() if not meaning]
    assert len(keys) <= 250


def test_every_key_is_read_somewhere() -> None:
    assert unread(known_keys()) == []


def test_a_key_that_nothing_reads_is_found() -> None:
    assert unread(["training.no_such_key", "no_such"]) == ["training.no_such_key", "no_such"]


def unread(keys: Iterable[str]) -> list[str]:
    """The keys that no source reads as an attribute of their section.

    A section is passed around under its own name, or as `config` where its last name is the only
    one of its kind, or where the section chooses the class that gets it. In the sections' own
    classes, properties read keys, too.
    """
    leaves = Counter(key.rpartition(".")[2] for key in known_keys())
    read: set[tuple[str, str]] = set()
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        places: list[tuple[ast.AST, str]] = [(tree, "")]
        if path.parent.name == "config":
            places = [
                (part, section.name.removesuffix("Config").lower())
                for section in ast.walk(tree)
                if isinstance(section, ast.ClassDef)
                for part in section.body
                if isinstance(part, ast.FunctionDef)
                if any(ast.unparse(each) == "property" for each in part.decorator_list)
            ]
        for place, own in places:
            for node in ast.walk(place):
                if isinstance(node, ast.Attribute):
                    owner = getattr(node.value, "attr", None) or getattr(node.value, "id", "")
                    read.add((own if owner == "self" and own else owner.lstrip("_"), node.attr))
    missing = []
    for key in keys:
        *sections, leaf = key.split(".")
        if leaf == "name" and ".".join(sections) in CHOICES:
            continue  # read as the class that it chooses
        owners = {sections[-1]} if sections else {"config"}
        if leaves[leaf] <= 1 or ".".join(sections) in CHOICES:
            owners.add("config")
        if not any((owner, leaf) in read for owner in owners):
            missing.append(key)
    return missing


def test_secrets_are_masked_in_what_leaves_the_machine() -> None:
    mcp = {
        "url": "https://me:PASSWORD@host/mcp?api_key=LITERAL-query&page=2&token=LITERAL-last",
        "headers": {"X-Any": "LITERAL-header", "Authorization": "Bearer ${TOKEN}"},
    }
    command = {
        "command": "serve",
        "args": ["--token", "LITERAL-argument", "--api-key=LITERAL-option", "--verbose"],
        "env": {"PLAIN": "LITERAL-env"},
    }
    config = parse_config(
        minimal(
            serving={"api_key": "LITERAL-key"},
            engine={"vllm_args": {"hf_token": "LITERAL-hf", "tokenizer_mode": "slow"}},
            rollout={"tools": [{"mcp": mcp}, {"mcp": command}]},
        )
    )
    tree = masked(config)
    shown = json.dumps(tree)
    assert "LITERAL" not in shown
    assert "PASSWORD" not in shown
    assert '"https://***@host/mcp?api_key=***&page=2&token=***"' in shown
    assert masked_value("url", "http://host/?apiKey=${KEY}#top") == "http://host/?apiKey=${KEY}#top"
    assert masked_value("urls", ["http://host?token=x#top", "a=b"]) == [
        "http://host?token=***#top",
        "a=b",
    ]
    assert "Bearer ${TOKEN}" in shown
    assert '"tokenizer_mode": "slow"' in shown
    assert '"args": ["--token", "***", "--api-key=***", "--verbose"]' in shown
    assert masked_value("apiKey", "x") == "***"
    assert tree["model"] == config.model.model_dump(mode="json")


WHOLE_SECTIONS = (
    *("model.lora", "rollout", "sampling", "eval", "engine", "serving", "weights", "trajectories"),
    *("alarms", "metrics", "algorithm.advantage", "algorithm.advantage.model", "algorithm.loss"),
    *("algorithm.kl", "algorithm.kl.model", "algorithm.correction", "algorithm.entropy"),
)
"""Sections of which every key, also a new one, follows one rule when a run is resumed."""


def test_every_key_says_whether_a_resumed_run_may_change_it() -> None:
    keys = known_keys()
    without = [
        key for key in keys if key not in RULES and not key.startswith(tuple(WHOLE_SECTIONS))
    ]
    assert without == []
    assert [key for key in keys if rule_of(key) is None] == []
    assert [name for name in RULES if name not in {*keys, *WHOLE_SECTIONS}] == []
    table = TABLES["resume"]()
    assert all(f"| `{name}` |" in table for name in RULES)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("seed=3", "seed"),
        ("model.lora.rank=8", r"model\.lora\.rank"),
        ("training.weights_dtype=bfloat16", r"training\.weights_dtype"),
        ("name=other", "name"),
        ("output_dir=elsewhere", "output_dir"),
    ],
)
def test_a_resumed_run_refuses_a_changed_fixed_key_by_name(
    file: Path, change: str, key: str
) -> None:
    saved = load_config(file, ["model.dtype=bfloat16"])
    changed = load_config(file, ["model.dtype=bfloat16", change])
    with pytest.raises(InputError, match=rf"^{key} cannot change from .* to .*: \w+"):
        check_unchanged(saved, changed)
    free = ["training.learning_rate=1e-4", "training.steps=7", "model.dtype=bfloat16"]
    check_unchanged(saved, load_config(file, free))


@pytest.mark.parametrize("name", ["../escape", "/tmp/escape", "a/b", "..", ".", "''", "a\\b"])
def test_a_name_that_is_a_path_is_refused(file: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"name: must be one folder in output_dir, not '.*': ch"):
        load_config(file, [f"name={name}"])
    assert load_config(file, ["name=it is..fine-1_ü"]).name == "it is..fine-1_ü"


@pytest.mark.parametrize(
    ("workers", "fewest", "most"), [(3, 3, 3), ("1-8", 1, 8), ("4", 4, 4), ("2-2", 2, 2)]
)
def test_workers_are_a_number_or_a_range(file: Path, workers: Any, fewest: int, most: int) -> None:
    serving = parse_config(minimal(serving={"workers": workers})).serving
    assert (serving.min_workers, serving.max_workers) == (fewest, most)
    again = load_config(file, [f"serving.workers={workers}"])
    file.write_text(dump_config(again))
    assert load_config(file).serving.workers == again.serving.workers == serving.workers


@pytest.mark.parametrize("workers", [0, -1, "0-4", "4-1", "1-", "auto", "1-4-8", "-3"])
def test_what_is_no_number_of_workers_is_said_in_a_sentence(workers: Any) -> None:
    with pytest.raises(InputError, match=r"serving\.workers: .* is neither a number"):
        parse_config(minimal(serving={"workers": workers}))


def test_engines_in_the_trainers_processes_are_of_a_fixed_number() -> None:
    tree = minimal(serving={"workers": "1-2"}, training={"colocated": True})
    with pytest.raises(InputError, match=r"serving\.workers: 1-2 is a range, but with"):
        parse_config(tree)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("eval.every=true", r"eval\.every: must be a number, not true"),
        ("training.learning_rate=false", r"training\.learning_rate: must be a number, not false"),
        ("seed=true", "seed: must be a number, not true"),
        (
            "rollout.tools=[{mcp: {command: no-server stdio}}]",
            r"there is no program 'no-server stdio': .* \{command: no-server, args: \[stdio\]\}",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused(override: str, words: str) -> None:
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}}
    with pytest.raises(InputError, match=words):
        make_config(tree, [override])
    make_config(tree, ["eval.background=true", "eval.every=1"])


def test_evaluation_samples_like_training_but_once_and_greedily() -> None:
    """Whatever else of eval.sampling is set, and in whatever form the configuration comes."""
    given = {"max_tokens": 4096, "stop": ["</s>"], "stop_token_ids": [7], "top_p": 0.9, "n": 16}
    for chosen, changed in (
        ({}, {}),
        ({"max_tokens": 1024}, {"max_tokens": 1024}),
        ({"n": 4, "temperature": 1.0}, {"n": 4, "temperature": 1.0}),
        ({"stop": [], "n": None}, {"stop": []}),
        (None, {}),
    ):
        config = parse_config(minimal(sampling=given, eval={"every": 5, "sampling": chosen}))
        expected = SamplingConfig(**{**given, "n": 1, "temperature": 0.0, **changed})
        assert config.eval.sampling == expected
        assert config.eval.every == 5
        assert make_config(config.model_dump()).eval.sampling == expected
    assert parse_config(minimal(sampling=given, eval=None)).eval.sampling.max_tokens == 4096
    assert parse_config(minimal()).eval.sampling == SamplingConfig(n=1, temperature=0.0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"sampling": {"topp": 1}}, "there is no key sampling.topp; did you mean sampling.top_p?"),
        ({"eval": {"sampling": 5}}, "eval.sampling must be a section with its own keys, not 5"),
        ({"eval": 5}, "eval must be a section with its own keys, not 5"),
        ({"sampling": 5}, "sampling must be a section with its own keys, not 5"),
    ],
)
def test_a_mistake_in_sampling_is_named_where_it_is(tree: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(minimal(**tree))
    assert message in str(caught.value)
    assert str(caught.value).count("topp") <= 1


@pytest.mark.parametrize(
    "text", ["<result>\n</result>", "<o>{output}</o>", '{"result": "{result}"}', "{result", "{}"]
)
def test_a_format_of_results_without_the_result_is_refused(text: str) -> None:
    """Before the first tool call, which would fail, or whose result no model would see."""
    message = r"rollout\.result_format: result_format must have {result}"
    with pytest.raises(InputError, match=message):
        parse_config(minimal(rollout={"loop": "interleaved", "result_format": text}))


def test_a_format_of_results_may_have_braces_of_its_own() -> None:
    text = '{{"result": "{result}"}}'
    config = parse_config(minimal(rollout={"loop": "interleaved", "result_format": text}))
    assert config.rollout.result_format.format(result="42") == '{"result": "42"}'


def test_a_buffer_beyond_the_longest_trajectory_is_refused() -> None:
    tree = minimal(algorithm={"overlong_tokens": 8192})
    tree["model"] = {**tree["model"], "max_length": 4096}
    with pytest.raises(InputError, match=r"overlong_tokens 8192 exceeds model\.max_length 4096"):
        parse_config(tree)
    tree["algorithm"]["overlong_tokens"] = 4096
    assert parse_config(tree).algorithm.overlong_tokens == 4096

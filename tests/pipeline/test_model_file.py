import json
from pathlib import Path

import pytest

from turnwise.compat.chatlearn import Pipeline, VLLMModule
from turnwise.compat.chatlearn.model_file import read_model, sentences
from turnwise.compat.chatlearn.pipeline_file import PipelineFile
from turnwise.config import load_config
from turnwise.config.algorithm import Gae
from turnwise.errors import InputError

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "calculator"


def write(folder: Path, **files: str) -> Path:
    """Write files by their names without .yaml; returns the first."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def test_each_section_reaches_the_configurations_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        own="""
        model: {path: some/model, dtype: bfloat16}
        tokenizer: {tool_parser: llama3_json, template_args: {enable_thinking: false}}
        sampling: {n: 3, stop: [a, b]}
        eval_sampling: {temperature: 0.5}
        scheduler: {max_num_seqs: 9}
        cache: {kv_cache_gib: 0.25, block_size: 32}
        engine: {threads: 2}
        """,
    )
    assert read_model(path)[0] == {
        "model.path": "some/model",
        "model.dtype": "bfloat16",
        "rollout.tool_parser": "llama3_json",
        "model.template_args.enable_thinking": False,
        "sampling.n": 3,
        "sampling.stop": ["a", "b"],
        "eval.sampling.temperature": 0.5,
        "engine.max_num_seqs": 9,
        "engine.kv_cache_gib": 0.25,
        "engine.vllm_args.block_size": 32,
        "engine.threads": 2,
    }
    base = write(tmp_path, base="environment: a:B\ndata: {path: d}\nsampling: {top_p: 0.9, n: 8}")
    config = load_config(base, settings=read_model(path)[0])
    assert config.sampling.model_dump(include={"n", "top_p", "stop"}) == {
        "n": 3,
        "top_p": 0.9,
        "stop": ["a", "b"],
    }
    assert config.engine.vllm_args == {"block_size": 32}
    assert config.model.template_args == {"enable_thinking": False}


def test_own_keys_beat_included_ones_and_later_files_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        own="includes: [one.yaml, two.yaml]\nsampling: {n: 1}",
        one="sampling: {n: 2, top_k: 2, max_tokens: 2}",
        two="sampling: {n: 3, top_k: 3}",
    )
    assert read_model(path)[0] == {
        "sampling.n": 1,
        "sampling.top_k": 3,
        "sampling.max_tokens": 2,
    }


def test_include_paths_start_at_the_file_that_includes(tmp_path: Path) -> None:
    write(tmp_path, base="cache: {prefix_caching: false}")
    write(tmp_path / "shared", middle="includes: ../base.yaml")
    path = write(tmp_path / "models", own="includes: [../shared/middle.yaml]")
    assert read_model(path)[0] == {"engine.prefix_caching": False}


def test_a_file_may_be_included_twice_but_not_by_itself(tmp_path: Path) -> None:
    twice = write(
        tmp_path,
        twice="includes: [left.yaml, right.yaml]",
        left="includes: [base.yaml]",
        right="includes: [base.yaml]",
        base="sampling: {n: 4}",
    )
    assert read_model(twice)[0] == {"sampling.n": 4}
    circle = write(tmp_path, a="includes: [b.yaml]", b="includes: [c.yaml]", c="includes: [b.yaml]")
    with pytest.raises(InputError, match=r"includes itself: b\.yaml -> c\.yaml -> b\.yaml$"):
        read_model(circle)[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampling: {temprature: 1}", "no key sampling.temprature; did you mean sampling.temp"),
        ("samplings: {n: 1}", "no key samplings; did you mean sampling?"),
        ("temprature: 1", "no key temprature; did you mean temperature?"),
        ("temprature: 0", "no key temprature; did you mean temperature?"),
        ("sampling: {eval_temperature: 1}", "did you mean eval_sampling.temperature?"),
        ("sampling: {max_new_tokens: 1}", "sampling.max_new_tokens; did you mean sampling.max_to"),
        ("sampling: {stop_token_list: a}", "sampling.stop_token_list; did you mean sampling.stop?"),
        ("engine: {seq_length: 9}", "engine.seq_length; did you mean model.max_length?"),
        ("model: {tokenizer: x}", "no key model.tokenizer; did you mean tokenizer.path?"),
        ("lr: 1", "lr is no key of a model's file: it is training.learning_rate"),
        ("engine: {max_num_seqs: 1}", "engine.max_num_seqs; did you mean scheduler.max_num_seqs?"),
        (
            "sliding_window: 4096",
            "sliding_window is not supported: the model's own config.json sets",
        ),
        (
            "repetition_penalty: 1.1",
            "repetition_penalty is not supported: a penalty",
        ),
        ("fp16: true", "fp16 True is not supported: model.dtype is bfloat16 or float32"),
        ("include_prompt: false", "all_tokens begin with the prompt; cut them at prompt_token_l"),
        ("n: many", "n must be a whole number of 1 or more, not 'many'"),
        ("new_token_limit: false", "new_token_limit false samples up to seq_length, which is not"),
        ("n: 2\nsampling: {n: 3}", "sampling.n is 3 in a section and 2 by a flat key"),
        ("length_penalty: 2", "length_penalty is not supported: it belongs to beam search"),
        ("best_of: 2", "best_of is not supported: "),
        ("sampling: 3", "sampling must hold keys and values, not 3"),
        ("includes: {a: b}", "includes must be a list of files"),
        ("includes: [none.yaml]", "there is no model file"),
        ("- 1", "must hold keys and values"),
        ("a: [", "cannot be read: "),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_that_names_it(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, own=text)
    with pytest.raises(InputError) as error:
        read_model(path)[0]
    assert message in str(error.value)
    assert "own.yaml" in str(error.value)
    assert "\n" not in str(error.value)


POLICY = """
includes: [base_inference.yaml]
n: 1
ignore_eos: ${policy_ignore_eos:False}
top_p: ${policy_top_p:0.9}
top_k: ${policy_top_k:-1}
temperature: ${policy_temperature:1.0}
use_beam_search: ${policy_use_beam_search:False}
eval_temperature: ${eval_temperature:1.0}
eval_top_k: ${eval_top_k:-1}
eval_top_p: ${eval_top_p:0.9}
apply_replica_id_to_seed: ${apply_replica_id_to_seed:True}
stop_token_list: ${stop_token_list:<EOS>;</s>}
new_token_limit: ${new_token_limit:True}
prompt_logprobs: ${prompt_logprobs:None}
max_num_batched_tokens: ${max_num_batched_tokens:32768}
max_paddings: ${max_paddings:512}
num_scheduler_steps: ${num_scheduler_steps:1}
enforce_eager: ${enforce_eager:False}
block_size: ${cache_block_size:16}
gpu_memory_utilization: ${gpu_memory_utilization:0.5}
swap_space: ${swap_space:4}
sliding_window: ${sliding_window:None}
tokenizer: ${tokenizer_load}
vllm_input_ids_key: input_ids
vllm_prompt_key: prompt
tensor_model_parallel_size: ${policy_tp}
pipeline_model_parallel_size: ${policy_pp}
"""
"""The keys of ChatLearn's examples/megatron/configs/llama2/vllm_policy_inference.yaml."""

BASE = """
bf16: True
init_shuffle_prompts: ${init_shuffle_prompts:0}
num_inference_per_prompt: ${num_inference_per_prompt:1}
seq_length: ${seq_length:1024}
max_new_tokens: ${max_new_tokens:512}
temperature: 0.1
seed: 42
load: ${policy_inference_load}
load_iteration: ${policy_load_iteration}
"""
"""The keys of the files that it includes, about sampling and the checkpoint."""


@pytest.fixture
def chatlearn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("tokenizer_load", "some/tokenizer")
    monkeypatch.setenv("policy_inference_load", "some/model")
    monkeypatch.setenv("policy_tp", "2")
    return write(tmp_path, policy=POLICY, base_inference=BASE)


def test_chatlearns_example_is_understood_key_for_key(chatlearn: Path) -> None:
    """Flat keys such as `eval_top_k`, variables of the environment, and included files."""
    base = write(chatlearn.parent, pipeline="environment: a:B\ndata: {path: d}")
    settings = read_model(chatlearn)[0]
    config = load_config(base, settings=settings)
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "n": 1, "ignore_eos": False}
    sampling |= {"stop": ["<EOS>", "</s>"], "max_tokens": 512, "prompt_logprobs": False}
    for section in (config.sampling, config.eval.sampling):
        assert section.model_dump(include=set(sampling)) == sampling
    assert (config.model.path, config.model.tokenizer) == ("some/model", "some/tokenizer")
    assert (config.model.max_length, config.model.dtype, config.seed) == (1024, "bfloat16", 42)
    engine = config.engine
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size) == (2, 1)
    assert engine.max_num_batched_tokens == 32768
    assert engine.vllm_args == {"block_size": 16, "gpu_memory_utilization": 0.5}
    args = read_model(chatlearn).args
    assert (args["vllm_input_ids_key"], args["vllm_prompt_key"]) == ("input_ids", "prompt")


def test_speed_and_memory_keys_load_with_a_note_on_their_effect(
    chatlearn: Path, tmp_path: Path
) -> None:
    """As the page and its example have them: max_paddings 512, swap_space 4, block_size 16."""
    said = sentences(read_model(chatlearn).notes)
    assert sum("max_paddings: no effect; vLLM packs batches without padding" in n for n in said)
    assert sum("swap_space: no effect; vLLM recomputes preempted requests" in n for n in said)
    assert (
        "block_size: the number of tokens in a block of vLLM's KV cache, and no size in MB" in said
    )
    assert len(said) == 3
    more = "scheduler: {max_paddings: 512}\nbatch_generation: {ranking: true}\nmax_paddings: 0"
    notes = read_model(write(tmp_path, more=more)).notes
    assert [*notes.values()] == [["max_paddings"], ["batch_generation"]]
    assert read_model(write(tmp_path, none="swap_space: 0\nmax_paddings: None")).notes == {}


BASE_YAML = """
add_position_embedding: False
tokenizer_type: Llama2Tokenizer
normalization: RMSNorm
group_query_attention: ${group_query_attention:False}
swiglu: True
bf16: True
trainer_engine: ${trainer_engine:rlhf}
init_shuffle_prompts: 0
dpo_weight: 0.1
num_inference_per_prompt: 1
tokenizer_model: ${tokenizer_model}
max_position_embeddings: ${max_position_embedding:4096}
seq_length: ${seq_length:1024}
init_kl_coef: 0.03
gamma: 1
lam: 0.9
cliprange: 0.2
cliprange_value: 0.1
scale_reward: "None"
max_new_tokens: ${max_new_tokens:512}
lm_coef: 0
use_flash_attn: 1
"""
SHARED = """
load: ${%s_load}
num_layers: 2
hidden_size: ${%s_hidden_size}
num_query_groups: ${%s_num_query_groups}
tensor_model_parallel_size: ${tp:8}
use_distributed_optimizer: True
"""
TRAINED = """
includes: [base.yaml, %s_shared.yaml]
use_checkpoint_opt_param_scheduler: False
adam_beta1: 0.9
lr_decay_iters: 12000
lr_warmup_iters: 100
lr: 2.4e-7
min_lr: 1e-9
lr_decay_style: linear
weight_decay: 0.01
clip_grad: 0.5
sequence_parallel: True
recompute_granularity: ${granularity:None}
"""
CHAIN = {
    "base": BASE_YAML,
    "policy_shared": SHARED.replace("%s", "policy"),
    "reward_shared": SHARED.replace("%s", "reward"),
    "policy": POLICY.replace("base_inference.yaml", "base.yaml, policy_shared.yaml")
    .replace("tensor_model_parallel_size: ${policy_tp}", "")
    .replace("${tokenizer_load}", "None"),
    "reference": "includes: [base.yaml, policy_shared.yaml]\nparallel_output: True",
    "reward": "includes: [base.yaml, reward_shared.yaml]\nreward_bias: 0",
    "value": "includes: [base.yaml, reward_shared.yaml]",
    "ppo_policy": TRAINED % "policy",
    "ppo_value": TRAINED % "reward",
}
"""The kinds of keys of the files that ChatLearn's example for llama2 includes."""


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a pipeline, whose models' files all include the structure of a model."""
    for name in ("policy", "reward"):
        (tmp_path / name).mkdir()
        shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_key_value_heads": 2}
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
        monkeypatch.setenv(f"{name}_load", str(tmp_path / name))
        monkeypatch.setenv(f"{name}_hidden_size", "64")
    models = "".join(f"  {n}: {{model_config_file: {n}.yaml}}\n" for n in [*CHAIN][3:])
    write(tmp_path, **CHAIN)
    return write(tmp_path, rlhf=f"models:\n{models}\nruntime: {{data_path: rows.jsonl}}")


def test_includes_with_the_models_structure_load_for_every_model(chain: Path) -> None:
    """And each key that has no counterpart is named, once."""
    read = PipelineFile(chain)
    config = read.config
    assert (config.model.path, config.model.max_length) == (str(chain.parent / "policy"), 1024)
    assert (config.algorithm.kl.coef, config.training.learning_rate) == (0.03, 2.4e-7)
    assert isinstance(config.algorithm.advantage, Gae)
    assert (config.algorithm.advantage.lam, config.algorithm.advantage.clip) == (0.9, 0.1)
    said = "\n".join(read.notes)
    assert "no effect; the folder of load (model.path), in Hugging Face's format, contains" in said
    for key in ("swiglu", "use_distributed_optimizer", "min_lr", "normalization", "max_paddings"):
        (line,) = [note for note in read.notes if key in note.partition(":")[0].split(", ")]
        assert "no effect; " in line
    assert "num_layers" in said, "of the other models: only the policy's is compared"


def test_the_structure_in_included_files_must_fit_the_model(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("policy_num_query_groups", "2")
    PipelineFile(chain)
    monkeypatch.setenv("policy_hidden_size", "4096")
    with pytest.raises(InputError, match=r"hidden_size is 4096, and the model in .* has 64"):
        PipelineFile(chain)
    monkeypatch.setenv("policy_load", "some/model")
    said = "\n".join(PipelineFile(chain).notes)
    assert "not compared, because there is no config.json with them in some/model" in said


def test_use_beam_search_is_that_of_training_and_evaluation(tmp_path: Path) -> None:
    settings = read_model(write(tmp_path, own="use_beam_search: True"))[0]
    assert settings == {"sampling.use_beam_search": True, "eval.sampling.use_beam_search": True}
    assert read_model(write(tmp_path, own="use_beam_search: False"))[0] == {}
    base = write(tmp_path, base="environment: a:B\ndata: {path: d}\nmodel: {path: m}")
    with pytest.raises(InputError, match="use_beam_search knows neither min_tokens nor logits_pro"):
        load_config(base, ["sampling={use_beam_search: true, min_tokens: 2}"])


def test_chatlearns_first_example_had_other_values(tmp_path: Path) -> None:
    """-1, 0 and None mean the same as a missing key."""
    path = write(
        tmp_path,
        own="vllm_micro_batch_size: -1\ntop_p: 1.0\ntop_k: 1\neval_temperature: 0.01\n"
        "use_attn_acc: False\neval_top_k: 1\neval_top_p: 0\nswap_space : 0\n"
        "sliding_window: None\nearly_stopping: false\nbest_of: 1\nblocks_to_swap_in: {}",
    )
    base = write(tmp_path, base="environment: a:B\ndata: {path: d}\nmodel: {path: m}")
    config = load_config(base, settings=read_model(path)[0])
    assert (config.sampling.top_k, config.eval.sampling.top_k) == (1, 1)
    assert (config.eval.sampling.temperature, config.eval.sampling.top_p) == (0.01, 1.0)


def test_answers_to_a_prompt_are_a_group_in_training(tmp_path: Path) -> None:
    """num_inference_per_prompt repeats prompts only in training."""
    settings = read_model(write(tmp_path, own="n: 2\nnum_inference_per_prompt: 4"))[0]
    assert settings == {"sampling.n": 8, "eval.sampling.n": 2}


def test_an_answer_without_a_token_limit_may_fill_the_context(tmp_path: Path) -> None:
    """And prompts still leave room for max_new_tokens."""
    limits = "seq_length: 100\nmax_new_tokens: 30\nnew_token_limit: "
    settings = read_model(write(tmp_path, own=limits + "false"))[0]
    assert settings["sampling.max_tokens"] == settings["eval.sampling.max_tokens"] == 100
    assert settings["data.max_prompt_tokens"] == 70
    settings = read_model(write(tmp_path, own=limits + "true"))[0]
    assert settings["sampling.max_tokens"] == settings["eval.sampling.max_tokens"] == 30
    assert "data.max_prompt_tokens" not in settings


def test_variables_of_the_environment_take_the_place_of_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sections too; a variable without value or default leaves its key out."""
    monkeypatch.setenv("own_n", "3")
    path = write(
        tmp_path,
        own="sampling: {n: '${own_n:2}', stop: ['${own_stop:a:b}']}\nn: ${not_set}\n"
        "temperature: ${not_set}",
    )
    assert read_model(path)[0] == {"sampling.n": 3, "sampling.stop": ["a:b"]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, base="model: {path: m}\nsampling: {n: 8, top_p: 0.9}")


def module(folder: Path, name: str, text: str) -> VLLMModule:
    return VLLMModule(name, write(folder, **{name: text}))


def test_a_model_file_beats_the_pipelines_and_overrides_win(base: Path, tmp_path: Path) -> None:
    policy = module(tmp_path, "policy", "sampling: {n: 4, top_k: 4}")
    config = Pipeline(base, policy, overrides=["sampling.top_k=5"]).config
    assert (config.sampling.top_p, config.sampling.n, config.sampling.top_k) == (0.9, 4, 5)
    again = Pipeline(config, overrides=["sampling.n=2"]).config
    assert (again.sampling.n, again.sampling.top_k) == (2, 5)


def test_conflicting_modules_are_refused_without_an_override(base: Path, tmp_path: Path) -> None:
    one = module(tmp_path, "one", "scheduler: {max_num_seqs: 8}")
    two = module(tmp_path, "two", "scheduler: {max_num_seqs: 16}\nsampling: {n: 2}")
    with pytest.raises(InputError, match="the model file of one contradicts"):
        Pipeline(base, one, two)
    decided = Pipeline(base, one, two, overrides=["engine.max_num_seqs=4"]).config
    assert (decided.engine.max_num_seqs, decided.sampling.n) == (4, 2)


def test_a_wrong_value_in_a_model_file_is_refused_at_once(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sampling\.top_p"):
        Pipeline(base, module(tmp_path, "policy", "sampling: {top_p: 2}"))


def test_two_modules_of_one_name_are_refused(base: Path) -> None:
    with pytest.raises(InputError, match="has a module policy already"):
        Pipeline(base, VLLMModule("policy"), VLLMModule("policy"))


def test_what_does_not_run_says_so(base: Path) -> None:
    policy = VLLMModule("policy")
    with pytest.raises(InputError, match="policy is in no running pipeline"):
        policy.forward_step([])
    with pytest.raises(InputError, match="does not run"):
        Pipeline(base, policy).train({"groups": []})


def test_the_examples_model_file_matches_its_configuration() -> None:
    given = load_config(EXAMPLES / "config.yaml")
    policy = VLLMModule("policy", EXAMPLES / "policy.yaml")
    assert len(policy.settings) > 8
    assert Pipeline(given, policy).config == given

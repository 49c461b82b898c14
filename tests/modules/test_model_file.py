from pathlib import Path

import pytest

from turnwise.config import load_config
from turnwise.errors import InputError
from turnwise.modules import Pipeline, VLLMModule
from turnwise.modules.model_file import as_overrides, read_model_file

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "calculator"


def write(folder: Path, **files: str) -> Path:
    """Files by their names without .yaml; returns the first."""
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
    assert read_model_file(path) == {
        "model.path": "some/model",
        "model.dtype": "bfloat16",
        "rollout.tool_parser": "llama3_json",
        "model.template_args.enable_thinking": False,
        "sampling.n": 3,
        "sampling.stop": ["a", "b"],
        "eval.sampling.temperature": 0.5,
        "engine.max_num_seqs": 9,
        "engine.kv_cache_gib": 0.25,
        "engine.extra.block_size": 32,
        "engine.threads": 2,
    }
    base = write(tmp_path, base="environment: a:B\ndata: {path: d}\nsampling: {top_p: 0.9, n: 8}")
    config = load_config(base, as_overrides(read_model_file(path)))
    assert config.sampling.model_dump(include={"n", "top_p", "stop"}) == {
        "n": 3,
        "top_p": 0.9,
        "stop": ["a", "b"],
    }
    assert config.engine.extra == {"block_size": 32}
    assert config.model.template_args == {"enable_thinking": False}


def test_own_keys_win_over_included_ones_and_later_files_over_earlier(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        own="includes: [one.yaml, two.yaml]\nsampling: {n: 1}",
        one="sampling: {n: 2, top_k: 2, max_tokens: 2}",
        two="sampling: {n: 3, top_k: 3}",
    )
    assert read_model_file(path) == {
        "sampling.n": 1,
        "sampling.top_k": 3,
        "sampling.max_tokens": 2,
    }


def test_included_files_are_found_from_the_file_that_includes_them(tmp_path: Path) -> None:
    write(tmp_path, base="cache: {prefix_caching: false}")
    write(tmp_path / "shared", middle="includes: ../base.yaml")
    path = write(tmp_path / "models", own="includes: [../shared/middle.yaml]")
    assert read_model_file(path) == {"engine.prefix_caching": False}


def test_a_file_may_be_included_twice_but_not_by_itself(tmp_path: Path) -> None:
    twice = write(
        tmp_path,
        twice="includes: [left.yaml, right.yaml]",
        left="includes: [base.yaml]",
        right="includes: [base.yaml]",
        base="sampling: {n: 4}",
    )
    assert read_model_file(twice) == {"sampling.n": 4}
    circle = write(tmp_path, a="includes: [b.yaml]", b="includes: [c.yaml]", c="includes: [b.yaml]")
    with pytest.raises(InputError, match=r"includes itself: b\.yaml -> c\.yaml -> b\.yaml$"):
        read_model_file(circle)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampling: {temprature: 1}", "no key sampling.temprature; did you mean sampling.temp"),
        ("samplings: {n: 1}", "no key samplings; did you mean sampling?"),
        ("temperature: 1", "no key temperature; did you mean sampling.temperature?"),
        ("engine: {max_num_seqs: 1}", "engine.max_num_seqs; did you mean scheduler.max_num_seqs?"),
        ("tokenizer: {path: x}", "no key tokenizer.path; did you mean model.path?"),
        ("sampling: {use_beam_search: true}", "sampling.use_beam_search is gone: vLLM no longer"),
        ("scheduler: {max_paddings: 512}", "scheduler.max_paddings is gone: vLLM packs"),
        ("cache: {swap_space: 4}", "cache.swap_space is gone: vLLM recomputes"),
        ("best_of: 2", "best_of is gone: "),
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
        read_model_file(path)
    assert message in str(error.value)
    assert "own.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, base="model: {path: m}\nsampling: {n: 8, top_p: 0.9}")


def module(folder: Path, name: str, text: str) -> VLLMModule:
    return VLLMModule(name, write(folder, **{name: text}))


def test_a_model_file_wins_over_the_pipelines_and_overrides_win_over_both(
    base: Path, tmp_path: Path
) -> None:
    policy = module(tmp_path, "policy", "sampling: {n: 4, top_k: 4}")
    config = Pipeline(base, policy, overrides=["sampling.top_k=5"]).config
    assert (config.sampling.top_p, config.sampling.n, config.sampling.top_k) == (0.9, 4, 5)
    again = Pipeline(config, overrides=["sampling.n=2"]).config
    assert (again.sampling.n, again.sampling.top_k) == (2, 5)


def test_modules_that_disagree_are_refused_unless_an_override_decides(
    base: Path, tmp_path: Path
) -> None:
    one = module(tmp_path, "one", "scheduler: {max_num_seqs: 8}")
    two = module(tmp_path, "two", "scheduler: {max_num_seqs: 16}\nsampling: {n: 2}")
    with pytest.raises(InputError, match="the model file of one contradicts"):
        Pipeline(base, one, two)
    decided = Pipeline(base, one, two, overrides=["engine.max_num_seqs=4"]).config
    assert (decided.engine.max_num_seqs, decided.sampling.n) == (4, 2)


def test_a_wrong_value_in_a_model_file_is_refused_before_anything_starts(
    base: Path, tmp_path: Path
) -> None:
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


def test_the_examples_model_file_says_what_its_configuration_says() -> None:
    given = load_config(EXAMPLES / "config.yaml")
    policy = VLLMModule("policy", EXAMPLES / "policy.yaml")
    assert len(policy.settings) > 8
    assert Pipeline(given, policy).config == given

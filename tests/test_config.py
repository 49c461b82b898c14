import ast
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

import turnwise
from docs.reference import TABLES
from turnwise.config import (
    ALIASES,
    LOOP_NAMES,
    REPLACED_KEYS,
    ModelConfig,
    dump_config,
    known_keys,
    load_config,
    parse_config,
)
from turnwise.config.explain import CHOICES, describe_keys, explain_config
from turnwise.config.load import masked, masked_value
from turnwise.config.resume import RULES, check_unchanged, rule_of
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
        ("sampling.eval_temperature", "eval.sampling.temperature"),
        ("eval.sampling.stop_token_list", "eval.sampling.stop"),
        ("eval_top_p", "eval.sampling.top_p"),
        ("training.lr", "training.learning_rate"),
        ("training.batch_size", "rollout.prompts_per_step"),
        ("training.epochs", "training.steps"),
        ("rollout.n", "sampling.n"),
        ("num_generations", "sampling.n"),
        ("training.kl_coef", "algorithm.kl.coef"),
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
            ["algorithm.loss={name: gspo, dual_clip: 3}"],
            r"algorithm\.loss\.dual_clip belongs to ppo_clip, not to gspo",
        ),
        (["algorithm.advantage={name: gae, lam: 2}"], r"algorithm\.advantage\.lam: .* less than"),
    ],
)
def test_a_part_that_is_one_of_several_kinds_is_checked_as_that_kind(
    file: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_config(file, changes)
    assert load_config(file, ["algorithm.loss.clip_high=0.3"]).algorithm.loss.name == "ppo_clip"


@pytest.mark.parametrize("key", sorted(REPLACED_KEYS))
def test_a_key_that_vllm_lost_says_what_took_its_place(file: Path, key: str) -> None:
    """And one whose value asks for nothing is no mistake."""
    with pytest.raises(InputError, match=rf"engine\.{key} is not supported: .*(sampling|engine)"):
        load_config(file, [f"engine.{key}=7"])
    for value in ("false", "null", "0", "[]", "{ranking: false}", "None"):
        assert load_config(file, [f"engine.{key}={value}"]) == load_config(file)


def test_such_a_key_is_found_among_the_engines_extra_arguments_too(file: Path) -> None:
    with pytest.raises(InputError, match=r"engine\.vllm_args\.swap_space is not supported"):
        load_config(file, ["engine.vllm_args={swap_space: 4}"])
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
def test_what_vllm_would_refuse_in_every_request_is_refused_when_it_is_read(
    file: Path, override: str
) -> None:
    with pytest.raises(InputError, match=rf"sampling\.{override.partition('=')[0]}: "):
        load_config(file, [f"sampling.{override}"])


def test_prompts_may_be_longer_than_what_is_computed_together(file: Path) -> None:
    """But where they must not be computed in parts."""
    overrides = ["engine.max_num_batched_tokens=256", "model.max_length=1024"]
    assert load_config(file, overrides).engine.max_num_batched_tokens == 256
    with pytest.raises(InputError, match=r"256 is below model\.max_length 1024, and .*chunked"):
        load_config(file, [*overrides, "engine.vllm_args={enable_chunked_prefill: false}"])


def test_what_other_trainers_call_a_key_leads_to_a_key_that_is_there() -> None:
    known = known_keys()
    assert [alias for alias, key in ALIASES.items() if key not in known] == []
    assert [alias for alias in ALIASES if alias in known] == []


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


def test_loops_of_ones_own_and_sections_without_keys_are_accepted(file: Path) -> None:
    assert load_config(file, ["rollout.loop=my.loops:Mine"]).rollout.loop == "my.loops:Mine"
    weights = load_config(file, ["weights.transport=my.links:Mine"]).weights
    assert weights.transport == "my.links:Mine"
    assert load_config(file, ["training="]) == load_config(file)
    file.write_text(file.read_text() + "training:\n")
    assert load_config(file, ["training.steps=3"]).training.steps == 3


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
    assert "# Precision of the weights, in the engine and in the trainer. Values: float32" in text


def test_the_reference_has_types_with_bounds_and_the_defaults_of_each_kind() -> None:
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
    assert loss.type.startswith("ppo_clip | gspo | cispo | dpo")
    assert loss.default == "ppo_clip"


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


def test_each_of_several_environments_is_a_configuration_of_its_own() -> None:
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
    assert len(keys) < 210


def test_every_key_is_read_somewhere() -> None:
    assert unread(known_keys()) == []


def test_a_key_that_nothing_reads_is_found() -> None:
    assert unread(["training.no_such_key", "no_such"]) == ["training.no_such_key", "no_such"]


def unread(keys: Iterable[str]) -> list[str]:
    """The keys that no source reads as an attribute of their section.

    A section is passed around under its own name, or as `config` where its last name is the only
    one of its kind, or where the section chooses the class that gets it.
    """
    leaves = Counter(key.rpartition(".")[2] for key in known_keys())
    read: set[tuple[str, str]] = set()
    for path in SOURCES.rglob("*.py"):
        if path.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "attr", None) or getattr(node.value, "id", "")
                read.add((owner.lstrip("_"), node.attr))
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
    *("algorithm.kl", "algorithm.kl.model", "algorithm.correction"),
)
"""Sections of which every key, also a new one, follows one rule when a run is resumed."""


def test_every_key_says_whether_it_may_change_when_a_run_is_resumed() -> None:
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
def test_what_cannot_change_when_a_run_is_resumed_is_refused_by_name(
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

"""The check before training: log-probs are the model's own, whatever its architecture is."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.loading import in_processes
from tests.training.architectures import (
    ARCHITECTURES,
    EXACT,
    LAYOUTS,
    PAGE,
    check_of,
    logprobs_of,
    row_of,
    tiny,
)
from tests.training.test_rank import train
from turnwise.config import Config, TrainingConfig, parse_config
from turnwise.errors import InputError
from turnwise.training import Sample
from turnwise.training.attention import is_packed
from turnwise.training.layout_check import agreed_layouts, possible_layouts
from turnwise.training.rank import TrainerRank
from turnwise.weights.process_group import LOOPBACK, open_store

FEW = {
    "cohere": "shared",  # scales logits
    "gemma3": "shared",  # a text model inside of another
    "gpt_oss": "padded",  # its masks ignore positions
    "granite": "shared",
    "llama": "shared",
    "llama4_text": "padded",  # chunks, which the trainer's attention does not know
    "qwen3_5_text": "padded",  # convolutions and states
}
LEAKY = "qwen3_5_text"


@pytest.fixture(scope="module")
def leaky(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(LEAKY, tmp_path_factory.mktemp("leaky"))


def saved(name: str, folder: Path) -> str:
    tiny(name).save_pretrained(folder)
    return str(folder)


def documented() -> dict[str, list[str]]:
    """The rows of the documentation's table, by architecture."""
    lines = PAGE.read_text().partition("|---")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def assert_right(name: str) -> None:
    """The layout of a run gives Transformers' log-probs, and the documentation says which it is."""
    row, worst = row_of(name)
    assert row.own.nats < EXACT
    assert worst < EXACT
    for layout in LAYOUTS:
        found = row.layouts[layout]
        assert found.small is (found.nats < EXACT), f"{layout}: {found}"
    assert row.layouts["padded"].small
    said = [cell.strip() for cell in str(row).strip("|").split("|")]
    close = {"exact", "not computed"}
    ours, theirs = (
        [c if c in close else "wrong" for c in cells[3:]]
        for cells in (said[1:], documented()[name])
    )
    assert (said[1:4], ours) == (documented()[name][:3], theirs)


def possible(config: Config) -> tuple[str, ...]:
    replays = config.engine.routing_replay
    return possible_layouts(config.training, replays_routing=replays)


@pytest.mark.parametrize("name", FEW)
def test_the_layout_of_a_run_gives_the_models_own_log_probs(name: str) -> None:
    assert_right(name)
    assert documented()[name][0] == FEW[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FEW])
def test_so_it_does_for_every_architecture(name: str) -> None:
    assert_right(name)


def test_the_documentation_has_each_architecture() -> None:
    assert [*documented()] == [*ARCHITECTURES]
    assert len(ARCHITECTURES) > 45


@pytest.mark.parametrize(("name", "agreed"), [(LEAKY, LAYOUTS[:1]), ("qwen3_moe", LAYOUTS)])
def test_in_bfloat16_the_check_decides_as_in_float32(name: str, agreed: Any) -> None:
    check = check_of(tiny(name), torch.bfloat16)
    assert agreed_layouts([check], TrainingConfig(), LAYOUTS)[0] == agreed


def test_layouts_that_differ_are_named_once_with_the_difference() -> None:
    agreed, left = agreed_layouts([check_of(tiny(LEAKY))], TrainingConfig(), LAYOUTS)
    assert agreed == ("padded",)
    assert len(left) == 2
    assert left[0].startswith(f"packed ones would change the log-probs of a {LEAKY} model (1.")
    assert left[1].startswith("shared ones would change the log-probs")
    assert agreed_layouts([check_of(tiny("llama"))], TrainingConfig(), LAYOUTS) == (LAYOUTS, [])


def test_auto_leaves_out_what_the_configuration_does_not_allow(
    make_config: Callable[..., Config],
) -> None:
    assert possible(make_config()) == LAYOUTS
    assert possible(make_config(training={"packing": "packed"})) == ("packed",)
    for changes in (
        {"training": {"context_parallel": 2, "ranks": 2}},
        {"training": {"attention": "flex_attention"}},
        {"engine": {"routing_replay": True}, "training": {"max_staleness": 1}},
    ):
        assert possible(make_config(**changes)) == ("padded", "packed")


@pytest.mark.parametrize("packing", ["packed", "shared"])
def test_a_layout_that_is_asked_for_and_differs_is_refused(
    make_config: Callable[..., Config], leaky: str, packing: str
) -> None:
    config = make_config(model={"path": leaky}, training={"packing": packing})
    message = (
        rf"training\.packing: {packing} changes the log-probs of a {LEAKY} model \(\d.* nats\)"
    )
    with pytest.raises(InputError, match=message):
        TrainerRank(config)


def test_a_run_trains_on_the_log_probs_that_an_engine_records(
    make_config: Callable[..., Config], leaky: str
) -> None:
    policy = TrainerRank(make_config(model={"path": leaky}, training={"threads": 1}))
    plain = AutoModelForCausalLM.from_pretrained(leaky).eval()
    generator = np.random.default_rng(0)
    samples = []
    for number in range(4):
        ids = generator.integers(4, 64, 12 + number).tolist()
        logprobs = [0.0, *logprobs_of(plain, torch.tensor(ids)).tolist()]
        mask, versions = [0] + [1] * (len(ids) - 1), [-1] + [0] * (len(ids) - 1)
        samples.append(Sample.of(ids, mask, logprobs, versions, 1.0 - number % 2 * 2, number))
    assert train(policy, samples)["logprob_diff_max"] < 1e-4


def test_a_nested_text_model_trains_publishes_and_saves(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    path = saved("gemma3", tmp_path / "gemma3")
    policy = TrainerRank(
        make_config(model={"path": path}, training={"threads": 1, "packing": "shared"}),
        folder=tmp_path,
    )
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    published = policy.publish()
    expected = logprobs_of(plain, torch.tensor(published.prompt.tolist()))
    assert published.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    policy.save(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    for name, parameter in plain.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


class Louder(LlamaForCausalLM):  # type: ignore[misc]
    """A model that changes what its backbone gets, which the trainer does not see."""

    def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
        return super().forward(inputs_embeds=2 * self.get_input_embeddings()(input_ids), **more)


class Broken(LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
        raise TypeError("a mask is None")


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Louder, r"0\.\d+ nats|\d.* nats"), (Broken, "cannot be computed: TypeError: a mask is None")],
)
def test_a_model_whose_logits_are_not_the_trainers_is_refused(kind: Any, why: str) -> None:
    torch.manual_seed(0)
    keys = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = kind(LlamaConfig(**keys, intermediate_size=48, initializer_range=0.3)).eval()
    message = rf"a llama model cannot be trained: .* the model's own logits \(({why})"
    with pytest.raises(InputError, match=message):
        agreed_layouts([check_of(model)], TrainingConfig(), ["padded"])


def test_the_value_models_layout_is_checked_and_its_head_kept(
    make_config: Callable[..., Config], tokenizer: Any, tmp_path: Path
) -> None:
    shape = copy.deepcopy(tiny("lfm2").config)
    shape.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    algorithm = {"advantage": {"name": "gae", "model": {"path": str(tmp_path)}}}
    with pytest.raises(InputError, match=r"packed changes the log-probs of a lfm2 model"):
        TrainerRank(make_config(algorithm=algorithm, training={"packing": "packed"}))
    policy = TrainerRank(make_config(algorithm=algorithm))
    value: Any = policy._models.value
    assert not value.head.weight.any()


def test_the_check_leaves_no_trace() -> None:
    model = tiny("llama")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check = check_of(model)
    assert check.own.small
    assert check.compare_and_choose_attention("shared").small
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert is_packed(model)
    assert "forward" not in model.model.__dict__


def be_rank(number: int, trees: list[tuple[str, dict[str, Any]]], reply: Any) -> None:
    torch.set_num_threads(1)
    for address, tree in trees:
        try:
            made = TrainerRank(parse_config(tree), rank=number, ranks=2, address=address)
            reply.send((made.layouts.allowed, made.layouts_note))
        except InputError as error:
            reply.send(("refused", str(error)))
        dist.destroy_process_group()


@pytest.mark.slow
def test_several_ranks_agree(
    make_config: Callable[..., Config], leaky: str, tmp_path: Path
) -> None:
    whole, silent = saved("qwen3_moe", tmp_path / "moe"), saved("nemotron", tmp_path / "silent")
    divided = saved("llama", tmp_path / "llama")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        (leaky, "float32", {}),
        (leaky, "bfloat16", {}),
        (whole, "float32", {}),
        (whole, "bfloat16", {}),
        (silent, "float32", {}),
        (divided, "float32", {"context_parallel": 2}),
        (leaky, "float32", {"context_parallel": 2}),
    ]
    trees, stores = [], []
    for path, dtype, more in cases:
        stores.append(open_store(LOOPBACK, 0))
        config = make_config(
            model={"path": path, "dtype": dtype, "max_length": 512},
            training={"ranks": 2, "step_timeout": 120.0, "threads": 1, **more},
        )
        address = f"{LOOPBACK}:{stores[-1].port}"
        trees.append((address, config.model_dump(mode="json")))
    found, others = in_processes([(be_rank, number, trees) for number in range(2)])
    assert found == others
    change = f"change the log-probs of a {LEAKY} model (1."
    for agreed, said in found[:2]:
        assert (agreed, change in said) == (("padded",), True)
    assert [agreed for agreed, _ in found[2:4]] == [LAYOUTS] * 2
    assert found[4][0] == ("padded",)
    assert found[4][1].endswith("its layers do not pass to attention where sequences begin)")
    assert found[5][0] == ("padded", "packed")
    assert found[6][0] == "refused"
    assert found[6][1].startswith(
        "training.context_parallel: ranks that share sequences change the log-probs of a "
    )

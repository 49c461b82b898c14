"""The names and bodies of ChatLearn's page about vLLM, on a simulated engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.pipeline.bench import CONTEXT, NEW, Join, collated
from tests.pipeline.page import PagePolicy
from turnwise.compat.chatlearn import (
    Pipeline,
    PromptPipeline,
    VLLMModule,
    VLLMPromptPipeline,
    get_model,
    print_rank_0,
)
from turnwise.compat.chatlearn.outputs import RequestOutput
from turnwise.errors import InputError

TEXTS = ["Seven plus eight", "What is a group?"]


def test_the_pages_forward_step_samples_a_batch_in_one_step(join: Join, tokenizer: Any) -> None:
    """Whether the program gives items of the dataset, the dataset, or a loader's batch."""
    policy = join(PagePolicy("policy"))
    dataset = policy.build_dataset(TEXTS)
    for data in (dataset[:2], dataset, dataset.collate_fn(dataset[:2]), collated(dataset)):
        outputs = policy.forward_step(data, 3)
        assert outputs["str_prompts"] == [TEXTS[0]] * 2 + [TEXTS[1]] * 2
        assert len(outputs["groups"]) == 2
        for prompt, row in zip(outputs["str_prompts"], outputs["all_tokens"], strict=True):
            ids = tokenizer.encode(prompt)
            assert row == ids + policy.generator.expected(ids, NEW)
    assert policy.batches == [2] * 4


def test_the_eval_forward_of_the_page_samples_as_in_evaluation(join: Join) -> None:
    policy = join(PagePolicy("policy"))
    outputs = policy.eval_forward(policy.build_dataset(TEXTS))
    assert len(outputs["all_tokens"]) == 2
    longest = [len(policy.tokenizer.encode(text)) + 5 for text in TEXTS]
    assert [len(row) <= most for row, most in zip(outputs["all_tokens"], longest, strict=True)]


def test_execute_step_takes_the_whole_batch_too_and_nothing_else(join: Join) -> None:
    """As ChatLearn's second version calls it; the default's prompts have ids and texts, too."""

    class Second(VLLMModule):
        def forward_step(self, data: Any, iteration: int = 0) -> Any:
            self.step = self.execute_step(data)
            return self.step

        def _add_request(self, data: Any, is_eval: bool = False) -> Any:
            return self._add_request_internal(data["prompt"], data["input_ids"], is_eval)

    policy = join(Second("policy"))
    outputs = policy.forward_step(policy.build_dataset(TEXTS))
    assert all(isinstance(output, RequestOutput) for output in policy.step)
    assert outputs["str_prompts"] == [TEXTS[0]] * 2 + [TEXTS[1]] * 2
    with pytest.raises(InputError, match="execute_step takes what forward_step or eval_forward go"):
        policy.execute_step([{"input_ids": [1]}], {}, {}, {})


def test_a_chatlearn_dataset_has_prompts_ids_and_the_tokenizer(tokenizer: Any) -> None:
    """Cut at the end; the other fields of rows are kept."""
    dataset = VLLMPromptPipeline(TEXTS, 3, tokenizer)
    ids = [tokenizer.encode(text)[:3] for text in TEXTS]
    assert dataset.prompts == list(zip(TEXTS, ids, strict=True))
    expected = [{"input_ids": i, "prompt": t} for t, i in dataset.prompts]
    assert dataset.prompts_ids == list(dataset) == expected
    assert (dataset.tokenizer, len(dataset), dataset[1]) == (tokenizer, 2, expected[1])
    assert dataset.collate_fn(dataset[:2]) == {"input_ids": ids, "prompt": TEXTS}
    rows = [{"question": TEXTS[0], "answer": 15}]
    (item,) = VLLMPromptPipeline(rows, 99, tokenizer, "question")
    assert item == {**rows[0], "prompt": TEXTS[0], "input_ids": tokenizer.encode(TEXTS[0])}
    assert VLLMPromptPipeline([(TEXTS[0], "more", 1)], 99, tokenizer)[0]["prompt"] == TEXTS[0]


def test_a_dataset_of_ones_own_may_be_written_as_on_the_page(join: Join) -> None:
    class Own(PromptPipeline):
        def __init__(self, prompts: list[str], most: int, tokenizer: Any = None) -> None:
            self.prompts = [(prompt, tokenizer.encode(prompt[:most])) for prompt in prompts]
            self.prompts_ids = []
            for prompt, ids in self.prompts:
                self.prompts_ids.extend([{"input_ids": ids, "prompt": prompt}])
            self.tokenizer = tokenizer

    policy = join(VLLMModule("policy"))
    outputs = policy.forward_step(Own(TEXTS, 9, policy.tokenizer.tokenizer))
    assert outputs["str_prompts"] == [TEXTS[0]] * 2 + [TEXTS[1]] * 2


@pytest.mark.parametrize(
    ("prompts", "longest", "message"),
    [
        (["a", ""], 3, "prompt 2 is empty, or no text: ''"),
        ([{"question": "a"}], 3, "prompt 1 is empty, or no text: {'question': 'a'}"),
        (["a"], 0, "max_prompt_length must be 1 or more, not 0"),
    ],
)
def test_a_dataset_names_the_prompt_that_it_cannot_use(
    tokenizer: Any, prompts: Any, longest: int, message: str
) -> None:
    with pytest.raises(InputError) as error:
        VLLMPromptPipeline(prompts, longest, tokenizer)
    assert str(error.value) == message


def test_setup_calls_model_provider_with_the_models_arguments(
    join: Join, pipeline_file: Path, model_path: str, tmp_path: Path
) -> None:
    """Once, before anything starts; setup gets the same object."""

    class Built(VLLMModule):
        calls: list[dict[str, Any]]

        def model_provider(self) -> Any:
            self.calls = [*getattr(self, "calls", []), dict(self.model_args)]
            assert self.tokenizer.tokenizer.encode("one")
            return AutoConfig.from_pretrained(self.model_args.get("load"))

        def setup(self) -> None:
            self.model = get_model(self.model_provider, self.model_args)

    (tmp_path / "policy.yaml").write_text("seq_length: 256\nmax_new_tokens: 32\nprompt_key: text")
    policy = Built("policy", tmp_path / "policy.yaml")
    config = Pipeline(pipeline_file, policy).config
    assert config.model.path != model_path
    assert (Path(config.model.path) / "config.json").exists()
    (seen,) = policy.calls
    names = ("seq_length", "max_new_tokens", "prompt_key", "load", "tokenizer")
    assert [seen[name] for name in names] == [256, 32, "text", model_path, model_path]
    join(policy)
    assert policy.model.vocab_size == AutoConfig.from_pretrained(model_path).vocab_size
    assert len(policy.calls) == 1


def test_the_model_provider_can_name_the_model_alone(tmp_path: Path, model_path: str) -> None:
    class Named(VLLMModule):
        def model_provider(self) -> Any:
            assert self.model_args["load"] is None
            return model_path

    (tmp_path / "pipeline.yaml").write_text("sampling: {n: 2}")
    assert Pipeline(tmp_path / "pipeline.yaml", Named("policy")).config.model.path == model_path
    with pytest.raises(InputError, match=r"model\.path must be set"):
        Pipeline(tmp_path / "pipeline.yaml", VLLMModule("policy"))


def test_get_model_gives_the_providers_model_or_the_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = torch.nn.Linear(2, 2)
    assert get_model(lambda: model, {}, wrap_with_ddp=False) is model
    assert not model.training
    assert get_model(lambda: None, {"load": "some/model"}) == "some/model"
    print_rank_0("building the model")
    assert capsys.readouterr().out == "building the model\n"


def test_a_base_model_answers_texts_and_ids(join: Join, bare: Any) -> None:
    """The page's model has no chat template: its prompts are plain texts with their BOS."""
    policy = join(VLLMModule("policy"), bare)
    ids = bare(TEXTS[0])["input_ids"]
    assert ids[0] == bare.bos_token_id
    outputs = policy.forward_step(policy.build_dataset([TEXTS[0], {"input_ids": [5, 6, 7]}]))
    assert outputs["no_padded_query_ids"] == [ids] * 2 + [[5, 6, 7]] * 2
    page = join(PagePolicy("policy"), bare)
    outputs = page.forward_step(page.build_dataset(TEXTS))
    assert [row[: len(ids)] for row in outputs["all_tokens"][:2]] == [ids] * 2
    (cut,) = policy.build_dataset(["word " * 200])
    assert len(cut.row["input_ids"]) <= CONTEXT - NEW


def test_chatlearns_files_and_the_modules_share_their_flat_keys(
    tmp_path: Path, model_path: str
) -> None:
    """Those of a policy's file that the pipeline's file names, too."""
    (tmp_path / "policy.yaml").write_text(
        f"load: {model_path}\nprompt_key: text\nmax_paddings: 512\nnum_layers: 999"
    )
    (tmp_path / "rlhf.yaml").write_text(
        "models: {policy: {model_config_file: policy.yaml}}\ndata: {path: rows.jsonl}"
    )
    policy = VLLMModule("policy")
    with pytest.raises(InputError, match="num_layers is 999, and the model in"):
        Pipeline(tmp_path / "rlhf.yaml", policy)
    text = (tmp_path / "policy.yaml").read_text().replace("num_layers: 999", "")
    (tmp_path / "policy.yaml").write_text(text)
    pipeline = Pipeline(tmp_path / "rlhf.yaml", policy)
    assert policy.model_args["prompt_key"] == "text"
    (note,) = pipeline.notes
    assert note.startswith("max_paddings: no effect; vLLM packs batches without padding")

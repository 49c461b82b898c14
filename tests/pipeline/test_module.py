"""A module's hooks on a simulated engine, as a port from ChatLearn uses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.pipeline.bench import CONTEXT, NEW, Join, collated
from turnwise.compat.chatlearn import Pipeline, VLLMModule
from turnwise.compat.chatlearn.outputs import RequestOutput, request_outputs
from turnwise.compat.nemo_rl import VllmAsyncGenerationWorker
from turnwise.engine import Request, generate
from turnwise.errors import InputError
from turnwise.rollouts import Group
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.samples import make_samples
from turnwise.trajectory import ChatTemplate, Trajectory


class Ported(VLLMModule):
    """A policy in the shape of ChatLearn's examples: it uses vLLM's objects and flat keys."""

    def build_dataset(self, train_prompts: Any, is_eval: bool = False) -> Any:
        room = self.model_args.get("seq_length") - self.model_args.get("max_new_tokens")
        times = 1 if is_eval else self.model_args["num_inference_per_prompt"]
        encode = self.tokenizer.tokenizer.encode
        return [
            {"input_ids": encode(prompt)[:room], "prompt": prompt}
            for prompt in train_prompts
            for _ in range(times)
        ]

    def _add_request(self, data: Any, is_eval: bool = False) -> Any:
        return self._add_request_internal(data["prompt"], data["input_ids"], is_eval=is_eval)

    def forward_step(self, data: Any, iteration: int = 0) -> Any:
        outputs = self.generate_vllm(data, False)
        if self.is_last_rank():
            return self.decode_internal(outputs)

    def decode_internal(self, batched_outputs: Any) -> dict[str, Any]:
        width, pad = self.model_args.get("seq_length"), self.tokenizer.tokenizer.eos_token_id
        kept: dict[str, list[Any]] = {
            name: [] for name in ("prompts", "texts", "tokens", "logprobs", "sizes")
        }
        for request in sorted(batched_outputs, key=lambda request: int(request.request_id)):
            assert request.finished
            for answer in request.outputs:
                own = []
                for position, likely in enumerate(answer.logprobs):
                    entry = likely[answer.token_ids[position]]
                    own.append(entry if isinstance(entry, float) else entry.logprob)
                assert answer.cumulative_logprob == pytest.approx(sum(own))
                before = [0.0] * (len(request.prompt_token_ids) - 1)
                if request.prompt_logprobs is not None:
                    pairs = zip(request.prompt_logprobs, request.prompt_token_ids, strict=True)
                    before = [known[token] for known, token in pairs if known is not None]
                row = request.prompt_token_ids + list(answer.token_ids)
                kept["prompts"].append(request.prompt)
                kept["texts"].append(answer.text)
                kept["tokens"].append(row + [pad] * (width - len(row)))
                kept["logprobs"].append(before + own + [0.0] * (width - len(row)))
                kept["sizes"].append((len(request.prompt_token_ids), len(row)))
        mask = torch.zeros(len(kept["tokens"]), width)
        for line, (start, end) in zip(mask, kept["sizes"], strict=True):
            line[start:end] = 1
        return {
            "all_tokens": torch.tensor(kept["tokens"]),
            "logprobs": torch.tensor(kept["logprobs"]),
            "loss_mask": mask,
            "str_prompts": kept["prompts"],
            "str_outputs": kept["texts"],
        }


def test_a_ported_policy_works_with_its_body_unchanged(join: Join, tokenizer: Any) -> None:
    """Dataset, request, forward step and decoding. The step is `generate_vllm(data, is_eval)`."""
    policy = join(Ported("policy"))
    prompts = ["Seven plus eight", "What is a group?"]
    items = policy.build_dataset(prompts)
    outputs = policy.forward_step(collated(items))
    assert outputs["str_prompts"] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert outputs["all_tokens"].shape == (4, CONTEXT) == outputs["loss_mask"].shape
    assert outputs["logprobs"].shape == (4, CONTEXT - 1), "from the second token on"
    for row, mask, logprobs, text, prompt in zip(
        *(outputs[key] for key in ("all_tokens", "loss_mask", "logprobs", "str_outputs")),
        outputs["str_prompts"],
        strict=True,
    ):
        ids = tokenizer.encode(prompt)
        answer = policy.generator.expected(ids, NEW)
        assert row[: len(ids) + len(answer)].tolist() == ids + answer
        assert mask.nonzero().flatten().tolist() == [*range(len(ids), len(ids) + len(answer))]
        assert (logprobs[len(ids) - 1 : len(ids) + len(answer) - 1] < 0).all()
        assert logprobs[len(ids) + len(answer) - 1 :].sum() == 0
        assert text.startswith(tokenizer.decode(answer[:-1]))


def test_outputs_of_a_ported_decoding_are_trained_token_by_token(join: Join) -> None:
    """The groups stay with what a forward_step of one's own returns, too."""
    policy = join(Ported("policy"))
    items = [{"input_ids": torch.tensor([5, 6, 7, 8]), "prompt": "own text"}]
    outputs = policy.forward_step(collated(items))
    trajectories = [t for group in outputs["groups"] for t in group.trajectories]
    trajectories[0].set_outcome(reward=1.0)  # a group of equal rewards has no signal
    made = make_samples(outputs["groups"], policy.config, 0)
    assert made.report.tokens_trained > 0
    assert (made.report.tokens_exact, made.report.violations) == (made.report.tokens_trained, 0)
    for index, trajectory in enumerate(trajectories):
        (branch,) = trajectory.branches()
        length = len(branch.token_ids)
        assert branch.token_ids == outputs["all_tokens"][index, :length].tolist()
        assert branch.token_ids[:4] == [5, 6, 7, 8]
        assert branch.response_mask == outputs["loss_mask"][index, :length].int().tolist()


def test_token_ids_reach_the_engine_as_they_are_in_every_shape(join: Join) -> None:
    """Through build_dataset, as mappings, as one batch, and by _add_request_internal."""
    policy = join(VLLMModule("policy"))
    ids = [[3, 1, 4, 1, 5], [9, 2, 6]]
    items = [{"input_ids": i, "prompt": f"prompt {i}", "answer": "x"} for i in ids]
    built = policy.build_dataset(items)
    assert [item.row["answer"] for item in built] == ["x", "x"]
    direct = policy._add_request_internal([item["prompt"] for item in items], ids, False)
    for outputs in (
        policy.forward_step(built),
        policy.forward_step(items),
        policy.forward_step(collated(items)),
        policy.decode_internal(
            request_outputs(policy.wait(direct), policy.template)  # what generate_vllm does
        ),
    ):
        assert outputs["no_padded_query_ids"] == [ids[0]] * 2 + [ids[1]] * 2
        assert outputs["problem_ids"] == ["policy:1"] * 2 + ["policy:2"] * 2
        assert outputs["str_prompts"] == [f"prompt {ids[0]}"] * 2 + [f"prompt {ids[1]}"] * 2
        for row, mask, length in zip(
            *(outputs[key] for key in ("all_tokens", "loss_mask", "prompt_token_length")),
            strict=True,
        ):
            assert row[length:] == policy.generator.expected(row[:length], NEW)
            assert mask == [0] * length + [1] * (len(row) - length)
    held_out = policy.eval_forward(items)
    assert len(held_out["all_tokens"]) == 2
    assert max(held_out["response_token_length"]) <= 5


def test_the_names_of_a_prompts_fields_come_from_the_models_file(
    join: Join, tmp_path: Path, tokenizer: Any
) -> None:
    """Vllm_input_ids_key, vllm_prompt_key and prompt_key."""
    (tmp_path / "own.yaml").write_text(
        "vllm_input_ids_key: ids\nvllm_prompt_key: text\nprompt_key: question"
    )
    policy = join(VLLMModule("policy", tmp_path / "own.yaml"))
    data = policy.build_dataset([{"ids": [4, 5], "text": "said"}, {"question": "Why?", "more": 1}])
    outputs = policy.forward_step(data)
    assert outputs["no_padded_query_ids"][0] == [4, 5]
    assert outputs["str_prompts"][0] == "said"
    assert "Why?" in outputs["str_prompts"][2]
    assert data[1].row["more"] == 1
    outputs = policy.forward_step({"ids": [[4, 5]], "text": ["said"]})
    assert outputs["no_padded_query_ids"][0] == [4, 5]


def test_too_long_prompts_are_cut_to_leave_room_for_new_tokens(
    join: Join, template: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    """To `seq_length - max_new_tokens`."""
    policy = join(VLLMModule("policy"))
    assert policy.longest_prompt() == CONTEXT - NEW
    assert policy.longest_prompt(is_eval=True) == CONTEXT - 5
    ids, text = [7] * 200, "word " * 100
    cut, short, long = policy.build_dataset([{"input_ids": ids}, "word", text])
    assert cut.row["input_ids"] == ids[: CONTEXT - NEW]
    assert "2 of 3 prompts of policy are cut to 84 tokens" in caplog.text
    (message,) = long.row["messages"]
    assert text.startswith(message["content"])
    assert len(message["content"]) > 100
    rendered = template.render(long.row["messages"])
    assert long.row["input_ids"] == rendered
    assert CONTEXT - NEW - 3 <= len(rendered) <= CONTEXT - NEW
    outputs = policy.forward_step([cut, short, long])
    assert max(map(len, outputs["all_tokens"])) <= CONTEXT
    assert policy.forward_step([{"input_ids": ids}])["prompt_token_length"] == [CONTEXT - NEW] * 2


def test_longest_prompts_may_be_configured(join: Join) -> None:
    """Texts and ids are cut there, messages and rows left out."""
    policy = join(VLLMModule("policy"), data={"path": "none", "max_prompt_tokens": 40})
    long = [{"role": "user", "content": "word " * 60}]
    cut = policy.build_dataset(["word " * 60, long, {"input_ids": [7] * 60}])
    assert [item.id for item in cut] == ["policy:1", "policy:3"]
    assert [len(item.row["input_ids"]) <= 40 for item in cut] == [True, True]
    assert len(cut[1].row["input_ids"]) == 40
    whole = join(VLLMModule("policy"), sampling={"max_tokens": CONTEXT})
    assert whole.longest_prompt() == CONTEXT - 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "policy:2: the prompt is empty"),
        (" \n", "policy:2: the prompt is empty"),
        ([], "policy:2: the prompt is empty"),
        ({}, "policy:2: the prompt is empty"),
        ({"input_ids": []}, "policy:2: the prompt is empty"),
        ({"input_ids": torch.tensor([], dtype=torch.long)}, "policy:2: the prompt is empty"),
        ({"input_ids": "text"}, "policy:2: token ids must be whole numbers, not 'text'"),
        ({"input_ids": [1, -1]}, "policy:2: token ids must be whole numbers"),
        ({"input_ids": [1.5]}, "policy:2: token ids must be whole numbers"),
        (
            3,
            "policy:2: a prompt must be a text, a list of messages, token ids under input_ids, or",
        ),
        ([{"role": "user", "content": "word " * 99}], "does not fit the context of 96"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named_in_one_sentence(
    join: Join, prompt: Any, message: str
) -> None:
    policy = join(VLLMModule("policy"))
    with pytest.raises(InputError) as error:
        policy.build_dataset(["first", prompt])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_outputs_must_be_a_dictionary(join: Join) -> None:
    class Wrong(VLLMModule):
        def decode_internal(self, batched_outputs: Any) -> Any:
            return list(batched_outputs)

    with pytest.raises(InputError, match="wrong: decode_internal must return a dictionary"):
        join(Wrong("wrong")).forward_step([{"input_ids": [1]}])


def test_requests_need_a_text_for_each_prompt(join: Join) -> None:
    policy = join(VLLMModule("policy"))
    with pytest.raises(InputError, match="got 1 texts for the token ids of 2 prompts"):
        policy._add_request_internal(["one"], [[1], [2]])


def trajectory_of(*turns: tuple[list[int], list[int]]) -> Trajectory:
    """Make a trajectory with these prompts' added ids and completions."""
    trajectory, path = Trajectory("p"), list[int]()
    for added, sampled in turns:
        path += added
        logprobs = [-0.5 - 0.25 * i for i, _ in enumerate(sampled)]
        before = [None, *[-1.0] * (len(path) - 1)]
        trajectory.add_turn(path, sampled, logprobs, [3] * len(sampled), "stop", before)
        path += sampled
    trajectory.status = "completed"
    return trajectory


def output_of(template: ChatTemplate, *trajectories: Trajectory, stop: str = "") -> RequestOutput:
    (output,) = request_outputs([Group("p", list(trajectories))], template, [stop] if stop else [])
    return output


def test_a_trajectory_with_tools_is_one_output_with_a_loss_mask(
    template: ChatTemplate,
) -> None:
    """The answers of tools are in token_ids, with a mask beside them."""
    first, answer, second = template.encode("I add."), template.encode(" tool: 3 "), [9, 8]
    output = output_of(template, trajectory_of(([4, 5, 6], first), (answer, second)))
    (done,) = output.outputs
    assert output.prompt_token_ids == [4, 5, 6]
    assert output.prompt == template.decode_all([4, 5, 6])
    assert done.token_ids == first + answer + second
    assert done.loss_mask == [1] * len(first) + [0] * len(answer) + [1, 1]
    assert done.text == template.decode_all(done.token_ids)
    unsampled = [next(iter(known.values())) for known in done.logprobs[len(first) : -2]]
    assert unsampled == [0.0] * len(answer)
    sampled = [-0.5 - 0.25 * i for i, _ in enumerate(first)] + [-0.5, -0.75]
    assert done.cumulative_logprob == pytest.approx(sum(sampled))
    assert (done.index, done.finish_reason) == (0, "stop")


def test_logprobs_are_read_as_numbers_and_as_vllms_objects(template: ChatTemplate) -> None:
    output = output_of(template, trajectory_of(([4, 5, 6], [7, 8])))
    entry = output.outputs[0].logprobs[1][8]
    assert (entry, entry.logprob, entry.rank) == (-0.75, -0.75, None)
    assert entry.decoded_token == template.decode_all([8])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1:] == [{5: -1.0}, {6: -1.0}]
    known = output.prompt_logprobs[1]
    assert known is not None
    assert torch.tensor([known[5], entry]).tolist() == [-1.0, -0.75]


@pytest.mark.parametrize("status", ["completed", "length"])
def test_texts_end_where_vllms_end(template: ChatTemplate, status: Any) -> None:
    """Before the token or the string at which a completed one stopped."""
    eos, said = template.tokenizer.eos_token_id, template.encode("so 12 END")
    at_token = trajectory_of(([4], [*said, eos]))
    at_string = trajectory_of(([4], said))
    at_token.status = at_string.status = status
    (first,) = output_of(template, at_token).outputs
    (second,) = output_of(template, at_string, stop="END").outputs
    if status == "completed":
        assert (first.text, second.text) == ("so 12 END", "so 12 ")
        assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    else:
        assert first.text == "so 12 END" + template.decode_all([eos])
        assert (second.text, second.finish_reason) == ("so 12 END", "length")


def test_outputs_keep_the_order_of_trajectories_and_of_groups(template: ChatTemplate) -> None:
    """Failed trajectories are missing, and environments may open differently."""
    same = [trajectory_of(([4, 5], [6])) for _ in range(2)]
    other = trajectory_of(([4, 7], [6]))
    groups = [Group("none"), Group("two", [*same, other])]
    outputs = request_outputs(groups, template)
    assert [len(output.outputs) for output in outputs] == [0, 2, 1]
    assert [output.request_id for output in outputs] == ["0", "1", "1"]
    assert [o.trajectory for output in outputs for o in output.outputs] == [*same, other]
    assert outputs[0].prompt_token_ids == []
    assert outputs[0].prompt_logprobs is None


def test_model_provider_says_which_model_it_is(
    pipeline_file: Path, model_path: str, tmp_path: Path
) -> None:
    """A folder, a model of transformers, or its configuration; before anything starts."""

    class Named(VLLMModule):
        def model_provider(self) -> Any:
            return "some/model"

    class WithWeights(VLLMModule):
        def model_provider(self) -> Any:
            model = AutoModelForCausalLM.from_pretrained(model_path)
            torch.nn.init.constant_(model.get_output_embeddings().weight, 0.25)
            return model

    class Random(VLLMModule):
        def model_provider(self) -> Any:
            return AutoConfig.from_pretrained(model_path)

    class Wrong(VLLMModule):
        def model_provider(self) -> Any:
            return 3

    class Unnamed(VLLMModule):
        def model_provider(self) -> Any:
            return AutoConfig.for_model("gpt2")

    assert Pipeline(pipeline_file, VLLMModule("policy")).config.model.path == model_path
    assert Pipeline(pipeline_file, Named("policy")).config.model.path == "some/model"
    for module in (WithWeights("policy"), Random("policy")):
        model = Pipeline(pipeline_file, module).config.model
        loaded = AutoModelForCausalLM.from_pretrained(model.path)
        assert model.tokenizer == model_path
        if isinstance(module, WithWeights):
            assert (loaded.get_output_embeddings().weight == 0.25).all()
        assert len(AutoTokenizer.from_pretrained(model.tokenizer)) > 0
    with pytest.raises(InputError, match="override generator_provider to replace the sampler"):
        Pipeline(pipeline_file, Wrong("policy"))
    with pytest.raises(InputError, match="has no tokenizer; name one in the module's file"):
        Pipeline(pipeline_file, Unnamed("policy"))


def test_ported_code_finds_flat_names_of_the_configuration(join: Join, tmp_path: Path) -> None:
    """Model_args, with num_inference_per_prompt in n."""
    (tmp_path / "own.yaml").write_text("n: 1\nnum_inference_per_prompt: 4\nprompt_key: text")
    args = join(VLLMModule("policy", tmp_path / "own.yaml")).model_args
    assert (args["seq_length"], args["max_new_tokens"], args["n"]) == (CONTEXT, NEW, 2)
    assert (args["num_inference_per_prompt"], args["prompt_key"]) == (1, "text")
    assert (args["eval_temperature"], args["temperature"]) == (0.0, 1.0)
    assert args["prompt_logprobs"] is None


async def test_an_engine_runs_what_a_flat_model_file_asks_for(
    ray_started: None,
    pipeline_file: Path,
    model_path: str,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts longer than a batch, and a model's folder without a tokenizer in it."""
    words, weights = tmp_path / "words", tmp_path / "weights"
    tokenizer.save_pretrained(words)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.save_pretrained(weights)
    model_file = tmp_path / "policy.yaml"
    model_file.write_text(
        f"load: {weights}\ntokenizer: {words}\nseq_length: 512\nmax_num_batched_tokens: 64\n"
        "generation_batch_size: 32\nblock_size: 32\ngpu_memory_utilization: 0.5\n"
        "enforce_eager: False\nprompt_logprobs: 1\nmax_new_tokens: 8\nn: 1\nswap_space: 0\n"
        "sliding_window: None\ntop_k: -1\ntop_p: 0"
    )
    config = Pipeline(pipeline_file, VLLMModule("policy", model_file)).config
    assert config.engine.vllm_args == {"block_size": 32, "gpu_memory_utilization": 0.5}
    prompt = [5 + number % 300 for number in range(300)]
    engine = await WorkerHandle.start(config, host=VllmAsyncGenerationWorker)
    server = OpenAIServer(config, engine, port=0)
    try:
        await server.start()
        async with AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            said = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "one"}], max_tokens=4
            )
        completion = await generate(engine, Request(prompt, config.sampling, "long"))
        rows = engine.actor.generate_text_async.remote({"prompts": ["one and two"]})
        text = [await row async for row in rows]
    finally:
        await server.stop()
        await engine.shutdown()
    assert said.usage is not None
    assert said.usage.prompt_tokens == len(
        ChatTemplate(tokenizer).render([{"role": "user", "content": "one"}])
    )
    ids = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        likely = model(ids).logits.log_softmax(-1)[0, :-1]
    expected = likely.gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[1:] == pytest.approx(expected[: len(prompt) - 1], abs=1e-4)
    assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
    ((_, row),) = text
    assert 0 < len(row["token_ids"][0]) <= 8

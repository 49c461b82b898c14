"""One pipeline from start to end, in a process of its own; the results go to a JSON file.

    python -m tests.pipeline.scenario CONFIG MODEL_FILE OUTPUT

`test_pipeline` runs it once (a pipeline starts Ray, which runs in the tests' own process already)
and checks the results.
"""

import json
import logging
import sys
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from turnwise.compat.chatlearn import Pipeline, VLLMModule
from turnwise.compat.chatlearn.outputs import RequestOutput
from turnwise.engine.protocol import Chunk, Generator, Request
from turnwise.errors import TurnwiseError
from turnwise.rollouts import Group, Problem

TEXTS = ["What is 3 + 4?", "What is 5 + 6?"]
LISTS = (
    "problem_ids",
    "str_prompts",
    "str_outputs",
    "all_tokens",
    "loss_mask",
    "logprobs",
    "weight_versions",
    "prompt_token_length",
    "response_token_length",
    "rewards",
    "truncated",
)


class Warnings(logging.Handler):
    """The warnings of a pipeline until `end`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: list[str] = []
        self._logger = logging.getLogger("turnwise.compat.chatlearn.pipeline")
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def end(self) -> list[str]:
        self._logger.removeHandler(self)
        return self._said


class OwnSetup(VLLMModule):
    """Overrides setup without the default's work."""

    def setup(self) -> None:
        self.seen = ["setup"]


class Recorder:
    """A generator that counts the calls of another."""

    def __init__(self, model: Generator) -> None:
        self._model = model
        self.calls = 0

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.calls += 1
        return self._model.stream(request)


class OwnModel(VLLMModule):
    def generator_provider(self) -> Any:
        self.seen = Recorder(super().generator_provider())
        return self.seen


class OwnDataset(VLLMModule):
    def build_dataset(self, prompts: Any, is_eval: bool = False) -> list[Problem]:
        return [Problem(f"own-{n}", {"question": "Add 2 and 2."}) for n, _ in enumerate(prompts)]


class OwnForward(VLLMModule):
    def forward_step(self, data: Any, iteration: int = 0) -> dict[str, Any]:
        outputs = self.generate_vllm(data[:1])
        return {**self.decode_internal(outputs), "iteration": iteration}


class OwnEval(VLLMModule):
    def eval_forward(self, data: Any, iteration: int = 0) -> dict[str, Any]:
        return {"count": len(super().eval_forward(data, iteration)["all_tokens"])}


class OwnRequests(VLLMModule):
    def _add_request(self, data: Sequence[Problem], is_eval: bool = False) -> "list[Future[Group]]":
        sampling = self.config.sampling.model_copy(update={"n": 3, "max_tokens": 5})
        return [self.begin(item, sampling) for item in data]


class OwnDecoding(VLLMModule):
    def decode_internal(self, batched_outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {"said": [done.text for output in batched_outputs for done in output.outputs]}


class Ported(VLLMModule):
    """Reads only vLLM's objects."""

    def _add_request(self, data: Any, is_eval: bool = False) -> "list[Future[Group]]":
        return self._add_request_internal(data["prompt"], data["input_ids"], is_eval=is_eval)

    def decode_internal(self, batched_outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        answers = [(request, done) for request in batched_outputs for done in request.outputs]
        return {
            "prompts": [[request.prompt, request.prompt_token_ids] for request, _ in answers],
            "token_ids": [done.token_ids for _, done in answers],
            "logprobs": [
                [known[token].logprob for known, token in zip(d.logprobs, d.token_ids, strict=True)]
                for _, d in answers
            ],
        }


def lists(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: outputs[name] for name in LISTS}


def refused(attempt: Any, *arguments: Any) -> str:
    """Return the error's message; "" where nothing was refused."""
    try:
        attempt(*arguments)
    except TurnwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(config: str, model_file: str, seen: dict[str, Any]) -> None:
    policy = VLLMModule("policy", model_file)
    with Pipeline(config, policy, overrides=["name=scenario"]) as pipeline:
        rows = pipeline.rows()
        data = policy.build_dataset(rows[:8])

        seen["eval_before"] = lists(policy.eval_forward(data))
        outputs = policy.forward_step(data)
        seen["eval_again"] = lists(policy.eval_forward(data))
        seen["version_after_eval"] = pipeline.weight_version
        seen["first"] = lists(outputs)
        seen["trained"] = pipeline.train(outputs)
        seen["second"] = lists(policy.forward_step(data))
        warned = Warnings()
        seen["again"] = pipeline.train(outputs)  # its tokens are stale by now
        seen["warned"] = warned.end()

        talks = policy.build_dataset([*TEXTS, [{"role": "user", "content": TEXTS[0]}]])
        answers = policy.forward_step(talks)
        seen["talks"] = lists(answers)
        answers["rewards"] = [float(len(text)) for text in answers["str_outputs"]]
        seen["rewarded"] = pipeline.train(answers)

        seen["refusals"] = {
            "rewards": refused(pipeline.train, {**answers, "rewards": [1.0]}),
            "nan": refused(pipeline.train, {**answers, "rewards": [float("nan")] * 12}),
            "no groups": refused(pipeline.train, {"all_tokens": []}),
            "prompt": refused(policy.build_dataset, [3]),
            "row": refused(policy.build_dataset, [{"no": "question"}]),
            "item": refused(policy.forward_step, rows[:1]),
            "long": refused(policy.build_dataset, [[{"role": "user", "content": "word " * 2000}]]),
            "late": refused(
                pipeline.add, VLLMModule("late", Path(model_file).parent / "late.yaml")
            ),
            "save": refused(pipeline.save, Path(model_file).parent),
        }

        setup, model = OwnSetup("setup"), OwnModel("model")
        dataset, forward, own_eval = OwnDataset("dataset"), OwnForward("forward"), OwnEval("eval")
        requests, decoding = OwnRequests("requests"), OwnDecoding("decoding")
        for module in (setup, model, dataset, forward, own_eval, requests, decoding):
            pipeline.add(module)
        few = rows[:2]
        seen["setup"] = setup.seen, lists(setup.forward_step(setup.build_dataset(few)))
        before = model.seen.calls
        seen["model"] = lists(model.forward_step(model.build_dataset(few)))
        seen["model_calls"] = model.seen.calls - before
        seen["dataset"] = lists(dataset.forward_step(dataset.build_dataset(few)))
        given = forward.forward_step(forward.build_dataset(few), 7)
        seen["forward"] = given["iteration"], lists(given)
        seen["own_eval"] = own_eval.eval_forward(own_eval.build_dataset(few, is_eval=True))
        seen["requests"] = lists(requests.forward_step(requests.build_dataset(few)))
        decoded = decoding.forward_step(decoding.build_dataset(few))
        seen["decoding"] = decoded["said"]
        seen["trained_on_decoding"] = pipeline.train(decoded)

        port = Ported("port")
        pipeline.add(port)
        batch = {"input_ids": [[5, 6, 7, 8], [9, 10, 11]], "prompt": ["one", "two"]}
        ported = port.forward_step(batch)
        ported["rewards"] = [float(number % 2) for number, _ in enumerate(ported["token_ids"])]
        seen["ported"] = {name: ported[name] for name in ("prompts", "token_ids", "logprobs")}
        seen["trained_on_ported"] = pipeline.train(ported)

        seen["saved"] = str(pipeline.save(Path(model_file).parent / "saved"))
        numbered = policy.save_checkpoint(7)
        saved = lists(policy.eval_forward(data))
        later = pipeline.train(policy.forward_step(data))
        policy.load_checkpoint(7)
        again = lists(policy.eval_forward(data))
        seen["loaded"] = {
            "folder": str(numbered),
            "before": [saved, later["weight_version"]],
            "after": [again, pipeline.weight_version],
            "trained": pipeline.train(policy.forward_step(data)),
            "refused": refused(policy.load_checkpoint, 8),
        }
        seen["exactness"] = pipeline.exactness.to_dict()
    seen["ended"] = refused(policy.forward_step, data)


def main() -> None:
    config, model_file, output = sys.argv[1:]
    seen: dict[str, Any] = {}
    try:
        run(config, model_file, seen)
    finally:
        Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

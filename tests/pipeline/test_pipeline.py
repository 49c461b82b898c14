"""A pipeline on the real stack: the results of `scenario`."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT, command_environment, own_environment, python
from tests.pipeline.scenario import TEXTS
from tests.programs import Mark
from turnwise.config import Config, dump_config
from turnwise.training import checkpoint

GROUP, ITEMS = 4, 8  # the rewards of one of the groups differ
OWN_TEMPLATE = "{# of model.tokenizer #}"
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(
    make_config: Callable[..., Config],
    model_path: str,
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Seen:
    folder = tmp_path_factory.mktemp("scenario")
    own = copy.deepcopy(tokenizer)
    own.chat_template += OWN_TEMPLATE
    own.save_pretrained(folder / "tokenizer")
    config = make_config(
        model={"path": model_path, "tokenizer": str(folder / "tokenizer"), "max_length": 512},
        environment="tests.test_cli:Lottery",
        output_dir=str(folder / "runs"),
        engine={},
        eval={"sampling": {"n": 1, "temperature": 0, "max_tokens": 8}},
    )
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "policy.yaml").write_text(
        f"includes: [shared.yaml]\nsampling: {{n: {GROUP}, max_tokens: 16}}"
    )
    (folder / "shared.yaml").write_text("sampling: {n: 2}\nscheduler: {max_num_seqs: 32}")
    (folder / "late.yaml").write_text("scheduler: {max_num_seqs: 64}")
    mark = Mark()
    done = subprocess.run(
        [*python(), "-m", "tests.pipeline.scenario"]
        + [str(folder / name) for name in ("config.yaml", "policy.yaml", "seen.json")],
        cwd=ROOT,
        env=command_environment() | mark.environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    seen: Seen = json.loads((folder / "seen.json").read_text())
    return {**seen, "left": mark.left()}


def versions(outputs: Seen) -> set[int]:
    return {version for each in outputs["weight_versions"] for version in each}


def test_outputs_hold_each_token_with_its_mask_and_logprob(seen: Seen) -> None:
    outputs = seen["first"]
    assert {len(values) for values in outputs.values()} == {GROUP * ITEMS}
    for index, token_ids in enumerate(outputs["all_tokens"]):
        mask, logprobs = outputs["loss_mask"][index], outputs["logprobs"][index]
        prompt = outputs["prompt_token_length"][index]
        response = outputs["response_token_length"][index]
        assert prompt + response == len(token_ids) == len(mask) == len(logprobs)
        assert mask[: prompt + 1] == [0] * prompt + [1]
        assert all(
            (p < 0) if sampled else p == 0 for sampled, p in zip(mask, logprobs, strict=True)
        )
        last_turn = token_ids[len(mask) - mask[::-1].index(0) :]
        assert outputs["rewards"][index] == float(sum(last_turn) % 2 == 0)
    ids = outputs["problem_ids"]
    assert ids == [f"policy:{1 + index // GROUP}" for index in range(GROUP * ITEMS)]


def test_the_texts_are_those_of_the_tokens(seen: Seen, tokenizer: Any) -> None:
    outputs = seen["first"]
    for prompt, text, ids, length in zip(
        outputs["str_prompts"],
        outputs["str_outputs"],
        outputs["all_tokens"],
        outputs["prompt_token_length"],
        strict=True,
    ):
        assert tokenizer.encode(prompt, add_special_tokens=False) == ids[:length]
        assert text.strip() in tokenizer.decode(ids[length:])


def test_training_brings_its_weights_to_the_engines(seen: Seen) -> None:
    """By `Pipeline.train`."""
    assert versions(seen["first"]) == {-1, 0}
    trained = seen["trained"]
    assert trained["weight_version"] == 1
    assert trained["trajectories"] == GROUP * ITEMS
    assert trained["trained_tokens"] > 0
    assert trained["staleness_max"] == 0
    assert trained["logprob_diff_max"] < 1e-4
    assert trained["canary_diff_max"] < 1e-3
    assert versions(seen["second"]) == {-1, 1}


def test_outputs_that_are_too_old_train_nothing(seen: Seen) -> None:
    again = seen["again"]
    sampled = sum(map(sum, seen["first"]["loss_mask"]))
    assert 0 < again["stale_tokens"] <= sampled
    assert (again["trained_tokens"], again["weight_version"]) == (0, 1)
    assert again["weight_update_bytes"] == 0 < seen["trained"]["weight_update_bytes"]
    (said,) = seen["warned"]
    assert said.startswith(f"{again['stale_tokens']} of {sampled} sampled tokens are not trained")


def test_evaluation_is_greedy_and_trains_nothing(seen: Seen) -> None:
    """By `eval.sampling`, as by verl's `val_kwargs`."""
    assert len(seen["eval_before"]["all_tokens"]) == ITEMS
    assert seen["eval_before"] == seen["eval_again"]
    assert max(seen["eval_before"]["response_token_length"]) <= 8
    assert seen["version_after_eval"] == 0


def test_texts_and_messages_are_answered_without_an_environment(seen: Seen) -> None:
    talks = seen["talks"]
    assert len(talks["all_tokens"]) == GROUP * 3
    for prompt, text in zip(talks["str_prompts"][::GROUP], [*TEXTS, TEXTS[0]], strict=True):
        assert text in prompt
    assert talks["str_prompts"][0] == talks["str_prompts"][-1]
    assert set(talks["rewards"]) == {0.0}
    for length, mask, truncated in zip(
        talks["response_token_length"], talks["loss_mask"], talks["truncated"], strict=True
    ):
        assert 0 < length == sum(mask) <= 16
        assert length == 16 or not truncated


def test_rewards_of_ones_own_are_what_is_trained_on(seen: Seen) -> None:
    lengths = [len(text) for text in seen["talks"]["str_outputs"]]
    assert len(set(lengths)) > 1
    assert seen["rewarded"]["reward_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert seen["rewarded"]["trained_tokens"] > 0
    assert seen["rewarded"]["weight_version"] == 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rewards", "InputError: rewards must be one finite number for each of 12 trajectories"),
        ("nan", "InputError: rewards must be one finite number for each of 12 trajectories"),
        ("no groups", "InputError: train takes what forward_step returned"),
        ("prompt", "InputError: policy:1: a prompt must be a text, a list of messages, token ids"),
        ("row", "InputError: policy:1: the environment failed: KeyError: 'question'"),
        ("item", "which build_dataset did not make"),
        ("long", "does not fit the context of 512"),
        ("late", "InputError: the model file of late changes the configuration"),
        ("save", "exists and is no whole checkpoint, so it is not replaced"),
    ],
)
def test_a_mistake_is_one_sentence_and_the_pipeline_goes_on(
    seen: Seen, what: str, message: str
) -> None:
    assert message in seen["refusals"][what]


def test_setup_alone_can_be_overridden(seen: Seen) -> None:
    said, outputs = seen["setup"]
    assert said == ["setup"]
    assert len(outputs["all_tokens"]) == 2 * GROUP


def test_generator_provider_alone_can_be_overridden(seen: Seen) -> None:
    assert seen["model_calls"] == len(seen["model"]["all_tokens"]) == 2 * GROUP


def test_build_dataset_alone_can_be_overridden(seen: Seen) -> None:
    assert set(seen["dataset"]["problem_ids"]) == {"own-0", "own-1"}
    assert all("Add 2 and 2." in prompt for prompt in seen["dataset"]["str_prompts"])


def test_forward_step_alone_can_be_overridden(seen: Seen) -> None:
    iteration, outputs = seen["forward"]
    assert iteration == 7
    assert outputs["problem_ids"] == ["forward:1"] * GROUP


def test_eval_forward_alone_can_be_overridden(seen: Seen) -> None:
    assert seen["own_eval"] == {"count": 2}


def test_add_request_alone_can_be_overridden(seen: Seen) -> None:
    assert len(seen["requests"]["all_tokens"]) == 2 * 3
    assert max(seen["requests"]["response_token_length"]) <= 5


def test_outputs_of_an_overridden_decode_internal_are_trained(seen: Seen) -> None:
    assert len(seen["decoding"]) == 2 * GROUP
    assert seen["trained_on_decoding"]["trajectories"] == 2 * GROUP


def test_token_ids_are_answered_and_trained_on_as_they_are(seen: Seen) -> None:
    """By a decoding that was written for vLLM's outputs."""
    ported, trained = seen["ported"], seen["trained_on_ported"]
    given = [["one", [5, 6, 7, 8]]] * GROUP + [["two", [9, 10, 11]]] * GROUP
    assert ported["prompts"] == given
    for ids, logprobs in zip(ported["token_ids"], ported["logprobs"], strict=True):
        assert 0 < len(ids) == len(logprobs) <= 16
        assert all(p < 0 for p in logprobs)
    assert trained["trajectories"] == 2 * GROUP
    assert trained["trained_tokens"] > 0
    assert trained["logprob_diff_max"] < 1e-4


def test_a_checkpoint_brings_back_weights_and_version(seen: Seen) -> None:
    """To the trainer and to the engines, by `load_checkpoint`; training continues from there."""
    loaded = seen["loaded"]
    assert loaded["folder"].endswith("checkpoints/step-0007")
    (before, later), (after, version) = loaded["before"], loaded["after"]
    assert version == later - 1
    assert after["all_tokens"] == before["all_tokens"]
    assert after["logprobs"] == before["logprobs"]
    assert loaded["trained"]["weight_version"] == later
    assert loaded["trained"]["logprob_diff_max"] < 1e-4
    assert "step-0008 is no checkpoint to resume from: " in loaded["refused"]


def test_everything_that_was_trained_is_exact(seen: Seen) -> None:
    report = seen["exactness"]
    assert report["tokens_trained"] > 0
    assert (report["exact_percent"], report["violations"]) == (100.0, 0)


def test_save_writes_a_whole_checkpoint_that_others_can_load(seen: Seen) -> None:
    folder = Path(seen["saved"])
    assert checkpoint.incomplete_reason(folder) == ""
    assert not checkpoint.temporary(folder).exists()
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template.endswith(OWN_TEMPLATE), "model.tokenizer's, not model.path's"


def test_nothing_is_left_after_the_block(seen: Seen) -> None:
    assert seen["left"] == []
    assert "InputError: the pipeline does not run" in seen["ended"]


def with_ctrl_c() -> None:
    """Let a child process receive Ctrl-C, as in a terminal; jobs in the background ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow  # Ctrl-C itself: rollouts/test_ctrl_c.py; nothing left: test_cli.py
def test_ctrl_c_in_the_example_ends_everything(build: Path, tmp_path: Path) -> None:
    mark = Mark()
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "examples.calculator.pipeline", "--steps", "10000"),
            *(f"model.path={build / 'model'}", f"data.path={build / 'train.jsonl'}"),
            *(f"data.eval_path={build / 'heldout.jsonl'}", f"output_dir={tmp_path}"),
            *("rollout.prompts_per_step=2", "sampling.n=2", "sampling.max_tokens=8"),
        ],
        cwd=ROOT,
        env=own_environment() | mark.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=with_ctrl_c,
    )
    assert running.stdout is not None
    try:
        said = []
        for line in running.stdout:
            said.append(line)
            if line.startswith("step 2 "):
                break
        assert "".join(said).startswith("accuracy before 0.")
        pressed = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)  # a terminal sends it to the whole group
        time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)  # the impatient press it twice
        _, errors = running.communicate(timeout=120)
        assert time.monotonic() - pressed < 100  # ten thousand steps take longer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    assert mark.left() == []

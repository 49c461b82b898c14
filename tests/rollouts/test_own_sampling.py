"""A training run whose sampling is the user's: a batch sampler, a processor, a worker extension."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import turnwise
from turnwise.config import Config
from turnwise.trajectory import FORCED, audit, read_jsonl

HERE = "tests.rollouts.test_own_sampling"
REMARK, AFTER = " Hm, 1 + 1 = 2.", 4


class TwoRounds(turnwise.RolloutSampler):
    """Asks again, and counts the batches in the engines' workers."""

    def __call__(self, llm: Any, prompts: list[list[Any]], sampling_params: Any) -> Sequence[Any]:
        asked = []
        for prompt, output in zip(prompts, llm.chat(prompts, sampling_params), strict=True):
            answer = {"role": "assistant", "content": output.outputs[0].text}
            asked.append([*prompt, answer, {"role": "user", "content": "And once more?"}])
        assert llm.collective_rpc("note", args=(len(prompts),))[0] >= len(prompts)
        return list(llm.chat(asked, sampling_params))


class Remarks:
    """Forces a remark after the first tokens of each answer."""

    forced = False

    def __init__(self, tokenizer: Any) -> None:
        self.ids = tokenizer.encode(REMARK, add_special_tokens=False)

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        place = len(token_ids) - AFTER
        self.forced = 0 <= place < len(self.ids)
        if not self.forced:
            return logits
        forced = torch.full_like(logits, -torch.inf)
        forced[self.ids[place]] = 0.0
        return forced


class Notes:
    """An extension of vLLM's worker."""

    def note(self, count: int) -> int:
        self.noted: int = getattr(self, "noted", 0) + count
        return self.noted


@pytest.mark.slow
def test_a_run_trains_only_tokens_that_the_model_sampled(
    make_config: Callable[..., Config], tmp_path: Path, tokenizer: Any
) -> None:
    """Every trained token was sampled, with the trainer's own log-prob; the remark never is."""
    from tests.test_cli import metrics_of, write_config  # the engine imports this file, too
    from tests.test_cli import turnwise as command

    done = command(
        *("train", write_config(make_config, tmp_path)),
        f"rollout.sampler={HERE}:TwoRounds",
        "rollout.loop=sampler",
        f"engine.logits_processors=[{HERE}:Remarks]",
        f"engine.vllm_args={{worker_extension_cls: {HERE}.Notes}}",
        *("sampling.max_tokens=32", "training.steps=2", "eval.every=0", "name=own"),
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "own"
    remark = tokenizer.encode(REMARK, add_special_tokens=False)
    forced = 0
    for step, row in enumerate(metrics_of(run), start=1):
        assert row["dropped"] == {}
        assert row["logprob_diff_max"] < 1e-4
        trajectories = list(read_jsonl(run / "trajectories" / f"step-000{step}.jsonl"))
        assert len(trajectories) == 16
        for trajectory in trajectories:
            assert audit(trajectory).first_violation is None
            (sample,) = trajectory.samples()
            assert sum(sample.response_mask) == trajectory.sampled_tokens
            for turn in trajectory.turns:
                pairs = zip(turn.completion_token_ids, turn.weight_versions, strict=True)
                added = [token for token, version in pairs if version == FORCED]
                assert added in ([], remark[: len(added)])
                forced += added == remark
            versions = {v for turn in trajectory.turns for v in turn.weight_versions}
            assert versions <= {FORCED, step - 1}
    assert forced

"""Engines in a user's own actors, which train: several at once, behind verl's manager."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
import yaml
from ray.util.placement_group import placement_group_table
from transformers import AutoModelForCausalLM

import turnwise
from tests.pages import run_program, write_files
from tests.plain_scoring import token_logprobs
from turnwise.compat.verl import LLMServerManager
from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.manifest import Manifest

QUESTIONS = [[{"role": "user", "content": f"What is {n} plus 30?"}] for n in range(4)]


@ray.remote(num_cpus=0)
class Learner(turnwise.WorkerHost):
    """A replica of the model."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version = 0

    def step(self) -> None:
        """Change the weights as every other replica does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.02)
        self.version += 1

    def publish(self) -> Manifest:
        return self.publish_weights(self.version, self.model.named_parameters())

    def logprobs(self, ids: list[int], start: int) -> list[float]:
        ids_1T = torch.tensor([ids])
        mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
        mask_1T[:, start:] = True
        with torch.no_grad():
            values: list[float] = token_logprobs(
                self.model, ids_1T, mask_1T, SamplingConfig()
            ).tolist()
        return values


@pytest.fixture
def learners(ray_started: None, model_path: str) -> Iterator[list[Any]]:
    made = [Learner.remote(model_path) for _ in range(2)]
    yield made
    for learner in made:
        ray.kill(learner)


def test_several_engines_run_in_a_users_own_actors(
    learners: list[Any], make_config: Callable[..., Config]
) -> None:
    """With an address each, and the weights that the actors publish."""
    config = make_config(
        engine={"kv_cache_gib": 0.1},
        sampling={"n": 4, "max_tokens": 8},
        serving={"worker_servers": True},
    )

    def sampled(compared: bool = True) -> set[int]:
        made = manager.generate_sequences(QUESTIONS)
        assert made.batch is not None
        assert len(made) == 16
        assert made.meta_info["dropped"] == {}
        for row in (0, 15) if compared else ():
            real = made.batch["attention_mask"][row] == 1
            ids = made.batch["input_ids"][row][real].tolist()
            count = int(made.batch["response_mask"][row].sum())
            expected = ray.get(learners[row % 2].logprobs.remote(ids, len(ids) - count))
            logprobs = made.batch["rollout_log_probs"][row][:count].tolist()
            assert logprobs == pytest.approx(expected, abs=1e-4)
        versions = made.batch["weight_versions"]
        return {*versions[versions >= 0].tolist()}

    def reserved() -> set[str]:
        groups = placement_group_table().items()
        return {name for name, group in groups if group["state"] != "REMOVED"}

    def published() -> Iterator[Any]:
        return (learner.publish.remote() for learner in learners)

    before = reserved()
    with LLMServerManager(config, workers=learners) as manager:
        assert len(manager.async_llm_servers) == 2
        addresses = manager.server_addresses
        assert len({*addresses}) == 2
        for address in addresses:
            answer = httpx.get(f"http://{address}/v1/models", timeout=120)
            assert answer.status_code == 200
        assert sampled() == {0}
        ray.get([learner.step.remote() for learner in learners])
        assert manager.update_weights(lambda: ray.get([*published()])[0]) == 1
        assert sampled() == {1}
        ray.get(learners[0].step.remote())
        with pytest.raises(WeightUpdateError, match="version 2 is not published"):
            manager.update_weights(lambda: ray.get(learners[0].publish.remote()))
        assert sampled(compared=False) == {1}  # all or none
        mistakes: dict[Any, str] = {
            None: "must return what publish_weights did, and not a NoneType",
            Manifest(3, "ipc", "", 0, ()): "ipc and collective need a trainer that sends them",
        }
        for made, words in mistakes.items():
            with pytest.raises(InputError, match=words):
                manager.update_weights(partial(lambda returned: returned, made))
        assert sampled(compared=False) == {1}  # and no engine is lost
    ray.get([learner.step.remote() for learner in learners])  # they are as alive as before
    assert reserved() == before


def test_actors_that_do_not_suffice_are_refused(
    learners: list[Any], make_config: Callable[..., Config]
) -> None:
    config = make_config(engine={"tensor_parallel_size": 3})
    with pytest.raises(InputError, match=r"2 workers, no multiple of engine\.tensor_.* 3"):
        LLMServerManager(config, workers=learners)
    with pytest.raises(InputError, match="server_addresses needs serving"):
        _ = LLMServerManager(make_config()).server_addresses


@pytest.mark.slow
def test_the_program_of_the_page_runs(
    model_path: str, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """With a Ray that the program starts itself."""
    changes = {"Qwen/Qwen3-0.6B": model_path, "range(10)": "range(2)"}
    write_files("docs/how-to/ray-cluster.md", tmp_path, changes)
    config = make_config(engine={"kv_cache_gib": 0.1}, sampling={"max_tokens": 8})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run_program(tmp_path / "own_actors.py")

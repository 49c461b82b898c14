"""Eight clients that know Tinker's SDK and cookbook and nothing of turnwise: they save, are left
without their server, and go on.

    python sdk_state_program.py BASE_URL MODEL FOLDER

Between its two halves it prints `saved`, and waits for a line. It prints what each saw as JSON.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from tinker_cookbook import weights

URL, MODEL, FOLDER = sys.argv[1:4]
CLIENTS = 8
IDS = [5, 6, 7, 8, 9, 10]
INPUTS = {"target_tokens": IDS[1:], "weights": [1.0] * 5}
DATUM = types.Datum(model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=INPUTS)
PROMPT = types.ModelInput.from_ints(IDS[:3])
PARAMS = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)


def train(client: tinker.TrainingClient, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = client.forward_backward([DATUM], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def tokens(client: tinker.SamplingClient) -> list[list[int]]:
    sampled = client.sample(prompt=PROMPT, num_samples=2, sampling_params=PARAMS).result()
    return [each.tokens for each in sampled.sequences]


def failing(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def states(key: str, client: tinker.TrainingClient, path: str) -> Any:
    """Use each method that manages states."""
    seen: dict[str, Any] = {}
    rest = tinker.RestClient(base_url=URL, api_key=key)
    run = rest.get_training_run_by_tinker_path(path).result()
    seen["run"] = [run.lora_rank, run.user_metadata, run.last_checkpoint is not None]
    seen["runs"] = rest.list_training_runs().result().cursor.total_count
    listed = rest.list_user_checkpoints().result()
    seen["kinds"] = sorted(each.checkpoint_type for each in listed.checkpoints)
    seen["own"] = len(rest.list_checkpoints(run.training_run_id).result().checkpoints)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    listed = rest.list_user_checkpoints().result()
    (kept,) = (each for each in listed.checkpoints if each.tinker_path == path)
    seen["kept"] = kept.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    seen["info"] = [info.is_lora, info.lora_rank]
    copied = rest.copy_weights(path, "project").result()
    rest.delete_checkpoint_from_tinker_path(copied).result()
    seen["deleted"] = failing(lambda: rest.get_weights_info_by_tinker_path(copied).result())
    external = client.save_weights_external("out").result().path
    folder = weights.download(tinker_path=external, output_dir=FOLDER, base_url=URL)
    seen["external"] = sorted(file.name for file in Path(folder).iterdir())
    seen["encrypted"] = failing(
        lambda: weights.download(tinker_path=path, output_dir=f"{FOLDER}2", base_url=URL)
    )
    return seen


class Client:
    """One program, with a key of its own, before and after the server's end."""

    def __init__(self, number: int) -> None:
        key = f"tml-test{number}"
        self.service = tinker.ServiceClient(base_url=URL, api_key=key)
        client = self.service.create_lora_training_client(
            base_model=MODEL, rank=4, seed=number, user_metadata={"renderer_name": "r"}
        ).result()
        train(client, 3)
        self.path = client.save_state("third", ttl_seconds=7200).result().path
        named = client.save_weights_for_sampler("named").result().path
        self.seen: dict[str, Any] = {"expected": train(client, 2)}
        if number == 0:
            self.seen["states"] = states(key, client, self.path)
        self.samplers = [
            self.service.create_sampling_client(base_model=MODEL).result(),
            self.service.create_sampling_client(model_path=named).result(),
            client.save_weights_and_get_sampling_client().result(),
        ]
        self.seen["before"] = [tokens(each) for each in self.samplers]
        self.client = client

    def begin(self) -> None:
        """Begin what the server's end interrupts."""
        params = types.SamplingParams(max_tokens=100, temperature=1.0, seed=5)
        self.sample = self.samplers[1].sample(PROMPT, 4, params)
        self.passed = self.client.forward_backward([DATUM], "cross_entropy")

    def go_on(self) -> dict[str, Any]:
        seen, service = self.seen, self.service
        seen["sampled"] = len(self.sample.result(timeout=240).sequences)
        seen["passed"] = failing(lambda: self.passed.result(timeout=240))
        seen["after"] = [tokens(each) for each in self.samplers]
        seen["lost"] = failing(lambda: train(self.client, 1))
        again = service.create_training_client_from_state_with_optimizer(self.path).result()
        seen["resumed"] = train(again, 2)
        seen["fresh"] = train(service.create_training_client_from_state(self.path).result(), 2)
        service.close("success").result()
        return seen


def main() -> list[dict[str, Any]]:
    os.environ["TINKER_API_KEY"] = "tml-test0"  # of `weights.download`
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = list(pool.map(Client, range(CLIENTS)))
        for each in clients:
            each.begin()
        sys.stdout.write("saved\n")
        sys.stdout.flush()
        input()
        return list(pool.map(Client.go_on, clients))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")

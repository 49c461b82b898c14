"""A program that knows Tinker's SDK and cookbook and nothing of turnwise: it saves, is left without
its server, and goes on.

    python sdk_state_program.py BASE_URL MODEL FOLDER

Between its two halves it prints `saved`, and waits for a line. It prints what it saw as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from tinker_cookbook import weights

URL, MODEL, FOLDER = sys.argv[1:4]
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


def states(service: tinker.ServiceClient, client: tinker.TrainingClient, path: str) -> Any:
    """Use each method that manages states."""
    seen: dict[str, Any] = {}
    rest = tinker.RestClient(base_url=URL, api_key="tml-test")
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


def main() -> dict[str, Any]:
    os.environ["TINKER_API_KEY"] = "tml-test"
    service = tinker.ServiceClient(base_url=URL, api_key="tml-test")
    client = service.create_lora_training_client(
        base_model=MODEL, rank=4, seed=1, user_metadata={"renderer_name": "r"}
    ).result()
    train(client, 3)
    path = client.save_state("third", ttl_seconds=7200).result().path
    named = client.save_weights_for_sampler("named").result().path
    expected = train(client, 2)
    seen: dict[str, Any] = {"expected": expected, "states": states(service, client, path)}
    samplers = [
        service.create_sampling_client(base_model=MODEL).result(),
        service.create_sampling_client(model_path=named).result(),
        client.save_weights_and_get_sampling_client().result(),
    ]
    seen["before"] = [tokens(each) for each in samplers]
    sys.stdout.write("saved\n")
    sys.stdout.flush()
    input()
    seen["after"] = [tokens(each) for each in samplers]
    seen["lost"] = failing(lambda: train(client, 1))
    again = service.create_training_client_from_state_with_optimizer(path).result()
    seen["resumed"] = train(again, 2)
    seen["fresh"] = train(service.create_training_client_from_state(path).result(), 2)
    service.close("success").result()
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")

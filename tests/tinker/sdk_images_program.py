"""A program that knows Tinker's SDK and nothing of turnwise: an image in prompts and in data.

    python sdk_images_program.py BASE_URL MODEL FILE LENGTH

FILE is a PNG file of which the model makes LENGTH tokens. It prints what it saw as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import types

URL, MODEL, FILE, LENGTH = sys.argv[1:5]


def prompt(length: int) -> types.ModelInput:
    image = types.ImageChunk(
        data=Path(FILE).read_bytes(), format="png", expected_tokens=length or None
    )
    before, after = (types.EncodedTextChunk(tokens=ids) for ids in ([5, 6, 7], [8, 9]))
    return types.ModelInput(chunks=[before, image, after])


def datum(asked: types.ModelInput, tokens: list[int]) -> types.Datum:
    """Return a datum of a sample, whose prompt has targets of 0 and no weight, as the cookbook's
    recipes make it."""
    unknown = asked.length - 1
    inputs = {
        "target_tokens": [0] * unknown + tokens,
        "weights": [0.0] * unknown + [1.0] * len(tokens),
    }
    whole = asked.append(types.EncodedTextChunk(tokens=tokens[:-1]))
    return types.Datum(model_input=whole, loss_fn_inputs=inputs)


def main() -> dict[str, Any]:
    service = tinker.ServiceClient(base_url=URL, api_key="tml-test")
    training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    asked = prompt(int(LENGTH))
    losses = []
    for _ in range(3):
        passed = training.forward_backward([datum(asked, [10, 11, 12])], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    sampled = sampling.sample(prompt=asked, num_samples=4, sampling_params=params).result()
    data = [datum(asked, each.tokens) for each in sampled.sequences]
    scored = training.forward(data, "cross_entropy").result().loss_fn_outputs
    first = asked.length - 1
    seen = {
        "losses": losses,
        "sampled": [each.logprobs for each in sampled.sequences],
        "scored": [each["logprobs"].data[first:] for each in scored],
    }
    seen["uncounted"] = len(sampling.sample(prompt(0), 1, params).result().sequences)
    try:
        sampling.sample(prompt(int(LENGTH) + 1), 1, params).result()
    except tinker.RequestFailedError as error:
        seen["wrong"] = str(error)
    service.close("success").result()
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")

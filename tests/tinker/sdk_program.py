"""A program that knows Tinker's SDK and nothing of turnwise: one loop of training and sampling.

    python sdk_program.py BASE_URL MODEL

It prints what it saw as JSON.
"""

import json
import sys
from datetime import date
from typing import Any

import tinker
from tinker import types

URL, MODEL = sys.argv[1:3]
IDS = [5, 6, 7, 8, 9, 10]


def supervised(ids: list[int]) -> types.Datum:
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def reinforced(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Return a datum of a sample, as the cookbook's rl_loop makes it."""
    ids, unknown = prompt + sequence.tokens, len(prompt) - 1
    count = len(sequence.tokens)
    inputs = {
        "target_tokens": ids[1:],
        "logprobs": [0.0] * unknown + list(sequence.logprobs or ()),
        "advantages": [0.0] * unknown + [advantage] * count,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def likeliest(training: Any, sampling: Any, sample: list[int]) -> dict[str, Any]:
    """Return what the sampler and the trainer say of the likeliest tokens of one sequence."""
    whole = types.ModelInput.from_ints(sample)
    one = types.SamplingParams(max_tokens=1)
    top = sampling.sample(
        whole, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=4, topk_sample_logprobs=2
    ).result()
    rows = top.topk_prompt_logprobs[1:]
    ids = [[token for token, _ in row] for row in rows]
    weights = [[2.718281828**value for _, value in row] for row in rows]
    inputs = {"target_tokens": ids, "weights": weights}  # distillation of the likeliest tokens
    datum = types.Datum(types.ModelInput.from_ints(sample[:-1]), inputs)
    passed = training.forward([datum], "cross_entropy").result()
    (output,) = passed.loss_fn_outputs
    return {
        "engine": [[value for _, value in row] for row in rows],
        "trainer": output["logprobs"].tolist(),
        "likeliest": len(top.sequences[0].topk_logprobs[0]),
        "last": sampling.compute_logprobs(whole, prompt_logprobs_last_n=2).result(),
    }


def failing(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'category', '')}: {error}"
    return "no error"


def main() -> dict[str, Any]:
    service = tinker.ServiceClient(base_url=URL, api_key="tml-test")
    seen: dict[str, Any] = {}
    (known,) = service.get_server_capabilities().supported_models
    seen["model"] = known.model_name
    training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    seen["info"] = training.get_info().lora_rank
    losses = []
    for _ in range(4):  # both are submitted before either is waited for
        passed = training.forward_backward([supervised(IDS)] * 3, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    seen["losses"] = losses
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(IDS[:3])
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    sampled = sampling.sample(prompt=prompt, num_samples=4, sampling_params=params).result()
    seen["tokens"] = [each.tokens for each in sampled.sequences]
    seen["logprobs"] = [each.logprobs for each in sampled.sequences]
    data = [
        reinforced(IDS[:3], each, 1.0 if number % 2 else -1.0)
        for number, each in enumerate(sampled.sequences)
    ]
    scored = training.forward(data, "importance_sampling").result()
    seen["scored"] = [each["logprobs"].data[len(IDS[:3]) - 1 :] for each in scored.loss_fn_outputs]
    training.forward_backward(data, "importance_sampling").result()
    seen["step"] = training.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics
    path = training.save_weights_for_sampler("named").result().path
    named = service.create_sampling_client(model_path=path).result()
    seen["named"] = len(named.sample(prompt, 1, params).result().sequences)
    base = service.create_sampling_client(base_model=MODEL).result()
    seen["scores"] = base.compute_logprobs(types.ModelInput.from_ints(IDS)).result()
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints(IDS),
        loss_fn_inputs={"target_tokens": IDS, "weights": [float("nan")] * len(IDS)},
    )
    seen["nan"] = failing(lambda: training.forward_backward([wrong], "cross_entropy").result())
    masked = [
        types.Datum(
            model_input=each.model_input,
            loss_fn_inputs={**each.loss_fn_inputs, "sequence_ratio_mask": [1.0] * len(ids)},
        )
        for each in data
        for ids in [each.model_input.to_ints()]
    ]
    for loss in ("ppo", "cispo", "dro", "gspo"):
        passed = training.forward_backward(masked if loss == "gspo" else data, loss).result()
        seen[loss] = passed.metrics["loss:sum"]
    seen["beta"] = training.forward(data, "dro", {"beta": 5.0}).result().metrics["loss:sum"]
    stable = training.forward(data, "stable_reinforce")
    seen["stable"] = failing(stable.result)
    seen["top"] = likeliest(training, named, IDS)
    seen["state"] = failing(lambda: training.save_state("state").result())
    rest = service.create_rest_client()
    seen["rest"] = failing(lambda: rest.get_audit_log(day=date.today()).result())
    seen["who"] = rest.whoami().result().user_urn
    seen["sessions"] = len(rest.list_sessions().result().sessions)
    custom = training.forward_backward_custom(
        [supervised(IDS)],
        lambda data, logprobs: (-sum(each.sum() for each in logprobs), {"a": 1.0}),
    ).result()
    seen["custom"] = custom.metrics
    service.close("success").result()
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")

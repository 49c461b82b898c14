"""An RL loop in Tinker's four verbs, on your own engines and trainer.

    python -m examples.tinker.loop [--url URL] [--steps N] [--model FOLDER]

It needs Tinker's SDK (`pip install tinker`; in the repository `make tinker`, and
PYTHONPATH=.venv-tinker). Without --url it starts engines and a trainer in this program. With --url
it is a client of `turnwise tinker` or of any other server that speaks the protocol. The model
learns to answer with few tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from transformers import AutoTokenizer

from turnwise.tinker import ServiceClient

MODEL = Path(__file__).parent.parent / "calculator" / "warm_started"
QUESTIONS = ("What is 3 + 4?", "What is 9 - 5?", "What is 2 * 6?", "What is 8 + 8?")
GROUP, TOKENS = 8, 32


def datum(prompt: list[int], sample: Any, advantage: float) -> types.Datum:
    """Return a sample with its advantage at each sampled token, and none in the prompt."""
    unknown, tokens = len(prompt) - 1, list(sample.tokens)
    inputs = {
        "target_tokens": prompt[1:] + tokens,
        "logprobs": [0.0] * unknown + list(sample.logprobs),
        "advantages": [0.0] * unknown + [advantage] * len(tokens),
    }
    ids = types.ModelInput.from_ints(prompt + tokens[:-1])
    return types.Datum(model_input=ids, loss_fn_inputs=inputs)


def train(service: Any, model: str, steps: int) -> None:
    """Sample, reward, and train, `steps` times."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n")
        for each in QUESTIONS
    ]
    training = service.create_lora_training_client(model, rank=8, seed=0).result()
    params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0)
    for step in range(steps):
        sampling = training.save_weights_and_get_sampling_client().result()
        asked = [sampling.sample(types.ModelInput.from_ints(p), GROUP, params) for p in prompts]
        data, lengths = [], []
        for prompt, future in zip(prompts, asked, strict=True):
            samples = future.result().sequences
            rewards = [-len(each.tokens) / TOKENS for each in samples]
            mean = sum(rewards) / len(rewards)
            data += [datum(prompt, s, r - mean) for s, r in zip(samples, rewards, strict=True)]
            lengths += [len(each.tokens) for each in samples]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        passed.result()
        stepped.result()
        print(f"step {step + 1}  tokens {sum(lengths) / len(lengths):.1f}", flush=True)
    print(f"saved {training.save_weights_for_sampler('short').result().path}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.tinker.loop", description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", default=str(MODEL))
    options = parser.parse_args()
    if options.url:
        train(tinker.ServiceClient(base_url=options.url), options.model, options.steps)
        return
    small = ["model.lora.rank=8", "model.max_length=512", "engine.kv_cache_gib=0.25"]
    with ServiceClient(options.model, overrides=small) as service:
        train(service, options.model, options.steps)


if __name__ == "__main__":
    main()

"""The RL loop of Tinker's cookbook (rl_loop) on token ids; its last line is JSON.

    python -m benchmarks.peers.tinker_loop --url URL --model NAME --prompts FILE \\
        [--clients N] [--groups P] [--group-size G] [--tokens T] [--steps N] [--rank R]

It knows Tinker's SDK and nothing of turnwise. Each client has a session, an adapter and a thread,
and takes `steps` steps: weights to a sampler, G samples of each of P prompts, rewards by the parity
of the sum of the ids, `forward_backward` by importance sampling, `optim_step`. The first step of
all clients warms up; they begin the second together. FILE has one list of ids a line, as JSON.
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tinker
from tinker import types


def datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """Return a sample with its advantage, as rl_loop makes it."""
    unknown, tokens = len(prompt) - 1, list(sample.tokens)
    inputs = {
        "target_tokens": prompt[1:] + tokens,
        "logprobs": [0.0] * unknown + list(sample.logprobs or ()),
        "advantages": [0.0] * unknown + [advantage] * len(tokens),
    }
    ids = types.ModelInput.from_ints(prompt + tokens[:-1])
    return types.Datum(model_input=ids, loss_fn_inputs=inputs)


class Client:
    """One program: a session with an adapter."""

    def __init__(self, options: argparse.Namespace, prompts: list[list[int]], number: int) -> None:
        self.options = options
        self.prompts = prompts
        self.number = number
        self.service = tinker.ServiceClient(base_url=options.url, api_key="tml-bench")
        self.training = self.service.create_lora_training_client(
            options.model, rank=options.rank, seed=number
        ).result()
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def step(self, index: int) -> None:
        """Take one step, and note its seconds and sampled tokens."""
        began, options = time.perf_counter(), self.options
        first = options.groups * (index + self.number) % len(self.prompts)
        chosen = (self.prompts + self.prompts)[first : first + options.groups]
        sampling = self.training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=options.tokens, temperature=1.0)
        asked = [
            sampling.sample(types.ModelInput.from_ints(each), options.group_size, params)
            for each in chosen
        ]
        data, count = [], 0
        for prompt, future in zip(chosen, asked, strict=True):
            samples = future.result().sequences
            rewards = [float(sum(each.tokens) % 2) for each in samples]
            mean = sum(rewards) / len(rewards)
            data += [datum(prompt, s, r - mean) for s, r in zip(samples, rewards, strict=True)]
            count += sum(len(each.tokens) for each in samples)
        passed = self.training.forward_backward(data, "importance_sampling")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=1e-5))
        passed.result()
        stepped.result()
        self.tokens.append(count)
        self.seconds.append(time.perf_counter() - began)
        sys.stderr.write(f"client {self.number}: step {index} of {self.seconds[-1]:.1f} s\n")

    def values(self) -> dict[str, Any]:
        """Return samples of the new adapter with log-probs of the engine and of the trainer."""
        prompt = self.prompts[0]
        params = types.SamplingParams(max_tokens=self.options.tokens, temperature=1.0, seed=1)
        sampling = self.training.save_weights_and_get_sampling_client().result()
        samples = sampling.sample(types.ModelInput.from_ints(prompt), 4, params).result().sequences
        data = [datum(prompt, each, 1.0) for each in samples]
        scored = self.training.forward_backward(data, "importance_sampling").result()
        self.training.optim_step(types.AdamParams(learning_rate=0.0)).result()
        return {
            "prompt": prompt,
            "tokens": [list(each.tokens) for each in samples],
            "sampled": [list(each.logprobs or ()) for each in samples],
            "trained": [
                list(each["logprobs"].data)[len(prompt) - 1 :] for each in scored.loss_fn_outputs
            ],
        }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    for name, default in (("clients", 1), ("groups", 2), ("group-size", 8), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    prompts = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    clients = [Client(options, prompts, number) for number in range(options.clients)]
    values = clients[0].values()
    began = [0.0]
    warm = threading.Barrier(
        options.clients, lambda: began.__setitem__(0, time.perf_counter()), timeout=600
    )

    def run(client: Client) -> None:
        client.step(0)
        warm.wait()
        for index in range(1, options.steps):
            client.step(index)

    threads = [threading.Thread(target=run, args=[each]) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began[0]
    for client in clients:
        assert len(client.seconds) == options.steps, "a client failed; its error is above"
        client.service.close("success").result()
    counted = sum(sum(each.tokens[1:]) for each in clients)
    seconds = [second for each in clients for second in each.seconds[1:]]
    result = {"seconds": seconds, "tokens_per_s": counted / wall, "values": values}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

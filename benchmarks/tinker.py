"""Programs of Tinker's SDK against a `Pipeline`: `python -m benchmarks.tinker [--quick]`.

Both do the same work: steps of an RL loop with an adapter of rank 8 on a random model, prompts of
8 samples each, float32, on the same engine and trainer settings. The Tinker program
(`peers/tinker_loop.py`, the cookbook's rl_loop without its data set) runs in a process of its own
with the SDK of `.venv-tinker`, against `turnwise tinker`; the other is a `Pipeline`. They run one
after the other; the first step of each warms up and is not counted.

- Values: log-probs from `sample` and `forward_backward` for the same tokens, against
  `Pipeline.score`; the largest difference counts.
- Step: seconds from saving the weights for a sampler to the end of `optim_step`.
- Eight clients at once, each with an eighth of the prompts, against one client with all prompts:
  sampled tokens per second of the whole loop, training included.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.models import demo_files, make_model
from benchmarks.report import Claim, parser, quotients, report
from turnwise.compat.chatlearn import Pipeline, VLLMModule

ROOT = Path(__file__).parent.parent
SDK = ROOT / ".venv-tinker"
RANK, GROUP, CLIENTS = 8, 8, 8
DEADLINE = 1200.0


def settings(model: Path, folder: Path) -> dict[str, Any]:
    """Return the keys that both sides share."""
    return {
        "model.path": model,
        "model.max_length": 512,
        "model.lora.rank": RANK,
        "weights.lora": "adapter",
        "output_dir": folder,
        "training.micro_batch_tokens": 2048,
    }


def prompts_of(data: Path, model: Path, count: int) -> list[list[int]]:
    """Return the demo's problems as token ids of chat prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in data.read_text().splitlines()[:count]]
    return [
        tokenizer.encode(f"<|im_start|>user\n{next(iter(row.values()))}<|im_end|>\n")
        for row in rows
    ]


@contextmanager
def server(keys: dict[str, Any], folder: Path) -> Iterator[str]:
    """Run `turnwise tinker`, and yield its URL."""
    log = folder / "tinker.log"
    command = [sys.executable, "-m", "turnwise.cli", "tinker", "--port", "0"]
    with log.open("w") as file:
        started = subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in keys.items())],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        ends = time.monotonic() + DEADLINE
        while "TINKER_BASE_URL=" not in log.read_text():
            if started.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"turnwise tinker did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield log.read_text().partition("TINKER_BASE_URL=")[2].split()[0]
    finally:
        stop(started)


def stop(started: "subprocess.Popen[bytes]") -> None:
    """End a server, by force if it takes more than a minute."""
    started.terminate()
    try:
        started.wait(60)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait(60)


def loop(url: str, model: Path, prompts: Path, **sizes: int) -> dict[str, Any]:
    """Run the Tinker program, and return its results."""
    command = [sys.executable, "-m", "benchmarks.peers.tinker_loop", "--url", url]
    command += ["--model", str(model), "--prompts", str(prompts), "--rank", str(RANK)]
    command += [part for k, v in sizes.items() for part in (f"--{k.replace('_', '-')}", str(v))]
    environment = {**os.environ, "PYTHONPATH": f"{SDK}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    say(f"the program of Tinker: {sizes}")
    done = subprocess.run(  # its progress is on stderr
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE
    )
    if done.returncode:
        raise SystemExit("the program of Tinker failed; its error is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    say(f"{found['tokens_per_s']:.0f} tokens/s; steps of {found['seconds']} s")
    return found


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def pipeline(
    keys: dict[str, Any], prompts: list[list[int]], values: dict[str, Any], steps: int, tokens: int
) -> tuple[list[float], float]:
    """Run the same loop with a `Pipeline`; return the seconds of its steps, and the largest
    difference between its log-probs and the log-probs of Tinker's calls."""
    policy, seconds = VLLMModule("policy"), list[float]()
    own = {
        "sampling.n": GROUP,
        "sampling.max_tokens": tokens,
        "rollout.prompts_per_step": len(prompts),
        "training.updates_per_step": 1,
        "training.warmup_steps": 0,
        "training.lr_schedule": "constant",
        "training.learning_rate": 1e-5,
    }
    file = Path(keys["output_dir"]) / "pipeline.yaml"
    file.write_text("name: pipeline\n")
    overrides = [f"{key}={value}" for key, value in (keys | own).items()]
    say("the pipeline starts")
    with Pipeline(file, policy, overrides=overrides) as run:
        whole = [values["prompt"] + each for each in values["tokens"]]
        masks = [[0] * len(values["prompt"]) + [1] * len(each) for each in values["tokens"]]
        scored = run.score("policy", whole, masks)
        start = len(values["prompt"])
        worst = max(
            abs(a - b)
            for name in ("sampled", "trained")
            for theirs, row in zip(values[name], scored, strict=True)
            for a, b in zip(theirs, row[start:], strict=True)
        )
        problems = policy.build_dataset([{"input_ids": each, "prompt": ""} for each in prompts])
        for step in range(steps):
            began = time.perf_counter()
            outputs = policy.forward_step(problems, step)
            outputs["rewards"] = [float(sum(ids) % 2) for ids in outputs["all_tokens"]]
            run.train(outputs)
            seconds.append(time.perf_counter() - began)
            say(f"the pipeline: step {step} of {seconds[-1]:.1f} s")
    return seconds[1:], worst


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("tinker", __doc__).parse_args()
    data = demo_files() / "train.jsonl"
    size, steps, groups, tokens = ("0.7 M", 2, 8, 8) if options.quick else ("5 M", 6, 16, 64)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(size, folder)
        prompts = prompts_of(data, model, groups)
        file = folder / "prompts.jsonl"
        file.write_text("".join(f"{json.dumps(each)}\n" for each in prompts))
        keys, sizes = settings(model, folder), {"tokens": tokens, "steps": steps}
        slots = CLIENTS + 1  # an adapter of each client, and one that is replaced
        room = {f"engine.vllm_args.{key}": slots for key in ("max_loras", "max_cpu_loras")}
        with server(keys | room, folder) as url:
            one = loop(url, model, file, groups=groups, group_size=GROUP, **sizes)
            rounds = [
                (
                    loop(url, model, file, groups=groups // CLIENTS, clients=CLIENTS, **sizes),
                    loop(url, model, file, groups=groups, **sizes),
                )
                for _ in range(1 if options.quick else 3)
            ]
        seconds, worst = pipeline(keys, prompts, one["values"], steps, tokens)
    many, alone = ([run[n]["tokens_per_s"] for run in rounds] for n in (0, 1))
    name = f"Tinker's RL loop, {size} parameters"
    claims = [
        Claim(
            f"{name}: largest difference of a log-prob of sample and forward_backward", "1e-6",
            [worst * 1e6], "Pipeline.score", at_most=10.0,
        ),
        Claim(
            f"{name}: step of {groups * GROUP} samples", "s", one["seconds"],
            "Pipeline", seconds,
            [statistics.median(one["seconds"]) / statistics.median(seconds)], at_most=1.15,
        ),
        Claim(
            f"{name}: {CLIENTS} clients", "tokens/s", many,
            f"one with {CLIENTS} times the batch", alone, quotients(many, alone), at_least=0.85,
        ),
    ]  # fmt: skip
    report(claims, options)


if __name__ == "__main__":
    main()

"""The runs that `turnwise view --demo` shows: trained here, and packed into one small file.

    python -m examples.calculator.recording [--output FILE] [--steps N]

The first run is the calculator's. In the second run, an agent solves the same problems over HTTP,
each problem twice, and the trainer may be one step ahead of the engine.
"""

import argparse
import json
import os
import shutil
import ssl
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from turnwise.training import checkpoint
from turnwise.viewer.run_files import RECORDING

from .prepare import BUILD, prepare
from .tool import TOOL_SCHEMA, calculate

CERTIFICATES = ssl.create_default_context()
"""Read once, because reading it takes longer than all other work of making a client."""
RUNS: dict[str, tuple[str, ...]] = {
    "calculator": (),
    "careful-agent": (
        "seed=1",
        "rollout.loop=agent",
        "rollout.agent=examples.calculator.recording:careful",
        "training.max_staleness=1",
    ),
}
"""Names of the runs, and keys that differ from the calculator's configuration."""
COMMON = (
    "rollout.prompts_per_step=8",
    "sampling.n=6",
    "eval.every=5",
    "eval.target=null",
    "data.eval_limit=32",
    "trajectories.keep=2",
    "engine.metrics=true",
)
KEPT: tuple[str, ...] = ("config.yaml", "metrics.jsonl", "exactness.json")
KEPT += ("trajectories/*.jsonl", "timeline/*.jsonl", "training/*.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of the last checkpoint that the viewer needs for texts; the weights are left out."""


async def careful(base_url: str, problem: dict[str, Any]) -> None:
    """Solve a problem twice, and once more if the two answers differ."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=http) as client:
        answers = [await solve(client, problem["question"]) for _ in range(2)]
        if answers[0] != answers[1]:
            await solve(client, problem["question"])


async def solve(client: AsyncOpenAI, question: str) -> str:
    """Return the answer to a question, calculating as the model asks for it."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(5):
        made = await client.chat.completions.create(
            model="any", messages=messages, tools=[TOOL_SCHEMA]
        )
        message = made.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            assert call.type == "function"
            try:
                result = str(calculate(**json.loads(call.function.arguments)))
            except Exception as error:  # the model's mistake, for the model to read
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return message.content or ""
    return ""


def record(output: Path, steps: int, folder: Path) -> None:
    """Train the runs in a folder, and pack the files that the viewer reads.

    Args:
        output: The archive to write.
        steps: Training steps of each run.
        folder: Folder of the runs and their data.
    """
    data = folder / "data"
    prepare(data)
    sources = (
        f"model.path={data / 'model'}",
        f"data.path={data / 'train.jsonl'}",
        f"data.eval_path={data / 'heldout.jsonl'}",
        f"output_dir={folder}",
    )
    config = str(Path(__file__).with_name("config.yaml"))
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, keys in RUNS.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            own = (*sources, f"name={name}", f"training.steps={steps}", *COMMON, *keys)
            command = (sys.executable, "-m", "turnwise.cli", "train", config, *own)
            subprocess.run(command, check=True)
            for path in files_of(folder / name):
                archive.write(path, path.relative_to(folder))


def files_of(run: Path) -> list[Path]:
    """Return the files of a run that the viewer reads."""
    kept = [path for pattern in KEPT for path in sorted(run.glob(pattern))]
    last = checkpoint.list_checkpoints(run / "checkpoints")[-1]
    return [*kept, *(last / name for name in TOKENIZER)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.calculator.recording", description=__doc__)
    parser.add_argument("--output", type=Path, default=RECORDING)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(os.path.relpath(BUILD / "recording")))
    options = parser.parse_args()
    record(options.output, options.steps, options.folder)
    print(f"{options.output}: {options.output.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    main()

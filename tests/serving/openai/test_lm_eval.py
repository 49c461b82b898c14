"""lm-evaluation-harness asks `turnwise serve` and vLLM's own server, and gets the same results."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.servers import serving, vllm_server
from tests.conftest import ROOT

ROWS = 12
TASKS: dict[str, dict[str, Any]] = {
    "sums_by_likelihood": {
        "output_type": "multiple_choice",
        "doc_to_choice": ["10", "20", "42", "84"],
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "sums_by_generation": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def harness() -> Path:
    subprocess.run(["make", "-s", ".venv-interop/.installed"], cwd=ROOT, check=True, timeout=900)
    return ROOT / ".venv-interop" / "bin" / "python"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of both tasks, and their rows beside them."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"What is {a} plus {10 * (a % 4) + 10}?", "answer": a % 4} for a in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        shared = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "test_split": "test",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "answer",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(shared | task))
    return folder


@pytest.fixture(scope="module")
def servers(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Base URLs of both servers before engines with the same arguments."""
    model, folder = build / "model", tmp_path_factory.mktemp("servers")
    with serving(model, folder) as ours, vllm_server(model, folder) as theirs:
        yield {"ours": ours[0], "theirs": theirs[0]}


def evaluated(
    harness: Path, tasks: Path, url: str, kind: str, task: str, model: Path, folder: Path
) -> dict[str, Any]:
    """Run a task, and return its results and its log of samples."""
    path = "chat/completions" if kind == "local-chat-completions" else "completions"
    options = {
        "model": str(model),
        "base_url": f"{url}/{path}",
        "tokenizer": str(model),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    command = [
        *(str(harness), "-m", "lm_eval", "run", "--model", kind, "--tasks", task),
        *("--include_path", str(tasks), "--output_path", str(folder), "--log_samples"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
        *(["--apply_chat_template"] if path != "completions" else []),
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return {
        "results": json.loads(results.read_text())["results"][task],
        "answers": [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("local-completions", "sums_by_likelihood"),
        ("local-completions", "sums_by_generation"),
        ("local-chat-completions", "sums_by_generation"),
    ],
)
def test_the_harness_gets_what_vllms_server_gives(
    harness: Path,
    tasks: Path,
    servers: dict[str, str],
    build: Path,
    tmp_path: Path,
    kind: str,
    task: str,
) -> None:
    made = {}
    for name, url in servers.items():
        (tmp_path / name).mkdir()
        made[name] = evaluated(harness, tasks, url, kind, task, build / "model", tmp_path / name)
    assert made["ours"]["results"] == made["theirs"]["results"]
    ours, theirs = made["ours"]["answers"], made["theirs"]["answers"]
    assert len(ours) == len(theirs) == ROWS
    if task == "sums_by_generation":
        assert ours == theirs
        # Chats of the demo's model are tool calls, which both take off a text that has no tools.
        assert kind == "local-chat-completions" or any(text for ((text,),) in ours)
    else:
        for pair in zip(ours, theirs, strict=True):
            values = [
                [(float(likelihood), greedy) for ((likelihood, greedy),) in each] for each in pair
            ]
            mine, other = ([v for v, _ in each] for each in values)
            assert mine == pytest.approx(other, abs=2e-3)
            assert [g for _, g in values[0]] == [g for _, g in values[1]]

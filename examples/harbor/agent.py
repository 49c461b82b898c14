"""Harbor's tasks as rows, and `harbor run` as the command of an agent. Needs Python only.

    python examples/harbor/agent.py rows TASKS rows.jsonl      # a row for each task of a folder

Then `rollout.agent: python examples/harbor/agent.py run` plays a row: it runs `harbor run` on the
task, with an agent of Harbor whose model is at the trajectory's base URL, and posts the verifier's
reward. Further arguments go to `harbor run`: `... agent.py run --agent terminus-2 --env docker`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

AGENT = ["--agent", "terminus-2"]
REWARD = "reward"
"""Name of the verifier's result that becomes the reward."""
POST_SECONDS = 30


def rows(folder: Path) -> list[dict[str, str]]:
    """Return a row for each task: a folder with task.toml and instruction.md."""
    tasks = sorted(path.parent.resolve() for path in folder.glob("**/task.toml"))
    if not tasks:
        raise SystemExit(f"{folder} has no task.toml in it")
    return [{"task": str(task), "prompt": (task / "instruction.md").read_text()} for task in tasks]


def command(task: str, jobs: str, more: list[str]) -> list[str]:
    """Return the command that plays a task once."""
    return [
        *["harbor", "run", "--yes", "--quiet", "--path", task, "--jobs-dir", jobs],
        *["--n-attempts", "1", "--n-concurrent", "1"],
        *["--model", f"openai/{os.environ['OPENAI_MODEL']}"],
        *["--agent-kwarg", f"api_base={os.environ['OPENAI_BASE_URL']}"],
        *(more if "--agent" in more else [*AGENT, *more]),
    ]


def reward(jobs: Path) -> float:
    """Return the reward of the only trial of a jobs folder."""
    trials = [json.loads(path.read_text()) for path in jobs.glob("*/*/result.json")]
    if len(trials) != 1:
        raise SystemExit(f"harbor run left {len(trials)} results, not one")
    (trial,) = trials
    found = (trial.get("verifier_result") or {}).get("rewards") or {}
    if REWARD not in found:
        failed = trial.get("exception_info") or {}
        said = failed.get("exception_message") or f"the verifier gave {found}"
        raise SystemExit(f"no {REWARD}: {said}")
    return float(found[REWARD])


def play(row: dict[str, str], more: list[str]) -> None:
    """Run the task of a row, and report its reward to the trajectory's session."""
    with tempfile.TemporaryDirectory() as jobs:
        done = subprocess.run(
            command(row["task"], jobs, more), stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        if done.returncode:
            raise SystemExit(f"harbor run ended with {done.returncode}")
        value = reward(Path(jobs))
    session = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    body = json.dumps({"reward": value}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{session}/reward", body, headers), timeout=POST_SECONDS) as answer:
        answer.read()


def main() -> None:
    match sys.argv[1:]:
        case ["rows", folder, target]:
            lines = [json.dumps(row) + "\n" for row in rows(Path(folder))]
            Path(target).write_text("".join(lines))
            print(f"{len(lines)} rows\n{target}")
        case ["run", *more]:
            play(json.load(sys.stdin), more)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()

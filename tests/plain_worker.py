"""A long-lived agent worker: it knows the helper's file and urllib, and nothing of turnwise.

Its row says what it does: `behaviour`.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parent.parent / "src" / "turnwise"))
from agent_worker import serve

BOARD = Path(os.environ.get("BOARD", "/nowhere"))
"""A folder in which the worker notes what happened."""


def ask(base_url: str, content: str) -> str:
    body = {"model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    request = Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


async def run(task: dict[str, Any], base_url: str) -> Any:
    print("a print is no answer")  # noqa: T201
    behaviour = task.get("behaviour", "")
    (BOARD / f"began-{os.getpid()}-{time.monotonic_ns()}").touch()
    if behaviour == "together":  # answers only while two trajectories run at once
        while sum(name.startswith("began-") for name in os.listdir(BOARD)) < 2:
            await asyncio.sleep(0.01)
    if behaviour == "crash":
        print("the last words", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(7)
    if behaviour == "fail":
        raise ValueError("no such page")
    if behaviour == "hang":
        try:
            await asyncio.Event().wait()
        finally:
            (BOARD / f"cancelled-{time.monotonic_ns()}").touch()
    if behaviour == "never asks":
        return {"reward": 1.0, "metrics": {"answers": 1}}
    said = await asyncio.to_thread(ask, base_url, task["question"])
    if behaviour == "bad":
        return {"reward": "high"}
    return {"metrics": {"length": len(said)}, "reward": 0.5}


def plain(task: dict[str, Any], base_url: str) -> None:
    """A function that blocks: each call has its own thread."""
    ask(base_url, task["question"])


def tasks() -> list[dict[str, Any]]:
    return [{"question": f"{n} plus 1?", "answer": str(n + 1)} for n in range(3)]


if __name__ == "__main__":
    if "garbage" in sys.argv:
        sys.stdout.write("hello\n[]\n")
        sys.stdout.flush()
    if "no-start" in sys.argv:
        sys.exit("it needs a key")
    serve(plain if "plain" in sys.argv else run, None if "taskless" in sys.argv else tasks)

"""Tasksets and harnesses of verifiers 0.4 as an agent behind an HTTP endpoint.

Run it with the Python of an environment that holds verifiers; Turnwise is not imported:

    PYTHON service.py ENV.toml --rows rows.jsonl     # write a row for each task, and end
    PYTHON service.py ENV.toml --port 9000           # then `rollout.agent: http://127.0.0.1:9000/run`

ENV.toml is an environment of verifiers: the tables `taskset` and `agent` (or the agents of another
environment), as in `[env]` of its own configurations. An episode is one trajectory: its reward is
the mean of the rewards of its trainable traces.
"""

import argparse
import asyncio
import json
import logging
import sys
import tomllib
from pathlib import Path
from statistics import fmean

import verifiers.v1 as vf
from aiohttp import web


def context(base_url: str, model: str) -> vf.ModelContext:
    """Return verifiers' eval client for a session of Turnwise; the run sets the sampling."""
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="TURNWISE_SESSION_NEEDS_NO_KEY")
    return vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())


def report(episode: vf.Episode) -> dict[str, object]:
    """Return an episode as Turnwise reads it: reward and metrics, or an error."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        last = errors[-1] if errors else None
        return {"error": f"{last.type}: {last.message}" if last else "the episode is not ok"}
    metrics: dict[str, list[float]] = {}
    for trace in episode.traces:
        for name, value in {**trace.metrics, "turns": trace.num_turns}.items():
            if value is not None:
                metrics.setdefault(name, []).append(float(value))
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return {
        "reward": fmean(rewards),
        "metrics": {name: fmean(values) for name, values in metrics.items()},
    }


class Service:
    """The tasks of one environment, played one episode for each request."""

    def __init__(self, tree: dict[str, object], limit: int | None) -> None:
        self._tree = tree
        taskset = vf.load_environment(vf.resolve_env_config(dict(tree))).taskset
        if limit is None and not taskset.bounded:
            raise SystemExit("this taskset is infinite: give a --limit")
        self.tasks = list(taskset if limit is None else taskset.take(limit))

    def rows(self) -> list[dict[str, object]]:
        return [{"idx": task.data.idx, "prompt": _text(task.data.prompt)} for task in self.tasks]

    async def run(self, request: web.Request) -> web.Response:
        asked = await request.json()
        task = self.tasks[asked["row"]["idx"]]
        # One environment per episode: each keeps a client for every base URL until it stops.
        env = vf.load_environment(vf.resolve_env_config(dict(self._tree)))
        async with env.serving():
            (slot,) = env.slots(task)
            episode = await env.run_slot(slot, context(asked["base_url"], asked["model"]))
        return web.json_response(report(episode))


def _text(prompt: object) -> str:
    """Return a task's prompt for logs: its text, in which images are named."""
    if not isinstance(prompt, list):
        return str(prompt or "")
    contents = [getattr(message, "content", None) or [] for message in prompt]
    parts = [part for each in contents for part in ([each] if isinstance(each, str) else each)]
    texts = [part if isinstance(part, str) else getattr(part, "text", "[image]") for part in parts]
    return "\n".join(texts)


async def serve(service: Service, port: int) -> None:
    app = web.Application()
    app.router.add_post("/run", service.run)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(f"agent: http://127.0.0.1:{runner.addresses[0][1]}/run", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("env", type=Path)
    made.add_argument("--rows", type=Path)
    made.add_argument("--port", type=int, default=0)
    made.add_argument("--limit", type=int)
    options = made.parse_args()
    logging.basicConfig(level=logging.WARNING)
    sys.path.insert(0, str(options.env.resolve().parent))  # plug-ins next to the file
    service = Service(tomllib.loads(options.env.read_text()), options.limit)
    if options.rows:
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in service.rows()))
        print(f"{len(service.tasks)} rows\n{options.rows}")
        return
    asyncio.run(serve(service, options.port))


if __name__ == "__main__":
    main()

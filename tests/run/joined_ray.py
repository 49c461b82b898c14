"""A program that has started Ray itself, with a namespace and an actor, and then uses turnwise.

    python -m tests.run.joined_ray CONFIG.yaml

One JSON object on standard output says what is left of it after each call.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray._private.state
import yaml
from ray.util.placement_group import placement_group_table

import turnwise
from turnwise.compat.verl import LLMServerManager
from turnwise.errors import InputError


class Owned:
    """The program's own actor."""

    def variable(self) -> int:
        return 1


def left(own: Any) -> dict[str, object]:
    """Return what is in the program's Ray: its own actor's answer, and what others left there."""
    actors = ray._private.state.actors().values()
    groups = placement_group_table().values()
    return {
        "answer": ray.get(own.variable.remote(), timeout=60),
        "namespace": ray.get_runtime_context().namespace,
        "actors": [a["ActorClassName"] for a in actors if a["State"] != "DEAD"],
        "reserved": sum(1 for group in groups if group["state"] != "REMOVED"),
    }


def main(path: str) -> None:
    ray.init(num_cpus=2, namespace="mine", include_dashboard=False, log_to_driver=False)
    own = ray.remote(num_cpus=0)(Owned).options(name="own").remote()
    rows = [{"question": "2 + 2", "answer": 4}]
    found: dict[str, object] = {}

    def manager() -> object:
        tree = yaml.safe_load(Path(path).read_text())
        del tree["sampling"]["n"]
        opened = LLMServerManager(tree).start()  # without a `with` block
        batch = opened.generate_sequences([[{"role": "user", "content": "2 + 2?"}]] * 2)
        opened.shutdown()
        return len(batch.batch["responses"])

    def rollout() -> object:
        return len(turnwise.rollout(config=path, data=rows, progress=False, ray_address="auto"))

    def train() -> object:
        keys: dict[str, Any] = {"training.steps": 1, "eval.every": 0, "name": "trained"}
        return turnwise.train(config=path, progress=False, **keys).metrics[-1]["step"]

    def elsewhere() -> object:
        try:
            turnwise.rollout(config=path, data=rows, progress=False, ray_address="127.0.0.1:1")
        except InputError as error:
            return str(error)
        return None

    calls: dict[str, Callable[[], object]] = {
        "manager": manager,
        "rollout": rollout,
        "train": train,
        "elsewhere": elsewhere,
    }
    for name, call in calls.items():
        found[name] = {"result": call(), **left(own)}
    json.dump(found, sys.stdout)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

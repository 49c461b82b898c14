"""A fleet with a range of workers on a real Ray cluster whose nodes come and go.

    python -m tests.serving.joins FOLDER

The workers are real actors around simulated engines, so every token that a turn should have is
known. One JSON object on standard output says what happened; log lines go to standard error.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.serving.deaths import LightWorker, Load, runs
from tests.serving.test_manager import update
from turnwise.config import parse_config
from turnwise.core import logs
from turnwise.core.ray import start_ray
from turnwise.run.fleet import make_manager
from turnwise.run.scaling import scaling


class VersionedWorker(LightWorker):
    async def version(self) -> int:
        return int(self._engine.version)


async def play(cluster: Cluster, node: dict[str, Any], folder: str) -> dict[str, Any]:
    config = parse_config(
        {
            "environment": "none",
            "output_dir": folder,
            "data": {"path": "none"},
            "model": {"path": "none"},
            "engine": {"start_timeout": 60.0},
            "serving": {
                "workers": "1-3",
                "resources": {"engines": 1},
                "health_every": 0.5,
                "max_restarts": 20,
            },
        }
    )
    report: dict[str, Any] = {"versions": {}, "pids": []}
    manager = make_manager(config, 0, host=VersionedWorker)

    async def up(count: int, what: str) -> None:
        """Wait for so many engines, and for turns on them; write down their versions."""
        async with asyncio.timeout(200):
            while len(manager.engines) != count or manager._leaving:
                await asyncio.sleep(0.05)
        await load.more()
        for engine in manager.engines:
            report["pids"].append(engine.pid)
        actors = [engine.actor for engine in manager.engines]
        report["versions"][what] = [await actor.version.remote() for actor in actors]

    await manager.start()
    load = Load(manager.scheduler)
    try:
        async with scaling(config, manager):
            await update(manager, 1)
            await up(1, "one node")
            added = cluster.add_node(**node)
            await up(2, "a node has joined")
            await update(manager, 2)
            await up(2, "and an update")
            added.kill_raylet(check_alive=False)
            await up(1, "it has left")
            cluster.add_node(**node)
            cluster.add_node(**node)
            await up(3, "two have joined")
            report["free"] = ray.available_resources().get("engines", 0.0)
            await manager.scale(1)
            await up(1, "scaled to one")
            async with asyncio.timeout(100):
                while (free := ray.available_resources().get("engines", 0.0)) < 2:
                    await asyncio.sleep(0.05)
            report["given_back"] = free
        report["wrong"], report["events"] = load.wrong, dict(manager.scheduler.events)
        load.stop()
    finally:
        await manager.shutdown()
        ray.shutdown()
    return report


def main(folder: str) -> None:
    logs.to_terminal()
    os.environ |= {
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    node = {"num_cpus": 2, "resources": {"engines": 1}, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.wait_for_nodes()
    start_ray(cluster.address)
    report = asyncio.run(play(cluster, node, folder))
    end = time.monotonic() + 120
    while (alive := [*filter(runs, report["pids"])]) and time.monotonic() < end:
        time.sleep(0.05)
    report["alive"] = alive
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

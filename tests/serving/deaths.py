"""A fleet on a real Ray cluster that loses a worker to the memory monitor, then a node, then Ray.

    python -m tests.serving.deaths FOLDER

The workers are real actors around simulated engines, so every token that a turn should have is
known. One JSON object on standard output says what happened; log lines go to standard error.
"""

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.simulated import SimulatedEngine
from turnwise.config import SamplingConfig, parse_config
from turnwise.core import logs
from turnwise.core.ray import start_ray, watching_ray
from turnwise.engine import Request, generate
from turnwise.errors import TurnwiseError
from turnwise.run.fleet import make_manager
from turnwise.serving.engine_host import EngineHost

SAMPLING = SamplingConfig(max_tokens=96)
ROOM = 3 * 2**30
"""Bytes above what the machine uses now at which Ray's monitor begins to kill."""


class LightWorker(EngineHost):
    """A worker whose engine is simulated."""

    async def start(self) -> tuple[int, str | None]:
        logs.redirect_output()
        self._engine: Any = SimulatedEngine(name=self._name)
        self._engine.slowdown = 8.0
        self._ballast: list[bytearray] = []
        return os.getpid(), None

    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def seed(self) -> int:
        return self._seed

    async def grow(self) -> None:
        """Take memory until somebody objects."""
        for _ in range(48):
            self._ballast.append(bytearray(b"x" * 2**27))
            await asyncio.sleep(0.02)


class Load:
    """Turns without end, whose tokens are checked."""

    def __init__(self, generator: Any) -> None:
        self.turns = 0
        self.wrong: list[str] = []
        self._generator = generator
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(8)]

    async def _run(self, index: int) -> None:
        reference = SimulatedEngine()
        for number in range(10**6):
            prompt = [index + 1, number + 1, *range(1, 40)]
            try:
                completion = await generate(
                    self._generator, Request(prompt, SAMPLING, f"{index}-{number}")
                )
                if completion.token_ids != reference.expected(prompt, SAMPLING.max_tokens):
                    self.wrong.append(f"{index}-{number}: other tokens")
            except TurnwiseError as error:
                self.wrong.append(str(error))
            self.turns += 1

    async def more(self, turns: int = 16) -> None:
        """Until so many more are done."""
        end = self.turns + turns
        async with asyncio.timeout(120):
            while self.turns < end:
                await asyncio.sleep(0.05)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


async def seeds(manager: Any) -> list[int]:
    return [await engine.actor.seed.remote() for engine in manager.engines]


async def back(manager: Any, losses: int) -> None:
    async with asyncio.timeout(200):
        while len(manager.failures) < losses or len(manager.engines) < 2:
            await asyncio.sleep(0.05)


def runs(pid: int) -> bool:
    """Return whether a process runs; one that ended may be kept until a new parent notices."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def bounded() -> dict[str, str]:
    """Settings of a raylet that kills where little more memory is used than now."""
    memory = psutil.virtual_memory()
    share = (memory.total - memory.available + ROOM) / memory.total
    return {"RAY_memory_usage_threshold": str(share), "RAY_memory_monitor_refresh_ms": "100"}


async def play(cluster: Cluster, second: Any, folder: str) -> dict[str, Any]:
    config = parse_config(
        {
            "environment": "none",
            "output_dir": folder,
            "data": {"path": "none"},
            "model": {"path": "none"},
            "engine": {"start_timeout": 60.0},
            "serving": {
                "workers": 2,
                "resources": {"engines": 1},
                "health_every": 0.5,
                "max_restarts": 20,
            },
        }
    )
    report: dict[str, Any] = {}
    killed = 0.0
    manager = make_manager(config, 0, host=LightWorker)
    try:
        async with watching_ray(None):
            await manager.start()
            load = Load(manager.scheduler)
            head = cluster.head_node.node_id
            report["seeds"] = await seeds(manager)
            nodes = {e.name: await e.actor.node.remote() for e in manager.engines}  # type: ignore[attr-defined]
            on_head = next(e for e in manager.engines if nodes[e.name] == head)
            await load.more()
            report["killed"] = (
                f"the process of {on_head.name} died (its node ran out of memory, and Ray ended it)"
            )
            on_head.actor.grow.remote()  # type: ignore[attr-defined]
            await back(manager, 1)
            report["memory"] = [loss.why for loss in manager.failures]
            await load.more()

            report["seeds"] += await seeds(manager)
            known, waiting = len(manager.failures), asyncio.Event()
            placing = logging.getLogger("turnwise.serving.placement")
            placing.addFilter(lambda record: waiting.set() is None)
            report["removed"] = next(name for name in nodes if name != on_head.name)
            second.kill_raylet(check_alive=False)
            async with asyncio.timeout(120):
                while len(manager.engines) == 2:
                    await asyncio.sleep(0.05)
                await load.more()  # the other one serves meanwhile
                await waiting.wait()
            cluster.add_node(num_cpus=2, resources={"engines": 1})
            await back(manager, known + 1)
            report["node"] = [loss.why for loss in manager.failures[known:]]
            await load.more()
            report["wrong"], report["continued"] = load.wrong, manager.scheduler.events["continued"]

            report["pids"] = [engine.pid for engine in manager.engines]  # type: ignore[attr-defined]
            load.stop()
            killed = time.monotonic()
            cluster.head_node.kill_gcs_server(check_alive=False)
            await asyncio.Event().wait()
    except TurnwiseError as error:
        if not killed:
            raise
        report["head"], report["head_seconds"] = str(error), time.monotonic() - killed
    finally:
        await manager.shutdown()
        ray.shutdown()
    return report


def main(folder: str) -> None:
    logs.to_terminal()
    os.environ |= {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_timeout_ms_task_wait_for_death_info": "20000",  # until the cause is known
    }
    os.environ |= bounded()
    nodes = {"num_cpus": 2, "resources": {"engines": 1}, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**nodes, "include_dashboard": False})
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0"}  # the second raylet watches no memory
    second = cluster.add_node(**nodes)
    cluster.wait_for_nodes()
    start_ray(cluster.address)
    report = asyncio.run(play(cluster, second, folder))
    end = time.monotonic() + 120
    while (alive := [*filter(runs, report["pids"])]) and time.monotonic() < end:
        time.sleep(0.05)
    report["alive"] = alive
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

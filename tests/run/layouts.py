"""A program that starts a Ray cluster with GPUs that do not exist, and places a layout's actors.

    python -m tests.run.layouts NODES GPUS CONFIG

Prints, as JSON, the numbers of GPUs that each kind of actor got on each node, in the order of the
plan, and the GPUs that are left.
"""

import asyncio
import json
import sys
from collections import Counter

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from turnwise.config import parse_config
from turnwise.config.gpus import gpu_share
from turnwise.core.actor import create_placement_group
from turnwise.observe.plan import actors
from turnwise.serving.placement import WorkerStarter


async def place(tree: str) -> list[list[float]]:
    config = parse_config(json.loads(tree), optional=("environment", "data.path"))
    share = gpu_share(config, ray.cluster_resources()["GPU"], training=True)
    rank, worker = actors(config, share)
    starter = WorkerStarter(config, 0 if config.training.colocated else share)
    assert worker.count == config.serving.workers * starter._bundles
    assert worker.gpus == starter._gpus
    placed = []
    for ask in (rank, worker):
        group = await create_placement_group(
            ask.count, ask.gpus, ask.resources, ask.who, "training", 60.0
        )
        nodes = placement_group_table(group)["bundles_to_node_id"].values()
        placed.append([ask.gpus * count for _, count in sorted(Counter(nodes).items())])
    return placed


def main(nodes: int, gpus: int, tree: str) -> None:
    each = {"num_cpus": 2, "num_gpus": gpus, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**each)
    cluster.wait_for_nodes(300)
    ray.init(cluster.address, log_to_driver=False)
    placed = asyncio.run(place(tree))
    left = ray.available_resources().get("GPU", 0)
    sys.stdout.write("\n" + json.dumps({"placed": placed, "left": left}) + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

"""Ray: the processes that `ray.init` starts, and the place of their reports."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray._private import services, worker
from ray._private.node import Node
from ray._private.parameter import RayParams

from turnwise.internals import internal

_begin = internal(Node, "__init__", "self", "ray_params")
_start_dashboard = internal(Node, "start_api_server", "self", "include_dashboard")
_get_node = internal(services, "get_node", "gcs_address", "node_id")
internal(worker, "print_to_stdstream", "data", "ignore_prefix")
_NODE_SECONDS = 180.0
"""Time in which a node that Ray has started must report itself. Ray's own is 30 s, in which a busy
machine does not always start a process; `get_node` raises RuntimeError until then."""


@contextmanager
def lean_ray(client: str | None) -> Iterator[None]:
    """Make `ray.init` start no dashboard, autoscaler and log collector, each of which would import
    Ray, and workers with `client` instead of a script that does so, and wait longer for its node,
    for a `with` block."""

    def begin(self: Node, ray_params: RayParams, *args: object, **kwargs: object) -> None:
        ray_params.update(no_monitor=True, include_log_monitor=False)  # refuses unknown names
        if client is not None:
            ray_params.update(setup_worker_path=client)
        _begin(self, ray_params, *args, **kwargs)

    def get_node(gcs_address: str, node_id: str) -> object:
        ends = time.monotonic() + _NODE_SECONDS
        while True:
            try:
                return _get_node(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.1)

    Node.__init__, Node.start_api_server = begin, lambda self, **_: None
    services.get_node = get_node
    try:
        yield
    finally:
        Node.__init__, Node.start_api_server = _begin, _start_dashboard
        services.get_node = _get_node


def report_to(log: Callable[[list[str]], None]) -> None:
    """Give the lines that Ray reports of its processes, and prints without a logger, to a
    function."""

    def report(data: dict[str, list[str]], ignore_prefix: bool) -> None:
        log(data["lines"])

    worker.print_to_stdstream = report

"""Ray: the processes that `ray.init` starts, and the destination of their log lines."""

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
"""Seconds in which a node that Ray has started must report itself. Ray itself allows 30 s, which is
not always enough on a busy machine. Until the node has reported, `get_node` raises RuntimeError."""


@contextmanager
def lean_ray(client: str | None) -> Iterator[None]:
    """Make `ray.init` in a `with` block start fewer processes, and wait longer for its node.

    It does not start a dashboard, autoscaler or log collector, because each of them would import
    Ray. If `client` is given, workers start with this script instead of Ray's own script, which
    also imports Ray.
    """

    def begin(self: Node, ray_params: RayParams, *args: object, **kwargs: object) -> None:
        ray_params.update(no_monitor=True, include_log_monitor=False)  # raises on unknown names
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
    """Give the output lines of Ray's processes to a function, instead of printing them."""

    def report(data: dict[str, list[str]], ignore_prefix: bool) -> None:
        log(data["lines"])

    worker.print_to_stdstream = report

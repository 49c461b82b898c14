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
"""Time in which a node that Ray has started must report itself. Ray itself allows 30 s, which is
not always enough on a busy machine; `get_node` raises RuntimeError until the node has reported."""


@contextmanager
def lean_ray(client: str | None) -> Iterator[None]:
    """Make `ray.init` in a `with` block start fewer processes, and wait longer for its node.

    It starts no dashboard, autoscaler or log collector: each would import Ray. It starts workers
    with the script `client`, if given, instead of Ray's script, which imports Ray too.
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
    """Give the output lines of Ray's processes to a function; Ray would print them."""

    def report(data: dict[str, list[str]], ignore_prefix: bool) -> None:
        log(data["lines"])

    worker.print_to_stdstream = report

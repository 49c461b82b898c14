"""Ray: the processes that `ray.init` starts, and the place of their reports."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray._private import worker
from ray._private.node import Node
from ray._private.parameter import RayParams

from turnwise.internals import internal

_begin = internal(Node, "__init__", "self", "ray_params")
_start_dashboard = internal(Node, "start_api_server", "self", "include_dashboard")
internal(worker, "print_to_stdstream", "data", "ignore_prefix")


@contextmanager
def lean_ray(client: str | None) -> Iterator[None]:
    """Make `ray.init` start no dashboard, autoscaler and log collector, each of which would import
    Ray, and workers with `client` instead of a script that does so, for a `with` block."""

    def begin(self: Node, ray_params: RayParams, *args: object, **kwargs: object) -> None:
        ray_params.update(no_monitor=True, include_log_monitor=False)  # refuses unknown names
        if client is not None:
            ray_params.update(setup_worker_path=client)
        _begin(self, ray_params, *args, **kwargs)

    Node.__init__, Node.start_api_server = begin, lambda self, **_: None
    try:
        yield
    finally:
        Node.__init__, Node.start_api_server = _begin, _start_dashboard


def report_to(log: Callable[[list[str]], None]) -> None:
    """Give the lines that Ray reports of its processes, and prints without a logger, to a
    function."""

    def report(data: dict[str, list[str]], ignore_prefix: bool) -> None:
        log(data["lines"])

    worker.print_to_stdstream = report

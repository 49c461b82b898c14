"""What the driver makes of its processes' reports, which name only workers that did anything."""

from collections import Counter
from typing import Any

from tests.serving.test_lost_channels import LocalActor, Method, make_config
from tests.simulated import SimulatedEngine
from turnwise.engine import Route
from turnwise.errors import EngineError
from turnwise.serving.front_process import Report
from turnwise.serving.front_processes import FrontProcesses
from turnwise.serving.routing import Router
from turnwise.serving.scheduler import Scheduler


class Woken:
    """An actor that counts how often it is woken."""

    def __init__(self) -> None:
        self.times = 0
        self.wake = Method(self._wake)

    def _wake(self) -> None:
        self.times += 1


def fleet(workers: int) -> tuple[Scheduler, FrontProcesses, list[Any]]:
    config = make_config()
    scheduler = Scheduler(config.serving, 60.0)
    processes = FrontProcesses(config, scheduler, names=["one", "two"])
    scheduler.subscribe(processes.follow)
    for index in range(workers):
        scheduler.add(f"worker-{index}", SimulatedEngine(name=f"worker-{index}"))
    return scheduler, processes, processes.processes


async def test_loads_are_summed_over_processes_and_go_with_them() -> None:
    scheduler, processes, (one, two) = fleet(3)
    first, second, third = scheduler.workers.values()
    processes._take(one, Report(loads={"worker-0": 2.0, "worker-1": 1.0}))
    processes._take(two, Report(loads={"worker-0": 3.0}))
    assert [each.elsewhere for each in (first, second, third)] == [5.0, 1.0, 0.0]
    assert [each.load for each in (first, second, third)] == [5.0, 1.0, 0.0]
    processes._take(one, Report(loads={"worker-0": 1.0}, counts={"worker-0": Counter(turns=4)}))
    assert [each.elsewhere for each in (first, second)] == [4.0, 0.0]
    assert first.turns == 4
    processes._lose(two, LocalActor(Woken(), "two", EngineError), "it died")
    assert first.elsewhere == 1.0
    successor = scheduler.add("worker-0", SimulatedEngine(name="worker-0"))
    assert successor.elsewhere == 0.0, "its load is that of the next reports"
    processes._take(one, Report(loads={"worker-0": 2.0}))
    assert successor.elsewhere == 2.0
    processes._take(one, Report())
    assert [each.elsewhere for each in scheduler.workers.values()] == [0.0, 0.0, 0.0]
    scheduler.remove("worker-0")
    processes._take(one, Report(loads={"worker-0": 2.0}))  # made before it heard of that
    successor = scheduler.add("worker-0", SimulatedEngine(name="worker-0"))
    processes._take(one, Report())
    assert (successor.elsewhere, successor.load) == (0.0, 0.0)


async def test_orders_between_two_reports_wake_a_process_once() -> None:
    scheduler, _, (one, two) = fleet(0)
    actor = Woken()
    one.actor = LocalActor(actor, "one", EngineError)
    for index in range(50):
        scheduler.add(f"worker-{index}", SimulatedEngine(name=f"worker-{index}"))
    assert [order for order, _ in one.orders].count("add") == 50
    assert (actor.times, two.orders) == (1, [])
    one.orders = []  # as the request for a report takes them
    scheduler.remove("worker-7")
    assert actor.times == 2


async def test_workers_that_join_together_rebuild_the_router_once(
    monkeypatch: Any,
) -> None:
    built: list[int] = []
    build = Router._build

    def counted(router: Router) -> None:
        build(router)
        built.append(len(router._usable))

    monkeypatch.setattr(Router, "_build", counted)
    scheduler, _, _ = fleet(100)
    assert built == []
    router = scheduler._router
    home = router.usable and router.schedule(Route("session", "group"))
    assert built == [100]
    scheduler.remove("worker-99")
    scheduler.add("worker-100", SimulatedEngine(name="worker-100"))
    assert router.usable[-1].name == "worker-100"
    assert built == [100, 100]
    assert router.schedule(Route("session", "group")) is home

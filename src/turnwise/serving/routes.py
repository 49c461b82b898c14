"""The server's own routes: an index, sessions and Prometheus' metrics."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Response
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from turnwise.engine.protocol import VLLM_METRICS, Generator
from turnwise.errors import InputError
from turnwise.serving.engine_metrics import EngineMetrics
from turnwise.serving.middleware import GENERATING, http_error
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.sessions import NAME_PATTERN, Session, SessionStore
from turnwise.trajectory import MAX_REWARD


class _Opening(BaseModel):
    """The body of POST /sessions."""

    id: str | None = Field(default=None, pattern=NAME_PATTERN)
    training: bool = False
    """Refuse sampling that the trainer would not know of."""
    group: str = Field(default="", max_length=200)
    """Sessions of one group begin with one prompt and share its cache."""


class _Reward(BaseModel):
    """The body of POST /sessions/{id}/reward."""

    reward: float = Field(allow_inf_nan=False, ge=-MAX_REWARD, le=MAX_REWARD)


def add_routes(
    app: FastAPI,
    store: SessionStore,
    metrics: Callable[[], Awaitable[bytes]],
    *,
    model: str,
    url: Callable[[str | None], str],
    workers: Callable[[], Mapping[str, str]],
) -> None:
    """Put the routes into vLLM's application, and take its own middlewares and metrics out.

    Args:
        model: Its name, for clients.
        url: The base URL of a session's name, or of none.
        workers: Base URLs of workers' own servers, by name.
    """
    router = APIRouter()

    def found(session_id: str) -> Session:
        session = store.get(session_id)
        if session is None:
            why = store.gone(session_id)
            told = f"the session {session_id} {why}" if why else f"there is no session {session_id}"
            raise HTTPException(404, told)
        if session.private and not session.agent_rewards:
            raise HTTPException(
                403,
                "this session belongs to a rollout: its agent may read, reward or close it only "
                "where rollout.agent_rewards is true",
            )
        return session

    @router.get("/")
    async def get_index() -> dict[str, Any]:
        """Where clients find what."""
        base_url = url(None)
        return {
            "server": "turnwise",
            "model": model,
            "openai_base_url": base_url,
            "anthropic_base_url": base_url.removesuffix("/v1"),
            "workers": workers(),
            "routes": [*GENERATING, "/v1/models", "/sessions", "/health", "/metrics"],
            "reference": "/openapi.json",
        }

    @router.get("/sessions")
    async def list_sessions() -> dict[str, Any]:
        """The sessions that clients opened, without their tokens."""
        return {"sessions": [session.summary() for session in store]}

    @router.post("/sessions", status_code=201)
    async def open_session(opening: _Opening | None = None) -> dict[str, Any]:
        """Begin a session; the answer holds its base URL."""
        opening = opening or _Opening()
        try:
            session = store.open(opening.id, training=opening.training, group=opening.group)
        except InputError as error:
            raise HTTPException(409, str(error)) from None
        return {**session.describe(), "base_url": url(session.id)}

    @router.get("/sessions/{session_id}")
    async def get_session(session_id: str) -> dict[str, Any]:
        """The session's trajectory: every token, log-prob and weight version."""
        session = found(session_id)
        session.finish()
        return session.describe()

    @router.post("/sessions/{session_id}/reward")
    async def give_reward(session_id: str, reward: _Reward) -> dict[str, Any]:
        """Say how well the session did."""
        found(session_id).trajectory.reward = reward.reward
        return {"id": session_id, "reward": reward.reward}

    @router.delete("/sessions/{session_id}")
    async def close_session(session_id: str) -> dict[str, Any]:
        """End the session and forget it; the answer describes it for the last time."""
        session = found(session_id)
        store.close(session_id)
        session.finish()
        return session.describe()

    app.include_router(router)
    app.router.redirect_slashes = False  # a redirection would lose the session in the path
    app.add_exception_handler(StarletteHTTPException, http_error)
    # vLLM's middlewares are for scaling, browsers and metrics of its own.
    app.user_middleware.clear()
    app.middleware_stack = FastAPI.build_middleware_stack(app)
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") != "/metrics"]

    @app.get("/metrics")
    async def get_metrics() -> Response:
        """Prometheus."""
        return Response(await metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def make_metrics(
    store: SessionStore, generator: Generator, counts: Counter[str]
) -> Callable[[], Awaitable[bytes]]:
    """Prometheus' text of the server, its sessions, its workers and their engines."""
    engines = EngineMetrics(generator)

    class Collector:
        def __init__(self, of_engines: Sequence[Any]) -> None:
            self._of_engines = of_engines

        def collect(self) -> Iterator[Any]:
            yield from self._of_engines
            for metric in REGISTRY.collect():  # this process's own
                if not metric.name.startswith(VLLM_METRICS):
                    yield metric
            yield GaugeMetricFamily("turnwise_sessions_open", "Named sessions", len(store))
            requests = CounterMetricFamily("turnwise_requests", "HTTP requests", labels=["what"])
            for what, count in counts.items():
                requests.add_metric([what], count)
            yield requests
            if not isinstance(generator, Scheduler):
                return
            events = CounterMetricFamily("turnwise_turns", "What became of turns", labels=["event"])
            for event, count in generator.events.items():
                events.add_metric([event], count)
            yield events
            load = GaugeMetricFamily("turnwise_worker_load", "Weighted requests", labels=["worker"])
            up = GaugeMetricFamily("turnwise_worker_up", "1 if it takes turns", labels=["worker"])
            tokens = CounterMetricFamily("turnwise_worker_tokens", "Sampled", labels=["worker"])
            for worker in generator.workers.values():
                load.add_metric([worker.name], worker.load)
                up.add_metric([worker.name], float(worker.usable))
                tokens.add_metric([worker.name], worker.tokens)
            yield from (load, up, tokens)

    async def text() -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector(await engines.collect()))
        return generate_latest(registry)

    return text

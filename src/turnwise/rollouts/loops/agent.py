"""Loops whose turns are requests of others: of agents, and of a user's chat scheduler.

An agent gets a base URL and a problem, and needs no code of Turnwise. It is a function
`package.module:name(base_url, problem)`, async or not; or a command, an HTTP endpoint or a
long-lived worker (`rollouts.agents`). The requests to the base URL become the trajectory's turns.
The URL contains a secret random name, so an agent cannot reach another's trajectory.
"""

import copy
import re

from turnwise.chat.session import Session
from turnwise.config import Config
from turnwise.core.sources import WORKER
from turnwise.core.spans import trace_headers
from turnwise.core.user_code import call_user_code, import_user_code
from turnwise.core.watchdog import waiting
from turnwise.errors import DeadlineError, InputError, TrajectoryError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.agents import (
    AgentWorker,
    apply_report,
    clean_environment,
    run_command,
    run_endpoint,
)
from turnwise.rollouts.environment import Environment, load_object
from turnwise.serving.chat_scheduler import ChatCompletionScheduler
from turnwise.serving.data_proto import DataProto

_FUNCTION = re.compile(r"[\w.]+:\w+")


class HttpAgentLoop:
    """Passes the URL of a session to an agent, and waits until it is done."""

    def __init__(self) -> None:
        self._workers: dict[str, AgentWorker] = {}
        """Workers by their commands."""

    async def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            await worker.close()
        self._workers.clear()

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Run the agent of one trajectory; its requests become the turns.

        Raises:
            TrajectoryError: `agent_silent`, when nothing was sampled; `agent_error`,
                `agent_unreachable`, `agent_crashed` and `agent_reply`, as `agents` raises them.
        """
        server, rollout = context.server, context.rollout
        if rollout.agent is None:
            raise InputError(
                "rollout.loop agent needs rollout.agent: package.module:function, a command, "
                "worker: COMMAND, or the URL of an endpoint"
            )
        if server is None:
            raise InputError("rollout.loop agent needs the OpenAI server, which is not running")
        session = server.sessions.open_private(
            context.trajectory,
            sampling=context.sampling,
            group=context.route.group,
            agent_rewards=rollout.agent_rewards,
            max_turns=rollout.max_turns,
            calls=context.calls,
        )
        session.clock = context.clock
        try:
            with context.timed("agent"), waiting(context.request_id, "agent"):
                base_url, model = server.session_url(session.id), server.model_name
                await self._run_agent(rollout.agent, context, session, base_url, model)
        except (DeadlineError, InputError):
            raise
        except Exception:
            if not session.refused_turns:
                raise
            # It may fail where it gets no more turns: the trajectory ends with those that it has.
        finally:
            server.sessions.close(session.id)
        session.finish()
        if session.all_lost_turns:
            context.trajectory.events["lost_turn"] += session.all_lost_turns
        if not context.trajectory.turns:
            raise TrajectoryError(
                "agent_silent", f"the agent of {context.request_id} sampled nothing"
            )

    async def _run_agent(
        self, agent: str, context: RolloutContext, session: Session, base_url: str, model: str
    ) -> None:
        row, name, rollout = context.row, context.request_id, context.rollout
        trace = trace_headers()
        if agent.startswith(WORKER):
            command = agent.removeprefix(WORKER).strip()
            if command not in self._workers:
                self._workers[command] = AgentWorker(command, rollout.agent_env)
            worker = self._workers[command]
            task = {"task": row, "base_url": base_url, "model": model, "name": name}
            report = await worker.run(task | ({"trace": trace} if trace else {}))
            apply_report(report, session, worker.name)
        elif agent.startswith(("http://", "https://")):
            request = {"row": row, "base_url": base_url, "model": model, "id": name}
            report = await run_endpoint(agent, request)
            apply_report(report, session, f"the agent {agent}")
        elif _FUNCTION.fullmatch(agent):
            # A copy: the environment computes the reward from the original row.
            await call_user_code(
                lambda: load_object(agent, "rollout.agent")(base_url, copy.deepcopy(row)),
                name=f"the agent {agent}",
                seconds=rollout.trajectory_timeout,
                key="rollout.trajectory_timeout",
            )
        else:
            variables = {header.upper(): value for header, value in trace.items()}
            variables |= {"OPENAI_BASE_URL": base_url, "OPENAI_MODEL": model}
            environment = clean_environment(rollout.agent_env, **variables)
            await run_command(agent, environment, row, context.clock)


class ChatSchedulerLoop:
    """Passes a problem to the chat scheduler, whose requests become the turns."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Run one trajectory's conversation."""
        if context.chats is None:
            what = "rollout.loop chat_scheduler needs a ChatBackend"
            raise InputError(f"{what}, which is not running")
        # A copy: the environment computes the reward from the original row.
        row, messages = await call_user_code(
            *(copy.deepcopy, (context.row, list(context.problem))),
            name="the copy of a row",
            seconds=context.rollout.environment_timeout,
            key="rollout.environment_timeout",
        )
        config = context.chats.config
        batch = DataProto.from_conversations(
            [messages],
            {name: [value] for name, value in row.items()},
            do_sample=context.sampling.temperature > 0,
            validate=config.eval.sampling == context.sampling != config.sampling,
        )
        with context.timed("agent"), waiting(context.request_id, "chat scheduler"):
            await context.chats.converse(
                context.trajectory,
                batch,
                context.sampling,
                group=context.route.group,
                clock=context.clock,
                calls=context.calls,
            )


async def import_chat_scheduler(config: Config) -> type[ChatCompletionScheduler]:
    """Load the configured class in a thread, within `engine.start_timeout`."""
    path = config.rollout.chat_scheduler
    return await import_user_code(
        load_chat_scheduler, path, config=config, what=path or "the chat scheduler"
    )


def load_chat_scheduler(path: str | None) -> type[ChatCompletionScheduler]:
    """Load the class that `rollout.chat_scheduler` names; None loads `ChatCompletionScheduler`.

    Raises:
        InputError: when it cannot be imported, or is not a `ChatCompletionScheduler`.
    """
    if path is None:
        return ChatCompletionScheduler
    found = load_object(path, "rollout.chat_scheduler")
    if not (isinstance(found, type) and issubclass(found, ChatCompletionScheduler)):
        raise InputError(
            f"rollout.chat_scheduler: {path} is not a subclass of "
            "turnwise.serving.chat_scheduler.ChatCompletionScheduler"
        )
    return found

"""The loop for HTTP agents, which get a base URL and a problem and need no code of Turnwise.

An agent is a function `package.module:name(base_url, problem)`, async or not; a command
(`rollout.agents.command`); or an HTTP endpoint (`rollout.agents.endpoint`). The requests to the
base URL become the trajectory's turns. The URL contains a secret random name, so an agent cannot
reach another's trajectory.
"""

import copy
import re

from turnwise.chat.session import Session
from turnwise.core.aio import run_in_thread
from turnwise.core.user_code import call_user_code
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.agent_loop import RolloutContext
from turnwise.rollout.agents.command import clean_environment, run_command
from turnwise.rollout.agents.endpoint import is_endpoint, run_endpoint
from turnwise.rollout.agents.report import apply_report
from turnwise.rollout.environment import Environment, load_object
from turnwise.rollout.problems import Row

_FUNCTION = re.compile(r"[\w.]+:\w+")


class HttpAgentLoop:
    """Passes the URL of a session to an agent, and waits until it is done.

    Example:
        rollout:
          loop: agent
          agent: python my_agent.py      # or my_package.my_module:run, or http://host/run
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Run the agent of one trajectory; its requests become the turns.

        Raises:
            TrajectoryError: `agent_error`, when the agent fails; `agent_unreachable` and
                `agent_reply` for an endpoint; `agent_silent`, when nothing was sampled.
        """
        server, rollout = context.server, context.rollout
        if rollout.agent is None:
            raise InputError(
                "rollout.loop agent needs rollout.agent: package.module:function, a command, or "
                "the URL of an endpoint"
            )
        if server is None:
            raise InputError("rollout.loop agent needs the OpenAI server, which is not running")
        session = server.sessions.open_private(
            context.trajectory,
            sampling=context.sampling,
            group=context.route.group if context.route is not None else "",
            agent_rewards=rollout.agent_rewards,
        )
        session.clock = context.clock
        try:
            with context.timed("agent"), waiting(context.request_id, "agent"):
                base_url, model = server.session_url(session.id), server.model_name
                await _run_agent(rollout.agent, context, session, base_url, model)
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
    agent: str, context: RolloutContext, session: Session, base_url: str, model: str
) -> None:
    if _FUNCTION.fullmatch(agent):
        await _call_function(agent, base_url, context.row)
    elif is_endpoint(agent):
        request = {
            "row": context.row,
            "base_url": base_url,
            "model": model,
            "id": context.request_id,
        }
        apply_report(await run_endpoint(agent, request), session, f"the agent {agent}")
    else:
        variables = clean_environment(
            context.rollout.agent_env, OPENAI_BASE_URL=base_url, OPENAI_MODEL=model
        )
        await run_command(agent, variables, context.row, context.clock)


async def _call_function(agent: str, base_url: str, row: Row) -> None:
    function = await run_in_thread(lambda: load_object(agent, "rollout.agent"))
    # A copy: the environment computes the reward from the original row.
    await call_user_code(function, base_url, copy.deepcopy(row), name=f"the agent {agent}")

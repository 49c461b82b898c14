"""The report of an agent that answers when it is done: sessions, reward, metrics, error."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from turnwise.chat.session import Session
from turnwise.core.json_types import JsonObject
from turnwise.errors import TrajectoryError
from turnwise.rollout.reading import finite_number
from turnwise.trajectory import MAX_REWARD

_METRICS = 100
"""Maximum number of metrics in a report."""
_NAME_CHARS = 100
_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The report of an endpoint or a worker about one trajectory.

    Example:
        >>> read_report({"reward": 1.0, "metrics": {"searches": 3}}, "the agent http://host/run")
        AgentReport(reward=1.0, metrics={'searches': 3.0}, sessions=[], error='')
    """

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)
    """Sessions that the agent says it opened, by name or id."""
    error: str = ""
    """Reason why the agent failed; "" if it did not."""


def read_report(value: object, who: str) -> AgentReport:
    """Read a report; keys other than its fields are ignored, and all are optional.

    Args:
        who: The agent in messages.

    Raises:
        TrajectoryError: `agent_reply`, naming the key that cannot be used.
    """

    def refused(key: str, rule: str) -> TrajectoryError:
        return TrajectoryError("agent_reply", f"{who} reported {key}, which must be {rule}")

    if value is None:
        return AgentReport()
    if not isinstance(value, Mapping):
        raise TrajectoryError("agent_reply", f"{who} must report an object, not {value!r:.80}")
    given: JsonObject = {key: item for key, item in value.items() if item is not None}
    reward = None
    if "reward" in given:
        reward = finite_number(given["reward"])
        if reward is None or abs(reward) > MAX_REWARD:
            raise refused("a reward", f"a number between ±{MAX_REWARD:g}")
    metrics: dict[str, float] = {}
    named = given.get("metrics", {})
    if not isinstance(named, Mapping) or len(named) > _METRICS:
        raise refused("metrics", f"an object of at most {_METRICS} numbers")
    for name, item in named.items():
        number = finite_number(item)
        if number is None or len(name) > _NAME_CHARS:
            raise refused(f"the metric {name:.{_NAME_CHARS}}", "a finite number with a short name")
        metrics[name] = number
    sessions = given.get("sessions", [])
    if not isinstance(sessions, list) or not all(isinstance(name, str) for name in sessions):
        raise refused("sessions", "a list of names")
    return AgentReport(reward, metrics, sessions, str(given.get("error", ""))[:_ERROR_CHARS])


def apply_report(report: AgentReport, session: Session, who: str) -> None:
    """Add a report to the trajectory of a rollout's session.

    A reward counts only where the agent may reward itself (`rollout.agent_rewards`); elsewhere it
    is counted as the event `agent_reward_ignored`.

    Raises:
        TrajectoryError: `agent_error`, when the agent reports an error; `agent_reply`, when it
            reports a session that is not one of its own.
    """
    if report.error:
        raise TrajectoryError("agent_error", f"{who}: {report.error}")
    own = {session.id, *session.children, *(child.id for child in session.children.values())}
    for name in report.sessions:
        if name not in own:
            raise TrajectoryError(
                "agent_reply",
                f"{who} reported the session {name:.{_NAME_CHARS}}, which it did not open under "
                "its base URL: the turns there are not part of this trajectory",
            )
    trajectory = session.trajectory
    trajectory.metrics |= report.metrics
    if report.reward is None:
        return
    if session.agent_rewards:
        trajectory.reward = report.reward
    else:
        trajectory.events["agent_reward_ignored"] += 1

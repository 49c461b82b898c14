"""The report of an agent that answers when it is done: sessions, reward, metrics, error."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from turnwise.chat.session import Session
from turnwise.core.untrusted import AnswerError, Number, checked
from turnwise.errors import TrajectoryError
from turnwise.trajectory import MAX_REWARD

_METRICS = 100
"""Maximum number of metrics in a report."""
_NAME_CHARS = 100
_Name = Annotated[str, Field(max_length=_NAME_CHARS)]
_ERROR_CHARS = 500
_SESSIONS = 1_001
"""Maximum number of sessions in a report: a rollout's own, and those under it."""


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


class _Report(TypedDict, total=False):
    """The report as it is sent; keys other than these are ignored."""

    reward: Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)] | None
    metrics: Annotated[dict[_Name, Number], Field(max_length=_METRICS)] | None
    sessions: Annotated[list[str], Field(max_length=_SESSIONS)] | None
    error: object


_REPORT = TypeAdapter(_Report | None)


def read_report(value: object, who: str) -> AgentReport:
    """Read a report; keys other than its fields are ignored, and all are optional.

    Args:
        who: The agent in messages.

    Raises:
        TrajectoryError: `agent_reply`, naming the key that cannot be used.
    """
    try:
        given = checked(value, _REPORT) or {}
    except AnswerError as error:
        raise TrajectoryError("agent_reply", f"{who} {error}") from None
    return AgentReport(
        given.get("reward"),
        given.get("metrics") or {},
        given.get("sessions") or [],
        str(given.get("error") or "")[:_ERROR_CHARS],
    )


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

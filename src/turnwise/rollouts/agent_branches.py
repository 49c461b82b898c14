"""The choice of the branches of an agent's session that are trained: `rollout.agent_branches`.

Agents also ask the model for things outside the task, such as a title or a summary. With the rule
`all`, the branch of such a request is trained too, with the task's reward.
"""

from dataclasses import replace

from turnwise.core.optional import load_object
from turnwise.core.user_code import call_user_code, user_errors
from turnwise.trajectory import Branch, Trajectory

LEFT_OUT = "left_out_branch"
"""`Turn.untrained` of turns that are not on a trained branch, and the event that counts branches
that are not trained."""


async def leave_out_branches(trajectory: Trajectory, rule: str, seconds: float) -> None:
    """Exclude a turn from training if the rule keeps none of the branches that contain it.

    Raises:
        TrajectoryError: when the user's function fails, or does not return a bool for each branch.
    """
    if rule == "all":
        return
    branches = trajectory.branches()
    if rule == "longest":
        sampled = [sum(branch.response_mask) for branch in branches]
        keeps = [index == sampled.index(max(sampled)) for index in range(len(branches))]
    else:
        async with user_errors("agent_branches", f"rollout.agent_branches, {rule}: "):
            keeps = await call_user_code(
                lambda: _kept(rule, trajectory, branches),
                name=rule,
                seconds=seconds,
                key="rollout.environment_timeout",
            )
    trained = [branch for branch, keep in zip(branches, keeps, strict=True) if keep]
    kept = {turn for branch in trained for turn in branch.turns}
    for index, turn in enumerate(trajectory.turns):
        if index not in kept and not turn.untrained:
            trajectory.turns[index] = replace(turn, untrained=LEFT_OUT)
    if left := len(branches) - len(trained):
        trajectory.events[LEFT_OUT] += left


def _kept(rule: str, trajectory: Trajectory, branches: list[Branch]) -> list[bool]:
    answer = load_object(rule, "rollout.agent_branches")(trajectory, branches)
    keeps = list(answer)
    if len(keeps) != len(branches) or not all(isinstance(keep, bool) for keep in keeps):
        raise ValueError(f"it must return a bool for each of {len(branches)} branches: {answer!r}")
    return keeps

"""From a step's rewards to what each trajectory's reward says of its tokens."""

from collections.abc import Sequence

from turnwise.config import DrGrpo, Gae, Grpo, ReinforcePP, Rloo
from turnwise.training.algorithms import dr_grpo, grpo, reinforce_pp, rloo


def group_advantages(
    config: Grpo | DrGrpo | Rloo | ReinforcePP | Gae, rewards: Sequence[Sequence[float]]
) -> list[list[float] | None]:
    """The advantage of each trajectory of each group of one step.

    All are 0 in a group without signal, which counts in the batch's mean all the same. None stands
    for a group of fewer than two, which has nothing to be compared with and is not trained. For
    `gae` these are the rewards themselves: `gae.gae` makes advantages of them, token by token.
    """
    match config:
        case Grpo():
            return [grpo.advantages(group) for group in rewards]
        case DrGrpo():
            return [dr_grpo.advantages(group) for group in rewards]
        case Rloo():
            return [rloo.advantages(group) for group in rewards]
        case ReinforcePP():
            return reinforce_pp.advantages(rewards, config)
        case Gae():
            return [list(group) for group in rewards]

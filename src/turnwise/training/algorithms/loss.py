"""From per-token tensors to per-token losses: the one that the configuration names."""

from turnwise.config import Cispo, Dpo, Gspo, PpoClip
from turnwise.training.algorithms import cispo, dpo, gspo, ppo_clip
from turnwise.training.tokens import TokenLoss, Tokens


def token_loss(config: PpoClip | Gspo | Cispo | Dpo, tokens: Tokens) -> TokenLoss:
    """The losses of the `N` trained tokens of a micro-batch, before any reduction."""
    match config:
        case PpoClip():
            return ppo_clip.loss(tokens, config)
        case Gspo():
            return gspo.loss(tokens, config)
        case Cispo():
            return cispo.loss(tokens, config)
        case Dpo():
            return dpo.loss(tokens, config)

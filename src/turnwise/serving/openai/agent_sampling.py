"""Sampling of a training session's turns whose requests have parameters that differ from
`sampling`.

A turn may have its own temperature, top-p, top-k, min-p and grammar. The trainer scores its tokens
under the same values, and among the ids that the grammar allowed, so the tokens are trained
exactly. `rollout.agent_sampling` decides about parameters that the trainer cannot repeat, such as a
penalty. Training sessions that clients open themselves have an external trainer, so they refuse all
parameters that differ from the run's own sampling. `AgentSampling.decide` is the only place that
decides.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from turnwise.chat.prompts import RefusedParameter
from turnwise.chat.session import AS_CONFIGURED, Session, TurnSampling
from turnwise.config import SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.engine.logits_processors import written
from turnwise.trajectory import Distribution

logger = logging.getLogger(__name__)

DISTRIBUTION = Distribution._fields
STRICT = "strict tools"
GRAMMARS = ("response_format", "text", "structured_outputs", "tool_choice", STRICT)
"""Parameters that restrict what is sampled by a grammar."""
EXACT = (*DISTRIBUTION, *GRAMMARS, "ignore_eos")
"""Parameters under which tokens can be trained as they were sampled."""
_CALLS = "parallel_tool_calls"
_GREEDY = 0.01
"""Temperature below which engines sample greedily, or at this temperature instead."""
_ADVICE = {
    "response_format": "a grammar changes what is sampled; leave it out",
    "text": "a grammar changes what is sampled; leave it out",
    STRICT: "a grammar changes what is sampled; leave `strict` out",
    _CALLS: "a grammar changes what is sampled; leave it out",
    "tool_choice": "a forced call changes what is sampled; use auto",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The consequence of a request's own sampling parameters."""

    turn: TurnSampling = AS_CONFIGURED
    replaced: frozenset[str] = frozenset()
    """Parameters that the session's `sampling` replaces."""


class AgentSampling:
    """Decides for each request, and logs once each parameter that the run's own sampling replaces.

    Args:
        exact: Whether a trainer can score a turn by its own distribution.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._named: set[str] = set()

    def decide(self, asked: Mapping[str, object], session: Session) -> Decision:
        """Decide about parameters whose values differ from the session's `sampling`.

        Raises:
            RefusedParameter: when sampling is impossible with a value, or `rollout.agent_sampling`
                refuses it.
        """
        own, rule = session.sampling, session.agent_sampling
        if own is None or not asked:
            return Decision()
        if rule is None:
            _refuse(next(iter(asked)), asked, own)
        wanted = _drawn(own, asked)
        if wanted.mistake:
            raise RefusedParameter(next(iter(asked)), wanted.mistake)
        if rule == "any":
            drawn_as = wanted if asked.keys() & set(DISTRIBUTION) else None
            return Decision(TurnSampling(drawn_as, "", ("own_sampling",)))
        inexact = {name for name in asked if name not in (*EXACT, _CALLS)}
        drawn, grammars = asked.keys() & set(DISTRIBUTION), asked.keys() & set(GRAMMARS)
        if not self._exact:
            inexact |= drawn | grammars
        if written(own) or own.logits_processor_args:
            inexact |= grammars  # vLLM fails a request if its processor breaks its grammar
        elif "temperature" in asked and wanted.temperature < _GREEDY:
            inexact.add("temperature")
        if rule == "override_all":
            inexact = {*asked}
        elif rule == "refuse" and (wrong := inexact | (asked.keys() & {_CALLS})):
            _refuse(next(name for name in asked if name in wrong), asked, own)
        elif rule == "context" and inexact:
            if "use_beam_search" in inexact:  # its answers are not turns
                _refuse("use_beam_search", asked, own)
            events = tuple(f"context_{_word(name)}" for name in sorted(inexact))
            return Decision(
                TurnSampling(wanted if drawn else None, "agent_sampling", events),
                frozenset(asked.keys() & {_CALLS}),
            )
        replaced = inexact | (asked.keys() & {_CALLS})
        self._tell(replaced, rule)
        kept = {name: asked[name] for name in drawn - replaced}
        distribution = None
        if kept and (kept.get("temperature", own.temperature) or own.temperature):
            distribution = _drawn(own, kept)
        events = tuple(f"override_{_word(name)}" for name in sorted(replaced))
        events += ("own_sampling",) if distribution is not None else ()
        events += ("own_grammar",) if grammars - replaced else ()
        return Decision(TurnSampling(distribution, "", events), frozenset(replaced))

    def _tell(self, names: set[str], rule: str) -> None:
        for name in sorted(names - self._named):
            self._named.add(name)
            why = "is left out" if name == _CALLS else "is replaced by the run's own `sampling`"
            logger.warning(
                "an agent's requests set %s, which %s (rollout.agent_sampling: %s); the event "
                "override_%s counts them",
                *(name, why, rule, _word(name)),
            )


def _drawn(own: SamplingConfig, asked: Mapping[str, object]) -> Distribution:
    """Return the sampling distribution of a request: its own values, and the values of `own` for
    the other parameters."""
    values: JsonObject = {name: asked.get(name, getattr(own, name)) for name in DISTRIBUTION}
    return Distribution(**values)


def _word(name: str) -> str:
    return name.replace(" ", "_")


def _refuse(name: str, asked: Mapping[str, object], own: SamplingConfig) -> NoReturn:
    advice = _ADVICE.get(name, "")
    if not advice:
        value = getattr(own, name, None)
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        advice = "leave it out" + ("" if value in (None, [], {}) else f", or set it to {shown}")
    raise RefusedParameter(
        "tools" if name == STRICT else name,
        f"{name}={asked[name]!r} would make the tokens of this training session off-policy: "
        f"{advice}",
    )

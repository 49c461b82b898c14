"""TextArena's games: for one player, against a scripted opponent, or by self-play.

The package's games use Python's global random generator. Here each game has its own random state,
so that a seed always gives the same game, even if other games run at the same time.
"""

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from turnwise.compat.package import adapter, seed_rows
from turnwise.core.optional import Foreign, required
from turnwise.errors import InputError
from turnwise.rollouts.environment import Environment, Move, Rewards, load_object
from turnwise.rollouts.problems import Row
from turnwise.trajectory import Message, Trajectory

_package = partial(required, "textarena", "textarena", "environment: textarena")

Opponent = Callable[[str], str]
"""A callable that returns a player's action for an observation, such as a TextArena agent."""
_QUOTED_ACTION = re.compile(r"'(\[[^\[\]]+\])'")
_randomness = threading.Lock()
"""Held while a game's state replaces the state of Python's global random generator."""


class TextArena(Environment):
    """A game of TextArena: observations are user messages, answers are actions.

    With several players and no opponent, the policy plays them all (`rollout.loop: self_play`).
    The reward is the game's own; a game that `rollout.max_turns` cuts off earns 0.

    Args:
        row: `seed` of the game.
        game: Name of the game; "" uses the class attribute.
        players: Number of players.
        opponent: Plays for all players except the policy: package.module:function(observation) ->
            action, or `random`. `random` picks one of the quoted actions in the last line of the
            observation that has any.
        seat: Index of the policy's player, from 0, if there is an opponent.
        rows: Number of rows that the method `rows` returns.
        arguments: Arguments of the game.

    Example:
        class Guess(TextArena):
            game = "GuessTheNumber-v0"
    """

    game: ClassVar[str] = ""

    def __init__(
        self,
        row: Row,
        game: str = "",
        *,
        players: int = 1,
        opponent: str | None = None,
        seat: int = 0,
        rows: int = 1000,
        **arguments: object,
    ) -> None:
        self._game, self._seed, self._arguments = game or self.game, row.get("seed", 0), arguments
        self._count, self._seat, self._rewards = players, seat, dict[int, float]()
        self._opponent: Opponent | None = None
        if opponent == "random":
            generator, offered = random.Random(self._seed), [""]

            def choose(observation: str) -> str:
                nonlocal offered
                lines = map(_QUOTED_ACTION.findall, reversed(observation.splitlines()))
                offered = next(filter(None, lines), offered)
                return generator.choice(offered)

            self._opponent = choose
        elif opponent is not None:
            self._opponent = load_object(opponent, "environment_args.opponent")
        self._plays_all = players > 1 and opponent is None
        self._random: tuple[object, ...] | None = None
        self.env: Foreign = None
        """TextArena's environment; None before `setup`."""

    @classmethod
    def rows(cls, split: str, *, rows: int = 1000) -> Sequence[Row]:
        return seed_rows(split, rows)

    def setup(self) -> None:
        with self._own_randomness():
            try:
                env = _without_history(_package().make(self._game, **self._arguments))
                env.reset(num_players=self._count, seed=self._seed)
            except AssertionError as error:
                raise InputError(
                    f"textarena:{self._game}: {error}; set environment_args.players"
                ) from error
        self.env = env
        if not self._plays_all:
            opening = self._read(self._seat)
            self._let_opponents_act()
            self.problem = "\n".join(filter(None, (opening, self._read(self._seat))))
            return
        first = env.state.current_player_id
        order = [first, *(player for player in range(self._count) if player != first)]
        self.players = {_name(player): self._read(player) for player in order}

    def step(self, message: Message) -> str | Move | None:
        self._act(str(message.get("content") or ""))
        if self._plays_all:
            if self.done:
                return None
            player = self.env.state.current_player_id
            return {_name(player): self._read(player)}
        self._let_opponents_act()
        return None if self.done else self._read(self._seat)

    def reward(self, trajectory: Trajectory) -> Rewards:
        if self._plays_all:
            given = {_name(player): reward for player, reward in self._rewards.items()}
            return Rewards(players={name: given.get(name, 0.0) for name in self.players})
        return Rewards(self._rewards.get(self._seat, 0.0))

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        """Return whether the game ended, and the fraction of players who broke its rules."""
        info = self.env.state.game_info.values()
        broken = sum(bool(player.get("invalid_move")) for player in info)
        return {"game_ended": float(self.done), "game_invalid_moves": broken / self._count}

    def _act(self, action: str) -> None:
        if self.done:  # an opponent may end the game before the first answer
            return
        with self._own_randomness():
            self.done, _ = self.env.step(action=action)
            if self.done:
                rewards, _ = self.env.close()
                self._rewards = {int(who): float(number) for who, number in (rewards or {}).items()}

    def _let_opponents_act(self) -> None:
        while self._opponent is not None and not self.done:
            player = self.env.state.current_player_id
            if player == self._seat:
                return
            self._act(self._opponent(self._read(player)))

    def _read(self, player: int) -> str:
        """Return the observations that a player has not read yet, without the player's own actions
        and with only the last game board."""
        state, package = self.env.state, _package()
        new, state.observations[player] = state.observations[player], []
        kinds = package.ObservationType
        last = max((i for i, one in enumerate(new) if one[2] == kinds.GAME_BOARD), default=-1)
        lines = list[str]()
        for number, (sender, text, kind) in enumerate(new):
            if (sender == player and kind == kinds.PLAYER_ACTION) or (
                kind == kinds.GAME_BOARD and number != last
            ):
                continue
            who = state.role_mapping.get(sender, _name(sender))
            lines.append(text if sender == package.GAME_ID else f"[{who}] {text}")
        return "\n".join(lines)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Use the game's state in Python's global random generator during a `with` block."""
        with _randomness:
            others = random.getstate()
            if self._random is None:
                random.seed(self._seed)
            else:
                random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(others)


at = adapter("textarena", TextArena, "game", lambda: _package().envs.registration.ENV_REGISTRY)


def _name(player: int) -> str:
    return f"Player {player}"


def _without_history(env: Foreign) -> Foreign:
    """Return a game without the wrappers that repeat earlier observations."""
    package = _package()
    if not isinstance(env, package.Wrapper):
        return env
    inner = _without_history(env.env)
    if isinstance(env, package.ObservationWrapper):
        return inner
    env.env = inner
    return env

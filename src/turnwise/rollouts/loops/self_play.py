"""Games whose sides are all played by the policy, each from its own view of the game.

Every player has a conversation of its own, hence a branch of the trajectory; the environment's
`step` says who moves next, and what this player reads before. All players' tokens are trained, each
with its player's reward, which advantages compare with the same player's in the group.
"""

from dataclasses import dataclass, field

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.loops.tool_calling import answer_calls, assistant_message
from turnwise.trajectory import Message


@dataclass(slots=True)
class _Seat:
    """One player's conversation."""

    messages: list[Message]
    prompt: list[int] = field(default_factory=list)
    """Prompt of the player's last turn; empty before the first."""
    completion: list[int] = field(default_factory=list)

    async def read(
        self, context: RolloutContext, new: list[Message], tools: list[JsonObject]
    ) -> list[int]:
        """Return the prompt of the player's next turn, after new messages."""
        self.messages = [*self.messages, *new]
        if self.prompt:
            self.prompt = await context.next_prompt(
                self.prompt, self.completion, new, tools=tools, conversation=self.messages
            )
        else:
            self.prompt = await context.first_prompt(self.messages, tools=tools)
        return self.prompt


class SelfPlayLoop:
    """Plays `environment.players` against or with each other, at most `rollout.max_turns` turns.

    A turn that calls tools is followed by another of the same player; any other turn goes to the
    environment's `step`.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Play one game."""
        players = context.episode.players
        if not players:
            raise InputError(
                f"loop self_play: {context.episode.name}.players must give the opening messages of "
                "each player"
            )
        trajectory, tools = context.trajectory, context.toolbox.schemas
        seats = {name: _Seat([dict(m) for m in opening]) for name, opening in players.items()}
        player, new = next(iter(seats)), list[Message]()
        for turn in range(context.rollout.max_turns):
            seat = seats[player]
            prompt = await seat.read(context, new, tools)
            completion = await context.sample(prompt, messages=seat.messages)
            if completion is None:
                return
            trajectory.turn_players.append(player)
            seat.completion = completion.token_ids
            parsed = context.tool_parser.parse(context.template.decode(completion.token_ids), tools)
            answer = assistant_message(parsed, turn)
            seat.messages = [*seat.messages, answer]
            trajectory.messages += [{**message, "to": player} for message in new]
            trajectory.messages.append({**answer, "name": player})
            if completion.finish_reason == "length":
                trajectory.status = "length"
                return
            if parsed.calls or parsed.malformed:
                new = await answer_calls(parsed, context, turn)
                if not await context.episode.done():
                    continue
                trajectory.messages += [{**message, "to": player} for message in new]
                trajectory.status = "completed"
                return
            move = await context.move({**answer, "name": player})
            if move is None:
                trajectory.status = "completed"
                return
            player, new = move
        trajectory.status = "max_turns"

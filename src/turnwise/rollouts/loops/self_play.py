"""Games whose sides are all played by the policy, each from its own view of the game.

Every player has a conversation of its own, hence a branch of the trajectory; the environment's
`step` says who moves next, and what this player reads before. All players' tokens are trained, each
with its player's reward, which advantages compare with the same player's in the group.
"""

from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.loops.tool_calling import answer_calls, assistant_message
from turnwise.trajectory import Message


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
        said = {name: [dict(message) for message in opening] for name, opening in players.items()}
        last: dict[str, tuple[list[int], list[int]]] = {}  # prompt and completion of a player
        player, new = next(iter(players)), list[Message]()
        for turn in range(context.rollout.max_turns):
            read = said[player] = [*said[player], *new]
            if player in last:
                prompt = await context.next_prompt(
                    *last[player], new, tools=tools, conversation=read
                )
            else:
                prompt = await context.first_prompt(read, tools=tools)
            completion = await context.sample(prompt, messages=read)
            if completion is None:
                return
            trajectory.turn_players.append(player)
            last[player] = prompt, completion.token_ids
            parsed = context.tool_parser.parse(context.template.decode(completion.token_ids), tools)
            answer = assistant_message(parsed, turn)
            said[player] = [*read, answer]
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
            with context.timed("environment"):
                move = await context.episode.move({**answer, "name": player})
            if move is None:
                trajectory.status = "completed"
                return
            player, new = move
        trajectory.status = "max_turns"

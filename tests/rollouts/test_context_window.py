"""Conversations that are shortened: what the model sees, what is trained, and the branch's reason.

The engine is a rule that reads its prompt's text and nothing else, so what it answers shows what
the prompt held.
"""

import io
import json
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from rich.console import Console

import turnwise
from turnwise.config import Config, SamplingConfig, parse_config
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import InputError
from turnwise.observe.conversations import Overview, show
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.context_window import COMPACTED, LEFT_OUT, REQUEST, SUMMARY
from turnwise.rollouts.environment import SUMMARISED
from turnwise.training.samples import make_samples
from turnwise.trajectory import ChatTemplate, Message, Trajectory, audit
from turnwise.trajectory.prefix import without_reasoning
from turnwise.viewer.run_files import summarise

FILL = " and so on" * 60
CODE = "4821"
Say = Callable[[str], str]


class Drawer:
    """The code can be looked up once; what was looked up before is a note of any length."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": "Look up the code, then say it."}]
        self.tools = [self.look, self.note]
        self.row, self.looks = row, 0

    def look(self) -> str:
        """Look into the drawer."""
        self.looks += 1
        if self.looks > 1:
            return "It is empty."
        return f"The code is {CODE}.{self.row.get('fill', FILL)}"

    def note(self, number: int) -> str:
        """Read a note.

        Args:
            number: Its number.
        """
        return f"Note {number}.{self.row.get('note', FILL)}"

    def reward(self, trajectory: Trajectory) -> float:
        return float(CODE in trajectory.final_text)


class Rule:
    """An engine that says what a function of the prompt's text says."""

    def __init__(self, template: ChatTemplate, say: Say) -> None:
        self.template, self.say, self.prompts = template, say, list[str]()

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.prompts.append(self.template.decode_all(request.prompt))
        ids = self.template.encode(self.say(self.prompts[-1]) + "<|im_end|>")
        ids = ids[: request.sampling.max_tokens]
        ended = ids[-1] == self.template.tokenizer.eos_token_id
        count = len(ids)
        yield Chunk(ids, [-0.25] * count, [0] * count, "stop" if ended else "length")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reader(summary: Callable[[str], str]) -> Say:
    """Looks up the code once, and knows later only what its summary says."""

    def say(prompt: str) -> str:
        asked = prompt.rpartition("<|im_start|>user")[2]
        if REQUEST in asked:
            return summary(prompt)
        _, summarised, known = prompt.partition("Summary of the conversation")
        if not summarised:
            return call("look")
        found = re.search(r"\d{4}", known)
        return f"It is {found[0]}." if found else "I do not know."

    return say


def careful(prompt: str) -> str:
    return f"The code is {''.join(re.findall(r'[0-9]{4}', prompt))}."


def careless(prompt: str) -> str:
    return "I have looked into the drawer."


def turns_of(script: list[str], summary: str = "I go on.") -> Say:
    """Says the texts in their order; a summary where one is asked for."""
    left = list(script)

    def say(prompt: str) -> str:
        return summary if REQUEST in prompt.rpartition("<|im_start|>user")[2] else left.pop(0)

    return say


@pytest.fixture
def run(make_config: Callable[..., Config], tokenizer: Any, template: ChatTemplate) -> Any:
    async def play(
        say: Say,
        row: dict[str, Any] | None = None,
        *,
        compact: str | None = "summarise",
        limit: int | None = 300,
        n: int = 1,
        max_length: int = 2048,
        max_tokens: int = 64,
        **rollout: Any,
    ) -> tuple[Group, Rule]:
        config = make_config(
            rollout={"context": {"compact": compact, "limit": limit}, **rollout},
            model={**make_config().model.model_dump(), "max_length": max_length},
        )
        engine = Rule(template, say)
        sampling = SamplingConfig(n=n, max_tokens=max_tokens)
        runner = Runner(config, tokenizer, Drawer)
        return await runner.run_group(engine, Problem("rows:1", row or {}), sampling, "t"), engine

    return play


async def test_only_a_model_whose_summary_holds_the_code_can_answer(run: Any) -> None:
    rewards = {}
    for summary in (careful, careless):
        group, engine = await run(reader(summary))
        (trajectory,) = group.trajectories
        rewards[summary] = trajectory.reward
        last = engine.prompts[-1]
        assert "Look up the code, then say it." in last
        assert FILL not in last
        assert (CODE in last) == (summary is careful)
    assert rewards == {careful: 1.0, careless: 0.0}
    group, _ = await run(reader(careful), compact=None, limit=None, max_turns=3)
    assert [t.reward for t in group.trajectories] == [0.0], "without a summary it looks for ever"


async def test_a_branch_begins_after_a_summary_sampled_in_its_context(
    run: Any, template: ChatTemplate
) -> None:
    group, engine = await run(reader(careful))
    (trajectory,) = group.trajectories
    assert (trajectory.status, len(trajectory.turns)) == ("completed", 3)
    called, summary, answer = trajectory.turns
    assert (called.fork_reason, summary.fork_reason, answer.fork_reason) == (None, None, COMPACTED)
    assert summary.parent == 0
    assert summary.prefix_length == called.path_length, "it continues the branch before"
    assert template.decode(summary.completion_token_ids) == f"The code is {CODE}."
    shown = SUMMARY.format(f"The code is {CODE}.")
    assert engine.prompts[-1].count(shown) == 1
    assert trajectory.events == {"tool_call": 1, COMPACTED: 1, SUMMARISED: 1}
    # A summary is no answer of the model: a reward that looks for answers must not find it.
    assert [m["role"] for m in trajectory.messages] == [
        *("user", "assistant", "tool", "user", "assistant")
    ]
    assert trajectory.messages[3]["content"] == shown
    assert trajectory.final_text == f"It is {CODE}."
    for turn, content in ((summary, REQUEST), (answer, shown)):
        assert turn.messages[-1]["content"].endswith(content)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


async def test_each_token_of_a_compacted_trajectory_is_trained_once(
    run: Any, make_config: Callable[..., Config]
) -> None:
    good, bad = [(await run(reader(summary)))[0] for summary in (careful, careless)]
    (first,), (second,) = good.trajectories, bad.trajectories
    second.sample_index = 1
    group = Group("rows:1", [first, second])
    made = make_samples([group], make_config(), 0)
    assert made.report.violations == 0, made.report.first_violation
    sampled = first.sampled_tokens + second.sampled_tokens
    assert made.report.tokens_trained == made.report.tokens_exact == sampled
    assert made.report.forked == {COMPACTED: 2}
    assert len(made.samples) == 4
    assert len({sample.trajectory for sample in made.samples}) == 2, "each weighs as one"
    for trajectory, sign in ((first, 1), (second, -1)):
        own = [s for s in made.samples if made.origins[id(s)] is trajectory]
        by_turn = {
            int(turn): float(advantage)
            for sample in own
            for turn, advantage in zip(sample.calls_T, sample.advantages_T, strict=True)
            if turn >= 0
        }
        assert sorted(by_turn) == [0, 1, 2], "the summary, turn 1, is trained too"
        assert {round(sign * advantage) for advantage in by_turn.values()} == {1}


@pytest.mark.parametrize("by_turn", [False, True])
async def test_turn_rewards_need_a_number_for_each_summary_too(
    run: Any, monkeypatch: pytest.MonkeyPatch, by_turn: bool
) -> None:
    def reward(self: Drawer, trajectory: Trajectory) -> turnwise.Rewards:
        return turnwise.Rewards(turns=[0.25, 0.0, 0.5] if by_turn else [0.25, 0.5])

    monkeypatch.setattr(Drawer, "reward", reward)
    group, _ = await run(reader(careful))
    if by_turn:
        assert group.trajectories[0].turn_rewards == [0.25, 0.0, 0.5]
        return
    assert group.dropped == {"reward_error": 1}
    assert "gave 2 turn rewards for 3 turns, 1 of them summaries: give one for each" in str(
        group.causes
    )


async def test_the_reason_and_the_number_are_shown_and_counted(
    run: Any, make_config: Callable[..., Config]
) -> None:
    group, _ = await run(reader(careful), n=2)
    console = Console(file=io.StringIO(), width=200)
    show(console, Overview.of(group.trajectories))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "branches: compacted 2" in printed
    assert "compacted 2" in printed.partition("events: ")[2]
    assert "2 branches: compacted" in printed
    listed = [summarise(json.loads(trajectory.to_json())) for trajectory in group.trajectories]
    assert [each["forks"] for each in listed] == [{COMPACTED: 1}] * 2, "what the viewer filters by"
    metrics = StepMetrics()
    metrics.add_trajectories(group.trajectories)
    metrics.add_samples(make_samples([group], make_config(), 0))
    assert metrics.events == {COMPACTED: 2, SUMMARISED: 2, "tool_call": 2}
    assert metrics.forked == {COMPACTED: 2}


async def test_earlier_results_are_dropped_and_sampled_ids_are_kept(
    run: Any, template: ChatTemplate
) -> None:
    said = [*(call("note", number=n) for n in range(1, 6)), "done"]
    group, engine = await run(turns_of(said), compact="drop_results", limit=600)
    (trajectory,) = group.trajectories
    assert audit(trajectory).violations == 0
    assert trajectory.final_text == "done"
    assert len(trajectory.turns) == 6, "nothing is sampled for it"
    forked = [i for i, turn in enumerate(trajectory.turns) if turn.fork_reason == COMPACTED]
    assert len(forked) == trajectory.events[COMPACTED] > 0
    at = forked[0]
    shown = engine.prompts[at]
    assert shown.count(LEFT_OUT) == at - 1
    assert FILL in shown, "the latest result stays"
    branch = next(b for b in trajectory.branches() if b.leaf >= at)
    whole = template.decode_all(branch.token_ids)
    for turn in trajectory.turns[:at]:
        assert template.decode_all(turn.completion_token_ids) in whole
    results = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert results == [f"Note {n}.{FILL}" for n in range(1, 6)], "the record keeps them all"


async def test_nothing_to_drop_begins_no_branch(run: Any) -> None:
    said = [call("note", number=1), "done"]
    group, _ = await run(turns_of(said), compact="drop_results", limit=20)
    (trajectory,) = group.trajectories
    assert len(trajectory.branches()) == 1
    assert COMPACTED not in trajectory.events


async def test_results_without_room_for_a_summary_follow_it(run: Any) -> None:
    said = [call("note", number=1), call("look"), f"It is {CODE}."]
    group, engine = await run(turns_of(said), {"fill": FILL * 2}, max_length=900, limit=600)
    (trajectory,) = group.trajectories
    assert audit(trajectory).violations == 0
    assert trajectory.status == "completed", engine.prompts
    asked = next(prompt for prompt in engine.prompts if REQUEST in prompt)
    assert (FILL in asked, CODE in asked) == (True, False)
    after = engine.prompts[-1]
    assert "I go on." in after
    assert CODE in after
    assert "Note 1." not in after
    reasons = [turn.fork_reason for turn in trajectory.turns]
    assert reasons == [None, None, "branched", COMPACTED]


async def test_a_summary_that_is_cut_off_ends_the_trajectory(run: Any) -> None:
    say = turns_of([call("note", number=1)], summary="I " * 200)
    group, _ = await run(say)
    (trajectory,) = group.trajectories
    assert (trajectory.status, len(trajectory.turns)) == ("length", 2)
    assert trajectory.turns[1].finish_reason == "length"
    assert audit(trajectory).violations == 0


async def test_a_summary_is_a_turn_and_the_last_turn_is_for_the_answer(run: Any) -> None:
    said = [call("note", number=1), call("note", number=2), "done"]
    (third,) = (await run(turns_of(said), max_turns=3))[0].trajectories
    assert (third.status, third.events[COMPACTED], len(third.turns)) == ("max_turns", 1, 3)
    (second,) = (await run(turns_of(said), max_turns=2))[0].trajectories
    assert (second.status, second.events[COMPACTED], len(second.turns)) == ("max_turns", 0, 2)


async def test_without_a_limit_two_turns_have_room(run: Any) -> None:
    """The context is half of model.max_length at least, however long a turn may be."""
    said = [call("note", number=1), "done"]
    for max_tokens, compacted in ((64, 0), (240, 1)):
        group, _ = await run(turns_of(said), limit=None, max_length=700, max_tokens=max_tokens)
        (trajectory,) = group.trajectories
        assert trajectory.events[COMPACTED] == compacted, trajectory.turns[-1].path_length


async def shorten(messages: list[Message], row: dict[str, Any]) -> object:
    """Keep the problem, and a word about the rest; or do what the row says."""
    if "returns" in row:
        return row["returns"]
    if "raises" in row:
        raise ValueError(row["raises"])
    messages[0]["content"] += f" You have read {len(messages) // 2} of the notes."
    return messages[:1]


async def test_a_function_may_shorten_the_conversation(run: Any) -> None:
    said = [call("note", number=1), "done"]
    group, engine = await run(turns_of(said), compact=f"{__name__}:shorten")
    (trajectory,) = group.trajectories
    assert audit(trajectory).violations == 0
    assert [turn.fork_reason for turn in trajectory.turns] == [None, COMPACTED]
    assert "You have read 1 of the notes." in engine.prompts[-1]
    assert "You have read" not in str(trajectory.messages), "it gets a copy"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"raises": "no idea"}, f"rollout.context.compact {__name__}:shorten: ValueError: no idea"),
        ({"returns": 7}, "must be a string, or a list of messages"),
        ({"returns": []}, "must be a string, or a list of messages"),
    ],
)
async def test_a_function_that_fails_costs_its_trajectory(
    run: Any, row: dict[str, Any], message: str
) -> None:
    say = turns_of([call("note", number=1)] * 2)
    group, _ = await run(say, row, compact=f"{__name__}:shorten", n=2)
    assert dict(group.dropped) == {"compaction_error": 2}
    assert message in group.causes["compaction_error"]


@pytest.mark.parametrize(
    ("context", "rollout", "message"),
    [
        ({"compact": "sumarise"}, {}, "drop_results, summarise, or package.module:function"),
        ({"limit": 100}, {}, "limit does nothing without compact"),
        ({"compact": "summarise", "limit": 4096}, {}, "must be below model.max_length 4096"),
        ({"compact": "summarise"}, {"loop": "interleaved"}, "applies to loop tool_calling"),
        ({"compact": "summarise"}, {"loop": "mine:Loop"}, "applies to loop tool_calling"),
    ],
)
def test_a_mistake_names_the_key(
    context: dict[str, Any], rollout: dict[str, Any], message: str
) -> None:
    tree = {"environment": "a:B", "model": {"path": "m", "max_length": 4096}, "data": {"path": "d"}}
    with pytest.raises(InputError, match=re.escape(message)):
        parse_config({**tree, "rollout": {"context": context, **rollout}})


def test_a_function_that_is_not_there_is_named(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    config = make_config(rollout={"context": {"compact": "tests.conftest:no_such"}})
    with pytest.raises(InputError, match=r"context\.compact: tests\.conftest has no no_such"):
        Runner(config, tokenizer, Drawer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>4 or 5?</think>\n\nThe code is 4.", "The code is 4."),
        ("4 or 5?</think>The code is 4.", "The code is 4."),
        ("The code is 4.", "The code is 4."),
        ("Well. <think>4 or 5?</think> The code is 4.", "Well.  The code is 4."),
        ("4?</think>Hm. <think>5?</think>The code is 4.", "Hm. The code is 4."),
        ("The code is 4. <think>Or is it", "The code is 4."),
        ("<think>4 or", ""),
        ("[THINK]4?[/THINK]The code is 4.", "The code is 4."),
        ("4?</seed:think>The code is 4.", "The code is 4."),
        ("<|channel|>analysis<|message|>4?<|end|>The code is 4.<|end|>", "The code is 4.<|end|>"),
    ],
)
def test_reasoning_is_left_out(text: str, said: str) -> None:
    """That of a summary, of a judge, and of either side of a simulated conversation."""
    assert without_reasoning(text) == said

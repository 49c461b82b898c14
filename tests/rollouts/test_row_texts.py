"""The row that a trajectory keeps as texts, and who shows it beside the reward."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.rollouts.test_episode import Talking
from turnwise.config import Config, SamplingConfig
from turnwise.observe.conversations import conversation
from turnwise.rollouts import Problem, Runner
from turnwise.rollouts.row_texts import row_texts
from turnwise.trajectory import Message, Trajectory

ASKED = "Which number follows three hundred and ninety-nine?"
SAID: list[Message] = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": "The number that follows it is four hundred and one."},
]


class Counting:
    def __init__(self, row: dict[str, Any]) -> None:
        self.problem, self.row = row["question"], row

    def reward(self, trajectory: Trajectory) -> float:
        assert trajectory.row == {}  # it is for people, and comes last
        return float(trajectory.final_text == str(self.row["answer"]))


def test_what_the_messages_say_is_left_out() -> None:
    row = {"question": ASKED, "prompt": SAID[:2], "answer": 400, "hint": "Count.", "note": None}
    assert row_texts(row, SAID) == {"answer": "400", "hint": "Count."}


def test_what_the_model_said_is_not_left_out() -> None:
    row = {"wrong": SAID[2]["content"]}
    assert row_texts(row, SAID) == row


def test_row_texts_cut_long_fields_and_name_objects_by_type() -> None:
    class Board:
        def __repr__(self) -> str:
            raise AssertionError("user code")

    loop: list[Any] = []
    loop.append(loop)
    row = {
        "text": "x" * 2000,
        "numbers": range,
        "board": [Board()],
        "keys": {(1, 2): 3},
        "loop": loop,
        "bytes": b"png",
        "half": "\ud800",
    }
    texts = row_texts(row, [])
    assert texts.pop("text") == "x" * 1000 + " ..."
    assert texts == {
        "numbers": '"[type]"',
        "board": '["[Board]"]',
        "keys": "[dict]",
        "loop": "[list]",
        "bytes": '"[bytes]"',
        "half": "\\ud800",
    }


def test_only_the_beginning_of_a_long_list_is_read() -> None:
    class Long(list[int]):
        read = 0

        def __iter__(self) -> Any:
            for number in super().__iter__():
                self.read += 1
                yield number

    numbers = Long(range(1_000_000))
    assert row_texts({"numbers": numbers}, [])["numbers"].endswith(" ...")
    assert numbers.read < 1000


async def test_trajectories_keep_the_row_and_show_it_beside_the_reward(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    config = make_config(environment=f"{__name__}:Counting", rollout={"max_turns": 1})
    runner = Runner(config, tokenizer, Counting)
    problem = Problem("rows.jsonl:1", {"question": ASKED, "answer": 400, "hint": "one\nmore \x1b"})
    group = await asyncio.wait_for(
        runner.run_group(Talking(vocab_size=256), problem, SamplingConfig(n=2, max_tokens=8), "t"),
        60,
    )
    assert len(group.trajectories) == 2
    for trajectory in group.trajectories:
        assert trajectory.row == {"answer": "400", "hint": "one\nmore \x1b"}
        assert Trajectory.from_json(trajectory.to_json()).row == trajectory.row
        lines = conversation(trajectory).plain.splitlines()
        assert lines[1:4] == [
            "row        answer: 400",
            "row        hint: one",
            r"           more \x1b",
        ]

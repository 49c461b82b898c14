"""Which call sampled each id of a batch sampler's answer: every one that any call sampled there."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Completion, Request
from turnwise.rollouts.batch_sampler import _Answer, _find_calls
from turnwise.rollouts.sampler_llm import SampledCall
from turnwise.trajectory import PlacedImage, Prompt, PromptLike
from turnwise.trajectory.images import Image

PROMPT = [1, 2, 3]


def call_of(prompt: PromptLike, sampled: list[int], name: str = "call") -> SampledCall:
    done = Completion(sampled, [-0.5] * len(sampled), [0] * len(sampled), "stop")
    request = Request(Prompt.of(prompt), SamplingConfig(), name)
    return SampledCall(request, done, (0.0, 1.0), [])


def context(*images: Image) -> Any:
    parts = [{"type": "image", "image": image} for image in images]
    return SimpleNamespace(
        problem=[{"role": "user", "content": parts}],
        template=SimpleNamespace(decode=str),
        trajectory=SimpleNamespace(events=Counter[str]()),
    )


def sampled_places(ids: list[int], calls: list[SampledCall]) -> set[int]:
    """The places that any call sampled after exactly the ids before them."""
    places = set[int]()
    for call in calls:
        start = len(call.prompt)
        for place, token in enumerate(call.completion.token_ids, start):
            if call.prompt != ids[:start] or ids[place : place + 1] != [token]:
                break
            places.add(place)
    return places


@given(
    seed=st.integers(0, 10_000),
    likely=st.sampled_from([0.0, 0.5, 0.8, 0.95]),
    candidates=st.integers(1, 4),
    length=st.integers(1, 8),
    kept=st.integers(1, 8),
)
def test_a_search_that_cuts_and_repeats_loses_no_sampled_token(
    seed: int, likely: float, candidates: int, length: int, kept: int
) -> None:
    draw = random.Random(seed)
    ids, calls = PROMPT, list[SampledCall]()
    for _ in range(4):
        tried = [
            call_of(
                ids, [9 if draw.random() < likely else draw.randint(10, 14) for _ in range(length)]
            )
            for _ in range(candidates)
        ]
        calls += tried
        ids = ids + draw.choice(tried).completion.token_ids[:kept]
    draw.shuffle(calls)
    answer = _Answer(ids, whole=True)
    _find_calls([answer], [context()], calls)
    trained = Counter[int]()
    for call, count in answer.calls:
        start = len(call.prompt)
        assert count > 0
        assert call.completion.token_ids[:count] == ids[start : start + count]
        trained.update(range(start, start + count))
    assert {*trained} == sampled_places(ids, calls) == {*range(len(PROMPT), len(ids))}
    assert {*trained.values()} == {1}


IMAGES = [Image.of(f"GIF89a-{name}".encode(), "gif", 28, 28) for name in "AB"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("rounds", [1, 2])
def test_equal_ids_with_other_images_are_another_problems(
    order: tuple[int, int], rounds: int
) -> None:
    """Whichever call ends first."""
    ids = [5, 9, 9, 6]
    calls = []
    for end in range(rounds):
        said = [*ids, *[7, 2, 8] * end]
        calls += [
            call_of(Prompt(said, [PlacedImage(IMAGES[number], 1, 2)]), [7, 2]) for number in order
        ]
    whole = [*ids, *[7, 2, 8] * (rounds - 1), 7, 2]
    answers = [_Answer([*whole], whole=True) for _ in IMAGES]
    _find_calls(answers, [context(image) for image in IMAGES], calls)
    for image, answer in zip(IMAGES, answers, strict=True):
        used = [call.prompt.images[0].image.hash for call, _ in answer.calls]
        assert used == [image.hash] * rounds


def test_the_call_of_another_problems_image_trains_nothing_here() -> None:
    call = call_of(Prompt([5, 9, 9, 6], [PlacedImage(IMAGES[1], 1, 2)]), [7, 2])
    answers = [_Answer([5, 9, 9, 6, 7, 2], whole=True) for _ in IMAGES]
    _find_calls(answers, [context(image) for image in IMAGES], [call])
    assert [len(answer.calls) for answer in answers] == [0, 1]


def test_an_output_says_by_its_name_which_images_its_prompt_has() -> None:
    """Also where they are not those that its problem begins with."""
    calls = [
        call_of(Prompt([5, 9, 9, 6], [PlacedImage(image, 1, 2)]), [7, 2], f"call {number}")
        for number, image in enumerate(IMAGES)
    ]
    answers = [_Answer([5, 9, 9, 6, 7, 2], True, f"call {number}") for number in (1, 0)]
    _find_calls(answers, [context(), context()], calls)
    assert [answer.calls for answer in answers] == [[(calls[1], 2)], [(calls[0], 2)]]

"""Prompts keep their images through all that can be done with them."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory import Image, PlacedImage, Prompt

RED, BLUE = (Image.of(data, "png", 28, 28) for data in (b"red", b"blue"))
texts = st.lists(st.integers(0, 3), max_size=3)
pictures = st.builds(
    lambda image, length: Prompt([9] * length, [PlacedImage(image, 0, length)]),
    st.sampled_from([RED, BLUE]),
    st.integers(1, 3),
)
prompts = st.lists(texts | pictures, max_size=4).map(lambda parts: Prompt.joined(*parts))


def seen(prompt: Prompt) -> list[object]:
    """Return what each position shows: an id, or an image and the place in it."""
    shown: list[object] = list(prompt.tolist())
    for image, start, length in prompt.images:
        shown[start : start + length] = [(image.hash, length, at) for at in range(length)]
    return shown


@given(prompts, prompts, st.data())
def test_sums_slices_and_comparisons_keep_the_images(
    one: Prompt, other: Prompt, data: st.DataObject
) -> None:
    both = one + other
    assert seen(both) == [*seen(one), *seen(other)]
    assert both.startswith(one)
    assert both[len(one) :] == other
    assert (one == other) == (seen(one) == seen(other))
    assert one != other or hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(both)) == both
    equal = [a == b for a, b in zip(seen(one), seen(other), strict=False)]
    shared = equal.index(False) if False in equal else len(equal)
    assert one.startswith(other) == (len(other) <= len(one) and shared >= len(other))
    assert (one.key[:shared] == other.key[:shared]).all()
    if shared < min(len(one), len(other)):
        assert one.key[shared] != other.key[shared]
    ends = {len(both), *(at for at in range(len(both)) if not _inside(both, at))}
    start, end = sorted(data.draw(st.sampled_from(sorted(ends))) for _ in range(2))
    assert seen(both[start:end]) == seen(both)[start:end]


def _inside(prompt: Prompt, at: int) -> bool:
    return any(one.start < at < one.end for one in prompt.images)


def test_a_prompt_is_no_list() -> None:
    prompt = Prompt([1, 2, 3])
    assert prompt == [1, 2, 3]
    assert Prompt([9], [PlacedImage(RED, 0, 1)]) != [9]
    with pytest.raises(TypeError):
        iter(prompt)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="read-only"):
        prompt.ids[0] = 5


def test_an_image_is_never_cut() -> None:
    prompt = Prompt([1, 9, 9, 2], [PlacedImage(RED, 1, 2)])
    with pytest.raises(TrajectoryError, match="cut within an image, at positions 1 to 3"):
        _ = prompt[:2]
    assert len(prompt[2:2]) == 0


@pytest.mark.parametrize("ids", [[2**31], [1.5], ["1"], np.array([2**40]), np.array([-1])])
def test_what_is_no_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(InputError, match="token ids must be whole numbers"):
        Prompt(ids)


def test_a_prompt_does_not_change_with_the_array_it_was_made_of() -> None:
    given = np.array([1, 2, 3], np.int32)
    prompt = Prompt(given)
    given[0] = 9
    assert prompt == [1, 2, 3]
    assert prompt[1:].ids.base is None, "a view would keep the whole prompt"

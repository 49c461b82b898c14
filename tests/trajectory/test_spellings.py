"""Spellings of one call are equal, and calls with other values are not."""

import pytest

from turnwise.trajectory.calls import divide_at_calls


def call(arguments: str) -> object:
    texts, calls = divide_at_calls(f'<tool_call>{{"name": "f", "arguments": {arguments}}}')
    assert len(calls) == 1
    assert texts == ["<tool_call>", ""]
    return calls


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"""{'a': 'it\'s "x"'}""", r"""{"a": "it's \"x\""}"""),
        ("""{'a': "it's"}""", r"""{'a': 'it\'s'}"""),
        (r"""{'a': 'two\nlines, "x"'}""", r"""{"a": "two\nlines, \"x\""}"""),
        ("{'n': -5}", '{"n": -5.0}'),
        ("{'n': 1e3, 'b': True,}", '{"b": true, "n": 1000}'),
    ],
)
def test_spellings_of_one_value_are_equal(one: str, other: str) -> None:
    assert call(one) == call(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"n": -12345678901234567890}', '{"n": -12345678901234567891}'),
        ('{"n": 5}', '{"n": "5"}'),
        (r"""{'a': 'it\'s'}""", """{"a": "its"}"""),
        ("""{'a': '"x"'}""", """{"a": "x"}"""),
    ],
)
def test_other_values_are_another_call(one: str, other: str) -> None:
    assert call(one) != call(other)

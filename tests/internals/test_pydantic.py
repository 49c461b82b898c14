"""A bound validator says what the type's own says, in a time that follows the value's size."""

from typing import Any, Literal

import pytest
from openai.types.responses import ResponseInputItemParam, ResponseOutputItem
from openai.types.responses.tool import Tool
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from turnwise.internals.pydantic import bound

ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "message", "role": "user", "content": "a"},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
    {"type": "reasoning", "id": "a", "summary": [{"type": "summary_text", "text": "a"}]},
    {
        "type": "message",
        "id": "a",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
    },
    {"type": "item_reference", "id": "a"},
    {"id": "a"},  # the only item that needs no type
]
WRONG: list[object] = [0, "a", None, {}, {"type": "strange"}, {"type": 5}, {"role": "user"}, [1]]


def adapters(kind: Any) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    own, ours = TypeAdapter(kind), TypeAdapter(kind)
    bound(ours)
    bound(ours)  # nothing is done twice
    return own, ours


@pytest.mark.parametrize("item", ITEMS)
def test_a_bound_union_chooses_the_same_member(item: dict[str, Any]) -> None:
    own, ours = adapters(list[ResponseInputItemParam | ResponseOutputItem])
    expected, found = own.validate_python([item, item]), ours.validate_python([item, item])
    assert found == expected
    assert [type(each) for each in found] == [type(each) for each in expected]


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_do_not_grow_with_the_number_of_wrong_entries(wrong: object) -> None:
    for kind in (ResponseInputItemParam | ResponseOutputItem, Tool):
        own, ours = adapters(list[kind])  # type: ignore[valid-type]
        counts = []
        for number in (1, 10, 1_000):
            with pytest.raises(ValidationError) as error:
                ours.validate_python([wrong] * number)
            counts.append(error.value.error_count())
        with pytest.raises(ValidationError) as error:
            own.validate_python([wrong])
        assert counts[0] == counts[1] == counts[2] <= error.value.error_count()


class Fields(TypedDict):
    type: Literal["fields"]
    metadata: list[int]
    default: dict[str, int]


class Whole(BaseModel):
    type: list[Fields] = []
    counts: dict[str, int] = {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": dict.fromkeys("abcdef", "x")},
        {"type": [{}] * 5},
        {"type": [{"type": "fields", "metadata": ["a"] * 5, "default": {}}]},
        {"type": [{"type": "fields", "metadata": [], "default": dict.fromkeys("abc", "x")}]},
    ],
)
def test_keys_named_as_parts_of_a_schema_are_bound_too(wrong: dict[str, Any]) -> None:
    _, ours = adapters(Whole)
    with pytest.raises(ValidationError) as error:
        ours.validate_python(wrong)
    assert error.value.error_count() <= 3
    fitting = {"type": [{"type": "fields", "metadata": [1], "default": {"a": 1}}]}
    assert ours.validate_python(fitting).type == fitting["type"]

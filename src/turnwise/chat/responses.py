"""The responses (OpenAI's Responses) that a session keeps, for requests that continue them."""

from dataclasses import dataclass

from turnwise.core.json_types import JsonObject


@dataclass(slots=True)
class _Stored:
    previous: str | None
    given: list[object]
    output: list[object]
    body: JsonObject | None
    """The response as its client got it; None once it is deleted."""


class StoredResponses:
    """Items of a session's responses, each after the one that it continues."""

    def __init__(self) -> None:
        self._stored: dict[str, _Stored] = {}

    def __contains__(self, response_id: str) -> bool:
        stored = self._stored.get(response_id)
        return stored is not None and stored.body is not None

    def add(
        self,
        response_id: str,
        previous: str | None,
        given: list[object],
        output: list[object],
        body: JsonObject,
    ) -> None:
        """Add the new input, the output and the body of a response that continues `previous`."""
        self._stored[response_id] = _Stored(previous, given, output, body)

    def remove(self, response_id: str) -> None:
        """Delete a response; its items stay for those that continue it."""
        self._stored[response_id].body = None

    def body(self, response_id: str) -> JsonObject:
        """Return a response as its client got it.

        Raises:
            KeyError: when there is none, or it was deleted.
        """
        body = self._stored[response_id].body
        if body is None:
            raise KeyError(response_id)
        return body

    def items(self, response_id: str) -> list[object]:
        """Return the whole conversation up to a response, its output included."""
        return [*self.given(response_id), *self._stored[response_id].output]

    def given(self, response_id: str) -> list[object]:
        """Return the whole input of a response, with the conversation that it continues."""
        stored = self._stored[response_id]
        parts = [stored.given]
        while stored.previous is not None:
            stored = self._stored[stored.previous]
            parts += [stored.output, stored.given]
        return [item for part in reversed(parts) for item in part]

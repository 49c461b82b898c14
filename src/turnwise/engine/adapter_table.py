"""The adapters that one engine holds, and the requests that use each.

vLLM finds an adapter by a number, and keeps its cached prefixes apart by name and path. Both are
new for every adapter that is loaded, so no request reads what another adapter has cached.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.core.json_types import JsonObject
from turnwise.engine.adapters import POLICY, VERSIONS
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.engine.vllm_api import LoRARequest, WeightVersionSpan


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that an engine holds.

    Example:
        table.add("polite").request  # for vLLM's generate
    """

    number: int
    """vLLM's id of it."""
    request: "LoRARequest"
    version: int | None = None
    """Version of the trained weights that it is; None for others."""
    users: set[str] = field(default_factory=set)
    """Ids of the requests in flight that use it."""

    def spans(self) -> "list[WeightVersionSpan] | None":
        """Return the version of all tokens of a request; None if the adapter has no version."""
        from turnwise.engine import vllm_api as vllm  # seconds to import

        if self.version is None:
            return None
        return [vllm.WeightVersionSpan(version=str(self.version), start=0, end=sys.maxsize)]


class AdapterTable:
    """The adapters of an engine by name.

    Versions of a trained adapter share the name `POLICY`. A request keeps the version that was the
    newest when it began; one that no request uses any more is dropped by the next update.

    Args:
        trained: PEFT's configuration of the trained adapter; None if there is none.

    Example:
        with table.using("polite", "request-1") as adapter:
            outputs = llm.generate(prompt, params, "request-1", lora_request=adapter.request)
    """

    def __init__(self, trained: JsonObject | None = None) -> None:
        self.trained = trained
        self.older: list[LoadedAdapter] = []
        """Versions of the trained adapter before the newest, oldest first."""
        self._by_name: dict[str, LoadedAdapter] = {}
        self._numbers = 0

    def new(self, name: str, version: int | None = None) -> LoadedAdapter:
        """Return an adapter under a new number, which requests may not use before `add`."""
        from turnwise.engine import vllm_api as vllm  # seconds to import

        self._numbers += 1
        number = self._numbers
        label = f"{name or 'policy'} {number}"
        return LoadedAdapter(number, vllm.LoRARequest(label, number, f"memory:{number}"), version)

    def add(self, name: str, adapter: LoadedAdapter) -> None:
        """Give an adapter to new requests of this name."""
        if (before := self._by_name.get(name)) is not None:
            self.older.append(before)
        self._by_name[name] = adapter

    def excess(self) -> list[LoadedAdapter]:
        """Remove and return the versions to drop: those that no request uses, and the oldest ones
        beyond `VERSIONS`."""
        excess = [adapter for adapter in self.older if not adapter.users]
        kept = [adapter for adapter in self.older if adapter.users]
        first = max(0, len(kept) + 1 - VERSIONS)
        self.older = kept[first:]
        return excess + kept[:first]

    @contextmanager
    def using(self, name: str, request_id: str) -> Iterator[LoadedAdapter | None]:
        """Count a request on the adapter of a name; None is the model without one.

        Raises:
            InputError: when there is none of that name.
        """
        adapter = self._by_name.get(name)
        if adapter is None and name != POLICY:
            known = ", ".join(filter(None, self._by_name)) or "none"
            raise InputError(f"there is no adapter {name!r} (serving.adapters has: {known})")
        if adapter is not None:
            adapter.users.add(request_id)
        try:
            yield adapter
        finally:
            if adapter is not None:
                adapter.users.discard(request_id)

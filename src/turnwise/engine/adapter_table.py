"""The adapters that one engine holds, and the requests that use each.

vLLM finds an adapter by a number, and keeps its cached prefixes apart by name and path. Both are
new for every adapter that is loaded, so no request reads what another adapter has cached.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.engine.adapters import POLICY
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.engine.vllm_api import LoRARequest


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that an engine holds.

    Example:
        table.add("polite").request  # for vLLM's generate
    """

    number: int
    """vLLM's id of it."""
    request: "LoRARequest"
    users: set[str] = field(default_factory=set)
    """Ids of the requests in flight that use it."""


class AdapterTable:
    """The adapters of an engine by name.

    Example:
        with table.using("polite", "request-1") as adapter:
            outputs = llm.generate(prompt, params, "request-1", lora_request=adapter.request)
    """

    def __init__(self) -> None:
        self._by_name: dict[str, LoadedAdapter] = {}
        self._numbers = 0

    @property
    def by_name(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that new requests may use."""
        return self._by_name

    def new(self, name: str) -> LoadedAdapter:
        """Return an adapter under a new number, which requests may not use before `add`."""
        from turnwise.engine import vllm_api as vllm  # seconds to import

        self._numbers += 1
        number = self._numbers
        label = f"{name or 'policy'} {number}"
        return LoadedAdapter(number, vllm.LoRARequest(label, number, f"memory:{number}"))

    def add(self, name: str, adapter: LoadedAdapter) -> None:
        """Give an adapter to new requests of this name."""
        self._by_name[name] = adapter

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

"""Where ranks meet: who can reach it, and who is heard."""

from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from turnwise.core.process import SECRET
from turnwise.weights.process_group import LOOPBACK, join_store, open_store, private


def listening(port: int) -> set[str]:
    """The addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == "LISTEN" and c.laddr.port == port}


def test_a_store_uses_one_address_and_ignores_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET, "a secret of this run")
    limit = timedelta(seconds=120)
    store = open_store(LOOPBACK, 0, limit)
    assert listening(store.port) == {LOOPBACK}
    ours = private(join_store(LOOPBACK, store.port, limit))
    stranger = TCPStore(LOOPBACK, store.port, None, False, limit, wait_for_workers=False)
    stranger.set("rank0/address", "the stranger's")
    assert not ours.check(["rank0/address"])
    ours.set("rank0/address", "ours")
    assert stranger.get("rank0/address") == b"the stranger's"
    assert private(store).get("rank0/address") == b"ours"
    monkeypatch.setenv(SECRET, "that of another run")
    assert not private(store).check(["rank0/address"])
    with pytest.raises(OSError, match="in use"):
        open_store(LOOPBACK, store.port)

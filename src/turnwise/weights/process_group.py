"""The process group of a trainer and its engines' workers, and the store where its ranks meet.

The trainer's rank 0 broadcasts over gloo between CPUs, and over NCCL between GPUs. The NCCL path
has never been run. By default, torch's key-value store listens on all addresses and accepts any
client. Here the store listens on one address, and every key begins with the run's secret. That
protects against accidents and scanners. But a client that speaks the store's protocol can still
list the keys, so nodes that train together should be on a private network.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from turnwise.core.deadlines import deadline_error
from turnwise.core.optional import Foreign
from turnwise.core.process import environment_variable, known_secret
from turnwise.errors import DeadlineError, InputError, WeightUpdateError, first_line
from turnwise.internals.torch import GLOO_INTERFACE, gloo_options, limit_nccl

LOOPBACK = "127.0.0.1"
_T = TypeVar("_T")
_WORK_POLL_SECONDS = 0.0005
_STORE_POLL_SECONDS = 0.002
_ABORT_CHECK_SECONDS = 0.25
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable of torch. Unless it is 0, a broadcast that fails or is late ends the
process. But an engine must outlive a failed update, and this module has its own deadlines."""
_LINGER_SECONDS = 0.5  # seconds after the deadline until torch itself ends an abandoned broadcast


def open_store(host: str, port: int, limit: timedelta = timedelta(seconds=300)) -> TCPStore:
    """Open a store on one address of this machine; port 0 chooses a free port."""
    family = socket.getaddrinfo(host, port)[0][0]
    listening = socket.create_server((host, port), family=family, backlog=1024)
    port = listening.getsockname()[1]
    # The store takes over the descriptor and closes it.
    return TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def join_store(host: str, port: int, limit: timedelta) -> TCPStore:
    return TCPStore(host, port, None, False, limit, wait_for_workers=False)


def private(store: TCPStore) -> Store:
    """Return the part of a store that only this run's processes use."""
    return PrefixStore(known_secret(), store)


def free_address() -> tuple[str, int]:
    """Return this node's address and a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    from ray.util import get_node_ip_address  # Ray reads the environment on import

    return get_node_ip_address(), port


def own_address(peer: str) -> str:
    """Return the address from which this node reaches the address `peer`."""
    family = socket.getaddrinfo(peer, None)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # chooses the route; a datagram socket sends nothing
        address: str = probe.getsockname()[0]
    return address


def _interface(address: str) -> str:
    """Return the name of this node's network interface that has an address; "" if no interface
    has it."""
    known: dict[str, list[Foreign]] = psutil.net_if_addrs()
    at = (name for name, own in known.items() if address in {one.address for one in own})
    return next(at, "")


def device_name(device: torch.device) -> str:
    """Return a device's name, which is equal in all processes that use the device: a GPU's UUID, or
    the host's name for CPUs."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname()


class ProcessGroup:
    """One rank of the process group of a trainer and its engines, separate from any other group.

    The trainer's `train_world_size` ranks come first; its rank 0 opens the store at `ip` and
    `port`.

    Raises:
        InputError: when the rank is taken or not in the group, or the port is in use.
        DeadlineError: when a rank has not joined within `seconds`; the error names the first rank
            that is missing.
    """

    def __init__(
        self,
        rank: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        self.rank, self.where = rank, f"{ip}:{port}"
        self.engine_ranks = range(train_world_size, world_size)
        self.last_round = 0
        """Number of the last round (one update) that this rank took part in."""
        self.broken = ""
        """Reason why no broadcast is possible any more; "" while the group works."""
        self._group: Foreign  # torch's backend; its stubs lack the methods that are used here
        if rank >= world_size:
            raise InputError(f"rank {rank} is outside the process group of {world_size}")
        limit = timedelta(seconds=seconds)
        if rank:  # because torch's own wait for the trainer's store overruns its deadline
            late = f"the trainer did not open the process group at {self.where}"
            end = time.monotonic() + seconds

            def is_open() -> bool:
                try:
                    socket.create_connection((ip, port), max(0.1, end - time.monotonic())).close()
                except OSError:
                    return False
                return True

            _wait_until(is_open, seconds, lambda: late)
        try:
            store = join_store(ip, port, limit) if rank else open_store(ip, port, limit)
            self._store = private(store)
            if self._store.add(f"joined/{rank}", 1) > 1:
                raise InputError(f"rank {rank} has joined already: each engine needs its own ranks")
            everyone = range(world_size)

            def joined(ranks: Iterable[int]) -> bool:
                return bool(self._store.check([f"joined/{each}" for each in ranks]))

            def missing() -> str:
                first = next((each for each in everyone if not joined([each])), 0)
                return f"{self._name(first)} did not join the process group at {self.where}"

            _wait_until(lambda: joined(everyone), seconds, missing)
            # The group is outside torch's registry, so that it does not affect the default group.
            if device.type == "cuda":
                check_own_gpus(self._store, rank, [self._name(r) for r in everyone], device)
                options = dist.ProcessGroupNCCL.Options()
                limit_nccl(options, limit)
                with environment_variable(_ERROR_HANDLING, "0"):  # read only by the constructor
                    self._group = dist.ProcessGroupNCCL(self._store, rank, world_size, options)
            else:
                gloo = gloo_options(own_address(ip), limit)
                self._group = dist.ProcessGroupGloo(self._store, rank, world_size, gloo)
        except (RuntimeError, OSError) as error:
            raise InputError(
                f"no process group could be made at {self.where}: {first_line(error)}"
            ) from error

    def _name(self, rank: int) -> str:
        return f"{'engine' if rank in self.engine_ranks else 'trainer'} rank {rank}"

    def check_usable(self) -> None:
        if self.broken:
            raise WeightUpdateError(
                f"the process group at {self.where} broke ({self.broken}): make a new one"
            )

    def put(self, key: str, round_number: int, text: str) -> None:
        self._guarded(lambda: self._store.set(key, json.dumps([round_number, text])))

    def get(self, key: str) -> tuple[int, str]:
        """Return the round and the text under a key; round 0 and "" if the key is not set."""
        if not self._guarded(lambda: self._store.check([key])):
            return 0, ""
        round_number, text = json.loads(self._guarded(lambda: self._store.get(key)))
        return round_number, text

    def wait_text(self, key: str, round_number: int, what: str, seconds: float) -> str:
        late = f"the trainer at {self.where} did not {what}"
        _wait_until(lambda: self.get(key)[0] == round_number, seconds, lambda: late)
        return self.get(key)[1]

    def wait_engines(self, key: str, round_number: int, what: str, seconds: float) -> None:
        """Wait until every engine has answered "" in a round; otherwise raise an error that names
        the first engine that refused or is late."""
        waiting = list(self.engine_ranks)

        def all_answered() -> bool:
            for rank in list(waiting):
                found, error = self.get(f"{key}/{rank}")
                if found == round_number:
                    if error:
                        raise WeightUpdateError(f"{self._name(rank)} refused: {error}")
                    waiting.remove(rank)
            return not waiting

        def late() -> str:
            return f"{self._name(waiting[0])} of the process group at {self.where} did not {what}"

        _wait_until(all_answered, seconds, late)

    def broadcast(self, buffer: torch.Tensor, seconds: float) -> dist.Work:
        """Start a broadcast: rank 0 sends its `buffer`, and the other ranks receive the bytes in
        their `buffer`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=seconds + _LINGER_SECONDS)
        work: dist.Work = self._group.broadcast([buffer], options)
        return work

    def wait(self, work: dist.Work, what: str, seconds: float, round_number: int = 0) -> None:
        """Wait for a broadcast.

        Args:
            what: Beginning of the error's text.
            round_number: Round in which the trainer may cancel the broadcast; 0 if this process is
                the trainer.

        Raises:
            DeadlineError: when the broadcast fails or is late; the group is then broken.
        """
        deadline = time.monotonic() + seconds
        next_check = time.monotonic() + _ABORT_CHECK_SECONDS
        while not work.is_completed():
            if time.monotonic() > deadline:
                late = deadline_error(seconds, what)
                self.broken = str(late)
                self._group.abort()
                raise late
            if round_number and time.monotonic() > next_check:
                self.check_not_aborted(round_number)
                next_check = time.monotonic() + _ABORT_CHECK_SECONDS
            time.sleep(_WORK_POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            self.broken = f"{what}: {first_line(error)}"
            raise DeadlineError(self.broken) from error

    def check_not_aborted(self, round_number: int) -> None:
        """Raise `WeightUpdateError` if the trainer has reported that the group broke in a round."""
        found, text = self.get("broken")
        if found == round_number:
            self.broken = text
            self._group.abort()  # NCCL itself would wait for the broadcast on the device
            raise WeightUpdateError(f"the trainer at {self.where} gave up: {text}")

    def _guarded(self, operation: Callable[[], _T]) -> _T:
        try:
            return operation()
        except RuntimeError as error:
            self.broken = f"the trainer at {self.where} closed its store"
            raise DeadlineError(self.broken) from error


def _wait_until(done: Callable[[], bool], seconds: float, late: Callable[[], str]) -> None:
    """Poll until a condition holds. After `seconds`, raise a `DeadlineError` whose text begins with
    `late()`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise deadline_error(seconds, late())
        time.sleep(_STORE_POLL_SECONDS)


def check_own_gpus(store: Store, rank: int, names: Sequence[str], device: torch.device) -> None:
    """Check that no two ranks are on the same GPU; every rank must call this function. The error
    contains the two ranks' `names`."""
    store.set(f"device/{rank}", device_name(device))
    seen: dict[str, str] = {}
    for other, name in enumerate(names):
        gpu = store.get(f"device/{other}").decode()
        if gpu in seen:
            raise InputError(
                f"{seen[gpu]} and {name} are on the same GPU ({gpu}): NCCL needs a GPU for each "
                "process (between an engine and a trainer that share a GPU, set "
                "weights.transport to ipc)"
            )
        seen[gpu] = name


def join_ranks(address: str, rank: int, ranks: int, device: torch.device, seconds: float) -> None:
    """Join the default process group of the trainer's ranks, which meet at the store at `address`.

    Args:
        address: The store's host:port.
        seconds: Seconds in which the ranks must meet; also the limit of each operation in the
            group.

    Raises:
        InputError: when the ranks cannot meet, or two ranks are on the same GPU.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=seconds)
    try:
        # If the host is LOOPBACK, all ranks are on this node. The variable then stays unset,
        # because engines, which inherit it, may be on other nodes.
        if host != LOOPBACK and (interface := _interface(own_address(host))):
            os.environ.setdefault(GLOO_INTERFACE, interface)
        store = private(join_store(host, int(port), limit))
        if device.type == "cuda":
            check_own_gpus(store, rank, [f"rank {number}" for number in range(ranks)], device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(
            f"the trainer's {ranks} ranks cannot meet at {address}: {error}"
        ) from error

"""Addresses at which an `ipc` trainer and its engines meet: Unix sockets of one user."""

import glob
import itertools
import os
import socket
from contextlib import suppress

import torch

from turnwise.errors import InputError

_FOLDER = f"/tmp/turnwise-{os.getuid()}"
_PRIVATE = "trainer"
_addresses = itertools.count()


def device_name(device: torch.device) -> str:
    """Return the name that both ends must share: the GPU's UUID, or the host of CPUs."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname()


def device_address(device: torch.device, rank: int = 0) -> str:
    """Return the address where the trainer on a device meets the engine's worker on it.

    On CPUs the addresses of workers differ by their ranks.

    Raises:
        InputError: when the folder for sockets belongs to another user.
    """
    return _address(device_name(device) if device.type == "cuda" else f"{device.type}-{rank}")


def private_address() -> str:
    """Return an address that no other trainer of this user binds.

    Also removes the sockets of trainers that were killed.

    Raises:
        InputError: as `device_address` does.
    """
    address = _address(f"{_PRIVATE}-{os.getpid()}-{next(_addresses)}")
    for path in glob.glob(f"{_FOLDER}/{_PRIVATE}-*"):
        if not os.path.exists(f"/proc/{path.split('-')[-2]}") and not is_answering(path):
            with suppress(FileNotFoundError):
                os.unlink(path)
    return address


def _address(name: str) -> str:
    os.makedirs(_FOLDER, mode=0o700, exist_ok=True)
    if os.stat(_FOLDER).st_uid != os.getuid():
        raise InputError(f"{_FOLDER} belongs to another user; give the transport an address")
    return f"ipc://{_FOLDER}/{name}"


def socket_path(address: str) -> str:
    """Return the file of an address, or "" if it has none."""
    return address.removeprefix("ipc://") if address.startswith("ipc://") else ""


def is_answering(path: str) -> bool:
    """Return whether a process listens on a Unix socket; ZMQ itself would silently replace it."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True

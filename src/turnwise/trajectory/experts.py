"""The experts of a mixture that computed each token, as the engine reports them.

A *row* is the choice of one token: the numbers of its experts in each layer, in bytes. All rows of
a model have one length; nothing here reads them. A request has a row for each id of its prompt and
its completion but the last, which no layer has computed yet: the next turn of the conversation has
that row.
"""

import base64
from collections.abc import Iterable


def rows_after(rows: bytes, ids: int, shared: int) -> bytes:
    """Return a request's rows from that of the last id that it shares with its parent's path.

    Args:
        ids: Number of ids of the request.
        shared: Number of ids at its start that it shares.

    Example:
        >>> rows_after(b"aabbcc", ids=4, shared=2)
        b'bbcc'
    """
    return rows[_size(rows, ids - 1) * max(0, shared - 1) :]


def rows_of_path(turns: Iterable[tuple[bytes, int, int, int]]) -> bytes:
    """Return the rows of a path, one for each of its ids but the last.

    Args:
        turns: For each turn of the path its rows, the length of its prefix, the number of ids that
            it adds, and the number of those that are on the path.

    Returns:
        The rows; empty if a turn has none.

    Example:
        >>> rows_of_path([(b"aabb", 0, 3, 3), (b"ccdd", 3, 2, 1)])
        b'aabbcc'
    """
    parts = []
    for rows, prefix, ids, length in turns:
        first = int(prefix == 0)  # no row of an earlier path
        if not rows and ids > first:
            return b""
        parts.append(rows[: _size(rows, ids - first) * (length - first)])
    return b"".join(parts)


def _size(rows: bytes, count: int) -> int:
    return len(rows) // count if count else 0


def as_text(rows: bytes) -> str:
    """Return rows as text for JSON."""
    return base64.b64encode(rows).decode()


def from_text(text: str) -> bytes:
    """Return the rows that `as_text` was given."""
    return base64.b64decode(text)

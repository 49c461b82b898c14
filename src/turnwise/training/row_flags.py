"""Flags in data rows which mark a message as context that is not trained, as in several systems.

A flag is obeyed or refused, never ignored: if a key is named like a mask, but does not clearly
mean "train this" or "do not train this", its row is refused with an error.
"""

import re
from collections.abc import Sequence

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import TrajectoryError

FLAGS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "step_loss_mask")
"""Keys whose value 1 or true means that a message or row is trained, and whose value 0 or false
means that it is not. OpenAI, Mistral, slime, ms-swift and axolotl use these keys."""
_LIKE_FLAGS = re.compile(
    r"(?i)(?:.*_)?(?:loss|train|training|trainable|masks?|masked|weights?)(_.*)?"
)
"""Names of keys in messages that look like flags or masks."""
_OF_ROWS = (*FLAGS, "mask", "masks", "loss_masks", "completion_mask", "assistant_masks")
"""Names of flags and masks in rows. A pattern would also match columns such as `weight_kg`."""


def is_trained(message: JsonObject, where: str) -> bool:
    """Return whether an assistant's message is trained: True unless a flag says otherwise.

    Args:
        where: Name of the message in errors, such as "message 2".

    Raises:
        TrajectoryError: `unclear_mask`, if the meaning of a flag in the message, or in a part of
            its content, is unknown.
    """
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        for key in filter(_LIKE_FLAGS.fullmatch, part if isinstance(part, dict) else ()):
            raise _unclear(f"a part of {where}", key, part[key])
    return _all_true(message, list(filter(_LIKE_FLAGS.fullmatch, message)), where)


def check_row(row: JsonObject) -> None:
    """Raise TrajectoryError if a flag of the row excludes the whole row from training
    (`nothing_to_train`), or if the row has a mask of unknown meaning (`unclear_mask`)."""
    if not _all_true(row, [key for key in _OF_ROWS if key in row], "the row"):
        why = "the row says that it is not to be trained; data.filter leaves such rows out"
        raise TrajectoryError("nothing_to_train", why)


def without_flags(message: JsonObject) -> JsonObject:
    """Return a message without its flags, for a chat template."""
    return {key: value for key, value in message.items() if key not in FLAGS}


def _all_true(tree: JsonObject, keys: Sequence[str], where: str) -> bool:
    said = {key: tree[key] for key in keys if tree[key] is not None}
    for key, value in said.items():
        if key not in FLAGS or not (isinstance(value, bool | int | float) and value in (0, 1)):
            raise _unclear(where, key, value)
    return all(said.values())


def _unclear(where: str, key: str, value: Foreign) -> TrajectoryError:
    shown = repr(value)[:40]
    return TrajectoryError(
        "unclear_mask",
        f"{where} has {key!r}: {shown}, whose meaning is unknown: "
        '"weight": 0 leaves a message out of training, "weight": 1 trains it',
    )

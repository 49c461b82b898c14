"""Images in clients' chunks: each becomes the ids that the model's own processor makes of it."""

from collections.abc import Sequence
from typing import NamedTuple

from turnwise.chat.images import read_image
from turnwise.chat.vision import ModelImages
from turnwise.config import Config
from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory.images import PromptIds, extended


class ImageChunk(NamedTuple):
    """An image of a client."""

    data: bytes | str
    """Its file; a text is in base64."""
    expected: int
    """Number of ids that the client counts for it; 0 if it does not say."""


Chunk = Sequence[int] | ImageChunk


class ChunkReader:
    """Makes prompts of chunks; threads may share it."""

    def __init__(self, config: Config) -> None:
        self._images = ModelImages(config.model)
        self._most = config.engine.images_per_prompt

    def joined(self, chunks: Sequence[Chunk], what: str) -> list[int]:
        """Return the ids of chunks, `PromptIds` if there are images; InputError, which begins with
        `what`, for an image that the model does not take or that has not the expected length."""
        count = sum(isinstance(each, ImageChunk) for each in chunks)
        if count > (most := self._most):
            raise InputError(f"{what}: it has {count} images; engine.images_per_prompt is {most}")
        made = (self._ids_of(c, what) if isinstance(c, ImageChunk) else c for c in chunks)
        return extended([], *made)

    def _ids_of(self, chunk: ImageChunk, what: str) -> PromptIds:
        given = chunk.data if isinstance(chunk.data, bytes) else f"data:;base64,{chunk.data}"
        image = read_image(given, f"{what}: an image", files=False)
        try:
            ids = self._images.ids_of(image)
        except (InputError, TrajectoryError) as error:
            raise InputError(f"{what}: {error}") from error
        if chunk.expected not in (0, len(ids)):
            raise InputError(
                f"{what}: expected_tokens of an image is {chunk.expected}, and the model makes "
                f"{len(ids)} tokens of it"
            )
        return ids

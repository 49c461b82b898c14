"""Images in clients' chunks: the model's own processor turns each into token ids."""

from collections.abc import Sequence
from typing import NamedTuple

from turnwise.chat.images import read_image
from turnwise.chat.vision import ModelImages
from turnwise.config import ModelConfig
from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory import Prompt, PromptLike


class ImageChunk(NamedTuple):
    """An image of a client."""

    data: bytes | str
    """The bytes of its file, or their base64 text."""
    expected: int
    """Number of ids that the client expects for the image; 0 if the client gives no number."""


Chunk = Sequence[int] | ImageChunk


class ChunkReader:
    """Makes prompts from chunks, which are token ids or images; it is thread-safe."""

    def __init__(self, model: ModelConfig, images_per_prompt: int) -> None:
        self._images = ModelImages(model)
        self._max_images = images_per_prompt

    def join(self, chunks: Sequence[Chunk], what: str) -> Prompt:
        """Join chunks to one prompt.

        Raises:
            InputError: when an id is impossible; or, with a message that begins with `what`, when
                there are too many images, or the model does not take an image, or an image does
                not have the expected number of ids.
        """
        count = sum(isinstance(each, ImageChunk) for each in chunks)
        if count > (limit := self._max_images):
            raise InputError(f"{what}: it has {count} images; engine.images_per_prompt is {limit}")
        made: list[PromptLike] = [
            self._ids_of(c, what) if isinstance(c, ImageChunk) else c for c in chunks
        ]
        return Prompt.joined(*made)

    def _ids_of(self, chunk: ImageChunk, what: str) -> Prompt:
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

"""The model's own image processor: an image's token ids, and the tensors that the model reads.

One call for each image returns the ids and the tensors, and the result is cached. Each image is
processed alone, even if a prompt has several.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from turnwise.config import ModelConfig
from turnwise.core.gguf import resolve_model
from turnwise.core.images import decode
from turnwise.core.optional import Foreign
from turnwise.errors import InputError, TrajectoryError, first_line
from turnwise.trajectory import Image, PlacedImage, Prompt

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_KEPT_BYTES = 256 << 20  # maximum size of the tensors that are kept
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Processed(NamedTuple):
    """The result of processing one image."""

    token_ids: list[int]
    """Ids that represent the image in a prompt."""
    tensors: "Mapping[str, torch.Tensor]"
    """Arguments of the model's forward pass by name, such as pixel values and grids."""


class ModelImages:
    """The image processor of a model, loaded for the first image; it is thread-safe. It raises an
    `InputError` if the model takes no images.

    Example:
        images = ModelImages(config.model)
        prompt_ids = images.ids_of(image)
        pixels = images.processed(image).tensors["pixel_values"]
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._kept: OrderedDict[str, Processed] = OrderedDict()
        self._size = 0  # bytes of all kept tensors

    @cached_property
    def takes_images(self) -> bool:
        """Whether the model takes images; if not, the reason is logged, once."""
        try:
            return self._processor is not None
        except InputError as error:
            logger.warning("tools' images are left out: %s", error)
            return False

    @cached_property
    def marker(self) -> int:
        """The token id by which the chat template marks an image."""
        processor = self._processor
        return int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))

    def ids_of(self, image: Image) -> Prompt:
        own = self.processed(image).token_ids
        return Prompt(own, [PlacedImage(image, 0, len(own))])

    def processed(self, image: Image) -> Processed:
        """Return the processor's result for an image; raise TrajectoryError (`image_refused`) when
        the processor refuses the image."""
        with self._lock:
            if (found := self._kept.get(image.hash)) is not None:
                self._kept.move_to_end(image.hash)
                return found
            made = self._process(image)
            self._kept[image.hash] = made
            self._size += _bytes(made)
            while self._size > _KEPT_BYTES and len(self._kept) > 1:
                self._size -= _bytes(self._kept.popitem(last=False)[1])
            return made

    def _process(self, image: Image) -> Processed:
        processor, picture = self._processor, decode(image.read(), str(image))
        given = {"text": [processor.image_token], "images": [picture]}
        try:
            made = processor(**given, add_special_tokens=False, return_tensors="pt")
        except Exception as error:  # the processor's own error, such as one about the size
            why = f"{image} is refused by the model: {first_line(error)}"
            raise TrajectoryError("image_refused", why) from error
        tensors = {name: value for name, value in made.items() if name not in _OF_TEXT}
        return Processed(made["input_ids"][0].tolist(), tensors)

    @cached_property
    def _processor(self) -> Foreign:
        from transformers import AutoProcessor

        path = self._model.path
        try:
            processor = AutoProcessor.from_pretrained(
                resolve_model(path), trust_remote_code=self._model.trust_remote_code
            )
        except Exception as error:
            why = first_line(error)
            raise InputError(f"model.path: {path} has no processor of images: {why}") from error
        if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token"):
            raise InputError(f"model.path: {path} takes text alone, and a message has an image")
        return processor


def _bytes(made: Processed) -> int:
    return sum(tensor.nbytes for tensor in made.tensors.values())

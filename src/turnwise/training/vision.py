"""Images in the trainer's forward passes: what the model reads of them, and at which columns.

The tensors of an image are those of the model's own processor, made once for each image in each
rank. Position ids of more than one dimension are made by the model's own code.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from turnwise.chat.vision import ModelImages
from turnwise.config import Config
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.training.batching import Columns
from turnwise.training.sample import Sample

_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments of forward passes that are 1 at the positions of images, 0 elsewhere."""


def sees(shape: PretrainedConfig) -> bool:
    """Return whether a model has a part that reads images."""
    return hasattr(shape, "vision_config")


def check_images(samples: Sequence[Sample], config: Config) -> None:
    """Raise an InputError that names the key with which images cannot be trained."""
    if not any(sample.images for sample in samples):
        return
    for key, wrong in (
        ("training.ranks", config.training.ranks > 1),
        ("training.context_parallel", config.training.context_parallel > 1),
        ("model.lora.rank", config.model.lora.rank > 0),
    ):
        if wrong:
            least = 0 if key.startswith("model") else 1
            raise InputError(f"{key}: samples with images are trained with {least} only")


@contextmanager
def seeing(
    backbone: PreTrainedModel, columns: Columns, images: ModelImages | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the arguments of a forward pass that reads the images of all columns; none if there
    are none."""
    if not columns.images or columns.span_BT is None:
        yield {}
        return
    assert images is not None, "a model without a processor"
    device, ids_BT = columns.token_ids_BT.device, columns.token_ids_BT
    processed = [images.processed(image).tensors for image in columns.images]
    given = {
        name: torch.cat([tensors[name] for tensors in processed]).to(device)
        for name in processed[0]
    }
    token: int = backbone.config.image_token_id
    read_BT = columns.span_BT & (ids_BT == token)
    taken = inspect.signature(backbone.forward).parameters
    given |= {name: read_BT.long() for name in _TYPES if name in taken}
    stray_BT = (ids_BT == token) & ~columns.span_BT
    if not stray_BT.any():
        yield given
        return
    # The model may sample the id of an image, which then is a token as any other.
    own = backbone.get_placeholder_mask
    known_BT = ids_BT.masked_fill(stray_BT, (token + 1) % 2)

    def mask(input_ids: torch.Tensor, *more: Foreign, **named: Foreign) -> Foreign:
        return own(known_BT, *more, **named)

    backbone.get_placeholder_mask = mask
    try:
        yield given
    finally:
        del backbone.get_placeholder_mask

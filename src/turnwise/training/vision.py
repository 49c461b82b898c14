"""Images in the trainer's forward passes: their features, and the columns of their tokens.

The model's own processor makes the tensors of an image, once for each image in each rank. The
features of an image are computed once for each forward pass, even if several samples contain the
image, and separately from other images. If position ids have more than one dimension, the model's
own code makes them.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from turnwise.chat.images import read_image
from turnwise.chat.vision import ModelImages, Processed
from turnwise.core.optional import Foreign, optional
from turnwise.errors import InputError
from turnwise.internals.transformers import layer_classes
from turnwise.training.batching import Columns
from turnwise.trajectory import Image

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments of forward passes that are 1 at the positions of images, 0 elsewhere."""
_FEATURES = ("pooler_output", "deepstack_features")
"""Features of images in the output of `get_image_features`; the second is Qwen3-VL's, by layer."""


def sees(shape: PretrainedConfig) -> bool:
    """Return whether a model has a part that reads images."""
    return getattr(shape, "vision_config", None) is not None


def _model_of(module: nn.Module) -> PreTrainedModel | None:
    """Return the model in a module if it reads images; None if it reads only text."""
    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    return model if model is not None and sees(model.config) else None


def decoder_layers(module: nn.Module, *, of_images: bool = True) -> list[nn.Module]:
    """Return a model's decoder layers in order; they are found by the layer classes that the
    Transformers model declares (`_no_split_modules`). With `of_images`, include the layers of the
    part that reads images."""
    names, model = layer_classes(module), _model_of(module)
    inside = module if model is None or of_images else model.get_decoder()
    return [part for part in inside.modules() if type(part).__name__ in names]


def vision_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with which a model reads images, in addition to its language model; an
    empty list if the model reads only text."""
    if (model := _model_of(module)) is None:
        return []
    text = {id(parameter) for parameter in model.get_decoder().parameters()}
    return [parameter for parameter in model.base_model.parameters() if id(parameter) not in text]


def probe(number: int) -> Image:
    """Return a small test image, which is the same in every run. Images of different numbers have
    the same size."""
    kind = optional("PIL.Image", "images", "an image")
    picture = kind.linear_gradient("L").rotate(90 * number).resize((84, 56)).convert("RGB")
    return read_image(picture, "an image")


def patches_per_token(model: PreTrainedModel, made: Processed) -> float:
    """Return the number of patches of a processed image for each of its tokens."""
    vision = model.config.vision_config
    side, frames = vision.patch_size, getattr(vision, "temporal_patch_size", 1)
    side = side if isinstance(side, int) else side[0]
    return made.tensors["pixel_values"].numel() / (3 * side**2 * frames) / len(made.token_ids)


@contextmanager
def seeing(
    backbone: PreTrainedModel, columns: Columns, images: ModelImages | None
) -> Iterator[dict[str, Foreign]]:
    """Yield the arguments of a forward pass that reads the images of all columns; no arguments if
    there are no images."""
    if columns.image_BT is None:
        yield {}
        return
    assert images is not None, "a model without a processor"
    ids_BT, device = columns.token_ids_BT, columns.token_ids_BT.device
    processed = {image: images.processed(image) for image in columns.images}
    span_BT = columns.image_BT.to(device) > 0
    expected = [token for image in columns.images for token in processed[image].token_ids]
    if ids_BT[span_BT].tolist() != expected:
        kind = backbone.config.model_type
        raise InputError(f"a {kind} model makes different tokens of an image than its prompt has")
    token: int = backbone.config.image_token_id
    read_BT, stray_BT = span_BT & (ids_BT == token), ~span_BT & (ids_BT == token)
    found = _features(backbone, processed, columns)
    given: dict[str, Foreign] = {"mm_encoder_outputs": {"image": found}}
    taken = inspect.signature(backbone.forward).parameters
    given |= {name: read_BT.long() for name in TYPES if name in taken}
    if hasattr(backbone, "get_rope_index"):
        given["position_ids"] = _positions(backbone, columns, processed, read_BT).to(device)
    if not stray_BT.any():
        yield given
        return
    # The model may sample the id that marks an image's tokens; that is then an ordinary token. The
    # forward pass gets a different id for it, and only the embedding layer gets the sampled id.
    given["input_ids"] = ids_BT.masked_fill(stray_BT, (token + 1) % 2)
    hook = backbone.get_input_embeddings().register_forward_pre_hook(
        lambda _, arguments: (arguments[0].masked_fill(stray_BT, token), *arguments[1:])
    )
    try:
        yield given
    finally:
        hook.remove()


def _features(
    backbone: PreTrainedModel, processed: Mapping[Image, Processed], columns: Columns
) -> Foreign:
    """Return the features of all images; the model's own code computes each image once and
    separately."""
    taken = inspect.signature(backbone.get_image_features).parameters
    found: dict[Image, Foreign] = {}
    for image, made in processed.items():
        own = {n: t.to(columns.token_ids_BT.device) for n, t in made.tensors.items() if n in taken}
        found[image] = backbone.get_image_features(**own, return_dict=True)
    output = found[columns.images[0]]
    for name in _FEATURES:
        if getattr(output, name, None) is not None:
            parts = [getattr(found[image], name) for image in columns.images]
            setattr(output, name, _joined(parts))
    return output


def _joined(values: Sequence[Foreign]) -> Foreign:
    """Concatenate features of images. Each value is a tensor, or a list with a tensor for each
    image. Features of several layers are a list, with one of these two for each layer."""
    if isinstance(values[0], torch.Tensor):
        return torch.cat(list(values))
    if isinstance(values[0][0], torch.Tensor):
        return [tensor for value in values for tensor in value]
    return [_joined(layer) for layer in zip(*values, strict=True)]


def _positions(
    backbone: PreTrainedModel,
    columns: Columns,
    processed: Mapping[Image, Processed],
    read_BT: torch.Tensor,
) -> torch.Tensor:
    """Return position ids of three dimensions: [3, B, T]. If the columns have position ids of one
    dimension, by which the model separates packed sequences, put them first: [4, B, T]."""
    assert columns.image_BT is not None
    rows_3BT = [t.cpu() for t in (columns.token_ids_BT, read_BT.long(), columns.image_BT)]
    taken = inspect.signature(backbone.get_rope_index).parameters
    positions_3BT = torch.zeros(3, *columns.token_ids_BT.shape, dtype=torch.long)
    for row, column_T in columns.sequences():
        ids_T, types_T, numbers_T = (each[row, column_T] for each in rows_3BT)
        numbers = [number for number, _ in groupby(numbers_T.tolist())]
        own = [processed[columns.images[number - 1]].tensors for number in numbers if number]
        names = [name for name in own[0] if name in taken] if own else []
        grids = {name: torch.cat([each[name] for each in own]) for name in names}
        found_31T, _ = backbone.get_rope_index(
            ids_T[None], mm_token_type_ids=types_T[None], **grids
        )
        positions_3BT[:, row, column_T] = found_31T[:, 0]
    if columns.position_ids_BT is None:
        return positions_3BT
    return torch.cat([columns.position_ids_BT.cpu()[None], positions_3BT])

"""Conversion of the images of prompts to vLLM's inputs.

vLLM expands prompts itself: it replaces a marker by the ids of an image. Here a prompt already has
these ids, and must keep them, even where a sampled token happens to be a marker. So vLLM's
processor gets each image alone, once. The processor's output is then placed at the image's
positions in the prompt, and its ids must equal the prompt's ids there.
"""

from asyncio import Lock
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from turnwise.core.aio import run_in_thread
from turnwise.core.images import decode
from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory.images import Image
from turnwise.trajectory.prompt import PlacedImage, Prompt

if TYPE_CHECKING:
    from turnwise.internals import vllm

_KEPT_BYTES = 1 << 30  # maximum size of the processed images that are kept


class ImageInputs:
    """The images of one engine's requests; an LRU cache keeps the images that vLLM has processed.

    Args:
        max_images: Maximum number of images in a prompt (`engine.images_per_prompt`).
    """

    def __init__(self, llm: "vllm.AsyncLLM", max_images: int) -> None:
        self._llm, self._max_images = llm, max_images
        self._kept: OrderedDict[str, vllm.MultiModalInput] = OrderedDict()
        self._size = 0  # bytes of all kept images
        self._processing = Lock()  # vLLM processes images one after another

    async def prepare(self, prompt: Prompt) -> "dict[str, vllm.MultiModalInput]":
        """Process the images of a prompt, and return vLLM's input for each image, by hash.

        Raises:
            TrajectoryError: `too_many_images`, when the prompt has more images than the engine
                takes.
            InputError: when the engine does not take images, or vLLM expands an image to ids that
                differ from the prompt's ids.
        """
        from turnwise.internals import vllm  # seconds to import

        if not self._llm.model_config.supports_multimodal_inputs:
            raise InputError(
                "a prompt has an image, and this engine takes none: its model reads text alone, "
                "or engine.images_per_prompt is 0"
            )
        if self._llm.model_config.is_mm_prefix_lm and vllm.current_platform.is_cpu():
            raise InputError(
                "a prompt has an image, whose tokens see each other in this model, but not in "
                "vLLM's attention on a CPU; engine.images_per_prompt: 0 serves text alone"
            )
        if len(images := prompt.images) > self._max_images:
            why = (
                f"a prompt has {len(images)} images; engine.images_per_prompt is {self._max_images}"
            )
            raise TrajectoryError("too_many_images", why)
        made = {one.image.hash: await self._processed(one.image) for one in images}
        for one in images:
            if made[one.image.hash]["prompt_token_ids"] != prompt[one.start : one.end].tolist():
                raise InputError(
                    f"vLLM makes other tokens of {one.image} than the model's own processor, so "
                    "prompts with it cannot be exact"
                )
        return made

    def put_in(
        self,
        inputs: "vllm.TokensInput",
        images: Sequence[PlacedImage],
        made: "Mapping[str, vllm.MultiModalInput]",
    ) -> "vllm.MultiModalInput":
        """Return a prompt's input with its images, which `prepare` has processed."""
        from turnwise.internals import vllm  # seconds to import

        pieces, ranges = [made[one.image.hash] for one in images], []
        for one, piece in zip(images, pieces, strict=True):
            (place,) = piece["mm_placeholders"]["image"]
            ranges.append(replace(place, offset=one.start + place.offset))
        items = vllm.MultiModalKwargsItems({"image": [p["mm_kwargs"]["image"][0] for p in pieces]})
        prompt, salt = inputs["prompt_token_ids"], inputs.get("cache_salt")
        # vLLM caches the model's output for an image by name, so the name changes with the weights.
        names = [f"{one.image.hash} {salt}" if salt else one.image.hash for one in images]
        return vllm.mm_input(prompt, items, {"image": names}, {"image": ranges}, cache_salt=salt)

    async def _processed(self, image: Image) -> "vllm.MultiModalInput":
        from turnwise.internals import vllm

        async with self._processing:
            if (found := self._kept.get(image.hash)) is None:
                picture = await run_in_thread(lambda: decode(image.read(), str(image)))
                found = await vllm.process_image(self._llm, picture, image.hash)
                self._kept[image.hash] = found
                self._size += _bytes(found)
                while self._size > _KEPT_BYTES and len(self._kept) > 1:
                    self._size -= _bytes(self._kept.popitem(last=False)[1])
            self._kept.move_to_end(image.hash)
            return found


def _bytes(made: "vllm.MultiModalInput") -> int:
    """Return the size, in bytes, of an image's tensors."""
    tensors = made["mm_kwargs"]["image"][0].get_data().values()
    return sum(getattr(tensor, "nbytes", 0) for tensor in tensors)

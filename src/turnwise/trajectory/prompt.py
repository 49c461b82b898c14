"""Prompts: the token ids that an engine gets, and the images that some of the ids represent.

A chat template marks an image by one id, and the model's own processor determines which ids
represent the image (`ImageTokens`). These ids replace the mark once, when a prompt is made, so that
engine, audit and trainer see the same ids. Two prompts are equal only if they have the same images
at the same positions.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory.images import Image

Ids = npt.NDArray[np.int32]
PromptLike: TypeAlias = "Prompt | Sequence[int] | npt.NDArray[np.generic]"
"""A prompt, or the ids of a prompt without images."""


class PlacedImage(NamedTuple):
    """An image, and the positions of the ids that represent it."""

    image: Image
    start: int
    """Position of the first of these ids, counted from the prompt's first id."""
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


_EMPTY: Ids = np.zeros(0, np.int32)


@final
class Prompt:
    """The `T` ids of a prompt, and the images among them; immutable.

    It is not a list: slices, sums and comparisons keep the images, and iteration is not possible,
    because it would lose them. A list of ids compares equal (`==`) to a prompt that has the same
    ids and no images.

    Example:
        >>> image = Image.of(b"GIF89a", "gif", 28, 28)
        >>> prompt = Prompt([11]) + Prompt([9, 9, 12], [PlacedImage(image, 0, 2)])
        >>> prompt.tolist(), prompt[1:].images[0].start, prompt == [11, 9, 9, 12]
        ([11, 9, 9, 12], 0, False)
    """

    __slots__ = ("ids", "images")

    ids: Ids
    """The ids, without the images: [T], read-only."""
    images: tuple[PlacedImage, ...]
    """The images, in the order of their positions."""

    def __init__(
        self,
        ids: "Sequence[int] | npt.NDArray[np.generic]" = (),
        images: Iterable[PlacedImage] = (),
    ) -> None:
        if isinstance(ids, np.ndarray):
            if ids.dtype != np.int32 and ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
                raise InputError("token ids must be whole numbers from 0 to below 2**31")
            self.ids = ids.astype(np.int32)  # a copy: the caller may change its own array
        else:
            try:  # an array of the standard library reads lists faster than numpy does
                self.ids = np.frombuffer(array("i", ids), np.int32)
            except (TypeError, OverflowError) as error:
                raise InputError(f"token ids must be whole numbers below 2**31: {error}") from error
        self.ids.flags.writeable = False
        self.images = tuple(images)

    @classmethod
    def of(cls, given: PromptLike) -> "Prompt":
        """Return ids as a prompt, and a prompt unchanged."""
        return given if isinstance(given, Prompt) else cls(given)

    @classmethod
    def joined(cls, *parts: PromptLike) -> "Prompt":
        """Return the ids of all parts, one after another, with their images.

        Example:
            >>> Prompt.joined([11, 12], Prompt([7, 2]), [13]).tolist()
            [11, 12, 7, 2, 13]
        """
        prompts, images, end = [cls.of(part) for part in parts], list[PlacedImage](), 0
        if any([own.images for own in prompts]):
            for own in prompts:
                images += (each._replace(start=each.start + end) for each in own.images)
                end += len(own.ids)
        return cls._of_new(np.concatenate([_EMPTY, *[own.ids for own in prompts]]), tuple(images))

    @classmethod
    def _of_new(cls, ids: Ids, images: tuple[PlacedImage, ...] = ()) -> "Prompt":
        """Return a prompt of an array that nothing else holds, without a copy."""
        made = cls.__new__(cls)
        ids.flags.writeable = False
        made.ids, made.images = ids, images
        return made

    def __add__(self, more: PromptLike) -> "Prompt":
        return Prompt.joined(self, more)

    def __len__(self) -> int:
        return len(self.ids)

    __iter__ = None

    def __getitem__(self, part: slice) -> "Prompt":
        """Return a part of the prompt, with its images; raise TrajectoryError if it cuts an
        image."""
        start, end, step = part.indices(len(self))
        assert step == 1, "a part of a prompt has all ids from one position to another"
        own = self.ids[start:end].copy()  # a view would keep the whole prompt in memory
        if not self.images:
            return Prompt._of_new(own)
        inside = [each for each in self.images if each.start < end and each.end > start < end]
        if cut := [each for each in inside if each.start < start or each.end > end]:
            where = f"positions {cut[0].start} to {cut[0].end}"
            raise TrajectoryError("image_cut", f"a prompt is cut within an image, at {where}")
        moved = [each._replace(start=each.start - start) for each in inside]
        return Prompt._of_new(own, tuple(moved))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            return not self.images and self.tolist() == other
        if not isinstance(other, Prompt):
            return NotImplemented
        return self.images == other.images and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.images))

    def __repr__(self) -> str:
        shown = ", ".join(f"{each.image} at {each.start}" for each in self.images)
        return f"Prompt({self.tolist()}{shown and f', {shown}'})"

    def __reduce__(self) -> "tuple[object, ...]":
        return _restored, (self.ids.tobytes(), self.images)

    def tolist(self) -> list[int]:
        """Return the ids, without the images, as a list."""
        ids: list[int] = self.ids.tolist()
        return ids

    def startswith(self, beginning: PromptLike) -> bool:
        """Return whether a prompt is the beginning of this one, with the same images."""
        first = Prompt.of(beginning)
        return len(first) <= len(self) and self.common_prefix(first) == len(first)

    def common_prefix(self, other: "Prompt") -> int:
        """Return the length of the longest common prefix, in which images must be the same, too."""
        shared = common_length(self.ids, other.ids)
        if self.images or other.images:
            differ = {*self.images} ^ {*other.images}
            shared = min([shared, *(each.start for each in differ)])
        return shared

    @property
    def key(self) -> npt.NDArray[np.integer]:
        """Numbers by which prompts can be compared position by position, [T]: the ids or, where the
        ids represent images, numbers below 0 that differ from image to image."""
        if not self.images:
            return self.ids
        key_T = self.ids.astype(np.int64)
        for each in self.images:
            first = int(each.image.hash[:15], 16) ^ (each.length << 40)
            key_T[each.start : each.end] = np.arange(-1 - first, -1 - first - each.length, -1)
        return key_T


def _restored(ids: bytes, images: tuple[PlacedImage, ...]) -> Prompt:
    return Prompt(np.frombuffer(ids, np.int32), images)


def id_list(given: PromptLike) -> list[int]:
    """Return the ids of a prompt as a list, without its images."""
    return given.tolist() if isinstance(given, Prompt | np.ndarray) else list(given)


class ImageTokens(Protocol):
    """The part of the model's own processor that prompts need."""

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images; the first access may load its processor."""

    @property
    def marker(self) -> int:
        """The id by which the chat template marks an image."""

    def ids_of(self, image: Image) -> Prompt:
        """Return the ids that replace an image's marker, together with the image. Raise
        TrajectoryError (`image_refused`) when the model refuses the image."""


def put_in_place(ids: list[int], images: Sequence[Image], tokens: ImageTokens) -> Prompt:
    """Return rendered ids in which the ids of each image replace its marker.

    Raises:
        TrajectoryError: `image_marker`, when the rendering does not have one marker for each image,
            because the template leaves out an image or a text holds the marker; or as `ids_of`
            raises it.
    """
    places = [at for at, token in enumerate(ids) if token == tokens.marker]
    if len(places) != len(images):
        raise TrajectoryError(
            "image_marker",
            f"the chat template renders {len(images)} images with {len(places)} markers (token "
            f"{tokens.marker}): it leaves out an image, or the text of a message holds the marker",
        )
    parts, end = list[PromptLike](), 0
    for at, image in zip(places, images, strict=True):
        parts += [ids[end:at], tokens.ids_of(image)]
        end = at + 1
    return Prompt.joined(*parts, ids[end:])


def common_length(a_T: npt.NDArray[np.integer], b_T: npt.NDArray[np.integer]) -> int:
    """Return the length of the longest common prefix of two arrays of ids."""
    length = min(len(a_T), len(b_T))
    differs_T = a_T[:length] != b_T[:length]
    first = int(differs_T.argmax()) if length else 0
    return first if length and differs_T[first] else length


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two lists of ids or two texts."""
    length, step, limit = 0, 64, min(len(a), len(b))
    while length < limit:
        step = min(step, limit - length)
        if a[length : length + step] == b[length : length + step]:
            length, step = length + step, step * 2
        elif step == 1:
            break
        else:
            step //= 2
    return length

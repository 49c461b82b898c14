"""Tinker's binary messages: training requests in, log-probs out.

`_MESSAGES` is the protocol's table of fields. A slow test compares it with the SDK's descriptors;
the server itself does not need the SDK. Enumerations are integers here, as they are in messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from turnwise.core.optional import Foreign, optional
from turnwise.engine.protocol import Alternatives, Completion
from turnwise.errors import InputError
from turnwise.tinker.images import Chunk, ImageChunk
from turnwise.trajectory import Prompt

Array = npt.NDArray[np.generic]
JoinChunks = Callable[[Sequence[Chunk], str], Prompt]
"""Makes a prompt from chunks, like `ChunkReader.join`."""
PROTOBUF = "application/x-protobuf"
"""Content type of these messages."""
_FLOAT32, _INT64 = 1, 2
_DTYPES: dict[int, type[np.generic]] = {_FLOAT32: np.float32, _INT64: np.int64, 3: np.int32}
_NO_LOGPROB = -99999.0  # the protocol's value where there is no token
MAX_VALUES = 2**26
"""Maximum number of values in all tensors of a request, each counted as a dense tensor."""
_MAX_PARTS = 2**19  # maximum number of data, chunks and tensors of a request
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_PACKAGE = "turnwise_tinker"
_MESSAGES = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64 *",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, "
    "4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence *, 2 prompt_logprobs bytes, "
    "3 topk_prompt_logprobs TopkLogprobs",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64 *",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedTensor %, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord *, "
    "3 metrics double %",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes, 2 format string, 3 expected_tokens int32",
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image ImageChunk",
    "LossConfigValue": "1 number double, 2 text string",
    "Datum": "1 model_input Chunk *, 2 loss_fn_inputs Tensor %",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum *, "
    "4 loss_fn string, 5 loss_fn_config double %, 6 forward_only bool, "
    "7 loss_fn_config_v2 LossConfigValue %",
}
"""Fields of each message that the server uses: number, name, type, and `*` for a list, `%` for a
mapping from strings. Optional fields of the protocol, and fields in a oneof, are plain fields here:
they are empty if they are not set."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to compute: `T` tokens, and the loss's inputs at each token."""

    ids: Prompt
    inputs: Mapping[str, Array]
    """`loss_fn_inputs`: the tensors of the loss by name; the first dimension is `T`."""


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """A request for a forward pass and, unless `forward_only`, for its gradient."""

    model_id: str
    seq_id: int
    """Position among the model's requests, from 1."""
    data: Sequence[Datum]
    loss: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    mistake: str = ""
    """Reason why the data cannot be used; "" if they can. Such a request still takes its position
    in the model's order."""

    @property
    def size(self) -> int:
        """Bytes of the data."""
        tensors = (each for datum in self.data for each in datum.inputs.values())
        files = sum(len(one.image.data) for datum in self.data for one in datum.ids.images)
        whole = sum(300 + 250 * len(d.inputs) + d.ids.ids.nbytes for d in self.data)
        return files + whole + sum(t.nbytes for t in tensors)


@cache
def message_classes() -> Mapping[str, Foreign]:
    """Return protobuf's classes of the messages, by their names."""
    purpose = "a Tinker server"
    descriptors = optional("google.protobuf.descriptor_pb2", "tinker", purpose)
    pool = optional("google.protobuf.descriptor_pool", "tinker", purpose).DescriptorPool()
    factory = optional("google.protobuf.message_factory", "tinker", purpose)
    file = descriptors.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            number, own, kind, *mark = text.split()
            if mark == ["%"]:
                entry = message.nested_type.add(name=own.title().replace("_", "") + "Entry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, kind)
                kind = f"{name}.{entry.name}"
            _add(message, own, int(number), kind, is_list=bool(mark))
    pool.Add(file)
    return {
        name: factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def _add(message: Foreign, name: str, number: int, kind: str, *, is_list: bool = False) -> None:
    known = _TYPES.get(kind)
    added = message.field.add(name=name, number=number, label=3 if is_list else 1, type=known or 11)
    if known is None:
        added.type_name = f".{_PACKAGE}.{kind}"


def read_training_request(body: bytes, join_chunks: JoinChunks) -> TrainingRequest:
    """Parse a training request, with a `mistake` if its data cannot be used; raise InputError if
    `body` is not such a message. `join_chunks` makes a prompt from each datum's chunks."""
    request = message_classes()["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except Exception as error:
        raise InputError(f"the body is no ForwardBackwardRequest: {error}") from error
    if not request.model_id or request.seq_id < 1:
        raise InputError("forward_backward needs a model_id, and a seq_id from 1 on")
    values = {name: value.text or value.number for name, value in request.loss_fn_config_v2.items()}
    data, mistake = list[Datum](), ""
    try:
        parts = (1 + len(each.model_input) + len(each.loss_fn_inputs) for each in request.data)
        if len(request.data) > _MAX_PARTS or sum(parts) > _MAX_PARTS:
            raise InputError(f"there are more than {_MAX_PARTS:,} data, chunks and tensors in all")
        shapes = [tensor.shape for each in request.data for tensor in each.loss_fn_inputs.values()]
        if not sum(abs(np.prod(shape, dtype=float)) for shape in shapes) <= MAX_VALUES:
            raise InputError(f"the tensors have more than {MAX_VALUES:,} values in all")
        for number, each in enumerate(request.data):
            data.append(_read_datum(each, f"datum {number}", join_chunks))
    except (InputError, ValueError) as error:
        mistake = str(error)
    return TrainingRequest(
        request.model_id,
        request.seq_id,
        data,
        request.loss_fn,
        values or dict(request.loss_fn_config),
        request.forward_only,
        mistake,
    )


def _read_datum(message: Foreign, what: str, join_chunks: JoinChunks) -> Datum:
    chunks = list[Chunk]()
    for chunk in message.model_input:
        if chunk.HasField("image"):
            chunks.append(ImageChunk(chunk.image.data, chunk.image.expected_tokens))
        elif chunk.HasField("encoded_text"):
            chunks.append(_array(chunk.encoded_text.tokens, np.int32, what).tolist())
        else:
            raise InputError(f"{what}: this server computes tokens and images, not audio")
    inputs = {
        name: read_tensor(tensor, f"{what}: {name}")
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(join_chunks(chunks, what), inputs)


def read_tensor(message: Foreign, what: str) -> Array:
    """Return a dense array; values that a sparse tensor does not list are 0."""
    if (kind := _DTYPES.get(message.dtype)) is None:
        raise InputError(f"{what}: the tensor has no type that is known")
    shape = list(message.shape)
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise InputError(f"{what}: a tensor has at most two sizes, none negative, not {shape[:3]}")
    if not message.HasField("sparse_csr"):
        flat = _array(message.dense, kind, what)
        shape = shape or [len(flat)]
        if flat.size != np.prod(shape):
            raise InputError(f"{what}: {flat.size} values do not make a tensor {shape}")
        return flat.reshape(shape)
    sparse = message.sparse_csr
    values = _array(sparse.values, kind, what)
    rows = _array(sparse.crow_indices, np.int64, what)
    columns = _array(sparse.col_indices, np.int64, what)
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    if not fits or np.any(np.diff(rows) < 0) or rows[0] != 0 or rows[-1] != len(values):
        raise InputError(f"{what}: the rows of the sparse tensor are not those of {shape}")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise InputError(f"{what}: a column of the sparse tensor is outside of {shape}")
    dense = np.zeros(shape, kind)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _array(data: bytes, kind: type[np.generic], what: str) -> Array:
    try:
        return np.frombuffer(data, kind)
    except ValueError as error:
        raise InputError(f"{what}: {error}") from error


def training_reply(outputs: Sequence[Array], loss: float) -> bytes:
    """Return the reply to a pass: log-prob and loss of each datum's targets, [2, T] or [2, T, K],
    and the sum of the loss."""
    # The suffix of a metric's name says how a client combines the values of several requests.
    reply = message_classes()["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss}
    )
    # The arrays of one record may differ in their first dimension only.
    for shape, group in groupby(outputs, lambda each: each.shape[2:]):
        data = [each.astype(np.float32) for each in group]
        record = reply.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(data))
        offsets = np.cumsum([0, *(each[0].nbytes for each in data)]).astype(np.int64)
        for number, name in enumerate(("logprobs", "elementwise_loss")):
            tensor = record.fields[name]
            tensor.data = np.concatenate([each[number] for each in data]).tobytes()
            tensor.offsets, tensor.dtype = offsets.tobytes(), _FLOAT32
            tensor.trailing_shape.extend(shape)
    return bytes(reply.SerializeToString())


def sample_reply(
    completions: Sequence[Completion],
    scored: int = 0,
    likeliest: tuple[int, int] = (0, 0),
) -> bytes:
    """Return the reply with the samples of one prompt.

    Args:
        completions: The samples; the first also has the prompt's log-probs.
        scored: Number of tokens at the prompt's end whose log-probs are asked for.
        likeliest: Number of most likely tokens asked for at each of these prompt tokens, and at
            each sampled token.
    """
    first = completions[0]
    reply = message_classes()["SampleResponse"]()
    for each in completions:
        added = reply.sequences.add(
            stop_reason=int(each.finish_reason == "length"),
            tokens=np.asarray(each.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(each.logprobs, np.float32).tobytes(),
        )
        _put_likeliest(added, "topk_sampled_logprobs", each.alternatives, likeliest[1])
    if scored and (prompt := first.prompt_logprobs) is not None:
        before = len(prompt) - scored
        values = [np.nan if value is None else value for value in prompt]
        values[:before] = [np.nan] * before
        reply.prompt_logprobs = np.asarray(values, np.float32).tobytes()
        rows = first.prompt_alternatives[max(0, before - 1) :]  # no row for the first token
        rows = [[] for _ in range(len(prompt) - len(rows))] + rows
        _put_likeliest(reply, "topk_prompt_logprobs", rows, likeliest[0])
    return bytes(reply.SerializeToString())


def _put_likeliest(message: Foreign, name: str, rows: Alternatives, count: int) -> None:
    """Set the most likely tokens of each position; in its row they follow the position's token."""
    if not count:
        return
    ids = np.zeros((len(rows), count), np.int32)
    logprobs = np.full((len(rows), count), _NO_LOGPROB, np.float32)
    for number, row in enumerate(rows):
        possible = [each for each in row[1 : count + 1] if each[1] > _NO_LOGPROB]
        ids[number, : len(possible)] = [each[0] for each in possible]
        logprobs[number, : len(possible)] = [each[1] for each in possible]
    top = getattr(message, name)
    top.token_ids, top.logprobs = ids.tobytes(), logprobs.tobytes()
    top.k, top.length = count, len(rows)

"""What replicas and vision encoders say to each other, in the frames of the direct stream.

It begins with the handshake of the direct stream (`handshake.py`). Then, again and again: one
`EncodeRequest`, which names the image alone. The encoder answers `Features`, or `SendPixels` when
it does not know them and has room; then the pixels follow as they lie in memory, float32. While
it lasts, `Heartbeat` comes every `HEARTBEAT_S`. `Features` are followed by their numbers, 16 bits
each; `Failed` says why there are none. Raw numbers are little-endian.
"""

from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from serve_app.transport import wire

Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Digest = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
MOST_DIMENSIONS = 8
MOST_TENANT_CHARACTERS = 64
DType = Literal["bfloat16", "float16"]
DTYPES: dict[DType, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class EncodeRequest(msgspec.Struct, frozen=True, tag="ask features"):
    """`shape` of the pixels, `grid`, `digest` and `rows`: as in PreparedImage. `tower`: the name
    of the file with the weights that are meant. `tenant`: on whose behalf."""

    tower: Digest
    digest: Digest
    shape: Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, max_length=MOST_DIMENSIONS)]
    grid: tuple[Size, Size]
    rows: Size
    tenant: Annotated[str, msgspec.Meta(max_length=MOST_TENANT_CHARACTERS)] = ""


class SendPixels(msgspec.Struct, frozen=True, tag="bring pixels"):
    pass


class Features(msgspec.Struct, frozen=True, tag="features"):
    rows: Size
    width: Size
    dtype: DType


Message = (
    wire.Challenge
    | wire.Proof
    | wire.Accepted
    | EncodeRequest
    | SendPixels
    | wire.Heartbeat
    | Features
    | wire.Failed
)

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def decode(body: bytes | bytearray) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise wire.WireError(f"Malformed message: {error}") from error


def telling(features: Tensor) -> Features:
    """What stands before the numbers of `features` [rows, width]."""
    (name,) = (name for name, dtype in DTYPES.items() if dtype is features.dtype)
    rows, width = features.shape
    return Features(rows, width, name)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, which are shared, not copied."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.view(-1).view(torch.uint8).numpy().data

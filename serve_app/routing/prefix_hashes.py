"""Prefix hashes of a task's prompt, computed before it is tokenised.

Everything that determines the prompt's tokens is hashed in the prompt's order, so that consecutive
turns of a conversation share prefixes. The hashes only influence the choice of the replica.
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b

import msgspec

from model_zoo.chat.messages import ImagePart, Message
from serve_app.messages.replica_load import PrefixHashes
from serve_app.messages.tasks import (
    Conversation,
    EmbeddingTask,
    Infill,
    PromptSource,
    PromptTask,
    RawText,
    Task,
    TokenIds,
)
from serve_app.routing.prefix_memory import BYTES_PER_TOKEN, hash_prefixes

# Typical number of tokens of an image; the real number is not known here.
IMAGE_TOKENS = 512
# Larger image files are hashed in part: the first and last piece and some in between.
WHOLE_BYTES = 64 * 1024
PIECE_BYTES = 4096
PIECES = 8
END = b"\x1e"


def prefix_hashes_of(task: Task) -> PrefixHashes:
    """The hashes of a task. Texts to embed are not cached, so only their length counts."""
    if isinstance(task, EmbeddingTask):
        size = sum(len(piece) for text in task.texts for piece in _content(text))
        return PrefixHashes((), (), -(-size // BYTES_PER_TOKEN))
    if isinstance(task, PromptTask):  # takes no work of the engine
        return PrefixHashes((), (), 0)
    # Prompts with different salts do not share prefixes, as in the caches.
    head = task.model.encode() + END + task.cache_salt.encode() + END
    hashes = hash_prefixes(b"".join((head, *_content(task.prompt))))
    if task.resume is None:
        return hashes
    return replace(hashes, tokens=hashes.tokens + len(task.resume.tokens))


def _content(prompt: PromptSource) -> Iterator[bytes]:
    match prompt:
        case Conversation(messages, thinking, after, variables, tools, template=template):
            yield _text(template) + END
            yield f"{thinking}".encode() + END
            yield json.dumps(variables, sort_keys=True).encode() + END
            yield msgspec.json.encode(tools) + END
            yield _ids(after)
            for message in messages:
                yield from _message(message)
        case RawText(text, images):
            yield _text(text)
            yield from map(_image, images)
        case TokenIds(ids):
            yield _ids(ids)
        case Infill(before, after, template):
            yield from (_text(template), END, _text(before), END, _text(after))


def _message(message: Message) -> Iterator[bytes]:
    yield message.role.encode() + END
    yield _text(message.name or "")
    content = message.content
    for part in (content,) if isinstance(content, str) else content:
        yield _image(part) if isinstance(part, ImagePart) else _text(part)
    yield _text(message.thinking or "")
    for call in message.tool_calls:
        yield _text(call.name) + msgspec.json.encode(call.arguments)
    yield END


def _text(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _ids(ids: Iterable[int]) -> bytes:
    """The content of token ids: four bytes per token, about as many as text has."""
    return array("I", ids).tobytes()


def _image(image: ImagePart) -> bytes:
    """The image's digest, repeated up to the length of `IMAGE_TOKENS` tokens."""
    data = memoryview(image.data)
    digest = blake2b(len(data).to_bytes(8), digest_size=32)
    if len(data) <= WHOLE_BYTES:
        digest.update(data)
    else:
        step = (len(data) - PIECE_BYTES) // PIECES
        for begin in range(0, len(data) - PIECE_BYTES + 1, step):
            digest.update(data[begin : begin + PIECE_BYTES])
        digest.update(data[-PIECE_BYTES:])
    found = digest.digest()
    return found * (IMAGE_TOKENS * BYTES_PER_TOKEN // len(found))

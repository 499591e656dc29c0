"""What a task's prompt begins with, before anybody has made tokens of it: its chain.

Whatever decides the prompt's tokens goes in, in the prompt's order, so that the next turn of a
conversation has the beginnings of the one before. Chains are hints: equal ones say where to ask,
never what is answered.
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b

from model_zoo.chat.messages import ImagePart, Message
from serve_app.gateway.tasks import (
    Conversation,
    EmbeddingTask,
    PromptSource,
    RawText,
    Task,
    TokenIds,
)
from serve_app.routing.prefixes import BYTES_PER_TOKEN, PrefixHashes, chain_of

# An image's tokens are not known here; it stands in the chain for about as many as most have.
IMAGE_TOKENS = 512
# Of a larger file the beginning, the end and pieces between tell it from others.
WHOLE_BYTES = 64 * 1024
PIECE_BYTES = 4096
PIECES = 8
END = b"\x1e"


def prefix_hashes_of(task: Task) -> PrefixHashes:
    """Vectors share no beginnings: nothing is kept of their texts, so only the length counts."""
    if isinstance(task, EmbeddingTask):
        size = sum(len(piece) for text in task.texts for piece in _content(text))
        return PrefixHashes((), (), -(-size // BYTES_PER_TOKEN))
    # Prompts under different salts have no beginning in common, since no cache has.
    head = task.model.encode() + END + task.cache_salt.encode() + END
    chain = chain_of(b"".join((head, *_content(task.prompt))))
    if task.begun is None:
        return chain
    return replace(chain, tokens=chain.tokens + len(task.begun.tokens))


def _content(prompt: PromptSource) -> Iterator[bytes]:
    match prompt:
        case Conversation(messages, thinking, after, variables):
            yield f"{thinking}".encode() + END
            yield json.dumps(variables, sort_keys=True).encode() + END
            yield _ids(after)
            for message in messages:
                yield from _message(message)
        case RawText(text, images):
            yield _text(text)
            yield from map(_image, images)
        case TokenIds(ids):
            yield _ids(ids)


def _message(message: Message) -> Iterator[bytes]:
    yield message.role.encode() + END
    yield _text(message.name or "")
    content = message.content
    for part in (content,) if isinstance(content, str) else content:
        yield _image(part) if isinstance(part, ImagePart) else _text(part)
    yield _text(message.thinking or "")
    for call in message.tool_calls:
        yield _text(f"{call.name}{call.arguments}")
    yield END


def _text(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _ids(ids: Iterable[int]) -> bytes:
    """As many bytes for each token as a text has of them."""
    return array("I", ids).tobytes()


def _image(image: ImagePart) -> bytes:
    """A digest, so often that it is as long as an image is in tokens."""
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

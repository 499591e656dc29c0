"""Making prompts in threads of each model's own, so that a slow template delays no other model.

Prompts with images have fewer, for decoding takes memory. What images take meanwhile, and as long
as their requests last, is lent by the model's album. Tenants are served in turn.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from model_zoo.chat.messages import ImagePart
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.multimodal.image_cache import ImageCache, ImageLease
from serve_app.gateway.fair_gate import FairGate
from serve_app.gateway.tasks import Conversation, PromptSource, RawText, TokenIds

TEXT_THREADS = 4
IMAGE_THREADS = 2
MOST_WAITING = 64  # prompts with images, whose bytes are held until their turn


class Preparer:
    """Makes prompts for one model. `image_cache`: leases room for images."""

    def __init__(self, model: ChatModel, image_cache: ImageCache | None = None) -> None:
        self._model = model
        self.image_cache = image_cache or ImageCache()
        self._texts = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="prompts")
        self._threads = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="images")
        self._text_gate = FairGate(TEXT_THREADS)
        self._image_gate = FairGate(
            IMAGE_THREADS, max_waiting=MOST_WAITING, things="prompts with images"
        )

    @property
    def at_work(self) -> int:
        """Prompts that are being made or wait for that."""
        return self._text_gate.count + self._image_gate.count

    def lease(
        self, source: PromptSource, *, salt: str = "", tenant: str | None = None
    ) -> ImageLease:
        """For as long as the request lasts; raises where there is no room for its images.

        Prepared images are shared only among requests with the same `salt`.
        """
        file_bytes = sum(len(image.data) for image in images_of(source))
        return self.image_cache.lease(file_bytes, salt=salt.encode(), tenant=tenant)

    async def prompt(
        self,
        source: PromptSource,
        *,
        at_most: int,
        lease: ImageLease,
        now: datetime | None = None,
        tenant: str = "",
    ) -> Prompt:
        """`at_most`: positions that there are. `now`: the time that templates are told.

        RequestError tells what cannot be shown so, OverloadedError that there is no room now.
        """
        seeing = bool(images_of(source))
        gate = self._image_gate if seeing else self._text_gate
        threads = self._threads if seeing else self._texts
        await gate.enter(tenant)
        # A thread cannot be stopped: whoever leaves keeps their place and room until it is done.
        loop = asyncio.get_running_loop()
        lease.begin_work()
        made = threads.submit(self._prompt, source, at_most, now, lease)
        made.add_done_callback(lambda _: lease.end_work())
        made.add_done_callback(lambda _: loop.call_soon_threadsafe(gate.leave, tenant))
        return await asyncio.wrap_future(made)

    def close(self) -> None:
        for threads in (self._texts, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _prompt(
        self, source: PromptSource, at_most: int, now: datetime | None, lease: ImageLease
    ) -> Prompt:
        match source:
            case Conversation(messages, thinking, after, variables):
                room = max(0, at_most - len(after))
                prompt = self._model.prepare(
                    messages,
                    thinking=thinking,
                    variables=variables,
                    at_most=room,
                    now=now,
                    lease=lease,
                )
                return self._continued(after, prompt) if after else prompt
            case RawText(text, images):
                return self._model.prepare_text(text, images, at_most=at_most, lease=lease)
            case TokenIds(ids):
                return Prompt(ids)

    def _continued(self, after: tuple[int, ...], prompt: Prompt) -> Prompt:
        """The prompt behind tokens of an earlier one, which have begun a text already."""
        begins_seeing = any(span.start == 0 for span in prompt.spans)
        bos = self._model.tokenizer.bos_id
        begins_anew = prompt.tokens[:1] == (bos,) and not begins_seeing
        tokens = after + prompt.tokens[begins_anew:]
        moved = len(after) - begins_anew
        spans = (dataclasses.replace(span, start=span.start + moved) for span in prompt.spans)
        return Prompt(tokens, tuple(spans), prompt.images)


def images_of(source: PromptSource) -> Sequence[ImagePart]:
    match source:
        case Conversation(messages):
            seen = (message for message in messages if type(message.content) is tuple)
            return [image for message in seen for image in message.images]
        case RawText(images=images):
            return images
    return ()

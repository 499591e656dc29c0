"""Making prompts in threads: those with images in few of their own, for decoding takes memory."""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

from model_zoo.chat_model import ChatModel, Prompt
from runtime.errors import OverloadedError
from serve_app.task import Conversation, PromptSource, RawText, TokenIds

IMAGE_THREADS = 2
MOST_WAITING = 64  # prompts with images, whose bytes are held until their turn


class Preparer:
    """Makes prompts for one model."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="images")
        self.at_work = 0

    async def prompt(self, source: PromptSource, *, at_most: int) -> Prompt:
        """`at_most`: positions that there are. RequestError tells what cannot be shown so."""
        if not has_images(source):
            return await asyncio.to_thread(self._prompt, source, at_most)
        if self.at_work >= IMAGE_THREADS + MOST_WAITING:
            raise OverloadedError(f"{self.at_work} prompts with images are being prepared")
        # A thread cannot be stopped: whoever leaves keeps their place until it is done.
        self.at_work += 1
        made = self._threads.submit(self._prompt, source, at_most)
        loop = asyncio.get_running_loop()
        made.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        return await asyncio.wrap_future(made)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self) -> None:
        self.at_work -= 1

    def _prompt(self, source: PromptSource, at_most: int) -> Prompt:
        match source:
            case Conversation(messages, thinking, after):
                prompt = self._model.prepare(
                    messages, thinking=thinking, at_most=max(0, at_most - len(after))
                )
                return self._continued(after, prompt) if after else prompt
            case RawText(text, images):
                return self._model.prepare_text(text, images, at_most=at_most)
            case TokenIds(ids):
                return Prompt(ids)

    def _continued(self, after: tuple[int, ...], prompt: Prompt) -> Prompt:
        """The prompt behind tokens of an earlier one, which have begun a text already."""
        begins_anew = prompt.tokens[:1] == (self._model.tokenizer.bos_id,)
        tokens = after + prompt.tokens[begins_anew:]
        moved = len(after) - begins_anew
        spans = (dataclasses.replace(span, start=span.start + moved) for span in prompt.spans)
        return Prompt(tokens, tuple(spans), prompt.images)


def has_images(source: PromptSource) -> bool:
    match source:
        case Conversation(messages):
            return any(type(each.content) is tuple and each.images for each in messages)
        case RawText(images=images):
            return bool(images)
    return False

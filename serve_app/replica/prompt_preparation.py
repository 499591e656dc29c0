"""Rendering and tokenising prompts in worker threads of each model.

A slow template of one model does not delay other models. Prompts with images have separate threads,
fewer because decoding images takes memory. Tenants are served in turn.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from functools import partial

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.multimodal.image_cache import ImageCache, ImageLease
from runtime.errors import OverloadedError, RequestError
from serve_app.fair_gate import FairGate
from serve_app.messages.tasks import (
    ChatTask,
    Conversation,
    Infill,
    PromptSource,
    PromptTask,
    RawText,
    TokenIds,
)
from serve_app.replica.image_memory_queue import ImageMemoryQueue
from serve_app.replica.request_templates import RequestTemplates
from serve_app.replica.truncation import (
    cut_text,
    limiting_setting,
    shortened_tokens,
    with_recent_turns,
    with_tokens_cut,
)

AnyTask = ChatTask | PromptTask

TEXT_THREADS = 4
TENANT_TEXT_THREADS = 3  # of one tenant, whose templates may be slow
IMAGE_THREADS = 2
MAX_WAITING_TEXTS = 1024
MAX_WAITING_IMAGES = 64  # prompts with images; their files stay in memory while they wait


class PromptPreparer:
    """Prepares the prompts of one model. Images take memory leased from `image_cache`.

    `name`: the model's name in errors. `context_tokens`: limit of prompt and answer together.
    """

    def __init__(
        self,
        model: ChatModel,
        image_cache: ImageCache | None = None,
        *,
        name: str = "",
        context_tokens: int,
    ) -> None:
        self._model = model
        self._name = name
        self._context_tokens = context_tokens
        self._templates = RequestTemplates(model)
        self.image_cache = image_cache or ImageCache()
        self._image_memory = ImageMemoryQueue(self.image_cache)
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="prompts")
        self._image_threads = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="images")
        self._text_gate = FairGate(
            TEXT_THREADS,
            tenant_places=TENANT_TEXT_THREADS,
            max_waiting=MAX_WAITING_TEXTS,
            things="prompts",
        )
        self._image_gate = FairGate(
            IMAGE_THREADS, max_waiting=MAX_WAITING_IMAGES, things="prompts with images"
        )

    @asynccontextmanager
    async def prepared(self, task: AnyTask, *, max_tokens: int) -> AsyncIterator[Prompt]:
        """The task's prompt; the memory of its images is released on exit.

        `max_tokens`: limit of prompt and answer. Images beyond it are not decoded; a text prompt
        may be longer, unless the task has a truncation. RequestError: the model cannot take the
        prompt. OverloadedError: too many prompts wait, for threads or for the memory of images,
        unless the task continues an answer.
        """
        images = images_of(task.prompt)
        limited = not (isinstance(task, ChatTask) and task.resume is not None)
        if not images:
            await self._text_gate.enter(task.tenant, limited=limited)
            work = self._text_threads.submit(self._prepare, task, max_tokens, None)
            self._text_gate.leave_after(work, task.tenant)
            yield await asyncio.wrap_future(work)
            return
        ahead = 0
        while True:
            with closing(await self._lease(task, images, ahead=ahead, limited=limited)) as lease:
                try:
                    prompt = await self._with_images(task, max_tokens, lease, limited=limited)
                except OverloadedError:
                    if lease.missing is None:
                        raise
                    ahead = lease.missing  # wait for it, without holding any memory
                else:
                    yield prompt
                    return

    def close(self) -> None:
        for threads in (self._text_threads, self._image_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _with_images(
        self, task: AnyTask, max_tokens: int, lease: ImageLease, *, limited: bool
    ) -> Prompt:
        await self._image_gate.enter(task.tenant, limited=limited)
        lease.begin_work()
        work = self._image_threads.submit(self._prepare, task, max_tokens, lease)
        work.add_done_callback(lambda _: lease.end_work())
        self._image_gate.leave_after(work, task.tenant)
        return await asyncio.wrap_future(work)

    async def _lease(
        self, task: AnyTask, images: Sequence[ImagePart], *, ahead: int, limited: bool
    ) -> ImageLease:
        return await self._image_memory.lease(
            sum(len(image.data) for image in images),
            ahead=ahead,
            salt=task.cache_salt.encode(),
            tenant=task.tenant,
            limited=limited,
        )

    def _prepare(self, task: AnyTask, max_tokens: int, lease: ImageLease | None) -> Prompt:
        match task.prompt:
            case Conversation() as conversation:
                return self._converse(task, conversation, max_tokens, lease)
            case RawText(text, images, bos):
                text = self._cut_text(task, text, max_tokens)
                prompt = self._model.prepare_text(
                    text, images, bos=bos, at_most=max_tokens, lease=lease
                )
                return self._cut(task, prompt, max_tokens)
            case Infill(before, after, template):
                model = self._templates.model(template, salt=task.cache_salt)
                if not model.inserts:
                    raise RequestError(f'"{self._name}" does not support insert')
                return model.prepare_infill(before, after, now=task.now)
            case TokenIds(ids):
                return Prompt(ids)

    def _converse(
        self, task: AnyTask, source: Conversation, max_tokens: int, lease: ImageLease | None
    ) -> Prompt:
        model = self._templates.model(
            source.template, salt=task.cache_salt, default=source.default_template
        )
        prepare = partial(
            model.prepare,
            tools=source.tools,
            thinking=self._served_thinking(model, source),
            thinking_budget=source.thinking_budget,
            variables=source.variables,
            reply=source.reply,
            at_most=max(0, max_tokens - len(source.after)),
            now=task.now,
            lease=lease,
        )
        if task.truncation is not None and task.truncation.turns:
            return with_recent_turns(
                source.messages,
                prepare,
                limit=max_tokens - 1,
                shortened=shortened_tokens(task, max_tokens),
                least=self._least_tokens,
                model=self._name,
                setting=limiting_setting(max_tokens, served_tokens=self._context_tokens),
            )
        prompt = prepare(
            [
                dataclasses.replace(m, content=self._cut_text(task, m.content, max_tokens))
                if task.truncation is not None and isinstance(m.content, str)
                else m
                for m in source.messages
            ]
        )
        prompt = self._appended(source.after, prompt) if source.after else prompt
        return self._cut(task, prompt, max_tokens)

    def _served_thinking(self, model: ChatModel, source: Conversation) -> bool | str | None:
        """`thinking`, but None if it is optional and the model cannot think."""
        if not source.thinking or model.reply_format.thinks:
            return source.thinking
        if not source.thinking_optional:
            raise RequestError(f'"{self._name}" does not support thinking')
        return None

    def _least_tokens(self, messages: Sequence[Message]) -> int:
        characters = sum(len(message.text) for message in messages)
        return -(-characters // self._model.tokenizer.longest_token)

    def _cut_text(self, task: AnyTask, text: str, max_tokens: int) -> str:
        """The text, without what `_cut` would remove in any case."""
        if task.truncation is None:
            return text
        longest = self._model.tokenizer.longest_token
        return cut_text(text, task.truncation, most_tokens=max_tokens, longest_token=longest)

    def _cut(self, task: AnyTask, prompt: Prompt, max_tokens: int) -> Prompt:
        if task.truncation is None:
            return prompt
        return with_tokens_cut(
            prompt,
            limit=max_tokens - 1,
            shortened=shortened_tokens(task, max_tokens),
            keep=task.truncation.keep,
        )

    def _appended(self, before: tuple[int, ...], prompt: Prompt) -> Prompt:
        """The prompt after the tokens of an earlier one; its BOS token is dropped."""
        begins_with_image = any(span.start == 0 for span in prompt.spans)
        bos = self._model.tokenizer.bos_id
        dropped = int(prompt.tokens[:1] == (bos,) and not begins_with_image)
        offset = len(before) - dropped
        spans = (dataclasses.replace(span, start=span.start + offset) for span in prompt.spans)
        tokens = before + prompt.tokens[dropped:]
        return dataclasses.replace(prompt, tokens=tokens, spans=tuple(spans))


def images_of(source: PromptSource) -> Sequence[ImagePart]:
    match source:
        case Conversation(messages):
            # Only messages with images have a tuple of parts; reading `images` of all would cost
            # time.
            mixed = (message for message in messages if type(message.content) is tuple)
            return [image for message in mixed for image in message.images]
        case RawText(images=images):
            return images
    return ()

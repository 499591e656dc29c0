"""Texts to vectors on one model's engine."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from model_zoo.chat_model import ChatModel
from runtime.aio import AsyncEngine
from runtime.errors import GenerationFailedError, PromptTooLongError
from runtime.request import (
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Pooling,
    SamplingParams,
    StopRules,
)
from serve_app.task import ChatDelta, EmbeddingTask, RawText, TokenIds, together

AT_ONCE = 16


class TextEmbedder:
    """Computes the vectors of an `EmbeddingTask`, several texts at a time.

    `context_tokens`: the longest text that the engine takes.
    """

    def __init__(self, model: ChatModel, engine: AsyncEngine, *, context_tokens: int) -> None:
        self._model = model
        self._engine = engine
        self._context_tokens = context_tokens
        self._numbers = itertools.count()

    async def deltas(self, task: EmbeddingTask) -> AsyncGenerator[ChatDelta, None]:
        """One delta with all vectors. What is wrong with one text is the answer for all."""
        yield await self._embed(task)

    async def _embed(self, task: EmbeddingTask) -> ChatDelta:
        limit = min(self._context_tokens, task.context_tokens or self._context_tokens)
        prompts = await asyncio.to_thread(
            lambda: [self._tokens(text, limit, truncate=task.truncate) for text in task.texts]
        )
        at_once = asyncio.Semaphore(AT_ONCE)

        async def vector(tokens: tuple[int, ...]) -> ChatDelta:
            async with at_once:
                return await self._vector(f"{task.id}/{next(self._numbers)}", tokens)

        asked = [asyncio.create_task(vector(tokens)) for tokens in prompts]
        try:
            return together(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _tokens(self, text: RawText | TokenIds, limit: int, *, truncate: bool) -> tuple[int, ...]:
        match text:
            case RawText(words):
                # One token too many tells that it is too long; no more need to be cut.
                words = words[: (limit + 1) * self._model.tokenizer.longest_token]
                tokens = self._model.tokenizer.encode_document(words)
                if truncate and len(tokens) > limit:
                    tokens = self._model.tokenizer.encode_document(words, at_most=limit)
            case TokenIds(ids):
                tokens = list(ids[:limit] if truncate else ids)
        if len(tokens) > limit:
            raise PromptTooLongError(
                f"the input length exceeds the context length: a text has {len(tokens):,} tokens; "
                f"model '{self._model.description.name}' takes {limit:,} at a time"
            )
        return tuple(tokens)

    async def _vector(self, id: str, tokens: tuple[int, ...]) -> ChatDelta:
        decoder = self._model.decoder
        whole = ImageSpan(0, len(tokens), whole=True, digest=b"")
        request = GenerationRequest(
            id,
            tokens,
            StopRules(max_tokens=1),
            SamplingParams(),
            spans=() if decoder.causal else (whole,),
            pooling=Pooling(self._model.description.pooling or Pooling.LAST),
        )
        async with aclosing(self._engine.stream(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.finish is FinishReason.FAILED:
                    self._engine.check()
                    raise GenerationFailedError(delta.error or "The model could not go on.")
        assert delta.vector is not None
        return ChatDelta(finish=delta.finish, usage=delta.usage, vectors=(delta.vector,))

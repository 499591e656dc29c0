"""Texts to vectors on one model's engine."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from model_zoo.chat_model import ChatModel
from runtime.engine.async_engine import AsyncEngine, failure
from runtime.engine.request import (
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Pooling,
    SamplingParams,
    StopRules,
)
from runtime.errors import PromptTooLongError, RequestError
from serve_app.gateway.fair_gate import FairGate
from serve_app.gateway.tasks import ChatDelta, EmbeddingTask, RawText, TokenIds, together

TOKENIZED_AT_ONCE = 2
MOST_WAITING = 16_384  # texts, beside those that the engine has
# More tokens than WordPiece makes of a word at most.
LAST_WORD = 128
# How many times longer a text may be than tokens are if each is the longest.
GROWTH = 64


class TextEmbedder:
    """Computes the vectors of an `EmbeddingTask`, several texts at a time, tenants in turn.

    `name`: under which clients know the model. `context_limit`: the tokens of the longest text that
    a task may have, at most what the engine takes.
    """

    def __init__(
        self,
        model: ChatModel,
        engine: AsyncEngine,
        *,
        name: str,
        context_limit: Callable[[EmbeddingTask], int],
    ) -> None:
        self._model = model
        self._name = name
        self._engine = engine
        self._context_limit = context_limit
        self._numbers = itertools.count()
        self._tokenizing = FairGate(TOKENIZED_AT_ONCE)
        # As many texts as one tenant may have in the engine: none is refused because of others.
        self._computing = FairGate(
            engine.limits.tenant_share, max_waiting=MOST_WAITING, things="texts"
        )

    async def deltas(self, task: EmbeddingTask) -> AsyncGenerator[ChatDelta, None]:
        """One delta with all vectors. What is wrong with one text is the answer for all."""
        yield await self._embed(task)

    async def _embed(self, task: EmbeddingTask) -> ChatDelta:
        limit = self._context_limit(task)
        async with self._tokenizing.place(task.tenant):
            prompts = await asyncio.to_thread(
                lambda: [self._tokens(text, limit, truncate=task.truncate) for text in task.texts]
            )

        async def vector(tokens: tuple[int, ...]) -> ChatDelta:
            async with self._computing.place(task.tenant):
                return await self._vector(task, tokens)

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
                tokens = self._document(words, limit, truncate=truncate)
            case TokenIds(ids):
                tokens = list(ids[:limit] if truncate else ids)
        if not tokens:
            tokens = [self._empty_text()]
        if len(tokens) > limit:
            raise PromptTooLongError(
                f"the input length exceeds the context length: a text has more than {limit:,} "
                f"tokens, which is what model '{self._name}' takes at a time"
            )
        return tuple(tokens)

    def _document(self, words: str, limit: int, *, truncate: bool) -> list[int]:
        """Of a text that is far too long only a beginning, which is too long as well.

        It grows until it is, since there are tokenizers that drop spaces or make one unknown token
        of any word. Its last word, which may be cut, then lies behind the limit.
        """
        tokenizer = self._model.tokenizer
        length = (limit + 1) * tokenizer.longest_token
        longest = GROWTH * length
        tokens = tokenizer.encode_document(words[:length])
        while len(tokens) <= limit + LAST_WORD and length < min(len(words), longest):
            length *= 2
            tokens = tokenizer.encode_document(words[:length])
        if truncate and len(tokens) > limit:
            return tokenizer.encode_document(words[:length], at_most=limit)
        if not truncate and length < len(words) and len(tokens) <= limit:
            raise PromptTooLongError(
                f"the input length exceeds the context length: a text has {len(words):,} "
                f"characters; with a context of {limit:,} tokens, {length:,} are read"
            )
        return tokens

    def _empty_text(self) -> int:
        """The token that a text without tokens is read as: one empty text fails no others."""
        tokenizer = self._model.tokenizer
        token = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if token is None:
            raise RequestError(
                f"a text has no tokens, and model '{self._name}' has neither a "
                "BOS nor an EOS token to stand for it"
            )
        return token

    def _pooling(self) -> Pooling:
        """As the file says; else the last token's state, which alone has seen all of the text, or
        the mean where every token sees all, as sentence-transformers takes it."""
        model = self._model
        unstated = Pooling.LAST if model.decoder.causal else Pooling.MEAN
        return Pooling(model.description.pooling or unstated)

    async def _vector(self, task: EmbeddingTask, tokens: tuple[int, ...]) -> ChatDelta:
        decoder = self._model.decoder
        whole = ImageSpan(0, len(tokens), whole=True, digest=b"")
        request = GenerationRequest(
            f"{task.id}/{next(self._numbers)}",
            tokens,
            StopRules(max_tokens=1),
            SamplingParams(),
            spans=() if decoder.causal else (whole,),
            pooling=self._pooling(),
            tenant=task.tenant,
        )
        async with aclosing(self._engine.stream(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.finish is FinishReason.FAILED:
                    raise failure(self._engine, delta)
        assert delta.vector is not None
        return ChatDelta(finish=delta.finish, usage=delta.usage, vectors=(delta.vector,))

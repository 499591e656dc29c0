"""Embedding and ranking texts on one model's engine."""

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress

import numpy as np
import torch

from model_zoo.chat_model import ChatModel
from model_zoo.layers.embedding_head import EmbeddingHead
from model_zoo.layers.ranking_head import RankingHead
from model_zoo.tokenizers.pairs import DocumentEncoder
from runtime.engine.async_engine import AsyncEngine, failure
from runtime.engine.request import (
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Pooling,
    SamplingParams,
    StopRules,
)
from runtime.errors import OverloadedError, PromptTooLongError, RequestError
from serve_app.fair_gate import FairGate
from serve_app.messages.tasks import ChatDelta, EmbeddingTask, RawText, TokenIds, merge_embeddings

TOKENIZING_TASKS = 2
MAX_WAITING = 16_384  # texts that wait outside the engine
# More tokens than WordPiece makes of one word.
MAX_WORD_TOKENS = 128
# Interval at which each refused text checks whether the engine has room.
ROOM_CHECK_S = 0.1
# Limit of the tokenised prefix of a text, as a multiple of the longest token times the context.
MAX_LENGTH_FACTOR = 64


class TextEmbedder:
    """Computes the vectors of an `EmbeddingTask`; tenants are served in turn.

    `name`: the model's name in error messages.
    """

    def __init__(self, model: ChatModel, engine: AsyncEngine, *, name: str) -> None:
        self._model = model
        self._name = name
        self._engine = engine
        self._request_numbers = itertools.count()
        self._tokenizing = FairGate(TOKENIZING_TASKS)
        self._threads = ThreadPoolExecutor(TOKENIZING_TASKS, thread_name_prefix="texts")
        # At most one tenant's share of the engine, so that the engine refuses no texts while there
        # are no other requests.
        self._computing = FairGate(
            engine.limits.tenant_share, max_waiting=MAX_WAITING, things="texts"
        )

    async def embed(self, task: EmbeddingTask, *, max_tokens: int) -> ChatDelta:
        """One delta with all vectors, or scores if the task has queries. An error of one text fails
        the task.

        `max_tokens`: limit of each text, including its query.
        """
        self._refuse_other_tasks(task)
        self._engine.check_room(task.tenant)  # another replica may have room
        prompts = await self._tokenized_task(task, max_tokens)

        async def vector(tokens: tuple[int, ...]) -> ChatDelta:
            async with self._computing.place(task.tenant):
                return await self._vector_once_admitted(task, tokens)

        vectors = [asyncio.create_task(vector(tokens)) for tokens in prompts]
        try:
            merged = merge_embeddings(await asyncio.gather(*vectors))
        finally:
            for each in vectors:
                each.cancel()
            await asyncio.gather(*vectors, return_exceptions=True)
        head = self._model.ranking or self._model.embedding_head
        if head is None:
            return merged
        results = await asyncio.to_thread(_results, head, merged.vectors)
        return dataclasses.replace(merged, vectors=results)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _tokenized_task(self, task: EmbeddingTask, limit: int) -> list[tuple[int, ...]]:
        await self._tokenizing.enter(task.tenant)
        work = self._threads.submit(self._prompts, task, limit)
        self._tokenizing.leave_after(work, task.tenant)
        return await asyncio.wrap_future(work)

    def _refuse_other_tasks(self, task: EmbeddingTask) -> None:
        if task.queries and self._model.ranking is None:
            raise RequestError(
                f'"{self._name}" does not support rerank: its file has no ranking head'
            )
        if not task.queries and self._model.ranking is not None:
            raise RequestError(
                f'"{self._name}" does not support embedding: it ranks texts; use /v1/rerank'
            )

    def _prompts(self, task: EmbeddingTask, limit: int) -> list[tuple[int, ...]]:
        if not task.queries:
            encode = self._model.tokenizer.encode_document
            return [self._tokens(text, limit, task.truncate, encode) for text in task.texts]
        encoders = [self._pair_encoder(query, limit) for query in task.queries]
        if len(encoders) == 1:
            encoders *= len(task.texts)
        return [
            self._tokens(text, limit, task.truncate, encode)
            for encode, text in zip(encoders, task.texts, strict=True)
        ]

    def _pair_encoder(self, query: RawText, limit: int) -> DocumentEncoder:
        """Encodes texts to rank by the query; PromptTooLongError if it leaves them no token."""
        pairs = self._model.pairs
        assert pairs is not None, "only rerankers get queries"

        def without_text(text: str, *, at_most: int | None = None) -> list[int]:
            return pairs.encoder(text)("", at_most=at_most)

        if len(self._tokens(query, limit, False, without_text)) == limit:
            raise PromptTooLongError(
                f"the input length exceeds the context length: the query leaves none of the "
                f"{limit:,} tokens of model '{self._name}' to a document"
            )
        return pairs.encoder(query.text)

    def _tokens(
        self, text: RawText | TokenIds, limit: int, truncate: bool, encode: DocumentEncoder
    ) -> tuple[int, ...]:
        match text:
            case RawText(words):
                tokens = self._tokenized(words, limit, truncate, encode)
            case TokenIds(ids):
                tokens = list(ids[:limit] if truncate else ids)
        if not tokens:
            tokens = [self._empty_text()]
        if len(tokens) > limit:
            raise PromptTooLongError(
                f"the input length exceeds the context length: a text has more than {limit:,} "
                f"tokens, the limit of model '{self._name}'. Shorten it or allow truncation."
            )
        return tuple(tokens)

    def _tokenized(
        self, text: str, limit: int, truncate: bool, encode: DocumentEncoder
    ) -> list[int]:
        """The tokens of the text. Only a prefix of a long text is tokenised.

        The prefix grows until it has more tokens than the limit, because some tokenizers drop
        spaces or encode any word as one unknown token. Its last word, which may be cut, is beyond
        the limit.
        """
        length = (limit + 1) * self._model.tokenizer.longest_token
        longest = MAX_LENGTH_FACTOR * length
        tokens = encode(text[:length])
        while len(tokens) <= limit + MAX_WORD_TOKENS and length < min(len(text), longest):
            length *= 2
            tokens = encode(text[:length])
        if truncate and len(tokens) > limit:
            return encode(text[:length], at_most=limit)
        if not truncate and length < len(text) and len(tokens) <= limit:
            raise PromptTooLongError(
                f"the input length exceeds the context length: a text has {len(text):,} "
                f"characters; with a context of {limit:,} tokens the limit is {length:,}"
            )
        return tokens

    def _empty_text(self) -> int:
        """The token that represents an empty text, so that it does not fail the whole task."""
        tokenizer = self._model.tokenizer
        token = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if token is None:
            raise RequestError(
                f"a text has no tokens, and model '{self._name}' has neither a BOS nor an EOS "
                "token to stand for it"
            )
        return token

    def _pooling(self) -> Pooling:
        """The pooling that the file states. By default, the last token of a causal model, because
        only it attends to the whole text; otherwise the mean, as in sentence-transformers."""
        model = self._model
        if model.ranking is not None:
            return Pooling(model.ranking.pooling)
        default = Pooling.LAST if model.decoder.causal else Pooling.MEAN
        return Pooling(model.description.pooling or default)

    async def _vector_once_admitted(
        self, task: EmbeddingTask, tokens: tuple[int, ...]
    ) -> ChatDelta:
        """The vector of a text, which waits while requests for replies take the engine's room."""
        while True:
            try:
                return await self._vector(task, tokens)
            except OverloadedError:
                await self._room(task.tenant)

    async def _room(self, tenant: str) -> None:
        """Waits until the engine has room for a text of the tenant."""
        while True:
            await asyncio.sleep(ROOM_CHECK_S)
            with suppress(OverloadedError):
                return self._engine.check_room(tenant)

    async def _vector(self, task: EmbeddingTask, tokens: tuple[int, ...]) -> ChatDelta:
        decoder = self._model.decoder
        # A bidirectional model must compute the whole text in one step.
        whole = ImageSpan(0, len(tokens), whole=True, digest=b"")
        request = GenerationRequest(
            f"{task.id}/{next(self._request_numbers)}",
            tokens,
            StopRules(max_tokens=1),
            SamplingParams(),
            spans=() if decoder.causal else (whole,),
            pooling=self._pooling(),
            tenant=task.tenant,
        )
        async with aclosing(self._engine.stream(request)) as deltas:
            async for delta in deltas:
                if delta.finish is FinishReason.FAILED:
                    raise failure(self._engine, delta)
        assert delta.vector is not None
        return ChatDelta(finish=delta.finish, usage=delta.usage, vectors=(delta.vector,))


def _results(head: RankingHead | EmbeddingHead, states: Sequence[bytes]) -> tuple[bytes, ...]:
    rows = np.stack([np.frombuffer(state, dtype="<f4") for state in states])
    results = head(torch.from_numpy(rows)).numpy()
    return tuple(result.astype("<f4").tobytes() for result in results)

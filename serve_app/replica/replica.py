"""One model on one engine: tasks in, deltas out; knows nothing of Ray or HTTP."""

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, closing
from typing import Any

import numpy as np

from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.multimodal.image_cache import ImageCache
from runtime.engine.async_engine import AsyncEngine, failure
from runtime.engine.engine import EngineStatistics
from runtime.engine.request import (
    Alternative,
    Delta,
    FinishReason,
    GenerationRequest,
    Sampled,
    StopRules,
)
from runtime.errors import PromptTooLongError, RequestError
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import (
    Candidate,
    ChatDelta,
    ChatTask,
    Conversation,
    RawText,
    Task,
    TokenIds,
    TokenLogprob,
)
from serve_app.logs import get_logger
from serve_app.replica.embeddings import TextEmbedder
from serve_app.replica.prompt_defaults import PromptDefaults
from serve_app.replica.prompt_preparation import Preparer
from serve_app.replica.served_files import ServedFiles

# JSON has no infinity; the number that OpenAI's clients know for tokens that cannot come.
IMPOSSIBLE = -9999.0

log = get_logger()


class ModelReplica:
    """Serves one loaded model. `card`: its facts, without arrays. `image_cache`: leases room for
    images. `files`: the model files that are mapped."""

    def __init__(
        self,
        model: ChatModel,
        engine: AsyncEngine,
        card: ModelCard,
        opening: PromptDefaults | None = None,
        image_cache: ImageCache | None = None,
        files: ServedFiles | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._card = card
        self._opening = opening or PromptDefaults()
        self._files = files or ServedFiles()
        self._preparer = Preparer(model, image_cache)
        self._embedder = TextEmbedder(
            model, engine, name=card.name, context_limit=self._context_limit
        )
        self._numbers = itertools.count()
        self._clamping_logged = False

    def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """Deltas up to the one with `finish`. Leaving early, for any reason, ends the request."""
        return self._chat(task) if isinstance(task, ChatTask) else self._embedder.deltas(task)

    async def _chat(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        if not self._model.decoder.generates:
            raise RequestError(f'"{self._card.name}" does not support completion')
        task = dataclasses.replace(task, prompt=self._opening.before(task.prompt))
        self._refuse_oversized(task)
        limit = self._context_limit(task)
        lent = self._preparer.lease(task.prompt, salt=task.cache_salt, tenant=task.tenant)
        with closing(lent) as lease:
            prompt = await self._preparer.prompt(
                task.prompt, at_most=limit, lease=lease, now=task.now, tenant=task.tenant
            )
            stream = self._engine.stream(self._request(task, prompt))
            async with aclosing(stream) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.finish is FinishReason.FAILED:
                        raise failure(self._engine, delta)
                    told = self._spelled(delta)
                    # Ids alone would not bring the images back.
                    if task.prompt_wanted and told.finish is not None and not prompt.spans:
                        told = dataclasses.replace(told, prompt=prompt.tokens)
                    yield told

    def describe(self, *, verbose: bool = False) -> ModelCard:
        return verbose_card(self._card, self._model) if verbose else self._card

    @property
    def identity(self) -> str:
        """Equal for replicas that can go on with each other's answers: their files say the same."""
        facts = (self._card.digest, sorted((self._card.projector or {}).items()))
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @property
    def image_bytes(self) -> int:
        """What the images of requests take on the host."""
        return self._preparer.image_cache.used_bytes

    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def check(self) -> None:
        """Raise EngineDeadError unless the engine makes progress and the files are as they were."""
        self._engine.check()
        self._files.check()

    def close(self) -> None:
        self._preparer.close()
        self._engine.close()

    def _refuse_oversized(self, task: ChatTask) -> None:
        """What cannot fit, however it is cut into tokens, is not cut: that would hold the GIL."""
        match task.prompt:
            case Conversation(messages, after=after):
                characters = sum(len(message.text) for message in messages)
                characters += len(after) * self._model.tokenizer.longest_token
            case RawText(text):
                characters = len(text)
            case TokenIds(ids):
                characters = len(ids) * self._model.tokenizer.longest_token
        fewest = -(-characters // self._model.tokenizer.longest_token)
        limit = self._context_limit(task)
        if fewest >= limit:
            raise self._too_long(f"at least {fewest:,}", limit)

    def _request(self, task: ChatTask, prompt: Prompt) -> GenerationRequest:
        limit = self._context_limit(task)
        room = limit - len(prompt.tokens)
        if room < 1:
            raise self._too_long(f"{len(prompt.tokens):,}", limit)
        stop = StopRules(
            max_tokens=room if task.max_tokens is None else min(task.max_tokens, room),
            end_tokens=self._model.tokenizer.end_tokens,
            strings=task.stop,
        )
        # A request that is asked again may meet its own earlier try, still being aborted.
        unique = f"{task.id}/{next(self._numbers)}"
        sampling = task.sampling
        if not task.penalise_prompt:
            sampling = dataclasses.replace(sampling, counted_from=len(prompt.tokens))
        return GenerationRequest(
            unique,
            prompt.tokens,
            stop,
            sampling,
            spans=prompt.spans,
            images=tuple(dataclasses.replace(i, tenant=task.tenant) for i in prompt.images),
            begun=task.begun,
            tenant=task.tenant,
            cache_salt=task.cache_salt.encode(),
        )

    def _too_long(self, tokens: str, limit: int) -> PromptTooLongError:
        return PromptTooLongError(
            f"the input length exceeds the context length: the prompt has {tokens} tokens; model "
            f"'{self._card.name}' has {limit:,} for prompt and answer. Shorten the prompt or raise "
            f"{'`num_ctx`' if limit < self._card.context_tokens else '`context_tokens`'}."
        )

    def _context_limit(self, task: Task) -> int:
        """Positions for prompt and answer together: what the task asks for, at most what is served.

        Clients of Ollama, which clamps too, ask for more without knowing what is served.
        """
        served = self._card.context_tokens
        asked = served if task.context_tokens is None else task.context_tokens
        if asked > served and not self._clamping_logged:
            self._clamping_logged = True
            log.info("num_ctx clamped", model=self._card.name, asked=asked, served=served)
        return min(asked, served)

    def _spelled(self, delta: Delta) -> ChatDelta:
        return ChatDelta(
            delta.text,
            delta.tokens,
            tuple(self._token_logprob(sampled) for sampled in delta.logprobs),
            delta.finish,
            delta.usage,
            delta.error,
        )

    def _token_logprob(self, sampled: Sampled) -> TokenLogprob:
        drawn = self._candidate(Alternative(sampled.token, sampled.logprob or 0.0))
        return TokenLogprob(drawn, tuple(self._candidate(entry) for entry in sampled.top))

    def _candidate(self, entry: Alternative) -> Candidate:
        tokenizer = self._model.tokenizer
        text = tokenizer.token_text(entry.token)
        raw = tokenizer.token_bytes(entry.token) or text.encode()
        return Candidate(text, raw, max(entry.logprob, IMPOSSIBLE))


def model_card(
    model: ChatModel, *, name: str, context_tokens: int, device: str, reserved_bytes: int
) -> ModelCard:
    """What a loaded model tells about itself, arrays left out."""
    facts = model.description
    return ModelCard(
        name=name,
        architecture=facts.architecture,
        quantization=facts.quantization,
        parameter_count=facts.parameter_count,
        file_bytes=facts.file_bytes,
        digest=facts.digest,
        modified_at=facts.modified_at,
        context_length=facts.context_length,
        embedding_length=facts.embedding_length,
        chat_template=facts.chat_template,
        license=facts.license,
        context_tokens=context_tokens,
        device=device,
        reserved_bytes=reserved_bytes,
        device_bytes=0 if device == "cpu" else reserved_bytes,
        pid=os.getpid(),
        metadata=_told(facts.metadata, _brief),
        tensors=tuple((name, kind, tuple(shape)) for name, kind, shape in facts.tensors),
        capabilities=_capabilities(model),
        projector=None if facts.projector is None else _told(facts.projector, _brief),
    )


def verbose_card(card: ModelCard, model: ChatModel) -> ModelCard:
    """The same with the arrays."""
    facts = model.description
    return dataclasses.replace(
        card,
        metadata=_told(facts.metadata, _plain),
        projector=None if facts.projector is None else _told(facts.projector, _plain),
    )


def _capabilities(model: ChatModel) -> tuple[str, ...]:
    """Any decoder gives vectors when asked; those made for it say so."""
    found = {
        "completion": model.decoder.generates and model.description.pooling is None,
        "vision": model.tower is not None,
        "embedding": model.description.pooling is not None or not model.decoder.generates,
    }
    return tuple(name for name, holds in found.items() if holds)


def _told(metadata: Mapping[str, Any], told: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: told(value) for name, value in metadata.items()}


def _brief(value: Any) -> Any:
    """Arrays of a vocabulary's size are not for every reader."""
    return None if isinstance(value, np.ndarray | list | tuple) and len(value) else _plain(value)


def _plain(value: Any) -> Any:
    """Metadata as JSON has it, which knows no infinity."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

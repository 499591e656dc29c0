"""One model on one engine: tasks in, deltas out; independent of Ray and HTTP."""

import asyncio
import dataclasses
import hashlib
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.grammars.delayed_end import DelayedEnd
from model_zoo.multimodal.image_cache import ImageCache
from runtime.engine.async_engine import AsyncEngine, failure
from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.request import (
    ContextShift,
    Delta,
    FinishReason,
    GenerationRequest,
    Grammar,
    SamplingParams,
    StopRules,
)
from runtime.errors import PromptTooLongError, RequestError
from serve_app.logs import get_logger
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import (
    ChatDelta,
    ChatTask,
    Conversation,
    EmbeddingTask,
    EndRules,
    Infill,
    PromptTask,
    RawText,
    ReplyOpening,
    Task,
    TokenIds,
)
from serve_app.replica.model_cards import verbose_card
from serve_app.replica.prompt_defaults import PromptDefaults
from serve_app.replica.prompt_preparation import PromptPreparer
from serve_app.replica.prompt_tokens import echoed, token_logprob, tokenized
from serve_app.replica.reply_forms import ReplyForms
from serve_app.replica.reply_thinking import ThinkingCounter, within_budget
from serve_app.replica.sampling_words import SequenceBreakers, bad_word_tokens
from serve_app.replica.served_files import ServedFiles
from serve_app.replica.text_embedder import TextEmbedder
from serve_app.replica.trace_file import TraceFile
from serve_app.replica.truncation import limiting_setting

# An answer that shifts the context is limited to this many times the context, as in Ollama.
SHIFTED_CONTEXTS = 10

log = get_logger()


class ModelReplica:
    """Serves one loaded model.

    `card`: its description, without arrays. `image_cache`: leases memory for request images.
    `files`: the mapped model files. `trace_file`: the engine's sink of traces.
    """

    def __init__(
        self,
        model: ChatModel,
        engine: AsyncEngine,
        card: ModelCard,
        prompt_defaults: PromptDefaults | None = None,
        image_cache: ImageCache | None = None,
        files: ServedFiles | None = None,
        trace_file: TraceFile | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._card = card
        self._prompt_defaults = prompt_defaults or PromptDefaults()
        self._files = files or ServedFiles()
        self._trace_file = trace_file
        self._preparer = PromptPreparer(
            model, image_cache, name=card.name, context_tokens=card.context_tokens
        )
        self._reply_forms = ReplyForms(model.tokenizer)
        self._breakers = SequenceBreakers(model.tokenizer)
        self._embedder = TextEmbedder(model, engine, name=card.name)
        self._request_numbers = itertools.count()
        self._clamping_logged = False

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """Deltas up to the one with `finish`. Leaving early, for any reason, aborts the request."""
        limit = self._context_limit(task.context_tokens)
        if isinstance(task, EmbeddingTask):
            yield await self._embedder.embed(task, max_tokens=limit)
            return
        completes = self._model.decoder.generates and self._model.ranking is None
        if isinstance(task, ChatTask) and not completes:
            raise RequestError(f'"{self._card.name}" does not support completion')
        if isinstance(task, ChatTask) and task.trace and self._trace_file is None:
            raise RequestError(
                f"model '{self._card.name}' has no `trace_folder` to trace requests in"
            )
        if isinstance(task, ChatTask) and task.resume is None:
            self._engine.check_room(task.tenant)  # `stream` checks it again
        task = dataclasses.replace(task, prompt=self._prompt_defaults.apply(task.prompt))
        if task.truncation is None:
            self._refuse_oversized(task, limit)
        async with self._preparer.prepared(task, max_tokens=limit) as prompt:
            if isinstance(task, PromptTask):
                yield await asyncio.to_thread(
                    tokenized, self._model, task, prompt, context_tokens=limit
                )
                return
            grammar = await self._reply_forms.grammar(task, prompt)
            task = await self._with_bad_words(await self._with_breakers(task))
            request = self._request(task, prompt, limit, grammar)
            if isinstance(task.prompt, Conversation) and task.prompt.thinking_budget is not None:
                request = within_budget(
                    request, task.prompt, prompt, _opening(task, prompt), self._model.tokenizer
                )
            async with aclosing(self._reply(task, prompt, request)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _reply(
        self, task: ChatTask, prompt: Prompt, request: GenerationRequest
    ) -> AsyncGenerator[ChatDelta, None]:
        stream = self._engine.stream(request)
        opening, echo = _opening(task, prompt), task.echo
        counter = self._thinking_counter(task, prompt)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if delta.finish is FinishReason.FAILED:
                    raise failure(self._engine, delta)
                reply = dataclasses.replace(self._chat_delta(delta), opening=opening)
                opening = None
                if counter is not None:
                    thinking = counter.count(delta.text, len(delta.tokens))
                    reply = dataclasses.replace(reply, thinking_tokens=thinking)
                if echo:
                    scores = delta.prompt_logprobs
                    text = await asyncio.to_thread(
                        echoed, self._model.tokenizer, task, prompt, scores
                    )
                    reply, echo = dataclasses.replace(reply, echo=text), False
                # The token ids of a prompt with images do not contain the images.
                if task.prompt_wanted and reply.finish is not None and not prompt.spans:
                    reply = dataclasses.replace(reply, prompt=prompt.tokens)
                if delta.finish is not None:
                    log.debug("answered", engine_request=request.id, finish=delta.finish.value)
                yield reply

    def describe(self, *, verbose: bool = False) -> ModelCard:
        """`verbose`: with the arrays of the metadata."""
        return verbose_card(self._card, self._model) if verbose else self._card

    @property
    def identity(self) -> str:
        """An id that is equal for replicas that can continue each other's answers: those of the
        same files that make the same prompts and have room for the same answers."""
        card = self._card
        files = (card.digest, sorted((card.projector or {}).items()), card.adapters)
        facts = (files, card.context_tokens, self._prompt_defaults, self._model.suffix_first)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def check(self) -> None:
        """Raises EngineDeadError if the engine makes no progress or a mapped file has changed."""
        self._engine.check()
        self._files.check()

    def close(self) -> None:
        self._preparer.close()
        self._reply_forms.close()
        self._embedder.close()
        self._engine.close()
        if self._trace_file is not None:
            self._trace_file.close()

    def _refuse_oversized(self, task: ChatTask | PromptTask, limit: int) -> None:
        """Refuses a prompt that cannot fit in any tokenisation; tokenising it would hold the
        GIL."""
        longest = self._model.tokenizer.longest_token  # characters
        match task.prompt:
            case Conversation(messages, after=after):
                characters = sum(len(message.text) for message in messages) + len(after) * longest
            case RawText(text):
                characters = len(text)
            case Infill(before, after):
                characters = len(before) + len(after)
            case TokenIds(ids):
                characters = len(ids) * longest
        least_tokens = -(-characters // longest)
        if least_tokens + _answers(task) > limit:
            raise self._too_long(f"at least {least_tokens}", limit)

    def _thinking_counter(self, task: ChatTask, prompt: Prompt) -> ThinkingCounter | None:
        """A counter that has read the answer so far; None if replies have no thinking."""
        opening = _opening(task, prompt)
        if opening is None or not opening.format.thinks:
            return None
        tools = task.prompt.tools if isinstance(task.prompt, Conversation) else ()
        counter = ThinkingCounter(opening, tools)
        if task.resume is not None:
            token_bytes = self._model.tokenizer.token_bytes
            parts = (prompt.markup.get(token) or token_bytes(token) for token in task.resume.tokens)
            counter.count(b"".join(parts).decode(errors="ignore"), 0)
        return counter

    async def _with_breakers(self, task: ChatTask) -> ChatTask:
        """The task with the tokens that contain sequence breakers, if DRY applies."""
        sampling = task.sampling
        if not sampling.repetitive:
            return task
        words = await asyncio.to_thread(self._breakers.words, sampling.dry_sequence_breakers)
        return dataclasses.replace(task, sampling=dataclasses.replace(sampling, dry_breakers=words))

    async def _with_bad_words(self, task: ChatTask) -> ChatTask:
        """The task with the tokens of its bad words."""
        if not task.bad_words:
            return task
        words = await asyncio.to_thread(bad_word_tokens, self._model.tokenizer, task.bad_words)
        sampling = dataclasses.replace(task.sampling, bad_words=words)
        return dataclasses.replace(task, sampling=sampling)

    def _request(
        self, task: ChatTask, prompt: Prompt, limit: int, grammar: Grammar | None
    ) -> GenerationRequest:
        room = limit - len(prompt.tokens)
        if room < _answers(task):
            raise self._too_long(str(len(prompt.tokens)), limit)
        most = room if task.shift_keep is None else SHIFTED_CONTEXTS * limit
        stop = self._stop_rules(task, most, formed=grammar is not None)
        if grammar is not None:
            grammar = _delayed(grammar, stop, task.ending)
        scored = task.echo and (task.sampling.logprobs is not None or task.max_tokens == 0)
        return GenerationRequest(
            # A retried task may arrive while its earlier attempt is still being aborted.
            f"{task.origin.id or task.id}/{next(self._request_numbers)}",
            prompt.tokens,
            stop,
            _sampling(task, stop, len(prompt.tokens), bars_end=grammar is None),
            spans=prompt.spans,
            images=tuple(
                dataclasses.replace(image, tenant=task.tenant, origin=task.origin)
                for image in prompt.images
            ),
            resume=task.resume,
            tenant=task.tenant,
            cache_salt=task.cache_salt.encode(),
            markup=prompt.markup,
            grammar=grammar,
            prompt_logprobs=task.sampling.logprobs or 0 if scored else None,
            trace=task.trace,
            shift=None if task.shift_keep is None else ContextShift(limit, task.shift_keep),
            priority=task.priority,
        )

    def _stop_rules(self, task: ChatTask, most: int, *, formed: bool) -> StopRules:
        """`formed`: by a grammar, which allows the model's end after a complete form only."""
        ending, tokenizer = task.ending, self._model.tokenizer
        own = frozenset() if ending.ignore_model else tokenizer.end_tokens
        # Control tokens have no text in which a stop string could be found.
        named = {
            token: text
            for text in task.stop
            if (token := tokenizer.id_of(text)) is not None and not tokenizer.token_bytes(token)
        }
        requested = {token: text for token, text in named.items() if token not in own}
        reported = requested | {token: token for token in ending.tokens}
        return StopRules(
            max_tokens=most if task.max_tokens is None else min(task.max_tokens, most),
            end_tokens=(tokenizer.end_tokens if formed else own) | frozenset(reported),
            strings=task.stop,
            reported=reported,
            min_tokens=ending.min_tokens,
            keep_match=ending.keep_match,
        )

    def _too_long(self, tokens: str, limit: int) -> PromptTooLongError:
        setting = limiting_setting(limit, served_tokens=self._card.context_tokens)
        # Clients parse the numbers, which must have no commas.
        return PromptTooLongError(
            f"the input length exceeds the context length: the prompt has {tokens} tokens; this "
            f"model's maximum context length is {limit} tokens for prompt and answer. Shorten "
            f"the prompt or raise `{setting}` of model '{self._card.name}'."
        )

    def _context_limit(self, requested: int | None) -> int:
        """Limit of prompt and answer in tokens: the requested one, at most the served context.

        Larger requests are clamped as in Ollama, whose clients do not know the served context.
        """
        served = self._card.context_tokens
        if requested is None:
            return served
        if requested > served and not self._clamping_logged:
            self._clamping_logged = True
            log.info("num_ctx clamped", model=self._card.name, requested=requested, served=served)
        return min(requested, served)

    def _chat_delta(self, delta: Delta) -> ChatDelta:
        return ChatDelta(
            delta.text,
            delta.tokens,
            tuple(token_logprob(self._model.tokenizer, sampled) for sampled in delta.logprobs),
            delta.finish,
            delta.usage,
            delta.error,
            matched=delta.matched,
        )


def _answers(task: ChatTask | PromptTask) -> bool:
    """Whether the task generates tokens, so that the context must have room for one."""
    return isinstance(task, ChatTask) and task.max_tokens != 0


def _delayed(grammar: Grammar, stop: StopRules, ending: EndRules) -> Grammar:
    """The grammar without end tokens before `min_tokens`, and without ignored ones at all, except
    where the form is complete."""
    if ending.ignore_model:
        ignored = stop.end_tokens - stop.reported.keys()
        grammar = DelayedEnd(grammar, ignored, stop.max_tokens)
    return DelayedEnd(grammar, stop.end_tokens, stop.min_tokens) if stop.min_tokens else grammar


def _sampling(
    task: ChatTask, stop: StopRules, prompt_tokens: int, *, bars_end: bool
) -> SamplingParams:
    """The task's sampling parameters, completed with those that depend on the prompt's length.
    `bars_end`: the sampler, instead of a grammar, excludes end tokens before `min_tokens`."""
    sampling = task.sampling
    if sampling.bad_words:
        sampling = dataclasses.replace(sampling, words_from=prompt_tokens)
    if not task.penalise_prompt:
        sampling = dataclasses.replace(sampling, counted_from=prompt_tokens)
    if not stop.min_tokens or not bars_end:
        return sampling
    until = prompt_tokens + stop.min_tokens
    return dataclasses.replace(sampling, barred=tuple(stop.end_tokens), barred_until=until)


def _opening(task: ChatTask, prompt: Prompt) -> ReplyOpening | None:
    replies, formed = prompt.reply_format, task.output is not None
    guided = formed or task.calls is not None
    if replies is None:
        return None
    return ReplyOpening(replies, prompt.thinks, formed, guided, prompt.continues)

"""Embeddings of a replica with a fake engine: pooling, truncation, order, fairness."""

import asyncio
import threading
from contextlib import aclosing
from types import SimpleNamespace

import numpy as np
import pytest

from model_zoo.chat.messages import Message
from runtime.engine.engine import EngineLimits
from runtime.engine.request import Delta, FinishReason, ImageSpan, Pooling, SamplingParams, Usage
from runtime.errors import GenerationFailedError, OverloadedError, PromptTooLongError, RequestError
from serve_app.messages.tasks import (
    ChatDelta,
    ChatTask,
    Conversation,
    EmbeddingTask,
    RawText,
    TokenIds,
)
from serve_app.replica.replica import ModelReplica
from serve_app.replica.text_embedder import TOKENIZING_TASKS
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.answers import answer_of, deltas_of
from tests.unit.serve_app.fake_replicas import CARD

END = 2
LIMITS = EngineLimits(64, 1000, max_live=4 + 16, slots=4)


class FakeTokenizer:
    """A token for each character, then the end token."""

    longest_token = 3
    bos_id: int | None = 1
    eos_id: int | None = END

    def __init__(self) -> None:
        self.longest_text = 0

    def encode_document(self, text: str, *, at_most: int | None = None) -> list[int]:
        self.longest_text = max(self.longest_text, len(text))
        tokens = list(map(ord, text))
        return [*(tokens if at_most is None else tokens[: at_most - 1]), END]


class FakeEngine:
    """The vector of a prompt is (sum, length) of its tokens; later prompts are faster."""

    limits = LIMITS

    def __init__(self, error: str | None = None) -> None:
        self.requests = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.active = self.max_active = 0
        self.others = 0  # requests for replies
        self.error = error

    def check(self) -> None:
        pass

    def check_room(self, tenant: str) -> None:
        if self.active + self.others >= LIMITS.max_live:
            raise OverloadedError("full")

    async def stream(self, request):
        self.check_room(request.tenant)
        self.requests.append(request)
        self.active += 1
        self.max_active = max(self.max_active, self.active)
        try:
            for _ in range(max(1, 100 - len(self.requests))):
                await asyncio.sleep(0)
            await self.may_end.wait()
            if self.error is not None:
                yield Delta(finish=FinishReason.FAILED, error=self.error)
                return
            tokens = request.prompt
            vector = np.array([sum(tokens), len(tokens)], dtype="<f4").tobytes()
            usage = Usage(len(tokens), 0, 0, 1, 2, 0)
            yield Delta(finish=FinishReason.STOP, usage=usage, vector=vector)
        finally:
            self.active -= 1


def replica_over(
    engine, *, causal=True, generates=True, pooling=None, tokenizer=None, ranking=None
) -> ModelReplica:
    model = SimpleNamespace(
        decoder=SimpleNamespace(causal=causal, generates=generates),
        ranking=ranking,
        embedding_head=None,
        tokenizer=tokenizer or FakeTokenizer(),
        description=SimpleNamespace(name="demo", pooling=pooling),
    )
    return ModelReplica(model, engine, CARD)


async def embedded(engine, *texts, truncate=True, context_tokens=None, **model):
    task = EmbeddingTask("t1", "demo", texts, truncate, context_tokens)
    (delta,) = await deltas_of(replica_over(engine, **model), task)
    vectors = [np.frombuffer(vector, dtype="<f4").tolist() for vector in delta.vectors]
    return delta, vectors


async def test_vectors_keep_the_order_of_the_texts_and_usage_is_summed():
    texts = [RawText("a" * count) for count in range(1, 40)]
    engine = FakeEngine()
    delta, vectors = await embedded(engine, *texts)
    assert vectors == [[97.0 * count + END, count + 1] for count in range(1, 40)]
    assert delta.finish is FinishReason.STOP
    assert delta.usage.prompt_tokens == sum(range(2, 41))
    assert engine.max_active == LIMITS.tenant_share


async def test_texts_wait_while_requests_for_replies_fill_the_engine():
    engine = FakeEngine()
    engine.others = LIMITS.max_live - 5
    delta, _ = await embedded(engine, *[RawText("a")] * 40)
    assert len(delta.vectors) == 40 and engine.max_active == 5


async def test_a_full_engine_refuses_texts_so_that_another_replica_is_asked():
    engine = FakeEngine()
    engine.others = LIMITS.max_live
    with pytest.raises(OverloadedError):
        await embedded(engine, RawText("a"))
    assert engine.requests == []


async def test_tenants_take_turns_with_the_texts_of_many_tasks():
    engine = FakeEngine()
    replica = replica_over(engine)

    async def ask(name: str, tenant: str, count: int) -> None:
        texts = tuple(RawText(name) for _ in range(count))
        async with aclosing(
            replica.generate(EmbeddingTask(name, "demo", texts, tenant=tenant))
        ) as d:
            assert len([vector async for delta in d for vector in delta.vectors]) == count

    engine.may_end.clear()
    flood = [asyncio.create_task(ask("a", "flood", 40)) for _ in range(8)]
    await until(lambda: len(engine.requests) >= LIMITS.tenant_share)
    other = asyncio.create_task(ask("b", "other", 2))
    await settled()
    engine.may_end.set()
    await other
    before = [request.tenant for request in engine.requests].index("other")
    assert before < 2 * 40
    await asyncio.gather(*flood)
    assert engine.max_active == LIMITS.tenant_share


@pytest.mark.parametrize(("stated", "expected"), [(None, Pooling.LAST), ("mean", Pooling.MEAN)])
async def test_the_pooling_of_the_file_is_used(stated, expected):
    engine = FakeEngine()
    await embedded(engine, TokenIds((5, 6)), pooling=stated)
    (request,) = engine.requests
    assert (request.pooling, request.prompt, request.spans) == (expected, (5, 6), ())


async def test_a_bidirectional_model_computes_a_text_in_one_step_and_uses_the_mean():
    engine = FakeEngine()
    await embedded(engine, TokenIds((5, 6, 7)), causal=False)
    assert engine.requests[0].pooling == Pooling.MEAN
    assert engine.requests[0].spans == (ImageSpan(0, 3, whole=True, digest=b""),)


async def test_a_model_without_a_ranking_head_ranks_nothing():
    task = EmbeddingTask("t1", "demo", (RawText("a"),), queries=(RawText("q"),))
    engine = FakeEngine()
    with pytest.raises(RequestError, match="does not support rerank: its file has no ranking head"):
        await anext(replica_over(engine).generate(task))
    assert not engine.requests


async def test_truncation_keeps_the_end_token():
    engine = FakeEngine()
    await embedded(engine, RawText("ab" * 5000), TokenIds(tuple(range(3, 600))))
    one, other = engine.requests
    assert len(one.prompt) == len(other.prompt) == CARD.context_tokens
    assert one.prompt[-3:] == (98, 97, END)
    assert other.prompt == tuple(range(3, 3 + CARD.context_tokens))


class BareTokenizer(FakeTokenizer):
    """Adds no end token."""

    def encode_document(self, text: str, *, at_most: int | None = None) -> list[int]:
        return super().encode_document(text)[:-1][:at_most]


@pytest.mark.parametrize(("bos", "eos", "token"), [(1, END, 1), (None, END, END)])
async def test_an_empty_text_is_embedded_as_bos_or_eos(bos, eos, token):
    engine, tokenizer = FakeEngine(), BareTokenizer()
    tokenizer.bos_id, tokenizer.eos_id = bos, eos
    await embedded(engine, RawText("a"), RawText(""), tokenizer=tokenizer)
    assert sorted(request.prompt for request in engine.requests) == sorted([(97,), (token,)])


async def test_an_empty_text_is_refused_without_bos_and_eos():
    tokenizer = BareTokenizer()
    tokenizer.bos_id = tokenizer.eos_id = None
    with pytest.raises(RequestError, match="neither a BOS nor an EOS token"):
        await embedded(FakeEngine(), RawText(""), tokenizer=tokenizer)


async def test_a_request_may_truncate_earlier():
    engine = FakeEngine()
    await embedded(engine, RawText("abcdef"), context_tokens=4)
    assert engine.requests[0].prompt == (97, 98, 99, END)


async def test_a_larger_requested_context_is_clamped():
    engine = FakeEngine()
    await embedded(engine, RawText("a" * 1000), context_tokens=8192)
    assert len(engine.requests[0].prompt) == CARD.context_tokens


@pytest.mark.parametrize("text", [RawText("a" * 600), TokenIds((5,) * 600)])
async def test_a_long_text_is_refused_without_truncation(text):
    with pytest.raises(PromptTooLongError, match="the input length exceeds the context length"):
        await embedded(FakeEngine(), RawText("a"), text, truncate=False)


async def test_only_a_prefix_of_a_huge_text_is_tokenised():
    replica = replica_over(FakeEngine())
    task = EmbeddingTask("t1", "demo", (RawText("a" * 1_000_000),))
    async with aclosing(replica.generate(task)) as deltas:
        await anext(deltas)
    longest = replica._model.tokenizer.longest_text
    assert longest == (CARD.context_tokens + 1) * FakeTokenizer.longest_token


class SlowTokenizer(FakeTokenizer):
    """Encodes once `may` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.begun = 0

    def encode_document(self, text: str, *, at_most: int | None = None) -> list[int]:
        self.begun += 1
        assert self.may.wait(HANG_S)
        return super().encode_document(text, at_most=at_most)


async def test_an_aborted_task_keeps_its_place_until_its_thread_is_done():
    tokenizer = SlowTokenizer()
    replica = replica_over(FakeEngine(), tokenizer=tokenizer)

    async def embed() -> ChatDelta:
        return await anext(replica.generate(EmbeddingTask("t1", "demo", (RawText("a"),))))

    aborted = [asyncio.create_task(embed()) for _ in range(TOKENIZING_TASKS)]
    await until(lambda: tokenizer.begun == TOKENIZING_TASKS)
    for each in aborted:
        each.cancel()
    await asyncio.wait(aborted)
    other = asyncio.create_task(embed())
    await settled()
    assert tokenizer.begun == TOKENIZING_TASKS
    tokenizer.may.set()
    assert len((await other).vectors) == 1
    replica._embedder.close()


async def test_one_failed_text_fails_the_task_and_aborts_the_others():
    engine = FakeEngine(error="the model returned nonsense")
    with pytest.raises(GenerationFailedError, match="nonsense"):
        await embedded(engine, *[RawText("a" * 9)] * 40)
    assert engine.active == 0
    assert len(engine.requests) < 40


@pytest.mark.parametrize(
    "model", [{"generates": False}, {"ranking": object()}], ids=["headless", "ranking"]
)
async def test_models_without_an_output_head_and_rerankers_refuse_chats(model):
    task = ChatTask("t1", "demo", Conversation((Message("user", "hi"),)), SamplingParams())
    with pytest.raises(RequestError, match='"demo" does not support completion'):
        await answer_of(replica_over(FakeEngine(), **model), task)

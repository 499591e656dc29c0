"""A model replica with a fake engine: prompts, limits, deltas."""

import dataclasses
import json
import math
from contextlib import aclosing
from datetime import datetime
from types import MappingProxyType, SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import Prompt
from runtime.engine.engine import EngineLimits
from runtime.engine.request import (
    Alternative,
    Delta,
    FinishReason,
    ImageSpan,
    ResumeState,
    Sampled,
    SamplingParams,
)
from runtime.errors import (
    EngineDeadError,
    GenerationFailedError,
    OverloadedError,
    PromptTooLongError,
    ReplicaLostError,
    RequestError,
)
from runtime.vision.encoder import PreparedImage
from serve_app.messages.tasks import ChatTask, Conversation, RawText, ReplyOpening, TokenIds
from serve_app.replica.prompt_defaults import PromptDefaults
from serve_app.replica.replica import ModelReplica
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.fake_replicas import CARD, USAGE

IMAGE = PreparedImage(torch.zeros(1), (1, 1), b"d", 2)
TASK = ChatTask("t1", "demo", RawText("hello"), SamplingParams())


class FakeTokenizer:
    end_tokens = frozenset({0})
    longest_token = 1
    bos_id = 100

    def token_text(self, token: int) -> str:
        return "<end>" if token == 0 else chr(96 + token)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == 0 else self.token_text(token).encode()


class FakeModel:
    """One token per character; a conversation begins with token 100."""

    prepared = 0
    now = variables = None
    tower = None
    template = object()
    reply_format = format_of("tools <tool_call> <think> </think>")
    markup = MappingProxyType({5: b"<tool_call>"})
    decoder = SimpleNamespace(generates=True, causal=True)
    ranking = None
    tokenizer = FakeTokenizer()
    description = SimpleNamespace(
        metadata={"general.name": "demo", "tokens": ["a", "b"], "scores": np.array([0.5, np.inf])},
        projector={"general.architecture": "clip", "mean": [0.5]},
    )

    def prepare(
        self, messages, *, tools=(), thinking=None, variables=None, now=None, **_
    ) -> Prompt:
        self.prepared += 1
        self.tools = tools
        self.now, self.variables = now, variables
        parts = [part for message in messages for part in message.content]
        begin = 1 + sum(isinstance(part, str) for part in parts)
        tokens = [ord(part) for part in parts if isinstance(part, str)]
        images = tuple(IMAGE for part in parts if isinstance(part, ImagePart))
        spans = tuple(ImageSpan(begin + 2 * i, 2, True, b"d") for i in range(len(images)))
        placeholders = (9,) * 2 * len(images)
        return Prompt(
            (100, *tokens, *placeholders, int(thinking is False)),
            spans,
            images[:1],
            reply_format=self.reply_format,
            markup=self.markup,
        )

    def prepare_text(self, text: str, images=(), *, bos=True, at_most=None, lease=None) -> Prompt:
        return Prompt(tuple(map(ord, text)))


class FakeEngine:
    limits = EngineLimits(64, 1000, max_live=4, slots=4)

    def __init__(self, *deltas: Delta) -> None:
        self.deltas = deltas
        self.requests = []
        self.left = 0
        self.dead = self.full = False

    def check(self) -> None:
        if self.dead:
            raise EngineDeadError("dead")

    def check_room(self, tenant: str) -> None:
        if self.full:
            raise OverloadedError("full")

    async def stream(self, request):
        self.requests.append(request)
        try:
            for delta in self.deltas:
                yield delta
        finally:
            self.left += 1


END = Delta(finish=FinishReason.STOP, usage=USAGE, tokens=(0,))


async def answered(engine: FakeEngine, task: ChatTask = TASK):
    return await answer_of(ModelReplica(FakeModel(), engine, CARD), task)


async def test_the_priority_of_a_task_reaches_the_engine() -> None:
    engine = FakeEngine(END)
    await answered(engine, dataclasses.replace(TASK, priority=-3))
    assert engine.requests[0].priority == -3


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        (RawText("hi"), (104, 105)),
        (TokenIds((7, 8)), (7, 8)),
        (Conversation((Message("user", "hi"),)), (100, 104, 105, 0)),
        (Conversation((Message("user", "hi"),), thinking=False), (100, 104, 105, 1)),
        (Conversation((Message("user", "h"),), after=(7,)), (7, 104, 0)),
    ],
)
async def test_each_kind_of_prompt_becomes_tokens(source, tokens):
    engine = FakeEngine(END)
    await answered(engine, dataclasses.replace(TASK, prompt=source))
    assert engine.requests[0].prompt == tokens


@pytest.mark.parametrize(
    ("max_tokens", "context_tokens", "allowed"),
    [(None, None, 512 - 5), (10, None, 10), (1000, None, 507), (None, 20, 15), (None, 512, 507)],
)
async def test_max_tokens_is_what_the_context_leaves(max_tokens, context_tokens, allowed):
    engine = FakeEngine(END)
    task = dataclasses.replace(TASK, max_tokens=max_tokens, context_tokens=context_tokens)
    await answered(engine, task)
    stop = engine.requests[0].stop
    assert (stop.max_tokens, stop.end_tokens) == (allowed, frozenset({0}))


async def test_a_prompt_without_room_for_an_answer_is_refused():
    task = dataclasses.replace(TASK, prompt=RawText("x" * 512))
    with pytest.raises(
        PromptTooLongError, match=r"at least 512 tokens; this model.* is 512 tokens"
    ):
        await answered(FakeEngine(END), task)


async def test_a_full_replica_prepares_only_prompts_of_answers_that_continue():
    engine, model = FakeEngine(END), FakeModel()
    engine.full = True
    replica = ModelReplica(model, engine, CARD)
    chat = dataclasses.replace(TASK, prompt=Conversation((Message("user", "hi"),)))
    with pytest.raises(OverloadedError):
        await anext(replica.generate(chat))
    assert not model.prepared
    async with aclosing(
        replica.generate(dataclasses.replace(chat, resume=ResumeState()))
    ) as deltas:
        assert (await anext(deltas)).finish is FinishReason.STOP
    assert model.prepared


async def test_the_last_delta_has_the_prompt_on_request():
    engine = FakeEngine(Delta("a", (1,)), END)
    answer = await answered(engine, dataclasses.replace(TASK, prompt_wanted=True))
    assert answer.prompt == tuple(map(ord, "hello"))
    assert (await answered(engine)).prompt == ()


WITH_IMAGE = Conversation((Message("user", ("h", "i", ImagePart(b"x"))),))


async def test_a_reply_to_a_conversation_states_its_format_and_shows_markup():
    engine = FakeEngine(Delta("a", (1,)), END)
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    conversation = Conversation((Message("user", "hi"),), thinking=True, tools=tools)
    reply = await answered(engine, dataclasses.replace(TASK, prompt=conversation))
    assert reply.opening == ReplyOpening(FakeModel.reply_format)
    assert engine.requests[0].markup == FakeModel.markup
    raw = await answered(engine)
    assert raw.opening is None
    assert engine.requests[1].markup == {}


async def test_thinking_is_refused_where_the_model_has_none(monkeypatch):
    monkeypatch.setattr(FakeModel, "reply_format", format_of("tools <tool_call>"))
    conversation = Conversation((Message("user", "hi"),), thinking="high")
    with pytest.raises(RequestError, match='"demo" does not support thinking'):
        await answered(FakeEngine(END), dataclasses.replace(TASK, prompt=conversation))
    optional = msgspec.structs.replace(conversation, thinking_optional=True)
    reply = await answered(FakeEngine(END), dataclasses.replace(TASK, prompt=optional))
    assert reply.finish is FinishReason.STOP


async def test_images_reach_the_engine_with_their_spans() -> None:
    engine = FakeEngine(END)
    await answered(engine, dataclasses.replace(TASK, prompt=WITH_IMAGE, tenant="someone"))
    (request,) = engine.requests
    assert request.prompt == (100, 104, 105, 9, 9, 0)
    assert request.spans == (ImageSpan(3, 2, True, b"d"),)
    assert [image.digest for image in request.images] == [IMAGE.digest]
    assert request.images[0].tenant == request.tenant == "someone"


async def test_spans_are_shifted_by_the_tokens_of_an_earlier_answer() -> None:
    engine = FakeEngine(END)
    prompt = msgspec.structs.replace(WITH_IMAGE, after=(1, 2, 3, 4))
    await answered(engine, dataclasses.replace(TASK, prompt=prompt))
    (request,) = engine.requests
    (span,) = request.spans
    assert request.prompt == (1, 2, 3, 4, 104, 105, 9, 9, 0)
    assert request.prompt[span.start : span.end] == (9, 9)


async def test_the_ids_of_a_prompt_with_images_are_not_returned() -> None:
    task = dataclasses.replace(TASK, prompt=WITH_IMAGE, prompt_wanted=True)
    assert (await answered(FakeEngine(END), task)).prompt == ()


async def test_an_oversized_prompt_is_refused_before_tokenising():
    model = FakeModel()
    task = dataclasses.replace(TASK, prompt=Conversation((Message("user", "x" * 512),)))
    with pytest.raises(PromptTooLongError, match="at least 512 tokens"):
        await anext(ModelReplica(model, FakeEngine(END), CARD).generate(task))
    assert model.prepared == 0


@pytest.mark.parametrize(("penalise_prompt", "begin"), [(True, 0), (False, 5)])
async def test_additive_penalties_count_the_prompt_or_only_the_answer(penalise_prompt, begin):
    engine = FakeEngine(END)
    await answered(engine, dataclasses.replace(TASK, penalise_prompt=penalise_prompt))
    assert engine.requests[0].sampling.counted_from == begin


async def test_sequence_breakers_become_tokens_only_for_dry():
    model = FakeModel()
    model.tokenizer = FakeTokenizer()
    model.tokenizer.vocab_size = 4  # the last three are a, b and c
    for multiplier, words in ((0.0, b""), (1.0, b"\x04\0\0\0")):
        sampling = dataclasses.replace(
            TASK.sampling, dry_multiplier=multiplier, dry_sequence_breakers=("b",)
        )
        engine = FakeEngine(END)
        replica = ModelReplica(model, engine, CARD)
        await answer_of(replica, dataclasses.replace(TASK, sampling=sampling))
        assert engine.requests[0].sampling.dry_breakers == words


async def test_template_variables_are_kept_with_prompt_defaults():
    model, variables = FakeModel(), {"enable_thinking": False}
    conversation = Conversation((Message("user", "hi"),), variables=variables)
    replica = ModelReplica(model, FakeEngine(END), CARD, PromptDefaults("Be brief."))
    await answer_of(replica, dataclasses.replace(TASK, prompt=conversation))
    assert model.variables == variables


async def test_a_failed_request_and_a_dead_engine_are_different_errors():
    engine = FakeEngine(Delta(finish=FinishReason.FAILED, error="not finite", usage=USAGE))
    with pytest.raises(GenerationFailedError, match="not finite"):
        await answered(engine)
    engine.dead = True
    with pytest.raises(ReplicaLostError):
        await answered(engine)


async def test_a_context_above_the_served_one_is_clamped_and_logged_once_per_model(capsys):
    engine = FakeEngine(END)
    replica = ModelReplica(FakeModel(), engine, CARD)
    for asked in (8192, 16_384):
        await answer_of(replica, dataclasses.replace(TASK, context_tokens=asked))
    assert [request.stop.max_tokens for request in engine.requests] == [507, 507]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "num_ctx" in line]
    logged = json.loads(line)
    assert (logged["model"], logged["requested"], logged["served"]) == ("demo", 8192, 512)


@pytest.mark.parametrize(
    ("asked", "limit", "fix"), [(8192, 512, "context_tokens"), (100, 100, "num_ctx")]
)
async def test_the_error_for_a_long_prompt_names_the_limit_and_the_setting(asked, limit, fix):
    task = dataclasses.replace(TASK, prompt=RawText("x" * 600), context_tokens=asked)
    with pytest.raises(
        PromptTooLongError,
        match=rf"model's maximum context length is {limit} tokens .* raise `{fix}`",
    ):
        await answered(FakeEngine(END), task)


async def test_clients_can_parse_the_numbers_in_the_error_for_a_long_prompt():
    task = dataclasses.replace(TASK, prompt=RawText("x" * 2500))
    replica = ModelReplica(
        FakeModel(), FakeEngine(END), dataclasses.replace(CARD, context_tokens=2000)
    )
    with pytest.raises(PromptTooLongError, match=r"at least 2500 tokens; .* is 2000 tokens "):
        await answer_of(replica, task)


async def test_logprobs_have_texts_and_bytes():
    sampled = Sampled(1, -0.25, (Alternative(1, -0.25), Alternative(0, -math.inf)))
    answer = await answered(FakeEngine(Delta("a", (1,), (sampled,)), END))
    (entry,) = answer.logprobs
    assert (entry.drawn.text, entry.drawn.raw, entry.drawn.logprob) == ("a", b"a", -0.25)
    assert [(top.text, top.raw) for top in entry.top] == [("a", b"a"), ("<end>", b"<end>")]
    assert entry.top[1].logprob == -9999.0


async def test_a_repeated_task_has_another_request_id():
    engine = FakeEngine(END)
    replica = ModelReplica(FakeModel(), engine, CARD)
    for _ in range(2):
        await answer_of(replica, TASK)
    assert len({request.id for request in engine.requests}) == 2


async def test_leaving_the_generator_aborts_the_request():
    engine = FakeEngine(Delta("a", (1,)), END)
    async with aclosing(ModelReplica(FakeModel(), engine, CARD).generate(TASK)) as deltas:
        await anext(deltas)
    assert engine.left == 1


def test_a_verbose_card_has_the_arrays():
    replica = ModelReplica(FakeModel(), FakeEngine(), CARD)
    assert replica.describe() == CARD
    card = replica.describe(verbose=True)
    assert card.metadata == {"general.name": "demo", "tokens": ["a", "b"], "scores": [0.5, None]}
    assert card.projector == {"general.architecture": "clip", "mean": [0.5]}


async def test_a_resumed_task_keeps_its_state_and_time():
    engine, model, begun = FakeEngine(END), FakeModel(), ResumeState((7, 8), 2)
    asked_at = datetime(2031, 5, 4, 3, 2, 1)
    conversation = Conversation((Message("user", "hi"),))
    task = dataclasses.replace(TASK, prompt=conversation, resume=begun, now=asked_at)
    await answer_of(ModelReplica(model, engine, CARD), task)
    assert engine.requests[0].resume == begun
    assert model.now == asked_at


def test_replicas_have_equal_identities_only_for_equal_files_prompts_and_contexts():
    def identity(defaults=None, suffix_first=False, **change):
        model = FakeModel()
        model.suffix_first = suffix_first
        card = dataclasses.replace(CARD, **change)
        return ModelReplica(model, FakeEngine(), card, defaults).identity

    brief = PromptDefaults("Be brief.", (Message("user", "hi"),))
    assert identity() == identity(PromptDefaults(), pid=2, reserved_bytes=1)
    assert identity(brief) == identity(dataclasses.replace(brief))
    different = [
        identity(),
        identity(digest="cd"),
        identity(projector={"clip.a": 1}),
        identity(context_tokens=64),
        identity(brief),
        identity(dataclasses.replace(brief, system="Be kind.")),
        identity(suffix_first=True),
    ]
    assert len(set(different)) == len(different)

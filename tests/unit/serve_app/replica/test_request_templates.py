"""Templates, texts to insert and long chats of requests, on a real model of the store's kind."""

import asyncio
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from model_zoo.chat.messages import Message, ReplyStart
from model_zoo.chat.sandbox.frames import RenderLimits
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.registry import load
from runtime.engine.request import SamplingParams
from runtime.errors import PromptTooLongError, RequestError
from serve_app.messages.tasks import (
    ChatDelta,
    ChatTask,
    Conversation,
    Infill,
    PromptSource,
    RawText,
    Truncation,
)
from serve_app.replica.prompt_preparation import PromptPreparer
from serve_app.replica.replica import ModelReplica
from serve_app.replica.request_templates import MAX_KEPT, RequestTemplates
from tests.checkout import DEMO_MODEL
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.loaded_replicas import loaded

HI = (Message("user", "hi"),)
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    with loaded() as replica:
        yield replica


def answer(replica: ModelReplica, source: PromptSource, **task) -> ChatDelta:
    given = {"max_tokens": 1, "prompt_wanted": True, **task}
    whole = ChatTask("t", "demo", source, SamplingParams(seed=1), **given)
    return asyncio.run(answer_of(replica, whole))


def test_the_template_of_a_request_replaces_the_models(replica) -> None:
    template = "{{ .System }}ab{{ .Prompt }}<think></think>"
    said = answer(replica, Conversation(HI, template=template, thinking=False))
    assert said.prompt == answer(replica, RawText("abhi<think></think>")).prompt
    assert said.opening is not None and said.opening.format.thinking is not None
    own = answer(replica, Conversation(HI))
    assert own.prompt != said.prompt
    inserted = answer(replica, Infill("a", "b", "{{ .Suffix }}{{ .Prompt }}"))
    assert inserted.prompt == answer(replica, RawText("ba")).prompt
    assert inserted.opening is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Conversation(HI, template="{{ .Color }}"), r"template error: line 1: the field \.Color"),
        (Conversation(HI, template="{% for %}"), "template error: .*broken"),
        (Conversation(HI, template="x" * 200_000), "200,000 characters; 32,768 is the limit"),
        (Conversation(HI, template="x", thinking=True), '"demo" does not support thinking'),
        (Infill("a", "b"), '"demo" does not support insert'),
        (Infill("a", "b", "{{ .Prompt }}"), '"demo" does not support insert'),
    ],
)
def test_what_the_template_does_not_support_is_refused(replica, source, reason) -> None:
    with pytest.raises(RequestError, match=reason):
        answer(replica, source)


@pytest.mark.parametrize(
    ("rendered", "limit"),
    [
        (
            "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
            "1.00 s of processor time",
        ),
        ("{{ ('ab' * 10**8) | length }}", "128 MiB of memory"),
        ("{% for i in range(99) %}{{ 'ab' * 10**5 }}{% endfor %}", "8,388,608 bytes of text"),
    ],
    ids=["time", "memory", "text"],
)
def test_the_limits_of_the_template_of_a_request_do_not_grow_with_it(
    rendered: str, limit: str
) -> None:
    model = load(DEMO_MODEL, device=torch.device("cpu"), dtype=torch.float32)
    template = f"{{% if messages | length == 500 %}}{rendered}{{% endif %}}"
    messages = (Message("user", "hi " * 1500), Message("assistant", "hi")) * 250
    with pytest.raises(RequestError, match=f"needs more than {limit}"):
        RequestTemplates(model).model(template, salt="").prepare(messages)


def test_few_templates_of_requests_are_kept() -> None:
    compiled = []

    class Model:
        template = "own"

        def with_template(self, source: str, *, origin: str, most: RenderLimits) -> str:
            compiled.append(source)
            return f"with {source}"

    model: ChatModel = Model()  # type: ignore[assignment]
    templates = RequestTemplates(model)
    assert templates.model("", salt="") is model
    for name in ["a", *map(str, range(MAX_KEPT - 1)), "a", "new", "a", "0"]:
        assert templates.model(name, salt="") == f"with {name}"
    assert compiled == ["a", *map(str, range(MAX_KEPT - 1)), "new", "0"]
    compiled.clear()
    for salt in ("one", "two", "one", "two"):
        templates.model("a", salt=salt)
    assert compiled == ["a", "a"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Conversation(HI), "hi"),
        (Conversation((Message("user", "a "), Message("assistant", "b "), *HI)), "a b hi"),
        (Conversation((Message("system", "Be brief."), *HI)), "Be brief.\n\nhi"),
        (Conversation((*HI, Message("assistant", " a")), reply=ReplyStart.CONTINUED), "hi a"),
        (Conversation(HI, template="Q: {{ .Prompt }}"), "Q: hi"),
    ],
)
def test_a_model_without_a_template_gets_the_default_of_the_protocol(base, source, text) -> None:
    task = ChatTask("t", "base", structs.replace(source, default_template="{{ .Prompt }}"), GREEDY)
    assert prepared(base, task).tokens == prepared(base, replace(task, prompt=RawText(text))).tokens
    if not source.template:
        with pytest.raises(RequestError, match="model has no chat template"):
            prepared(base, replace(task, prompt=source))


def test_the_default_of_the_protocol_does_not_replace_the_models_template(replica) -> None:
    source = Conversation(HI, default_template="{{ .Prompt }}")
    assert answer(replica, source).prompt == answer(replica, Conversation(HI)).prompt


@pytest.fixture(scope="module")
def base():
    """The preparer of a model without a template."""
    model = load(DEMO_MODEL, device=torch.device("cpu"), dtype=torch.float32)
    preparer = PromptPreparer(replace(model, template=None), name="base", context_tokens=64)
    yield preparer
    preparer.close()


def prepared(preparer: PromptPreparer, task: ChatTask) -> Prompt:
    async def entered() -> Prompt:
        async with preparer.prepared(task, max_tokens=64) as prompt:
            return prompt

    return asyncio.run(entered())


TURNS = tuple(
    Message(role, f"{role} {number} says something")
    for number in range(9)
    for role in ("user", "assistant")
)


def test_a_long_chat_loses_its_oldest_turns(replica) -> None:
    messages = (Message("system", "Be brief."), *TURNS, *HI)
    said = answer(replica, Conversation(messages), truncation=Truncation(turns=True))
    again = answer(replica, Conversation(messages), truncation=Truncation(turns=True))
    assert again.prompt == said.prompt and len(said.prompt) < 64
    shorter = [(messages[0], *messages[begin:]) for begin in range(1, len(messages), 2)]
    fitting = [answer(replica, Conversation(each)).prompt for each in shorter[-2:]]
    assert said.prompt in fitting
    with pytest.raises(PromptTooLongError, match="exceeds the context length"):
        answer(replica, Conversation(messages))
    alone = (Message("system", "x y " * 99), *HI)
    for asked, setting in ((None, "context_tokens"), (32, "num_ctx"), (1, "num_ctx")):
        fact = f"last turn .* length is {asked or 64} tokens for prompt and answer.* `{setting}`"
        with pytest.raises(PromptTooLongError, match=fact):
            answer(
                replica,
                Conversation(alone),
                truncation=Truncation(turns=True),
                context_tokens=asked,
            )


@pytest.mark.parametrize("length", [70, 50_000])
def test_a_long_text_loses_tokens_after_the_first(replica, length: int) -> None:
    text = " ".join(str(number % 10) for number in range(length))
    with pytest.raises(PromptTooLongError):
        answer(replica, RawText(text))
    cut = answer(replica, RawText(text), truncation=Truncation(keep=4), max_tokens=None)
    begin = answer(replica, RawText(text[:20])).prompt
    assert len(cut.prompt) == 48 and cut.prompt[:4] == begin[:4]
    end = answer(replica, RawText(text[-40:])).prompt
    assert cut.prompt[-12:] == end[-12:]
    asked = Conversation((Message("user", text),), after=(7, 8))
    said = answer(replica, asked, truncation=Truncation(keep=2), max_tokens=None)
    assert said.prompt[:2] == (7, 8) and len(said.prompt) == 48

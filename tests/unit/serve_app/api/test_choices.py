"""Requests for several choices: `n`, `best_of` and several prompts, with the official client."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import openai
import pytest

from model_zoo.chat.formats.reply_format import format_of
from runtime.errors import OverloadedError, PromptTooLongError
from serve_app.api.choices import MAX_ANSWERS, MAX_CHOICES, MAX_STREAMS, BestOf, whole_choices
from serve_app.config.options import LONGEST
from serve_app.messages.tasks import (
    Candidate,
    ChatDelta,
    ChatTask,
    RawText,
    ReplyOpening,
    TokenIds,
    TokenLogprob,
)
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.test_openai import CHAT, TEXT, USER, events, post
from tests.unit.serve_app.fake_replicas import (
    USAGE,
    PretendReplica,
    http_client,
    ingress,
    openai_client,
)
from tests.unit.serve_app.sockets import listening
from tests.virtual_time import Clock

SEED = 10


class SeededReplica(PretendReplica):
    """Answers with the words for the seed of the task, or the seed itself, once `starts` is set.

    Tasks with a seed in `failing` do not wait; they fail with `error` or after `fails_after` words.
    """

    def __init__(self, words: dict[int, tuple[str, ...]] | None = None) -> None:
        super().__init__()
        self.by_seed = words or {}
        self.failing: set[int] = set()
        self.starts = asyncio.Event()
        self.starts.set()

    async def generate(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        self.tasks.append(task)
        seed, ended = task.sampling.seed, False
        each = PretendReplica(self.by_seed.get(seed, ("seed", f" {seed}")), self.opening)
        each.waits = self.waits
        if seed in self.failing:
            each.fails_after, each.error = self.fails_after, self.error
        try:
            if seed not in self.failing:
                await self.starts.wait()
            async with aclosing(each.generate(task)) as deltas:
                async for delta in deltas:
                    yield delta
            ended = True
        finally:
            self.left += not ended


def client_at(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)


async def chat(client: openai.AsyncOpenAI, **fields):
    return await client.chat.completions.create(model="demo", messages=USER, seed=SEED, **fields)


async def complete(client: openai.AsyncOpenAI, prompt="p", **fields):
    return await client.completions.create(model="demo", prompt=prompt, seed=SEED, **fields)


def used(usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


async def test_a_chat_with_n_has_n_choices_and_counts_its_prompt_once():
    async with openai_client(SeededReplica()) as client:
        reply = await chat(client, n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.message.content for choice in reply.choices] == ["seed 10", "seed 11", "seed 12"]
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    prompt, completion = USAGE.prompt_tokens, 3 * USAGE.completion_tokens
    assert used(reply.usage) == (prompt, completion, prompt + completion)
    assert reply.usage.prompt_tokens_details.cached_tokens == USAGE.cached_tokens


async def test_a_streamed_chat_tags_each_chunk_with_the_index_of_its_choice():
    async with openai_client(SeededReplica()) as client:
        stream = await chat(client, n=2, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    texts, finishes, roles = defaultdict(str), {}, defaultdict(list)
    for (choice,) in (chunk.choices for chunk in parts):
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += [choice.delta.role] if choice.delta.role else []
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    assert texts == {0: "seed 10", 1: "seed 11"}
    assert finishes == {0: "stop", 1: "stop"}
    assert roles == {0: ["assistant"], 1: ["assistant"]}
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == []
    assert used(last.usage) == (7, 6, 13)


async def test_each_choice_of_a_stream_has_its_own_tool_calls():
    call = '<tool_call>{"name": "f", "arguments": {"x": %d}}</tool_call>'
    replica = SeededReplica({SEED: (call % 1,), SEED + 1: (call % 2,)})
    replica.opening = ReplyOpening(format_of("tools <tool_call>"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with openai_client(replica) as client:
        whole = await chat(client, n=2, tools=[tool])
        stream = await chat(client, n=2, tools=[tool], stream=True)
        arguments = defaultdict(str)
        async for chunk in stream:
            (choice,) = chunk.choices
            for part in choice.delta.tool_calls or ():
                arguments[choice.index] += part.function.arguments or ""
    calls = [choice.message.tool_calls[0] for choice in whole.choices]
    assert [each.function.arguments for each in calls] == ['{"x": 1}', '{"x": 2}']
    assert len({each.id for each in calls}) == 2
    assert arguments == {0: '{"x": 1}', 1: '{"x": 2}'}


async def test_several_prompts_are_answered_in_order_with_n_choices_each():
    replica = SeededReplica()
    async with openai_client(replica) as client:
        reply = await complete(client, ["a", "b"], n=2)
    assert [choice.text for choice in reply.choices] == [f"seed {SEED + i}" for i in range(4)]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    prompts = {task.sampling.seed - SEED: task.prompt for task in replica.tasks}
    a, b = RawText("a"), RawText("b")
    assert prompts == {0: a, 1: a, 2: b, 3: b}
    assert len({task.id for task in replica.tasks}) == 4
    assert used(reply.usage) == (2 * 7, 4 * 3, 26)


async def test_prompts_of_token_ids_are_streamed_with_their_indices():
    replica = SeededReplica()
    async with openai_client(replica) as client:
        stream = await complete(client, [[1, 2], [3]], stream=True, logprobs=0)
        texts, offsets = defaultdict(str), defaultdict(list)
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert {task.prompt for task in replica.tasks} == {TokenIds((1, 2)), TokenIds((3,))}
    assert texts == {0: "seed 10", 1: "seed 11"}
    assert offsets == {0: [0, 4], 1: [0, 4]}


async def test_the_first_of_several_choices_is_the_answer_to_a_request_for_one():
    replica = SeededReplica()
    async with openai_client(replica) as client:
        await complete(client)
        await complete(client, n=2)
    one, *several = replica.tasks
    first = min(several, key=lambda task: task.sampling.seed)
    assert (first.sampling, first.prompt) == (one.sampling, one.prompt)


@pytest.mark.parametrize("seed", [None, -1, -2, LONGEST])
async def test_choices_have_different_seeds_whatever_the_seed_of_the_request(seed):
    replica = SeededReplica()
    body = {"messages": USER, "n": 4, "seed": seed}
    assert (await post(CHAT, body, replica)).status_code == 200
    assert len({task.sampling.seed for task in replica.tasks}) == 4


async def test_best_of_returns_the_candidates_with_the_highest_mean_log_probability():
    # The log-probability of word k of the replica is -k / 2, so the shortest answer is the best.
    words = {SEED: tuple("abc"), SEED + 1: ("a",), SEED + 2: tuple("ab"), SEED + 3: ()}
    replica = SeededReplica(words)
    async with openai_client(replica) as client:
        one = await complete(client, best_of=4)
        two = await complete(client, best_of=4, n=2, logprobs=0)
    assert [choice.text for choice in one.choices] == ["a"]
    assert one.choices[0].logprobs is None
    assert [(choice.index, choice.text) for choice in two.choices] == [(0, "a"), (1, "ab")]
    assert two.choices[1].logprobs.token_logprobs == [-0.5, -1.0]
    assert used(one.usage) == (7, 4 * 3, 19), "all candidates are counted"


async def test_best_of_selects_within_each_prompt():
    words = {SEED: tuple("ab"), SEED + 1: ("a",), SEED + 2: ("c",), SEED + 3: tuple("cd")}
    async with openai_client(SeededReplica(words)) as client:
        reply = await complete(client, ["p", "q"], best_of=2)
    assert [choice.text for choice in reply.choices] == ["a", "c"]


def test_long_answers_are_not_worse_than_short_ones_of_the_same_mean():
    def answer(*logprobs: float) -> ChatDelta:
        drawn = tuple(TokenLogprob(Candidate("x", b"x", value)) for value in logprobs)
        return ChatDelta("x" * len(logprobs), logprobs=drawn)

    long, short, empty = answer(*[-0.4] * 9), answer(-0.5), answer()
    assert BestOf(2, 3, logprobs_wanted=True).select([empty, short, long]) == [long, short]
    selected = BestOf(1, 3, logprobs_wanted=False).select([short, long, empty])
    assert [(each.text, each.logprobs) for each in selected] == [("x" * 9, ())]


def test_the_deltas_of_a_choice_are_merged_in_their_order():
    parts = ((1, ChatDelta("b")), (0, ChatDelta("a")), (1, ChatDelta("c")))
    assert [each.text for each in whole_choices(ChatDelta(choices=parts))] == ["a", "bc"]


async def test_a_request_with_many_prompts_generates_some_of_the_answers_at_a_time():
    replica = SeededReplica()
    replica.starts.clear()
    prompts = [str(number) for number in range(MAX_ANSWERS)]
    async with openai_client(replica) as client:
        request = asyncio.create_task(complete(client, prompt=prompts))
        await until(lambda: len(replica.tasks) == MAX_STREAMS)
        await settled()
        assert {task.prompt.text for task in replica.tasks} == set(prompts[:MAX_STREAMS])
        replica.starts.set()
        reply = await request
    assert {task.prompt.text for task in replica.tasks} == set(prompts)
    assert [choice.text for choice in reply.choices] == [
        f"seed {SEED + index}" for index in range(MAX_ANSWERS)
    ]


BAD = [
    (CHAT, {"n": 0}, 'field "n" is 0; it must be at least 1 and at most 16'),
    (CHAT, {"n": MAX_CHOICES + 1}, 'field "n" is 17'),
    (CHAT, {"n": "2"}, 'field "n" must be of type integer'),
    (TEXT, {"n": 2, "prompt": ["p"] * 65}, '65 prompts and field "n" with 2 make 130 choices'),
    (TEXT, {"prompt": ["p"] * 129}, "at most 128"),
    (TEXT, {"prompt": ["p", 1]}, 'field "prompt[1]" must be a string or a list of token ids'),
    (TEXT, {"prompt": [[1], [-1]]}, 'field "prompt[1]" must be'),
    (TEXT, {"best_of": 17}, 'field "best_of" is 17'),
    (TEXT, {"best_of": 9, "prompt": ["p"] * 15}, 'field "best_of" with 9 make 135 choices'),
    (TEXT, {"best_of": 2, "n": 3}, 'field "best_of" is 2; it must be at least "n", which is 3'),
    (TEXT, {"best_of": 3, "stream": True}, 'field "best_of" is 3; with "stream" it must be equal'),
]


@pytest.mark.parametrize(("path", "fields", "message"), BAD, ids=[each for _, _, each in BAD])
async def test_impossible_numbers_of_choices_are_refused_by_name(path, fields, message):
    replica = PretendReplica()
    body = ({"messages": USER} if path == CHAT else {"prompt": "p"}) | fields
    response = await post(path, body, replica)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert replica.tasks == []


async def test_best_of_equal_to_n_is_streamed():
    response = await post(TEXT, {"prompt": "p", "n": 2, "best_of": 2, "stream": True})
    assert {chunk["choices"][0]["index"] for chunk in events(response)} == {0, 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PromptTooLongError("too long"), openai.BadRequestError),
        (OverloadedError("9 wait"), openai.InternalServerError),
    ],
)
async def test_a_choice_that_fails_at_once_fails_the_request_and_ends_the_others(
    error, raised, stream
):
    replica = SeededReplica()
    replica.starts.clear()
    replica.failing, replica.error = {SEED + 1}, error
    async with openai_client(replica) as client:
        with pytest.raises(raised, match=str(error)):
            await chat(client, n=3, stream=stream)
        await until(lambda: replica.left == len(replica.tasks))


async def test_a_choice_that_fails_later_ends_the_stream_with_an_error_and_the_others():
    replica = SeededReplica({SEED + 1: ("one", "two", "three")})
    replica.waits.clear()
    replica.starts.clear()
    replica.failing, replica.fails_after = {SEED + 1}, 1
    async with ingress(replica) as app, listening(app) as port, asyncio.timeout(HANG_S):
        stream = await chat(client_at(port), n=2, stream=True)
        await anext(stream)
        await until(lambda: len(replica.tasks) == 2)
        replica.waits.set()
        with pytest.raises(openai.APIError, match="the engine broke"):
            async for _ in stream:
                pass
        await until(lambda: replica.left == 2)


async def test_a_choice_that_fails_later_fails_a_single_reply_with_its_status():
    replica = SeededReplica()
    replica.failing, replica.fails_after = {SEED + 1}, 1
    async with openai_client(replica) as client:
        with pytest.raises(openai.InternalServerError, match="the engine broke"):
            await complete(client, ["a", "b", "c"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_all_choices(stream):
    replica = SeededReplica()
    replica.waits.clear()
    async with ingress(replica) as app, listening(app) as port, asyncio.timeout(HANG_S):
        asking = asyncio.create_task(_read(client_at(port), stream))
        await until(lambda: len(replica.tasks) == 3)
        asking.cancel()
        await until(lambda: replica.left == 3)


async def _read(client: openai.AsyncOpenAI, stream: bool) -> None:
    reply = await chat(client, n=3, stream=stream)
    async for _ in reply:
        pass


@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({"n": 3}, 7 + 3 * 3),
        ({"n": 3, "stream": True}, 7 + 3 * 3),
        ({"prompt": ["a", "b"]}, 2 * 7 + 2 * 3),
        ({"best_of": 4}, 7 + 4 * 3),
    ],
    ids=["n", "streamed", "prompts", "best_of"],
)
async def test_the_tokens_of_all_choices_are_charged(fields, cost):
    keys = (api_key("a", tokens_per_minute=1000),)
    headers = {"authorization": "Bearer a"}
    async with http_client(PretendReplica(), api_keys=keys, clock=Clock()) as client:
        body = {"model": "demo", "prompt": "p", **fields}
        assert (await client.post(TEXT, json=body, headers=headers)).status_code == 200
        left = (await client.get("/v1/models", headers=headers)).headers
    assert left["x-ratelimit-remaining-tokens"] == str(1000 - cost)

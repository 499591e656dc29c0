"""Scores of prompts, logit biases, ends of answers and tokenization over HTTP, on a tiny model."""

import re
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import anthropic
import httpx
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import load_replica
from serve_app.replica.model_files import local_files
from tests.tiny_models import CHAT_TEMPLATE, END, START, tiny_tokenizer, write_tiny_llama
from tests.unit.serve_app.fake_replicas import Clients, clients

PROMPT = "the quick brown fox 🐪 jumps"
USER = [{"role": "user", "content": "hello there"}]
GREEDY = {"model": "demo", "temperature": 0}
CONTEXT_TOKENS = 384


@dataclass(frozen=True)
class Served:
    replica: Any
    twin: Any
    tokenizer: PreTrainedTokenizerFast

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[positions, vocabulary]: of the token after each position."""
        return self.twin(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    twin = write_tiny_llama(path)
    settings = ModelSettings(
        name="demo",
        source=str(path),
        context_tokens=CONTEXT_TOKENS,
        max_sequences=2,
        kv_dtype="float32",
    )
    files = local_files(settings, {})
    assert files is not None
    replica = load_replica(settings, files=files)
    yield Served(replica, twin, PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()))
    replica.close()


def clients_of(served: Served) -> AbstractAsyncContextManager[Clients]:
    return clients(served.replica, card=served.replica.describe(), max_body_bytes=1 << 20)


async def completed(served: Served, **change: Any):
    async with clients_of(served) as to:
        return (await to.oai.completions.create(**GREEDY | {"prompt": PROMPT} | change)).choices[0]


async def posted(served: Served, path: str, **body: Any) -> httpx.Response:
    async with clients_of(served) as to:
        return await to.raw.post(path, json={"model": "demo"} | body)


def lm_eval_parsed(reply: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """`LocalCompletionsAPI.parse_logprobs` of lm-eval 0.4.13."""
    parsed = []
    choices = sorted(reply["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(
            token == max(top.values()) for token, top in zip(logprobs, top_logprobs, strict=True)
        )
        parsed.append((sum(logprobs), greedy))
    return parsed


async def test_lm_evals_loglikelihoods_are_the_models(served):
    context = served.ids(PROMPT)
    expected = served.logprobs(context)
    best = [*context, int(expected[-1].argmax())]
    prompts = [context + served.ids(" over"), best]
    request = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    reply = (await posted(served, "/v1/completions", prompt=prompts, **request)).json()
    found = lm_eval_parsed(reply, [len(context)] * 2)
    for ids, (logprob, greedy) in zip(prompts, found, strict=True):
        rows = served.logprobs(ids)[len(context) - 1 : -1]
        wanted = ids[len(context) :]
        total = sum(float(row[token]) for row, token in zip(rows, wanted, strict=True))
        assert logprob == pytest.approx(total, abs=1e-3)
        assert greedy == (rows.argmax(-1).tolist() == wanted)
    assert found[1][1]


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_an_echoed_prompt_comes_before_the_answer(served, most, stream, as_ids):
    ids = served.ids(PROMPT)
    body = {**GREEDY, "prompt": ids if as_ids else PROMPT, "logprobs": 2, "max_tokens": most}
    async with clients_of(served) as to:
        reply = await to.oai.completions.create(**body, echo=True, stream=stream)
        chunks = [chunk async for chunk in reply] if stream else [reply]
        plain = await to.oai.completions.create(**body | {"max_tokens": 3})
    choices = [choice for chunk in chunks for choice in chunk.choices]
    lists = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, logprobs, top, offsets = (
        [item for each in lists for item in getattr(each, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    answer = plain.choices[0]
    count = len(answer.logprobs.tokens) if most else 0
    text = "".join(choice.text for choice in choices)
    assert text == PROMPT + answer.text[: len(answer.text) * bool(most)]
    assert (logprobs[0], top[0]) == (None, None)
    expected = served.logprobs(ids)
    for place, token in enumerate(ids[1:], 1):
        assert logprobs[place] == pytest.approx(float(expected[place - 1, token]), abs=1e-3)
        likely = {*expected[place - 1].topk(2).indices.tolist(), token}
        values = sorted(float(expected[place - 1, each]) for each in likely)
        assert sorted(top[place].values()) == pytest.approx(values, abs=1e-3)
    assert len(tokens) == len(logprobs) == len(ids) + count
    assert logprobs[len(ids) :] == answer.logprobs.token_logprobs[:count]
    assert choices[-1].finish_reason == "length"
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)


async def test_an_echo_without_log_probabilities_is_text(served):
    for prompt in (PROMPT, served.ids(PROMPT)):
        reply = await completed(served, prompt=prompt, echo=True, max_tokens=0)
        assert (reply.text, reply.logprobs, reply.finish_reason) == (PROMPT, None, "length")


async def test_the_best_of_several_answers_has_only_the_lists_that_were_requested(served):
    body = {"temperature": 1.0, "best_of": 2, "echo": True, "max_tokens": 2}
    plain = await completed(served, **body)
    assert plain.text.startswith(PROMPT) and plain.logprobs is None
    scored = await completed(served, **body, logprobs=0)
    assert len(scored.logprobs.tokens) == len(served.ids(PROMPT)) + 2


async def test_a_bias_makes_tokens_certain_or_impossible_and_is_not_in_log_probabilities(served):
    ids = served.ids(PROMPT)
    row = served.logprobs(ids)[-1]
    best, other = row.topk(2).indices.tolist()
    plain = await completed(served, max_tokens=1, logprobs=0)
    banned = await completed(served, max_tokens=1, logprobs=0, logit_bias={str(best): -100})
    forced = await completed(served, max_tokens=1, logprobs=0, logit_bias={str(5): 100}, seed=1,
                             temperature=1.0)  # fmt: skip
    for reply, token in ((plain, best), (banned, other), (forced, 5)):
        assert reply.logprobs.token_logprobs[0] == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize("extra", [{"logit_bias": {"90000": 1}}, {"stop_token_ids": [90000]}])
async def test_ids_outside_the_vocabulary_are_refused(served, extra):
    response = await posted(served, "/v1/completions", prompt="the", **extra)
    (name,) = extra
    assert response.status_code == 400
    assert re.search(f'"{name}" has the token id 90000', response.json()["error"]["message"])


async def test_requested_end_tokens_and_stop_strings_are_reported(served):
    whole = await completed(served, max_tokens=12, logprobs=0)
    ids = served.twin.generate(
        torch.tensor([served.ids(PROMPT)]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )[0].tolist()[-12:]
    token = next(t for n, t in enumerate(ids) if n > 2 and t not in ids[:n])
    at = ids.index(token)
    ended = await completed(served, max_tokens=12, logprobs=0,
                            extra_body={"stop_token_ids": [token]})  # fmt: skip
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
    assert ended.logprobs.tokens == whole.logprobs.tokens[:at]
    later = await completed(served, max_tokens=12, logprobs=0,
                            extra_body={"stop_token_ids": [token], "min_tokens": 12})  # fmt: skip
    assert (later.finish_reason, later.stop_reason) == ("length", None)
    assert later.logprobs.tokens[:at] == whole.logprobs.tokens[:at]
    assert len(later.logprobs.tokens) == 12
    stop = whole.text[len(whole.text) // 2 :][:2]
    before = whole.text[: whole.text.index(stop)]
    for keep in (False, True):
        cut = await completed(served, max_tokens=12, stop=["never", stop],
                              extra_body={"include_stop_str_in_output": keep})  # fmt: skip
        assert (cut.text, cut.stop_reason) == (before + stop * keep, stop)


@pytest.mark.parametrize("extra", [{}, {"include_stop_str_in_output": True}])
async def test_a_stop_string_that_is_a_control_token_ends_the_answer(served, extra):
    forced = {"max_tokens": 6, "logit_bias": {str(tiny_tokenizer().token_to_id(START)): 100}}
    endless = await completed(served, **forced)
    assert (endless.text, endless.finish_reason) == ("", "length")
    ended = await completed(served, **forced, stop=["never", START], extra_body=extra)
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("", "stop", START)


async def test_a_stop_string_that_is_the_models_end_token_is_reported_only_without_the_models_end(
    served,
):
    forced = {"max_tokens": 6, "logit_bias": {str(tiny_tokenizer().token_to_id(END)): 100}}
    ended = await completed(served, **forced, stop=[END])
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    ended = await completed(served, **forced, stop=[END], extra_body={"ignore_eos": True})
    assert (ended.finish_reason, ended.stop_reason) == ("stop", END)


async def test_the_models_own_end_can_be_ignored_and_delayed(served):
    end = str(tiny_tokenizer().token_to_id(END))
    body = {"max_tokens": 6, "logit_bias": {end: 100}}
    ended = await completed(served, **body)
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("", "stop", None)
    ignored = await completed(served, **body, extra_body={"ignore_eos": True})
    assert ignored.finish_reason == "length"
    async with clients_of(served) as to:
        delayed = await to.oai.completions.create(
            **GREEDY, prompt=PROMPT, **body, extra_body={"min_tokens": 4}
        )
    assert delayed.choices[0].finish_reason == "stop"
    assert delayed.usage.completion_tokens == 5


@pytest.mark.parametrize("longer", [{"min_tokens": 30}, {"ignore_eos": True}])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"guided_choice": ["the"]}, "the"),
        ({"guided_regex": "a{3,8}"}, "aaaaaaaa"),
        ({"guided_json": {"const": 5}}, "5"),
    ],
)
async def test_the_form_of_an_answer_takes_precedence_over_its_length(served, form, text, longer):
    bias = {str(tiny_tokenizer().token_to_id(END)): 100}
    choice = await completed(served, max_tokens=40, logit_bias=bias, extra_body={**form, **longer})
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", None)


async def test_the_models_end_may_be_ignored_but_requested_in_a_form(served):
    end = tiny_tokenizer().token_to_id(END)
    form = {"guided_regex": "a{3,8}", "ignore_eos": True, "stop_token_ids": [end]}
    choice = await completed(served, max_tokens=40, logit_bias={str(end): 100}, extra_body=form)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("aaa", "stop", end)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_leaves_no_token_is_refused(served, stream):
    response = await posted(
        served,
        "/v1/completions",
        prompt="the",
        guided_choice=["the"],
        allowed_token_ids=served.ids("quick")[:1],
        stream=stream,
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "No token may follow" in error["message"]


async def test_anthropics_stop_sequence_is_named(served):
    async with clients_of(served) as to:
        body = {
            "model": "demo",
            "messages": USER,
            "max_tokens": 12,
            "extra_body": {"temperature": 0},
        }
        whole = await to.anthropic.messages.create(**body)
        text = whole.content[0].text
        stop = text[len(text) // 2 :][:2]
        cut = await to.anthropic.messages.create(**body, stop_sequences=["never", stop])
        async with to.anthropic.messages.stream(**body, stop_sequences=[stop]) as stream:
            streamed = await stream.get_final_message()
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    for message in (cut, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == text[: text.index(stop)]


async def test_counted_tokens_are_those_of_the_request(served):
    given = {"model": "demo", "messages": USER, "system": "be quick"}
    tools = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    async with clients_of(served) as to:
        for body in (given, given | {"tools": tools}):
            counted = await to.anthropic.messages.count_tokens(**body)
            message = await to.anthropic.messages.create(**body, max_tokens=1)
            usage = message.usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        for body in ({}, {"tools": [{"type": "function", "name": "add", "parameters": {}}]}):
            given = {"model": "demo", "input": "hello there", "instructions": "be quick", **body}
            found = await to.oai.responses.input_tokens.count(**given)
            reply = await to.oai.responses.create(**given, max_output_tokens=1)
            assert found.input_tokens == reply.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="messages is required"):
            await to.anthropic.messages.count_tokens(model="demo", messages=[])


@pytest.mark.parametrize("text", [PROMPT, "", " the", f"the{END}\nfox"])
async def test_texts_are_tokenized_and_back(served, text):
    ids = served.ids(text)
    body = {"prompt": text, "return_token_strs": True}
    found = (await posted(served, "/tokenize", **body)).json()
    assert found == {
        "count": len(ids),
        "max_model_len": CONTEXT_TOKENS,
        "tokens": ids,
        "token_strs": served.tokenizer.convert_ids_to_tokens(ids),
    }
    back = (await posted(served, "/detokenize", tokens=ids)).json()
    assert back == {"prompt": text}


@pytest.mark.parametrize("opened", [False, True])
async def test_conversations_are_tokenized_as_their_template_renders_them(served, opened):
    found = await posted(served, "/tokenize", messages=USER, add_generation_prompt=opened)
    expected = served.tokenizer.apply_chat_template(
        USER, chat_template=CHAT_TEMPLATE, add_generation_prompt=opened, return_dict=False
    )
    assert (found.json()["tokens"], found.json()["token_strs"]) == (expected, None)


async def test_a_message_to_continue_is_tokenized_as_its_template_renders_it(served):
    talk = [*USER, {"role": "assistant", "content": "the quick"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    found = await posted(served, "/tokenize", messages=talk, **fields)
    expected = served.tokenizer.apply_chat_template(
        talk, chat_template=CHAT_TEMPLATE, return_dict=False, **fields
    )
    assert found.json()["tokens"] == expected


async def test_all_protocols_continue_the_last_message(served):
    talk = [*USER, {"role": "assistant", "content": "the quick"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = (await posted(served, "/tokenize", messages=talk, **fields)).json()["tokens"]
    expected = (await completed(served, prompt=tokens, max_tokens=6)).text
    greedy = GREEDY | {"messages": talk}
    body = {"max_tokens": 6, **greedy, **fields}
    (choice,) = (await posted(served, "/v1/chat/completions", **body)).json()["choices"]
    limits = {"temperature": 0, "num_predict": 6}
    own = await posted(served, "/api/chat", messages=talk, stream=False, options=limits)
    by_anthropic = await posted(served, "/v1/messages", max_tokens=6, **greedy)
    assert choice["message"]["content"] == expected
    assert own.json()["message"]["content"] == expected
    assert by_anthropic.json()["content"][0]["text"] == expected


BAD = [
    ("/tokenize", {}, 'exactly one of the fields "prompt" and "messages" is required'),
    ("/tokenize", {"prompt": "a", "messages": USER}, "exactly one of the fields"),
    ("/tokenize", {"messages": []}, "[] is too short"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, '"chat_template" is not served yet'),
    ("/tokenize", {"prompt": "a" * 9000}, "exceeds the context length"),
    ("/detokenize", {}, 'field "tokens" is required'),
    ("/detokenize", {"tokens": ["a"]}, 'field "tokens" must be a list of token ids'),
    ("/detokenize", {"tokens": [90000]}, "the token id 90000 is outside the vocabulary"),
    ("/v1/completions", {"prompt": [90000], "echo": True, "max_tokens": 0}, "token id outside"),
]


@pytest.mark.parametrize(("path", "body", "told"), BAD)
async def test_what_cannot_be_tokenized_is_refused(served, path, body, told):
    response = await posted(served, path, **body)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]

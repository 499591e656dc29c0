"""The official `ollama` client against the running application."""

import random

import ollama
import pytest

from tools import demo_tools
from tools.demo_dialogues import held_out

QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]
GREEDY = {"temperature": 0}


def test_held_out_questions_are_answered(native):
    questions = held_out(seed=1, per_skill=2)
    right = 0
    for question in questions:
        reply = native.chat("demo", question.messages, options=GREEDY)
        right += reply.message.content == question.answer
    assert right >= 0.9 * len(questions), f"{right} of {len(questions)}"


def test_held_out_sums_are_added_by_a_tool(native):
    questions = demo_tools.held_out(seed=1, per_skill=8)
    right = 0
    for question in questions:
        reply = native.chat("demo", question.messages, tools=question.tools, options=GREEDY).message
        functions = [each.function for each in reply.tool_calls or ()]
        calls = [{"function": {"name": f.name, "arguments": dict(f.arguments)}} for f in functions]
        said = {"role": "assistant", "content": reply.content, "tool_calls": calls}
        right += demo_tools.as_text([said])[0]["content"] == question.answer
    assert right >= 0.9 * len(questions), f"{right} of {len(questions)}"


def test_a_streamed_chat_says_the_same_as_a_whole_one(native):
    whole = native.chat("demo", QUESTION, options=GREEDY)
    *pieces, last = native.chat("demo", QUESTION, options=GREEDY, stream=True)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert "cold" in whole.message.content
    assert last.done and last.done_reason == whole.done_reason == "stop"
    assert last.prompt_eval_count == whole.prompt_eval_count > 0
    assert last.eval_count == whole.eval_count > 0
    assert last.total_duration > 0 and last.eval_duration > 0


def test_a_context_continues_a_conversation(native):
    greedy = {"temperature": 0}
    first = native.generate("demo", "What is 23 + 14?", options=greedy)
    assert first.response == "23 + 14 = 37."
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    alone = native.generate("demo", "What is 31 + 5?", options=greedy)
    second = native.generate("demo", "What is 31 + 5?", context=first.context, options=greedy)
    assert second.prompt_eval_count == alone.prompt_eval_count + len(first.context)
    assert second.context[: len(first.context)] == first.context
    assert second.response == "31 + 5 = 36."


def test_a_stop_string_ends_an_answer_before_it(native):
    whole = native.chat("demo", QUESTION, options=GREEDY).message.content
    assert "cold" in whole
    cut = native.chat("demo", QUESTION, options={**GREEDY, "stop": ["cold"]})
    assert cut.message.content == whole[: whole.index("cold")]
    assert cut.done_reason == "stop"


def test_logprobs_cover_the_answer(native):
    reply = native.chat("demo", QUESTION, options=GREEDY, logprobs=True, top_logprobs=3)
    assert "".join(entry.token for entry in reply.logprobs).startswith(reply.message.content)
    for entry in reply.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)


def test_the_model_is_listed_shown_and_running(native, application):
    (listed,) = native.list().models
    shown = native.show("demo")
    (running,) = native.ps().models
    assert listed.model == "demo:latest"
    assert listed.details.family == shown.modelinfo["general.architecture"] == "gemma3"
    assert shown.modelinfo["general.parameter_count"] > 100_000
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert "<|im_start|>" in shown.template
    assert "completion" in shown.capabilities
    assert running.size > listed.size > 0
    assert running.context_length == 512
    assert "num_ctx 512" in " ".join(shown.parameters.split())


BAD = [
    ({"model": "nobody"}, 404, "model 'nobody' not found"),
    ({"options": {"repeat_last_n": -2}}, 400, 'option "repeat_last_n" is -2'),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "context"),
    ({"messages": [{"role": "user", "content": "long", "images": [b"x"]}]}, 400, "images"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "status", "message"), BAD, ids=[m for _, _, m in BAD])
def test_errors_are_those_of_the_clients_library(native, change, status, message, stream):
    with pytest.raises(ollama.ResponseError) as caught:
        reply = native.chat(**{"model": "demo", "messages": QUESTION, "stream": stream, **change})
        list(reply)
    assert caught.value.status_code == status
    assert message in caught.value.error


def test_a_refused_request_does_not_affect_the_next_one(native):
    before = native.chat("demo", QUESTION, options=GREEDY).message.content
    rng = random.Random(0)
    for change, _, _ in rng.sample(BAD, len(BAD)):
        with pytest.raises(ollama.ResponseError):
            native.chat(**{"model": "demo", "messages": QUESTION, **change})
    assert native.chat("demo", QUESTION, options=GREEDY).message.content == before


def test_texts_become_vectors_of_length_one_in_their_order(native):
    texts = ["What is the opposite of hot?", "What is 23 + 14?", "What is the opposite of hot?"]
    reply = native.embed("demo", texts)
    lengths = [sum(x * x for x in vector) ** 0.5 for vector in reply.embeddings]
    assert lengths == pytest.approx([1, 1, 1], abs=1e-5)
    assert reply.embeddings[0] == pytest.approx(reply.embeddings[2], abs=1e-6)
    assert reply.embeddings[0] != pytest.approx(reply.embeddings[1], abs=1e-2)
    single = native.embed("demo", texts[1])
    assert single.embeddings[0] == pytest.approx(reply.embeddings[1], abs=1e-5)
    assert 0 < single.prompt_eval_count < reply.prompt_eval_count
    older = native.embeddings("demo", texts[1]).embedding
    length = sum(x * x for x in older) ** 0.5
    assert [x / length for x in older] == pytest.approx(single.embeddings[0], abs=1e-5)

"""The official clients against the running application; tests/unit has what needs no Ray."""

from functools import partial

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


def test_a_streamed_chat_of_openai_says_the_same_as_a_whole_one(oai):
    ask = partial(oai.chat.completions.create, model="demo", messages=QUESTION, temperature=0)
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert "cold" in text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason == "stop"
    assert not any(reasons[:-1])
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens > 0
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

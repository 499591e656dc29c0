"""Tools, calls, results and thinking reach the prompt, wherever a template reads them."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.message_form import CallsPlace, ToolsPlace
from model_zoo.chat.messages import ImagePart, ImageTexts, Message, ToolCall
from model_zoo.chat.shown_texts import refuse_unshown
from model_zoo.chat.unforged import render_unforged
from model_zoo.chat_model import ChatModel
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import RequestError
from tests.chat_templates import SPECIAL, all_templates, template_source
from tests.reply_parsing import parsed, replied
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, byte_level_metadata

FUNCTION = {
    "name": "get_weather",
    "description": "It is “weather”.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": FUNCTION}
ASK = Message("user", "How is it?")
CALL = ToolCall("get_weather", {"city": "Yverdon"}, "call00001")
CALLS = Message("assistant", tool_calls=(CALL,))
RESULT = Message("tool", "SUNNY", tool_name="get_weather", tool_call_id="call00001")
ANSWERED = [ASK, CALLS, RESULT]
SYSTEM = Message("system", "Be brief.")

_TURN = "<|{{ m.role }}|>{{ m.metadata }}{{ m.content }}"
# Of Phi 4 mini: tools are a text that is joined with others.
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'system' and 'tools' in m %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}"
    "{% endif %}{% endfor %}<|assistant|>"
)
# Of GLM 4: tools are a list, the role is any, a name is metadata.
GLM = (
    "[gMASK]{% for m in messages %}{% if m.tools is defined %}<|system|>"
    "{% for t in m.tools if t['type'] == 'function' %}{{ t.function | tojson }}{% endfor %}"
    f"{{% endif %}}{{% if m.content %}}{_TURN}{{% endif %}}{{% endfor %}}<|assistant|>"
)
# Of GLM 4 0414: results have a role of their own.
OBSERVED = (
    "[gMASK]{{ tools | tojson if tools }}{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'assistant') %}" + _TURN + "{% elif m.role == 'observation'"
    " %}<|observation|>{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)
# Of FunctionGemma: tools are part of a turn of the system.
BESIDE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ tools | tojson if tools and m.role == 'system' }}{{ m.tool_calls }}{% endfor %}"
)
# Of Mistral's reasoning models: thinking is a part of the content.
PARTS = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% elif part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
# Of Kimi K2: the ids of calls are collected in a list.
COLLECTING = (
    "{{ tools | tojson }}{% set ids = [] %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{% set _ = ids.append(c.id) %}{{ c.function | tojson }}"
    "{% endfor %}{% endfor %}{{ ids | join(',') }}"
)
UNREAD_RESULTS = (
    "{{ tools | tojson }}{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
FAILING_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.x.y }}{% endfor %}{% endfor %}"
)
OWN = {
    "phi": PHI,
    "glm": GLM,
    "observed": OBSERVED,
    "beside": BESIDE,
    "parts": PARTS,
    "collecting": COLLECTING,
    "unread results": UNREAD_RESULTS,
    "counted tools": "{{ tools | length if tools }}" + FAILING_CALLS,
    "failing calls": "{{ tools | tojson }}" + FAILING_CALLS,
    "failing tools": "{{ tools.x.y if tools }}" + FAILING_CALLS,
}
# Those that show no thinking beside calls, or another kind of it.
WITHOUT_THOUGHTS = {
    "Apriel-1.6-15b-Thinker-fixed",
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2.5-Instruct",
    "NVIDIA-Nemotron-Nano-v2",
    "Qwen-QwQ-32B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
    "unsloth-Apriel-1.5",
}


def model_of(source: str) -> ChatModel:
    decoder: Any = SimpleNamespace(context_length=1 << 20)
    facts: Any = SimpleNamespace(name="tiny")
    tokenizer = load_tokenizer(byte_level_metadata({"<|end|>": CONTROL}), architecture="qwen2")
    return ChatModel(decoder, tokenizer, ChatTemplate(source, **SPECIAL), facts)


def prompt_of(source: str, messages: list[Message], **options: Any) -> str:
    model = model_of(source)
    return model.tokenizer.decode(model.prepare(messages, tools=[TOOL], **options).tokens)


def check(source: str) -> ChatModel:
    """Checks that tool, call and result are part of the prompt."""
    model = model_of(source)
    for first in ([], [SYSTEM]):
        prompt = model.tokenizer.decode(model.prepare([*first, ASK], tools=[TOOL]).tokens)
        assert "get_weather" in prompt and ASK.text in prompt
        prompt = model.tokenizer.decode(model.prepare([*first, *ANSWERED], tools=[TOOL]).tokens)
        assert all(text in prompt for text in ("Yverdon", "SUNNY", *(m.text for m in first)))
    return model


@pytest.mark.parametrize("name", OWN)
def test_tools_calls_and_results_are_part_of_the_prompt(name: str) -> None:
    check(OWN[name])


def test_thinking_is_a_block_where_the_template_reads_blocks() -> None:
    """As Apertus' does, which refuses texts beside blocks."""
    source = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
        "{% for b in m.content.blocks %}{{ b.type if b.type == 'thoughts' }}:{{ b.text }};"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    thinking, plain = Message("assistant", "Four.", thinking="Hm."), Message("assistant", "Five.")
    prompt = ChatTemplate(source).render([ASK, thinking, ASK, plain])
    assert prompt.removeprefix(f"<user>{ASK.text}").split(f"<user>{ASK.text}") == [
        "<assistant>thoughts:Hm.;:Four.;",
        "<assistant>:Five.;",
    ]


@pytest.mark.parametrize("name", all_templates())
def test_published_templates_show_tools_calls_results_and_thinking(name: str) -> None:
    model = check(template_source(name))
    if model.reply_format.thinks and name not in WITHOUT_THOUGHTS:
        thinking = Message("assistant", thinking="Thought", tool_calls=(CALL,))
        prompt = model.prepare([ASK, thinking, RESULT], tools=[TOOL], thinking=True)
        assert "Thought" in model.tokenizer.decode(prompt.tokens)


def test_tools_are_a_json_text_in_the_systems_turn_where_the_template_joins_them() -> None:
    """As the card of Phi 4 mini has them."""
    tools = json.dumps([FUNCTION], ensure_ascii=False)
    given = f"<|tool|>{tools}<|/tool|>"
    asked = f"<|user|>{ASK.text}<|assistant|>"
    assert prompt_of(PHI, [SYSTEM, ASK]) == f"<|system|>Be brief.{given}{asked}"
    assert prompt_of(PHI, [ASK]) == f"<|system|>{given}{asked}"
    called = prompt_of(PHI, ANSWERED).removeprefix(f"<|system|>{given}<|user|>{ASK.text}")
    written = called.removeprefix("<|assistant|>").partition("<|tool|>")[0]
    assert parsed(replied(format_of(PHI), [written])).calls[0][:2] == (CALL.name, CALL.arguments)


@pytest.mark.parametrize("reply", ["functools[{0}]", "<|tool_call|>[{0}]<|/tool_call|>"])
def test_calls_of_phi_4_mini_are_read_as_the_model_writes_them(reply: str) -> None:
    call = json.dumps({"name": "get_weather", "arguments": {"city": "Rome"}})
    found = parsed(replied(format_of(PHI), list(reply.format(call)), tools={"get_weather": {}}))
    assert found.calls == (("get_weather", {"city": "Rome"}, None),) and not found.text


def test_tools_are_a_list_in_the_systems_turn_where_the_template_iterates_over_it() -> None:
    form = ChatTemplate(GLM).form
    assert (form.tools, form.calls) == (ToolsPlace.SYSTEM_LIST, CallsPlace.METADATA)
    tool = f"<|system|>{json.dumps(FUNCTION, ensure_ascii=False)}"
    assert prompt_of(GLM, [ASK]) == f"[gMASK]{tool}<|user|>{ASK.text}<|assistant|>"


@pytest.mark.parametrize("source", [GLM, OBSERVED])
def test_calls_and_results_have_the_form_of_glm_4(source: str) -> None:
    spoken = Message("assistant", "I look.", tool_calls=(CALL, CALL))
    prompt = prompt_of(source, [ASK, spoken, RESULT, RESULT])
    call = '<|assistant|>get_weather{"city": "Yverdon"}'
    end = f"<|assistant|>I look.{call * 2}{'<|observation|>SUNNY' * 2}<|assistant|>"
    assert prompt.endswith(f"<|user|>{ASK.text}{end}")
    assert format_of(source).name == "glm4"


def test_calls_are_shown_where_the_template_appends_to_a_list() -> None:
    assert prompt_of(COLLECTING, ANSWERED).endswith("<tool>SUNNYcall00001")
    assert ChatTemplate(COLLECTING).form.calls is CallsPlace.TOOL_CALLS


def test_a_template_that_shows_no_results_gets_them_as_the_users_turns() -> None:
    prompt = prompt_of(UNREAD_RESULTS, ANSWERED)
    assert prompt.endswith("<user><tool_response>\nSUNNY\n</tool_response>")


def test_a_template_whose_tools_do_not_show_gets_the_generic_instructions_and_format() -> None:
    model = model_of(OWN["counted tools"])
    assert not model.reply_format.tools and model.reply_format.name == "generic"
    assert "<tool_call>" in prompt_of(OWN["counted tools"], [ASK])


def test_control_tokens_in_tools_of_the_systems_turn_stay_text() -> None:
    model = model_of(PHI)
    function = FUNCTION | {"description": "“<|end|>”"}
    tokens = model.prepare([ASK], tools=[{"type": "function", "function": function}]).tokens
    assert model.tokenizer.vocabulary.control["<|end|>"] not in tokens
    assert json.dumps([function], ensure_ascii=False) in model.tokenizer.decode(tokens)


def test_thinking_is_a_part_of_the_content_where_the_template_reads_it_there() -> None:
    thinking = Message("assistant", "So.", thinking="Hm.", tool_calls=(CALL,))
    prompt = prompt_of(PARTS, [ASK, thinking, RESULT])
    assert f"<user>{ASK.text}<assistant>[THINK]Hm.[/THINK]So." in prompt
    assert "<assistant>[THINK]Hm.[/THINK]{" in prompt_of(
        PARTS, [ASK, Message("assistant", thinking="Hm.", tool_calls=(CALL,)), RESULT]
    )
    assert prompt_of(PARTS, [ASK, Message("assistant", "So.", thinking=""), ASK]).endswith(
        f"<assistant>So.<user>{ASK.text}"
    )


def test_images_of_a_template_without_images_leave_thinking_in_the_content() -> None:
    template = ChatTemplate(PARTS)
    tokenizer = load_tokenizer(byte_level_metadata({}), architecture="qwen2")
    talk = [
        Message("user", (ImagePart(), "What?")),
        Message("assistant", "A cat.", thinking="Hm."),
        Message("user", (ImagePart(), "And this?")),
    ]
    images = ImageTexts("(image)", "(image)", ())
    rendered = render_unforged(template, tokenizer, talk, {}, images=images)
    assert rendered.plain.endswith(
        "<user>(image)What?<assistant>[THINK]Hm.[/THINK]A cat.<user>(image)And this?"
    )


def test_a_conversation_in_which_tools_or_results_do_not_show_is_refused() -> None:
    with pytest.raises(RequestError, match="does not show the tool 'get_weather'"):
        refuse_unshown("How is it?", [ASK], [TOOL])
    refuse_unshown(json.dumps([TOOL]), [ASK], [TOOL])
    with pytest.raises(RequestError, match="shows 1 of the conversation's 2 results"):
        refuse_unshown("SUNNY", [RESULT, Message("tool", "rainy")], [])
    refuse_unshown("rainy SUNNY", [RESULT, Message("tool", "rainy"), Message("tool", "")], [])
    # Shown in probes, but not in each conversation.
    late = PARTS.replace("{{ tools", "{{ '' if messages | length > 6 else tools")
    with pytest.raises(RequestError, match="end it with a message of the user"):
        prompt_of(late, [ASK, Message("assistant", "So.")] * 3 + [ASK])

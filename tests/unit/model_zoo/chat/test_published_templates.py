"""The calls that published templates render are parsed as the same calls."""

import itertools
from typing import Any

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.reply_format import ReplyFormat, format_of
from model_zoo.chat.messages import Message, ToolCall
from runtime.errors import RequestError
from tests.chat_templates import all_templates, template_source
from tests.reply_parsing import parsed, replied

CITY = 'Paris "{}" <é>'
# Why a published template renders no calls, or not those that it is given.
WITHOUT_CALLS = {
    "HuggingFaceTB-SmolLM3-3B": "renders no calls",
    "LFM2-8B-A1B": "renders no calls",
    "LFM2.5-Instruct": "renders no calls",
    "ibm-granite-granite-3.3-2B-Instruct": "renders no calls",
    "google-gemma-2-2b-it": "renders no calls",
    "llama-cpp-rwkv-world": "renders no calls",
    "microsoft-Phi-3.5-mini-instruct": "renders no calls",
    "MiniMax-M3": "has a format of a family that is not served",
    "CohereForAI-c4ai-command-r-plus-tool_use": "renders instructions after the last turn",
    **dict.fromkeys(
        (
            "Kimi-K3",
            "MiniMax-M3",
            "deepseek-ai-DeepSeek-V4",
            "deepseek-ai-DeepSeek-V4-Flash-0731",
            "muse-glimmer",
            "tencent-Hy3",
        ),
        "of an architecture that no family runs",
    ),
    # They render calls but no tools: the model gets the generic form.
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "renders no tools",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "renders no tools",
    "deepseek-ai-DeepSeek-V3.1": "renders no tools",
}
ARGUMENTS = {"city": f"{CITY}\nnew", "days": 3, "deep": {"a": ["b"]}, "yes": True, "list": ["z z"]}
TEXTS = {"type": "array", "items": {"type": "string"}, "description": "Texts."}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "description": "Days."},
        "deep": {"type": "object", "description": "Deep.", "additionalProperties": TEXTS},
        "yes": {"type": "boolean", "description": "Yes."},
        "list": TEXTS,
    },
    "required": ["city"],
    "additionalProperties": False,
}
DECLARED = {"get_weather": PARAMETERS, "get_time": PARAMETERS}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "description": "It is.", "parameters": schema}}
    for name, schema in DECLARED.items()
]
CALLS = (
    ToolCall("get_weather", ARGUMENTS, "abcdef123"),
    ToolCall("get_time", {"city": "x"}, "abcdef124"),
)


def rendered_replies(template: ChatTemplate, form: ReplyFormat):
    """What the template renders of one and two calls, and whether it begins within thinking."""
    question = Message("user", "How is it?")
    choices: list[dict[str, Any]] = [{}, {"enable_thinking": True, "thinking": True}]
    for calls, variables, thinking in itertools.product((CALLS, CALLS[:1]), choices, (None, "RR")):
        reply = Message("assistant", "", tool_calls=calls, thinking=thinking)
        results = [Message("tool", "Fine.", tool_name=c.name, tool_call_id=c.id) for c in calls]
        try:
            prompt = template.render([question], tools=FUNCTIONS, **variables)
            whole = template.render(
                [question, reply, *results],
                tools=FUNCTIONS,
                add_generation_prompt=False,
                **variables,
            )
        except RequestError:
            continue
        thinks = form.opens_thinking(prompt)
        if thinks and not whole.startswith(prompt):  # thinking is left out of earlier turns
            prompt, thinks = prompt.rstrip().removesuffix(form.thinking.open).rstrip(), False
        if whole.startswith(prompt):
            yield calls, whole.removeprefix(prompt).partition("Fine.")[0], thinks


@pytest.mark.parametrize("name", all_templates())
def test_what_a_published_template_renders_of_a_call_is_parsed_as_that_call(name):
    if name in WITHOUT_CALLS:
        pytest.skip(WITHOUT_CALLS[name])
    source = template_source(name)
    form = format_of(source)
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    found = list(rendered_replies(template, form))
    assert found and form.tools
    for calls, text, thinks in found:
        expected = [(call.name, dict(call.arguments)) for call in calls if call.name in text]
        reply = parsed(replied(form, list(text), tools=DECLARED, thinks=thinks))
        assert expected and [call[:2] for call in reply.calls] == expected
        assert reply.thinking in ("", "RR") and "RR" not in reply.text

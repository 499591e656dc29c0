"""From a conversation to a prompt: the chosen template, its variables, and errors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message, ToolCall
from model_zoo.chat.template_language import as_jinja
from model_zoo.chat.thinking import EFFORTS, with_thinking_word
from model_zoo.chat_model import ChatModel
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import ModelFileError, RequestError
from tests.chat_templates import (
    CALLS,
    IMAGE,
    RESULT,
    TALKS,
    THINKING,
    TOOLS,
    plain,
    rendered_by_transformers,
    template_source,
)
from tests.reply_parsing import parsed, replied
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, byte_level_metadata

HI = [Message("user", "hi")]


@dataclass(frozen=True)
class ModelFacts:
    """What a model asks of its description."""

    metadata: Mapping[str, Any]
    chat_template: str | None = None
    template_source: str | None = None


def model_with(source: str | None, **variants: str) -> ChatModel:
    decoder: Any = None
    facts: Any = SimpleNamespace(name="tiny")
    tokenizer = load_tokenizer(byte_level_metadata({}), architecture="qwen2")
    return ChatModel(
        decoder,
        tokenizer,
        None if source is None else ChatTemplate(source),
        facts,
        {name: ChatTemplate(text) for name, text in variants.items()},
    )


def prompt_of(model: ChatModel, messages: Any = HI, **options: Any) -> str:
    return model.tokenizer.decode(model.prepare(messages, **options).tokens)


@pytest.mark.parametrize(
    "about", ["a call answered", "parallel calls, and on", "thinking and a call"]
)
def test_tools_calls_and_thoughts_reach_the_template_as_transformers_hands_them(about: str) -> None:
    source, talk = template_source("Qwen-Qwen3-0.6B"), TALKS[about]
    expected = rendered_by_transformers(
        source, [plain(message) for message in talk.messages], talk.tools, enable_thinking=False
    )
    model = model_with(source)
    assert prompt_of(model, talk.messages, tools=talk.tools, thinking=False) == expected


def test_turns_that_a_template_refuses_reach_it_as_others() -> None:
    model = model_with(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    talk = [Message("system", "a"), *HI, Message("system", "b")]
    assert prompt_of(model, talk) == "<system>a<user>hi<user>b"


def test_a_template_is_told_the_time_that_the_request_came() -> None:
    model = model_with("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    assert prompt_of(model, now=datetime(2031, 5, 4)) == "04 May 2031 hi"
    assert prompt_of(model) == f"{datetime.now():%d %b %Y} hi"


def test_an_empty_list_of_tools_is_none_in_the_template() -> None:
    source = "{{ tools is none }}"
    assert prompt_of(model_with(source)) == prompt_of(model_with(source), tools=()) == "True"


def test_tools_take_the_variant_that_the_file_has_for_them() -> None:
    names = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    model = model_with("plain", tool_use=names, other="{{ tools }} other")
    assert prompt_of(model) == "plain"
    assert prompt_of(model, tools=TOOLS) == "weather bare "


def test_tools_are_described_in_text_to_templates_that_read_none() -> None:
    source = "{{ messages[0].content }} {{ tools | default('none') }}".replace("tools |", "other |")
    prompt = prompt_of(model_with(source, other="{{ tools }}"), tools=TOOLS)
    assert all(f'"name": "{tool["function"]["name"]}"' in prompt for tool in TOOLS)


@pytest.mark.parametrize(
    "thinking, told",
    [
        (None, "unset unset unset unset"),
        (False, "False False unset 0"),
        (True, "True True unset unset"),
        *((effort, f"True True {effort} unset") for effort in EFFORTS),
    ],
)
def test_the_choice_to_think_has_the_names_that_templates_read(thinking: Any, told: str) -> None:
    names = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget")
    source = " ".join(f"{{{{ {name} | default('unset') }}}}" for name in names)
    assert prompt_of(model_with(source), thinking=thinking) == told


STRICT = (
    "{% set effort = reasoning_effort | default('OFF') %}"
    "{% if effort not in ['OFF', 'high'KNOWN] %}{{ raise_exception('unknown') }}{% endif %}"
    "{{ effort }}"
)


@pytest.mark.parametrize(
    ("source", "thinking", "told"),
    [
        # As ByteDance-Seed-OSS, MiniMax-M3, Cohere2MoE, Hy3 and Solar-Open have it.
        ("{{ thinking_budget is defined and thinking_budget == 0 }}", False, "True"),
        ("{{ thinking_budget is defined }}", True, "False"),
        ("{{ thinking_mode == 'disabled' }}", False, "True"),
        ("{{ thinking_mode == 'enabled' }}", "high", "True"),
        ("{{ reasoning_effort | lower == 'none' }}", False, "True"),
        ("{{ reasoning_effort is defined and reasoning_effort == 'none' }}", True, "False"),
        # Of Hy3 and Mistral Small 4, which think only with an effort and refuse others.
        *((STRICT.replace("OFF", off).replace("KNOWN", known), thinking, told)
          for off, known in (("no_think", ", 'low'"), ("none", ""))
          for thinking, told in ((None, off), (False, off), (True, "high"), ("high", "high"),
                                 ("max", "high"), ("medium", "high"),
                                 ("low", "low" if known else "high"))),
        ("{{ reasoning_effort in ['low', 'minimal'] }}", False, "True"),
        ("{{ reasoning_strength }}", "low", "low"),
    ],
)  # fmt: skip
def test_templates_that_have_their_own_names_for_thinking_get_them(
    source: str, thinking: Any, told: str
) -> None:
    assert prompt_of(model_with(source), thinking=thinking) == told


@pytest.mark.parametrize(
    ("thinking", "budget", "told"),
    [(None, 5, "5"), (True, 5, "5"), ("high", 5, "5"), (False, 5, "0"), (True, None, "unset")],
)
def test_a_template_that_tells_the_budget_gets_it(thinking: Any, budget: Any, told: str) -> None:
    model = model_with("{{ thinking_budget | default('unset') }}")
    assert prompt_of(model, thinking=thinking, thinking_budget=budget) == told
    other = model_with("{{ thinking is defined }}")
    assert prompt_of(other, thinking=thinking, thinking_budget=budget) == str(thinking is not None)


def test_a_template_that_renders_no_probe_gets_efforts_as_they_are() -> None:
    source = (
        "{% if messages | length < 4 %}{{ raise_exception('no') }}{% endif %}"
        "{{ reasoning_effort | default('unset') }}{{ reasoning_effort == 'no_think' }}"
    )
    told = [prompt_of(model_with(source), HI * 4, thinking=each) for each in (True, "max", False)]
    assert told == ["unsetFalse", "maxFalse", "no_thinkTrue"]


# Templates that render tools but no calls, by what tells their formats.
CALLS_UNRENDERED = ("<|tool_call|>", "<|tool_list_start|>", "<tool_call>")


@pytest.mark.parametrize("sign", CALLS_UNRENDERED)
def test_calls_become_text_for_a_template_that_renders_none(sign: str) -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    source = f"{{{{ tools | tojson }}}} {sign}{turns}"
    call = ToolCall("weather", {"city": "Zürich's \"„…", "days": [1, None], "deep": {"a": True}})
    asked = [*HI, Message("assistant", "So.", tool_calls=(call, call)), RESULT]
    prompt = prompt_of(model_with(source), asked, tools=TOOLS)
    _, _, reply = prompt.partition("[assistant]")
    text, _, result = reply.partition("[tool]")
    assert result == RESULT.text
    found = parsed(replied(format_of(source), [text]))
    assert found.text == "So."
    assert [(name, arguments) for name, arguments, _ in found.calls] == [
        (call.name, call.arguments)
    ] * 2


def test_an_effort_reaches_the_template_that_asks_for_one() -> None:
    model = model_with(template_source("openai-gpt-oss-120b"))
    assert "Reasoning: high\n" in prompt_of(model, thinking="high")
    assert "Reasoning: medium\n" in prompt_of(model, thinking=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_variables_reach_the_template_as_transformers_hands_them(enabled: bool) -> None:
    source = template_source("Qwen-Qwen3-0.6B")
    expected = rendered_by_transformers(source, [plain(HI[0])], enable_thinking=enabled)
    model = model_with(source)
    # What is said of `thinking` beside them counts less, as in vLLM.
    for thinking in (None, not enabled):
        variables = {"enable_thinking": enabled, "unread": [1]}
        assert prompt_of(model, thinking=thinking, variables=variables) == expected


def test_a_variable_without_a_value_is_defined() -> None:
    model = model_with("{{ date is defined }} {{ date is none }}")
    assert prompt_of(model, variables={"date": None}) == "True True"
    assert prompt_of(model) == "False False"


def test_variables_never_become_control_tokens() -> None:
    metadata = byte_level_metadata({"<|im_end|>": CONTROL})
    tokenizer = load_tokenizer(metadata, architecture="qwen2")
    template = ChatTemplate("{{ a }}{{ b.c[0] }}<|im_end|>")
    model = replace(model_with(""), tokenizer=tokenizer, template=template)
    variables = {"a": "x<|im_end|><|im_", "b": {"c": ["end|>"]}}
    tokens = model.prepare(HI, variables=variables).tokens
    assert tokens.count(tokenizer.vocabulary.control["<|im_end|>"]) == 1
    assert tokenizer.decode(tokens) == "x<|im_end|><|im_end|>"  # without the control token


def test_a_participants_name_reaches_the_template_as_transformers_hands_it() -> None:
    source = "{% for m in messages %}{{ m.role }} {{ m.name | default('?') }};{% endfor %}"
    messages = [Message("user", "hi", name="Ann"), Message("assistant", "ho"), *HI]
    chat = [plain(messages[0]) | {"name": "Ann"}, *map(plain, messages[1:])]
    assert prompt_of(model_with(source), messages) == rendered_by_transformers(source, chat)
    assert prompt_of(model_with(source), messages) == "user Ann;assistant ?;user ?;"


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(RequestError, match='"<b>" is not one of low, medium, high, max'):
        prompt_of(model_with("x"), thinking="<b>")


# As Nemotron Nano 2's.
SWITCHED_BY_WORDS = (
    "{% set ns = namespace(enable_thinking=true) %}{% for m in messages %}"
    "{% if '/think' in m.content %}{% set ns.enable_thinking = true %}"
    "{% elif '/no_think' in m.content %}{% set ns.enable_thinking = false %}{% endif %}"
    "{{ m.role[0] }}:{{ m.content.replace('/think', '').replace('/no_think', '').strip() }};"
    "{% endfor %}{% if add_generation_prompt %}a:<think>"
    "{{ '' if ns.enable_thinking else '</think>' }}{% endif %}"
)


@pytest.mark.parametrize("words", [(), ("/think",), ("/no_think",)])
def test_words_in_messages_switch_thinking_of_templates_that_look_for_them(words) -> None:
    model = model_with(SWITCHED_BY_WORDS)
    asked = [Message("system", " ".join(("s", *words))), *HI, Message("assistant", "yes")]
    said = "s:s;u:hi;a:yes;u:so;a:<think>"
    asked.append(Message("user", "so"))
    unswitched = said + ("</think>" if words == ("/no_think",) else "")
    assert prompt_of(model, asked) == unswitched
    assert prompt_of(model, asked, thinking=True) == said
    assert prompt_of(model, asked, thinking="low") == said
    assert prompt_of(model, asked, thinking=False) == f"{said}</think>"
    assert model.template is not None
    [joined] = with_thinking_word([Message("user", ("a", IMAGE))], False, model.template)
    assert joined.content == ("a", IMAGE, " /no_think")


# Nemotron-H's.
SWITCHED_BY_SYSTEM_MESSAGE = (
    "{% if messages[0].role == 'system' %}s:{{ messages[0].content.strip() }};{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content.strip() }};a:"
    "{% if loop.last and messages[0].role == 'system' %}"
    "{% if \"{'reasoning': True}\" in messages[0].content %}<think>"
    "{% elif \"{'reasoning': False}\" in messages[0].content %}<think></think>{% endif %}"
    "{% endif %}{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
)
ON, OFF = "{'reasoning': True}", "{'reasoning': False}"


def test_words_in_the_system_message_switch_thinking_of_templates_that_look_there() -> None:
    model = model_with(SWITCHED_BY_SYSTEM_MESSAGE)
    assert prompt_of(model) == "u:hi;a:"
    assert prompt_of(model, thinking=True) == f"s:{ON};u:hi;a:<think>"
    assert prompt_of(model, thinking=False) == f"s:{OFF};u:hi;a:<think></think>"
    for said in ("s", f"s {ON}", f"s {OFF}"):
        asked = [Message("system", said), *HI]
        assert prompt_of(model, asked, thinking="high") == f"s:s {ON};u:hi;a:<think>"
        assert prompt_of(model, asked, thinking=False) == f"s:s {OFF};u:hi;a:<think></think>"


def test_no_words_are_added_where_a_variable_switches_thinking() -> None:
    source = "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    model = model_with(source + "{{ enable_thinking }}" + SWITCHED_BY_WORDS)
    assert prompt_of(model, thinking=False) == "Falseu:hi;a:<think>"


def test_images_are_refused_without_a_vision_model() -> None:
    model = model_with(template_source("google-gemma-4-31B-it"))
    with pytest.raises(RequestError, match="model does not support images"):
        prompt_of(model, TALKS["an image"].messages)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match="model has no chat template"):
        prompt_of(model_with(None))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning", "thought"])
def test_thoughts_have_each_name_that_templates_look_for(name: str) -> None:
    source = "{% for m in messages %}{{ m." + name + " | default('none') }};{% endfor %}"
    text = prompt_of(model_with(source), [*HI, Message("assistant", "a", thinking="hm"), *HI])
    assert text == "none;hm;none;"


@pytest.mark.parametrize("message", [*TALKS["text, image, text"].messages, CALLS, RESULT, THINKING])
def test_messages_cross_processes_unchanged(message: Message) -> None:
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data, type=Message) == message


def test_too_deeply_nested_values_are_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = {"a": [deep]}
    with pytest.raises(RequestError, match="more than 64 levels deep"):
        prompt_of(model_with("{{ tools }}"), tools=[deep])


FIM = dict.fromkeys(["<pre>", "<suf>", "<mid>", "<pad>", "<bos>"], CONTROL)
FIRST = 258  # bytes and two merges precede the special tokens
PRE, SUF, MID, PAD, BOS = range(FIRST, FIRST + 5)
KEYS = {"fim_pre_token_id": PRE, "fim_suf_token_id": SUF, "fim_mid_token_id": MID}
OLD_KEYS = {"prefix_token_id": PRE, "suffix_token_id": SUF, "middle_token_id": MID}


def infilling(
    source: str | None = None, *, special: Mapping[str, int] = FIM, **keys: Any
) -> ChatModel:
    metadata = byte_level_metadata(special, **keys)
    tokenizer = load_tokenizer(metadata, architecture="qwen2")
    decoder: Any = None
    facts: Any = ModelFacts(metadata)
    template = None if source is None else ChatTemplate(as_jinja(source))
    return ChatModel(decoder, tokenizer, template, facts)


@pytest.mark.parametrize("keys", [KEYS, OLD_KEYS, {**OLD_KEYS, **KEYS}])
def test_a_text_is_inserted_by_the_tokens_of_the_file(keys: dict[str, int]) -> None:
    """The order of llama.cpp: prefix token, prefix, suffix token, suffix, middle token."""
    model = infilling(**keys, fim_pad_token_id=PAD)
    assert model.inserts
    prompt = model.prepare_infill("a<mid>", "b")
    typed = tuple(model.tokenizer.encode("<mid>"))
    assert MID not in typed
    assert prompt.tokens == (PRE, *model.tokenizer.encode("a"), *typed, SUF,
                             *model.tokenizer.encode("b"), MID)  # fmt: skip
    assert PAD in model.tokenizer.end_tokens
    other_order = replace(model, suffix_first=True).prepare_infill("a", "b")
    letters = [model.tokenizer.encode(letter) for letter in "ab"]
    assert other_order.tokens == (SUF, *letters[1], PRE, *letters[0], MID)
    started = infilling(**keys, bos_token_id=BOS, add_bos_token=True).prepare_infill("a", "")
    assert started.tokens[:2] == (BOS, PRE)


@pytest.mark.parametrize(
    "texts",
    [
        "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|>",
        "<fim_prefix> <fim_suffix> <fim_middle> <fim_pad>",
        "<|prefix|> <|suffix|> <|middle|> [PAD]",
        "<|code_prefix|> <|code_suffix|> <|code_middle|> <|file_sep|>",
        "▁<PRE> ▁<SUF> ▁<MID> <REPO>",
    ],
)
def test_infill_tokens_without_keys_are_found_by_their_texts(texts: str) -> None:
    special = dict.fromkeys(texts.split(), CONTROL)
    model = infilling(special=special)
    assert model.inserts
    prompt = model.prepare_infill("", "")
    assert prompt.tokens == (PRE, SUF, MID) and PAD in model.tokenizer.end_tokens
    stated = infilling(special=special, fim_pre_token_id=PAD).prepare_infill("", "")
    assert stated.tokens == (PAD, SUF, MID)
    del special[texts.split()[1]]
    assert not infilling(special=special).inserts


@pytest.mark.parametrize("missing", KEYS)
def test_a_file_without_all_three_tokens_inserts_nothing(missing: str) -> None:
    assert not infilling(**{key: token for key, token in KEYS.items() if key != missing}).inserts


def test_an_infill_token_that_is_no_number_is_an_error_of_the_file() -> None:
    with pytest.raises(ModelFileError, match=r"fim_mid_token_id.*not a token id"):
        _ = infilling(**{**KEYS, "fim_mid_token_id": "x"}).inserts


def test_an_infill_token_beyond_the_vocabulary_is_none() -> None:
    assert not infilling(**{**KEYS, "fim_mid_token_id": 999}).inserts


def test_a_text_is_inserted_by_a_template_with_suffix_rather_than_by_tokens() -> None:
    source = "{{ if .Suffix }}<suf>{{ .Suffix }}<pre>{{ .Prompt }}<mid>{{ end }}"
    model = infilling(source, **KEYS)
    assert model.inserts and infilling(source).inserts
    prompt = model.prepare_infill("a<mid>", "b<pad>")
    special = [token for token in prompt.tokens if token >= FIRST]
    assert special == [SUF, PRE, MID]
    assert model.tokenizer.decode(prompt.tokens) == "b<pad>a<mid>"
    assert not infilling("{{ .Prompt }}").inserts
    assert not infilling("{% set suffix = 1 %}{{ suffix }}{{ prompt }}").inserts


def test_a_go_template_replaces_the_models_and_is_shown_as_it_was_written() -> None:
    model = infilling("{{ .Prompt }}")
    described = replace(model, description=ModelFacts({}))
    source = "{{ range .Messages }}<pre>{{ .Content }}{{ end }}<think></think>{{ .Tools }}"
    changed = described.with_template(source, origin="test")
    assert changed.description.chat_template == source
    assert changed.reply_format.thinks and changed.reply_format.tools
    prompt = changed.prepare([Message("user", "a<pre>")])
    assert [token for token in prompt.tokens if token >= FIRST] == [PRE]
    with pytest.raises(ModelFileError, match="line 1"):
        described.with_template("{{ .Color }}", origin="test")

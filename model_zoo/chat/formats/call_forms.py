"""How families write tool calls: the reverse of their parsers, for grammars of calls.

Sources: the families' published chat templates.
"""

from dataclasses import dataclass, replace
from typing import Any

from model_zoo.chat.formats import element_calls, family_calls, family_parameters
from model_zoo.chat.formats.arguments import Arguments, JsonArguments, ParameterArguments
from model_zoo.chat.formats.gemma import FUNCTION_GEMMA, GEMMA_4, GemmaCalls
from model_zoo.chat.formats.lark import LINE_END, Match, Maybe, Pieces
from model_zoo.chat.formats.literals import GemmaArguments, PythonArguments, PythonLiteral
from model_zoo.chat.formats.parameter_calls import Parameters

_ID, _DIGITS = "[a-zA-Z0-9]{9}", "[0-9]{1,3}"
_JSON = JsonArguments()


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A call as a JSON object; `name`, `arguments`: the names of these members; `first`: schemas of
    members before them; `last`: schemas of members that may follow."""

    name: str = "name"
    arguments: str = "arguments"
    first: tuple[tuple[str, dict[str, Any]], ...] = ()
    last: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call as the name followed by the arguments, with fixed texts around them."""

    before: Pieces = ()
    between: Pieces = ()
    after: Pieces = ()
    arguments: Arguments = _JSON


@dataclass(frozen=True, slots=True)
class CallForm:
    """`begin`, the calls with `separator` between them, and `end`.

    `separator` None: a reply has one call. `listed`: the calls are items of one JSON list. `begin`
    also distinguishes calls from text; without it, a reply is either text or calls, which `opener`
    precedes.
    """

    call: JsonCall | NamedCall
    begin: str = ""
    end: Pieces = ()
    separator: Pieces | None = None
    listed: bool = False
    opener: str = ""


def _of_type(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _invoked(
    parameters: Parameters, opener: str, text: str = "", other: str = "", key_gap: Pieces = ()
) -> CallForm:
    """Calls as elements, such as `<invoke>`. `text`, `other`: attributes after the name of an
    argument whose value is a text, or JSON. `key_gap`: texts after such a name."""
    types = ("string", "number", "boolean", "null", "array", "object")
    attributes = dict.fromkeys(types, other) | {"string": text} if text else {}
    arguments = ParameterArguments(parameters, key_gap, ("\n",), attributes)
    call = NamedCall(
        (parameters.begin,), (f"{parameters.name_end}\n",), (parameters.end,), arguments
    )
    return CallForm(call, f"{opener}\n", (f"\n{parameters.closer}",), ("\n",))


def _gemma(marks: GemmaCalls) -> CallForm:
    call = NamedCall(("call:",), (), (marks.close,), GemmaArguments(marks.quote))
    return CallForm(call, marks.open, (), (marks.open,))


_TAG = CallForm(
    JsonCall(), "<tool_call>\n", ("\n</tool_call>",), ("\n</tool_call>", LINE_END, "<tool_call>\n")
)
_PYTHON = NamedCall(between=("(",), after=(")",), arguments=PythonArguments())
_COMMA = (",", Maybe((" ",)))
_CONSTANTS = frozenset(("boolean", "null"))
_VALUES = _CONSTANTS | {"number", "array", "object"}
_QWEN = NamedCall(
    ("<function=",),
    (">\n",),
    ("</function>",),
    ParameterArguments(
        family_parameters.QWEN,
        value_gap=("\n",),
        literal=PythonLiteral(family_parameters.QWEN.value_end),
        literal_types=_CONSTANTS,
    ),
)
_SEED = replace(
    _QWEN,
    arguments=ParameterArguments(
        family_parameters.SEED,
        value_gap=("\n",),
        literal=PythonLiteral(family_parameters.SEED.value_end),
        literal_types=_VALUES,
    ),
)
_GLM = NamedCall(
    (),
    (LINE_END,),
    ("</tool_call>",),
    ParameterArguments(family_parameters.GLM, (LINE_END,), (LINE_END,)),
)
_MINICPM5 = NamedCall(
    (),
    ('">',),
    ("</function>",),
    ParameterArguments(
        family_parameters.MINICPM5,
        cdata=True,
        literal=PythonLiteral(family_parameters.MINICPM5.value_end),
        literal_types=_VALUES,
    ),
)
_HUNYUAN = NamedCall(
    (family_calls.HUNYUAN_CALL,), ("\n```json\n",), (f"\n```{family_calls.HUNYUAN_CALL_END}",)
)
_KIMI_K2 = NamedCall(
    (f"{family_calls.KIMI_CALL}functions.",),
    (":", Match(_DIGITS), family_calls.KIMI_ARGUMENTS),
    (family_calls.KIMI_CALL_END,),
)
_SOLAR = NamedCall(
    (family_calls.SOLAR_CALL, Match("[a-zA-Z0-9_-]{1,40}"), family_calls.SOLAR_NAME),
    (family_calls.SOLAR_ARGUMENTS,),
    (family_calls.SOLAR_CALL_END,),
)
_DEEPSEEK_END, _LISTED_ID = "<｜tool▁calls▁end｜>", (("id", {"type": "string", "maxLength": 40}),)
_FORMS = {
    "mistral": CallForm(JsonCall(last=(("id", _of_type(_ID)),)), "[TOOL_CALLS]", listed=True),
    "deepseek": CallForm(
        NamedCall(
            (family_calls.DEEPSEEK_CALL,),
            (family_calls.DEEPSEEK_SEPARATOR,),
            (family_calls.DEEPSEEK_CALL_END,),
        ),
        "<｜tool▁calls▁begin｜>",
        (_DEEPSEEK_END,),
        (),
    ),
    "deepseek-v3.2": _invoked(
        family_parameters.DEEPSEEK_V3_2,
        "<｜DSML｜function_calls>",
        '" string="true',
        '" string="false',
    ),
    "command-a": CallForm(
        JsonCall("tool_name", "parameters", (("tool_call_id", _of_type(_DIGITS)),)),
        "<|START_ACTION|>",
        ("<|END_ACTION|>",),
        listed=True,
    ),
    "nemotron": CallForm(JsonCall(), "<TOOLCALL>", ("</TOOLCALL>",), listed=True),
    "nemotron-4": CallForm(
        JsonCall(), "<toolcall> ", (" </toolcall>",), (" </toolcall> <toolcall> ",)
    ),
    "gigachat": CallForm(JsonCall(), "<|function_call|>"),
    "gigachat-3": CallForm(JsonCall(), "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    "list": CallForm(JsonCall(), "<|tool_call|>", (Maybe(("<|/tool_call|>",)),), listed=True),
    "phi-4-mini": CallForm(JsonCall(), "<|tool_call|>", ("<|/tool_call|>",), listed=True),
    "command-r": CallForm(
        JsonCall("tool_name", "parameters"), "Action: ```json\n", (LINE_END, "```"), listed=True
    ),
    "apertus": CallForm(
        NamedCall(('{"',), ('": ',), ("}",)), "<|tools_prefix|>[", ("]<|tools_suffix|>",), _COMMA
    ),
    "tool-calls": CallForm(JsonCall(), "<tool_calls>\n", ("\n</tool_calls>",), ("\n",)),
    "hunyuan": CallForm(_HUNYUAN, "<tool_calls>", ("</tool_calls>",), ("\n",)),
    "hunyuan-3": _invoked(
        family_parameters.HUNYUAN_3, "<tool_calls:opensource>", key_gap=("\n",)
    ),
    "hunyuan-3-preview": _invoked(
        family_parameters.HUNYUAN_3_PREVIEW, "<tool_calls>", key_gap=("\n",)
    ),
    "functionary-3.1": CallForm(
        NamedCall((), (">",), ("</function>",)), "<function=", (), ("<function=",)
    ),
    "functools": CallForm(JsonCall(), "functools", listed=True),
    "kimi-k2": CallForm(
        _KIMI_K2, "<|tool_calls_section_begin|>", (family_calls.KIMI_END,), ()
    ),
    "solar": CallForm(_SOLAR, "<|tool_calls|>", (), ()),
    "lfm2": CallForm(_PYTHON, "<|tool_call_start|>[", ("]<|tool_call_end|>",), _COMMA),
    "minicpm3": CallForm(
        _PYTHON, "<|tool_call_start|>\n```python\n", ("\n```\n<|tool_call_end|>",), ("\n",)
    ),
    "olmo-3": CallForm(_PYTHON, "<function_calls>", ("</function_calls>",), ("\n",)),
    "tool-code": CallForm(_PYTHON, "```tool_code\n", ("\n```",)),
    "pythonic": CallForm(_PYTHON, end=("]",), separator=_COMMA, opener="["),
    "minimax-m2": _invoked(family_parameters.MINIMAX_M2, "<minimax:tool_call>"),
    "minimax-m3": CallForm(
        NamedCall(
            (element_calls.BEGIN,),
            (element_calls.NAME_END,),
            (element_calls.END,),
            element_calls.ElementArguments(),
        ),
        f"{element_calls.OPEN}\n",
        (f"\n{element_calls.CLOSE}",),
        ("\n",),
    ),
    "seed": CallForm(
        _SEED,
        "<seed:tool_call>\n",
        ("\n</seed:tool_call>",),
        ("\n</seed:tool_call>\n<seed:tool_call>\n",),
    ),
    "minicpm5": CallForm(_MINICPM5, '<function name="', (), ('\n<function name="',)),
    "glm": CallForm(_GLM, "<tool_call>", (), (LINE_END, "<tool_call>")),
    "gemma4": _gemma(GEMMA_4),
    "functiongemma": _gemma(FUNCTION_GEMMA),
    "llama": CallForm(JsonCall(arguments="parameters")),
    "llama4": CallForm(JsonCall(arguments="parameters")),
    "glm4": CallForm(NamedCall(between=("\n",))),
    "tag": _TAG,
    "function-tag": replace(_TAG, call=_QWEN),
    "generic": _TAG,
}  # fmt: skip
# Variants of formats: a text that identifies templates with the variant, and its form.
_VARIANTS = {
    "mistral": (
        "[ARGS]",
        CallForm(
            NamedCall(between=(Maybe(("[CALL_ID]", Match(_ID))), "[ARGS]")),
            "[TOOL_CALLS]",
            (),
            ("[TOOL_CALLS]",),
        ),
    ),
    "deepseek": (
        "```json",
        CallForm(
            NamedCall(
                (f"{family_calls.DEEPSEEK_CALL}function{family_calls.DEEPSEEK_SEPARATOR}",),
                ("\n```json\n",),
                (f"\n```{family_calls.DEEPSEEK_CALL_END}",),
            ),
            "<｜tool▁calls▁begin｜>",
            (_DEEPSEEK_END,),
            ("\n",),
        ),
    ),
    "tool-calls": (
        "<tool_calls>[",
        CallForm(JsonCall(last=_LISTED_ID), "<tool_calls>", ("</tool_calls>",), listed=True),
    ),
    "pythonic": (
        "<|python_start|>",
        CallForm(_PYTHON, "<|python_start|>[", ("]<|python_end|>",), _COMMA),
    ),
}


def call_form(name: str, template: str) -> CallForm | None:
    """The form of calls in format `name`, in the variant of this template; None if replies consist
    of messages."""
    sign, variant = _VARIANTS.get(name, ("", None))
    return variant if variant is not None and sign in template else _FORMS.get(name)

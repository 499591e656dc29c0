"""The reply format of a model, chosen from the text of its chat template."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

from model_zoo.chat.formats import (
    element_calls,
    family_calls,
    family_parameters,
    functionary,
    harmony,
    muse,
    pythonic,
)
from model_zoo.chat.formats.calls import (
    Grammar,
    Tools,
    closed_by,
    json_by_name,
    json_calls,
    json_list,
    json_sequence,
)
from model_zoo.chat.formats.family_calls import tool_call_tag
from model_zoo.chat.formats.gemma import FUNCTION_GEMMA, GEMMA_4
from model_zoo.chat.formats.parameter_calls import Parameters
from model_zoo.chat.formats.reply_parser import ReplyParser
from model_zoo.chat.formats.scanner import Steps
from model_zoo.chat.formats.tagged import (
    BareCalls,
    BareJson,
    BareNames,
    BarePython,
    TaggedReply,
    ThinkingEnd,
    ThinkingTags,
)

_THINK, _THINK_END = "<think>", "</think>"
# Signs and tags; the first entry whose signs are all in the template applies. Templates that only
# remove thinking from earlier turns contain just the closing tag.
_THINKING = (
    (("[/THINK]",), ThinkingTags("[THINK]", "[/THINK]")),
    (("<|START_THINKING|>",), ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>")),
    (("<|channel>thought",), ThinkingTags("<|channel>thought", "<channel|>")),
    (("<seed:think>",), ThinkingTags("<seed:think>", "</seed:think>")),
    # Hunyuan 3's template adds the suffix of its marks when it is rendered.
    (("</think{}>", ":opensource"), ThinkingTags("<think:opensource>", "</think:opensource>")),
    (("</mm:think>",), ThinkingTags("<mm:think>", "</mm:think>")),
    (("<|inner_prefix|>",), ThinkingTags("<|inner_prefix|>", "<|inner_suffix|>")),
    (("<|thought_start|>",), ThinkingTags("<|thought_start|>", "<|thought_end|>")),
    (("<|think|>", "<|begin|>assistant"), ThinkingTags("<|think|>", "<|end|>")),
    (("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
     ThinkingTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]",
                  answer_close="[END FINAL RESPONSE]")),
    (("Here is my thought process:", "Here is my response:"),
     ThinkingTags("Here is my thought process:", "Here is my response:")),
    # Granite 3.3's instructions; MiniMax M2's template encloses results of tools in these tags.
    ((_THINK_END, "<response></response>"),
     ThinkingTags(_THINK, _THINK_END, "<response>", "</response>")),
    ((_THINK_END, "<answer>"), ThinkingTags(_THINK, _THINK_END, "<answer>", "</answer>")),
    ((_THINK_END,), ThinkingTags(_THINK, _THINK_END)),
    # Of templates that end the prompt with it and do not mention its end, as OLMo 3 Think's.
    ((_THINK,), ThinkingTags(_THINK, _THINK_END)),
    # Of GLM-4.1V Thinking and Kimi-VL Thinking, whose templates do not mention their tags.
    (("<|assistant|>{{ msg.metadata }}", "<|begin_of_image|>"),
     ThinkingTags(_THINK, _THINK_END, "<answer>", "</answer>")),
    (("<|media_pad|>", "{{'<|im_middle|>'}}"),
     ThinkingTags("◁think▷", "◁/think▷")),
    # Of openPangu, whose template does not mention its tags; its model card parses them.
    (("[unused9]助手", "[unused10]"), ThinkingTags("[unused16]", "[unused17]")),
    (("</thought>",), ThinkingTags("<thought>", "</thought>")),
    (("</thinking>",), ThinkingTags("<thinking>", "</thinking>")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls. A template that contains all of `signs` belongs to it.

    `markup`: texts of control tokens that the grammar needs to see. `unmarked`: openers of calls
    that lack their marker; they are calls unless a grammar holds the reply to its form.
    """

    name: str
    signs: tuple[str, ...]
    openers: Mapping[str, Grammar]
    bare: BareCalls | None = None
    markup: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    unmarked: Mapping[str, Grammar] = field(default_factory=dict)


def _written(name: str, signs: tuple[str, ...], opener: str, parameters: Parameters) -> CallSyntax:
    """Calls whose arguments are written one by one."""
    return CallSyntax(name, signs, {opener: parameters.read}, markup=parameters.markers)


_TAG, _LIST, _CODE = "<tool_call>", "<|tool_call|>", "```tool_code"
_FUNCTION = "<function="
_ACTION, _PREFIX = "<|START_ACTION|>", "<|tools_prefix|>"
_CALLS, _CALLS_END = "<function_calls>", "</function_calls>"
_TOOL_CALLS, _TOOL_CALLS_END = "<tool_calls>", "</tool_calls>"
_TOOLCALL, _TOOLCALL_END = "<toolcall>", "</toolcall>"
_KIMI, _SOLAR = "<|tool_calls_section_begin|>", "<|tool_calls|>"
_GIGACHAT, _MESSAGE_SEP = "<|function_call|>", "<|message_sep|>"
_PYTHON, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_START, _START_END = "<|tool_call_start|>", "<|tool_call_end|>"
_LFM2 = {_START: closed_by(_START_END, pythonic.call_list)}
_LLAMA4 = {_PYTHON: family_calls.llama4, _PYTHON_END: family_calls.llama4}
# The first row whose signs are all in the template applies, so general ones come last. Rows with
# the same name differ in their signs only.
_SYNTAXES = (
    CallSyntax("gemma4", (GEMMA_4.open,), {GEMMA_4.open: GEMMA_4.read}, markup=GEMMA_4.markers),
    CallSyntax("functiongemma", (FUNCTION_GEMMA.open,), {FUNCTION_GEMMA.open: FUNCTION_GEMMA.read},
               markup=FUNCTION_GEMMA.markers),
    CallSyntax("mistral", ("[TOOL_CALLS]",), {"[TOOL_CALLS]": family_calls.mistral},
               markup=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    CallSyntax("deepseek", ("<｜tool▁calls▁begin｜>",),
               {"<｜tool▁calls▁begin｜>": family_calls.deepseek},
               markup=family_calls.DEEPSEEK_MARKERS),
    _written("deepseek-v3.2", ("｜DSML｜", "function_calls"), "<｜DSML｜function_calls>",
             family_parameters.DEEPSEEK_V3_2),
    CallSyntax("kimi-k2", (_KIMI,), {_KIMI: family_calls.kimi}, markup=family_calls.KIMI_MARKERS),
    CallSyntax("solar", (_SOLAR, family_calls.SOLAR_CALL), {_SOLAR: family_calls.solar},
               markup=family_calls.SOLAR_MARKERS,
               dropped=("<|begin|>assistant", "<|content|>", "<|end|>", "<|calls|>")),
    CallSyntax("command-a", (_ACTION,), {_ACTION: closed_by("<|END_ACTION|>", json_calls)},
               dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>",
                        "<|END_TEXT|>")),
    CallSyntax("list", (_LIST,), {_LIST: closed_by("<|/tool_call|>", json_calls)}),
    CallSyntax("phi-4-mini", ("<|tool|>", "<|/tool|>"),
               {_LIST: closed_by("<|/tool_call|>", json_calls)},
               unmarked={"functools": json_list}),
    CallSyntax("minicpm3", (_START, "```python"),
               {_START: closed_by(_START_END, family_calls.python_block)}, markup=(_START_END,)),
    CallSyntax("lfm2", (_START,), _LFM2),
    CallSyntax("lfm2", ("<|tool_list_start|>",), _LFM2),
    CallSyntax("lfm2", ("List of tools: [", "keep_past_thinking"), _LFM2),
    CallSyntax("olmo-3", (_CALLS,),
               {_CALLS: closed_by(_CALLS_END, pythonic.call_lines)}, markup=(_CALLS_END,)),
    CallSyntax("apertus", (_PREFIX,), {_PREFIX: closed_by("<|tools_suffix|>", json_by_name)}),
    CallSyntax("gigachat", (_GIGACHAT,), {_GIGACHAT: json_calls}, dropped=(_MESSAGE_SEP,)),
    CallSyntax("gigachat-3", (_MESSAGE_SEP, "<|role_sep|>"),
               {"function call<|role_sep|>": json_calls},
               markup=("<|role_sep|>",), dropped=(_MESSAGE_SEP,)),
    _written("hunyuan-3", ("<tool_sep{}>", ":opensource"), "<tool_calls:opensource>",
             family_parameters.HUNYUAN_3),
    _written("hunyuan-3-preview", (_TOOL_CALLS, "<tool_sep>"), _TOOL_CALLS,
             family_parameters.HUNYUAN_3_PREVIEW),
    CallSyntax("hunyuan", (_TOOL_CALLS, _TAG, "```json"),
               {_TOOL_CALLS: closed_by(_TOOL_CALLS_END, family_calls.hunyuan)},
               markup=(family_calls.HUNYUAN_CALL, family_calls.HUNYUAN_CALL_END, _TOOL_CALLS_END)),
    CallSyntax("tool-calls", (_TOOL_CALLS,),
               {_TOOL_CALLS: closed_by(_TOOL_CALLS_END, json_sequence)}),
    CallSyntax("nemotron-4", ("<extra_id_1>", "<tool>"),
               {_TOOLCALL: closed_by(_TOOLCALL_END, json_sequence)}, markup=(_TOOLCALL_END,)),
    CallSyntax("nemotron", ("<TOOLCALL>",),
               {"<TOOLCALL>": closed_by("</TOOLCALL>", json_calls)}),
    CallSyntax("minimax-m3", (element_calls.MARK,), {element_calls.OPEN: element_calls.read},
               markup=(element_calls.MARK, *element_calls.MARKERS)),
    _written("minimax-m2", ("<minimax:tool_call>",), "<minimax:tool_call>",
             family_parameters.MINIMAX_M2),
    _written("seed", ("<seed:tool_call>",), "<seed:tool_call>",
             family_parameters.SEED),
    _written("minicpm5", ('<function name="', '<param name="'), '<function name="',
             family_parameters.MINICPM5),
    _written("glm", (_TAG, "<arg_key>"), _TAG, family_parameters.GLM),
    CallSyntax("function-tag", (_TAG, _FUNCTION), {_TAG: tool_call_tag},
               unmarked={_FUNCTION: family_calls.unmarked_function}),
    CallSyntax("tag", (_TAG,), {_TAG: tool_call_tag}),
    CallSyntax("functionary-3.1", (_FUNCTION,), {_FUNCTION: family_calls.function_tag}),
    CallSyntax("functools", (" functools[",), {"functools": json_list}),
    CallSyntax("command-r", ("Action:", "```json"), {"Action:": family_calls.command_r}),
    CallSyntax("tool-code", (_CODE,), {_CODE: family_calls.tool_code}),
    CallSyntax("pythonic", ("[func_name1(",), _LLAMA4, BarePython()),
    CallSyntax("llama4", (_PYTHON,), _LLAMA4, BareJson()),
    CallSyntax("llama", ("<|python_tag|>",), {"<|python_tag|>": json_calls}, BareJson()),
    CallSyntax("llama", ('{"name": function name, "parameters"',),
               {"<|python_tag|>": json_calls}, BareJson()),
    CallSyntax("glm4", ("[gMASK]", "<|observation|>"), {}, BareNames()),
    CallSyntax("glm4", ("[gMASK]", "metadata"), {}, BareNames()),
)  # fmt: skip
# For templates that render no tools: the form that the generic instructions request.
_GENERIC = CallSyntax("generic", (), {_TAG: tool_call_tag}, BareJson())
_BY_NAME = {syntax.name: syntax for syntax in (*_SYNTAXES, _GENERIC)}


@dataclass(frozen=True, slots=True)
class MessageSyntax:
    """How a family writes replies of several messages. A template that contains all of `signs`
    belongs to it. `thinking_end`: None if none of the messages is thinking. `markup`: texts of
    control tokens that `read` needs to see.
    """

    name: str
    signs: tuple[str, ...]
    read: Callable[..., Steps[None]]
    thinking_end: ThinkingEnd | None = None
    markup: tuple[str, ...] = ()


_MESSAGE_SYNTAXES = (
    MessageSyntax("harmony", (harmony.CHANNEL, harmony.MESSAGE), harmony.read_harmony,
                  ThinkingEnd(harmony.THINKING_END, harmony.THINKING), harmony.MARKERS),
    MessageSyntax("muse", (muse.CALLS, muse.NEXT), muse.read_muse,
                  ThinkingEnd(muse.NEXT_ONE, muse.TO_SELF), muse.MARKERS),
    MessageSyntax("functionary", (">>>all", ">>>${recipient}"), functionary.read_functionary),
)  # fmt: skip
_MESSAGES_BY_NAME = {syntax.name: syntax for syntax in _MESSAGE_SYNTAXES}


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model's replies are written. `name` identifies the syntax of its calls.

    `tools`: whether the template itself renders tools. `markup`: the texts of control tokens that
    are part of the text that parsers read.
    """

    name: str
    tools: bool
    thinking: ThinkingTags | None
    markup: frozenset[str]

    @property
    def thinks(self) -> bool:
        return self.thinking_end is not None

    @property
    def thinking_end(self) -> ThinkingEnd | None:
        """How thinking is ended; None if replies have no thinking."""
        messages = _MESSAGES_BY_NAME.get(self.name)
        if messages is not None:
            return messages.thinking_end
        return None if self.thinking is None else ThinkingEnd(self.thinking.close)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Markers without meaning, which may occur around the text and the calls."""
        return () if self.of_messages else _BY_NAME[self.name].dropped

    @property
    def of_messages(self) -> bool:
        """Whether a reply consists of several messages."""
        return self.name in _MESSAGES_BY_NAME

    def opens_thinking(self, prompt: str) -> bool:
        """Whether the prompt ends with the tag that opens thinking."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.open)

    def begun_thinking(self, text: str) -> str | None:
        """The thinking with which a reply that begins with `text` continues; None if it does not
        continue with thinking."""
        tags = self.thinking
        if tags is None or text.rfind(tags.open) <= text.rfind(tags.close):
            return None
        return text.rpartition(tags.open)[2]

    def parser(
        self,
        tools: Tools,
        *,
        thinks: bool = False,
        continues: bool = False,
        formed: bool = False,
        guided: bool = False,
    ) -> ReplyParser:
        """A parser for one reply. `tools`: the JSON schemas of the declared tools' parameters by
        name; without tools, calls are text. `thinks`: the prompt ends within thinking; `continues`:
        within the text. `formed`: the text has a required form, so it contains no markup. `guided`:
        a grammar holds the reply to its form, so only calls at their place are calls."""
        if self.of_messages:
            read = _MESSAGES_BY_NAME[self.name].read
            return ReplyParser(partial(read, tools=tools, continues=continues))
        syntax, free = _BY_NAME[self.name], not (formed or guided)
        openers = {**syntax.openers, **syntax.unmarked} if free else syntax.openers
        tagged = TaggedReply(
            self.thinking, openers, syntax.bare, syntax.dropped, calls_end_thinking=free
        )
        read = partial(tagged.read, tools=tools, thinks=thinks, continues=continues, formed=formed)
        return ReplyParser(read, thinks=thinks)


@lru_cache(maxsize=64)
def format_of(template: str | None, tools: bool | None = None) -> ReplyFormat:
    """The format of a model with this chat template; the generic one without a template. `tools`:
    whether the template renders tools; None: as its text suggests."""
    source = template or ""
    messages = next((m for m in _MESSAGE_SYNTAXES if _has_all(source, m.signs)), None)
    if messages is not None:
        return ReplyFormat(messages.name, True, None, frozenset(messages.markup))
    thinking = next((tags for signs, tags in _THINKING if _has_all(source, signs)), None)
    tools = "tools" in source if tools is None else tools
    found = (each for each in _SYNTAXES if tools and _has_all(source, each.signs))
    syntax = next(found, _GENERIC)
    markup = {*syntax.openers, *syntax.markup, *syntax.dropped}
    if thinking is not None:
        markup |= thinking.texts
    return ReplyFormat(syntax.name, tools, thinking, frozenset(markup))


def has_answers(template: str) -> bool:
    """Whether the model answers in text with this template: with Command-R's for tools, it calls a
    tool that it makes up instead, also after the results of others."""
    return not any(name in template for name in family_calls.DIRECT_ANSWERS)


def _has_all(source: str, signs: tuple[str, ...]) -> bool:
    return all(sign in source for sign in signs)

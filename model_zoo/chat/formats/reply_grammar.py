"""Grammars of whole replies: thinking, then text of a required form, or tool calls.

They are lists of llguidance grammars: the first one, in Lark, refers to the others by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from model_zoo.chat.formats.allowed_calls import AllowedCalls, argument_rules
from model_zoo.chat.formats.call_forms import CallForm, JsonCall, NamedCall
from model_zoo.chat.formats.lark import LarkGrammar
from model_zoo.chat.formats.message_grammars import MESSAGE_GRAMMARS
from model_zoo.chat.formats.reply_format import ReplyFormat
from model_zoo.chat.formats.schema_place import Place
from model_zoo.grammars.json_schema import rebased

ANSWER = "answer"


def reply_grammar(
    control: Mapping[str, int],
    reply_format: ReplyFormat,
    *,
    may_think: bool,
    thinks: bool,
    continues: bool = False,
    answer: Mapping[str, Any] | None,
    calls: AllowedCalls | None,
    form: CallForm | None,
) -> str:
    """The grammar of replies in a format, over a vocabulary with the control tokens `control`.

    `may_think`: the reply may have thinking; `thinks`: it begins within thinking; `continues`:
    within the text, which no calls then follow. `answer`: the grammar of the text; None if it is
    free. `form`: the form of the calls; None if the reply consists of messages. Raises Unwritable
    for schemas that the format cannot express.
    """
    lark = LarkGrammar(control)
    text = "TEXT" if answer is None else f"@{ANSWER}"
    if continues and form is None:
        return lark.listed(text, answer, name=ANSWER)
    if form is None:
        start = MESSAGE_GRAMMARS[reply_format.name](lark, text, calls, may_think)
        return lark.listed(start, answer, name=ANSWER)
    body = _Body(lark, form, reply_format.dropped)
    start = body.of(text, None if continues else calls)
    thinking = reply_format.thinking
    if thinking is not None and thinking.answer_open and not continues:
        start = f"({lark.spelled(thinking.answer_open)} BLANK?)? ({start})"
    if thinking is not None and thinking.answer_close:
        start = f"({start}) (BLANK? {lark.spelled(thinking.answer_close)})?"
    if thinking is not None and (may_think or thinks) and not continues:
        close = lark.spelled(thinking.close)
        thought = lark.first("thought", f"TEXT? {close}")
        if thinks:
            start = f"{thought} BLANK? ({start})"
        else:  # a closing tag without an opening one means that there is no thinking
            opening = lark.first("opening", f"/[ \\n]{{0,4}}/ {lark.spelled(thinking.open)}")
            start = f"(({opening} {thought} | {close}) BLANK?)? ({start})"
    return lark.listed(start, answer, name=ANSWER)


class _Body:
    """The text and the calls of a reply after its thinking. `dropped`: meaningless markers that may
    occur around them."""

    def __init__(self, lark: LarkGrammar, form: CallForm, dropped: Sequence[str]) -> None:
        self._lark = lark
        self._form = form
        marks = [lark.spelled(each) for each in dropped]
        self._marks = f"{lark.rule(' | '.join(marks))}{{0,2}}" if marks else ""
        # Only markers that are control tokens; free text includes the others.
        tokens = [each for each in marks if "<[" in each]
        self._token = lark.rule(" | ".join(tokens)) if tokens else ""

    def of(self, text: str, calls: AllowedCalls | None) -> str:
        """Lark for text and calls. `text`: Lark for the text."""
        free = text == "TEXT"
        if not free:
            text = f"{self._marks} {text} {self._marks}"
        elif self._token:
            text = f"TEXT? ({self._token} TEXT?)*"
        if calls is None:
            return text
        form = self._form
        begin, rest = self._lark.spelled(form.begin), f"{self._calls(calls)} {self._marks}"
        if calls.required:
            return f"{self._marks} {begin} {rest}"
        if not free:
            return f"{text} | {self._marks} {begin} {rest}"
        if not form.begin:
            return f"{'PLAIN' if isinstance(form.call, JsonCall) else 'TEXT'} | {rest}"
        if "<[" in begin:
            return f"({text})? ({begin} {rest})?"
        marker = form.begin.strip()
        found = self._lark.first("marker", f"TEXT {self._lark.spelled(marker)}")
        following = self._lark.spelled(form.begin[len(marker) :])
        return f"{text} | {self._marks} {found} {following} {rest}"

    def _calls(self, calls: AllowedCalls) -> str:
        """Lark for the calls after `begin`."""
        form = self._form
        if isinstance(form.call, JsonCall):
            schema = _call_schema(calls, form.call, listed=form.listed)
            first = self._lark.schema(Place.whole(schema))
            further = f"{self._lark.spelled(*form.separator or ())} {first}"
        else:
            first, further = self._named(form.call, calls)
        more = f"({further})*" if calls.parallel and form.separator is not None else ""
        return f"{first} {more} {self._lark.spelled(*form.end)}"

    def _named(self, call: NamedCall, calls: AllowedCalls) -> tuple[str, str]:
        """Lark for the first call, and for a further one with its separator. Without `begin`, the
        complete name distinguishes the first call from text."""
        lark, form = self._lark, self._form
        first: list[str] = []
        further: list[str] = []
        after = lark.spelled(*call.after)
        for name, arguments in argument_rules(lark, call.arguments, calls).items():
            opening = (*call.before, name, *call.between)
            begun = lark.spelled(*opening)
            if not form.begin:
                begun = lark.first(f"name_{len(first)}", lark.spelled(form.opener, *opening))
            first.append(f"{begun} {arguments} {after}")
            # As one text, because none of several alternative texts may be the beginning of
            # another.
            again = lark.spelled(*form.separator or (), *opening)
            further.append(f"{again} {arguments} {after}")
        return lark.rule(" | ".join(first)), lark.rule(" | ".join(further))


def _call_schema(calls: AllowedCalls, form: JsonCall, *, listed: bool) -> dict[str, Any]:
    """The schema of one call, or of a list of them."""
    names: Sequence[str] = tuple(calls.arguments)
    objects = []
    for index, name in enumerate(names):
        place = f"/anyOf/{index}/properties/{form.arguments}"
        arguments = rebased(calls.arguments[name], f"/items{place}" if listed else place)
        members = {**dict(form.first), form.name: {"const": name}, form.arguments: arguments}
        objects.append(
            {
                "type": "object",
                "properties": {**members, **dict(form.last)},
                "required": list(members),
                "additionalProperties": False,
            }
        )
    one = {"anyOf": objects}
    if not listed:
        return one
    most = {} if calls.parallel else {"maxItems": 1}
    return {"type": "array", "items": one, "minItems": 1, **most}

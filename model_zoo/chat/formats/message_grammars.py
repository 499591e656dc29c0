"""Grammars of replies that consist of several messages."""

from collections.abc import Callable, Mapping

from model_zoo.chat.formats import family_parameters, functionary, harmony, muse
from model_zoo.chat.formats.allowed_calls import AllowedCalls, argument_rules
from model_zoo.chat.formats.arguments import JsonArguments, ParameterArguments
from model_zoo.chat.formats.lark import LarkGrammar

# A function that returns Lark for a reply, given Lark for its text, the allowed calls, and whether
# thinking is allowed.
MessageGrammar = Callable[[LarkGrammar, str, AllowedCalls | None, bool], str]


def _harmony(lark: LarkGrammar, text: str, calls: AllowedCalls | None, may_think: bool) -> str:
    """After `<|start|>assistant`: messages in channels."""
    spelled = lark.spelled
    next_one = spelled(f"{harmony.ENDS[0]}{harmony.START}assistant")
    message = spelled(harmony.MESSAGE)
    json_content = f"({spelled(' <|constrain|>json')} | {spelled(' json')})?"
    commentary = spelled(f"{harmony.CHANNEL}commentary")
    first, options = [], []
    if may_think:
        opening = spelled(f"{harmony.CHANNEL}{harmony.THINKING}")
        first.append(lark.rule(f"{opening} {message} TEXT {next_one}"))
    if calls is not None:
        if not calls.required:
            first.append(lark.rule(f"{commentary} {message} TEXT {next_one}"))
        for name, arguments in argument_rules(lark, JsonArguments(), calls).items():
            recipient = spelled(f" to=functions.{name}")
            options.append(
                f"({commentary} {recipient} | {recipient} {commentary}) {json_content} "
                f"{message} {arguments}"
            )
    if calls is None or not calls.required:
        final = spelled(f"{harmony.CHANNEL}final")
        options.append(f"{final} {json_content} {message} {text}")
    before = f"({' | '.join(first)})*" if first else ""
    return f"{before} ({' | '.join(options)})"


def _muse(lark: LarkGrammar, text: str, calls: AllowedCalls | None, may_think: bool) -> str:
    """After `<|start|>assistant`: messages to recipients, those with calls last."""
    spelled, next_one = lark.spelled, lark.spelled(muse.NEXT_ONE)
    thought = f"{spelled(muse.TO_SELF + muse.MESSAGE)} TEXT {next_one}"
    before = f"({lark.rule(thought)})*" if may_think else ""
    said = f"({spelled(muse.TO_USER)})? {spelled(muse.MESSAGE)} {text}"
    if calls is None:
        return f"{before} {said}"
    form, options = ParameterArguments(family_parameters.MUSE), []
    for name, arguments in argument_rules(lark, form, calls).items():
        opening = spelled(f' to={name}{muse.MESSAGE}{muse.CALLS}\n<atem:invoke name="{name}">\n')
        closing = spelled(f"{form.parameters.end}\n{form.parameters.closer}")
        options.append(f"{opening} {arguments} {closing}")
    one = lark.rule(" | ".join(options))
    called = f"{one} ({next_one} {one})*" if calls.parallel else one
    if calls.required:
        return f"{before} {called}"
    more = f"({next_one} {called})?" if text == "TEXT" else ""
    return f"{before} ({said} {more} | {called})"


def _functionary(lark: LarkGrammar, text: str, calls: AllowedCalls | None, may_think: bool) -> str:
    """After `>>>`: a line with a recipient before each message."""
    said = f"{lark.spelled(functionary.EVERYONE)} {text}"
    if calls is None:
        return said
    first: list[str] = []
    further: list[str] = []
    for name, arguments in argument_rules(lark, JsonArguments(), calls).items():
        line = f"{name}\n"
        called = lark.spelled(functionary.NEXT + line)
        opening = lark.spelled(line)
        if text == "TEXT" and not calls.required:
            # After text, where it takes precedence over further text.
            heard = f"{lark.spelled(functionary.EVERYONE)} TEXT {called}"
            opening = f"({opening} | {lark.first(f'heard_{len(first)}', heard)})"
        first.append(f"{opening} {arguments}")
        further.append(f"{called} {arguments}")
    more = f"({' | '.join(further)})*" if calls.parallel else ""
    called = f"({' | '.join(first)}) {more}"
    return called if calls.required else f"{said} | {called}"


MESSAGE_GRAMMARS: Mapping[str, MessageGrammar] = {
    "harmony": _harmony,
    "functionary": _functionary,
    "muse": _muse,
}

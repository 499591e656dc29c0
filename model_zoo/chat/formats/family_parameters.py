"""Markers of families that write arguments one by one."""

from dataclasses import replace

from model_zoo.chat.formats.parameter_calls import Parameters


def _invocations(closer: str, prefix: str = "") -> Parameters:
    """`<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>`, with `prefix` before
    each tag's name."""
    begin, key = f'<{prefix}invoke name="', f'<{prefix}parameter name="'
    value_end, end = f"</{prefix}parameter>", f"</{prefix}invoke>"
    return Parameters('">', key, '">', value_end, end, begin, closer=closer)


def _pairs(suffix: str = "", name_end: str = "", begin: str = "", closer: str = "") -> Parameters:
    """`NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`, with `suffix` after
    each tag's name."""
    key, key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
    value, value_end = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
    end = f"</tool_call{suffix}>"
    return Parameters(name_end, key, key_end, value_end, end, begin, value, closer)


QWEN = Parameters(
    begin="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    end="</function>",
    closer="</tool_call>",
    padded=True,
)
SEED = replace(QWEN, closer="</seed:tool_call>", padded=False)
DEEPSEEK_V3_2 = _invocations("</｜DSML｜function_calls>", "｜DSML｜")
DEEPSEEK_V4 = _invocations("</｜DSML｜tool_calls>", "｜DSML｜")
MINIMAX_M2 = _invocations("</minimax:tool_call>")
MUSE = _invocations("</atem:function_calls>", "atem:")
GLM = _pairs()
HUNYUAN_3 = _pairs(
    ":opensource", "<tool_sep:opensource>", "<tool_call:opensource>", "</tool_calls:opensource>"
)
MINICPM5 = Parameters('">', '<param name="', '">', "</param>", "</function>")
KIMI_K3 = Parameters(
    begin='<|open|>call tool="',
    name_end="<|sep|>",
    key='<|open|>argument key="',
    key_end="<|sep|>",
    value_end="<|close|>argument<|sep|>",
    end="<|close|>call<|sep|>",
    closer="<|close|>tools<|sep|>",
)

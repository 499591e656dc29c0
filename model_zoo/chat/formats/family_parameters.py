"""Markers of families that write arguments one by one."""

from dataclasses import replace

from model_zoo.chat.formats.parameter_calls import Parameters


def _invocations(closer: str, prefix: str = "") -> Parameters:
    """`<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>`, with `prefix` before
    each tag's name."""
    begin, key = f'<{prefix}invoke name="', f'<{prefix}parameter name="'
    value_end, end = f"</{prefix}parameter>", f"</{prefix}invoke>"
    return Parameters('">', key, '">', value_end, end, begin, closer=closer)


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
MINIMAX_M2 = _invocations("</minimax:tool_call>")
MUSE = _invocations("</atem:function_calls>", "atem:")
GLM = Parameters(
    name_end="",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
)


def _hunyuan(suffix: str) -> Parameters:
    """Marks of Hunyuan 3, with the suffix that its vocabulary gives them."""
    return Parameters(
        begin=f"<tool_call{suffix}>",
        name_end=f"<tool_sep{suffix}>",
        key=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        end=f"</tool_call{suffix}>",
        closer=f"</tool_calls{suffix}>",
    )


HUNYUAN_3, HUNYUAN_3_PREVIEW = _hunyuan(":opensource"), _hunyuan("")
MINICPM5 = Parameters('">', '<param name="', '">', "</param>", "</function>")

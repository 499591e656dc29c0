"""Replies as published templates render them, from llama.cpp's models/templates and vLLM's
examples."""

import json

from tests.reply_parsing import PARIS, Parsed

JSON = json.dumps(PARIS, ensure_ascii=False)
CITY = PARIS["city"]
JSON_CITY = json.dumps(CITY)
TIME = ("get_time", {"city": "x"}, None)
BOTH = (("get_weather", PARIS, None), TIME)

# From the templates of Hunyuan 0.5B to 7B.
HUNYUAN = (
    "{%- for tool in tools %}{{- 'first print <tool_calls>' }}{{- '<tool_call>function_name\n"
    "```json\nfunction_arguments_in_json_format\n```</tool_call>' }}{%- endfor %}"
    "{%- if '<answer>' in content %}{{- '<think>\n\n</think>\n' }}{%- endif %}"
)
# From the template of Hunyuan 3, which gives all marks a suffix, and that of its preview.
HUNYUAN_3 = (
    "{%- set HYTK = ':opensource' %}{%- set think_end = '</think{}>'.format(HYTK) %}"
    "{%- for tool in tools %}{{- '<tool_calls{}>\n<tool_call{}>{}<tool_sep{}>' }}{%- endfor %}"
)
HUNYUAN_3_PREVIEW = "tools <think> </think> <tool_calls> <tool_call> <tool_sep> <arg_key>"
# From MiniCPM 3's template.
MINICPM3 = (
    "{%- if tools %}{{- '- You should answer in the following format:\n\n<|thought_start|>\n"
    "{explain why}\n<|thought_end|>\n<|tool_call_start|>\n```python\nfunc2(params)\n"
    "```\n<|tool_call_end|>' }}{%- endif %}{{- message.thought if message.thought }}"
)
# From Nemotron Mini's template, which does not mention how calls are written.
NEMOTRON_MINI = (
    "{{'<extra_id_0>System'}}{% for tool in tools %}{{ '\n<tool> ' + tool|tojson + ' </tool>' }}"
    "{% endfor %}{{ '<extra_id_1>User\n' }}"
)
# From FunctionGemma's template.
FUNCTION_GEMMA = (
    "{%- for tool in tools %}{{- '<start_function_declaration>' -}}{%- endfor %}"
    "{{- '<start_function_call>call:' + function['name'] + '{' -}}"
)
# From Command-R's template for tools.
COMMAND_R = (
    "{%- for tool in tools %}{{'\n\n```python\ndef ' + tool.name + '('}}{% endfor %}"
    "{{'Write \\'Action:\\' followed by a json-formatted list of actions. You should use the "
    "`directly-answer` tool if calling the other tools is unnecessary. For example:\n```json\n['}}"
)
# From the templates of GLM-4.1V Thinking and Kimi-VL, which do not mention thinking.
GLM_4_1V = (
    "[gMASK]<sop>\n{%- if item.type == 'image' %}\n<|begin_of_image|><|image|><|end_of_image|>\n"
    "{%- elif msg.metadata %}\n<|assistant|>{{ msg.metadata }}\n{{ msg.content }}\n{%- endif %}"
)
KIMI_VL = (
    "{{'<|im_user|>'}}{{- message['role'] -}}{{'<|im_middle|>'}}"
    "{{'<|media_start|>image<|media_content|><|media_pad|><|media_end|>'}}"
)
# From the template of openPangu-Embedded; the tags of thinking are in its model card only.
OPENPANGU = (
    "{% if message['role'] == 'assistant' %}{{'[unused9]助手：' + message['content'] }}"
    "{{ '[unused10]'}}{% endif %}{% if add_generation_prompt %}{{ '[unused9]助手：' }}{% endif %}"
)

# Texts by which a family's templates are known, a reply, and what it says.
REPLIES: dict[str, tuple[str, str, Parsed]] = {
    "glm-4.6": (
        "tools <tool_call> <arg_key> <think> </think>",
        "\n<think>RR</think>\nTT\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_val"
        f"ue>{CITY}"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>"
        "get_time\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        Parsed("TT", "RR", BOTH),
    ),
    "glm-4.7": (
        "tools <tool_call> <arg_key> <think> </think>",
        f"</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value>"
        "<arg_key>"
        "days</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_time</tool_call>",
        Parsed(calls=(BOTH[0], ("get_time", {}, None))),
    ),
    "kimi-k2": (
        "{{ tools | tojson }}<|im_end|><|im_user|>user<|im_middle|><|tool_calls_section_begin|>"
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        f"TT<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.ge"
        "t_time:1"
        '<|tool_call_argument_begin|>{"city": "x"}<|tool_call_end|><|tool_calls_section_end|>',
        Parsed(
            "TT",
            calls=(
                ("get_weather", PARIS, "functions.get_weather:0"),
                ("get_time", {"city": "x"}, "functions.get_time:1"),
            ),
        ),
    ),
    "lfm2": (
        "tools <|tool_list_start|>",
        '<|tool_call_start|>[get_weather(city=\'Paris "{}" <é>\', days=3), get_time(city="x")]'
        "<|tool_call_end|>",
        Parsed(calls=BOTH),
    ),
    "lfm2.5": (
        "tools <|tool_call_start|> </think>",
        "<think>RR</think>TT<|tool_call_start|>[get_time(a=-1.5, b=[True, None, ('x',)], "
        "c={'k': {\"l\": false}}, d='it\\'s\\n\\u00e9', e=())]<|tool_call_end|>",
        Parsed(
            "TT",
            "RR",
            (
                (
                    "get_time",
                    {
                        "a": -1.5,
                        "b": [True, None, ["x"]],
                        "c": {"k": {"l": False}},
                        "d": "it's\né",
                        "e": [],
                    },
                    None,
                ),
            ),
        ),
    ),
    "minicpm3": (
        MINICPM3,
        "<|thought_start|>\nRR\n<|thought_end|>\n<|tool_call_start|>\n```python\n"
        f'get_weather(city={JSON_CITY},days=3)\nget_time(city="x")\n```\n<|tool_call_end|>\n',
        Parsed("", "RR", BOTH),
    ),
    "minicpm3 with text": (
        MINICPM3,
        "<|tool_call_start|>\nget_time(city='x')\n<|tool_call_end|>\nTT",
        Parsed("TT", calls=(TIME,)),
    ),
    "olmo-3": (
        "tools <functions> <function_calls>",
        f"TT<function_calls>get_weather(city={JSON_CITY}, days=3)\n"
        'get_time(city="x")</function_calls>',
        Parsed("TT", calls=BOTH),
    ),
    "olmo-3 on lines of their own": (
        "tools <functions> <function_calls>",
        "<function_calls>\nget_time(a=null, b=[True, 1.5], c={'k': false})\n\nget_time()\n"
        "</function_calls>",
        Parsed(
            calls=(
                ("get_time", {"a": None, "b": [True, 1.5], "c": {"k": False}}, None),
                ("get_time", {}, None),
            )
        ),
    ),
    "olmo-3 think": (
        "<|im_start|>assistant\n<think>",
        "<think>RR</think>TT",
        Parsed("TT", "RR"),
    ),
    "llama3.2-pythonic": (
        "tools [func_name1(params_name1=params_value1)]",
        f'[get_weather(city={JSON_CITY}, days=3), get_time(city="x")]',
        Parsed(calls=BOTH),
    ),
    "llama4-pythonic": (
        "tools [func_name1(param1=value1)]",
        "<|python_start|>[get_time()]<|python_end|>",
        Parsed(calls=(("get_time", {}, None),)),
    ),
    "llama4": (
        "tools <|python_start|> <|python_end|>",
        f'<|python_start|>TT<|python_end|>{{"name": "get_weather", "parameters": {JSON}}}',
        Parsed("TT", calls=BOTH[:1]),
    ),
    "llama4-bare": (
        "tools <|python_start|> <|python_end|>",
        f'{{"name": "get_weather", "parameters": {JSON}}}',
        Parsed(calls=BOTH[:1]),
    ),
    "gemma3-pythonic": (
        "tools Example Format: [func_name1(params_name1=params_value1...), func_name2(params)]",
        f"[get_weather(city={json.dumps(CITY, ensure_ascii=False)}, days=3)]",
        Parsed(calls=BOTH[:1]),
    ),
    "functiongemma": (
        FUNCTION_GEMMA,
        f"<start_function_call>call:get_weather{{city:<escape>{CITY}<escape>,days:3}}"
        "<end_function_call><start_function_call>call:get_time{city:<escape>x<escape>}"
        "<end_function_call>",
        Parsed(calls=BOTH),
    ),
    "functiongemma with nested values": (
        FUNCTION_GEMMA,
        "<start_function_call>call:get_time{deep:{list:[1,<escape>a, b<escape>],no:null},"
        'yes:true,json:{"a": [1, "b"]}}<end_function_call>',
        Parsed(
            calls=(
                (
                    "get_time",
                    {
                        "deep": {"list": [1, "a, b"], "no": None},
                        "yes": True,
                        "json": {"a": [1, "b"]},
                    },
                    None,
                ),
            )
        ),
    ),
    "gemma3-tool-code": (
        "tools ```tool_code",
        "TT\n```tool_code\nget_time(city='x')\n```",
        Parsed("TT", calls=(TIME,)),
    ),
    "minimax-m1": (
        "tools <tool_calls>",
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {JSON}}}\n'
        '{"name": "get_time", "arguments": {"city": "x"}}\n</tool_calls>',
        Parsed(calls=BOTH),
    ),
    "minimax-m2": (
        "tools <minimax:tool_call> <think> </think>",
        '<think>\nRR\n</think>\n\nTT\n<minimax:tool_call>\n<invoke name="get_weather">\n<par'
        "ameter name"
        f'="city">{CITY}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invo'
        'ke name="get'
        '_time">\n<parameter name="city">x</parameter>\n</invoke>\n</minimax:tool_call>',
        Parsed("TT", "RR", BOTH),
    ),
    "minimax-m2-xml": (
        "tools <minimax:tool_call> <think> </think> <response>",
        "<think>RR</think>\n\n<response>TT</response>",
        Parsed("<response>TT</response>", "RR"),
    ),
    "seed": (
        "tools <seed:tool_call> <seed:think> </seed:think>",
        "<seed:think>RR</seed:think>\nTT\n\n<seed:tool_call>\n<function=get_weather>\n<param"
        "eter=city>"
        f"{CITY}</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=get_time>\n<parameter=city>x</parameter>\n</function>\n"
        "</seed:tool_call>",
        Parsed("TT", "RR", BOTH),
    ),
    "hunyuan-dense": (
        HUNYUAN,
        f"<think>\nRR\n</think>\nTT<tool_calls><tool_call>get_weather\n```json\n{JSON}\n```"
        '</tool_call>\n<tool_call>get_time\n```json\n{"city": "x"}\n```</tool_call></tool_calls>',
        Parsed("TT", "RR", BOTH),
    ),
    "hunyuan-dense on lines of their own": (
        HUNYUAN,
        "<answer>\n<tool_calls>\n<tool_call>get_weather\n```json\n"
        f"{JSON}\n```\n</tool_call>\n</tool_calls>\n</answer>",
        Parsed(calls=BOTH[:1]),
    ),
    "hunyuan-dense in A13B's notation": (
        HUNYUAN,
        f'<tool_calls>[{{"name": "get_weather", "arguments": {JSON}}}]</tool_calls>',
        Parsed(calls=BOTH[:1]),
    ),
    "hunyuan-3": (
        HUNYUAN_3,
        "<think:opensource>RR</think:opensource>TT<tool_calls:opensource>\n"
        "<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n"
        f"<arg_value:opensource>{CITY}</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
        "<tool_call:opensource>get_time<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n"
        "<arg_value:opensource>x</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
        Parsed("TT", "RR", BOTH),
    ),
    "hunyuan-3-preview": (
        HUNYUAN_3_PREVIEW,
        "<think></think>TT<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        f"<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n</tool_calls>",
        Parsed("TT", calls=BOTH[:1]),
    ),
    "deepseek-v3.2": (
        "tools ｜DSML｜ function_calls </think>",
        "</think>TT\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n'
        '<｜DSML｜parameter name="city" string="true">x</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        Parsed("TT", calls=BOTH),
    ),
    "nemotron-mini": (
        NEMOTRON_MINI,
        f'TT\n<toolcall> {{"name": "get_weather", "arguments": {JSON}}} </toolcall> '
        '<toolcall> {"name": "get_time", "arguments": {"city": "x"}} </toolcall> ',
        Parsed("TT", calls=BOTH),
    ),
    "nemotron-v2": (
        "tools <TOOLCALL> <think> </think>",
        f'TT\n<TOOLCALL>[{{"name": "get_weather", "arguments": {JSON}}}]</TOOLCALL>\n',
        Parsed("TT", calls=BOTH[:1]),
    ),
    "apriel": (
        "tools <tool_calls> Here are my reasoning steps: [BEGIN FINAL RESPONSE]",
        "Here are my reasoning steps:\nRR\n[BEGIN FINAL RESPONSE]\nTT\n[END FINAL RESPONSE]\n"
        f'<tool_calls>[{{"name": "get_weather", "arguments": {JSON}}}]</tool_calls>',
        Parsed("TT", "RR", BOTH[:1]),
    ),
    "apertus": (
        "tools <|tools_prefix|> <|inner_prefix|>",
        f'<|inner_prefix|>RR<|inner_suffix|>TT<|tools_prefix|>[{{"get_weather": {JSON}}}, '
        '{"get_time": {"city": "x"}}]<|tools_suffix|>',
        Parsed("TT", "RR", BOTH),
    ),
    "gigachat-3": (
        "tools <|message_sep|> <|role_sep|>",
        f'TT<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "argument'
        f's": {JSON}}}'
        "<|message_sep|>",
        Parsed("TT", calls=BOTH[:1]),
    ),
    "gigachat-3.1": (
        "tools <|message_sep|> <|role_sep|> <|function_call|>",
        f'TT<|function_call|>{{"name": "get_weather", "arguments": {JSON}}}<|message_sep|>',
        Parsed("TT", calls=BOTH[:1]),
    ),
    "granite-3.3": (
        "tools <|tool_call|> Write your thoughts between <think></think> and <response></response>",
        "<think>RR</think>\n\n<response>TT</response>",
        Parsed("TT", "RR"),
    ),
    "granite-3.2": (
        "tools <|tool_call|> 'Here is my thought process:' 'Here is my response:'",
        f"Here is my thought process:\nRR\nHere is my response:\nTT<|tool_call|>"
        f'[{{"name": "get_weather", "arguments": {JSON}}}]',
        Parsed("TT", "RR", BOTH[:1]),
    ),
    "granite-4": (
        "tools <tool_call>",
        f'TT\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
        Parsed("TT", calls=BOTH[:1]),
    ),
    "command-a-moe": (
        "tools <|START_ACTION|> <|START_TEXT|> <|START_THINKING|>",
        "<|START_THINKING|>RR<|END_THINKING|><|START_TEXT|>TT<|END_TEXT|>",
        Parsed("TT", "RR"),
    ),
    "command-r": (
        COMMAND_R,
        "Action: ```json\n[\n    {\n"
        f'        "tool_name": "get_weather",\n        "parameters": {JSON}\n    }}\n]```',
        Parsed(calls=BOTH[:1]),
    ),
    "command-r without a call": (
        COMMAND_R,
        'Action: ```json\n[\n    {\n        "tool_name": "directly_answer",\n'
        '        "parameters": {}\n    }\n]```',
        Parsed(),
    ),
    "command-r with a call, then none": (
        COMMAND_R,
        f'Action:```json\n[{{"tool_name": "get_weather", "parameters": {JSON}}},'
        '{"parameters": {}, "tool_name": "directly-answer"},'
        '{"tool_name": "get_time", "parameters": {"city": "x"}}]\n```',
        Parsed(calls=BOTH),
    ),
    "solar": (
        "tools <|tool_calls|> <|tool_call:begin|> <|begin|>assistant <|think|>",
        f"<|think|>RR<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>c1<|tool_call:name|>"
        f"get_weather<|tool_call:args|>{JSON}<|tool_call:end|><|tool_call:begin|>c2<|tool_ca"
        "ll:name|>"
        'get_time<|tool_call:args|>{"city": "x"}<|tool_call:end|><|calls|>',
        Parsed("", "RR", (("get_weather", PARIS, "c1"), ("get_time", {"city": "x"}, "c2"))),
    ),
    "solar-text": (
        "tools <|tool_calls|> <|tool_call:begin|> <|begin|>assistant <|think|>",
        "<|think|>RR<|end|><|begin|>assistant<|content|>TT<|end|>",
        Parsed("TT", "RR"),
    ),
    "minicpm5": (
        'tools <function name=" <param name=" <think> </think>',
        '<think>\nRR\n</think>\n\nTT\n<function name="get_weather"><param name="city"><![CD'
        f"ATA[{CITY}]]>"
        '</param><param name="days">3</param></function>\n<function name="get_time"><param n'
        'ame="city">'
        "x</param></function>",
        Parsed("TT", "RR", BOTH),
    ),
    "minimax-m3": (
        "tools ]<]minimax[>[ <tool_call> <mm:think> </mm:think>",
        '<mm:think>RR</mm:think>TT\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_'
        'weather">]<]minimax[>[<city>'
        f"{CITY}]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>"
        '\n]<]minimax[>[<invoke name="get_time">]<]minimax[>[<city>x]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        Parsed("TT", "RR", BOTH),
    ),
    "muse": (
        "tools <atem:function_calls> <|eom|>",
        " to=self<|message|>RR<|eom|><|start|>assistant to=user<|message|>TT<|eom|><|start|>assista"
        'nt to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        f'<atem:parameter name="city">{CITY}</atem:parameter>\n<atem:parameter name="days">3'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=get_"
        'time<|message|><atem:function_calls>\n<atem:invoke name="get_time">\n<atem:parameter name='
        '"city">x</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        Parsed("TT", "RR", BOTH),
    ),
    "functionary-3.1": (
        "tools <function= <|python_tag|>",
        f'TT<function=get_weather>{JSON}</function><function=get_time>{{"city": "x"}}</function>',
        Parsed("TT", calls=BOTH),
    ),
    "functionary-3.2": (
        ">>>all >>>${recipient}",
        f'all\nTT>>>get_weather\n{JSON}>>>get_time\n{{"city": "x"}}',
        Parsed("TT", calls=BOTH),
    ),
    "functionary-3.2-text": (
        ">>>all >>>${recipient}",
        "Write >>> print(1)",
        Parsed("Write >>> print(1)"),
    ),
    "firefunction": (
        "functions functools[ functools[",
        f'TT functools[{{"name": "get_weather", "arguments": {JSON}}}, '
        '{"name": "get_time", "arguments": {"city": "x"}}]',
        Parsed("TT", calls=BOTH),
    ),
    "qwen3-coder": (
        "tools <tool_call> <function= <parameter=",
        "TT\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n\nlines\n\n</parameter>\n"
        "<parameter=days>\nNone\n</parameter>\n</function>\n"
        "</tool_call>",
        Parsed(
            "TT",
            calls=(("get_weather", {"city": "\nlines\n", "days": None}, None),),
        ),
    ),
    "magistral": (
        "tools [TOOL_CALLS] [THINK] [/THINK]",
        f"[THINK]RR[/THINK]TT[TOOL_CALLS]get_weather[ARGS]{JSON}",
        Parsed("TT", "RR", BOTH[:1]),
    ),
    "glm-4.1v": (
        GLM_4_1V,
        "<think>RR</think><answer>TT</answer>",
        Parsed("TT", "RR"),
    ),
    "openpangu": (OPENPANGU, "[unused16]RR[unused17]TT", Parsed("TT", "RR")),
    "kimi-vl": (KIMI_VL, "◁think▷RR◁/think▷\n\nTT", Parsed("TT", "RR")),
    "hunyuan-a13b": (
        "</think> <answer>",
        "<think>\nRR\n</think>\n<answer>\nTT\n</answer>",
        Parsed("TT", "RR"),
    ),
    "exaone-deep": ("</thought>", "<thought>\nRR\n</thought>\n\nTT", Parsed("TT", "RR")),
}

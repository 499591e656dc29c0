"""Converts templates of Ollama's Modelfiles, in the language of Go, to Jinja.

The result uses the functions of `sandbox.go_functions`, which have Go's semantics, and reads
`messages`, `tools` and the other variables of chat templates; for infill it reads `prompt` and
`suffix`.
"""

from collections.abc import Iterator, Mapping

from model_zoo.chat.go_templates.syntax import (
    ActionNode,
    BranchNode,
    Dot,
    FieldAccess,
    FunctionName,
    GoTemplate,
    JumpNode,
    Literal,
    Node,
    Operand,
    Pipeline,
    TemplateNode,
    TextNode,
    Variable,
    refuse,
)
from model_zoo.chat.go_templates.template_parser import parse

# Fields of Ollama's top-level values, and their names here.
_ROOT_FIELDS: Mapping[str, str] = {
    **{
        name: name.lower()
        for name in ("System", "Prompt", "Response", "Suffix", "Messages", "Tools", "Think")
    },
    "ThinkLevel": "think_level",
    "IsThinkSet": "is_think_set",
    "First": "first",  # used by early templates; never set
}
# Fields of messages, calls and tools, with their names in JSON and the Jinja expression of their
# zero value.
_FIELDS: Mapping[str, tuple[str, str]] = {
    **{name: (name.lower(), "''") for name in ("Role", "Content", "Thinking", "Name", "Type")},
    "ToolCalls": ("tool_calls", "[]"),
    "ToolName": ("tool_name", "''"),
    "ToolCallID": ("tool_call_id", "''"),
    "ID": ("id", "''"),
    "Index": ("index", "0"),
    **{name: (name.lower(), "{}") for name in ("Function", "Arguments", "Parameters")},
    "Properties": ("properties", "{}"),
    "Description": ("description", "''"),
    "Required": ("required", "[]"),
    "Enum": ("enum", "[]"),
    "Items": ("items", "none"),
    "Defs": ("$defs", "none"),
    "AnyOf": ("anyOf", "[]"),
}
_FUNCTIONS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "len", "index", "slice", "json"}
    | {"print", "println", "printf", "toTypeScriptType"}
)
_TODAY = "strftime_now('%Y-%m-%d')"
# Expressions for arguments of `go_values`, by the fields that need them.
_THINKING = "enable_thinking if enable_thinking is defined else none"
_EFFORT = "reasoning_effort if reasoning_effort is defined else none"
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "Tools": ("tools=tools",),
    "Think": (f"think=({_THINKING})",),
    "IsThinkSet": (f"think=({_THINKING})",),
    "ThinkLevel": (f"think=({_THINKING})", f"level=({_EFFORT})"),
}


def jinja_source(source: str) -> str:
    """The template in Jinja; ModelFileError names the line and what is not supported.

    A template without `.Messages` is rendered once for each turn, the last one up to `.Response`,
    as in Ollama.
    """
    template = parse(source)
    fields = set(_fields(template))
    by_turns = "Messages" not in fields
    if by_turns and "Response" not in fields:
        response = ActionNode(Pipeline(((FieldAccess(Dot(), "Response"),),)))
        template = GoTemplate((*template.main, response), template.defined)
    writer = _Writer(template)
    writer.macro("main", template.main)
    for name, nodes in template.defined.items():
        writer.macro(writer.macro_names[name], nodes)
    given = dict.fromkeys(a for field in sorted(fields) for a in _ARGUMENTS.get(field, ()))
    values = f"go_values({', '.join(('messages', *given))})"
    if by_turns:
        writer.macro("last", _until_response(template.main)[0])
        writer.tag(f"set turns = go_turns({values})")
    if "Suffix" in fields:
        writer.tag("if suffix is defined")
        writer.print("main(go_infill(prompt, suffix))")
        writer.tag("else")
    if by_turns:
        writer.tag("for turn in turns[:-1]")
        writer.print("main(turn)")
        writer.tag("endfor")
        writer.print("last(turns[-1])")
    else:
        writer.print(f"main({values})")
    if "Suffix" in fields:
        writer.tag("endif")
    return "\n".join(writer.lines)


def _until_response(nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], bool]:
    """The nodes up to the first action with `.Response`, and whether there is one."""
    kept: list[Node] = []
    for node in nodes:
        found = False
        match node:
            case ActionNode(pipeline):
                found = _has_response(pipeline)
            case BranchNode(kind, pipeline, body, otherwise):
                body, found = _until_response(body)
                if found:
                    otherwise = ()
                else:
                    otherwise, found = _until_response(otherwise)
                node = BranchNode(kind, pipeline, body, otherwise)
        kept.append(node)
        if found:
            return tuple(kept), True
    return tuple(kept), False


def _has_response(operand: Operand) -> bool:
    match operand:
        case FieldAccess(Dot(), name):
            return name == "Response"
        case FieldAccess(FieldAccess() as of, name):
            return name == "Response" or _has_response(of)
        case Pipeline(commands):
            return any(_has_response(each) for command in commands for each in command)
    return False


def _fields(template: GoTemplate) -> Iterator[str]:
    for nodes in (template.main, *template.defined.values()):
        for node in nodes:
            yield from _fields_of(node)


def _fields_of(item: Node | Operand) -> Iterator[str]:
    match item:
        case FieldAccess(of, name):
            yield name
            yield from _fields_of(of)
        case ActionNode(pipeline) | TemplateNode(_, Pipeline() as pipeline):
            yield from _fields_of(pipeline)
        case Pipeline(commands):
            for operand in (each for command in commands for each in command):
                yield from _fields_of(operand)
        case BranchNode(_, pipeline, body, otherwise):
            for each in (pipeline, *body, *otherwise):
                yield from _fields_of(each)


class _Writer:
    """Writes macros, one for each template.

    Go's variables can be set within blocks, Jinja's cannot; so they are numbered attributes of a
    namespace `ns`. `_scopes`: their expressions by name, innermost scope last. `_dot`: the
    expression of the current value. Literal text is printed as string constants, so white space in
    the generated source has no meaning.
    """

    def __init__(self, template: GoTemplate) -> None:
        self.lines: list[str] = []
        self.macro_names = {name: f"t{index}" for index, name in enumerate(template.defined)}
        self._scopes: list[dict[str, str]] = []
        self._dot = "dot"
        self._count = 0
        self._loops = 0

    def tag(self, text: str) -> None:
        self.lines.append(f"{{%- {text} -%}}")

    def print(self, expression: str) -> None:
        self.lines.append(f"{{{{- {expression} -}}}}")

    def macro(self, name: str, nodes: tuple[Node, ...]) -> None:
        self._scopes, self._dot, self._loops = [{"": "dot"}], "dot", 0
        self.tag(f"macro {name}(dot)")
        self.tag("set ns = namespace()")
        self._write(nodes)
        self.tag("endmacro")

    def _write(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            match node:
                case TextNode(text):
                    self.print(_constant(text))
                case ActionNode(pipeline):
                    self._write_action(pipeline)
                case BranchNode("range"):
                    self._write_range(node)
                case BranchNode():
                    self._write_condition(node)
                case TemplateNode(name, pipeline, line):
                    self._write_call(name, pipeline, line)
                case JumpNode(kind, line):
                    if not self._loops:
                        refuse(line, f"`{kind}` outside `range`")
                    self.tag(kind)

    def _write_action(self, pipeline: Pipeline) -> None:
        value = self._value(pipeline)
        if pipeline.variables:
            self._set(pipeline, pipeline.variables[0], value)
        else:
            self.print(f"go_text({value})")

    def _set(self, pipeline: Pipeline, name: str, value: str) -> None:
        if pipeline.declares:
            self._scopes[-1][name] = self._new_variable()
        self.tag(f"set {self._variable(name, pipeline.line)} = {value}")

    def _write_condition(self, node: BranchNode) -> None:
        pipeline, dot = node.pipeline, self._dot
        condition = self._value(pipeline)
        self._scopes.append({})
        if pipeline.variables:
            self._set(pipeline, pipeline.variables[0], condition)
            condition = self._variable(pipeline.variables[0], pipeline.line)
        elif node.kind == "with":
            variable = self._new_variable()
            self.tag(f"set {variable} = {condition}")
            condition = variable
        self.tag(f"if {condition}")
        self._write_block(node.body, condition if node.kind == "with" else dot)
        if node.otherwise:
            self.tag("else")
            self._write_block(node.otherwise, dot)
        self.tag("endif")
        self._scopes.pop()

    def _write_range(self, node: BranchNode) -> None:
        pipeline, dot = node.pipeline, self._dot
        values = self._value(pipeline)
        self._count += 1
        key, element = f"k{self._count}", f"e{self._count}"
        self.tag(f"for {key}, {element} in go_entries({values})")
        self._scopes.append({})
        names = pipeline.variables
        for name, value in zip(names, (key, element)[-len(names) :], strict=True) if names else ():
            self._set(pipeline, name, value)
        self._loops += 1
        self._write_block(node.body, element)
        self._loops -= 1
        self._scopes.pop()
        if node.otherwise:
            self.tag("else")
            self._write_block(node.otherwise, dot)
        self.tag("endfor")

    def _write_block(self, nodes: tuple[Node, ...], dot: str) -> None:
        outer, self._dot = self._dot, dot
        self._scopes.append({})
        self._write(nodes)
        self._scopes.pop()
        self._dot = outer

    def _write_call(self, name: str, pipeline: Pipeline | None, line: int) -> None:
        if name not in self.macro_names:
            refuse(line, f"the template {name[:40]!r} is not defined")
        value = "none" if pipeline is None else self._value(pipeline)
        self.print(f"{self.macro_names[name]}({value})")

    def _new_variable(self) -> str:
        self._count += 1
        return f"ns.v{self._count}"

    def _variable(self, name: str, line: int) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        refuse(line, f"the variable ${name[:40]} is not defined")

    def _value(self, pipeline: Pipeline) -> str:
        value: str | None = None
        for command in pipeline.commands:
            value = self._result(command, value, pipeline.line)
        assert value is not None
        return value

    def _result(self, command: tuple[Operand, ...], last: str | None, line: int) -> str:
        """`last`: the result of the previous command, which is the last argument of this one."""
        first, *operands = command
        if not isinstance(first, FunctionName):
            if operands or last is not None:
                refuse(line, "only functions take arguments")
            return self._operand(first, line)
        arguments = [self._operand(operand, line) for operand in operands]
        return _called(first.name, [*arguments, *([] if last is None else [last])], line)

    def _operand(self, operand: Operand, line: int) -> str:
        match operand:
            case Literal(value):
                return _constant(value) if isinstance(value, str) else str(value).lower()
            case Dot():
                return self._dot
            case Variable(name):
                return self._variable(name, line)
            case FunctionName(name):
                return _called(name, [], line)
            case FieldAccess(of, name):
                value = self._operand(of, line)
                if name in _ROOT_FIELDS:
                    return f"go_root_field({value}, {_constant(_ROOT_FIELDS[name])})"
                if name not in _FIELDS:
                    refuse(line, f"the field .{name[:40]} is not supported")
                key, zero = _FIELDS[name]
                return f"go_field({value}, {_constant(key)}, {zero})"
            case Pipeline():
                return self._value(operand)


def _called(name: str, arguments: list[str], line: int) -> str:
    given = ", ".join(arguments)
    if name in ("and", "or") and arguments:
        return f"({f' {name} '.join(arguments)})"
    if name == "not" and len(arguments) == 1:
        return f"(not {given})"
    if name == "currentDate" and not arguments:
        return _TODAY
    if name == "yesterdayDate" and not arguments:
        return f"go_day_before({_TODAY})"
    if name in _FUNCTIONS:
        return f"go_{name}({given})"
    refuse(line, f"the function `{name[:40]}` with {len(arguments)} arguments is not supported")


def _constant(text: str) -> str:
    """The text as a string constant of Jinja."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'".replace("\n", "\\n").replace("\r", "\\r")

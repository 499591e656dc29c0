"""Parses templates in the language of Go's `text/template`."""

from collections.abc import Iterator

from model_zoo.chat.go_templates.lexer import ActionPiece, TextPiece, Token, pieces
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

MAX_DEPTH = 40  # nesting of blocks, of parentheses, and of the fields of a value
_BRANCHES = ("if", "with", "range")
_CONSTANTS = {"true": True, "false": False, "nil": None}


def parse(source: str) -> GoTemplate:
    """Parse a template. Raises ModelFileErrors that name the line and the invalid or unsupported
    construct."""
    return _Parser(source).template()


class _Parser:
    def __init__(self, source: str) -> None:
        self._pieces: Iterator[TextPiece | ActionPiece] = pieces(source)
        self._defined: dict[str, tuple[Node, ...]] = {}
        self._line = 1

    def template(self) -> GoTemplate:
        main, end = self._nodes(0)
        if end is not None:
            refuse(self._line, f"unexpected {{{{ {end.word()} }}}}")
        return GoTemplate(main, self._defined)

    def _nodes(self, depth: int) -> tuple[tuple[Node, ...], "_Tokens | None"]:
        """Nodes up to `end` or `else`, which is returned; None at the end of the template."""
        if depth > MAX_DEPTH:
            refuse(self._line, f"blocks are nested more than {MAX_DEPTH} levels deep")
        nodes: list[Node] = []
        for piece in self._pieces:
            if isinstance(piece, TextPiece):
                nodes.append(TextNode(piece.text))
                continue
            self._line = piece.line
            tokens = _Tokens(piece)
            if tokens.word() in ("end", "else"):
                return tuple(nodes), tokens
            node = self._node(tokens, depth)
            if node is not None:
                nodes.append(node)
        return tuple(nodes), None

    def _node(self, tokens: "_Tokens", depth: int) -> Node | None:
        word = tokens.word()
        if word in _BRANCHES:
            tokens.take()
            return self._branch(str(word), tokens, depth)
        if word in ("break", "continue") and tokens.left == 1:
            return JumpNode(str(word), tokens.line)
        if word in ("define", "block"):
            tokens.take()
            return self._definition(str(word), tokens, depth)
        if word == "template":
            tokens.take()
            name = tokens.name()
            return TemplateNode(name, tokens.whole_pipeline() if tokens.left else None, tokens.line)
        return ActionNode(tokens.whole_pipeline())

    def _branch(self, kind: str, tokens: "_Tokens", depth: int) -> BranchNode:
        pipeline = tokens.whole_pipeline(most_variables=2 if kind == "range" else 1)
        body, end = self._nodes(depth + 1)
        otherwise: tuple[Node, ...] = ()
        if end is not None and end.word() == "else":
            end.take()
            following = end.word()
            if following is None and not end.left:
                otherwise, end = self._nodes(depth + 1)
                self._expect_end(end)
            elif (kind, following) in (("if", "if"), ("with", "with")):
                end.take()
                otherwise = (self._branch(kind, end, depth + 1),)
            else:
                refuse(end.line, f"`else {following or ''}` after `{kind}` is not supported")
        else:
            self._expect_end(end)
        return BranchNode(kind, pipeline, body, otherwise)

    def _definition(self, word: str, tokens: "_Tokens", depth: int) -> Node | None:
        name = tokens.name()
        if word == "define" and depth:
            refuse(tokens.line, "`define` within a block")
        pipeline = tokens.whole_pipeline() if word == "block" else None
        if word == "define" and tokens.left:
            refuse(tokens.line, "`define` takes a name only")
        body, end = self._nodes(depth + 1)
        self._expect_end(end)
        if name in self._defined:
            refuse(tokens.line, f"the template {name[:40]!r} is defined twice")
        self._defined[name] = body
        return TemplateNode(name, pipeline, tokens.line) if word == "block" else None

    def _expect_end(self, end: "_Tokens | None") -> None:
        if end is None:
            refuse(self._line, "a block has no {{ end }}")
        if end.word() != "end" or end.left != 1:
            refuse(end.line, "{{ end }} is expected")


class _Tokens:
    """The unparsed tokens of one action."""

    def __init__(self, piece: ActionPiece) -> None:
        self.line = piece.line
        self._tokens = piece.tokens
        self._at = 0
        if not piece.tokens:
            refuse(self.line, "an action is empty")

    @property
    def left(self) -> int:
        return len(self._tokens) - self._at

    def word(self) -> str | None:
        """The next token if it is a word."""
        token = self._next()
        return str(token.value) if token is not None and token.kind == "word" else None

    def take(self) -> Token:
        token = self._next()
        if token is None:
            refuse(self.line, "the action ends unexpectedly")
        self._at += 1
        return token

    def name(self) -> str:
        token = self.take()
        if token.kind != "string":
            refuse(self.line, "the name of a template must be a string")
        return str(token.value)

    def whole_pipeline(self, *, most_variables: int = 1) -> Pipeline:
        pipeline = self._pipeline(0, most_variables=most_variables)
        if self.left:
            refuse(self.line, f"unexpected {str(self.take().value)[:40]!r}")
        return pipeline

    def _pipeline(self, depth: int, *, most_variables: int) -> Pipeline:
        if depth > MAX_DEPTH:
            refuse(self.line, f"parentheses are nested more than {MAX_DEPTH} levels deep")
        variables, declares = self._variables(most_variables)
        commands = [self._command(depth)]
        while self._is_sign("|"):
            self.take()
            commands.append(self._command(depth))
        return Pipeline(tuple(commands), variables, declares, self.line)

    def _variables(self, most: int) -> tuple[tuple[str, ...], bool]:
        names: list[str] = []
        begin = self._at
        while (token := self._next()) is not None and token.kind == "variable":
            names.append(str(self.take().value))
            if self._is_sign(":=") or self._is_sign("="):
                if len(names) > most:
                    refuse(self.line, f"the action sets {len(names)} variables")
                return tuple(names), self.take().value == ":="
            if not self._is_sign(","):
                break
            self.take()
        self._at = begin
        return (), False

    def _command(self, depth: int) -> tuple[Operand, ...]:
        operands: list[Operand] = []
        while self.left and not self._is_sign("|") and not self._is_sign(")"):
            operands.append(self._operand(depth))
        if not operands:
            refuse(self.line, "a command is missing")
        return tuple(operands)

    def _operand(self, depth: int) -> Operand:
        operand, fields = self._term(depth), 0
        while (token := self._next()) is not None and token.kind == "field" and not token.spaced:
            fields += 1
            if fields > MAX_DEPTH:
                refuse(self.line, f"fields are nested more than {MAX_DEPTH} levels deep")
            if isinstance(operand, FunctionName | Literal | Dot):
                refuse(self.line, f"unexpected {str(token.value)[:40]!r}")
            self.take()
            operand = FieldAccess(operand, str(token.value)[1:])
        return operand

    def _term(self, depth: int) -> Operand:
        token = self.take()
        match token.kind:
            case "string" | "number":
                return Literal(token.value)
            case "variable":
                return Variable(str(token.value))
            case "field":
                return FieldAccess(Dot(), str(token.value)[1:])
            case "word":
                word = str(token.value)
                return Literal(_CONSTANTS[word]) if word in _CONSTANTS else FunctionName(word)
        if token.value == ".":
            return Dot()
        if token.value == "(":
            pipeline = self._pipeline(depth + 1, most_variables=0)
            if not self._is_sign(")"):
                refuse(self.line, "a parenthesis is not closed")
            self.take()
            return pipeline
        refuse(self.line, f"unexpected {str(token.value)[:40]!r}")

    def _next(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _is_sign(self, sign: str) -> bool:
        token = self._next()
        return token is not None and token.kind == "sign" and token.value == sign

"""Jinja for templates that nobody has read: a sandbox in which every step is paid for."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jinja2 import Template, Undefined, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

from model_zoo.sandbox.budget import Budget
from model_zoo.sandbox.operations import (
    check_filter,
    check_format,
    check_method,
    check_operator,
)

# Names that no template can spell.
BUDGET = "the budget"
_COUNTED, _MADE, _JOINED, _WRITTEN = "each counted", "just made", "all joined", "at last written"
# Of a generator they want every value at once.
_CONSUMING = frozenset({"join", "list", "string", "tojson", "reverse", "sort", "unique", "sum"})
_LARGEST_INTEGER = 1 << 64


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """Renders with a Budget among the variables, as `BUDGET`.

    Nothing is computed while a template is compiled. What the sandbox forbids is an error here;
    by itself it would be an undefined value.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        for name in list(self.filters):
            self.add_filter(name, self.filters[name])
        self.filters[_COUNTED] = _counted
        self.filters[_MADE] = _made
        self.filters[_JOINED] = _joined
        self.filters[_WRITTEN] = _written

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _paid(name, function)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to `{attribute}` of a {type(obj).__name__} is not allowed")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped: Any = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
            wrapped.template = value.__self__
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        check_operator(budget, operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        budget = _budget(__context)
        budget.step()
        args = check_method(budget, __obj, args, named)
        return _measured(budget, super().call(__context, __obj, *args, **named))

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        paid = _Paying().visit(source)
        paid.set_environment(self)
        return super()._generate(paid, name, filename, defer_init)


class _Paying(NodeTransformer):
    """Puts what needs no filter, call or operator of its own through one that pays."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(_COUNTED, node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through(_WRITTEN, _constant(child)) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node) if node.ctx == "load" else node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and abs(node.value) >= _LARGEST_INTEGER:
            raise SecurityError("a number is too large")
        return node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _constant(node: nodes.Expr) -> nodes.Expr:
    return (
        nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node
    )


def _budget(context: Context) -> Budget:
    return context.parent[BUDGET]


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its arguments checked and its result counted, called with the context."""
    wanted = _PassArg.from_obj(function)

    @pass_context
    @wraps(function)
    def paid(context: Context, *args: Any, **named: Any) -> Any:
        budget = _budget(context)
        if args and name in _CONSUMING and hasattr(args[0], "__next__"):
            args = (list(budget.counted(args[0])), *args[1:])
        for value in (*args, *named.values()):
            _measured(budget, value)
        check_filter(budget, name, args, named)
        first: Mapping[Any, Any] = {
            _PassArg.context: context,
            _PassArg.eval_context: context.eval_ctx,
            _PassArg.environment: context.environment,
        }
        result = function(*([first[wanted]] if wanted else []), *args, **named)
        return budget.made(result) if isinstance(result, str) else _measured(budget, result)

    return paid


def _measured(budget: Budget, value: Any) -> Any:
    if isinstance(value, str | list | tuple | Mapping):
        budget.made(value) if isinstance(value, str) else budget.size(value)
    return value


@pass_context
def _counted(context: Context, values: Any) -> Any:
    return _budget(context).counted(values)


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _budget(context).made(value)


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    budget = _budget(context)
    budget.size(values)
    return budget.made("".join(map(str, values)))


@pass_context
def _written(context: Context, value: Any) -> str:
    budget = _budget(context)
    budget.size(value)
    return budget.made(str(value))


def render(template: Template, variables: Mapping[str, Any], budget: Budget) -> str:
    """The whole text; raises whatever the template raises."""
    pieces, size = [], 0
    with budget.not_counting_collections():
        for piece in template.generate({**variables, BUDGET: budget}):
            size += len(piece)
            budget.allow(size)
            pieces.append(piece)
    return "".join(pieces)

"""Makes Triton's interpreter several times as fast without a change of its results."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@functools.cache  # once
def leave_out_what_has_no_effect() -> None:
    """Spares the interpreter of this process what takes most of its time:

    - Integer operations are computed again in 64 bits, and an overflow is ignored: only
      `InterpreterOptions.debug` would report it.
    - Each call of a function by a kernel patches `triton.language`, as the kernel's launch has.
    - Each call of an operation copies its arguments twice, to add the interpreter's to them.
    - Each operation makes the type, the shape and numpy's type of its results anew, although few
      are different, and so does it with operands that are numbers.
    - It finds a common type and shape of two operands also if theirs are the same.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _once_each(interpreter._get_np_dtype)
    tl.block_type.__init__ = _copied(tl.block_type.__init__)
    tl.dtype.__eq__ = _unless_identical(tl.dtype.__eq__)
    tl.tensor.__init__ = _init_tensor
    interpreter.TensorHandle.__init__ = _init_handle
    checked = TritonSemantic.binary_op_type_checking_impl
    TritonSemantic.binary_op_type_checking_impl = _unless_known(checked)
    TritonSemantic.broadcast_impl_value = _if_needed(TritonSemantic.broadcast_impl_value)


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_patch_lang`, which leaves a function alone whose modules are patched."""

    def patch_if_needed(function: Any) -> Any:
        if any(tl.core.is_builtin(module.load) for module in _language_modules(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    return patch_if_needed


@functools.cache
def _language_modules(function: Any) -> tuple[Any, ...]:
    """Those that `_patch_lang` patches for a function."""
    seen = filter(inspect.ismodule, function.__globals__.values())
    return tuple(module for module in seen if module in (tl, tl.core))


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """The same of the interpreter. What `builtin` adds to a function checks only that `_semantic`
    is given."""
    function = member.__wrapped__ if member.__code__ is _BUILTIN else member

    def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
        return function(*args, **options, _semantic=interpreter.interpreter_semantic)

    scope.set_attr(obj, name, call)


_BUILTIN = tl.core.builtin(lambda: None).__code__


def _once_each(np_dtype: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """`_get_np_dtype`, which looks a type up by its name."""
    known: dict[str, Any] = {}

    def known_dtype(type: tl.dtype) -> Any:
        if type.name not in known:
            known[type.name] = np_dtype(type)
        return known[type.name]

    return known_dtype


def _copied(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of `block_type`, which copies what an equal type has."""
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        if set(map(type, sizes)) != {int}:  # numbers equal to them are refused
            init(self, element_ty, shape)
        elif attributes := known.get((element_ty.name, sizes)):
            vars(self).update(attributes)
            self.element_ty = element_ty
        else:
            init(self, element_ty, shape)
            known[element_ty.name, sizes] = vars(self)

    return init_type


def _unless_identical(equal: Callable[[tl.dtype, Any], bool]) -> Callable[[tl.dtype, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """The constructor of `tensor`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes(tuple(type.shape.values) if type.is_block() else ())


def _init_handle(self: Any, data: Any, dtype: tl.dtype, attr: dict | None = None) -> None:
    """The constructor of `TensorHandle`, with its check."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.dtype or data.itemsize * 8 > dtype.primitive_bitwidth:
        self.__post_init__()


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, tl.constexpr]:
    """The shape of a tensor, and the number of its elements."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _unless_known(operands: Callable[..., Any]) -> Callable[..., Any]:
    """`binary_op_type_checking_impl`. Tensors of one type are returned as they are, unless they are
    pointers or divided; numbers as what they were when they met a tensor of the same type."""
    known: dict[tuple[Any, ...], tl.tensor] = {}
    numbers = (int, float, bool)

    @functools.wraps(operands)
    def known_operands(self: TritonSemantic, lhs: Any, rhs: Any, *flags: bool, **more: bool) -> Any:
        if self is not interpreter.interpreter_semantic or more:  # kernels may be compiled, too
            return operands(self, lhs, rhs, *flags, **more)
        of_tensors = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if of_tensors == (True, True):
            alike = lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr() and len(flags) < 4
            return (lhs, rhs) if alike else operands(self, lhs, rhs, *flags)
        if of_tensors == (True, False) and type(rhs) in numbers:
            key = lhs.type.name, True, type(rhs), rhs, flags
            if key in known:
                return lhs, known[key]
        elif of_tensors == (False, True) and type(lhs) in numbers:
            key = rhs.type.name, False, type(lhs), lhs, flags
            if key in known:
                return known[key], rhs
        else:
            return operands(self, lhs, rhs, *flags)
        one, other = operands(self, lhs, rhs, *flags)
        tensor, number = (one, other) if of_tensors[0] else (other, one)
        if tensor is (lhs if of_tensors[0] else rhs):
            number.handle.data.flags.writeable = False
            known[key] = number
        return one, other

    return known_operands


def _if_needed(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """`broadcast_impl_value`, which leaves tensors of one shape alone."""

    def broadcast_others(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_others

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
    - Each operation makes the type, the shape and numpy's type of its results anew, although few
      are different, and compares the shapes of operands of the same shape as if they were not.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_each(interpreter._get_np_dtype)
    tl.block_type.__init__ = _copied(tl.block_type.__init__)
    tl.dtype.__eq__ = _unless_identical(tl.dtype.__eq__)
    tl.tensor.__init__ = _init_tensor
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


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, tl.constexpr]:
    """The shape of a tensor, and the number of its elements."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _if_needed(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """`broadcast_impl_value`, which leaves tensors of one shape alone."""

    def broadcast_others(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_others

"""Triton's interpreter without the work that it does over and over; what it computes stays the same.

Of its time, NumPy takes a tenth. The rest goes to types, shapes and constants made again for every operation, to
`triton.language` patched anew for every call of a device function, and to checks whose results nobody reads. So the
kernels' tests take a fifth of their time.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

CONSTEXPR, TENSOR, BLOCK = core.constexpr, core.tensor, core.block_type
AS_THEY_ARE = frozenset((int, float, bool, str, type(None), TENSOR, core.dtype, BLOCK))
"""Types of what `core._unwrap_if_constexpr` meets most, and leaves as it is."""


def hasten() -> None:
    """Replace parts of the interpreter in this process, where they are those that are known here."""
    if triton.__version__ != "3.8.0":
        return
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows would be asserted"
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    keep_types()
    keep_shapes()
    keep_sizes()
    keep_constants()
    patch_once()
    gc.set_threshold(50_000, 50, 50)  # of the many objects of an operation, none refer to each other in a circle


def keep_types() -> None:
    """Have one object for a type of blocks, and NumPy's type kept at each."""
    make, np_dtype, unwrap = BLOCK.__init__, interpreter._get_np_dtype, core._unwrap_if_constexpr
    kept: dict[Any, Any] = {}

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = id(element_ty), tuple([x.value if type(x) is CONSTEXPR else x for x in shape])
        if cls is not BLOCK or (found := kept.get(key)) is None:
            found = object.__new__(cls)
            make(found, element_ty, shape)
            if cls is BLOCK:
                kept[key] = found  # which keeps element_ty, and so the id
        return found

    def kept_np_dtype(kind: Any) -> Any:
        if (found := kind.__dict__.get("np_dtype")) is None:
            found = kind.np_dtype = np_dtype(kind)
        return found

    def quick_unwrap(x: Any) -> Any:
        return x.value if type(x) is CONSTEXPR else x if type(x) in AS_THEY_ARE else unwrap(x)

    def same(cls: Any) -> None:
        equal = cls.__eq__
        cls.__eq__ = lambda self, other: self is other or equal(self, other)

    BLOCK.__new__, BLOCK.__init__ = new, lambda *_arguments: None
    for cls in (core.dtype, BLOCK, core.pointer_type):
        same(cls)
    interpreter._get_np_dtype, core._unwrap_if_constexpr = kept_np_dtype, quick_unwrap


def keep_shapes() -> None:
    """Keep what tensors tell of their type at the type."""
    make = TENSOR.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        if (found := type.__dict__.get("of_tensors")) is None:
            make(self, handle, type)
            type.of_tensors = self.numel, self.shape, self.dtype
        else:
            self.handle, self.type = handle, type
            self.numel, self.shape, self.dtype = found

    TENSOR.__init__ = init


def keep_sizes() -> None:
    """Keep the size that values of a type may have at the type: it is checked at each operation, as before."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    fabs, floats = builder.create_fabs, {np.dtype(name) for name in ("float16", "float32", "float64")}

    def most_bytes(dtype: Any) -> float:
        if (found := dtype.__dict__.get("most_bytes")) is None:
            is_pointer = isinstance(dtype, core.pointer_type)
            found = dtype.most_bytes = float("inf") if is_pointer else max(dtype.primitive_bitwidth, 8) / 8
        return found

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > most_bytes(dtype):
            raise ValueError(f"values of {data.itemsize} bytes are no {dtype}")

    def binary_op(_self: Any, lhs: Any, rhs: Any, operation: Any) -> Any:
        output, dtype = operation(lhs.data, rhs.data), lhs.dtype.scalar
        if output.itemsize > most_bytes(dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return handle(output, dtype)

    def create_fabs(self: Any, x: Any) -> Any:
        return handle(np.abs(x.data), x.dtype.scalar) if x.data.dtype in floats else fabs(self, x)

    handle.__init__, builder.binary_op, builder.create_fabs = init, binary_op, create_fabs


def keep_constants() -> None:
    """Keep numbers as tensors at the types that they come to, and take operands of one type as they are."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    constant = TritonSemantic.scalar_constant

    def quick_check(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        left, right = type(lhs) is TENSOR, type(rhs) is TENSOR
        if left and right:
            is_done = lhs.type is rhs.type and len(flags) < 4 and not named and not lhs.dtype.is_ptr()
            return (lhs, rhs) if is_done else check(self, lhs, rhs, *flags, **named)
        if named or left == right:
            return check(self, lhs, rhs, *flags, **named)
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        numbers = tensor.type.__dict__.get("numbers")
        if numbers is None:
            numbers = tensor.type.numbers = {}
        key = left, type(number), number, flags
        if (found := numbers.get(key)) is None:
            both = check(self, lhs, rhs, *flags)
            if both[not left] is tensor:
                numbers[key] = both[left]
            return both
        return (lhs, found) if left else (found, rhs)

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b or (type(a) is BLOCK and type(b) is BLOCK and a.shape == b.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def kept_constant(self: Any, value: Any, dtype: Any) -> Any:
        numbers = dtype.__dict__.get("scalars")
        if numbers is None:
            numbers = dtype.scalars = {}
        key = type(value), value
        if (found := numbers.get(key)) is None:
            found = numbers[key] = constant(self, value, dtype)
        return found

    TritonSemantic.binary_op_type_checking_impl = quick_check
    TritonSemantic.broadcast_impl_value = quick_broadcast
    TritonSemantic.scalar_constant = kept_constant


def patch_once() -> None:
    """Patch the language at a launch alone, with what was patched once; device functions find it done."""
    patch_lang, call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__

    def patch_attr(place: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def builtin(*arguments: Any, _semantic: Any = None, **options: Any) -> Any:
            return function(*arguments, _semantic=semantic, **options)

        scope.set_attr(place, name, builtin)

    interpreter._patch_attr = patch_attr
    exec("def both(): pass", both := {"tl": tl, "core": core})
    scope = patch_lang(both["both"])
    patched = [(place, name, getattr(place, name)) for place, name, _ in scope._changes]
    scope.restore()

    class Scope(interpreter._LangPatchScope):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            Scope.count += 1
            for change in patched:
                self.set_attr(*change)

        def restore(self) -> None:
            super().restore()
            Scope.count -= 1

    def quick_call(self: Any, *arguments: Any, **options: Any) -> Any:
        if not Scope.count:
            return call(self, *arguments, **options)
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _function: Scope()
    interpreter.InterpretedFunction.__call__ = quick_call

"""Tensors as torch's pickles describe them: every rebuilder torch has emitted since 0.1, read and not run.

``tensor_of`` sees through parameters, Variables and subclasses to the storage, offset, shape and stride.
What is a tensor but not such a view of a storage (sparse, quantized, nested, meta, ...) is an
``OpaqueTensor`` that says what it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import cast

from precconv.dtypes import DType, dtype
from precconv.errors import CorruptCheckpointError

from .numpy_nodes import array_of
from .pickled import Global, Persistent, Placeholder, StorageRef, mapping, sequence, text
from .torch_storages import dtype_of

__all__ = ["OpaqueTensor", "TensorRef", "tensor_of"]

_MAX_DIMS = 64
_MAX_WRAPPERS = 8
_MAX_PARTS = 8  #: of a sparse tensor
_MAX = 1 << 63


@dataclass(slots=True, eq=False)  # not frozen: checkpoints with 100,000 tensors build one for each
class TensorRef:
    """A view of a storage, never changed; offset and strides count elements of ``dtype``, as torch's do."""

    node: Placeholder | Persistent  #: what the pickle holds in its place, outermost
    storage: StorageRef
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    hooks: object = None
    metadata: object = None
    is_parameter: bool = False
    subclass: str = ""  #: the class, where it is neither torch.Tensor nor Parameter

    @property
    def rebuilder(self) -> str:
        """Canonical name of what makes it, outermost."""
        return self.node.canonical if isinstance(self.node, Placeholder) else ""

    @property
    def itemsize(self) -> int:
        """Bytes an element; torch keeps two FP4 values in an element of one byte."""
        return max(1, self.dtype.bits // 8)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its elements in row-major order, each once."""
        return self.numel * self.itemsize

    @property
    def byte_start(self) -> int:
        """Of its first element, within the record of its storage."""
        return self.storage.start * self.storage.itemsize + self.offset * self.itemsize

    @property
    def byte_end(self) -> int:
        """Just past the last byte it touches, within the record of its storage."""
        if 0 in self.shape:
            return self.byte_start
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.byte_start + (last + 1) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step and self.numel:
                return False
            step *= size
        return True

    @property
    def view(self) -> tuple[object, ...]:
        """Equal for tied tensors: the same elements of one storage, seen in the same way."""
        kept = [(n, s) for n, s in zip(self.shape, self.stride, strict=True) if n != 1]
        return (self.storage.key, self.byte_start, self.dtype, self.shape, tuple(kept))


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueTensor:
    """A tensor that is no plain view of a storage; it can be kept as it is, not read."""

    node: Placeholder
    kind: str  #: "a sparse tensor": completes "is ..."
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None


Tensor = TensorRef | OpaqueTensor


def tensor_of(node: object) -> Tensor | None:
    """The tensor a node stands for, None where it is none.

    Raises CorruptCheckpointError for one whose description is malformed or leaves its storage.
    """
    if not isinstance(node, Placeholder):
        return None
    reader = _READERS.get(node.canonical)
    if reader is not None:
        return reader(node)
    if _OLD_CLASS.fullmatch(node.canonical) and not node.args:
        return _from_state(node)
    if node.canonical.startswith("torch._utils._rebuild"):
        return OpaqueTensor(node, f"a tensor that {node.kind} makes")
    return None


def _corrupt(message: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"a tensor's description is malformed: {message}")


def _need(node: Placeholder, least: int) -> tuple[object, ...]:
    if len(node.args) < least:
        raise _corrupt(f"{node.kind} has {len(node.args)} arguments, not {least}")
    return node.args


def _ints(value: object, what: str) -> tuple[int, ...]:
    known = isinstance(value, list | tuple) or (isinstance(value, Placeholder) and value.canonical == "torch.Size")
    values = sequence(value) if known else None
    if values is None:
        raise _corrupt(f"its {what} is not a tuple")
    if len(values) > _MAX_DIMS:
        raise _corrupt(f"its {what} is not made of sizes")
    for number in values:
        if type(number) is not int or not 0 <= number < _MAX:
            raise _corrupt(f"its {what} is not made of sizes")
    return cast(tuple[int, ...], tuple(values))


def _dense(
    node: Placeholder | Persistent,
    storage: object,
    offset: object,
    size: object,
    stride: object,
    element: DType | None = None,
    *,
    grad: object = False,
    hooks: object = None,
) -> TensorRef:
    """A view of a storage, checked to lie within it."""
    if not isinstance(storage, StorageRef):
        raise _corrupt("it has no storage")
    shape, steps = _ints(size, "shape"), _ints(stride, "stride")
    if len(shape) != len(steps):
        raise _corrupt(f"{len(shape)} sizes and {len(steps)} strides")
    if type(offset) is not int or not 0 <= offset < _MAX:
        raise _corrupt("its offset is not a number of elements")
    if prod(shape) >= _MAX:
        raise _corrupt("it has more elements than a file can hold")
    ref = TensorRef(
        node, storage, element or storage.dtype or dtype("uint8"), offset, shape, steps, grad is True, hooks
    )
    end = storage.start * storage.itemsize + storage.nbytes
    if ref.byte_end > end and ref.numel:
        raise _corrupt(f"it reaches byte {ref.byte_end} of a storage that ends at {end}")
    return ref


def _v1(node: Placeholder) -> Tensor:
    storage, offset, size, stride, *_ = _need(node, 4)
    return _dense(node, storage, offset, size, stride)


def _v2(node: Placeholder) -> Tensor:
    storage, offset, size, stride, grad, hooks, *rest = _need(node, 6)
    ref = _dense(node, storage, offset, size, stride, grad=grad, hooks=hooks)
    return _with_metadata(ref, rest) if rest else ref


def _v3(node: Placeholder) -> Tensor:
    storage, offset, size, stride, grad, hooks, kind, *rest = _need(node, 7)
    element = dtype_of(kind)
    if element is None:
        raise _corrupt("its dtype is unknown")
    ref = _dense(node, storage, offset, size, stride, element, grad=grad, hooks=hooks)
    return _with_metadata(ref, rest) if rest else ref


def _with_metadata(ref: TensorRef, rest: list[object]) -> Tensor:
    metadata = rest[0]
    if isinstance(metadata, Placeholder) or (isinstance(metadata, dict) and len(metadata) > _MAX_DIMS):
        raise _corrupt("its metadata is no small dict")
    bits = [key for key, on in (mapping(metadata) or {}).items() if on is True]
    if bits:  # the values are not those stored until the bit is applied
        assert isinstance(ref.node, Placeholder)
        named = " and ".join(text(bit) or "?" for bit in bits)
        return OpaqueTensor(ref.node, f"a tensor with its {named} bit set", ref.dtype, ref.shape)
    return replace(ref, metadata=metadata)


def _check_nesting(node: object) -> None:
    """Refuse wrappers of wrappers of wrappers before they are followed by recursion."""
    for _ in range(_MAX_WRAPPERS):
        reader = _READERS.get(node.canonical) if isinstance(node, Placeholder) else None
        if not isinstance(node, Placeholder) or reader not in (_parameter, _variable, _from_cpu, _subclass):
            return
        inner = 2 if reader is _subclass else 0
        data = node.args[inner] if len(node.args) > inner else None
        node = Placeholder("reduce", node.args[0], data) if isinstance(data, tuple) else data
    raise _corrupt("it is wrapped too many times")


def _wrapping(inner: object, node: Placeholder, *, grad: object, parameter: bool) -> Tensor | None:
    """A tensor whose data is another's, under its own node."""
    _check_nesting(inner)
    found = tensor_of(inner)
    if isinstance(found, OpaqueTensor):
        return replace(found, node=node)
    if found is None:
        return None
    return replace(found, node=node, requires_grad=grad is True, is_parameter=parameter)


def _parameter(node: Placeholder) -> Tensor:
    data, grad, *_ = _need(node, 2)
    found = _wrapping(data, node, grad=grad, parameter=True)
    if found is None:
        raise _corrupt("a parameter has no data")
    return found


def _variable(node: Placeholder) -> Tensor | None:
    """Variables and Parameters as their class called on their data, torch before 0.4 and deep copies."""
    if not node.args:
        return None
    grad = node.args[1] if len(node.args) > 1 else sequence(node.state) or [False]
    flag = grad[0] if isinstance(grad, list | tuple) else grad
    return _wrapping(node.args[0], node, grad=flag, parameter=node.canonical.endswith("Parameter"))


def _subclass(node: Placeholder) -> Tensor | None:
    """``_rebuild_from_type(function, class, arguments, state)``: a class or attributes of its own."""
    function, kind, args, *_ = _need(node, 3)
    if not isinstance(args, tuple):
        raise _corrupt("its arguments are not a tuple")
    inner = Placeholder("reduce", function, args)
    _check_nesting(inner)
    found = tensor_of(inner)
    name = "" if kind in (Global("torch", "Tensor"), Global("torch._tensor", "Tensor")) else str(kind)
    if isinstance(found, OpaqueTensor):
        return replace(found, node=node, kind=f"{found.kind} of class {name}" if name else found.kind)
    parameter = isinstance(kind, Global) and kind.canonical == "torch.nn.Parameter"
    if found is None:
        return OpaqueTensor(node, f"a tensor of class {name or '?'}")
    return replace(found, node=node, subclass="" if parameter else name, is_parameter=parameter)


_OLD_CLASS = re.compile(r"torch\.(cuda\.)?(sparse\.)?(\w*)Tensor")


def _from_state(node: Placeholder) -> Tensor | None:
    """torch 0.1: ``torch.FloatTensor()``, then its state (storage, offset, size, stride)."""
    state = node.state
    if isinstance(state, tuple) and len(state) == 4 and isinstance(state[0], StorageRef):
        return _dense(node, *state)
    return OpaqueTensor(node, f"a {node.kind} without data")


def _from_cpu(node: Placeholder) -> Tensor | None:
    data, kind, _, grad, *_ = _need(node, 4)
    found = _wrapping(data, node, grad=grad, parameter=False)
    if isinstance(found, TensorRef) and found.dtype != dtype_of(kind):
        return OpaqueTensor(node, f"a device tensor of {dtype_of(kind)} stored as {found.dtype}")
    return found


def _from_numpy(node: Placeholder) -> Tensor:
    """A device tensor (XLA) whose values are a numpy array in the pickle itself."""
    data, kind, _, grad, *_ = _need(node, 4)
    array, element = array_of(data), dtype_of(kind)
    if array is None or element is None or array.dtype != element:
        return OpaqueTensor(node, f"a device tensor of {element or 'unknown type'} stored as a numpy array")
    storage = StorageRef(
        f"numpy array at {id(array.data)}",
        Global("numpy", "ndarray"),
        element,
        array.numel,
        inline=array.data,
    )
    return _dense(node, storage, 0, array.shape, array.stride, grad=grad)


def _opaque(kind: str) -> Callable[[Placeholder], Tensor]:
    return lambda node: OpaqueTensor(node, kind)


def _sparse(node: Placeholder) -> Tensor:
    """The parts are dense tensors, but for the shape: read here without following anything else."""
    parts = node.args[1] if len(node.args) > 1 else None
    shape, element = None, None
    for part in parts[:_MAX_PARTS] if isinstance(parts, list | tuple) else ():
        if isinstance(part, Placeholder) and _READERS.get(part.canonical) in (_v1, _v2, _v3):
            found = tensor_of(part)
            element = found.dtype if isinstance(found, TensorRef) else element
        elif isinstance(part, tuple | Placeholder):
            shape = _ints(part, "shape")
    return OpaqueTensor(node, "a sparse tensor", element, shape)


def _quantized(node: Placeholder) -> Tensor:
    storage, _, size, *_ = _need(node, 4)
    element = storage.dtype if isinstance(storage, StorageRef) else None
    return OpaqueTensor(node, "a quantized tensor", element, _ints(size, "shape"))


def _meta(node: Placeholder) -> Tensor:
    kind, size, *_ = _need(node, 2)
    return OpaqueTensor(node, "a meta tensor, which has no data", dtype_of(kind), _ints(size, "shape"))


def _wrapper(node: Placeholder) -> Tensor:
    kind, element, size, *_ = _need(node, 3)
    return OpaqueTensor(node, f"a wrapper tensor ({kind})", dtype_of(element), _ints(size, "shape"))


_READERS: dict[str, Callable[[Placeholder], Tensor | None]] = {
    "torch._utils._rebuild_tensor": _v1,
    "torch._utils._rebuild_tensor_v2": _v2,
    "torch._utils._rebuild_tensor_v3": _v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.Parameter": _variable,
    "torch.nn.Buffer": _variable,
    "torch.autograd.variable.Variable": _variable,
    "torch.autograd.Variable": _variable,
    "torch._rebuild_from_type": _subclass,
    "torch._rebuild_from_type_v2": _subclass,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_xla_tensor": _from_numpy,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_nested_tensor": _opaque("a nested tensor"),
    "torch.nested._internal.nested_tensor._rebuild_njt": _opaque("a nested tensor"),
    "torch._utils._rebuild_mkldnn_tensor": _opaque("an MKL-DNN tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch.nn.UninitializedParameter": _opaque("an uninitialized parameter"),
    "torch.nn.UninitializedBuffer": _opaque("an uninitialized buffer"),
}

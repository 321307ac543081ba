"""A captured graph for the CPU: what two functions did to tensors, to be done again without them.

As on an accelerator, Python runs once: the tape holds tensor operations and the tensors they made,
which are filled anew each time.  What a graph can't hold is refused: reading a value on the host,
and results whose shape depends on values.

Knows no streams and no names of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepahead.errors import EngineError

_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = torch.ops.aten.index.Tensor  # its shape depends on values for bool indices only


@dataclass(frozen=True)
class _Call:
    """An operation, and (place, tensor) of its results that lie in memory of their own."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, Tensor], ...]

    def run(self) -> None:
        results = tree_leaves(self.func(*self.args, **self.kwargs))
        for at, tensor in self.made:
            tensor.copy_(results[at])


class _Tape(TorchDispatchMode):
    """Writes down calls, and what the memory that they change held before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._before: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # what it is made of comes back here, so that nothing hides in it
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        _check_shape_is_fixed(func, args)
        changes = self._save(func, args, kwargs)
        result = func(*args, **kwargs)
        old = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = tuple(
            (at, leaf)
            for at, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and _address(leaf) not in old
        )
        if made or changes:  # anything else is a view
            self.calls.append(_Call(func, args, kwargs, made))
        return result

    def restore(self) -> None:
        """Capturing changes nothing."""
        for now, before in self._before.values():
            now.copy_(before)

    def _save(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        changed = [
            value
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tree_leaves(changed):
            if isinstance(tensor, Tensor) and _address(tensor) not in self._before:
                storage = _storage(tensor)
                self._before[_address(tensor)] = storage, storage.clone()
        return bool(changed)


def capture(
    first: Callable[[], None], rest: Callable[[], None]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Both functions as what they do to tensors; EngineError for what a graph can't hold."""
    tape = _Tape()
    try:
        with torch.inference_mode(), tape:
            first()
            split = len(tape.calls)
            rest()
    finally:
        tape.restore()
    return _replay(tape.calls[:split]), _replay(tape.calls[split:])


def _replay(calls: list[_Call]) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            for call in calls:
                call.run()

    return run


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    schema = func._schema.arguments
    named = [(argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs]
    return [*zip(schema, args, strict=False), *named]


def _check_shape_is_fixed(func: Any, args: tuple[Any, ...]) -> None:
    if not _VALUE_DEPENDENT.intersection(func.tags):
        return
    indices = tree_leaves(args[1:])
    if func is _INDEXING and all(t is None or t.dtype is not torch.bool for t in indices):
        return
    raise EngineError(
        f"a captured graph can't hold {func}: its result depends on values that only the device "
        "has; take it out of the captured part"
    )


def _address(tensor: Tensor) -> int:
    return _storage(tensor)._cdata


def _storage(tensor: Tensor) -> UntypedStorage:
    """Where its values lie; a sparse matrix has its places elsewhere, and they stay."""
    values = tensor.values() if tensor.layout is torch.sparse_csr else tensor
    return values.untyped_storage()

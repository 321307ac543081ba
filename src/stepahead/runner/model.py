"""What a runner needs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from stepahead.model.batch import StepInputs


class Model(Protocol):
    """A decoder over paged KV memory.  It may also declare

    fine_fence    True: no page table is read after the call has returned.  Else the fence is coarse
    host_lengths  True: it wants `decode_bounds` to be exact.  Else upper bounds will do
    """

    def new_kv(self, num_pages: int, page_size: int) -> Any:
        """Memory for the KV cells of `num_pages` pages."""
        ...

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens; writes their KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab]."""
        ...

"""Captured graphs on the hostile device: Python runs once, tensors stay where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stepahead.device.base import Graph, Stream, Work
from stepahead.device.hostile import HostileDevice
from stepahead.errors import EngineError

NOTHING = Work(lambda: None)


def launched(device: HostileDevice, graph: Graph) -> None:
    """Launches and waits for the end."""
    graph.launch(NOTHING, NOTHING)
    device.record(Stream.FORWARD).wait()


def test_a_graph_does_to_tensors_what_its_functions_did() -> None:
    device = HostileDevice(0)
    state, index = torch.tensor([1, 2, 3]), torch.tensor([2, 0])
    made: list[Tensor] = []

    def first() -> None:
        picked = state[index]  # fresh memory, then a view of it, then a change in place
        made.append(picked.view(1, 2) + 10)
        picked.mul_(2)
        made.append(picked)

    def rest() -> None:
        state[index] = made[1]
        made.append(torch.cat([made[0][0], state]))

    graph = device.capture(first, rest)
    assert state.tolist() == [1, 2, 3], "capturing changes nothing"
    for after in ([2, 2, 6], [4, 2, 12]):
        before = state[index].tolist()
        launched(device, graph)
        assert state.tolist() == after
        assert made[0].tolist() == [[before[0] + 10, before[1] + 10]]
        assert made[2].tolist() == [before[0] + 10, before[1] + 10, *after]
    assert len(made) == 3, "Python ran once"
    state.fill_(5)
    index.copy_(torch.tensor([1, 1]))
    launched(device, graph)
    assert state.tolist() == [5, 10, 5]


def test_the_parts_may_call_composed_operations_in_inference_mode() -> None:
    device, made = HostileDevice(1), []
    query = torch.ones(1, 2, 3, 4)
    weights = torch.arange(16.0).view(4, 4)

    def first() -> None:
        with torch.inference_mode():
            mixed = torch.nn.functional.scaled_dot_product_attention(query, query, query)
            made.append(torch.nn.functional.linear(mixed, weights).softmax(-1))

    graph = device.capture(first, lambda: None)
    query.copy_(torch.rand(1, 2, 3, 4))
    (captured,) = made
    launched(device, graph)
    first()
    torch.testing.assert_close(captured, made[1])


VALUES = torch.tensor([1, 0, 2])


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (lambda: VALUES[0].item(), "aten._local_scalar_dense"),
        (lambda: bool(VALUES.any()), "aten._local_scalar_dense"),
        (lambda: VALUES[VALUES > 0], "aten.index"),
        (lambda: VALUES.nonzero(), "aten.nonzero"),
    ],
)
def test_what_depends_on_values_is_refused(part: Callable[[], object], what: str) -> None:
    def with_a_change() -> None:
        VALUES.add_(1)
        part()

    with pytest.raises(EngineError, match=f"captured graph can't hold {what}"):
        HostileDevice(0).capture(with_a_change, lambda: None)
    assert VALUES.tolist() == [1, 0, 2]

"""A handle that is closed ends, whatever is in flight."""

import pytest
import torch

from offload.io import AsyncIOHandle


@pytest.mark.parametrize("queue_depth", [1, 2, 3])
def test_a_shallow_handle_closes_with_transfers_in_flight(backend, tmp_path, queue_depth):
    """The last block fills the queue, so that its transfer is whole before anybody looks for more work."""
    for _ in range(20):
        handle = AsyncIOHandle(4096, queue_depth, backend=backend)
        tickets = [handle.write(torch.ones(70_001), tmp_path / "x", at * 280_004) for at in range(5)]
        handle.close()
        assert all(ticket.done() for ticket in tickets)

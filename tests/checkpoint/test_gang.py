"""What a collective that fails is called."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from holdfast.components.runtime.gang import is_lost_peer


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (DistNetworkError("The client socket has timed out"), True),
        (DistStoreError("Socket Timeout"), True),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("peer access is not supported between these two devices"), False),
        (RuntimeError("CUDA error: peer access has not been enabled"), False),
        (RuntimeError("NCCL was not built"), False),
        (RuntimeError("data loader timed out"), False),
        (DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"), False),
        (RuntimeError("[enforce fail at /x/gloo/transport/tcp/pair.cc:446] op.nbytes. 8 vs 4"), False),
        (ValueError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), False),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_only_what_a_lost_rank_causes_is_called_a_lost_rank(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost

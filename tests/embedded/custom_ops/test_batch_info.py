"""BatchInfo's thirteen integers."""

from __future__ import annotations

import pytest
import torch

from auto_deploy_ext.embedded.custom_ops.attention_interface import BatchInfo


def test_counts_by_kind() -> None:
    info = BatchInfo()
    info.update([2, 7, 1, 4, 3, 3])
    assert info.get_num_sequences() == (2, 1, 3)
    assert info.get_num_tokens() == (7, 4, 3)
    assert info.get_total_num_sequences() == 6
    assert info.get_total_num_tokens() == 14
    assert info.get_absorbed_info() == (3, 11, 3)


@pytest.mark.parametrize(
    ("counts", "generate_only", "extend_only"),
    [
        ([0, 0, 0, 0, 2, 2], True, False),
        ([0, 0, 2, 6, 0, 0], False, True),
        ([0, 0, 1, 3, 1, 1], False, False),
        ([1, 4, 0, 0, 0, 0], False, False),
        ([1, 4, 1, 3, 0, 0], False, False),
    ],
)
def test_kind_of_batch(counts: list[int], generate_only: bool, extend_only: bool) -> None:
    info = BatchInfo()
    info.update(counts)
    assert info.is_generate_only() is generate_only
    assert info.is_extend_only() is extend_only


def test_serialize_gives_all_thirteen_in_place() -> None:
    info = BatchInfo()
    info.update([1, 2, 3, 4, 5, 6])
    info.update_max_seq_info(7, 8, 9, 10)
    info.update_tokens_gather_info(11, True)
    info.update_max_draft_len(13)
    assert info.serialize().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 13]
    assert info.get_max_seq_info() == (7, 8, 9, 10)
    assert info.get_num_tokens_to_gather() == 11
    assert info.is_gather_required() is True
    assert info.get_max_draft_len() == 13

    view = BatchInfo(info.serialize())
    info.update_max_draft_len(2)
    assert view.get_max_draft_len() == 2


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="wraps 13 integers, got a tensor of 12"):
        BatchInfo(torch.zeros(12, dtype=torch.int32))
    with pytest.raises(ValueError, match="six counts, got 5"):
        BatchInfo().update([1, 2, 3, 4, 5])

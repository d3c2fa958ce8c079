"""SequenceInfo: arguments, shapes, and what a new batch derives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auto_deploy_ext.embedded.custom_ops.attention_interface import BatchInfo, SequenceInfo
from auto_deploy_ext.runtime.mirrors import record_mirrors


@pytest.fixture
def info(device: torch.device) -> SequenceInfo:
    return SequenceInfo(max_seq_len=32, max_batch_size=4, max_num_tokens=24, tokens_per_block=4).to(device)


def both(info: SequenceInfo, name: str) -> list[Any]:
    """Return a buffer's values, after checking that the mirror has them too."""
    values = info.get_arg(name, truncate=True, unflatten=False).tolist()
    assert info.get_arg(name + "_host", truncate=True).tolist() == values
    return values


def nest_mixed(info: SequenceInfo, **kwargs: Any) -> None:
    """One prefill of 3 tokens, one chunk of 2 after 5 cached ones, an extend of 3 after 6, a decode after 8."""
    arguments: dict[str, Any] = {
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "cu_seqlen": [0, 3, 5, 8, 9],
        "input_pos": [0, 5, 6, 8],
        "batch_info": [2, 5, 1, 3, 1, 1],
        "slot_idx": [3, 1, 0, 2],
        "cache_loc_per_pool": [[10, 11, 12, 13, 14, 15, 16, 17, 18]],
        "cu_num_pages_per_pool": [[0, 1, 3, 6, 9]],
    }
    info.nest_sequences(**(arguments | kwargs))


# Limits and arguments.


def test_buffers_have_the_sizes_and_types_of_the_contract() -> None:
    info = SequenceInfo(max_seq_len=10, max_batch_size=1, max_num_tokens=7)
    sizes = {
        name: (info.get_arg(name, truncate=False).numel(), info.get_arg(name).dtype)
        for name in info._input_buffer.tensor_names
    }
    i32, i64 = torch.int32, torch.int64
    assert sizes == {
        "input_ids": (7, i32),
        "position_ids": (7, i64),
        "input_pos": (2, i32),
        "cu_seqlen": (3, i32),
        "cache_loc": (7, i32),
        "cu_num_pages": (3, i32),
        "last_page_len": (2, i32),
        "slot_idx": (2, i64),
        "any_prefill_use_initial_states": (1, torch.bool),
        "max_seq_info": (4, i32),
        "seq_len": (2, i32),
        "seq_len_with_cache": (2, i32),
        "prompt_lens": (2, i32),
        "use_initial_states": (2, torch.bool),
        "extra_page_per_seq": (2, i32),
        "token_gather_indices": (7, i64),
        "_gather_idx": (7, i32),
        "_gather_slot_idx": (2, i64),
        "_mask_scatter_indices": (7, i32),
    }
    assert info.tokens_per_block == 10
    assert info.available_args == {f"{name}{side}" for name in sizes for side in ("", "_host")} | {"batch_info_host"}


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive, got 8, 0, 8"):
        SequenceInfo(8, 0, 8)


def test_activation_orders_the_arguments(info: SequenceInfo) -> None:
    assert info._active_args == ("input_ids", "position_ids")
    assert info.activate_arg("cu_seqlen_host") is True
    assert info.activate_arg("batch_info_host") is True
    assert info.activate_arg("cu_seqlen_host") is False
    assert list(info.named_args) == ["input_ids", "position_ids", "cu_seqlen_host", "batch_info_host"]
    assert [a.data_ptr() for a in info.args] == [a.data_ptr() for a in info.named_args.values()]
    assert info.named_args["batch_info_host"] is info.batch_info.serialize()


def test_unknown_arguments_suggest_the_nearest(info: SequenceInfo) -> None:
    with pytest.raises(
        ValueError, match="unknown SequenceInfo argument 'cu_seqlens_host'; did you mean 'cu_seqlen_host'"
    ):
        info.activate_arg("cu_seqlens_host")
    with pytest.raises(ValueError, match="did you mean 'slot_idx'"):
        info.get_arg("slot_id")


def test_get_arg_truncates_and_unflattens(info: SequenceInfo) -> None:
    info.set_example_sequence([[1, 2, 3], [4, 5, 6]])
    assert info.get_arg("input_ids").tolist() == [[1, 2, 3], [4, 5, 6]]
    assert info.get_arg("input_ids", unflatten=False).tolist() == [1, 2, 3, 4, 5, 6]
    assert info.get_arg("input_ids", truncate=False).shape == (24,)
    assert info.get_arg("input_ids_host").shape == (24,)
    assert info.get_arg("input_ids_host", truncate=True).tolist() == [1, 2, 3, 4, 5, 6]
    assert info.get_arg("input_ids_host", unflatten=True).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert info.get_arg("cu_seqlen").shape == (5,)
    assert info.get_arg("cu_seqlen", truncate=True).tolist() == [0, 3, 6]
    assert info.get_arg("seq_len").data_ptr() == info._input_buffer.get_view("seq_len").data_ptr()


def test_shape_follows_the_kind_of_batch_once_attention_is_cached(info: SequenceInfo) -> None:
    info.set_example_sequence([[1, 2], [3, 4]])
    assert info.get_arg("input_ids").shape == (2, 2)
    info.activate_arg("seq_len")
    assert info.get_arg("input_ids").shape == (1, 4)
    info.set_capture_batch(max_draft_len=2, batch_size=3)
    assert info.get_arg("position_ids").shape == (3, 3)
    info.set_capture_batch(batch_size=3)
    assert info.get_arg("input_ids").shape == (3, 1)
    nest_mixed(info)
    assert info.get_arg("input_ids").shape == (1, 9)


def test_sequences_of_different_length_need_cached_attention(info: SequenceInfo) -> None:
    info.set_example_sequence([[1, 2], [3]])
    with pytest.raises(ValueError, match="cannot give 3 tokens the shape of 2 sequences"):
        info.get_arg("input_ids")


def test_flatten_undoes_unflatten(info: SequenceInfo) -> None:
    info.set_example_sequence([[1, 2], [3, 4]])
    tensor = torch.arange(12).view(4, 3)
    assert info.unflatten(tensor).shape == (2, 2, 3)
    assert torch.equal(info.flatten(info.unflatten(tensor)), tensor)


# Derivations.


def test_mixed_batch_derives_everything(info: SequenceInfo) -> None:
    nest_mixed(info)
    assert both(info, "input_ids") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert both(info, "position_ids") == [0, 1, 2, 5, 6, 6, 7, 8, 8]
    assert both(info, "input_pos") == [0, 5, 6, 8]
    assert both(info, "cu_seqlen") == [0, 3, 5, 8, 9]
    assert both(info, "seq_len") == [3, 2, 3, 1]
    assert both(info, "seq_len_with_cache") == [3, 7, 9, 9]
    assert both(info, "last_page_len") == [3, 3, 1, 1]
    assert both(info, "cu_num_pages") == [0, 1, 3, 6, 9]
    assert both(info, "cache_loc") == [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert both(info, "extra_page_per_seq") == [-1, -1, -1, -1]
    assert both(info, "slot_idx") == [3, 1, 0, 2]
    assert both(info, "prompt_lens") == [3, 2, 3, 1]
    assert both(info, "use_initial_states") == [False, True, True, True]
    assert both(info, "any_prefill_use_initial_states") == [True]
    assert both(info, "max_seq_info") == [32, 8, 0, 4]
    assert both(info, "token_gather_indices") == [2, 4, 5, 6, 7, 8]
    assert info.batch_info.get_num_tokens_to_gather() == 6 and info.batch_info.is_gather_required()
    assert (info.num_sequences, info.total_num_tokens) == (4, 9)
    assert not info.is_generate_only and not info.is_extend_only
    assert info._input_buffer.stale_names() == []


def test_last_page_is_full_at_a_page_boundary(info: SequenceInfo) -> None:
    info.set_example_sequence([[1] * 4, [1] * 5, [1] * 8])
    assert both(info, "last_page_len") == [4, 1, 4]
    assert both(info, "cu_num_pages") == [0, 1, 3, 5]


def test_kinds_are_guessed_from_lengths(info: SequenceInfo) -> None:
    info.set_example_sequence([[1, 2], [3], [4, 5], [6]])
    assert info.batch_info.get_num_sequences() == (3, 0, 1)
    assert info.batch_info.get_num_tokens() == (5, 0, 1)
    info.set_example_sequence([[1], [3]])
    assert info.is_generate_only


def test_one_input_pos_serves_all(info: SequenceInfo) -> None:
    info.set_example_sequence([[1, 2], [3, 4]], input_pos=6)
    assert both(info, "input_pos") == [6, 6]
    assert both(info, "position_ids") == [6, 7, 6, 7]


def test_no_initial_states_without_cached_prefill_rows(info: SequenceInfo) -> None:
    nest_mixed(info, input_pos=[0, 0, 6, 8])
    assert both(info, "any_prefill_use_initial_states") == [False]
    assert both(info, "use_initial_states") == [False, False, True, True]


def test_context_logits_and_batches_without_prefill_need_no_gathering(info: SequenceInfo) -> None:
    nest_mixed(info, gather_context_logits=True)
    assert both(info, "token_gather_indices") == list(range(9))
    assert (info.batch_info.get_num_tokens_to_gather(), info.batch_info.is_gather_required()) == (9, False)
    info.set_capture_batch(max_draft_len=1, batch_size=2)
    assert both(info, "token_gather_indices") == [0, 1, 2, 3]
    assert (info.batch_info.get_num_tokens_to_gather(), info.batch_info.is_gather_required()) == (4, False)


def test_given_values_replace_derived_ones(info: SequenceInfo) -> None:
    nest_mixed(
        info,
        prompt_lens=[9, 9, 9, 9],
        extra_page_per_seq_per_pool=[[5, 6, 7, 8]],
        seq_len_with_cache_per_pool=[[4, 4, 4, 6]],
    )
    assert both(info, "prompt_lens") == [9, 9, 9, 9]
    assert both(info, "extra_page_per_seq") == [5, 6, 7, 8]
    assert both(info, "seq_len_with_cache") == [4, 4, 4, 6]
    assert both(info, "last_page_len") == [4, 4, 4, 2]
    nest_mixed(info, last_page_len_per_pool=[[1, 2, 3, 4]])
    assert both(info, "last_page_len") == [1, 2, 3, 4]


def test_tensors_are_taken_too(info: SequenceInfo) -> None:
    counts = BatchInfo()
    counts.update([2, 5, 1, 3, 1, 1])
    nest_mixed(
        info,
        input_ids=torch.arange(9),
        cu_seqlen=torch.tensor([0, 3, 5, 8, 9]),
        input_pos=torch.tensor([0, 5, 6, 8]),
        batch_info=counts,
        slot_idx=torch.tensor([0, 1, 2, 3]),
        seq_len_with_cache_per_pool=[torch.tensor([3, 7, 9, 9])],
    )
    assert both(info, "input_ids") == list(range(9))
    assert both(info, "slot_idx") == [0, 1, 2, 3]
    assert info.batch_info.get_num_sequences() == (2, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [1, 2]}, "cu_seqlen must run from 0 to the 2 tokens"),
        ({"input_pos": [0, 1]}, "input_pos has 2 entries for 4 sequences"),
        ({"batch_info": [1, 5, 1, 3, 2, 1]}, "batch_info says prefill 1/5 tokens"),
        ({"seq_len": [1]}, "not extra arguments but derived by nest_sequences: seq_len"),
        ({"cache_loc_per_pool": [[0] * 25]}, "'cache_loc' holds at most 24 elements, got 25; raise it with"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(
    info: SequenceInfo, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        nest_mixed(info, **change)


def test_too_many_sequences_are_refused(info: SequenceInfo) -> None:
    with pytest.raises(ValueError, match="a batch of 5 sequences, but max_batch_size is 4"):
        info.set_example_sequence([[1]] * 5)


def test_active_arguments_need_data(info: SequenceInfo) -> None:
    info.activate_arg("cache_loc_host")
    info.activate_arg("slot_idx")
    with pytest.raises(AssertionError, match="active arguments without data: cache_loc_host, slot_idx"):
        info.nest_sequences([1, 2], [0, 2], 0)


def test_nothing_of_an_older_batch_stays(info: SequenceInfo) -> None:
    nest_mixed(info)
    info.nest_sequences([1, 2], [0, 2], 0)
    assert both(info, "cache_loc") == []
    assert both(info, "slot_idx") == []


# Ready-made batches.


def test_reset_is_a_generate_only_batch_without_history(info: SequenceInfo) -> None:
    nest_mixed(info)
    info.reset()
    assert info.is_generate_only and info.num_sequences == 4
    assert both(info, "input_pos") == [0, 0, 0, 0]
    assert both(info, "seq_len_with_cache") == [1, 1, 1, 1]
    assert both(info, "cache_loc") == [0, 1, 2, 3]


def test_new_interface_is_reset() -> None:
    info = SequenceInfo(8, 3, 8)
    assert info.is_generate_only and info.num_sequences == 3


def test_capture_batch_is_extend_only_with_drafts(info: SequenceInfo) -> None:
    info.set_capture_batch(max_draft_len=4)
    assert info.batch_info.get_num_sequences() == (0, 4, 0)
    assert info.total_num_tokens == 20 and info.is_extend_only
    assert info.batch_info.get_max_draft_len() == 4
    assert both(info, "cu_seqlen") == [0, 5, 10, 15, 20]
    assert both(info, "cu_num_pages") == [0, 2, 4, 6, 8]
    info.set_capture_batch(max_draft_len=7)
    assert info.num_sequences == 3, "as many rows as the tokens allow"
    info.set_capture_batch(batch_size=2)
    assert info.batch_info.get_num_sequences() == (0, 0, 2)


def test_example_batch_and_largest_batch(info: SequenceInfo) -> None:
    info.set_example_sequence()
    assert info.get_arg("input_ids").shape == (2, 4)
    info.set_max_num_tokens_sample()
    assert info.get_arg("input_ids").shape == (4, 6)
    info.set_example_sequence([1, 2, 3], cu_seqlen=[0, 1, 3])
    assert both(info, "seq_len") == [1, 2]


def test_example_pages_stay_inside_the_cache(info: SequenceInfo) -> None:
    info.update_cache_information(3)
    info.set_example_sequence([[1] * 8, [1] * 8])
    assert both(info, "cache_loc") == [0, 1, 2, 0]


def test_cache_information_makes_room_for_all_pages(info: SequenceInfo) -> None:
    with pytest.raises(RuntimeError, match="call update_cache_information first"):
        _ = info.num_blocks
    info.register_window_groups([8, 16])
    with pytest.raises(ValueError, match="at least one page, got num_blocks=-1"):
        info.update_cache_information(-1)
    info.update_cache_information(50, block_offset_multiplier=3)
    assert info.num_blocks == 50
    assert info.batch_info.get_max_seq_info() == (32, 8, 3, 4)
    assert info._input_buffer.get_capacity("cache_loc") == 4 * (8 + 1)
    assert info._input_buffer.get_capacity("cache_loc_g1") == 4 * (8 + 1)


# Window groups.


def test_window_groups_add_pools_of_their_own(info: SequenceInfo) -> None:
    info.register_window_groups([8, 16, 32])
    assert info.num_pools == 3
    for name in ("cache_loc", "cu_num_pages", "last_page_len", "extra_page_per_seq", "seq_len_with_cache"):
        for pool in ("_g1", "_g2"):
            assert {name + pool, name + pool + "_host"} <= info.available_args
            assert both(info, name + pool) == both(info, name)
    assert info._input_buffer.stale_names() == []


def test_pools_not_given_repeat_pool_0(info: SequenceInfo) -> None:
    info.register_window_groups([8, 16, 32])
    nest_mixed(
        info,
        cache_loc_per_pool=[[1, 2, 3, 4], [5, 6, 7]],
        cu_num_pages_per_pool=[[0, 1, 2, 3, 4], [0, 1, 2, 3, 3]],
        seq_len_with_cache_per_pool=[[3, 7, 9, 9], [3, 4, 4, 4]],
    )
    assert both(info, "cache_loc") == both(info, "cache_loc_g2") == [1, 2, 3, 4]
    assert both(info, "cache_loc_g1") == [5, 6, 7]
    assert both(info, "cu_num_pages_g1") == [0, 1, 2, 3, 3]
    assert both(info, "seq_len_with_cache_g1") == [3, 4, 4, 4]
    assert both(info, "last_page_len_g1") == [3, 4, 4, 4]
    assert both(info, "last_page_len_g2") == [3, 3, 1, 1]


def test_window_groups_are_registered_once(info: SequenceInfo) -> None:
    info.register_window_groups([8, 16])
    info.register_window_groups([8, 16])
    assert info.num_pools == 2
    with pytest.raises(ValueError, match=r"window groups \[8, 16\] are registered already, got \[4\]"):
        info.register_window_groups([4])


# Logits.


def test_gathering_picks_the_tokens_that_get_logits(info: SequenceInfo, device: torch.device) -> None:
    info.activate_arg("seq_len")
    nest_mixed(info)
    hidden = torch.arange(18, device=device).view(1, 9, 2)
    assert info.maybe_gather_and_squeeze(hidden)[:, 0].tolist() == [4, 8, 10, 12, 14, 16]
    nest_mixed(info, gather_context_logits=True)
    assert torch.equal(info.maybe_gather_and_squeeze(hidden), hidden[0])


def test_unnest_splits_by_sequence(info: SequenceInfo) -> None:
    info.activate_arg("seq_len")
    nest_mixed(info)
    parts = info.unnest_sequences(torch.arange(9).view(1, 9))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6, 7], [8]]


# Extra arguments.


def test_extra_arguments_come_after_the_active_ones(info: SequenceInfo, device: torch.device) -> None:
    info.set_example_sequence([[1]], pixels=torch.ones(2), parts=[torch.zeros(1), torch.ones(2)], nothing=None)
    assert list(info.named_args) == ["input_ids", "position_ids", "pixels", "parts"]
    assert info.get_arg("parts").tolist() == [0, 1, 1]
    assert info.get_arg("pixels").device.type == device.type
    info.activate_arg("pixels")
    with pytest.raises(AssertionError, match="active arguments without data: pixels"):
        info.set_example_sequence([[1]])


# Overlap inputs.


def test_late_tokens_are_scattered_into_the_batch(info: SequenceInfo, device: torch.device) -> None:
    previous = torch.tensor([[50, 51], [60, 61]], device=device, dtype=torch.int32)
    nest_mixed(info, _gather_idx=[3, 0], _mask_scatter_indices=[5, 8], _ungathered_input_ids=previous)
    assert info.get_arg("input_ids", unflatten=False).tolist() == [1, 2, 3, 4, 5, 61, 7, 8, 50]
    assert info.get_arg("input_ids_host", truncate=True).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert info._input_buffer.stale_names() == ["input_ids"]
    with pytest.raises(ValueError, match="2 tokens to gather for 1 places"):
        nest_mixed(info, _gather_idx=[3, 0], _mask_scatter_indices=[5], _ungathered_input_ids=previous)


def test_late_lengths_offset_the_rows_after_the_prefills(info: SequenceInfo, device: torch.device) -> None:
    info.activate_arg("cache_loc")
    info.activate_arg("input_pos_host")
    new_lens = torch.tensor([1, 3, 2], device=device, dtype=torch.int32)
    with record_mirrors(info) as transfers:
        nest_mixed(info, _gather_slot_idx=[1, 2], _ungathered_new_lens=new_lens)
    assert transfers == []
    assert "input_pos" in info._input_buffer.stale_names()
    info._input_buffer.copy_to_host()
    assert both(info, "input_pos") == [0, 5, 8, 9]
    assert both(info, "position_ids") == [0, 1, 2, 5, 6, 8, 9, 10, 9]
    assert both(info, "seq_len_with_cache") == [3, 7, 11, 10]
    assert both(info, "last_page_len") == [3, 3, 3, 2]


def test_late_lengths_bring_host_prepare_functions_what_they_read_and_nothing_else(info, device) -> None:
    info.activate_arg("cache_loc")
    info.activate_arg("input_pos_host")
    seen: list[list[int]] = []
    info.register_host_prepare_for_attention_forward(
        lambda seq_len_with_cache_host: seen.append(seq_len_with_cache_host[:4].tolist()), ["seq_len_with_cache_host"]
    )
    with record_mirrors(info) as transfers:
        nest_mixed(info, _gather_slot_idx=[1], _ungathered_new_lens=torch.tensor([1, 3], device=device))
    assert [(transfer.names, transfer.trigger) for transfer in transfers] == [
        (("seq_len_with_cache_host",), "offset_pos_and_cache_")
    ]
    assert seen == [[3, 7, 11, 9]]


# Host-prepare functions.


def test_host_prepare_functions_see_the_finished_batch(info: SequenceInfo, device: torch.device) -> None:
    seen: list[tuple[str, list[int], list[int]]] = []

    def plan(cu_seqlen_host: torch.Tensor, batch_info_host: torch.Tensor) -> None:
        seen.append(("plan", cu_seqlen_host[:5].tolist(), batch_info_host[:6].tolist()))

    def count(seq_len_with_cache_host: torch.Tensor) -> None:
        seen.append(("count", seq_len_with_cache_host[:4].tolist(), []))

    info.register_host_prepare_for_attention_forward(plan, ["cu_seqlen_host", "batch_info_host"])
    info.register_host_prepare_for_attention_forward(count, ["seq_len_with_cache_host"])
    assert info._active_host_prep_args == {"cu_seqlen_host", "batch_info_host", "seq_len_with_cache_host"}
    assert info._active_args == ("input_ids", "position_ids")
    nest_mixed(info, _gather_slot_idx=[0], _ungathered_new_lens=torch.tensor([3], device=device))
    expected = [("plan", [0, 3, 5, 8, 9], [2, 5, 1, 3, 1, 1]), ("count", [3, 7, 11, 9], [])]
    assert seen == expected
    info.run_host_prepare_for_attention_forward()
    assert seen == expected * 2


def test_host_prepare_functions_name_existing_arguments(info: SequenceInfo) -> None:
    with pytest.raises(ValueError, match="unknown SequenceInfo argument 'seqlen_host'"):
        info.register_host_prepare_for_attention_forward(print, ["seqlen_host"])
    info.register_host_prepare_for_attention_forward(print, ["cache_loc_host"])
    with pytest.raises(AssertionError, match="without data: cache_loc_host"):
        info.nest_sequences([1], [0, 1], 0)

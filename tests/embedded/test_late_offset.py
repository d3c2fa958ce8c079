"""A batch moved on the device after it was staged: the host repeats what it was told, and nothing that it cannot."""

from __future__ import annotations

import pytest
import torch

from auto_deploy_ext import record_mirrors, sanitize
from auto_deploy_ext.embedded.custom_ops.attention_interface import SequenceInfo
from auto_deploy_ext.embedded.custom_ops.metadata_mutations import OFFSET_WRITES
from auto_deploy_ext.runtime import host_mirrors, late_offset
from auto_deploy_ext.runtime.refresh import ensure_fresh

OFFSET = [0, -2, -3]
READ = ("cu_num_pages_host", "last_page_len_host", "seq_len_with_cache_host", "use_initial_states_host")


def moved_batch() -> SequenceInfo:
    """A prompt and two rows that were moved back, one of them by a page."""
    info = SequenceInfo(max_seq_len=64, max_batch_size=3, max_num_tokens=32, tokens_per_block=4)
    info.update_cache_information(40)
    for name in ("cache_loc", *READ):
        info.activate_arg(name)
    info.nest_sequences(
        [1, 2, 3, 4, 5, 6, 7],
        cu_seqlen=[0, 3, 5, 7],
        input_pos=[0, 8, 7],
        batch_info=[1, 3, 2, 4, 0, 0],
        slot_idx=[0, 1, 2],
        cache_loc_per_pool=[[9, 1, 2, 3, 4, 5, 6]],
        cu_num_pages_per_pool=[[0, 1, 4, 7]],
        extra_page_per_seq_per_pool=[[-1, -1, -1]],
        _gather_slot_idx=[1, 0],
        _gather_idx=[],
        _mask_scatter_indices=[],
        _ungathered_new_lens=torch.tensor([-2, -1], dtype=torch.int32),
    )
    return info


def announce(info: SequenceInfo, asked: list[bool]) -> None:
    def operand() -> tuple[torch.Tensor, bool]:
        asked.append(True)
        return torch.tensor(OFFSET, dtype=torch.int32), True

    late_offset.announce(info, OFFSET_WRITES, operand)


def both(info: SequenceInfo, name: str) -> tuple[list[int], list[int]]:
    """Both sides, as far as they are in use."""
    count = {"cu_num_pages": 4, "cache_loc": int(info.get_arg("cu_num_pages")[3])}.get(name, 3)
    return info.get_arg(name)[:count].tolist(), info._input_buffer.get_host_memory(name)[:count].tolist()


def test_the_first_reader_has_every_mirror_that_the_offset_left_behind_repeated() -> None:
    info, asked = moved_batch(), []
    assert info.get_arg("cu_num_pages")[:4].tolist() == [0, 1, 3, 5]
    announce(info, asked)
    with record_mirrors(info) as transfers, sanitize(info):
        ensure_fresh(info, ("seq_len_host",))
        assert not asked, "it reads nothing that was left behind"
        ensure_fresh(info, READ[:1])
    for name in ("input_pos", "cu_num_pages", "last_page_len", "seq_len_with_cache", "cache_loc", "use_initial_states"):
        device, host = both(info, name)
        assert host == device, name
    assert host_mirrors.stale_names(info) == ()
    assert asked == [True]
    assert [(t.names, t.nbytes, t.waited) for t in transfers] == [((late_offset.TRIGGER,), 12, True)]
    with record_mirrors(info) as transfers:
        ensure_fresh(info, READ)
    assert transfers == [] and asked == [True]


@pytest.mark.parametrize("meanwhile", ["device", "mirror", "withdrawn"])
def test_what_the_offset_alone_does_not_explain_is_copied(meanwhile: str) -> None:
    info, asked = moved_batch(), []
    announce(info, asked)
    if meanwhile == "device":
        info.offset_pos_and_cache_(torch.ones(3, dtype=torch.int32), active_args_override=set())
    elif meanwhile == "mirror":
        host_mirrors.move(info, ("last_page_len_host",))
    else:
        late_offset.withdraw(info)
    with record_mirrors(info) as transfers, sanitize(info):
        ensure_fresh(info, READ)
    assert not asked
    left = tuple(name for name in READ if meanwhile != "mirror" or name != "last_page_len_host")
    assert [transfer.names for transfer in transfers] == [left]
    assert all(both(info, name.removesuffix("_host"))[0] == both(info, name.removesuffix("_host"))[1] for name in READ)

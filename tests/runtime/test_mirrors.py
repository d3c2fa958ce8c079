"""record_mirrors: what it reports; on a host whose buffer reports nothing, see test_host_mirrors."""

from __future__ import annotations

import pytest
import torch

from auto_deploy_ext.embedded.custom_ops.attention_interface import SequenceInfo
from auto_deploy_ext.embedded.shim.interface import CachedSequenceInterface
from auto_deploy_ext.runtime.mirrors import Transfer, record_mirrors


@pytest.fixture
def info() -> SequenceInfo:
    info = SequenceInfo(max_seq_len=8, max_batch_size=2, max_num_tokens=8)
    info.activate_arg("cu_seqlen_host")
    info.activate_arg("input_pos_host")
    info.set_example_sequence([[1, 2, 3], [4, 5]])
    return info


def test_each_transfer_tells_names_bytes_wait_and_trigger(info: SequenceInfo) -> None:
    with record_mirrors(info) as transfers:
        info.switch_to_generate_(active_args_override={"cu_seqlen_host", "input_pos_host"})
        info.offset_pos_and_cache_(torch.tensor([1, 1]), active_args_override={"cu_seqlen_host", "input_pos_host"})
        ticket = info._input_buffer.start_copy_to_host(["cu_seqlen"], trigger="draft_model")
        assert transfers[2].waited is False
        ticket.wait()
    assert transfers == [
        Transfer(("cu_seqlen_host", "input_pos_host"), 3 * 4 + 2 * 4, True, "switch_to_generate_"),
        Transfer(("input_pos_host",), 2 * 4, True, "offset_pos_and_cache_"),
        Transfer(("cu_seqlen_host",), 3 * 4, True, "draft_model"),
    ]


def test_nothing_is_recorded_outside_the_context(info: SequenceInfo) -> None:
    with record_mirrors(info) as transfers:
        pass
    info._input_buffer.copy_to_host()
    assert transfers == []
    assert info._input_buffer.transfer_observers == []


def test_recorders_nest(info: SequenceInfo) -> None:
    with record_mirrors(info) as outer:
        with record_mirrors(info) as inner:
            info._input_buffer.copy_names_to_host(["seq_len"])
        info._input_buffer.copy_names_to_host(["cu_seqlen"])
    assert [transfer.names for transfer in inner] == [("seq_len_host",)]
    assert [transfer.names for transfer in outer] == [("seq_len_host",), ("cu_seqlen_host",)]


def test_recorders_that_start_together_close_apart(info: SequenceInfo) -> None:
    with record_mirrors(info) as outer:
        with record_mirrors(info):
            pass
        info._input_buffer.copy_names_to_host(["seq_len"])
    assert len(outer) == 1


def test_recording_ends_after_an_error(info: SequenceInfo) -> None:
    with pytest.raises(ZeroDivisionError), record_mirrors(info):
        raise ZeroDivisionError
    assert info._input_buffer.transfer_observers == []


def test_an_interface_is_taken_for_its_info() -> None:
    csi = CachedSequenceInterface(max_seq_len=8, max_batch_size=2, max_num_tokens=8, device="cpu")
    with record_mirrors(csi) as transfers:
        csi.info._input_buffer.copy_names_to_host(["seq_len_host"])
    assert [transfer.names for transfer in transfers] == [("seq_len_host",)]

"""InputBuffer: layout, sides, lengths, versions, and copies that may be overtaken."""

from __future__ import annotations

import pytest
import torch

from auto_deploy_ext.embedded.custom_ops.attention_interface import InputBuffer
from auto_deploy_ext.runtime.mirrors import Transfer


@pytest.fixture
def buffer(device: torch.device) -> InputBuffer:
    specs = [
        ("flag", 3, torch.bool),
        ("lengths", 4, torch.int32),
        ("pages", 6, torch.int32, True),
        ("positions", 5, torch.int64),
    ]
    buffer = InputBuffer(specs).to(device)
    for name in buffer.tensor_names:
        buffer.stage(name, [1, 0])
    buffer.copy_to_device()
    return buffer


def host(buffer: InputBuffer, name: str) -> list[int]:
    return buffer.get_host_view(name, truncate=True).tolist()


def on_device(buffer: InputBuffer, name: str) -> list[int]:
    return buffer.get_view(name, truncate=True).tolist()


def set_device(buffer: InputBuffer, name: str, values: list[int]) -> None:
    buffer.copy_(name, torch.tensor(values, device=buffer.device))


def observed(buffer: InputBuffer) -> list[Transfer]:
    transfers: list[Transfer] = []
    buffer.transfer_observers.append(transfers.append)
    return transfers


def test_packed_tensors_are_aligned_in_one_memory_and_truncatable_ones_apart(buffer: InputBuffer) -> None:
    base = buffer.get_view("flag").data_ptr()
    assert buffer.get_view("lengths").data_ptr() - base == 4
    assert buffer.get_view("positions").data_ptr() - base == 24
    pages = buffer.get_view("pages").data_ptr()
    assert not base <= pages < base + 64
    assert buffer.tensor_names == ["flag", "lengths", "pages", "positions"]


def test_views_have_capacity_or_current_length(buffer: InputBuffer) -> None:
    assert buffer.get_view("lengths").shape == buffer.get_host_view("lengths").shape == (4,)
    assert (
        buffer.get_view("lengths", truncate=True).shape == buffer.get_host_view("lengths", truncate=True).shape == (2,)
    )
    assert buffer.get_capacity("lengths") == 4
    assert buffer.get_current_length("lengths") == 2
    assert buffer.get_view("flag").dtype == torch.bool and buffer.get_view("positions").dtype == torch.int64


def test_sides_live_where_they_should(buffer: InputBuffer, device: torch.device) -> None:
    assert buffer.device.type == buffer.get_view("pages").device.type == device.type
    assert buffer.host_device == buffer.get_host_view("pages").device == torch.device("cpu")


def test_stage_writes_the_mirror_alone_until_copied(buffer: InputBuffer) -> None:
    buffer.stage("lengths", [7, 8, 9])
    assert host(buffer, "lengths") == [7, 8, 9]
    assert on_device(buffer, "lengths") == [1, 0, 0]
    buffer.copy_to_device()
    assert on_device(buffer, "lengths") == [7, 8, 9]


def test_stage_takes_tensors_and_fills_the_rest(buffer: InputBuffer) -> None:
    buffer.stage("positions", torch.tensor([[4], [5]], dtype=torch.int32), fill_value=-1)
    assert buffer.get_host_view("positions").tolist() == [4, 5, -1, -1, -1]
    assert buffer.get_current_length("positions") == 2


def test_too_much_data_is_refused(buffer: InputBuffer) -> None:
    with pytest.raises(ValueError, match="'lengths' holds at most 4 elements, got 5"):
        buffer.stage("lengths", [0] * 5)
    with pytest.raises(ValueError, match="'pages' holds at most 6 elements, got 7; raise it with"):
        buffer.stage("pages", [0] * 7)


def test_truncatable_tensors_travel_up_to_their_length(buffer: InputBuffer, device: torch.device) -> None:
    buffer.get_view("pages").copy_(torch.arange(6, device=device))
    buffer.stage("pages", [5, 6, 7])
    buffer.copy_to_device()
    assert buffer.get_view("pages").tolist() == [5, 6, 7, 3, 4, 5]


def test_mirror_may_be_written_right_after_the_copy_to_the_device(buffer: InputBuffer) -> None:
    for value in range(8):  # more often than there are staging slots
        buffer.stage("lengths", [value] * 4)
        buffer.copy_to_device()
        snapshot = buffer.get_view("lengths").clone()
        buffer.get_host_view("lengths").fill_(-1)
        assert snapshot.tolist() == [value] * 4


def test_copy_writes_only_the_side_of_the_source(buffer: InputBuffer, device: torch.device) -> None:
    buffer.copy_("lengths", torch.tensor([3, 4, 5], device=device))
    assert on_device(buffer, "lengths") == [3, 4, 5]
    assert host(buffer, "lengths") == [1, 0, 0]
    buffer.copy_("lengths_host", torch.tensor([6]))
    assert buffer.get_view("lengths")[:3].tolist() == [3, 4, 5]
    assert host(buffer, "lengths") == [6]
    assert buffer.get_current_length("lengths") == 1


def test_unknown_names_suggest_the_nearest(buffer: InputBuffer) -> None:
    with pytest.raises(KeyError, match="unknown metadata tensor 'lenghts'; did you mean 'lengths'"):
        buffer.get_view("lenghts")


def test_added_and_resized_tensors_keep_their_contents(buffer: InputBuffer) -> None:
    buffer.add_truncatable_tensor("pages_g1", 2, torch.int32)
    buffer.stage("pages_g1", [3, 4])
    buffer.copy_to_device()
    buffer.resize("pages_g1", 5)
    assert buffer.get_capacity("pages_g1") == 5
    assert on_device(buffer, "pages_g1") == host(buffer, "pages_g1") == [3, 4]
    with pytest.raises(ValueError, match="only truncatable tensors"):
        buffer.resize("lengths", 9)
    with pytest.raises(ValueError, match="has a tensor 'pages' already"):
        buffer.add_truncatable_tensor("pages", 2, torch.int32)


# Versions.


def test_staging_makes_the_mirror_newer_and_the_copy_both_equal(buffer: InputBuffer) -> None:
    before = buffer.device_version["lengths"]
    buffer.stage("lengths", [2])
    assert buffer.mirror_version["lengths"] > before == buffer.device_version["lengths"]
    assert buffer.stale_names() == []
    buffer.copy_to_device()
    assert buffer.mirror_version["lengths"] == buffer.device_version["lengths"] > before


def test_device_writes_make_the_mirror_stale_until_it_is_copied(buffer: InputBuffer) -> None:
    set_device(buffer, "positions", [1, 2])
    buffer.bump_device("pages")
    assert buffer.stale_names() == ["pages", "positions"]
    buffer.copy_names_to_host(["pages_host"])
    assert buffer.stale_names() == ["positions"]
    buffer.copy_to_host()
    assert buffer.stale_names() == []


def test_mirror_keeps_the_version_that_the_device_had_when_the_transfer_started(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [1, 1])
    started = buffer.device_version["lengths"]
    ticket = buffer.start_copy_to_host(["lengths"])
    set_device(buffer, "lengths", [2, 2])
    ticket.wait()
    assert host(buffer, "lengths") == [1, 1]
    assert buffer.mirror_version["lengths"] == started < buffer.device_version["lengths"]
    assert buffer.stale_names() == ["lengths"]


# Device to host.


def test_whole_copy_brings_everything_and_reports_it(buffer: InputBuffer) -> None:
    for name in buffer.tensor_names:
        set_device(buffer, name, [0, 1, 1])
    transfers = observed(buffer)
    assert buffer.copy_to_host(trigger="somebody") is None
    assert {name: host(buffer, name) for name in buffer.tensor_names} == {key: [0, 1, 1] for key in buffer.tensor_names}
    packed = 3 + 1 + 4 * 4 + 4 + 5 * 8  # flag, padding, lengths, padding, positions
    names = ("flag_host", "lengths_host", "pages_host", "positions_host")
    assert transfers == [Transfer(names, packed + 3 * 4, waited=True, trigger="somebody")]


def test_named_copy_brings_exactly_the_named_ones(buffer: InputBuffer) -> None:
    for name in buffer.tensor_names:
        set_device(buffer, name, [0, 1, 1])
    transfers = observed(buffer)
    buffer.copy_names_to_host(["positions_host", "flag", "pages"], trigger="t")
    assert host(buffer, "positions") == host(buffer, "pages") == [0, 1, 1]
    assert host(buffer, "flag") == [False, True, True]
    assert host(buffer, "lengths") == [1, 0, 0]
    assert transfers == [Transfer(("flag_host", "pages_host", "positions_host"), 3 + 12 + 24, waited=True, trigger="t")]


def test_no_names_no_transfer(buffer: InputBuffer) -> None:
    transfers = observed(buffer)
    assert buffer.copy_names_to_host([]) is None
    assert transfers == []
    with pytest.raises(ValueError, match="at least one name"):
        buffer.start_copy_to_host([])
    with pytest.raises(TypeError, match="got the string 'flag'"):
        buffer.copy_names_to_host("flag")


def test_whole_copy_overwrites_a_mirror_that_was_written_alone(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [5, 5])
    buffer.copy_("lengths_host", torch.tensor([6, 6]))
    buffer.copy_to_host()
    assert host(buffer, "lengths") == [5, 5]
    assert buffer.mirror_version["lengths"] == buffer.device_version["lengths"]


@pytest.mark.parametrize("names", [["lengths"], ["lengths", "flag"]])
def test_named_copy_overwrites_a_mirror_that_was_written_alone(buffer: InputBuffer, names: list[str]) -> None:
    set_device(buffer, "lengths", [5, 5])
    buffer.copy_("lengths_host", torch.tensor([6, 6]))
    buffer.copy_names_to_host(names)
    assert host(buffer, "lengths") == [5, 5]


def test_started_copy_is_applied_when_waited_for(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [4, 5, 6])
    set_device(buffer, "positions", [7])
    transfers = observed(buffer)
    ticket = buffer.start_copy_to_host({"lengths_host", "positions"}, trigger="consumer")
    assert transfers == [Transfer(("lengths_host", "positions_host"), 3 * 4 + 8, waited=False, trigger="consumer")]
    assert host(buffer, "lengths") == [1, 0, 0]
    assert ticket.wait() == ("lengths_host", "positions_host")
    assert host(buffer, "lengths") == [4, 5, 6]
    assert host(buffer, "positions") == [7]
    assert transfers[0].waited is True
    assert ticket.done and ticket.wait() == ()


def test_started_copy_carries_the_value_at_its_start(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [4, 5])
    ticket = buffer.start_copy_to_host(["lengths"])
    set_device(buffer, "lengths", [8, 8])
    ticket.wait()
    assert host(buffer, "lengths") == [4, 5]


def test_copy_overtaken_by_a_newer_batch_is_dropped(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [4, 5])
    transfers = observed(buffer)
    ticket = buffer.start_copy_to_host(["lengths"])
    buffer.stage("lengths", [8, 9])
    assert ticket.overtaken()
    assert ticket.wait() == ()
    assert host(buffer, "lengths") == [8, 9]
    assert transfers[0].waited is False
    buffer.copy_to_device()
    assert on_device(buffer, "lengths") == [8, 9]


def test_only_overtaken_tensors_of_a_copy_are_dropped(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [4, 5])
    set_device(buffer, "positions", [4, 5])
    ticket = buffer.start_copy_to_host(["lengths", "positions"])
    buffer.stage("lengths", [8, 9])
    assert ticket.wait() == ("positions_host",)
    assert host(buffer, "lengths") == [8, 9]
    assert host(buffer, "positions") == [4, 5]


def test_older_copy_does_not_undo_a_newer_one(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [1, 1])
    older = buffer.start_copy_to_host(["lengths"])
    set_device(buffer, "lengths", [2, 2])
    newer = buffer.start_copy_to_host(["lengths"])
    newer.wait()
    older.wait()
    assert host(buffer, "lengths") == [2, 2]


def test_copies_under_way_do_not_share_memory(buffer: InputBuffer) -> None:
    tickets = []
    for value in range(5):
        set_device(buffer, "lengths", [value] * 4)
        set_device(buffer, "positions", [value])
        tickets.append((value, buffer.start_copy_to_host(["lengths", "positions"])))
    for value, ticket in tickets:
        ticket.wait()
        assert host(buffer, "lengths") == [value] * 4


def test_non_blocking_whole_copy_is_applied_when_a_mirror_is_asked_for(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [4, 5])
    set_device(buffer, "pages", [6])
    mirror = buffer.get_host_view("lengths")
    transfers = observed(buffer)
    assert buffer.copy_to_host(non_blocking=True) is not None
    assert transfers[0].waited is False
    assert mirror[:2].tolist() == [1, 0]
    assert host(buffer, "pages") == [6]
    assert mirror[:2].tolist() == [4, 5]


def test_non_blocking_copy_never_reaches_the_next_batch(buffer: InputBuffer) -> None:
    set_device(buffer, "lengths", [4, 5])
    buffer.copy_to_host(non_blocking=True)
    buffer.copy_names_to_host(["lengths"], non_blocking=True)
    buffer.stage("lengths", [8, 9])
    buffer.copy_to_device()
    assert host(buffer, "lengths") == on_device(buffer, "lengths") == [8, 9]


def test_empty_tensors_can_travel(buffer: InputBuffer) -> None:
    set_device(buffer, "pages", [])
    ticket = buffer.start_copy_to_host(["pages"])
    assert ticket.transfer.nbytes == 0
    assert ticket.wait() == ("pages_host",)
    buffer.copy_names_to_host(["pages", "flag"])
    assert host(buffer, "pages") == []


def test_cpu_buffers_never_call_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("CUDA was called for a CPU buffer")

    for name in ("_lazy_init", "current_device", "current_stream", "Event", "synchronize", "is_available"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    buffer = InputBuffer([("a", 4, torch.int32), ("b", 4, torch.int64, True)])
    buffer.to("cpu")
    buffer.stage("a", [1, 2])
    buffer.copy_to_device()
    buffer.copy_("b", torch.tensor([3]))
    buffer.copy_to_host()
    buffer.copy_names_to_host(["a", "b"])
    buffer.start_copy_to_host(["a", "b"]).wait()
    assert host(buffer, "a") == [1, 2]
    assert host(buffer, "b") == [3]


def test_views_that_inference_mode_asked_for_first_can_be_written_outside_of_it() -> None:
    buffer = InputBuffer([("seq_len", 4, torch.int32)])
    with torch.inference_mode():
        views = buffer.get_view("seq_len"), buffer.get_host_view("seq_len")
    for view, kept in zip(views, (buffer.get_view("seq_len"), buffer.get_host_view("seq_len")), strict=True):
        assert not view.is_inference()
        kept.fill_(7)
        assert view.tolist() == [7] * 4

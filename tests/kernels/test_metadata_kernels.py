"""The kernels of metadata, run by Triton's interpreter, give what the torch reference gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auto_deploy_ext import kernels
from auto_deploy_ext.runtime import fused_launch, fused_mutations
from auto_deploy_ext.runtime.fused_mutations import COPY_NAME, OFFSET_NAME, SWITCH_NAME, Part
from tests.metadata_runs import Batch, Row, fused, in_use, one_by_one, runs

triton = pytest.importorskip("triton")
pytest.importorskip("tests.triton_interpreter")

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or triton.knobs.runtime.interpret), reason="needs a GPU or TRITON_INTERPRET=1"
)

OFF, ON = False, True


def run_both(
    batch: Batch, parts: Sequence[Part], operands: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after a run, mutation by mutation and by the kernel."""
    by_kernel, expected = batch.make(), batch.make()
    one_by_one(expected, parts, operands)
    with monkeypatch.context() as patch:
        patch.setattr(fused_launch, "runs_kernels", lambda device: True)
        patch.setattr(fused_mutations, "_one_by_one", _never)
        fused(by_kernel, parts, operands)
    return in_use(by_kernel), in_use(expected)


def _never(*args: Any) -> None:
    raise AssertionError("the run was not fused")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_a_run_in_one_launch_leaves_what_its_mutations_leave(run: Any) -> None:
    batch, parts, operands = run
    with pytest.MonkeyPatch.context() as patch:
        got, expected = run_both(batch, parts, operands, patch)
    assert got == expected


@pytest.mark.parametrize(
    "change",
    [[4, 4, 4, 4], [-3, -3, -3, -3], [4, -3, 4, -3], [-3, 4, -3, 4], [0, 0, 0, 0], [0, 0, -3, 4], [1, -1, 2, -2]],
    ids=str,
)
@pytest.mark.parametrize("chunk", [2, 512])
def test_pages_move_through_a_table_of_many_chunks(
    change: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at the first and at the last place of a page, so that each offset crosses; the extra pages count."""
    monkeypatch.setattr(fused_launch, "_CHUNK", chunk)
    held = (16, 13, 15, 14) if max(change) > 0 else (13, 13, 14, 13)
    batch = Batch(tuple(Row("decode", 1, length - 1) for length in held), 2, (ON, OFF))
    operand = torch.tensor(change, dtype=torch.int32)
    got, expected = run_both(batch, [Part(OFFSET_NAME)], [operand], monkeypatch)
    assert got == expected


def test_a_page_table_that_is_full_keeps_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    got = Batch((Row("decode", 1, 15), Row("decode", 1, 15)), 1, (ON,)).make()
    buffer = got._input_buffer
    buffer._lengths["cache_loc"] = 8
    buffer.resize("cache_loc", 9)
    monkeypatch.setattr(fused_launch, "runs_kernels", lambda device: True)
    fused(got, [Part(OFFSET_NAME)], [torch.tensor([1, 1], dtype=torch.int32)])
    assert buffer.get_view("cache_loc").tolist() == [0, 7, 14, 21, 1000, 28, 35, 42, 49]
    assert buffer.get_view("cu_num_pages")[:3].tolist() == [0, 5, 10]
    assert buffer.get_current_length("cache_loc") == 9


def test_a_generate_only_batch_is_not_switched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch((Row("decode", 1, 14), Row("decode", 1, 15)), 1, (ON,))
    got, expected = run_both(batch, [Part(SWITCH_NAME)], [], monkeypatch)
    assert got == expected
    parts = [Part(SWITCH_NAME), Part(COPY_NAME, "input_ids"), Part(OFFSET_NAME)]
    operands = [torch.tensor([8, 9]), torch.tensor([1, 1], dtype=torch.int32)]
    got, expected = run_both(batch, parts, operands, monkeypatch)
    assert got == expected
    assert got["input_ids"] == [8, 9]


def test_flags_are_copied_as_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch((Row("extend", 2, 14), Row("extend", 2, 15)), 1, (ON,))
    for flags in (torch.tensor([True, False]), torch.tensor([256, 0]), torch.tensor([0, 3], dtype=torch.int32)):
        got, expected = run_both(batch, [Part(COPY_NAME, "use_initial_states")], [flags], monkeypatch)
        assert got == expected


def test_operands_with_strides_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch((Row("extend", 2, 14), Row("extend", 2, 15)), 1, (ON,))
    strided = torch.tensor([[1, 7], [-3, 7]], dtype=torch.int32)[:, 0]
    ids = torch.arange(8, dtype=torch.int32).view(4, 2).t()[:, ::2]
    got, expected = run_both(batch, [Part(COPY_NAME, "input_ids"), Part(OFFSET_NAME)], [ids, strided], monkeypatch)
    assert got == expected


def test_memory_that_has_moved_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    info, expected = (Batch((Row("decode", 1, 15), Row("decode", 1, 14)), 2, (ON, ON)).make() for _ in range(2))
    monkeypatch.setattr(fused_launch, "runs_kernels", lambda device: True)
    monkeypatch.setattr(fused_mutations, "_one_by_one", _never)
    one = torch.tensor([1, 1], dtype=torch.int32)
    for each in range(2):
        if each:
            for other in (info, expected):
                other._input_buffer.resize("cache_loc_g1", 900)
        fused(info, [Part(OFFSET_NAME)], [one])
        expected.offset_pos_and_cache_(one)
    assert in_use(info) == in_use(expected)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_rows_are_gathered(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(), (1,), (5,), (3, 4), (1030,)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    source = torch.arange(7 * max(1, torch.Size(shape).numel())).view(7, *shape).to(dtype)
    if data.draw(st.booleans()):
        source = source[1:]
    if shape and data.draw(st.booleans()):
        source = source[..., ::2]
    index = data.draw(st.lists(st.integers(0, source.shape[0] - 1), max_size=9))
    index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    taken = torch.tensor(index, dtype=index_dtype)
    got = fused_launch.launch_gather(source, taken)
    assert got.dtype is dtype
    assert torch.equal(got, source.index_select(0, taken))


def test_without_triton_a_kernel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    with pytest.raises(kernels.TritonMissingError, match=r"metadata need Triton.*pip install 'auto_deploy_ext\[gpu\]'"):
        kernels.load("metadata")

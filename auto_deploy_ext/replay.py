"""Replay: a metadata mutation's arithmetic repeated on host mirrors, and the operands that travel there for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from auto_deploy_ext import host_mirrors, sanitizer
from auto_deploy_ext import metadata_arithmetic as arithmetic
from auto_deploy_ext.effects import POOL_SUFFIX
from auto_deploy_ext.mirrors import Transfer

_PAGE_TABLE = ("cache_loc", "cu_num_pages", "last_page_len")

#: a stream per device that operands travel on, beside whatever the device is busy with.
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class OperandTicket:
    """A mutation's operand on its way to the host.

    Attributes:
        transfer: what travels; its `waited` turns true when the host has to wait.
    """

    def __init__(
        self, transfer: Transfer, landing: torch.Tensor, source: torch.Tensor, event: torch.cuda.Event | None
    ) -> None:
        self.transfer = transfer
        self._landing = landing
        # The copy reads from the source, so that lives until the copy is done.
        self._source: torch.Tensor | None = source
        self._event = event

    def wait(self) -> torch.Tensor:
        """Return the operand's values, `[n]` int32 on the host, once they have arrived."""
        if self._event is not None and not self._event.query():
            self.transfer.waited = True
            self._event.synchronize()
        self._event = self._source = None
        return self._landing


def snapshot(info: Any, operand: torch.Tensor, mutation: str) -> OperandTicket:
    """Take the values that a mutation's operand has now, and start bringing them to the host.

    On CUDA the operand is cloned on the current stream and the clone travels on a side stream into pinned memory, so
    that neither later writes of the operand nor work queued later delay or change what arrives.

    Args:
        info: a CachedSequenceInterface or a SequenceInfo.
        operand: `[n]` integers on the device, of any shape.
        mutation: the mutation that will be given it; the transfer carries its name.
    """
    source = operand.detach().reshape(-1).to(torch.int32, copy=True)
    event = None
    if source.device.type == "cuda":
        landing = torch.empty(source.shape, dtype=torch.int32, pin_memory=True)
        side = _side_stream(source.device)
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            landing.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        source.record_stream(side)
    else:
        landing = source
    transfer = Transfer((mutation,), source.numel() * source.element_size(), False, mutation)
    for observer in list(host_mirrors.observers(info)):
        observer(transfer)
    return OperandTicket(transfer, landing, source, event)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = _side_streams.get(device)
    if stream is None:
        stream = _side_streams[device] = torch.cuda.Stream(device)
    return stream


def device_versions(info: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Return the versions of buffers on the device, by which `replay` tells what a mutation has written."""
    known = host_mirrors.mirrors_of(info).device_version
    return {name: known.get(name, 0) for name in names}


def replay(info: Any, mutation: str, before: dict[str, int], operand: Callable[[], torch.Tensor]) -> None:
    """Give mirrors the values that a mutation, which has just run, gave their buffers on the device.

    What the mutation left alone (a switch of a batch that is generate-only already, page tables that nobody has
    activated) stays as it is, and then nothing is waited for.

    Args:
        info: a SequenceInfo.
        mutation: a key of `ARITHMETIC`.
        before: the `device_versions` before the mutation of the buffers whose mirrors are wanted; the mirrors of what
            their arithmetic reads were fresh then.
        operand: gives the mutation's operand, `[n]` int32 on the host; it may wait.
    """
    written = {name for name, version in device_versions(info, tuple(before)).items() if version != before[name]}
    idle = {name for name in written if not _is_moved(info, name)}
    moved = sorted(written - idle)
    with sanitizer.unpoisoned(info._input_buffer):
        if moved:
            # All new values first: they follow from the old ones.
            values = ARITHMETIC[mutation](_Mirrors(info), moved, operand)
            host_mirrors.before_host_write(info)
            for name in moved:
                host_mirrors.host_view(info, name)[: values[name].numel()].copy_(values[name])
        host_mirrors.mark_fresh(info, sorted(written))


def _split_pool(name: str) -> tuple[str, str]:
    """Split `cache_loc_g1` into the buffer's name and its pool's suffix, empty for the first pool."""
    pool = POOL_SUFFIX.search(name)
    return (name, "") if pool is None else (name[: pool.start()], pool.group())


def _is_moved(info: Any, name: str) -> bool:
    """Whether a mutation that writes a buffer does so: a page table is only adjusted if part of it is active."""
    base, suffix = _split_pool(name)
    if base not in _PAGE_TABLE:
        return True
    active = {*info._active_args, *getattr(info, "_active_host_prep_args", ())}
    return any(table + suffix + side in active for table in _PAGE_TABLE for side in ("", "_host"))


class _Mirrors:
    """The mirrors' old values and what the host knows of the batch."""

    def __init__(self, info: Any) -> None:
        self._info = info
        self.num_sequences = int(info.batch_info.get_total_num_sequences())
        self.tokens_per_block = int(info.tokens_per_block)

    def whole(self, name: str) -> torch.Tensor:
        """A mirror, `[capacity]`."""
        sanitizer.check_old_value(self._info._input_buffer, name)
        return host_mirrors.host_view(self._info, name)

    def rows(self, name: str, extra: int = 0) -> torch.Tensor:
        """A mirror's entries for the batch's sequences, `[n + extra]`."""
        return self.whole(name)[: self.num_sequences + extra]

    def length(self, name: str) -> int:
        """Elements in use."""
        return int(self._info._input_buffer.get_current_length(name))

    def boundaries(self) -> torch.Tensor:
        """`cu_seqlen`, `[n + 1]`."""
        return self.rows("cu_seqlen", 1)


Values = dict[str, torch.Tensor]


def _switched(mirrors: _Mirrors, names: list[str], operand: Callable[[], torch.Tensor]) -> Values:
    """The arithmetic of `switch_to_generate_`."""
    values: Values = {}
    if not {"input_pos", "position_ids", "use_initial_states"}.isdisjoint(names):
        positions = arithmetic.last_positions(mirrors.rows("input_pos"), mirrors.rows("seq_len"))
        values |= {"input_pos": positions, "position_ids": positions, "use_initial_states": positions > 0}
    if "input_ids" in names:
        values["input_ids"] = arithmetic.last_tokens(mirrors.whole("input_ids"), mirrors.boundaries())
    if "cu_seqlen" in names:
        values["cu_seqlen"] = arithmetic.single_token_boundaries(mirrors.num_sequences)
    if "seq_len" in names:
        values["seq_len"] = torch.ones(mirrors.num_sequences, dtype=torch.int32)
    return values


def _offset(mirrors: _Mirrors, names: list[str], operand: Callable[[], torch.Tensor]) -> Values:
    """The arithmetic of `offset_pos_and_cache_`."""
    offset = operand()
    values: Values = {}
    if not {"input_pos", "use_initial_states"}.isdisjoint(names):
        positions = mirrors.rows("input_pos") + offset
        values |= {"input_pos": positions, "use_initial_states": positions > 0}
    if "position_ids" in names:
        tokens = mirrors.length("position_ids")
        per_token = arithmetic.offset_per_token(offset, mirrors.boundaries(), tokens)
        values["position_ids"] = mirrors.whole("position_ids")[:tokens] + per_token
    for name in names:
        base, suffix = _split_pool(name)
        if base == "seq_len_with_cache":
            values[name] = mirrors.rows(name) + offset
        elif base in _PAGE_TABLE and name not in values:
            values |= _offset_pages(mirrors, suffix, offset, names)
    return values


def _offset_pages(mirrors: _Mirrors, suffix: str, offset: torch.Tensor, names: list[str]) -> Values:
    """A pool's page table, as far as it is asked for; the mirrors of the rest may be stale."""
    last_page_len = mirrors.rows("last_page_len" + suffix)
    ends, change = arithmetic.offset_page_ends(last_page_len, offset, mirrors.tokens_per_block)
    values = {"last_page_len" + suffix: ends}
    if "cu_num_pages" + suffix in names:
        boundaries = mirrors.rows("cu_num_pages" + suffix, 1)
        values["cu_num_pages" + suffix] = arithmetic.offset_page_boundaries(boundaries, change)
    if "cache_loc" + suffix in names:
        boundaries = mirrors.rows("cu_num_pages" + suffix, 1)
        pages = mirrors.whole("cache_loc" + suffix)
        # As far as the device's own table may have grown: by a page per sequence.
        bound = max(mirrors.length("cache_loc" + suffix), int(boundaries[-1]) + mirrors.num_sequences)
        values["cache_loc" + suffix] = arithmetic.offset_page_table(
            pages[: min(bound, pages.shape[0])],
            boundaries,
            last_page_len,
            mirrors.rows("extra_page_per_seq" + suffix),
            offset,
            mirrors.tokens_per_block,
        ).cache_loc
    return values


#: by mutation: `(mirrors, names, operand) -> new values`, at least those of `names`.
ARITHMETIC: dict[str, Callable[[_Mirrors, list[str], Callable[[], torch.Tensor]], Values]] = {
    "switch_to_generate_": _switched,
    "offset_pos_and_cache_": _offset,
}


def known_operand(info: Any, operands: tuple[Any, ...], value: int) -> torch.Tensor:
    """Return an operand whose elements are all `value`, `[n]` int32 on the host, as its own dtype would hold it."""
    dtype = next((o.dtype for o in operands if isinstance(o, torch.Tensor)), torch.int32)
    rows = int(info.batch_info.get_total_num_sequences())
    return torch.full((rows,), value, dtype=dtype).to(torch.int32)

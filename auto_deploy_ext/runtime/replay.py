"""Replay: a metadata mutation's arithmetic repeated on host mirrors, and the operands that travel there for it.

The arithmetic is that of `metadata_arithmetic`, here in NumPy: for some rows of a batch, a call of torch takes several
times as long as one of NumPy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from auto_deploy_ext.effects import POOL_SUFFIX
from auto_deploy_ext.runtime import host_mirrors, sanitizer
from auto_deploy_ext.runtime.copy_memory import LandingPool
from auto_deploy_ext.runtime.mirrors import Transfer

_PAGE_TABLE = ("cache_loc", "cu_num_pages", "last_page_len")
_SIDES = ("", "_host")


class _Lane:
    """The way of operands from one device to the host: a stream beside whatever the device is busy with.

    Landing areas and events are used again, because to make them takes longer than the rest of a snapshot.

    Args:
        stream: of the device.
        pinned: whether landing areas are.
    """

    def __init__(self, stream: torch.cuda.Stream, pinned: bool = True) -> None:
        self._stream = stream
        self._pinned = pinned
        self._areas = LandingPool()
        self._events: list[torch.cuda.Event] = []

    def start(self, source: torch.Tensor) -> tuple[torch.Tensor, _Flight]:
        """Start a copy of `[n]` int32 behind what the source's current stream does; gives where it lands."""
        nbytes = 4 * source.numel()
        area = self._areas.take(nbytes, self._pinned)
        landing = area[:nbytes].view(torch.int32)
        event = self._events.pop() if self._events else torch.cuda.Event()
        # What waits for an event waits for the record before it, so the same one serves both ends of the copy.
        event.record(torch.cuda.current_stream(source.device))
        self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            landing.copy_(source, non_blocking=True)
        event.record(self._stream)
        return landing, _Flight(self, area, event, source)

    def has_landed(self, flight: _Flight) -> None:
        """Take back the area and the event of a copy that is over, and whose values nobody reads there any more."""
        self._areas.give_back(flight.area, None)
        self._events.append(flight.event)

    def abandon(self, flight: _Flight) -> None:
        """Take back the area of a copy that nobody waits for, to be used when it is over."""
        flight.source.record_stream(self._stream)
        self._areas.give_back(flight.area, flight.event)


class _Flight(NamedTuple):
    """A copy on its way; what it reads and writes lives until it is over."""

    lane: _Lane
    area: torch.Tensor
    event: torch.cuda.Event
    source: torch.Tensor


_lanes: dict[torch.device, _Lane] = {}


def _lane_of(device: torch.device) -> _Lane:
    lane = _lanes.get(device)
    if lane is None:
        lane = _lanes[device] = _Lane(torch.cuda.Stream(device))
    return lane


class OperandTicket:
    """A mutation's operand on its way to the host.

    Attributes:
        transfer: what travels; its `waited` turns true when the host has to wait.
    """

    def __init__(self, transfer: Transfer, values: torch.Tensor, flight: _Flight | None = None) -> None:
        self.transfer = transfer
        self._values = values
        self._flight = flight

    def wait(self) -> torch.Tensor:
        """Return the operand's values, `[n]` int32 on the host, once they have arrived; they stay as they are."""
        flight = self._flight
        if flight is not None:
            if not flight.event.query():
                self.transfer.waited = True
                flight.event.synchronize()
            self._values, self._flight = self._values.clone(), None
            flight.lane.has_landed(flight)
        return self._values

    def __del__(self) -> None:
        """Give back what the copy uses, where nobody has waited for it."""
        flight = self._flight
        if flight is not None and not sys.is_finalizing():
            flight.lane.abandon(flight)


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
    values, flight = source, None
    if source.device.type == "cuda":
        values, flight = _lane_of(source.device).start(source)
    transfer = Transfer((mutation,), source.numel() * source.element_size(), False, mutation)
    ticket = OperandTicket(transfer, values, flight)
    for observer in list(host_mirrors.observers(info)):
        observer(transfer)
    return ticket


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
    known = host_mirrors.mirrors_of(info).device_version
    written = tuple(name for name, version in before.items() if known.get(name, 0) != version)
    if written:
        _repeat(info, mutation, written, operand)


def _repeat(info: Any, mutation: str, written: tuple[str, ...], operand: Callable[[], torch.Tensor]) -> None:
    """Do what `replay` does for buffers that a mutation has written."""
    mirrors = host_mirrors.mirrors_of(info)
    moved = _moved(written, (*info._active_args, *getattr(info, "_active_host_prep_args", ())))
    with sanitizer.unpoisoned(info._input_buffer):
        if moved:
            # All new values first: they follow from the old ones.
            old = _Mirrors(info, mirrors)
            values, starts = ARITHMETIC[mutation](old, moved, operand), old.starts
            mirrors.before_host_write()
            for name in moved:
                value = values[name]
                if value is not None:
                    start = starts.get(name, 0)
                    mirrors.host_array(name)[start : start + value.size] = value
        mirrors.mark_fresh(written)


#: buffers whose new values are the old ones and the offset.
_SUMS = frozenset({"input_pos", "seq_len_with_cache"})
#: by mutation, the buffers whose mirrors are brought up to date in place.
_SHORT = {
    "switch_to_generate_": frozenset({"cu_seqlen", "seq_len"}),
    "offset_pos_and_cache_": _SUMS | {"last_page_len", "cu_num_pages"},
}


class PreparedReplay:
    """A mutation's replay on the embedded host, prepared for buffers that its calls change, as long as activity stays.

    What most drafts need is done in place, by a few sums. Everything else goes the way of `replay`. The sanitizer is
    not asked: while it watches, `replay` itself is to be called.

    Args:
        mutation: a key of `ARITHMETIC`.
        written: buffers that each call changes (page tables in use, of others none), whose mirrors are wanted.
    """

    def __init__(self, mutation: str, written: tuple[str, ...]) -> None:
        self._mutation = mutation
        self._written = written
        bases = [_split_pool(name) for name in written]
        self._is_short = _SHORT[mutation].issuperset(base for base, _ in bases)
        self._sums = tuple(n for n, (base, _) in zip(written, bases, strict=True) if base in _SUMS)
        #: by pool: the names of last_page_len and cu_num_pages, and whether each is wanted.
        pools = sorted({pool for base, pool in bases if base in _PAGE_TABLE})
        tables = [("last_page_len" + pool, "cu_num_pages" + pool) for pool in pools]
        self._tables = tuple((ends, counts, ends in written, counts in written) for ends, counts in tables)

    def __call__(self, info: Any, rows: int, operand: torch.Tensor | None, known: int | OperandTicket | None) -> None:
        """Replay the mutation right after it has run.

        Args:
            info: the embedded host's SequenceInfo.
            rows: sequences of the batch.
            operand: the mutation's operand on the device, `[rows]` integers; None: it has none.
            known: what all its elements are, or the ticket that brings them; None: it has none.
        """
        if not self._is_short:
            _repeat(info, self._mutation, self._written, lambda: _on_host(info, operand, known))
            return
        if known is None:
            self._count(info, rows)
        elif isinstance(known, int):
            dtype = torch.int32 if operand is None else operand.dtype
            self._move(info, rows, known if dtype is torch.int32 else _held(known, dtype))
        else:
            self._move(info, rows, known.wait().numpy())
        info._input_buffer.mark_mirrors(self._written)

    def _count(self, info: Any, rows: int) -> None:
        """See `_switched`."""
        for name in self._written:
            if name == "cu_seqlen":
                info._input_buffer.get_host_array(name)[: rows + 1] = _counted(rows + 1)
            else:
                info._input_buffer.get_host_array(name)[:rows] = 1

    def _move(self, info: Any, rows: int, offset: int | np.ndarray) -> None:
        """See `_offset`."""
        array_of, size = info._input_buffer.get_host_array, info.tokens_per_block
        for ends, counts, wants_ends, wants_counts in self._tables:
            old = array_of(ends)[:rows]
            new, change = _moved_ends(old, offset, size)
            if wants_counts and change is not None:
                array_of(counts)[1 : rows + 1] += change.cumsum(dtype=np.int32)
            if wants_ends:
                old[:] = new
        for name in self._sums:
            entries = array_of(name)[:rows]
            entries += offset


@functools.lru_cache(maxsize=256)
def _counted(count: int) -> np.ndarray:
    """`[count]` int32, not to be written: 0, 1, 2, ..."""
    return np.arange(count, dtype=np.int32)


def _on_host(info: Any, operand: torch.Tensor | None, known: int | OperandTicket | None) -> torch.Tensor:
    assert known is not None
    return known_operand(info, (operand,), known) if isinstance(known, int) else known.wait()


@functools.lru_cache(maxsize=1024)
def _split_pool(name: str) -> tuple[str, str]:
    """Split `cache_loc_g1` into the buffer's name and its pool's suffix, empty for the first pool."""
    pool = POOL_SUFFIX.search(name)
    return (name, "") if pool is None else (name[: pool.start()], pool.group())


@functools.lru_cache(maxsize=1024)
def _moved(written: tuple[str, ...], active: tuple[str, ...]) -> tuple[str, ...]:
    """What a mutation that writes some buffers does change: a page table only if part of it is active."""
    moved: list[str] = []
    for name in written:
        base, suffix = _split_pool(name)
        if base not in _PAGE_TABLE or any(table + suffix + side in active for table in _PAGE_TABLE for side in _SIDES):
            moved.append(name)
    return tuple(moved)


class _Mirrors:
    """The mirrors' old values and what the host knows of the batch."""

    def __init__(self, info: Any, mirrors: Any) -> None:
        self._info = info
        self._mirrors = mirrors
        self.num_sequences = int(info.batch_info.get_total_num_sequences())
        self.tokens_per_block = int(info.tokens_per_block)
        #: where new values begin, if not at the mirror's beginning.
        self.starts: dict[str, int] = {}

    def whole(self, name: str) -> np.ndarray:
        """A mirror, `[capacity]`."""
        sanitizer.check_old_value(self._info._input_buffer, name)
        return self._mirrors.host_array(name)

    def rows(self, name: str, extra: int = 0) -> np.ndarray:
        """A mirror's entries for the batch's sequences, `[n + extra]`."""
        return self.whole(name)[: self.num_sequences + extra]

    def length(self, name: str) -> int:
        """Elements in use."""
        return int(self._info._input_buffer.get_current_length(name))


#: new arrays; None: as it was.
Values = dict[str, np.ndarray | None]
Operand = Callable[[], torch.Tensor]


def _switched(mirrors: _Mirrors, names: Sequence[str], operand: Operand) -> Values:
    """The arithmetic of `switch_to_generate_`; see `metadata_arithmetic.generate_batch`."""
    values: Values = {}
    if "input_pos" in names or "position_ids" in names or "use_initial_states" in names:
        positions = mirrors.rows("input_pos") + mirrors.rows("seq_len") - 1
        values |= {"input_pos": positions, "position_ids": positions, "use_initial_states": positions > 0}
    if "input_ids" in names:
        tokens, ends = mirrors.whole("input_ids"), mirrors.rows("cu_seqlen", 1)[1:]
        values["input_ids"] = tokens[np.minimum(np.maximum(ends - 1, 0), tokens.size - 1)]
    if "cu_seqlen" in names:
        values["cu_seqlen"] = np.arange(mirrors.num_sequences + 1, dtype=np.int32)
    if "seq_len" in names:
        values["seq_len"] = np.ones(mirrors.num_sequences, dtype=np.int32)
    return values


def _offset(mirrors: _Mirrors, names: Sequence[str], operand: Operand) -> Values:
    """The arithmetic of `offset_pos_and_cache_`."""
    offset = operand().numpy()
    values: Values = {}
    if "input_pos" in names or "use_initial_states" in names:
        positions = mirrors.rows("input_pos") + offset
        values |= {"input_pos": positions, "use_initial_states": positions > 0}
    if "position_ids" in names:
        tokens = mirrors.length("position_ids")
        boundaries = mirrors.rows("cu_seqlen", 1)
        values["position_ids"] = mirrors.whole("position_ids")[:tokens] + _per_token(offset, boundaries, tokens)
    for name in names:
        base, suffix = _split_pool(name)
        if base == "seq_len_with_cache":
            values[name] = mirrors.rows(name) + offset
        elif base in _PAGE_TABLE and name not in values:
            values |= _offset_pages(mirrors, suffix, offset, names)
    return values


def _per_token(offset: np.ndarray, boundaries: np.ndarray, tokens: int) -> np.ndarray:
    """See `metadata_arithmetic.offset_per_token`."""
    if tokens == offset.size:
        return offset
    owner = np.searchsorted(boundaries[1:], np.arange(tokens, dtype=boundaries.dtype), side="right")
    return offset[np.minimum(owner, offset.size - 1)]


def _offset_pages(mirrors: _Mirrors, suffix: str, offset: np.ndarray, names: Sequence[str]) -> Values:
    """A pool's page table, as far as it is asked for; the mirrors of the rest may be stale."""
    ends, change = _moved_ends(mirrors.rows("last_page_len" + suffix), offset, mirrors.tokens_per_block)
    values: Values = {"last_page_len" + suffix: ends}
    if "cu_num_pages" + suffix in names:
        boundaries = mirrors.rows("cu_num_pages" + suffix, 1)
        values["cu_num_pages" + suffix] = None
        if change is not None:
            moved = boundaries.copy()
            moved[1:] += np.cumsum(change, dtype=np.int32)
            values["cu_num_pages" + suffix] = moved
    if "cache_loc" + suffix in names:
        name = "cache_loc" + suffix
        boundaries = mirrors.rows("cu_num_pages" + suffix, 1)
        pages = mirrors.whole(name)
        extra = mirrors.rows("extra_page_per_seq" + suffix)
        # As far as the device's own table may have grown, by a page per sequence, it is filled with the last extra one.
        used = int(boundaries[-1])
        bound = min(max(mirrors.length(name), used + mirrors.num_sequences), pages.size)
        if change is not None:
            values[name] = _moved_pages(pages, boundaries, extra, change, bound)
        else:
            values[name] = np.full(max(bound - used, 0), extra[-1])
            mirrors.starts[name] = used
    return values


def _moved_ends(ends: np.ndarray, offset: int | np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Where rows of int32 last page lengths end after an offset, and by how many pages each grows; None: none does."""
    moved = ends + offset
    # Rows that go on in a page more, and rows that lose one: few, mostly none.
    more, less = moved > size, moved < 1
    if not (np.count_nonzero(more) or np.count_nonzero(less)):
        return moved, None
    change = more.astype(np.int32) - less
    moved -= change * np.int32(size)
    return moved, change


def _moved_pages(
    pages: np.ndarray, boundaries: np.ndarray, extra: np.ndarray, change: np.ndarray, bound: int
) -> np.ndarray:
    """`[bound]`: each row's pages, without the last one or with its extra one where `change` says so."""
    pieces, start, used = [], 0, int(boundaries[-1])
    last = extra.size - 1
    for row in np.flatnonzero(change).tolist():
        end = int(boundaries[row + 1])
        if change[row] > 0:
            pieces += [pages[start:end], extra[row : row + 1]]
        else:
            # Behind the last row's pages the one that it loses stays, uncounted.
            pieces.append(pages[start : end if row == last else max(end - 1, start)])
        start = end
    pieces.append(pages[start:used])
    pieces.append(np.full(max(bound - sum(piece.size for piece in pieces), 0), extra[-1]))
    return np.concatenate(pieces)[:bound]


#: by mutation: `(mirrors, names, operand) -> new values`, at least those of `names`.
ARITHMETIC: dict[str, Callable[[_Mirrors, Sequence[str], Operand], Values]] = {
    "switch_to_generate_": _switched,
    "offset_pos_and_cache_": _offset,
}


def known_operand(info: Any, operands: tuple[Any, ...], value: int) -> torch.Tensor:
    """Return an operand whose elements are all `value`, `[n]` int32 on the host, as its own dtype would hold it.

    Who gets it only reads it: it is kept for the next of its kind.
    """
    dtype = next((o.dtype for o in operands if isinstance(o, torch.Tensor)), torch.int32)
    return _filled(int(info.batch_info.get_total_num_sequences()), value, dtype)


@functools.lru_cache(maxsize=1024)
def _held(value: int, dtype: torch.dtype) -> int:
    """What a tensor of a dtype holds of a value, as int32."""
    return int(torch.full((), value, dtype=dtype).to(torch.int32))


@functools.lru_cache(maxsize=1024)
def _filled(rows: int, value: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows,), value, dtype=dtype).to(torch.int32)

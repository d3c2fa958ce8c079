"""The calls that change a batch's metadata on the device, and the mirrors that they bring up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...runtime import metadata_arithmetic as arithmetic
from ...spelling import unknown_name_message
from .batch_info import BatchInfo
from .input_buffer import InputBuffer

#: Base buffers that `switch_to_generate_` writes.
SWITCH_WRITES = ("input_ids", "input_pos", "cu_seqlen", "seq_len", "position_ids", "use_initial_states")
#: Base buffers that `offset_pos_and_cache_` writes; those in POOLED_BUFFERS for every pool.
OFFSET_WRITES = (
    "input_pos",
    "cache_loc",
    "cu_num_pages",
    "last_page_len",
    "position_ids",
    "seq_len_with_cache",
    "use_initial_states",
)
#: Buffers that every pool (window group) has its own of.
POOLED_BUFFERS = ("cache_loc", "cu_num_pages", "last_page_len", "extra_page_per_seq", "seq_len_with_cache")
#: A pool's pages are adjusted only if one of these is active on either side.
PAGE_TABLE = ("cache_loc", "cu_num_pages", "last_page_len")


def _check_integers(method: str, tensor: Any, each: str) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex():
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{method} needs a tensor of integers, one for each {each}, got {kind}")


class MetadataMutations:
    """The mutating part of SequenceInfo; see there for the buffers."""

    _input_buffer: InputBuffer
    batch_info: BatchInfo
    tokens_per_block: int
    _host_suffix: str
    _pool_suffixes: list[str]
    _active_args: tuple[str, ...]
    _active_host_prep_args: set[str]
    #: what `_offset_scope` found, by what was active.
    _offset_scopes: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]]

    def copy_(self, name: str, src: torch.Tensor, strict: bool = True) -> None:
        """Write a buffer's device side, or its mirror when ``src`` is on the host and the device is not.

        The other side is not touched. The current length becomes ``src.numel()``.

        Args:
            name: buffer; ``x_host`` means the mirror in any case.
            src: tensor of any shape.
            strict: whether ``src`` must have as many elements as are in use now.

        Raises:
            ValueError: unknown name, wrong number of elements (strict), too many, or a source on another device.
        """
        base = name.removesuffix(self._host_suffix)
        if base not in self._input_buffer.tensor_names:
            raise ValueError(unknown_name_message("metadata buffer", name, self._input_buffer.tensor_names))
        current = self._input_buffer.get_current_length(base)
        if strict and src.numel() != current:
            raise ValueError(
                f"copy_({name!r}) got {src.numel()} elements where {current} are in use; pass strict=False to change it"
            )
        self._input_buffer.copy_(name, src)

    def rescatter_input_ids_(self, ungathered_input_ids: torch.Tensor) -> None:
        """Overlap: ``input_ids[_mask_scatter_indices] = ungathered_input_ids[_gather_idx]``, on the device.

        Args:
            ungathered_input_ids: the previous iteration's tokens, any shape, on the device.
        """
        source = ungathered_input_ids.reshape(-1)
        gather = self._input_buffer.get_view("_gather_idx", truncate=True)
        scatter = self._input_buffer.get_view("_mask_scatter_indices", truncate=True)
        if gather.numel() != scatter.numel():
            raise ValueError(f"{gather.numel()} tokens to gather for {scatter.numel()} places to scatter them to")
        if gather.numel() == 0:
            return
        tokens = source.index_select(0, gather).to(torch.int32)
        self._input_buffer.get_view("input_ids").index_copy_(0, scatter.to(torch.int64), tokens)
        self._input_buffer.bump_device("input_ids")

    def offset_with_new_lens_(self, new_lens: torch.Tensor, active_args_override: set[str] | None = None) -> None:
        """Overlap: offset each row by what the previous iteration accepted of it beyond one token.

        Args:
            new_lens: accepted tokens per slot of the previous iteration, integer, on the device. The rows right after
                the prefills look theirs up with ``_gather_slot_idx``; all others stay.
            active_args_override: as for :meth:`offset_pos_and_cache_`.

        Raises:
            TypeError: no tensor of integers.
            ValueError: as :meth:`offset_pos_and_cache_`.
        """
        _check_integers("offset_with_new_lens_", new_lens, "slot")
        slots = self._input_buffer.get_view("_gather_slot_idx", truncate=True)
        kinds = self.batch_info.get_num_sequences()
        offset = arithmetic.overlap_offset(new_lens, slots, kinds[0], sum(kinds))
        self.offset_pos_and_cache_(offset, active_args_override)

    def switch_to_generate_(self, active_args_override: set[str] | None = None) -> None:
        """Reduce each sequence to its last token: a generate-only batch of the same sequences.

        Does nothing when the batch is generate-only. On the host ``batch_info`` changes at once; the buffers of
        ``SWITCH_WRITES`` change on the device. Mirrors: see :meth:`offset_pos_and_cache_`.

        Args:
            active_args_override: as for :meth:`offset_pos_and_cache_`.

        Raises:
            ValueError: an override that is no set or names something inactive.
        """
        self._check_override(active_args_override)
        if self.batch_info.is_generate_only():
            return
        n = self.batch_info.get_total_num_sequences()
        self._switch_on_device(n)
        self._note_switch(n)
        self._mirror(SWITCH_WRITES, active_args_override, "switch_to_generate_")

    def _switch_on_device(self, n: int) -> None:
        """The device side of `switch_to_generate_`: values alone."""
        buffer = self._input_buffer
        result = arithmetic.generate_batch(
            input_ids=buffer.get_view("input_ids"),
            input_pos=buffer.get_view("input_pos")[:n],
            cu_seqlen=buffer.get_view("cu_seqlen")[: n + 1],
            seq_len=buffer.get_view("seq_len")[:n],
        )
        for name, value in result._asdict().items():
            buffer.get_view(name)[: value.shape[0]].copy_(value)

    def _note_switch(self, n: int) -> None:
        """What the host knows after `switch_to_generate_`: batch_info, lengths and versions."""
        self.batch_info.update([0, 0, 0, 0, n, n])
        self.batch_info.update_tokens_gather_info(n, False)
        for name in SWITCH_WRITES:
            self._input_buffer.set_current_length(name, n + 1 if name == "cu_seqlen" else n)
        self._input_buffer.bump_devices(SWITCH_WRITES)

    def offset_pos_and_cache_(self, offset: torch.Tensor, active_args_override: set[str] | None = None) -> None:
        """Move the end of each sequence by its offset, pages included; see ``metadata_arithmetic.offset_page_table``.

        Un-narrowed (no override), the whole buffer is then copied to the host, blocking, if the mirror of anything
        that was written is active. Narrowed, exactly those active mirrors of what was written that the override names.

        Args:
            offset: ``[n]`` integer on the device; it moves a sequence by at most one page.
            active_args_override: the ``_host`` names (others are ignored) that the next consumer may read.

        Raises:
            TypeError: an offset that is no tensor of integers.
            ValueError: an offset of another size, or an override that is no set or names something inactive.
        """
        self._check_override(active_args_override)
        _check_integers("offset_pos_and_cache_", offset, "sequence")
        n = self.batch_info.get_total_num_sequences()
        if offset.numel() != n:
            raise ValueError(f"offset_pos_and_cache_ needs one offset for each of {n} sequences, got {offset.numel()}")
        offset = offset.reshape(-1).to(torch.int32)
        self._offset_on_device(offset, self._input_buffer.get_current_length("position_ids"), n)
        self._mirror(self._note_offset(n), active_args_override, "offset_pos_and_cache_")

    def _offset_on_device(self, offset: torch.Tensor, num_tokens: int, more_pages: int) -> None:
        """The device side of `offset_pos_and_cache_`: values alone.

        Args:
            offset: ``[n]`` int32.
            num_tokens: tokens in the batch.
            more_pages: how many pages more than the host knows a page table may have afterwards.
        """
        n = offset.shape[0]
        buffer = self._input_buffer
        input_pos = buffer.get_view("input_pos")[:n]
        input_pos += offset
        buffer.get_view("use_initial_states")[:n].copy_(input_pos > 0)
        position_ids = buffer.get_view("position_ids")[:num_tokens]
        cu_seqlen = buffer.get_view("cu_seqlen")[: n + 1]
        position_ids += arithmetic.offset_per_token(offset, cu_seqlen, num_tokens)
        for suffix in self._pool_suffixes:
            buffer.get_view("seq_len_with_cache" + suffix)[:n] += offset
        for suffix in self._offset_scope()[1]:
            self._offset_pages(suffix, offset, more_pages)

    def _note_offset(self, n: int) -> tuple[str, ...]:
        """What the host knows after `offset_pos_and_cache_`, lengths and versions; returns what was written."""
        written, suffixes = self._offset_scope()
        for suffix in suffixes:
            cache_loc = "cache_loc" + suffix
            self._input_buffer.set_current_length(cache_loc, self._page_bound(cache_loc, n))
        self._input_buffer.bump_devices(written)
        return written

    @property
    def activity(self) -> tuple[tuple[str, ...], frozenset[str], int]:
        """What is active: as long as this is equal, mutations write and mirror the same buffers."""
        return self._active_args, frozenset(self._active_host_prep_args), len(self._pool_suffixes)

    def _offset_scope(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What `offset_pos_and_cache_` writes, and the pools whose page tables it adjusts, as things are active now."""
        key = self.activity
        found = self._offset_scopes.get(key)
        if found is None:
            suffixes = tuple(filter(self._pages_active, self._pool_suffixes))
            written = ["input_pos", "use_initial_states", "position_ids"]
            written += ["seq_len_with_cache" + suffix for suffix in self._pool_suffixes]
            written += [name + suffix for suffix in suffixes for name in PAGE_TABLE]
            found = self._offset_scopes[key] = (tuple(written), suffixes)
        return found

    def _page_bound(self, cache_loc: str, more: int) -> int:
        """How many pages there may be after offsets: at most one more per sequence and offset, the device knows."""
        buffer = self._input_buffer
        return min(buffer.get_current_length(cache_loc) + more, buffer.get_capacity(cache_loc))

    def _pages_active(self, suffix: str) -> bool:
        return any(self._is_active(name + suffix + side) for name in PAGE_TABLE for side in ("", self._host_suffix))

    def _offset_pages(self, suffix: str, offset: torch.Tensor, more_pages: int) -> None:
        n = offset.shape[0]
        buffer = self._input_buffer
        cache_loc = "cache_loc" + suffix
        cu_num_pages = buffer.get_view("cu_num_pages" + suffix)[: n + 1]
        last_page_len = buffer.get_view("last_page_len" + suffix)[:n]
        pages = buffer.get_view(cache_loc)[: self._page_bound(cache_loc, more_pages)]
        table = arithmetic.offset_page_table(
            pages,
            cu_num_pages,
            last_page_len,
            buffer.get_view("extra_page_per_seq" + suffix)[:n],
            offset,
            self.tokens_per_block,
        )
        for target, value in zip((pages, cu_num_pages, last_page_len), table, strict=True):
            target.copy_(value)

    # Mirrors after a mutation.

    def _is_active(self, name: str) -> bool:
        return name in self._active_args or name in self._active_host_prep_args

    def _check_override(self, override: set[str] | None) -> None:
        if override is None:
            return
        if not isinstance(override, (set, frozenset)):
            raise ValueError(f"active_args_override must be a set of argument names, got {type(override).__name__}")
        inactive = sorted(name for name in override if not self._is_active(name))
        if inactive:
            raise ValueError(
                f"active_args_override names arguments that are not active: {', '.join(inactive)}; "
                "activate them with activate_arg or leave them out"
            )

    def _mirror(self, written: Sequence[str], override: set[str] | None, trigger: str) -> None:
        twins = {name + self._host_suffix for name in written}
        live = {name for name in twins if self._is_active(name)}
        if override is not None:
            self._input_buffer.copy_names_to_host(live & override, trigger=trigger)
        elif live:
            self._input_buffer.copy_to_host(trigger=trigger)

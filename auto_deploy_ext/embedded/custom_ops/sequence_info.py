"""SequenceInfo: the metadata of a batch of sequences, on the device and mirrored on the host, and its mutations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ...effects import HOST_SUFFIX
from ...spelling import unknown_name_message
from . import batch_layout
from .batch_info import BatchInfo
from .batch_layout import IntList
from .input_buffer import InputBuffer
from .metadata_mutations import POOLED_BUFFERS, MetadataMutations

_BATCH_INFO_HOST = "batch_info_host"
_UNFLATTENED = ("input_ids", "position_ids")
_NOT_ATTENTION = ("input_ids", "position_ids", "token_gather_indices")
_NO_PAGE = -1
_EXAMPLE_ROWS, _EXAMPLE_TOKENS = 2, 4

HostPrepareFunction = Callable[..., Any]


class SequenceInfo(MetadataMutations):
    """Metadata of a batch: what the model's inputs are and where its sequences lie in the caches.

    Sequences come in the order prefill, extend, decode; tokens are flat. Every buffer ``x`` has a host mirror
    ``x_host``; ``batch_info_host`` exists on the host alone. With B = max(2, max_batch_size), T = max_num_tokens:

    ===================================  =====  ======  ==========================================================
    buffer                               numel  dtype   meaning
    ===================================  =====  ======  ==========================================================
    input_ids                            T      int32   tokens
    position_ids                         T      int64   position of each token
    input_pos                            B      int32   cached tokens before this batch
    cu_seqlen                            B + 1  int32   where each sequence begins among the tokens
    cache_loc                            T      int32   pages, one sequence after another (truncatable)
    cu_num_pages                         B + 1  int32   where each sequence begins in cache_loc
    last_page_len                        B      int32   tokens in the last page
    slot_idx                             B      int64   state slot
    any_prefill_use_initial_states       1      bool    whether a prefill row has a state to start from
    max_seq_info                         4      int32   BatchInfo's [6..9]
    seq_len                              B      int32   tokens in this batch
    seq_len_with_cache                   B      int32   input_pos + seq_len
    prompt_lens                          B      int32   tokens in the prompt
    use_initial_states                   B      bool    input_pos > 0
    extra_page_per_seq                   B      int32   page that one crossing may insert, -1 for none
    token_gather_indices                 T      int64   tokens that get logits
    _gather_idx, _mask_scatter_indices   T      int32   overlap: ``input_ids[scatter] = previous[gather]``
    _gather_slot_idx                     B      int64   overlap: a row's slot in the previous iteration
    ===================================  =====  ======  ==========================================================

    Args:
        max_seq_len: longest sequence, cached tokens included.
        max_batch_size: most sequences in a batch.
        max_num_tokens: most tokens in a batch.
        tokens_per_block: tokens in a page; ``None`` means ``max_seq_len``.
        vocab_size_padded: kept for whoever asks.

    Example:
        >>> info = SequenceInfo(max_seq_len=8, max_batch_size=2, max_num_tokens=8)
        >>> info.set_example_sequence([[1, 2, 3], [4, 5]])
        >>> info.switch_to_generate_()
        >>> info.get_arg("input_ids")
        tensor([[3],
                [5]], dtype=torch.int32)
    """

    def __init__(
        self,
        max_seq_len: int,
        max_batch_size: int,
        max_num_tokens: int,
        tokens_per_block: int | None = None,
        vocab_size_padded: int | None = None,
    ) -> None:
        if min(max_seq_len, max_batch_size, max_num_tokens) < 1:
            raise ValueError(
                "max_seq_len, max_batch_size and max_num_tokens must be positive, got "
                f"{max_seq_len}, {max_batch_size}, {max_num_tokens}"
            )
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.tokens_per_block = tokens_per_block or max_seq_len
        self.vocab_size_padded = vocab_size_padded
        self._num_blocks: int | None = None
        self._host_suffix = HOST_SUFFIX
        self._pool_suffixes: list[str] = [""]
        self._offset_scopes = {}
        self._window_sizes: list[int] = []

        self._rows = max(2, max_batch_size)
        self._input_buffer = InputBuffer(
            [
                ("input_ids", max_num_tokens, torch.int32),
                ("position_ids", max_num_tokens, torch.int64),
                ("input_pos", self._rows, torch.int32),
                ("cu_seqlen", self._rows + 1, torch.int32),
                ("cache_loc", max_num_tokens, torch.int32, True),
                ("cu_num_pages", self._rows + 1, torch.int32),
                ("last_page_len", self._rows, torch.int32),
                ("slot_idx", self._rows, torch.int64),
                ("any_prefill_use_initial_states", 1, torch.bool),
                ("max_seq_info", 4, torch.int32),
                ("seq_len", self._rows, torch.int32),
                ("seq_len_with_cache", self._rows, torch.int32),
                ("prompt_lens", self._rows, torch.int32),
                ("use_initial_states", self._rows, torch.bool),
                ("extra_page_per_seq", self._rows, torch.int32),
                ("token_gather_indices", max_num_tokens, torch.int64),
                ("_gather_idx", max_num_tokens, torch.int32),
                ("_gather_slot_idx", self._rows, torch.int64),
                ("_mask_scatter_indices", max_num_tokens, torch.int32),
            ]
        )
        self.batch_info = BatchInfo()
        self.batch_info.update_max_seq_info(max_seq_len, self.max_blocks_per_seq, 0, max_batch_size)
        self._available_args: set[str] = {_BATCH_INFO_HOST}
        self._add_available(self._input_buffer.tensor_names)
        self._active_args: tuple[str, ...] = ("input_ids", "position_ids")
        self._active_host_prep_args: set[str] = set()
        self._host_prepare_functions: list[tuple[HostPrepareFunction, tuple[str, ...]]] = []
        self._extra_args: dict[str, torch.Tensor] = {}
        self._attention_args: tuple[Any, bool] = None, False
        self._known_args: tuple[Any, dict[str, torch.Tensor]] = None, {}
        self.reset()

    # Sizes and devices.

    @property
    def device(self) -> torch.device:
        """Where the buffers live."""
        return self._input_buffer.device

    @property
    def host_device(self) -> torch.device:
        """Where the mirrors live: the CPU."""
        return self._input_buffer.host_device

    def to(self, *args: Any, **kwargs: Any) -> SequenceInfo:
        """Move the buffers (``torch.Tensor.to``'s arguments); views taken before become invalid. Returns itself."""
        self._input_buffer.to(*args, **kwargs)
        self._extra_args = {name: value.to(self.device) for name, value in self._extra_args.items()}
        return self

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return self.batch_info.get_total_num_sequences()

    @property
    def total_num_tokens(self) -> int:
        """Tokens in the batch."""
        return self.batch_info.get_total_num_tokens()

    @property
    def is_generate_only(self) -> bool:
        """Whether every sequence is a decode."""
        return self.batch_info.is_generate_only()

    @property
    def is_extend_only(self) -> bool:
        """Whether every sequence is an extend."""
        return self.batch_info.is_extend_only()

    @property
    def max_blocks_per_seq(self) -> int:
        """Pages that the longest sequence needs."""
        return -(-self.max_seq_len // self.tokens_per_block)

    @property
    def max_num_state_slots(self) -> int:
        """State slots: one per row and one that padding may write."""
        return self._rows + 1

    @property
    def num_blocks(self) -> int:
        """Pages in the cache.

        Raises:
            RuntimeError: :meth:`update_cache_information` was not called yet.
        """
        if self._num_blocks is None:
            raise RuntimeError("the number of cache pages is not known yet; call update_cache_information first")
        return self._num_blocks

    def update_cache_information(self, num_blocks: int, block_offset_multiplier: int = 0) -> None:
        """Tell how many pages the cache has; ``cache_loc`` of every pool is given room for as many as rows can own.

        That is at most ``B * (pages of the longest sequence + 1 extra page)``; it never shrinks.

        Raises:
            TypeError: no integer.
            ValueError: fewer than one page.
        """
        num_blocks = operator.index(num_blocks)
        if num_blocks < 1:
            raise ValueError(f"update_cache_information: a cache has at least one page, got num_blocks={num_blocks}")
        self._num_blocks = num_blocks
        self.batch_info.update_max_seq_info(
            self.max_seq_len, self.max_blocks_per_seq, block_offset_multiplier, self.max_batch_size
        )
        needed = self._rows * (self.max_blocks_per_seq + 1)
        for suffix in self._pool_suffixes:
            if self._input_buffer.get_capacity("cache_loc" + suffix) < needed:
                self._input_buffer.resize("cache_loc" + suffix, needed)

    # Arguments.

    def _add_available(self, names: Collection[str]) -> None:
        self._available_args.update(names)
        self._available_args.update(name + self._host_suffix for name in names)

    @property
    def available_args(self) -> set[str]:
        """Names that may be activated: buffers, their ``_host`` twins, ``batch_info_host``, extra arguments."""
        return self._available_args | set(self._extra_args)

    def has_arg(self, name: str) -> bool:
        """Whether there is an argument of that name."""
        return name in self._available_args or name in self._extra_args

    def _check_available(self, name: str) -> None:
        if not self.has_arg(name):
            raise ValueError(unknown_name_message("SequenceInfo argument", name, self.available_args))

    def activate_arg(self, name: str) -> bool:
        """Make an argument one of ``named_args``.

        Returns:
            Whether it was inactive.

        Raises:
            ValueError: there is no such argument.
        """
        self._check_available(name)
        if name in self._active_args:
            return False
        self._active_args += (name,)
        return True

    @property
    def named_args(self) -> dict[str, torch.Tensor]:
        """The active arguments by name, in the order of activation, then the extra arguments."""
        whole = self._whole_args()
        args = {name: self.get_arg(name) for name in self._active_args if name not in whole}
        args.update(whole)
        args.update(self._extra_args)
        return args

    def _whole_args(self) -> dict[str, torch.Tensor]:
        """The active arguments that are the same tensors for every batch; an orchestrator asks before every call."""
        buffer = self._input_buffer
        buffer.settle()
        valid_for = self._active_args, buffer, buffer.layout, self.batch_info
        if self._known_args[0] != valid_for:
            names = [name for name in self._active_args if name in self._available_args and name not in _UNFLATTENED]
            args = {name: self.get_arg(name) for name in names}
            if any(type(value) is not torch.Tensor for value in args.values()):
                return args  # while an orchestrator is traced
            self._known_args = valid_for, args
        return self._known_args[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known_args": (None, {})}

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """The values of ``named_args``."""
        return tuple(self.named_args.values())

    def get_arg(self, name: str, truncate: bool | None = None, unflatten: bool | None = None) -> torch.Tensor:
        """Return one argument; buffers come as views that alias them.

        Args:
            name: buffer, ``_host`` twin, ``batch_info_host`` or extra argument, active or not.
            truncate: ``True``: ``[current length]``; ``False``: ``[capacity]``; ``None``: truncated for ``input_ids``
                and ``position_ids`` only.
            unflatten: whether to give it :meth:`unflatten`'s shape (which implies truncating); ``None``: for
                ``input_ids`` and ``position_ids``, unless ``truncate`` is ``False``.

        Raises:
            ValueError: there is no such argument.
        """
        self._check_available(name)
        if name == _BATCH_INFO_HOST:
            return self.batch_info.serialize()
        if name in self._extra_args:
            return self._extra_args[name]
        shaped = name in _UNFLATTENED
        unflatten = shaped and truncate is not False if unflatten is None else unflatten
        truncate = shaped if truncate is None else truncate
        if shaped and unflatten:
            rows, length = self._num_rows(), self._input_buffer.get_current_length(name)
            _check_shape(length, rows)
            return self._input_buffer.get_shaped_view(name, rows)
        if name.endswith(self._host_suffix):
            view = self._input_buffer.get_host_view(name.removesuffix(self._host_suffix), truncate or unflatten)
        else:
            view = self._input_buffer.get_view(name, truncate or unflatten)
        return self.unflatten(view) if unflatten else view

    def _has_attention_args(self) -> bool:
        """Return whether an argument of cached attention was ever activated."""
        if self._attention_args[0] is not self._active_args:
            found = any(name.removesuffix(self._host_suffix) not in _NOT_ATTENTION for name in self._active_args)
            self._attention_args = self._active_args, found
        return self._attention_args[1]

    def unflatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give ``[tokens, ...]`` the model's batch and sequence dimensions.

        ``[num_sequences, tokens / num_sequences, ...]`` while no argument of cached attention was ever activated and
        for generate-only and extend-only batches, else ``[1, tokens, ...]``.
        """
        rows, tokens = self._num_rows(), tensor.shape[0]
        _check_shape(tokens, rows)
        return tensor.view(rows, tokens // rows, *tensor.shape[1:])

    def _num_rows(self) -> int:
        """The first dimension of what :meth:`unflatten` returns."""
        prefill, extend, decode = self.batch_info.get_num_sequences()
        one_kind = not prefill and not (extend and decode)
        return prefill + extend + decode if one_kind or not self._has_attention_args() else 1

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`unflatten`: ``[batch, sequence, ...]`` becomes ``[tokens, ...]``."""
        return tensor.flatten(0, 1)

    # Window groups.

    def register_window_groups(self, window_sizes: Sequence[int]) -> None:
        """Give each window size after the first a pool of its own: ``cache_loc_g1``, ``cu_num_pages_g1``, ...

        Raises:
            ValueError: other window sizes were registered before.
        """
        if self._window_sizes and list(window_sizes) != self._window_sizes:
            raise ValueError(f"window groups {self._window_sizes} are registered already, got {list(window_sizes)}")
        if self._window_sizes or not window_sizes:
            return
        self._window_sizes = list(window_sizes)
        for pool in range(1, len(window_sizes)):
            suffix = f"_g{pool}"
            for name in POOLED_BUFFERS:
                self._clone_buffer(name, name + suffix)
            self._add_available([name + suffix for name in POOLED_BUFFERS])
            self._pool_suffixes.append(suffix)

    def _clone_buffer(self, name: str, clone: str) -> None:
        buffer = self._input_buffer
        view = buffer.get_view(name)
        buffer.add_truncatable_tensor(clone, view.numel(), view.dtype)
        buffer.copy_(clone + self._host_suffix, buffer.get_host_view(name, truncate=True))
        buffer.copy_(clone, buffer.get_view(name, truncate=True))
        if name not in buffer.stale_names():
            buffer.mark_mirror(clone, buffer.device_version[clone])

    @property
    def num_pools(self) -> int:
        """Page pools: 1, or the number of window groups."""
        return len(self._pool_suffixes)

    # Host-prepare functions.

    def register_host_prepare_for_attention_forward(self, fn: HostPrepareFunction, args: Sequence[str]) -> None:
        """Have ``fn(**{name: get_arg(name)})`` run before each forward, e.g. to plan a kernel on the host.

        Raises:
            ValueError: an argument does not exist.
        """
        for name in args:
            self._check_available(name)
        self._active_host_prep_args.update(args)
        self._host_prepare_functions.append((fn, tuple(args)))

    def run_host_prepare_for_attention_forward(self) -> None:
        """Run the registered functions in the order of registration."""
        for fn, args in self._host_prepare_functions:
            fn(**{name: self.get_arg(name) for name in args})

    # New batches.

    def nest_sequences(
        self,
        input_ids: IntList,
        cu_seqlen: IntList,
        input_pos: IntList | int,
        batch_info: BatchInfo | IntList | None = None,
        slot_idx: IntList | None = None,
        prompt_lens: IntList | None = None,
        cache_loc_per_pool: Sequence[IntList] | None = None,
        cu_num_pages_per_pool: Sequence[IntList] | None = None,
        extra_page_per_seq_per_pool: Sequence[IntList] | None = None,
        seq_len_with_cache_per_pool: Sequence[IntList] | None = None,
        last_page_len_per_pool: Sequence[IntList] | None = None,
        gather_context_logits: bool = False,
        _gather_idx: IntList | None = None,
        _mask_scatter_indices: IntList | None = None,
        _ungathered_input_ids: torch.Tensor | None = None,
        _gather_slot_idx: IntList | None = None,
        _ungathered_new_lens: torch.Tensor | None = None,
        **extra_args: torch.Tensor | Sequence[torch.Tensor] | None,
    ) -> None:
        """Stage a new batch, derive what follows from it, bring it to the device and prepare it there.

        The overlap inputs change the batch on the device alone: afterwards the mirrors of what they wrote are stale,
        apart from those that registered host-prepare functions read.

        Args:
            input_ids: ``t`` tokens, flat, on the host.
            cu_seqlen: ``n + 1`` boundaries of the sequences.
            input_pos: ``n`` counts of cached tokens, or one for all.
            batch_info: the six counts (a BatchInfo's are copied); ``None``: trailing sequences of length 1 are
                decodes, the rest prefills.
            slot_idx: ``n`` state slots.
            prompt_lens: ``n``; the sequences' lengths by default.
            cache_loc_per_pool: pages per pool; pools that are not given repeat pool 0, here and below.
            cu_num_pages_per_pool: ``n + 1`` page boundaries per pool.
            extra_page_per_seq_per_pool: ``n`` pages per pool that a crossing may insert; none (-1) by default.
            seq_len_with_cache_per_pool: ``n`` lengths per pool; ``input_pos + seq_len`` by default.
            last_page_len_per_pool: ``n`` lengths per pool; follows from ``seq_len_with_cache`` by default.
            gather_context_logits: whether every prefill token gets logits.
            _gather_idx: overlap: where in ``_ungathered_input_ids`` each late token is.
            _mask_scatter_indices: overlap: where in ``input_ids`` it belongs.
            _ungathered_input_ids: overlap: the previous iteration's tokens, on the device.
            _gather_slot_idx: overlap: slot in ``_ungathered_new_lens`` of each row right after the prefills.
            _ungathered_new_lens: overlap: tokens accepted by the previous iteration, on the device.
            **extra_args: further model inputs, a tensor or tensors to concatenate; they replace all earlier ones.

        Raises:
            AssertionError: an active argument has no data.
            ValueError: too much data, or counts that do not fit ``cu_seqlen``.
        """
        boundaries = batch_layout.as_ints(cu_seqlen)
        seq_len = [end - start for start, end in pairwise(boundaries)]
        num_sequences = len(seq_len)
        start_pos = [int(input_pos)] * num_sequences if isinstance(input_pos, int) else batch_layout.as_ints(input_pos)
        counts = self._counts(batch_info, seq_len)
        tokens = input_ids if isinstance(input_ids, torch.Tensor) else batch_layout.as_ints(input_ids)
        self._check_batch(tokens, boundaries, start_pos)
        num_prefill = counts[0]
        gather, gather_required = batch_layout.gather_indices(boundaries, num_prefill, gather_context_logits)
        with_cache = [pos + length for pos, length in zip(start_pos, seq_len, strict=True)]

        staged: dict[str, IntList | Sequence[bool] | None] = {
            "input_ids": tokens,
            "position_ids": batch_layout.positions(start_pos, seq_len),
            "input_pos": start_pos,
            "cu_seqlen": boundaries,
            "seq_len": seq_len,
            "slot_idx": slot_idx,
            "prompt_lens": seq_len if prompt_lens is None else prompt_lens,
            "use_initial_states": [pos > 0 for pos in start_pos],
            "max_seq_info": self.batch_info.get_max_seq_info(),
            "any_prefill_use_initial_states": [any(pos > 0 for pos in start_pos[:num_prefill])],
            "token_gather_indices": gather,
            "_gather_idx": _gather_idx,
            "_mask_scatter_indices": _mask_scatter_indices,
            "_gather_slot_idx": _gather_slot_idx,
        }
        for pool, suffix in enumerate(self._pool_suffixes):
            given_lengths = _of_pool(seq_len_with_cache_per_pool, pool)
            pool_lengths = with_cache if given_lengths is None else batch_layout.as_ints(given_lengths)
            last_page_len = _of_pool(last_page_len_per_pool, pool)
            extra_page = _of_pool(extra_page_per_seq_per_pool, pool)
            staged |= {
                "seq_len_with_cache" + suffix: pool_lengths,
                "cache_loc" + suffix: _of_pool(cache_loc_per_pool, pool),
                "cu_num_pages" + suffix: _of_pool(cu_num_pages_per_pool, pool),
                "last_page_len" + suffix: last_page_len
                if last_page_len is not None
                else batch_layout.last_page_lengths(pool_lengths, self.tokens_per_block),
                "extra_page_per_seq" + suffix: extra_page if extra_page is not None else [_NO_PAGE] * num_sequences,
            }
        self._store_extra_args(extra_args)
        self._check_data({name for name, data in staged.items() if data is not None})
        self.batch_info.update(counts)
        self.batch_info.update_tokens_gather_info(len(gather), gather_required)
        for name, data in staged.items():
            # Nothing of an older batch stays behind under a name that got no data.
            self._input_buffer.stage(name, [] if data is None else data)
        self._input_buffer.copy_to_device()

        if _ungathered_input_ids is not None:
            self.rescatter_input_ids_(_ungathered_input_ids)
        if _ungathered_new_lens is not None:
            # Mirrors are left behind, but for what the host-prepare functions read right now: the consumers' mirrors
            # are their orchestrator's business.
            self.offset_with_new_lens_(_ungathered_new_lens, active_args_override=set(self._active_host_prep_args))
        self.run_host_prepare_for_attention_forward()

    def _counts(self, batch_info: BatchInfo | IntList | None, seq_len: Sequence[int]) -> list[int]:
        if batch_info is None:
            return batch_layout.batch_counts(seq_len)
        if isinstance(batch_info, BatchInfo):
            batch_info = batch_info.serialize()
        counts = batch_layout.as_ints(batch_info)[:6]
        batch_layout.check_counts(counts, seq_len)
        return counts

    def _check_batch(self, tokens: IntList, boundaries: Sequence[int], input_pos: Sequence[int]) -> None:
        num_sequences = len(boundaries) - 1
        num_tokens = tokens.numel() if isinstance(tokens, torch.Tensor) else len(tokens)
        if num_sequences < 1 or boundaries[0] != 0 or boundaries[-1] != num_tokens:
            raise ValueError(
                f"cu_seqlen must run from 0 to the {num_tokens} tokens of input_ids, got {list(boundaries)}"
            )
        if num_sequences > self._rows:
            raise ValueError(f"a batch of {num_sequences} sequences, but max_batch_size is {self.max_batch_size}")
        if len(input_pos) != num_sequences:
            raise ValueError(f"input_pos has {len(input_pos)} entries for {num_sequences} sequences")

    def _check_data(self, provided: Collection[str]) -> None:
        known = {*provided, *(name + self._host_suffix for name in provided), _BATCH_INFO_HOST, *self._extra_args}
        missing = sorted({*self._active_args, *self._active_host_prep_args} - known)
        assert not missing, f"active arguments without data: {', '.join(missing)}; pass them to nest_sequences"

    def _store_extra_args(self, extra_args: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]) -> None:
        taken = sorted(self._available_args.intersection(extra_args))
        if taken:
            raise ValueError(f"not extra arguments but derived by nest_sequences: {', '.join(taken)}")
        self._extra_args = {
            name: (value if isinstance(value, torch.Tensor) else torch.cat(list(value))).to(
                self.device, non_blocking=True
            )
            for name, value in extra_args.items()
            if value is not None
        }

    def set_example_sequence(
        self,
        input_ids: Sequence[Sequence[int]] | torch.Tensor | None = None,
        cu_seqlen: IntList | None = None,
        input_pos: IntList | int = 0,
        batch_info: BatchInfo | IntList | None = None,
        **kwargs: Any,
    ) -> None:
        """Set a batch for export or tests: slots 0, 1, .. and pages of their own unless given.

        Args:
            input_ids: one list of tokens per sequence, a ``[batch, sequence]`` tensor, or flat when ``cu_seqlen`` is
                given; by default two sequences of four tokens, as far as the limits allow.
            cu_seqlen: boundaries of flat ``input_ids``.
            input_pos: cached tokens, none by default.
            batch_info: as for :meth:`nest_sequences`.
            **kwargs: further arguments of :meth:`nest_sequences`.
        """
        if input_ids is None:
            rows = min(_EXAMPLE_ROWS, self._rows, self.max_num_tokens)
            length = max(1, min(_EXAMPLE_TOKENS, self.max_seq_len, self.max_num_tokens // rows))
            input_ids = [[1] * length for _ in range(rows)]
        if cu_seqlen is None:
            rows_of_ids = [batch_layout.as_ints(row) for row in input_ids]
            flat: IntList = [token for row in rows_of_ids for token in row]
            boundaries = list(accumulate((len(row) for row in rows_of_ids), initial=0))
        else:
            flat, boundaries = batch_layout.as_ints(input_ids), batch_layout.as_ints(cu_seqlen)  # type: ignore[arg-type]
        num_sequences = len(boundaries) - 1
        start = [input_pos] * num_sequences if isinstance(input_pos, int) else batch_layout.as_ints(input_pos)
        lengths = [start[i] + boundaries[i + 1] - boundaries[i] for i in range(num_sequences)]
        cache_loc, cu_num_pages = batch_layout.example_pages(lengths, self.tokens_per_block, self._num_blocks)
        defaults: dict[str, Any] = {
            "slot_idx": list(range(num_sequences)),
            "cache_loc_per_pool": [cache_loc],
            "cu_num_pages_per_pool": [cu_num_pages],
            "_gather_idx": [],
            "_mask_scatter_indices": [],
            "_gather_slot_idx": [],
        }
        self.nest_sequences(flat, boundaries, input_pos, batch_info=batch_info, **(defaults | kwargs))

    def set_max_num_tokens_sample(self) -> None:
        """Set a batch of max_batch_size equal sequences that together have as many tokens as fit."""
        rows = min(self.max_batch_size, self.max_num_tokens)
        length = min(self.max_num_tokens // rows, self.max_seq_len)
        self.set_example_sequence([[1] * length for _ in range(rows)])

    def set_capture_batch(self, max_draft_len: int = 0, batch_size: int | None = None) -> None:
        """Set rows of ``1 + max_draft_len`` tokens without history: extend-only, or generate-only without drafts.

        Args:
            max_draft_len: drafts per row; above 0 it is also noted in ``batch_info``.
            batch_size: rows; max_batch_size, as far as the tokens fit, by default.
        """
        length = 1 + max_draft_len
        if batch_size is None:
            batch_size = max(1, min(self.max_batch_size, self.max_num_tokens // length))
        kinds = [0, 0, 0, 0, batch_size, batch_size]
        if max_draft_len > 0:
            kinds = [0, 0, batch_size, batch_size * length, 0, 0]
            self.batch_info.update_max_draft_len(max_draft_len)
        self.set_example_sequence([[1] * length for _ in range(batch_size)], batch_info=kinds)

    def reset(self) -> None:
        """Set a generate-only batch of max_batch_size sequences without history."""
        self.set_capture_batch()

    # Logits.

    def maybe_gather_and_squeeze(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows that get logits, ``[num_tokens_to_gather, ...]``, out of ``[batch, sequence, ...]``."""
        flat = self.flatten(tensor)
        if not self.batch_info.is_gather_required():
            return flat
        count = self.batch_info.get_num_tokens_to_gather()
        return flat.index_select(0, self._input_buffer.get_view("token_gather_indices")[:count])

    def unnest_sequences(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split ``[batch, sequence, ...]`` into one tensor per sequence; reads ``seq_len_host``."""
        seq_len = self._input_buffer.get_host_view("seq_len")[: self.num_sequences].tolist()
        return list(torch.split(self.flatten(tensor), seq_len))


def _check_shape(num_tokens: int, rows: int) -> None:
    if num_tokens % rows:
        raise ValueError(
            f"cannot give {num_tokens} tokens the shape of {rows} sequences of equal length; "
            "without cached attention all sequences of a batch must be equally long"
        )


def _of_pool(per_pool: Sequence[IntList] | None, pool: int) -> IntList | None:
    """Return a pool's data: pool 0's where the pool is not given, ``None`` where nothing is."""
    if per_pool is None or len(per_pool) == 0:
        return None
    given = per_pool[pool] if pool < len(per_pool) else None
    return per_pool[0] if given is None else given

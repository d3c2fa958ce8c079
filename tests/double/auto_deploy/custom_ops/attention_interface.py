"""DOUBLE of AutoDeploy's custom_ops/attention_interface.py, written from the description of its behaviour, for tests.

Staging area and mirrors are the same memory; the only copy to the host is of everything; nothing has a version, and
nobody is told of a copy. The twins of other pools are written and forgotten when it is decided whether to copy.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ..age import AGE

I32, I64, BOOL = torch.int32, torch.int64, torch.bool


class InputBuffer:
    """Named tensors, packed into one device and one host byte buffer; truncatable ones have a pair of their own."""

    def __init__(self, specs: list[tuple[Any, ...]]) -> None:
        self.device = torch.device("cpu")
        self.host_device = torch.device("cpu")
        self._places: dict[str, tuple[str, int, int, torch.dtype]] = {}
        self._current: dict[str, int] = {}
        self._memory: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        size = 0
        for name, numel, dtype, *truncatable in specs:
            if truncatable and truncatable[0]:
                self.add_truncatable_tensor(name, numel, dtype)
                continue
            size += -size % dtype.itemsize
            self._places[name] = ("", size, numel, dtype)
            self._current[name] = numel
            size += numel * dtype.itemsize
        self._memory[""] = self._pair(size)

    def _pair(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        pinned = self.device.type == "cuda"
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device), host

    def add_truncatable_tensor(self, name: str, max_numel: int, dtype: torch.dtype) -> None:
        self._places[name] = (name, 0, max_numel, dtype)
        self._current[name] = 0
        self._memory[name] = self._pair(max_numel * dtype.itemsize)

    def resize(self, name: str, capacity: int) -> None:
        region, start, numel, dtype = self._places[name]
        old, self._memory[name] = self._memory[name], self._pair(capacity * dtype.itemsize)
        kept = min(numel, capacity) * dtype.itemsize
        for new, before in zip(self._memory[name], old, strict=True):
            new[:kept] = before[:kept]
        self._places[name] = (region, start, capacity, dtype)

    @property
    def tensor_names(self) -> list[str]:
        return list(self._places)

    def get_capacity(self, name: str) -> int:
        return self._places[name][2]

    def get_current_length(self, name: str) -> int:
        return self._current[name]

    def _view(self, side: int, name: str, truncate: bool) -> torch.Tensor:
        region, start, numel, dtype = self._places[name]
        count = self._current[name] if truncate else numel
        return self._memory[region][side][start : start + count * dtype.itemsize].view(dtype)

    def get_view(self, name: str, truncate: bool = False) -> torch.Tensor:
        return self._view(0, name, truncate)

    def get_host_view(self, name: str, truncate: bool = False) -> torch.Tensor:
        return self._view(1, name, truncate)

    def stage(self, name: str, data: Any, fill_value: Any = None) -> None:
        values = torch.as_tensor(data, dtype=self._places[name][3]).reshape(-1)
        view = self.get_host_view(name)
        view[: values.numel()] = values
        if fill_value is not None:
            view[values.numel() :] = fill_value
        self._current[name] = values.numel()

    def copy_(self, name: str, src: torch.Tensor) -> None:
        on_device = src.device.type == self.device.type
        view = self.get_view(name) if on_device else self.get_host_view(name)
        view[: src.numel()] = src.reshape(-1)
        self._current[name] = src.numel()

    def copy_to_device(self) -> None:
        for region, (device, host) in self._memory.items():
            count = self._moved(region)
            device[:count].copy_(host[:count], non_blocking=True)

    def copy_to_host(self, non_blocking: bool = False) -> None:
        for region, (device, host) in self._memory.items():
            count = self._moved(region)
            host[:count].copy_(device[:count], non_blocking=True)
        if self.device.type == "cuda" and not non_blocking:
            torch.cuda.current_stream(self.device).synchronize()

    def _moved(self, region: str) -> int:
        if not region:
            return self._memory[region][0].numel()
        return self._current[region] * self._places[region][3].itemsize

    def to(self, device: Any, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device(device)
        for region, (dev, host) in self._memory.items():
            new = self._pair(dev.numel())
            new[0].copy_(dev)
            new[1].copy_(host)
            self._memory[region] = new


class BatchInfo:
    """Host integers about the batch; early releases lack the last one, the draft length."""

    SLOTS = 12 if AGE == "early" else 13

    def __init__(self, batch_info_host: torch.Tensor | None = None) -> None:
        self._t = torch.zeros(self.SLOTS, dtype=I32) if batch_info_host is None else batch_info_host

    def serialize(self) -> torch.Tensor:
        return self._t

    def update(self, values: Any) -> None:
        self._t[:6] = torch.as_tensor(values, dtype=I32)

    def is_generate_only(self) -> bool:
        return int(self._t[0]) == 0 and int(self._t[2]) == 0

    def is_extend_only(self) -> bool:
        return int(self._t[2]) > 0 and int(self._t[0]) == 0 and int(self._t[4]) == 0

    def get_num_sequences(self) -> tuple[int, int, int]:
        return int(self._t[0]), int(self._t[2]), int(self._t[4])

    def get_num_tokens(self) -> tuple[int, int, int]:
        return int(self._t[1]), int(self._t[3]), int(self._t[5])

    def get_total_num_sequences(self) -> int:
        return sum(self.get_num_sequences())

    def get_total_num_tokens(self) -> int:
        return sum(self.get_num_tokens())

    def get_absorbed_info(self) -> tuple[int, int, int]:
        p, e, d = self.get_num_sequences()
        return p + e, int(self._t[1]) + int(self._t[3]), d

    def update_tokens_gather_info(self, n: int, required: bool) -> None:
        self._t[10], self._t[11] = n, int(required)

    def get_num_tokens_to_gather(self) -> int:
        return int(self._t[10])

    def is_gather_required(self) -> bool:
        return bool(self._t[11])

    def update_max_seq_info(self, *values: int) -> None:
        self._t[6:10] = torch.as_tensor(values, dtype=I32)

    def get_max_seq_info(self) -> tuple[int, ...]:
        return tuple(self._t[6:10].tolist())

    if AGE != "early":

        def update_max_draft_len(self, n: int) -> None:
            self._t[12] = n

        def get_max_draft_len(self) -> int:
            return int(self._t[12])


PER_POOL = ("cache_loc", "cu_num_pages", "last_page_len", "extra_page_per_seq", "seq_len_with_cache")
SWITCH = ("input_ids", "input_pos", "cu_seqlen", "seq_len", "position_ids", "use_initial_states")
OFFSET = ("input_pos", "cache_loc", "cu_num_pages", "last_page_len", "position_ids", "seq_len_with_cache")
OFFSET += ("use_initial_states",)


class _Metadata:
    """What all ages of SequenceInfo share."""

    def __init__(
        self,
        max_seq_len: int,
        max_batch_size: int,
        max_num_tokens: int,
        tokens_per_block: int | None = None,
        vocab_size_padded: int | None = None,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.tokens_per_block = tokens_per_block or max_seq_len
        b, t = max(2, max_batch_size), max_num_tokens
        self._input_buffer = InputBuffer(
            [
                ("input_ids", t, I32),
                ("position_ids", t, I64),
                ("input_pos", b, I32),
                ("cu_seqlen", b + 1, I32),
                ("cache_loc", t, I32, True),
                ("cu_num_pages", b + 1, I32),
                ("last_page_len", b, I32),
                ("slot_idx", b, I64),
                ("any_prefill_use_initial_states", 1, BOOL),
                ("max_seq_info", 4, I32),
                ("seq_len", b, I32),
                ("seq_len_with_cache", b, I32),
                ("prompt_lens", b, I32),
                ("use_initial_states", b, BOOL),
                ("extra_page_per_seq", b, I32),
                ("token_gather_indices", t, I64),
                ("_gather_idx", t, I32),
                ("_gather_slot_idx", b, I64),
                ("_mask_scatter_indices", t, I32),
            ]
        )
        self._host_suffix = "_host"
        self._active_args: tuple[str, ...] = ("input_ids", "position_ids")
        self._active_host_prep_args: set[str] = set()
        self._prepare: list[tuple[Any, tuple[str, ...]]] = []
        self._suffixes = [""]
        self._extra: dict[str, torch.Tensor] = {}
        self._num_blocks = 0
        self.batch_info = BatchInfo()
        self.reset()

    # Arguments.

    @property
    def _available_args(self) -> set[str]:
        names = self._input_buffer.tensor_names
        return {*names, *(n + "_host" for n in names), "batch_info_host"}

    @property
    def available_args(self) -> set[str]:
        return self._available_args

    def activate_arg(self, name: str) -> bool:
        assert name in self._available_args, name
        if name in self._active_args:
            return False
        self._active_args = (*self._active_args, name)
        return True

    @property
    def device(self) -> torch.device:
        return self._input_buffer.device

    @property
    def host_device(self) -> torch.device:
        return self._input_buffer.host_device

    def to(self, *args: Any, **kwargs: Any) -> None:
        self._input_buffer.to(*args, **kwargs)

    @property
    def num_sequences(self) -> int:
        return self.batch_info.get_total_num_sequences()

    @property
    def total_num_tokens(self) -> int:
        return self.batch_info.get_total_num_tokens()

    @property
    def is_generate_only(self) -> bool:
        return self.batch_info.is_generate_only()

    @property
    def is_extend_only(self) -> bool:
        return self.batch_info.is_extend_only()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def update_cache_information(self, num_blocks: int, block_offset_multiplier: int = 0) -> None:
        self._num_blocks = num_blocks
        for suffix in self._suffixes:
            self._input_buffer.resize("cache_loc" + suffix, max(num_blocks, self.max_num_tokens))

    @property
    def named_args(self) -> dict[str, torch.Tensor]:
        return {**{name: self.get_arg(name) for name in self._active_args}, **self._extra}

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.named_args.values())

    def get_arg(self, name: str, truncate: bool | None = None, unflatten: bool | None = None) -> torch.Tensor:
        if name == "batch_info_host":
            return self.batch_info.serialize()
        shaped = name in ("input_ids", "position_ids")
        truncate = shaped if truncate is None else truncate
        unflatten = shaped and truncate if unflatten is None else unflatten
        if name.endswith("_host"):
            view = self._input_buffer.get_host_view(name[: -len("_host")], truncate)
        else:
            view = self._input_buffer.get_view(name, truncate)
        return self.unflatten(view) if unflatten else view

    def unflatten(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = {"input_ids", "position_ids", "token_gather_indices"}
        attention = any(name.removesuffix("_host") not in plain for name in self._active_args)
        rows = self.num_sequences if not attention or self.is_generate_only or self.is_extend_only else 1
        return tensor.view(rows, -1, *tensor.shape[1:])

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(0, 1)

    def register_host_prepare_for_attention_forward(self, fn: Any, args: Any) -> None:
        self._active_host_prep_args.update(args)
        self._prepare.append((fn, tuple(args)))

    def run_host_prepare_for_attention_forward(self) -> None:
        for fn, names in self._prepare:
            fn(**{name: self.get_arg(name) for name in names})

    # New batches.

    def _nest(
        self,
        input_ids: Any,
        cu_seqlen: Any,
        input_pos: Any,
        batch_info: Any,
        slot_idx: Any,
        prompt_lens: Any,
        pools: list[dict[str, Any]],
        overlap: dict[str, Any],
        gather_context_logits: bool,
    ) -> None:
        cu = [int(x) for x in cu_seqlen]
        seq_len = [b - a for a, b in pairwise(cu)]
        n = len(seq_len)
        start = [int(input_pos)] * n if isinstance(input_pos, int) else [int(x) for x in input_pos]
        if batch_info is None:
            decode = 0
            while decode < n and seq_len[n - 1 - decode] == 1:
                decode += 1
            prefill = n - decode
            batch_info = [prefill, sum(seq_len[:prefill]), 0, 0, decode, decode]
        if isinstance(batch_info, BatchInfo):
            batch_info = batch_info.serialize()[:6]
        counts = [int(x) for x in batch_info[:6]]
        self.batch_info.update(counts)
        prefill = counts[0]
        every = prefill == 0 or gather_context_logits
        gather = (
            list(range(cu[-1])) if every else [c - 1 for c in cu[1 : prefill + 1]] + list(range(cu[prefill], cu[-1]))
        )
        self.batch_info.update_tokens_gather_info(len(gather), not every)
        total = [a + b for a, b in zip(start, seq_len, strict=True)]
        data: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": [s + i for s, length in zip(start, seq_len, strict=True) for i in range(length)],
            "input_pos": start,
            "cu_seqlen": cu,
            "seq_len": seq_len,
            "slot_idx": slot_idx,
            "prompt_lens": prompt_lens or seq_len,
            "use_initial_states": [s > 0 for s in start],
            "any_prefill_use_initial_states": [any(s > 0 for s in start[:prefill])],
            "token_gather_indices": gather,
            **{name: overlap.get(name) or [] for name in ("_gather_idx", "_mask_scatter_indices", "_gather_slot_idx")},
        }
        for suffix, given in zip(self._suffixes, pools, strict=True):
            lengths = given.get("seq_len_with_cache") or total
            last = given.get("last_page_len") or [(x - 1) % self.tokens_per_block + 1 for x in lengths]
            data["seq_len_with_cache" + suffix], data["last_page_len" + suffix] = lengths, last
            data["cache_loc" + suffix], data["cu_num_pages" + suffix] = given["cache_loc"], given["cu_num_pages"]
            data["extra_page_per_seq" + suffix] = given.get("extra_page_per_seq") or [-1] * n
        for name, values in data.items():
            if values is not None:
                self._input_buffer.stage(name, values)
        self._input_buffer.copy_to_device()
        if overlap.get("_ungathered_input_ids") is not None:
            self.rescatter_input_ids_(overlap["_ungathered_input_ids"])
        if overlap.get("_ungathered_new_lens") is not None:
            self.offset_with_new_lens_(overlap["_ungathered_new_lens"])
        self.run_host_prepare_for_attention_forward()

    def set_example_sequence(self, rows: list[list[int]] | None = None, batch_info: Any = None) -> None:
        rows = rows or [[1] * 4] * 2
        cu = [0]
        for row in rows:
            cu.append(cu[-1] + len(row))
        pages = [-(-len(row) // self.tokens_per_block) for row in rows]
        bounds = [sum(pages[:i]) for i in range(len(rows) + 1)]
        pool = {"cache_loc": list(range(bounds[-1])), "cu_num_pages": bounds}
        tokens = [token for row in rows for token in row]
        slots = list(range(len(rows)))
        self._nest(tokens, cu, 0, batch_info, slots, None, [pool] * len(self._suffixes), {}, False)

    def set_max_num_tokens_sample(self) -> None:
        self.set_example_sequence([[1] * (self.max_num_tokens // self.max_batch_size)] * self.max_batch_size)

    def set_capture_batch(self, max_draft_len: int = 0, batch_size: int | None = None) -> None:
        n, length = batch_size or self.max_batch_size, 1 + max_draft_len
        counts = [0, 0, n, n * length, 0, 0] if max_draft_len else [0, 0, 0, 0, n, n]
        self.set_example_sequence([[1] * length] * n, counts)

    def reset(self) -> None:
        self.set_capture_batch()

    # Mutations.

    def copy_(self, name: str, src: torch.Tensor, strict: bool = True) -> None:
        assert not strict or src.numel() == self._input_buffer.get_current_length(name), name
        self._input_buffer.copy_(name, src)

    def rescatter_input_ids_(self, ungathered_input_ids: torch.Tensor) -> None:
        buffer = self._input_buffer
        source = buffer.get_view("_gather_idx", True).long()
        target = buffer.get_view("_mask_scatter_indices", True).long()
        buffer.get_view("input_ids")[target] = ungathered_input_ids.reshape(-1)[source].to(I32)

    def offset_with_new_lens_(self, new_lens: torch.Tensor) -> None:
        slots = self._input_buffer.get_view("_gather_slot_idx", True)
        prefill = self.batch_info.get_num_sequences()[0]
        offset = torch.zeros(self.num_sequences, dtype=I32, device=self.device)
        offset[prefill : prefill + slots.numel()] = new_lens.reshape(-1)[slots].to(I32) - 1
        self.offset_pos_and_cache_(offset)

    def _switch(self) -> None:
        """The device's part; `batch_info` is changed too."""
        n, view = self.num_sequences, self._input_buffer.get_view
        last = view("cu_seqlen")[1 : n + 1].long() - 1
        moved = view("input_pos")[:n] + view("seq_len")[:n] - 1
        new = {
            "input_ids": view("input_ids")[last],
            "input_pos": moved,
            "cu_seqlen": torch.arange(n + 1, dtype=I32, device=self.device),
            "seq_len": torch.ones(n, dtype=I32, device=self.device),
            "position_ids": moved.to(I64),
            "use_initial_states": moved > 0,
        }
        for name, value in new.items():
            view(name)[: value.numel()] = value
            self._input_buffer._current[name] = value.numel()
        self.batch_info.update([0, 0, 0, 0, n, n])
        self.batch_info.update_tokens_gather_info(n, False)

    def _offset(self, offset: torch.Tensor) -> None:
        n, buffer, view = self.num_sequences, self._input_buffer, self._input_buffer.get_view
        offset = offset.reshape(-1).to(I32)
        view("input_pos")[:n] += offset
        view("use_initial_states")[:n] = view("input_pos")[:n] > 0
        count = buffer.get_current_length("position_ids")
        token = torch.arange(count, device=self.device)
        row = (token[:, None] >= view("cu_seqlen")[1 : n + 1][None, :]).sum(1).clamp(max=n - 1)
        view("position_ids")[:count] += offset[row]
        paged = any(
            a + b in {*self._active_args, *self._active_host_prep_args} for a in self._paged for b in ("", "_host")
        )
        for suffix in self._suffixes:
            view("seq_len_with_cache" + suffix)[:n] += offset
            if paged:
                self._move_pages(suffix, offset)

    @property
    def _paged(self) -> list[str]:
        return [name + suffix for name in ("cache_loc", "cu_num_pages", "last_page_len") for suffix in self._suffixes]

    def _move_pages(self, suffix: str, offset: torch.Tensor) -> None:
        n, buffer, view = self.num_sequences, self._input_buffer, self._input_buffer.get_view
        last, bounds = view("last_page_len" + suffix)[:n], view("cu_num_pages" + suffix)[: n + 1]
        length = last + offset
        step = (length > self.tokens_per_block).to(I32) - (length < 1).to(I32)
        old = bounds.clone()
        bounds[1:] += torch.cumsum(step, 0).to(I32)
        last.copy_(length - step * self.tokens_per_block)
        name = "cache_loc" + suffix
        room = min(buffer.get_current_length(name) + n, buffer.get_capacity(name))
        pages = view(name)[:room]
        place = torch.arange(room, device=self.device)
        row = (place[:, None] >= bounds[1:][None, :]).sum(1).clamp(max=n - 1)
        inside = place - bounds[row]
        fresh = view("extra_page_per_seq" + suffix)[:n][row]
        kept = pages[(old[row] + inside).clamp(0, room - 1)]
        pages.copy_(torch.where(inside < (old[1:] - old[:-1])[row], kept, fresh))
        buffer._current[name] = room

    def _wants(self, written: tuple[str, ...], override: set[str] | None) -> bool:
        if override is not None and (not isinstance(override, set) or not override <= set(self._active_args)):
            raise ValueError(f"active_args_override {override} is no subset of the active args")
        active = {*self._active_args, *self._active_host_prep_args}
        twins = {name + "_host" for name in written} & active
        return bool(twins if override is None else twins & override)

    # Logits.

    def maybe_gather_and_squeeze(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = self.flatten(tensor)
        if not self.batch_info.is_gather_required():
            return flat
        count = self.batch_info.get_num_tokens_to_gather()
        return flat[self._input_buffer.get_view("token_gather_indices")[:count]]

    def unnest_sequences(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        lengths = self._input_buffer.get_host_view("seq_len")[: self.num_sequences].tolist()
        return list(torch.split(self.flatten(tensor), lengths))


class _PerPool(_Metadata):
    """SequenceInfo with lists per pool."""

    def nest_sequences(
        self,
        input_ids: Any,
        cu_seqlen: Any,
        input_pos: Any,
        batch_info: Any = None,
        slot_idx: Any = None,
        prompt_lens: Any = None,
        cache_loc_per_pool: Any = None,
        cu_num_pages_per_pool: Any = None,
        extra_page_per_seq_per_pool: Any = None,
        seq_len_with_cache_per_pool: Any = None,
        last_page_len_per_pool: Any = None,
        gather_context_logits: bool = False,
        _gather_idx: Any = None,
        _mask_scatter_indices: Any = None,
        _ungathered_input_ids: Any = None,
        _gather_slot_idx: Any = None,
        _ungathered_new_lens: Any = None,
        **extra_args: Any,
    ) -> None:
        given = {
            "cache_loc": cache_loc_per_pool,
            "cu_num_pages": cu_num_pages_per_pool,
            "extra_page_per_seq": extra_page_per_seq_per_pool,
            "seq_len_with_cache": seq_len_with_cache_per_pool,
            "last_page_len": last_page_len_per_pool,
        }
        pools = [
            {name: lists[i if i < len(lists) else 0] for name, lists in given.items() if lists}
            for i in range(len(self._suffixes))
        ]
        overlap = {
            "_gather_idx": _gather_idx,
            "_mask_scatter_indices": _mask_scatter_indices,
            "_ungathered_input_ids": _ungathered_input_ids,
            "_gather_slot_idx": _gather_slot_idx,
            "_ungathered_new_lens": _ungathered_new_lens,
        }
        self._extra = extra_args
        self._nest(
            input_ids, cu_seqlen, input_pos, batch_info, slot_idx, prompt_lens, pools, overlap, gather_context_logits
        )

    def register_window_groups(self, window_sizes: list[int]) -> None:
        for pool in range(1, len(window_sizes)):
            for name in PER_POOL:
                numel, view = self._input_buffer.get_capacity(name), self._input_buffer.get_view(name)
                self._input_buffer.add_truncatable_tensor(f"{name}_g{pool}", numel, view.dtype)
            self._suffixes.append(f"_g{pool}")


class _Current(_PerPool):
    """Mutations take an override."""

    def switch_to_generate_(self, active_args_override: set[str] | None = None) -> None:
        wanted = self._wants(SWITCH, active_args_override)
        if self.is_generate_only:
            return
        self._switch()
        if wanted:
            self._input_buffer.copy_to_host()

    def offset_pos_and_cache_(self, offset: torch.Tensor, active_args_override: set[str] | None = None) -> None:
        wanted = self._wants(OFFSET, active_args_override)
        self._offset(offset)
        if wanted:
            self._input_buffer.copy_to_host()


class _Older(_PerPool):
    """Mutations take no override."""

    def switch_to_generate_(self) -> None:
        if self.is_generate_only:
            return
        self._switch()
        if self._wants(SWITCH, None):
            self._input_buffer.copy_to_host()

    def offset_pos_and_cache_(self, offset: torch.Tensor) -> None:
        self._offset(offset)
        if self._wants(OFFSET, None):
            self._input_buffer.copy_to_host()


class _Early(_Metadata):
    """One pool; the switch writes the host twins itself; the offset's copy is not waited for."""

    def nest_sequences(
        self,
        input_ids: Any,
        cu_seqlen: Any,
        input_pos: Any,
        batch_info: Any = None,
        slot_idx: Any = None,
        prompt_lens: Any = None,
        cache_loc: Any = None,
        cu_num_pages: Any = None,
        extra_page_per_seq: Any = None,
        gather_context_logits: bool = False,
        _gather_idx: Any = None,
        _mask_scatter_indices: Any = None,
        _ungathered_input_ids: Any = None,
        _gather_slot_idx: Any = None,
        _ungathered_new_lens: Any = None,
        **extra_args: Any,
    ) -> None:
        pool = {"cache_loc": cache_loc, "cu_num_pages": cu_num_pages, "extra_page_per_seq": extra_page_per_seq}
        overlap = {
            "_gather_idx": _gather_idx,
            "_mask_scatter_indices": _mask_scatter_indices,
            "_ungathered_input_ids": _ungathered_input_ids,
            "_gather_slot_idx": _gather_slot_idx,
            "_ungathered_new_lens": _ungathered_new_lens,
        }
        self._extra = extra_args
        self._nest(
            input_ids, cu_seqlen, input_pos, batch_info, slot_idx, prompt_lens, [pool], overlap, gather_context_logits
        )

    def switch_to_generate_(self) -> None:
        if self.is_generate_only:
            return
        n, host = self.num_sequences, self._input_buffer.get_host_view
        last = host("cu_seqlen")[1 : n + 1].long() - 1
        tokens = host("input_ids")[last.clamp(min=0, max=self.max_num_tokens - 1)]
        moved = host("input_pos")[:n] + host("seq_len")[:n] - 1
        host("input_ids")[:n] = tokens
        host("input_pos")[:n] = moved
        host("cu_seqlen")[: n + 1] = torch.arange(n + 1, dtype=I32)
        host("seq_len")[:n] = 1
        host("position_ids")[:n] = moved.to(I64)
        host("use_initial_states")[:n] = moved > 0
        self._switch()

    def offset_pos_and_cache_(self, offset: torch.Tensor) -> None:
        self._offset(offset)
        if self._wants(OFFSET, None):
            self._input_buffer.copy_to_host(non_blocking=True)


SequenceInfo = {"current": _Current, "older": _Older, "early": _Early}[AGE]
SequenceInfo.__name__ = "SequenceInfo"

"""Launching the kernel for a run of metadata mutations: what it is told of the memory, and a short way to start it.

A launch through `triton.jit` costs tens of microseconds of Python, because the arguments are bound, typed and hashed
anew each time. Here they are integers whose types never change, so the compiled kernel is kept and started directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from auto_deploy_ext import kernels

#: what the kernel can do with one part, by code digit.
SWITCH, OFFSET, COPY = 1, 2, 3
MAX_PARTS = 4
#: the digit of an element type, with which the kernel reads and writes.
KINDS = {torch.int32: 0, torch.int64: 1, torch.bool: 2}

#: what belongs to all pools, by its place in the table of addresses: what a switch writes.
SHARED = ("input_ids", "position_ids", "input_pos", "cu_seqlen", "seq_len", "use_initial_states")
#: what each pool has, by its place among the pool's own.
POOLED = ("cache_loc", "cu_num_pages", "last_page_len", "extra_page_per_seq", "seq_len_with_cache")
_FIRST_POOL, _PER_POOL = 8, 8
#: the kernel is told by the bits of an int32, the sign's apart, which pools' page tables are in use.
MAX_POOLS = 31
_CHUNK = 512
_NUM_WARPS = 4
_NO_PART = (0, 0, 0)

#: `(source address, target address, count)`: what a part's arguments mean, the kernel says.
PartArguments = tuple[int, int, int]
Launcher = Callable[..., Any]


def runs_kernels(device: torch.device) -> bool:
    """Whether runs of mutations on a device are launched as kernels; elsewhere torch does their arithmetic."""
    return device.type == "cuda" and kernels.has_triton()


class KernelMemory:
    """Where the buffers of one SequenceInfo lie, as the kernel is told, and the kernels compiled for it.

    Args:
        info: the embedded host's SequenceInfo.
    """

    def __init__(self, info: Any) -> None:
        buffer = info._input_buffer
        self.device: torch.device = buffer.device
        # Held, so that nothing else can come to have their identity.
        self._regions = tuple(buffer._device_regions.values())
        self._suffixes = tuple(info._pool_suffixes)
        self.pools = len(self._suffixes)
        views = {name: buffer.get_view(name) for name in buffer.tensor_names}
        self._bounds = 1 << int(views["cu_seqlen"].numel()).bit_length()
        self._scratch = torch.zeros(self.pools, 2 * self._bounds, dtype=torch.int32, device=self.device)
        addresses = [views[name].data_ptr() for name in SHARED]
        addresses += [0] * (_FIRST_POOL - len(addresses))
        for pool, suffix in enumerate(self._suffixes):
            of_pool = [views[name + suffix].data_ptr() for name in POOLED]
            of_pool += [self._scratch[pool].data_ptr(), views["cache_loc" + suffix].numel()]
            addresses += of_pool + [0] * (_PER_POOL - len(of_pool))
        self._table = torch.tensor(addresses, dtype=torch.int64).to(self.device)
        self.targets = {name: (view.data_ptr(), KINDS.get(view.dtype, -1)) for name, view in views.items()}
        self._address = self._table.data_ptr()
        self._tokens_per_block = int(info.tokens_per_block)
        self._launchers: dict[tuple[int, ...], Launcher] = {}

    def is_current(self, info: Any) -> bool:
        """Whether the buffers still lie there."""
        regions, known = info._input_buffer._device_regions, self._regions
        if len(regions) != len(known) or len(info._pool_suffixes) != self.pools:
            return False
        return all(map(_is, regions.values(), known))

    def launch(self, codes: tuple[int, ...], rows: int, page_mask: int, parts: Sequence[PartArguments]) -> None:
        """Start one kernel on the current stream.

        Args:
            codes: MAX_PARTS codes; see `code`.
            rows: sequences in the batch, at least 1.
            page_mask: bit i: pool i's page table is in use.
            parts: the arguments of each part that there is.
        """
        launcher = self._launchers.get(codes)
        if launcher is None:
            launcher = self._launchers[codes] = self._compile(codes)
        filling = (MAX_PARTS - len(parts)) * _NO_PART
        launcher(self._address, rows, page_mask, *[value for part in parts for value in part], *filling)

    def _compile(self, codes: tuple[int, ...]) -> Launcher:
        kernel = kernels.load("metadata").mutate_metadata
        offsets = any(code % 4 == OFFSET for code in codes)
        constants = (*codes, self._tokens_per_block, self._bounds, _CHUNK, self._bounds.bit_length() - 1)
        return Direct(kernel, (1 + self.pools if offsets else 1, 1, 1), constants, self.device)


def _is(a: Any, b: Any) -> bool:
    return a is b


def code(action: int, source: int = 0, target: int = 0) -> int:
    """A part's code: what it does, and the kinds of the elements that it reads and writes."""
    return action + 4 * source + 16 * target


class Direct:
    """A kernel with a fixed grid and fixed constants; all other arguments are integers that are not specialised.

    The first call goes through `triton.jit` and compiles; later ones start what it has compiled. Where this Triton
    gives no handle (its interpreter, or a release that works differently), every call goes that way.

    Args:
        kernel: a `triton.jit` function.
        grid: three numbers of programs.
        constants: the values of its last parameters.
        device: where it runs.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], constants: tuple[int, ...], device: torch.device
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._constants = constants
        self._device = device
        self._start: Launcher | None = None
        self._has_handles = True

    def __call__(self, *arguments: int) -> None:
        """Start it on the current stream of its device."""
        if self._device.type != "cuda":
            self._kernel[self._grid](*arguments, *self._constants, num_warps=_NUM_WARPS, num_stages=1)
        elif torch._C._cuda_getDevice() != self._device.index:
            with torch.cuda.device(self._device):
                self._on_current_device(arguments)
        else:
            self._on_current_device(arguments)

    def _on_current_device(self, arguments: tuple[int, ...]) -> None:
        if self._start is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
            try:
                self._start(*arguments, *self._constants, stream=stream)
                return
            except TypeError:  # before anything was launched: this release's handles take other arguments
                self._start, self._has_handles = None, False
        compiled = self._kernel[self._grid](*arguments, *self._constants, num_warps=_NUM_WARPS, num_stages=1)
        if self._has_handles and hasattr(compiled, "__getitem__"):
            self._start = compiled[self._grid]


def gather_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `source[index]` in one launch.

    Args:
        source: `[rows, ...]`, of any dtype, on the device; what lies behind the first dimension contiguous.
        index: `[m]` int32 or int64 on the device, each in `0..rows - 1`.

    Returns:
        `[m, ...]`, contiguous.
    """
    if not runs_kernels(source.device):
        return source.index_select(0, index)
    return launch_gather(source, index)


def launch_gather(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`gather_rows` by the kernel, which a CPU needs Triton's interpreter for."""
    rest = source.shape[1:]
    width = rest.numel()
    if source.stride()[1:] != torch.empty(rest, device="meta").stride():
        source = source.contiguous()
    target = torch.empty((index.shape[0], *rest), dtype=source.dtype, device=source.device)
    if target.numel() == 0:
        return target
    chunk = min(1024, 1 << (width - 1).bit_length())
    grid = (index.shape[0], -(-width // chunk))
    values = source.view(torch.int8) if source.dtype is torch.bool else source
    result = target.view(torch.int8) if source.dtype is torch.bool else target
    kernels.load("metadata").gather_rows[grid](values, index.contiguous(), result, width, source.stride(0), chunk)
    return target

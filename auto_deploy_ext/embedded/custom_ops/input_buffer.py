"""InputBuffer: named metadata tensors in three memories (device, host mirror, staging) and the copies between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...effects import HOST_SUFFIX
from ...runtime.copy_memory import LandingPool, StagingRing
from ...runtime.mirrors import Transfer
from ...spelling import unknown_name_message

#: ``(name, max_numel, dtype)`` or ``(name, max_numel, dtype, truncatable)``.
TensorSpec = tuple[Any, ...]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as ``[nbytes]`` uint8, aliasing it."""
    return tensor.view(torch.uint8)


def _resolve_device(device: torch.device | str) -> torch.device:
    """Return the device with its index, so that ``cuda`` and ``cuda:0`` compare equal."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


#: Region of all tensors that are packed; a truncatable tensor's region has the tensor's name.
_PACKED = ""
_KEPT_SHAPES = 64


@dataclass(frozen=True)
class _Field:
    """One named tensor: where it lies (region and byte offset, the same on both sides) and what it holds."""

    name: str
    region: str
    offset: int
    capacity: int
    dtype: torch.dtype
    truncatable: bool

    @property
    def nbytes(self) -> int:
        return self.capacity * self.dtype.itemsize


@dataclass(frozen=True)
class _Landed:
    """One tensor inside a landing area."""

    name: str
    offset: int
    nbytes: int
    version: int


class HostCopyTicket:
    """A device-to-host copy that was started and whose result is applied to the mirrors at :meth:`wait`.

    Until then it lies in a landing area of its own. A tensor whose mirror became newer in the meantime (a newer batch
    was staged, or a copy of a newer version arrived) keeps the newer value. A ticket that nobody waits for is harmless.

    Attributes:
        transfer: what is moved; its ``waited`` turns true when :meth:`wait` waits.
    """

    def __init__(
        self,
        buffer: InputBuffer,
        transfer: Transfer,
        landing: torch.Tensor,
        landed: Sequence[_Landed],
        event: torch.cuda.Event | None,
    ) -> None:
        self.transfer = transfer
        self._buffer = buffer
        self._landing: torch.Tensor | None = landing
        self._landed = landed
        self._event = event

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted ``_host`` names that travel."""
        return self.transfer.names

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` was called."""
        return self._landing is None

    def overtaken(self) -> bool:
        """Whether every tensor's mirror is newer than what travels, so that nothing would be applied."""
        return not any(self._applies(piece) for piece in self._landed)

    def _applies(self, piece: _Landed) -> bool:
        return self._buffer.mirror_version[piece.name] <= piece.version

    def wait(self) -> tuple[str, ...]:
        """Wait for the copy and write it into the mirrors that are not newer; a second call does nothing.

        A ticket that was overtaken as a whole is dropped without waiting.

        Returns:
            Sorted ``_host`` names of the mirrors that were written.
        """
        if self._landing is None:
            return ()
        landing, self._landing = self._landing, None
        applied = [piece for piece in self._landed if self._applies(piece)]
        if applied:
            self.transfer.waited = True
            if self._event is not None:
                self._event.synchronize()
        for piece in applied:
            mirror = _bytes(self._buffer.get_host_memory(piece.name))
            count = min(piece.nbytes, mirror.numel())
            mirror[:count].copy_(landing[piece.offset : piece.offset + count])
            self._buffer.mirror_version[piece.name] = piece.version
        self._buffer._landing_pool.give_back(landing, self._event)
        return tuple(sorted(piece.name + HOST_SUFFIX for piece in applied))


class InputBuffer:
    """Named one-dimensional tensors, packed, in three memories.

    * The *device* buffer: contiguous tensors packed into one byte buffer, each aligned to its item size; truncatable
      ones have memory of their own and travel up to their current length.
    * The *mirror* on the host, laid out in the same way: what :meth:`stage` writes and :meth:`get_host_view` gives.
    * On CUDA, a ring of pinned *staging* slots that H2D copies read from, so that mirrors may be written while a copy
      is under way; and landing areas for D2H copies, so that one in flight cannot write into a newer batch's mirror.

    Each tensor has a version per side, a number that grows: equal means equal contents (up to the current length), a
    device version above the mirror's means that the mirror is stale. Nothing here calls CUDA while the device is the
    CPU.

    Args:
        specs: ``(name, max_numel, dtype[, truncatable])`` per tensor.

    Attributes:
        device_version: name -> version of the device side.
        mirror_version: name -> version of the mirror.
        transfer_observers: each is called with the :class:`~auto_deploy_ext.runtime.mirrors.Transfer` of every D2H copy
            when it is started.
        layout: changes whenever views that were taken become invalid.

    Example:
        >>> buffer = InputBuffer([("seq_len", 4, torch.int32)])
        >>> buffer.stage("seq_len", [3, 1])
        >>> buffer.copy_to_device()
        >>> buffer.get_view("seq_len", truncate=True)
        tensor([3, 1], dtype=torch.int32)
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._device = torch.device("cpu")
        self._fields: dict[str, _Field] = {}
        self._device_regions: dict[str, torch.Tensor] = {}
        self._mirror_regions: dict[str, torch.Tensor] = {}
        self.layout = 0
        #: views of whole tensors that were asked for: making one takes longer than launching a kernel.
        self._device_views: dict[str, torch.Tensor] = {}
        self._mirror_views: dict[str, torch.Tensor] = {}
        self._mirror_arrays: dict[str, np.ndarray] = {}
        self._shaped_views: dict[tuple[str, int, int], torch.Tensor] = {}
        self._lengths: dict[str, int] = {}
        self.device_version: dict[str, int] = {}
        self.mirror_version: dict[str, int] = {}
        self.transfer_observers: list[Callable[[Transfer], None]] = []
        self._staging = StagingRing()
        self._landing_pool = LandingPool()
        self._unclaimed: list[HostCopyTicket] = []

        packed_size = 0
        for name, max_numel, dtype, *rest in specs:
            if rest and rest[0]:
                self.add_truncatable_tensor(name, max_numel, dtype)
                continue
            offset = math.ceil(packed_size / dtype.itemsize) * dtype.itemsize
            self._add_field(_Field(name, _PACKED, offset, max_numel, dtype, truncatable=False))
            packed_size = offset + max_numel * dtype.itemsize
        self._allocate(_PACKED, packed_size)

    def __getstate__(self) -> dict[str, Any]:
        """Leave views out: a copy's would have memory of their own."""
        views = ("_device_views", "_mirror_views", "_mirror_arrays", "_shaped_views")
        return {**self.__dict__, **{name: {} for name in views}}

    # Layout.

    def _allocate(self, region: str, nbytes: int) -> None:
        """Give a region zeroed memory on both sides, keeping what it held before."""
        on_cuda = self._device.type == "cuda"
        device = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        mirror = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        for regions, new in ((self._device_regions, device), (self._mirror_regions, mirror)):
            old = regions.get(region)
            if old is not None:
                kept = min(old.numel(), nbytes)
                new[:kept].copy_(old[:kept])
            regions[region] = new
        self.layout += 1
        self._device_views.clear()
        self._mirror_views.clear()
        self._mirror_arrays.clear()
        self._shaped_views.clear()

    def _add_field(self, spec: _Field) -> None:
        if spec.name in self._fields:
            raise ValueError(f"InputBuffer has a tensor {spec.name!r} already")
        self._fields[spec.name] = spec
        self._lengths[spec.name] = 0
        self.device_version[spec.name] = 0
        self.mirror_version[spec.name] = 0

    def add_truncatable_tensor(self, name: str, max_numel: int, dtype: torch.dtype) -> None:
        """Add a tensor with memory of its own, which is copied up to its current length.

        Raises:
            ValueError: the name is taken.
        """
        self._add_field(_Field(name, name, 0, max_numel, dtype, truncatable=True))
        self._allocate(name, max_numel * dtype.itemsize)

    def resize(self, name: str, new_capacity: int) -> None:
        """Give a truncatable tensor another capacity; contents up to the smaller one are kept, views become invalid.

        Raises:
            ValueError: the tensor is packed, so that its capacity is fixed.
        """
        spec = self._field(name)
        if not spec.truncatable:
            raise ValueError(f"only truncatable tensors can be resized, {name!r} is packed with others")
        self._fields[name] = _Field(name, name, 0, new_capacity, spec.dtype, truncatable=True)
        self._allocate(name, new_capacity * spec.dtype.itemsize)
        self._lengths[name] = min(self._lengths[name], new_capacity)

    def to(self, *args: Any, **kwargs: Any) -> InputBuffer:
        """Move the device side and its contents (``torch.Tensor.to``'s arguments, of which only the device counts).

        Views taken before become invalid. Returns the buffer itself.
        """
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or _resolve_device(device) == self._device:
            return self
        self._device = _resolve_device(device)
        for region, memory in list(self._device_regions.items()):
            self._allocate(region, memory.numel())
        self._staging, self._landing_pool = StagingRing(), LandingPool()
        self._unclaimed.clear()
        return self

    @property
    def tensor_names(self) -> list[str]:
        """Names of all tensors, in the order in which they were added."""
        return list(self._fields)

    @property
    def device(self) -> torch.device:
        """Where the device side lives."""
        return self._device

    @property
    def host_device(self) -> torch.device:
        """Where the mirrors live: the CPU."""
        return torch.device("cpu")

    def _field(self, name: str) -> _Field:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(unknown_name_message("metadata tensor", name, self._fields)) from None

    def is_truncatable(self, name: str) -> bool:
        """Return whether the tensor has memory of its own and travels up to its current length."""
        return self._field(name).truncatable

    def get_capacity(self, name: str) -> int:
        """Return the number of elements that the tensor can hold."""
        return self._field(name).capacity

    def get_current_length(self, name: str) -> int:
        """Return the number of elements in use (the same for both sides)."""
        self._field(name)
        return self._lengths[name]

    def set_current_length(self, name: str, length: int) -> None:
        """Declare how many elements are in use; a device mutation that changes it calls this.

        Raises:
            ValueError: the length exceeds the capacity.
        """
        capacity = self.get_capacity(name)
        if not 0 <= length <= capacity:
            hint = "; raise it with SequenceInfo.update_cache_information" if self.is_truncatable(name) else ""
            raise ValueError(f"{name!r} holds at most {capacity} elements, got {length}{hint}")
        self._lengths[name] = length

    def _whole_view(self, views: dict[str, torch.Tensor], regions: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return ``[capacity]`` of one side, made when it is first asked for."""
        view = views.get(name)
        if view is None:
            spec = self._field(name)
            with torch.inference_mode(False):  # kept, and written outside of inference mode too
                view = regions[spec.region][spec.offset : spec.offset + spec.nbytes].view(spec.dtype)
            if type(view) is torch.Tensor:  # while an orchestrator is traced, it is a fake one
                views[name] = view
        return view

    def get_view(self, name: str, truncate: bool = False) -> torch.Tensor:
        """Return the device side, ``[capacity]``, or ``[current length]`` when truncated. It aliases the buffer."""
        view = self._whole_view(self._device_views, self._device_regions, name)
        return view[: self._lengths[name]] if truncate else view

    def get_shaped_view(self, name: str, rows: int) -> torch.Tensor:
        """Return the device side's elements in use as ``[rows, elements / rows]``; whoever asks again gets the same."""
        key = name, rows, self._lengths[name]
        view = self._shaped_views.get(key)
        if view is None:
            view = self.get_view(name, truncate=True).view(rows, -1)
            if name in self._device_views:
                if len(self._shaped_views) >= _KEPT_SHAPES:
                    self._shaped_views.clear()
                self._shaped_views[key] = view
        return view

    def get_host_view(self, name: str, truncate: bool = False) -> torch.Tensor:
        """Return the mirror, ``[capacity]``, or ``[current length]`` when truncated. It aliases the mirror.

        Non-blocking copies that :meth:`copy_to_host` or :meth:`copy_names_to_host` left under way are waited for.
        """
        self.settle()
        return self.get_host_memory(name, truncate)

    def get_host_memory(self, name: str, truncate: bool = False) -> torch.Tensor:
        """Return what :meth:`get_host_view` returns, without waiting for any copy."""
        view = self._whole_view(self._mirror_views, self._mirror_regions, name)
        return view[: self._lengths[name]] if truncate else view

    def get_host_array(self, name: str) -> np.ndarray:
        """Return the memory of :meth:`get_host_memory`, ``[capacity]``, as an array."""
        array = self._mirror_arrays.get(name)
        if array is None:
            view = self.get_host_memory(name)
            array = view.numpy()
            if name in self._mirror_views:
                self._mirror_arrays[name] = array
        return array

    # Versions.

    def _next_version(self, name: str) -> int:
        return max(self.device_version[name], self.mirror_version[name]) + 1

    def bump_device(self, name: str) -> None:
        """Record that the device side was written: its mirror is stale from now on."""
        self._field(name)
        self.device_version[name] = self._next_version(name)

    def bump_devices(self, names: Iterable[str]) -> None:
        """Record that the device sides of some known tensors were written, as :meth:`bump_device` does for one."""
        if "bump_device" in vars(self):  # somebody listens
            for name in names:
                self.bump_device(name)
            return
        device, mirror = self.device_version, self.mirror_version
        for name in names:
            device[name] = max(device[name], mirror[name]) + 1

    def bump_mirror(self, name: str) -> None:
        """Record that the mirror was given a value of its own: copies under way are overtaken."""
        self._field(name)
        self.mirror_version[name] = self._next_version(name)

    def mark_mirror(self, name: str, version: int) -> None:
        """Record that the mirror now holds what the device held at ``version``."""
        self._field(name)
        self.mirror_version[name] = max(self.mirror_version[name], version)

    def mark_mirrors(self, names: Iterable[str]) -> None:
        """Record that the mirrors of some known tensors hold what the device holds now."""
        device, mirror = self.device_version, self.mirror_version
        for name in names:
            if mirror[name] < device[name]:
                mirror[name] = device[name]

    def stale_names(self) -> list[str]:
        """Return the sorted names of the tensors whose mirror is older than the device side."""
        return sorted(name for name in self._fields if self.mirror_version[name] < self.device_version[name])

    # Host to device.

    def stage(self, name: str, data: torch.Tensor | Sequence[Any], fill_value: Any | None = None) -> None:
        """Write data to the mirror; :meth:`copy_to_device` brings it to the device. The length becomes data's.

        Args:
            name: tensor to write.
            data: values, or a host tensor of any shape; converted to the tensor's dtype.
            fill_value: when given, the rest of the capacity is filled with it.

        Raises:
            ValueError: more data than capacity.
        """
        capacity = self._field(name).capacity
        mirror = self.get_host_array(name)
        values = data.detach().cpu().numpy() if isinstance(data, torch.Tensor) else np.asarray(data, mirror.dtype)
        count = values.size
        if count > capacity:
            self.set_current_length(name, count)  # which says what to do
        self._lengths[name] = count
        if count:
            mirror[:count] = values.reshape(-1)
        if fill_value is not None:
            mirror[count:] = fill_value
        self.bump_mirror(name)

    def copy_to_device(self) -> None:
        """Bring the mirrors to the device in one go, asynchronously on CUDA; both sides are then equally new.

        The packed tensors travel whole, truncatable ones up to their current length.
        """
        pairs = []
        for region, mirror in self._mirror_regions.items():
            nbytes = mirror.numel() if region == _PACKED else self._current_bytes(region)
            pairs.append((mirror[:nbytes], self._device_regions[region][:nbytes]))
        if self._device.type == "cuda":
            self._staging.upload(pairs)
        else:
            for source, target in pairs:
                target.copy_(source)
        for name in self._fields:
            version = self._next_version(name)
            self.device_version[name] = self.mirror_version[name] = version
        # Whatever is still under way is older than every mirror now.
        self._unclaimed.clear()

    def copy_(self, name: str, src: torch.Tensor) -> None:
        """Write one side, the one that ``src`` lives on (the device's when both are the CPU); length becomes src's.

        A name that ends in ``_host`` means the mirror, wherever the device is.

        Args:
            name: tensor to write.
            src: tensor of any shape on the buffer's device or on the host; converted to the tensor's dtype.

        Raises:
            ValueError: more data than capacity, or ``src`` lives on neither side.
        """
        base = name.removesuffix(HOST_SUFFIX)
        to_mirror = base != name
        src_device = _resolve_device(src.device)
        if src_device not in (self._device, self.host_device) or (to_mirror and src_device != self.host_device):
            raise ValueError(
                f"copy_({name!r}): the source is on {src.device}, the buffer on {self._device} and {self.host_device}"
            )
        to_mirror = to_mirror or src_device != self._device
        self.set_current_length(base, src.numel())
        view = self.get_host_memory(base) if to_mirror else self.get_view(base)
        view[: src.numel()].copy_(src.reshape(-1))
        if to_mirror:
            self.bump_mirror(base)
        else:
            self.bump_device(base)

    # Device to host.

    def _current_bytes(self, name: str) -> int:
        return self._lengths[name] * self._fields[name].dtype.itemsize

    def _base_names(self, names: Collection[str]) -> list[str]:
        if isinstance(names, str):
            raise TypeError(f"names must be a collection of names, got the string {names!r}")
        return sorted({self._field(name.removesuffix(HOST_SUFFIX)).name for name in names})

    def _report(self, names: Iterable[str], nbytes: int, waited: bool, trigger: str) -> Transfer:
        transfer = Transfer(tuple(sorted(name + HOST_SUFFIX for name in names)), nbytes, waited, trigger)
        for observer in list(self.transfer_observers):
            observer(transfer)
        return transfer

    def copy_to_host(self, non_blocking: bool = False, trigger: str = "") -> HostCopyTicket | None:
        """Bring every mirror up to date in one transfer: packed tensors whole, truncatable ones at current length.

        Args:
            non_blocking: return before the copy is done. The mirrors change when the returned ticket is waited for or
                when any mirror is next asked for through :meth:`get_host_view`.
            trigger: what the transfer is reported as caused by.

        Returns:
            The ticket of a non-blocking copy, else ``None``.
        """
        packed = self._device_regions[_PACKED]
        truncatable = [name for name, spec in self._fields.items() if spec.truncatable]
        sources = [packed, *(_bytes(self.get_view(name, truncate=True)) for name in truncatable)]
        if non_blocking:
            landed = []
            start = packed.numel()
            for name, spec in self._fields.items():
                offset, nbytes = spec.offset, spec.nbytes
                if spec.truncatable:
                    offset, nbytes = start, self._current_bytes(name)
                    start += nbytes
                landed.append(_Landed(name, offset, nbytes, self.device_version[name]))
            ticket = self._start(sources, landed, trigger)
            self._unclaimed.append(ticket)
            return ticket
        targets = [
            self._mirror_regions[_PACKED],
            *(_bytes(self.get_host_memory(name, truncate=True)) for name in truncatable),
        ]
        self._prefer_device(self._fields)
        self._copy_blocking(sources, targets)
        self._finish_blocking(self.tensor_names, sum(source.numel() for source in sources), trigger)
        return None

    def copy_names_to_host(
        self, names: Collection[str], non_blocking: bool = False, trigger: str = ""
    ) -> HostCopyTicket | None:
        """Bring exactly the named mirrors up to date, at their current lengths, in one transfer.

        Args:
            names: base names or ``_host`` names; none means no transfer.
            non_blocking: as for :meth:`copy_to_host`.
            trigger: what the transfer is reported as caused by.

        Returns:
            The ticket of a non-blocking copy, else ``None``.
        """
        bases = self._base_names(names)
        if not bases:
            return None
        if non_blocking:
            ticket = self.start_copy_to_host(bases, trigger)
            self._unclaimed.append(ticket)
            return ticket
        self._prefer_device(bases)
        if self._device.type == "cuda" and len(bases) > 1:
            # One transfer: packed on the device, unpacked here.
            self._start_names(bases, trigger, waited=True).wait()
            return None
        sources = [_bytes(self.get_view(name, truncate=True)) for name in bases]
        self._copy_blocking(sources, [_bytes(self.get_host_memory(name, truncate=True)) for name in bases])
        self._finish_blocking(bases, sum(source.numel() for source in sources), trigger)
        return None

    def start_copy_to_host(self, names: Collection[str], trigger: str = "") -> HostCopyTicket:
        """Start copying the named tensors, at their current lengths, as one transfer into a landing area.

        The mirrors stay as they are until the ticket is waited for. On CUDA the host does not wait here: the tensors
        are packed on the device on the current stream and travel in one copy.

        Args:
            names: base names or ``_host`` names, at least one.
            trigger: what the transfer is reported as caused by.

        Raises:
            ValueError: no names.
        """
        return self._start_names(self._base_names(names), trigger, waited=False)

    def _start_names(self, bases: Sequence[str], trigger: str, waited: bool) -> HostCopyTicket:
        if not bases:
            raise ValueError("start_copy_to_host needs at least one name")
        # Widest items first: every piece is then aligned without padding.
        ordered = sorted(bases, key=lambda name: -self._fields[name].dtype.itemsize)
        landed, start = [], 0
        for name in ordered:
            landed.append(_Landed(name, start, self._current_bytes(name), self.device_version[name]))
            start += landed[-1].nbytes
        sources = [_bytes(self.get_view(name, truncate=True)) for name in ordered]
        return self._start(sources, landed, trigger, waited)

    def _start(
        self, sources: Sequence[torch.Tensor], landed: Sequence[_Landed], trigger: str, waited: bool = False
    ) -> HostCopyTicket:
        nbytes = sum(source.numel() for source in sources)
        on_cuda = self._device.type == "cuda"
        landing = self._landing_pool.take(nbytes, pinned=on_cuda)
        event = None
        if on_cuda:
            packed = sources[0] if len(sources) == 1 else torch.cat(list(sources))
            landing[:nbytes].copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        else:
            torch.cat(list(sources), out=landing[:nbytes])
        transfer = self._report((piece.name for piece in landed), nbytes, waited, trigger)
        return HostCopyTicket(self, transfer, landing, landed, event)

    def _copy_blocking(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        on_cuda = self._device.type == "cuda"
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _prefer_device(self, names: Iterable[str]) -> None:
        """Make the device side the newer one where a mirror was written alone: a blocking copy overwrites it."""
        for name in names:
            if self.mirror_version[name] > self.device_version[name]:
                self.bump_device(name)

    def _finish_blocking(self, names: Sequence[str], nbytes: int, trigger: str) -> None:
        for name in names:
            self.mirror_version[name] = self.device_version[name]
        self._report(names, nbytes, True, trigger)

    def settle(self) -> None:
        """Wait for non-blocking copies that :meth:`copy_to_host` or :meth:`copy_names_to_host` left under way."""
        while self._unclaimed:
            self._unclaimed.pop(0).wait()

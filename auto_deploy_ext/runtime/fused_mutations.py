"""A run of metadata mutations as one call: one kernel for all of them, then what the host does for each, in order.

The kernel does the device's side of the whole run. Behind it the host's side of each mutation follows as if it had
been called by itself: `batch_info`, lengths and versions, its copy to the host, its arithmetic on mirrors. The pass
that puts such calls into graphs (`auto_deploy_ext.rewriting.fusion`) sees to it that nothing which the device does for
a later mutation shows in what an earlier one copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from auto_deploy_ext.effects import HOST_SUFFIX, buffer_of
from auto_deploy_ext.runtime import fused_launch, host_mirrors, replay, sanitizer
from auto_deploy_ext.runtime.fused_launch import (
    COPY,
    KINDS,
    MAX_PARTS,
    MAX_POOLS,
    OFFSET,
    POOLED,
    SHARED,
    SWITCH,
    KernelMemory,
    PartArguments,
    code,
)
from auto_deploy_ext.runtime.replay import PreparedReplay

SWITCH_NAME, COPY_NAME, OFFSET_NAME = "switch_to_generate_", "copy_", "offset_pos_and_cache_"
#: the mutations that a run may have; what each does on the device is `metadata_arithmetic`.
FUSIBLE = frozenset({SWITCH_NAME, COPY_NAME, OFFSET_NAME})

#: stands in a part for a ticket among the operands.
TICKET = "ticket"


class Part(NamedTuple):
    """One mutation of a run, as constants; in a graph it is a plain tuple.

    Attributes:
        name: one of FUSIBLE.
        buffer: what `copy_` writes, else empty.
        strict: `copy_`'s argument.
        active_args: see `ops.mutate`.
        replays: see `ops.mutate`.
        host_operand: see `ops.mutate`; TICKET: the ticket follows the mutation's operand among the operands.
    """

    name: str
    buffer: str = ""
    strict: bool = True
    active_args: tuple[str, ...] | None = None
    replays: tuple[str, ...] = ()
    host_operand: int | str | None = None

    @property
    def num_operands(self) -> int:
        """How many of the operands are its own."""
        return (self.name != SWITCH_NAME) + (self.host_operand == TICKET)


def mutate_all(info: Any, parts: tuple[tuple[Any, ...], ...], operands: Sequence[Any]) -> None:
    """Do what `ops.mutate` does for each part, in order; see `ops.mutate_all`."""
    _run_of(info, parts)(operands)


#: by SequenceInfo: its runs by the identity of their parts, which are constants of compiled code.
_RUNS: weakref.WeakKeyDictionary[Any, dict[int, _Run]] = weakref.WeakKeyDictionary()
#: how many of an interface are kept: an interpreter gives new parts at each call. Constants come back when needed.
_MOST_RUNS = 1024
#: by SequenceInfo: where its buffers lie.
_MEMORIES: weakref.WeakKeyDictionary[Any, KernelMemory] = weakref.WeakKeyDictionary()


def _run_of(info: Any, parts: tuple[tuple[Any, ...], ...]) -> _Run:
    runs = _RUNS.get(info)
    if runs is None:
        runs = _RUNS[info] = {}
    run = runs.get(id(parts))
    if run is None:
        if len(runs) >= _MOST_RUNS:
            runs.clear()
        known = next((r for r in runs.values() if r.parts == parts), None)
        # What is held cannot lose its identity to something else.
        run = runs[id(parts)] = _Run(info, parts) if known is None else known.renamed(parts)
    return run


def memory_of(info: Any) -> KernelMemory:
    """Where the buffers of a SequenceInfo lie now, as the kernel is told."""
    memory = _MEMORIES.get(info)
    if memory is None or not memory.is_current(info):
        memory = _MEMORIES[info] = KernelMemory(info)
    return memory


def reason_against(info: Any) -> str | None:
    """Why runs of mutations cannot be fused on a SequenceInfo; None: they can."""
    buffer = getattr(info, "_input_buffer", None)
    if not (hasattr(buffer, "_device_regions") and hasattr(buffer, "copy_names_to_host")):
        return (
            f"the buffers of {type(info).__module__}.{type(info).__qualname__} are not laid out as the kernel expects"
        )
    for name in sorted(FUSIBLE):
        if getattr(getattr(type(info), name, None), "__qualname__", "") != f"MetadataMutations.{name}":
            return f"{type(info).__qualname__} has a {name} of its own"
    if len(info._pool_suffixes) > MAX_POOLS:
        return f"it has {len(info._pool_suffixes)} cache pools, and the kernel handles {MAX_POOLS}"
    return None


class _Run:
    """The parts of one run on one SequenceInfo, with what can be told of them once.

    Attributes:
        parts: what identifies it.
    """

    def __init__(self, info: Any, parts: tuple[tuple[Any, ...], ...]) -> None:
        self.parts = parts
        self._info = weakref.ref(info)
        self._steps = [Part(*part) for part in parts]
        self._possible = reason_against(info) is None and len(parts) <= MAX_PARTS
        self._activity: tuple[Any, ...] = ()
        #: as the interface is now: which pools' page tables are in use; whether the parts may share a kernel; each
        #: part's replay, if they may share one and none of them copies anything to the host.
        self._page_mask = 0
        self._sound = False
        self._replays: list[PreparedReplay | None] | None = None

    def renamed(self, parts: tuple[tuple[Any, ...], ...]) -> _Run:
        """The same run for an equal tuple."""
        other = _Run.__new__(_Run)
        other.__dict__.update(self.__dict__, parts=parts)
        return other

    def __call__(self, operands: Sequence[Any]) -> None:
        """Run it."""
        info: Any = self._info()
        given = self._matched(operands)
        if not self._may_fuse(info):
            _one_by_one(info, self._steps, given)
            return
        buffer = info._input_buffer
        rows, generating = _rows(info)
        if not self._on_device(info, buffer, rows, generating, given):
            _one_by_one(info, self._steps, given)
            return
        self._on_host(info, rows, generating, given)

    def _matched(self, operands: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Each part's operand and ticket."""
        given, position = [], 0
        for part in self._steps:
            operand = ticket = None
            if part.name != SWITCH_NAME:
                operand = operands[position]
                position += 1
            if part.host_operand == TICKET:
                ticket = operands[position]
                position += 1
            given.append((operand, ticket))
        return given

    # -- whether -----------------------------------------------------------------------------------------------------

    def _may_fuse(self, info: Any) -> bool:
        """Whether the parts may share a kernel, as the interface is now."""
        if not self._possible:
            return False
        self._look_at(info)
        own = vars(info)
        replaced = SWITCH_NAME in own or OFFSET_NAME in own or COPY_NAME in own
        # Somebody may have put methods of his own in the place of these.
        return self._sound and (not replaced or sanitizer.is_watched(info._input_buffer))

    def _look_at(self, info: Any) -> None:
        """Take note of what is active, if it has changed."""
        activity = info.activity
        if activity != self._activity:
            self._activity = activity
            self._page_mask = sum(info._pages_active(s) << pool for pool, s in enumerate(info._pool_suffixes))
            self._sound = self._keeps_order(info)
            quiet = self._sound and not any(_moved(info, part) for part in self._steps)
            self._replays = [_prepared(info, part) for part in self._steps] if quiet else None

    def _keeps_order(self, info: Any) -> bool:
        """Whether no part copies to the host what a later one writes; an invalid override is for the call itself."""
        later: set[str] = set()
        for part in reversed(self._steps):
            if not later.isdisjoint(_moved(info, part)):
                return False
            if any(not info._is_active(name) for name in part.active_args or ()):
                return False
            later.update(_written(info, part))
        return True

    # -- the device's side -------------------------------------------------------------------------------------------

    def _on_device(self, info: Any, buffer: Any, rows: int, generating: bool, given: Sequence[tuple[Any, Any]]) -> bool:
        """Do the device's side of all parts; False: something is not as it should be, and nothing was done."""
        lengths, device = buffer._lengths, buffer.device
        if rows < 1:
            return False
        tokens = lengths["position_ids"]
        known: dict[str, int] = {}
        work: list[tuple[int, Any, str, int]] = []
        for part, (operand, _) in zip(self._steps, given, strict=True):
            if part.name == SWITCH_NAME:
                if not generating:
                    generating, tokens = True, rows
                    known.update(_switched_lengths(rows))
                    work.append((SWITCH, None, "", rows))
                continue
            if not isinstance(operand, torch.Tensor) or operand.device != device or operand.dtype not in KINDS:
                return False
            count = operand.numel()
            if part.name == OFFSET_NAME:
                if count != rows or operand.dtype is torch.bool:
                    return False
                work.append((OFFSET, operand, "", tokens))
                continue
            name = part.buffer
            current = known.get(name, lengths.get(name, -1))
            if (part.strict and count != current) or current < 0 or count > buffer.get_capacity(name):
                return False
            known[name] = count
            if name == "position_ids":
                tokens = count
            work.append((COPY, operand, name, count))
        if fused_launch.runs_kernels(device):
            return self._launch(info, rows, work)
        more_pages = 0
        with sanitizer.unwatched(buffer):
            for action, operand, name, count in work:
                if action == SWITCH:
                    info._switch_on_device(rows)
                elif action == COPY:
                    buffer.get_view(name)[:count].copy_(operand.reshape(-1))
                else:
                    more_pages += rows
                    info._offset_on_device(operand.reshape(-1).to(torch.int32), count, more_pages)
        return True

    def _launch(self, info: Any, rows: int, work: Sequence[tuple[int, Any, str, int]]) -> bool:
        memory = memory_of(info)
        codes: list[int] = []
        arguments: list[PartArguments] = []
        held = []  # until the launch; what follows on the stream may have their memory again
        for action, operand, name, count in work:
            if action == SWITCH:
                codes.append(SWITCH)
                arguments.append((0, 0, info._input_buffer.get_capacity("input_ids")))
                continue
            if not operand.is_contiguous():
                operand = operand.contiguous()
                held.append(operand)
            address, kind = memory.targets[name] if name else (0, 0)
            if kind < 0:
                return False
            codes.append(code(action, KINDS[operand.dtype], kind))
            arguments.append((operand.data_ptr(), address, count))
        if codes:
            memory.launch((*codes, *[0] * (MAX_PARTS - len(codes))), rows, self._page_mask, arguments)
        return True

    # -- the host's side ---------------------------------------------------------------------------------------------

    def _on_host(self, info: Any, rows: int, generating: bool, given: Sequence[tuple[Any, Any]]) -> None:
        """What the host does when the device's side of all parts is done."""
        if self._replays is None or sanitizer.is_watched(info._input_buffer):
            for part, (operand, ticket) in zip(self._steps, given, strict=True):
                _host_side(info, part, operand, ticket, rows, generating)
                generating |= part.name == SWITCH_NAME
            return
        for part, prepared, (operand, ticket) in zip(self._steps, self._replays, given, strict=True):
            written = _note(info, part, operand, rows, generating)
            if prepared is not None and written:
                known: Any = ticket if part.host_operand == TICKET else part.host_operand
                prepared(info, rows, operand, known)
            generating |= part.name == SWITCH_NAME


def _rows(info: Any) -> tuple[int, bool]:
    """How many sequences the batch has, and whether each is a decode."""
    prefill, _, extend, _, decode, _ = info.batch_info.counts()
    return prefill + extend + decode, prefill == 0 == extend


def _switched_lengths(rows: int) -> dict[str, int]:
    return {name: rows + (name == "cu_seqlen") for name in SHARED}


def _written(info: Any, part: Part) -> Sequence[str]:
    """The buffers that a part may write."""
    if part.name == COPY_NAME:
        return (part.buffer,)
    return SHARED if part.name == SWITCH_NAME else info._offset_scope()[0]


def _moved(info: Any, part: Part) -> Sequence[str]:
    """The buffers whose mirrors a part brings up to date by a copy."""
    if part.name == COPY_NAME:
        return ()
    live = [name for name in _written(info, part) if info._is_active(name + HOST_SUFFIX)]
    if part.active_args is None:
        return info._input_buffer.tensor_names if live else ()
    return [name for name in live if name + HOST_SUFFIX in part.active_args]


def _prepared(info: Any, part: Part) -> PreparedReplay | None:
    """A part's replay, of what it does write."""
    written = tuple(sorted(set(part.replays).intersection(_written(info, part))))
    return PreparedReplay(part.name, written) if written else None


# -- the host's side --------------------------------------------------------------------------------------------------


def _note(info: Any, part: Part, operand: Any, rows: int, generating: bool) -> Sequence[str]:
    """Take note of what a part has done on the device; returns what it wrote."""
    if part.name == OFFSET_NAME:
        return info._note_offset(rows)
    if part.name == SWITCH_NAME:
        if generating:
            return ()
        info._note_switch(rows)
        return SHARED
    info._input_buffer.set_current_length(part.buffer, operand.numel())
    info._input_buffer.bump_device(part.buffer)
    return ()


def _host_side(info: Any, part: Part, operand: Any, ticket: Any, rows: int, generating: bool) -> None:
    """What the host does for a part whose device's side is done: note, copy to the host, arithmetic on mirrors."""
    before = replay.device_versions(info, part.replays) if part.replays else None
    with sanitizer.announced(info._input_buffer, part.name):
        written = _note(info, part, operand, rows, generating)
        if written and part.active_args != ():
            override = None if part.active_args is None else set(part.active_args)
            info._mirror(written, override, part.name)
    if before is not None:
        _replay(info, part, before, operand, ticket)


def _replay(info: Any, part: Part, before: dict[str, int], operand: Any, ticket: Any) -> None:
    value = part.host_operand
    if isinstance(value, int):
        known = value
        replay.replay(info, part.name, before, lambda: replay.known_operand(info, (operand,), known))
    else:
        replay.replay(info, part.name, before, lambda: ticket.wait())


def _one_by_one(info: Any, steps: Sequence[Part], given: Sequence[tuple[Any, Any]]) -> None:
    """Call each mutation by itself."""
    for part, (operand, ticket) in zip(steps, given, strict=True):
        before = replay.device_versions(info, part.replays) if part.replays else None
        if part.name == COPY_NAME:
            own: dict[str, Any] = {} if part.strict else {"strict": False}
            host_mirrors.mutate(info, COPY_NAME, part.buffer, operand, **own)
        else:
            operands = () if part.name == SWITCH_NAME else (operand,)
            host_mirrors.mutate(info, part.name, *operands, active_args=part.active_args)
        if before is not None:
            _replay(info, part, before, operand, ticket)


def note_on_host(info: Any, parts: tuple[tuple[Any, ...], ...], operands: Sequence[Any]) -> None:
    """Change what the host knows (`batch_info`, lengths, versions) as a run does, and nothing on the device.

    For one who has the device's side done otherwise, by replaying a captured graph: nothing is copied, and no mirror is
    computed.

    Args:
        info: the embedded host's SequenceInfo.
        parts: those of `ops.mutate_all`.
        operands: likewise; of tensors only the sizes count.
    """
    run, rows = _run_of(info, parts), info.batch_info.get_total_num_sequences()
    for part, (operand, _) in zip(run._steps, run._matched(operands), strict=True):
        _note(info, part, operand, rows, info.batch_info.is_generate_only())


def host_side(info: Any, parts: tuple[tuple[Any, ...], ...], operands: Sequence[Any]) -> None:
    """Do on the host what a run does there: take note, copy to the host, compute mirrors; nothing on the device.

    For one who has the device's side done otherwise, by replaying a captured graph.

    Args:
        info: the embedded host's SequenceInfo.
        parts: those of `ops.mutate_all`.
        operands: likewise; of tensors only size and type count.
    """
    run = _run_of(info, parts)
    rows, generating = _rows(info)
    if run._possible:
        run._look_at(info)
    run._on_host(info, rows, generating, run._matched(operands))


def copies_to_host(info: Any, parts: tuple[tuple[Any, ...], ...]) -> bool:
    """Whether any part of a run copies something to the host, as the interface is now."""
    return any(_moved(info, Part(*part)) for part in parts)


def is_fusible_copy(info: Any, name: str) -> bool:
    """Whether `copy_` of a buffer may be part of a run: page tables belong to other programs of the kernel."""
    if name != buffer_of(name) or name not in info._input_buffer.tensor_names:
        return False
    pooled = {base + suffix for base in POOLED for suffix in info._pool_suffixes}
    return name not in pooled and info._input_buffer.get_view(name).dtype in KINDS

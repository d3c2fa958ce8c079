"""The table of metadata calls: what each writes, which mirrors it reads, what its arithmetic on the host needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

HOST_SUFFIX = "_host"

#: names that end in `_host` and are no mirror of a device buffer: the host alone writes them.
HOST_ONLY = frozenset({"batch_info_host"})

POOL_SUFFIX = re.compile(r"_g\d+$")

Names = tuple[str, ...]
#: buffer or mirror names, or a function `(info, *args, **kwargs) -> names` of a call's own arguments; `info` is the
#: SequenceInfo known while planning, or None; the function returns None when it cannot tell.
NamesOf = Names | Callable[..., Names | None]


def mirror_of(buffer: str) -> str:
    """Return the name of a buffer's host mirror."""
    return buffer + HOST_SUFFIX


def is_mirror(name: str) -> bool:
    """Whether a name is that of a host mirror (`cu_seqlen_host`; `batch_info_host` has no device side)."""
    return name.endswith(HOST_SUFFIX) and name not in HOST_ONLY


def buffer_of(name: str) -> str:
    """Return the buffer that a name, its own or its mirror's, belongs to."""
    return name.removesuffix(HOST_SUFFIX)


def pool_twins(buffer: str, available: Iterable[str]) -> Names:
    """Return a buffer's twins of the other cache pools (`cache_loc_g1`, ...) among the `available` names, sorted."""
    return tuple(sorted(n for n in available if n.startswith(buffer) and POOL_SUFFIX.fullmatch(n, len(buffer))))


@dataclass(frozen=True)
class MutationSpec:
    """What one metadata mutation does.

    Attributes:
        name: the method's name on SequenceInfo.
        writes: buffers written on the device, sorted, or a function of the call's arguments (see `NamesOf`).
        needs: buffers whose values from before the call the same arithmetic on the host would read.
        operand: index, among the call's arguments, of the device tensor that the host does not know; None: no such.
        may_be_noop: whether a call may leave everything as it is, and then mirrors nothing either.
        takes_override: whether the method takes `active_args_override`.
        mirrors: what the call itself brings up to date. "written": when any written buffer has an active mirror,
            the whole buffer un-narrowed and exactly the named ones narrowed; "none": nothing.
        pooled: whether it writes the twins of the other pools too.
        restages: whether it sets every buffer and every mirror from host data.
        generates: what it does to the batch: True leaves it generate-only (and does nothing to one that is), False
            leaves it as it was, None cannot be told.
        host_effect: `host_effect(info, *args, **kwargs)` makes the call's changes to `info.batch_info`, and no other.
        replays: for each written buffer whose new value the host can compute, the buffers whose mirrors must hold the
            values from before the call. A twin of another pool follows its namesake, from the twins of its inputs.
        keeps_versions: whether what it writes gets a new version on a host that keeps any, and nothing else does.
        doc: one line for people.
    """

    name: str
    writes: NamesOf
    needs: Names = ()
    operand: int | None = None
    may_be_noop: bool = False
    takes_override: bool = False
    mirrors: Literal["written", "none"] = "none"
    pooled: bool = False
    restages: bool = False
    generates: bool | None = False
    host_effect: Callable[..., None] | None = None
    replays: Mapping[str, Names] = field(default_factory=dict, hash=False)
    keeps_versions: bool = False
    doc: str = ""

    def replay_inputs(self, buffer: str) -> Names | None:
        """Return the buffers from whose mirrors the host computes a written buffer's, None when it cannot."""
        if buffer in self.replays:
            return self.replays[buffer]
        pool = POOL_SUFFIX.search(buffer) if self.pooled else None
        inputs = None if pool is None else self.replays.get(buffer[: pool.start()])
        return None if pool is None or inputs is None else tuple(name + pool.group() for name in inputs)

    @property
    def changes_batch(self) -> bool:
        """Whether a call may change `info.batch_info`."""
        return self.generates is not False

    def written(
        self, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any], available: Iterable[str]
    ) -> Names | None:
        """Return the buffers that a call writes, sorted, twins of other pools included.

        Args:
            info: the SequenceInfo known while planning, or None.
            args: the call's arguments after the receiver; FX nodes stand for what is not constant.
            kwargs: its keyword arguments.
            available: the names of all buffers.

        Returns:
            The names, or None when the arguments do not tell.
        """
        names = self.writes(info, *args, **kwargs) if callable(self.writes) else self.writes
        if names is None:
            return None
        if self.pooled:
            names = (*names, *(twin for name in names for twin in pool_twins(name, available)))
        return tuple(sorted(set(names)))


@dataclass(frozen=True)
class HostReader:
    """A call on the interface that reads mirrors.

    Attributes:
        name: the method's or function's name.
        reads: `_host` names, or a function of the call's arguments (see `NamesOf`).
    """

    name: str
    reads: NamesOf

    def read(self, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Names | None:
        """Return the mirrors that a call reads, sorted, or None when the arguments do not tell."""
        names = self.reads(info, *args, **kwargs) if callable(self.reads) else self.reads
        return None if names is None else tuple(sorted(n for n in set(names) if is_mirror(n)))


#: every registered mutation by name.
MUTATIONS: dict[str, MutationSpec] = {}

#: every registered reader by name.
HOST_READERS: dict[str, HostReader] = {}

#: methods of the interface and of SequenceInfo that read no mirror and write neither buffers nor the batch's kind.
NEUTRAL_METHODS = frozenset(
    {
        "activate_arg",
        "add_resource",
        "flatten",
        "initialize_resources",
        "maybe_gather_and_squeeze",
        "register_host_prepare_for_attention_forward",
        "register_window_groups",
        "unflatten",
        "update_cache_information",
    }
)

#: methods of BatchInfo that may change whether the batch is generate-only.
BATCH_KIND_METHODS = frozenset({"update"})


def register_mutation(
    name: str,
    writes: Iterable[str] | Callable[..., Names | None],
    needs: Iterable[str] = (),
    operand: int | None = None,
    may_be_noop: bool = False,
    takes_override: bool = False,
    host_effect: Callable[..., None] | None = None,
    *,
    pooled: bool = True,
    doc: str = "",
) -> MutationSpec:
    """Teach the passes a metadata call of a wrapper's own.

    Args:
        name: the name of the method, of SequenceInfo or of the interface, or of the function that takes one of them.
        writes: names of the buffers that it writes on the device (never `_host` names), or a function
            `(info, *args, **kwargs) -> names` of the call's arguments, which may be FX nodes and `info` None; it
            returns None when it cannot tell, and the call then counts as unknown.
        needs: buffers whose values from before the call its arithmetic reads.
        operand: index of its device operand among its arguments.
        may_be_noop: whether a call may do nothing at all.
        takes_override: whether it mirrors what it wrote by itself and takes `active_args_override` to narrow that.
            False: it mirrors nothing.
        host_effect: `host_effect(info, *args, **kwargs)` makes the call's changes to `info.batch_info`.
        pooled: whether it also writes the twins (`_g1`, ...) of what it writes in the other cache pools.
        doc: one line for people.

    Returns:
        The new entry. A later registration of the same name replaces an earlier one.

    Raises:
        ValueError: a name in `writes` or `needs` is a mirror's.

    Example:
        >>> register_mutation("advance_", writes=("input_pos", "position_ids"), operand=0).writes
        ('input_pos', 'position_ids')
    """
    fixed = writes if callable(writes) else tuple(sorted(set(writes)))
    _refuse_mirrors(name, (*(() if callable(fixed) else fixed), *needs))
    spec = MutationSpec(
        name=name,
        writes=fixed,
        needs=tuple(sorted(set(needs))),
        operand=operand,
        may_be_noop=may_be_noop,
        takes_override=takes_override,
        mirrors="written" if takes_override else "none",
        pooled=pooled,
        generates=None if host_effect is not None else False,
        host_effect=host_effect,
        doc=doc,
    )
    MUTATIONS[name] = spec
    return spec


def register_host_reader(name: str, reads: Iterable[str] | Callable[..., Names | None]) -> HostReader:
    """Teach the passes a call that reads mirrors and writes no buffer.

    Args:
        name: the name of the method, of SequenceInfo or of the interface, or of the function that takes one of them.
        reads: `_host` names, none for a call that is known to be harmless; or a function
            `(info, *args, **kwargs) -> names` of the call's arguments, which may be FX nodes and `info` None; it
            returns None when it cannot tell, and the call then counts as unknown.

    Returns:
        The new entry. A later registration of the same name replaces an earlier one.

    Raises:
        ValueError: a name in `reads` is not a mirror's.
    """
    fixed = reads if callable(reads) else tuple(sorted(set(reads)))
    if not callable(fixed):
        wrong = [n for n in fixed if not n.endswith(HOST_SUFFIX)]
        if wrong:
            raise ValueError(
                f"host reader {name!r} reads {wrong}: mirrors end in {HOST_SUFFIX!r}, as in {wrong[0]}_host"
            )
    reader = HostReader(name, fixed)
    HOST_READERS[name] = reader
    return reader


def _refuse_mirrors(name: str, buffers: Iterable[str]) -> None:
    wrong = [b for b in buffers if b.endswith(HOST_SUFFIX)]
    if wrong:
        raise ValueError(f"mutation {name!r} names {wrong}: give device buffers, as in {buffer_of(wrong[0])!r}")


# -- the calls of SequenceInfo ---------------------------------------------------------------------------------------


def _switch_on_host(info: Any, *args: Any, **kwargs: Any) -> None:
    batch_info = info.batch_info
    if batch_info.is_generate_only():
        return
    num_sequences = int(batch_info.get_total_num_sequences())
    batch_info.update([0, 0, 0, 0, num_sequences, num_sequences])
    batch_info.update_tokens_gather_info(num_sequences, False)


def _no_host_effect(info: Any, *args: Any, **kwargs: Any) -> None:
    """Change nothing: the call leaves `batch_info` alone."""


def _copied_name(info: Any, name: Any = None, *args: Any, **kwargs: Any) -> Names | None:
    return (buffer_of(name),) if isinstance(name, str) else None


def _nothing_known(info: Any, *args: Any, **kwargs: Any) -> Names | None:
    return None


def _got_name(info: Any, name: Any = None, *args: Any, **kwargs: Any) -> Names | None:
    return (name,) if isinstance(name, str) else None


def _host_prepare_args(info: Any, *args: Any, **kwargs: Any) -> Names | None:
    return None if info is None else tuple(info._active_host_prep_args)


_OFFSET_WRITES = (
    "cache_loc",
    "cu_num_pages",
    "input_pos",
    "last_page_len",
    "position_ids",
    "seq_len_with_cache",
    "use_initial_states",
)

_BUILT_IN = (
    MutationSpec(
        name="switch_to_generate_",
        writes=("cu_seqlen", "input_ids", "input_pos", "position_ids", "seq_len", "use_initial_states"),
        needs=("cu_seqlen", "input_ids", "input_pos", "seq_len"),
        may_be_noop=True,
        takes_override=True,
        mirrors="written",
        generates=True,
        host_effect=_switch_on_host,
        replays={
            "cu_seqlen": (),
            "input_ids": ("cu_seqlen", "input_ids"),
            "input_pos": ("input_pos", "seq_len"),
            "position_ids": ("input_pos", "seq_len"),
            "seq_len": (),
            "use_initial_states": ("input_pos", "seq_len"),
        },
        keeps_versions=True,
        doc="Reduce each sequence to its last token.",
    ),
    MutationSpec(
        name="offset_pos_and_cache_",
        writes=_OFFSET_WRITES,
        needs=(
            "cache_loc",
            "cu_num_pages",
            "cu_seqlen",
            "extra_page_per_seq",
            "input_pos",
            "last_page_len",
            "position_ids",
            "seq_len_with_cache",
        ),
        operand=0,
        takes_override=True,
        mirrors="written",
        pooled=True,
        host_effect=_no_host_effect,
        replays={
            "cache_loc": ("cache_loc", "cu_num_pages", "extra_page_per_seq", "last_page_len"),
            "cu_num_pages": ("cu_num_pages", "last_page_len"),
            "input_pos": ("input_pos",),
            "last_page_len": ("last_page_len",),
            "position_ids": ("cu_seqlen", "position_ids"),
            "seq_len_with_cache": ("seq_len_with_cache",),
            "use_initial_states": ("input_pos",),
        },
        keeps_versions=True,
        doc="Move the end of each sequence by its offset.",
    ),
    MutationSpec(
        name="copy_",
        writes=_copied_name,
        operand=1,
        host_effect=_no_host_effect,
        keeps_versions=True,
        doc="Store one buffer, on the side that the source lives on.",
    ),
    MutationSpec(
        name="rescatter_input_ids_",
        writes=("input_ids",),
        needs=("input_ids", "_gather_idx", "_mask_scatter_indices"),
        operand=0,
        may_be_noop=True,
        host_effect=_no_host_effect,
        keeps_versions=True,
        doc="Put the previous iteration's tokens into the rows that overlap it.",
    ),
    MutationSpec(
        name="offset_with_new_lens_",
        writes=_OFFSET_WRITES,
        needs=("_gather_slot_idx",),
        operand=0,
        may_be_noop=True,
        mirrors="written",
        pooled=True,
        host_effect=_no_host_effect,
        keeps_versions=True,
        doc="Move the sequences that overlap the previous iteration by what it accepted.",
    ),
    *(
        MutationSpec(
            name=name, writes=_nothing_known, restages=True, generates=None, doc="Set every buffer and every mirror."
        )
        for name in (
            "nest_sequences",
            "reset",
            "set_capture_batch",
            "set_example_sequence",
            "set_max_num_tokens_sample",
        )
    ),
)

MUTATIONS.update((spec.name, spec) for spec in _BUILT_IN)

#: the calls that the hosts have themselves.
BUILT_IN_MUTATIONS = frozenset(MUTATIONS)

register_host_reader("run_host_prepare_for_attention_forward", _host_prepare_args)
register_host_reader("get_arg", _got_name)
register_host_reader("unnest_sequences", ("seq_len_host",))

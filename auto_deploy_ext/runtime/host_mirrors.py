"""Bringing host mirrors up to date, on any host: exact moves and quiet mutations.

The embedded host's InputBuffer keeps versions and moves what it is told to. AutoDeploy's own does neither; there,
`tracked_mirrors` does.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from auto_deploy_ext.effects import MUTATIONS, MutationSpec, buffer_of, mirror_of
from auto_deploy_ext.runtime.tracked_mirrors import STATE_KEY, Observer, Ticket, TrackedMirrors

# -- the interface ----------------------------------------------------------------------------------------------------


def mirrors_of(info: Any) -> VersionedMirrors | TrackedMirrors:
    """Return the mirrors of a CachedSequenceInterface or a SequenceInfo, tracked from now on if they were not."""
    info = getattr(info, "info", info)
    buffer = info._input_buffer
    if hasattr(buffer, "copy_names_to_host"):
        return VersionedMirrors(buffer)
    tracked = vars(info).get(STATE_KEY)
    if tracked is None or not tracked.tracks(info):
        tracked = vars(info)[STATE_KEY] = TrackedMirrors(info)
    return tracked


def is_tracked(info: Any) -> bool:
    """Whether mirrors of this interface need tracking: its buffer keeps no versions and copies only everything."""
    buffer = getattr(getattr(info, "info", info), "_input_buffer", None)
    return buffer is not None and not hasattr(buffer, "copy_names_to_host")


def move(info: Any, names: Collection[str], trigger: str = "") -> None:
    """Bring exactly these mirrors up to date in one transfer, at their current lengths, and wait for it.

    Args:
        info: a CachedSequenceInterface or a SequenceInfo.
        names: `_host` names, or those of their buffers; none means no transfer.
        trigger: what the transfer is reported as caused by.
    """
    if names:
        mirrors_of(info).move(names, trigger)


def start(info: Any, names: Collection[str], trigger: str = "") -> Ticket:
    """Start that transfer on the current stream, without waiting; its result lands aside until the ticket's `wait`.

    Args:
        info: a CachedSequenceInterface or a SequenceInfo.
        names: `_host` names, or those of their buffers; at least one.
        trigger: what the transfer is reported as caused by.

    Raises:
        ValueError: no names.
    """
    if not names:
        raise ValueError("a transfer needs at least one mirror")
    return mirrors_of(info).start(names, trigger)


def stale_names(info: Any) -> tuple[str, ...]:
    """Return the sorted names of the buffers whose mirror is older than the device side, as far as calls tell."""
    return mirrors_of(info).stale_names()


def mark_stale(info: Any, names: Collection[str]) -> None:
    """Note that these buffers were written on the device by something other than a method of `info`."""
    mirrors_of(info).mark_stale(names)


def mark_fresh(info: Any, names: Collection[str]) -> None:
    """Note that these mirrors were given the values that the device has."""
    mirrors_of(info).mark_fresh(names)


def before_host_write(info: Any) -> None:
    """Wait until the host may write mirrors: nothing that reads them as a staging area is pending afterwards."""
    mirrors_of(info).before_host_write()


def host_view(info: Any, name: str) -> torch.Tensor:
    """Return a mirror to write, `[capacity]`, without waiting for any copy; see `before_host_write`."""
    return mirrors_of(info).host_view(name)


def observers(info: Any) -> list[Observer]:
    """Return the list of callables that are told of every transfer when it is started."""
    return mirrors_of(info).observers


@contextlib.contextmanager
def quiet(info: Any) -> Iterator[None]:
    """While active, the host's own copies to the host do nothing; it takes them for done."""
    buffer = getattr(info, "info", info)._input_buffer
    names = [n for n in ("copy_to_host", "copy_names_to_host") if hasattr(buffer, n)]
    before = {n: vars(buffer)[n] for n in names if n in vars(buffer)}
    vars(buffer).update(dict.fromkeys(names, _moves_nothing))
    try:
        yield
    finally:
        for name in names:
            if name in before:
                vars(buffer)[name] = before[name]
            else:
                vars(buffer).pop(name, None)


def _moves_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def mutate(info: Any, name: str, /, *operands: Any, active_args: tuple[str, ...] | None = None, **kwargs: Any) -> Any:
    """Call the metadata mutation `name` and have it mirror what `active_args` says.

    Args:
        info: the host's SequenceInfo.
        name: a registered mutation that is a method of `info`.
        operands: its own arguments.
        active_args: None: un-narrowed, the whole buffer moves if the mirror of anything written is active. Names:
            exactly those of them that the call writes are brought up to date, through the host's override where the
            method takes one (AutoDeploy then moves its whole buffer for their sake), else by a transfer right after
            the call. None of them: nothing moves.
        kwargs: its own keyword arguments.
    """
    method = getattr(info, name)
    if takes_override(info, name):
        if active_args is None:
            return method(*operands, **kwargs)
        return method(*operands, active_args_override=set(active_args), **kwargs)
    spec = MUTATIONS.get(name)
    whole = active_args is None
    if whole and not (spec is not None and spec.mirrors == "written" and is_tracked(info)):
        return method(*operands, **kwargs)
    written = _written_mirrors(info, spec, operands, kwargs)
    with quiet(info):
        result = method(*operands, **kwargs)
    if not whole:
        wanted = set(active_args or ())
        move(info, tuple(n for n in written if n in wanted), trigger=name)
    elif not _watched_mirrors(info).isdisjoint(written):
        move(info, info._input_buffer.tensor_names, trigger=name)
    return result


def takes_override(info: Any, name: str) -> bool:
    """Whether the method `name` of a SequenceInfo takes `active_args_override`."""
    kind: Any = type(info)
    return _takes_override(kind, name)


@lru_cache(maxsize=256)
def _takes_override(kind: Any, name: str) -> bool:
    method = getattr(kind, name, None)
    return method is not None and "active_args_override" in inspect.signature(method).parameters


def _watched_mirrors(info: Any) -> frozenset[str]:
    return frozenset((*info._active_args, *getattr(info, "_active_host_prep_args", ())))


def _written_mirrors(
    info: Any, spec: MutationSpec | None, operands: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """The mirrors of what a call writes, none where it does nothing."""
    if spec is None or (spec.generates is True and info.batch_info.is_generate_only()):
        return ()
    names = spec.written(info, operands, kwargs, info._input_buffer.tensor_names)
    return tuple(map(mirror_of, info._input_buffer.tensor_names if names is None else names))


def tracked_state(info: Any) -> list[Any]:
    """Return the objects that hold what is tracked about an interface's mirrors."""
    tracked = vars(getattr(info, "info", info)).get(STATE_KEY)
    return [] if tracked is None else [tracked]


# -- the embedded host ------------------------------------------------------------------------------------------------


class VersionedMirrors:
    """Mirrors of an InputBuffer that keeps versions, moves what it is told to, and stages elsewhere.

    Args:
        buffer: the embedded host's InputBuffer.
    """

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def move(self, names: Collection[str], trigger: str = "") -> None:
        """See `move`."""
        self._buffer.copy_names_to_host(names, trigger=trigger)

    def start(self, names: Collection[str], trigger: str = "") -> Ticket:
        """See `start`."""
        return self._buffer.start_copy_to_host(names, trigger)

    def stale_names(self) -> tuple[str, ...]:
        """See `stale_names`."""
        return tuple(self._buffer.stale_names())

    def mark_stale(self, names: Collection[str]) -> None:
        """See `mark_stale`."""
        for name in names:
            self._buffer.bump_device(buffer_of(name))

    def mark_fresh(self, names: Collection[str]) -> None:
        """See `mark_fresh`."""
        for base in map(buffer_of, names):
            self._buffer.mark_mirror(base, self._buffer.device_version[base])

    def before_host_write(self) -> None:
        """Do nothing: uploads read staging slots."""

    @property
    def device_version(self) -> dict[str, int]:
        """The version of each buffer on the device."""
        return self._buffer.device_version

    def host_view(self, name: str) -> torch.Tensor:
        """See `host_view`."""
        return self._buffer.get_host_memory(buffer_of(name))

    def host_array(self, name: str) -> np.ndarray:
        """The memory of `host_view` as an array."""
        return self._buffer.get_host_array(buffer_of(name))

    @property
    def observers(self) -> list[Observer]:
        """See `observers`."""
        return self._buffer.transfer_observers

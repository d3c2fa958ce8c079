"""sanitize: raises where a consumer reads a stale host mirror, and makes stale mirrors absurd meanwhile."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from auto_deploy_ext.active_args import META_KEY, placeholder_names, takes_variadic
from auto_deploy_ext.effects import HOST_READERS, MUTATIONS, HostReader, MutationSpec, buffer_of, is_mirror, mirror_of
from auto_deploy_ext.runtime import host_mirrors

#: attributes of an InputBuffer, there only while it is sanitized: the sanitizer, and what poisoned mirrors held.
_SANITIZER, _POISON = "_sanitizer", "_sanitizer_poison"

#: where an orchestrator that cannot be traced gets its mirrors from; imported here it would be a cycle.
_HOOKS = "auto_deploy_ext.runtime.hooks"

#: readers that SequenceInfo's own code uses for whatever is active: from there they are no consumer.
_USED_WITHIN = frozenset({"get_arg"})


class StaleHostMirrorError(RuntimeError):
    """A consumer reads a host mirror that is older than its buffer on the device.

    Attributes:
        mirror: the mirror's `_host` name.
        consumer: who reads it: a module's qualified name (its class where that is unknown), or a method's name.
        mutation: the call that made it stale.
    """

    def __init__(self, mirror: str, consumer: str, mutation: str) -> None:
        super().__init__(mirror, consumer, mutation)
        self.mirror = mirror
        self.consumer = consumer
        self.mutation = mutation

    def __str__(self) -> str:
        return (
            f"{self.consumer} reads {self.mirror}, which is stale: {self.mutation} has written "
            f"{buffer_of(self.mirror)} on the device since that mirror was last brought up to date"
        )


@contextmanager
def sanitize(info: Any, module: nn.Module | None = None) -> Iterator[Sanitizer]:
    """Check every read of a host mirror while the context is open.

    Consumers are: any GraphModule that is called, and any module that carries `meta["active_args"]`, as a compiled
    replacement of one does, for the mirrors among its arguments (every active one where it takes `**kwargs`);
    `run_host_prepare_for_attention_forward`; `get_arg("x_host")` from outside SequenceInfo; `unnest_sequences`; what
    `register_host_reader` adds; and the arithmetic by which strategy `replay` repeats a mutation on the host. It does
    not matter whether a rewritten graph or an eager wrapper calls them.

    A mirror is stale once its buffer was written on the device, by a registered mutation or in place through a view,
    until a transfer, a new batch or a computation on the host brings it up to date. Meanwhile it holds absurd values
    (see `poison_`), so that a read that nobody announces, through a raw pointer, gives no plausible numbers.

    Args:
        info: a SequenceInfo, or an interface that has one as `.info`: that is needed where a registered mutation or
            reader is a method of the interface itself. On a host whose buffer keeps no versions, a mirror that equals
            its buffer right after a mutation counts as up to date.
        module: a model whose submodules' qualified names are used in errors. Modules that the outermost called module
            contains are known without it.

    Yields:
        The sanitizer; a nested context for the same SequenceInfo yields the same one.

    Raises:
        StaleHostMirrorError: at the read, naming mirror, consumer and mutation.

    Example:
        >>> with auto_deploy_ext.sanitize(cm.info):
        ...     model(cm)
    """
    buffer = getattr(info, "info", info)._input_buffer
    outer = vars(buffer).get(_SANITIZER)
    sanitizer = Sanitizer(info) if outer is None else outer
    if module is not None:
        sanitizer.name_modules(module)
    if outer is not None:
        yield sanitizer
        return
    sanitizer.install()
    try:
        with _WriteWatcher(sanitizer):
            yield sanitizer
    finally:
        sanitizer.remove()


def _sanitizer_of(buffer: Any) -> Sanitizer | None:
    """What sanitizes an InputBuffer now."""
    return getattr(buffer, _SANITIZER, None)


def is_watched(buffer: Any) -> bool:
    """Whether an InputBuffer is being sanitized."""
    return _sanitizer_of(buffer) is not None


def check_old_value(buffer: Any, name: str) -> None:
    """Check that a mirror was fresh before the mutation that has just run, for one who repeats it on the host.

    Raises:
        StaleHostMirrorError: the buffer is being sanitized, and the mirror was stale.
    """
    sanitizer = _sanitizer_of(buffer)
    if sanitizer is not None:
        sanitizer.check_old_value(buffer_of(name))


# In these, where an InputBuffer is not being sanitized, nothing happens.
_NOTHING = nullcontext()


def unpoisoned(buffer: Any) -> AbstractContextManager[None]:
    """Give stale mirrors their old values for a computation on the host; those still stale at its end are poisoned."""
    sanitizer = _sanitizer_of(buffer)
    return _NOTHING if sanitizer is None else sanitizer.unpoisoned()


def answered_for(buffer: Any) -> AbstractContextManager[None]:
    """While active, `check_old_value` accepts every mirror: the caller has compared versions with those of its own."""
    sanitizer = _sanitizer_of(buffer)
    return _NOTHING if sanitizer is None else sanitizer.answered_for()


def announced(buffer: Any, mutation: str) -> AbstractContextManager[None]:
    """While active, writes to a buffer are those of that registered mutation, which somebody does in its place."""
    sanitizer = _sanitizer_of(buffer)
    return _NOTHING if sanitizer is None else sanitizer._writing(MUTATIONS[mutation])


def unwatched(buffer: Any) -> AbstractContextManager[None]:
    """While active, writes in place of a buffer's memory are none that anybody has to be told of."""
    sanitizer = _sanitizer_of(buffer)
    return _NOTHING if sanitizer is None else sanitizer.suspended()


def poison_(mirror: torch.Tensor, device: torch.Tensor) -> None:
    """Fill a mirror with values that cannot be taken for metadata.

    * Integers alternate between two far apart: about half the type's minimum and a quarter of its maximum. Neither is
      a length or an index, and a difference of neighbours (lengths from `cu_seqlen`) is none either.
    * Flags become the opposite of what the device holds now: no flag is absurd, but these are wrong.
    * Floats become NaN.

    Args:
        mirror: `[capacity]` on the host, written.
        device: `[capacity]` of the same dtype, the buffer.
    """
    if mirror.dtype is torch.bool:
        capturing = device.is_cuda and torch.cuda.is_current_stream_capturing()
        mirror.copy_(~mirror if capturing else ~device)
    elif mirror.is_floating_point():
        mirror.fill_(float("nan"))
    else:
        limits = torch.iinfo(mirror.dtype)
        mirror[0::2] = limits.min // 2 if limits.min else limits.max
        mirror[1::2] = limits.max // 4


@dataclass(frozen=True)
class _Poisoned:
    """A poisoned mirror: what it held, its version then, and the device's version that it was poisoned for."""

    saved: torch.Tensor
    version: int
    device_version: int


def _host_memory(buffer: Any, name: str) -> torch.Tensor:
    """The mirror at full capacity, without waiting for copies under way."""
    getter = getattr(buffer, "get_host_memory", buffer.get_host_view)
    return getter(name)


class Sanitizer:
    """Watches one SequenceInfo; made by `sanitize`.

    What has to be put back together with the buffer's contents (an interface's state is saved and restored while an
    orchestrator is traced) lies in attributes of the buffer.

    Args:
        interface: a SequenceInfo, or an interface that has one as `.info`.

    Attributes:
        checked: how many consumers that read mirrors were checked.
    """

    def __init__(self, interface: Any) -> None:
        self._interface = interface
        self._info = getattr(interface, "info", interface)
        self._buffer = self._info._input_buffer
        self._mirrors = host_mirrors.mirrors_of(self._info)
        #: what has the versions: the buffer, or what tracks the mirrors of one that has none.
        self._versions: Any = self._buffer if self._keeps_versions else self._mirrors
        self._equal: dict[str, int] = {}
        self._module_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        self._running: list[MutationSpec] = []
        self._writers: dict[str, str] = {}
        #: the last mutation, and what was stale before it, by whose doing.
        self._last = ""
        self._stale_before: dict[str, str] = {}
        self._suspended = False
        self.checked = 0

    def name_modules(self, module: nn.Module) -> None:
        """Use the qualified names that `module` gives its submodules, for those that have no name yet."""
        for name, submodule in module.named_modules():
            if name:
                self._module_names.setdefault(submodule, name)

    def stale_mirrors(self) -> tuple[str, ...]:
        """The sorted `_host` names of the mirrors that are stale now."""
        return tuple(sorted(map(mirror_of, self._stale())))

    def _stale(self) -> list[str]:
        device, mirror = self._versions.device_version, self._versions.mirror_version
        older = (n for n in self._buffer.tensor_names if mirror.get(n, 0) < device.get(n, 0))
        return [n for n in older if self._equal.get(n) != device[n]]

    @property
    def _keeps_versions(self) -> bool:
        return not host_mirrors.is_tracked(self._info)

    @property
    def _poisoned(self) -> dict[str, _Poisoned]:
        return getattr(self._buffer, _POISON)

    # -- installing ----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap methods on the instances and hook the calls of modules."""
        buffer = self._buffer
        setattr(buffer, _SANITIZER, self)
        setattr(buffer, _POISON, {})
        if self._keeps_versions:
            self._wrap(buffer, "bump_device", self._naming_writer)
        else:
            self._wrap(self._mirrors, "mark_stale", self._naming_writer)
        self._wrap(buffer, "copy_to_device", self._copying_to_device)
        for name, spec in MUTATIONS.items():
            self._wrap_method(name, partial(self._mutating, spec))
        for name, reader in HOST_READERS.items():
            self._wrap_method(name, partial(self._reading, reader))
        handle = register_module_forward_pre_hook(self._before_forward)
        self._undo.append(handle.remove)

    def remove(self) -> None:
        """Undo `install`; mirrors that are still stale get their old values back."""
        while self._undo:
            self._undo.pop()()
        self.restore()
        for name in (_SANITIZER, _POISON):
            vars(self._buffer).pop(name, None)

    def _wrap_method(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap a method of SequenceInfo, or else of the interface."""
        owner = next((o for o in (self._info, self._interface) if callable(getattr(o, name, None))), None)
        if owner is not None:
            self._wrap(owner, name, wrap)

    def _wrap(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        replaced = name in vars(owner)
        original = getattr(owner, name)
        wrapped = wrap(original)

        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        method.__name__, method.__doc__ = name, original.__doc__
        bound = MethodType(method, owner)
        setattr(owner, name, bound)

        def undo() -> None:
            # Not where somebody else has wrapped this method since, or has taken the wrapper away.
            if vars(owner).get(name) is bound:
                if replaced:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)

        self._undo.append(undo)

    # -- writes --------------------------------------------------------------------------------------------------

    def _mutating(self, spec: MutationSpec, call: Callable[..., Any]) -> Callable[..., Any]:
        def mutate(*args: Any, **kwargs: Any) -> Any:
            with self._writing(spec):
                if not self._keeps_versions:
                    self.restore()  # such a host stages into its mirrors, and may compute with what they hold
                result = call(*args, **kwargs)
                if not (self._keeps_versions or spec.restages):
                    self._note_equal()
            return result

        return mutate

    @contextmanager
    def _writing(self, spec: MutationSpec) -> Iterator[None]:
        if not self._running:
            self._settle()  # before lengths change
            self._last = spec.name
            self._stale_before = {name: self._writer_of(name) for name in self._stale()}
        self._running.append(spec)
        try:
            yield
        finally:
            self._running.pop()
            if not self._running:
                self.update()

    def _current_writer(self) -> str | None:
        """The outermost mutation that is running; one that starts a batch only where no other runs inside."""
        named = [spec.name for spec in self._running if not spec.restages] or [s.name for s in self._running]
        return named[0] if named else None

    def _writer_of(self, name: str) -> str:
        return self._writers.get(name, "an unknown call")

    def _naming_writer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(names: str | Iterable[str]) -> None:
            writer = self._current_writer() or _caller_outside(sys._getframe(2), call)
            names = (names,) if isinstance(names, str) else tuple(names)
            self._writers.update(dict.fromkeys(map(buffer_of, names), writer))
            call(names[0] if call.__name__ == "bump_device" else names)

        return note

    def _copying_to_device(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def copy(*args: Any, **kwargs: Any) -> Any:
            self.restore()  # the mirrors travel, those that were not staged as they would be without us
            with self.suspended():
                return call(*args, **kwargs)

        return copy

    @contextmanager
    def unpoisoned(self) -> Iterator[None]:
        """While active, stale mirrors have their old values."""
        self.restore()
        yield
        self.update()

    @contextmanager
    def answered_for(self) -> Iterator[None]:
        """While active, no mirror counts as stale before the mutation that has just run."""
        before, self._stale_before = self._stale_before, {}
        try:
            yield
        finally:
            self._stale_before = before

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While active, writes in place are the buffer's own."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def note_in_place(self, tensors: list[torch.Tensor], operator: str) -> None:
        """Note that somebody outside wrote tensors in place, which may be views of buffers."""
        if self._suspended or self._running:
            return
        extents = [_extent(tensor) for tensor in tensors]
        written = [name for name in self._buffer.tensor_names if _overlap(self._buffer.get_view(name), extents)]
        if written:
            self._mirrors.mark_stale(written)
            self._writers.update(dict.fromkeys(written, operator))
            self.update()

    def _note_equal(self) -> None:
        """Count stale mirrors that equal their buffers as fresh: the mutation wrote both, or did nothing."""
        for name in self._stale():
            length = self._buffer.get_current_length(name)
            device, mirror = self._buffer.get_view(name)[:length], _host_memory(self._buffer, name)[:length]
            if torch.equal(device.to(mirror.device), mirror):
                self._equal[name] = self._versions.device_version[name]

    # -- poison --------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Poison what is stale now."""
        self._settle()
        self._poison()

    def _settle(self) -> None:
        """Forget the old values of mirrors that were written since; what lies beyond their length comes back."""
        poisoned, versions = self._poisoned, self._versions.mirror_version
        for name in [n for n, entry in poisoned.items() if entry.version != versions.get(n, 0)]:
            saved, memory = poisoned.pop(name).saved, _host_memory(self._buffer, name)
            beyond = slice(self._buffer.get_current_length(name), min(saved.numel(), memory.numel()))
            memory[beyond].copy_(saved[beyond])

    def _poison(self) -> None:
        poisoned = self._poisoned
        device, mirror = self._versions.device_version, self._versions.mirror_version
        for name in self._stale():
            entry = poisoned.get(name)
            if entry is not None and entry.device_version == device[name]:
                continue
            self._mirrors.before_host_write()
            memory = _host_memory(self._buffer, name)
            saved = memory.clone() if entry is None else entry.saved
            poisoned[name] = _Poisoned(saved, mirror.get(name, 0), device[name])
            poison_(memory, self._buffer.get_view(name))

    def restore(self) -> None:
        """Give stale mirrors their old values back."""
        self._settle()
        for name, entry in self._poisoned.items():
            memory = _host_memory(self._buffer, name)[: entry.saved.numel()]
            memory.copy_(entry.saved[: memory.numel()])
        self._poisoned.clear()

    # -- reads ---------------------------------------------------------------------------------------------------

    def _reading(self, reader: HostReader, call: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            if reader.name not in _USED_WITHIN or not self._is_method_of_info(sys._getframe(1)):
                self.check(reader.name, reader.read(self._info, args, kwargs))
            return call(*args, **kwargs)

        return read

    def _is_method_of_info(self, frame: FrameType | None) -> bool:
        """Whether a call comes from SequenceInfo's own code, wrappers like the ones here aside."""
        while frame is not None and frame.f_globals.get("__name__") in (__name__, _HOOKS):
            frame = frame.f_back
        return frame is not None and frame.f_locals.get("self") is self._info

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in self._module_names:
            self.name_modules(module)
        on_demand = sys.modules.get(_HOOKS)
        if on_demand is not None:
            on_demand.fetch(module, {})  # its own hook, where the module has it, comes after this one
        mirrors = _mirrors_among_arguments(module)
        if mirrors != ():
            self.check(self._module_names.get(module, type(module).__name__), mirrors)

    def check(self, consumer: str, mirrors: Iterable[str] | None) -> None:
        """Check a read.

        Args:
            consumer: who reads.
            mirrors: `_host` names; None: unknown, so every active one.

        Raises:
            StaleHostMirrorError: one of them is stale.
        """
        if torch._guards.detect_fake_mode() is not None:
            return  # an orchestrator is being traced
        if mirrors is None:
            active = (*self._info._active_args, *getattr(self._info, "_active_host_prep_args", ()))
            mirrors = [name for name in active if is_mirror(name)]
        reads = {buffer_of(name) for name in mirrors}.intersection(self._buffer.tensor_names)
        if not reads:
            return
        self.checked += 1
        self._buffer.get_host_view(min(reads))  # waits, as every reader does, for copies that nobody claimed
        self._settle()
        for name in sorted(reads.intersection(self._stale())):
            raise StaleHostMirrorError(mirror_of(name), consumer, self._writer_of(name))

    def check_old_value(self, name: str) -> None:
        """See the function of that name."""
        if name in self._stale_before:
            consumer = f"{self._last} on the host"
            raise StaleHostMirrorError(mirror_of(name), consumer, self._stale_before[name])


def _mirrors_among_arguments(module: nn.Module) -> tuple[str, ...] | None:
    """The mirrors among a consumer's arguments, none for any other module; None: its arguments do not tell."""
    if isinstance(module, GraphModule):
        if takes_variadic(module):
            return None
        names = placeholder_names(module)
    else:
        meta = getattr(module, "meta", None)
        names = meta.get(META_KEY, ()) if isinstance(meta, dict) else ()
    return tuple(name for name in names if is_mirror(name))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's elements lie: the first address and the one behind the last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(view: torch.Tensor, extents: list[tuple[int, int]]) -> bool:
    """Whether a contiguous view shares memory with one of the extents."""
    start = view.data_ptr()
    end = start + view.numel() * view.element_size()
    return any(start < other_end and other_start < end for other_start, other_end in extents)


def _caller_outside(frame: FrameType | None, method: Callable[..., Any]) -> str:
    """The innermost function on the stack that is not a method of the object that `method` belongs to."""
    owner = getattr(method, "__self__", None)
    while frame is not None:
        if frame.f_locals.get("self") is not owner and frame.f_code.co_filename != __file__:
            return frame.f_code.co_name
        frame = frame.f_back
    return "an unknown call"


class _WriteWatcher(TorchDispatchMode):
    """Tells a sanitizer which tensors an operator writes in place."""

    def __init__(self, sanitizer: Sanitizer) -> None:
        super().__init__()
        self._sanitizer = sanitizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            written = [value for value in _written(func._schema, args, kwargs) if type(value) is torch.Tensor]
            if written:
                self._sanitizer.note_in_place(written, func._schema.name.rpartition("::")[2])
        return result


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)

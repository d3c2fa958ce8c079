"""Runs a wrapper, notes what its consumers read and what was moved, and says what had to be moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

import auto_deploy_ext
from auto_deploy_ext import CachedSequenceInterface, SharedConfig, TransformRegistry, record_mirrors
from auto_deploy_ext.orchestrator.example_batches import page_arguments

from .library import ALL_ARGS

#: what each mutation writes on the device, from the description of AutoDeploy.
OFFSET = ("cache_loc", "cu_num_pages", "input_pos", "last_page_len", "position_ids", "seq_len_with_cache")
WRITES = {
    "switch_to_generate_": ("cu_seqlen", "input_ids", "input_pos", "position_ids", "seq_len", "use_initial_states"),
    "offset_pos_and_cache_": (*OFFSET, "use_initial_states"),
}

#: (prompt lengths, extend rows) of the batches that a wrapper is run on.
BATCHES = (([], 2), ([5], 0), ([3, 4], 2), ([], 1))


def make_interface(draft_len: int, device: str = "cpu") -> Any:
    """An interface of the host's own in which the arguments of all consumers are active."""
    config = auto_deploy_ext.host.module("shim.interface").KvCacheConfig(tokens_per_block=5)
    cm = CachedSequenceInterface(
        max_seq_len=64,
        max_batch_size=4,
        max_num_tokens=64,
        device=device,
        kv_cache_config=config,
        spec_config=SimpleNamespace(max_draft_len=draft_len),
    )
    cm.info.update_cache_information(64)
    for name in ALL_ARGS:
        cm.info.activate_arg(name)
    return cm


def nest(cm: Any, prefill: Sequence[int], extend: int, draft_len: int, cached: int = 9) -> None:
    """Put a batch of these prompt lengths and that many extend rows into an interface."""
    lengths = [*prefill, *[1 + draft_len] * extend]
    past = [*[0] * len(prefill), *[cached + 2 * i for i in range(extend)]]
    cu_seqlen = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    block = cm.info.tokens_per_block
    pages = [-(-(n + p) // block) for n, p in zip(lengths, past, strict=True)]
    cu_pages = [0, *torch.tensor(pages).cumsum(0).tolist()]
    cm.info.nest_sequences(
        [(7 * i) % 50 for i in range(cu_seqlen[-1])],
        cu_seqlen,
        past,
        batch_info=[len(prefill), sum(prefill), extend, extend * (1 + draft_len), 0, 0],
        slot_idx=list(range(len(lengths))),
        **page_arguments(cm.info, list(range(cu_pages[-1])), cu_pages, [40 + i for i in range(len(lengths))]),
    )


@dataclass
class Run:
    """One forward.

    Attributes:
        output: what it returned.
        reads: per call of a consumer its name and the mirrors that it read, as far as they are in use.
        events: the calls of mutations and consumers in order.
        transfers: what was moved.
    """

    output: Any = None
    reads: list[tuple[str, dict[str, list[int]]]] = field(default_factory=list)
    events: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    transfers: list[Any] = field(default_factory=list)

    @property
    def moved(self) -> Counter[str]:
        return Counter(name for transfer in self.transfers for name in transfer.names)

    @property
    def needed(self) -> Counter[str]:
        """How often each mirror has to be moved: once for every read that finds it stale."""
        stale: set[str] = set()
        counts: Counter[str] = Counter()
        for kind, names in self.events:
            if kind == "read":
                counts.update(stale.intersection(names))
                stale.difference_update(names)
            else:
                stale.update(names)
        return counts


def _consumers(wrapper: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in wrapper.named_modules():
        if isinstance(module, GraphModule) and path:
            yield path, module


@contextmanager
def noting_reads(wrapper: nn.Module, cm: Any, run: Run) -> Iterator[None]:
    """Note what each consumer finds in the mirrors that it is given, right before it runs."""
    handles = []
    buffer = cm.info._input_buffer
    for path, module in _consumers(wrapper):

        def note(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if any(isinstance(value, FakeTensor) for value in kwargs.values()):
                return  # the wrapper is being traced
            rows = cm.info.batch_info.get_total_num_sequences()
            pages = int(buffer.get_view("cu_num_pages")[rows])
            seen = {}
            for name, value in kwargs.items():
                if name.endswith("_host"):
                    base = name.removesuffix("_host")
                    count = pages if base == "cache_loc" else buffer.get_current_length(base)
                    seen[name] = value.flatten()[:count].tolist()
            run.reads.append((path, seen))
            run.events.append(("read", tuple(seen)))

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def fully_mirrored(cm: Any, run: Run) -> Iterator[None]:
    """Copy every buffer to its mirror after every mutation, one by one, whatever the host does itself."""
    info, buffer = cm.info, cm.info._input_buffer
    names = ("switch_to_generate_", "offset_pos_and_cache_", "copy_")

    def mirrored(name: str) -> Any:
        method = getattr(info, name)

        def call(*args: Any, **kwargs: Any) -> None:
            noop = name == "switch_to_generate_" and info.batch_info.is_generate_only()
            kwargs.pop("active_args_override", None)
            method(*args, **kwargs)
            for known in buffer.tensor_names:
                buffer.get_host_view(known).copy_(buffer.get_view(known))
            written = (args[0],) if name == "copy_" else WRITES[name]
            if not noop:
                run.events.append((name, tuple(f"{w}_host" for w in written)))

        return call

    for name in names:
        setattr(info, name, mirrored(name))
    try:
        yield
    finally:
        for name in names:
            delattr(info, name)


@contextmanager
def noting_host_reads(cm: Any, run: Run) -> Iterator[None]:
    """Note mirrors that the wrapper itself asks for."""
    method = type(cm).get_arg

    def get_arg(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.endswith("_host") and name != "batch_info_host":
            run.events.append(("read", (name,)))
        return method(cm, name, *args, **kwargs)

    cm.get_arg = get_arg
    try:
        yield
    finally:
        del cm.get_arg


def reference(kind: type[nn.Module], prefill: Sequence[int], extend: int, device: str = "cpu") -> Run:
    """The wrapper's own forward, with everything mirrored after every mutation."""
    wrapper, run = kind(), Run()
    cm = make_interface(wrapper.max_draft_len, device)
    nest(cm, prefill, extend, wrapper.max_draft_len)
    with torch.inference_mode(), noting_reads(wrapper, cm, run), noting_host_reads(cm, run), fully_mirrored(cm, run):
        run.output = wrapper(cm)
    return run


def transform(key: str, module: nn.Module, cm: Any, **fields: Any) -> Any:
    """Run one of the plugin's transforms as the host does; returns what it reported."""
    made = TransformRegistry.get(key).from_kwargs(stage="cache_init", **fields)
    index = (0,) if auto_deploy_ext.host.features["transform_idx"] else ()
    assert made(module, cm, None, SharedConfig(), *index) is module
    return module.meta["_autodeploy"]["transform_history"][key]


def scoped(kind: type[nn.Module], device: str = "cpu", **fields: Any) -> tuple[nn.Module, Any]:
    """The wrapper after both passes, and its interface."""
    wrapper = kind()
    cm = make_interface(wrapper.max_draft_len, device)
    transform("annotate_active_args", wrapper, cm)
    transform("scope_host_mirrors", wrapper, cm, **fields)
    return wrapper, cm


def step(wrapper: nn.Module, cm: Any, prefill: Sequence[int], extend: int) -> Run:
    """One forward of a wrapper as it is."""
    run = Run()
    nest(cm, prefill, extend, wrapper.max_draft_len)
    with torch.inference_mode(), noting_reads(wrapper, cm, run), record_mirrors(cm) as run.transfers:
        run.output = wrapper(cm)
    return run


def same(a: Any, b: Any) -> bool:
    """Whether two outputs are equal."""
    pairs = ((getattr(a, n), getattr(b, n)) for n in ("new_tokens", "new_tokens_lens", "next_draft_tokens"))
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)

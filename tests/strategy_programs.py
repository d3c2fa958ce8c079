"""Random orchestrators that really run: FX graphs over a small embedded interface, and what each step does to mirrors.

A program is a list of steps:

* ``("switch",)``, ``("offset",)``: that mutation; with a set of names behind it, it is narrowed by hand;
* ``("fresh",)``, ``("full", v)``: the offset becomes a copy of the caller's, or a new tensor of that value;
* ``("fill", v)``, ``("part", v)``: the offset, or a view of its first row, is filled in place;
* ``("copy", buffer)``: `copy_` of a changed buffer; ``("inplace", buffer)``: a view of a buffer is written in place;
* ``("consume", name)``: a call of that consumer;
* ``("branch", side, steps, steps)``: a branch that takes that side; ``("nested", steps)``: a nested orchestrator graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext import CachedSequenceInterface
from auto_deploy_ext.effects import MUTATIONS, buffer_of, mirror_of
from auto_deploy_ext.embedded.shim.interface import KvCacheConfig
from auto_deploy_ext.runtime.mirrors import Transfer

Step = tuple[Any, ...]
SWITCH, OFFSET = "switch_to_generate_", "offset_pos_and_cache_"
POOLED = ("cache_loc", "cu_num_pages", "last_page_len", "seq_len_with_cache")
PLAIN = ("cu_seqlen", "input_ids", "input_pos", "position_ids", "seq_len", "use_initial_states")
BUFFERS = (*PLAIN, *POOLED, *(name + "_g1" for name in POOLED), "extra_page_per_seq", "prompt_lens")
#: buffers that a person's own write leaves valid.
WRITABLE = (
    *("cache_loc", "extra_page_per_seq_g1", "input_ids", "input_pos", "last_page_len_g1", "position_ids"),
    *("seq_len", "seq_len_with_cache", "use_initial_states"),
)
TOKENS_PER_BLOCK = 4
_KINDS = ("prefill", "extend", "decode")


@dataclass(frozen=True)
class Batch:
    """Rows of a batch: `(kind, tokens, cached tokens)`, kinds in the order prefill, extend, decode."""

    rows: tuple[tuple[str, int, int], ...]
    offset: tuple[int, ...]

    @property
    def generating(self) -> bool:
        return all(kind == "decode" for kind, _, _ in self.rows)

    def nest(self, cm: CachedSequenceInterface) -> None:
        counts = []
        for kind in _KINDS:
            lengths = [length for k, length, _ in self.rows if k == kind]
            counts += [len(lengths), sum(lengths)]
        ids = [[11 * i + j for j in range(length)] for i, (_, length, _) in enumerate(self.rows)]
        pages = [[100 + i for i in range(len(self.rows))], [200 + i for i in range(len(self.rows))]]
        cm.info.set_example_sequence(
            ids,
            input_pos=[past for _, _, past in self.rows],
            batch_info=counts,
            extra_page_per_seq_per_pool=pages if cm.info.num_pools > 1 else pages[:1],
        )


def make_interface(pools: int = 2, pages: bool = True, device: str = "cpu") -> CachedSequenceInterface:
    """An interface with every mirror active, or every one but those of the page tables."""
    cm = CachedSequenceInterface(
        max_seq_len=256,
        max_batch_size=3,
        max_num_tokens=24,
        device=device,
        kv_cache_config=KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK),
    )
    if pools > 1:
        cm.info.register_window_groups([256] * pools)
    cm.info.update_cache_information(200)
    for name in active_buffers(pools, pages):
        cm.info.activate_arg(mirror_of(name))
    return cm


def active_buffers(pools: int, pages: bool) -> list[str]:
    """The buffers whose mirrors `make_interface` activates."""
    tables = ("cache_loc", "cu_num_pages", "last_page_len")
    return [n for n in BUFFERS if (pools > 1 or not n.endswith("_g1")) and (pages or not n.startswith(tables))]


def cond(taken: bool, if_true: GraphModule, if_false: GraphModule, operands: Sequence[Any]) -> Any:
    """A two-sided branch that runs eagerly with any operands."""
    return (if_true if taken else if_false)(*operands)


class Reader(nn.Module):
    """A consumer of these arguments, as a compiled one is: its annotation says what it reads."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.meta = {"active_args": self.names}

    def forward(self, **arguments: torch.Tensor) -> None:
        assert set(arguments) == set(self.names)


@dataclass
class _Writer:
    """Writes one orchestrator graph in plain FX."""

    consumers: Mapping[str, Reader]
    rows: int
    graph: Graph = field(default_factory=Graph)
    root: nn.Module = field(default_factory=nn.Module)
    bodies: int = 0

    def __post_init__(self) -> None:
        self.csi = self.graph.placeholder("csi")
        self.given = self.graph.placeholder("offset")
        self.info = self.graph.call_function(getattr, (self.csi, "info"))
        self.offset: Node = self.given

    def write(self, steps: Sequence[Step]) -> GraphModule:
        for kind, *rest in steps:
            getattr(self, f"_{kind}")(*rest)
        self.graph.output(None)
        return GraphModule(self.root, self.graph)

    def _switch(self, override: Iterable[str] | None = None) -> None:
        self.graph.call_method(SWITCH, (self.info,), _narrowed(override))

    def _offset(self, override: Iterable[str] | None = None) -> None:
        self.graph.call_method(OFFSET, (self.info, self.offset), _narrowed(override))

    def _fresh(self) -> None:
        self.offset = self.graph.call_function(operator.add, (self.given, 0))

    def _full(self, value: int) -> None:
        kwargs = {"dtype": torch.int32}
        like = self.graph.call_function(getattr, (self.given, "device"))
        self.offset = self.graph.call_function(torch.full, ((self.rows,), value), {**kwargs, "device": like})

    def _fill(self, value: int) -> None:
        self.graph.call_method("fill_", (self.offset, value))

    def _part(self, value: int) -> None:
        view = self.graph.call_function(operator.getitem, (self.offset, slice(0, 1)))
        self.graph.call_method("fill_", (view, value))

    def _changed(self, buffer: str) -> Node:
        old = self.graph.call_method("get_arg", (self.info, buffer, True, False))
        if buffer.startswith("use_"):
            return self.graph.call_method("logical_not", (old,))
        if buffer.startswith("last_page_len"):
            return self.graph.call_function(operator.add, (self.graph.call_method("remainder", (old, 4)), 1))
        return self.graph.call_function(operator.add, (old, 1))

    def _copy(self, buffer: str) -> None:
        self.graph.call_method("copy_", (self.info, buffer, self._changed(buffer)), {"strict": False})

    def _inplace(self, buffer: str) -> None:
        new = self._changed(buffer)
        old = self.graph.call_method("get_arg", (self.info, buffer, True, False))
        self.graph.call_method("copy_", (self.graph.call_function(operator.getitem, (old, slice(0, None))), new))

    def _consume(self, name: str) -> None:
        module = self.consumers[name]
        self.root.add_module(name, module)
        named = self.graph.call_function(getattr, (self.csi, "named_args"))
        arguments = {n: self.graph.call_function(operator.getitem, (named, n)) for n in module.names}
        self.graph.call_module(name, (), arguments)

    def _body(self, steps: Sequence[Step]) -> str:
        name = f"body_{self.bodies}"
        self.bodies += 1
        self.root.add_module(name, _Writer(self.consumers, self.rows).write(steps))
        return name

    def _nested(self, steps: Sequence[Step]) -> None:
        self.graph.call_module(self._body(steps), (self.csi, self.offset))

    def _branch(self, side: bool, *alternatives: Sequence[Step]) -> None:
        bodies = [self.graph.get_attr(self._body(steps)) for steps in alternatives]
        self.graph.call_function(cond, (side, *bodies, (self.csi, self.offset)))


def _narrowed(override: Iterable[str] | None) -> dict[str, Any]:
    return {} if override is None else {"active_args_override": set(override)}


def write(steps: Sequence[Step], consumers: Mapping[str, Reader], rows: int) -> GraphModule:
    """The FX graph `(csi, offset) -> None` of a program for a batch of that many rows."""
    return _Writer(consumers, rows).write(steps)


# -- running -------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What one consumer found: of each mirror it reads, the mirror's and the device's values in use."""

    consumer: str
    mirrors: dict[str, list[Any]]
    device: dict[str, list[Any]]


@dataclass
class Run:
    """One run of a program.

    Attributes:
        seen: what each consumer found, in order.
        moved: transfers of mirrors.
        operands: transfers of operands.
        sizes: for each transfer of mirrors, the bytes that its mirrors had in use when it started.
    """

    seen: list[Seen] = field(default_factory=list)
    moved: list[Transfer] = field(default_factory=list)
    operands: list[Transfer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def names(self) -> Counter[str]:
        return Counter(name for transfer in self.moved for name in transfer.names)


def run(gm: Callable[..., Any], consumers: Mapping[str, Reader], cm: CachedSequenceInterface, batch: Batch) -> Run:
    """Run a program on a batch that the interface holds, and watch its consumers and transfers."""
    result = Run()
    buffer = cm.info._input_buffer

    def in_use(name: str) -> torch.Tensor:
        return buffer.get_view(buffer_of(name), truncate=True)

    def watch(consumer: str, names: Sequence[str]) -> Callable[..., None]:
        def note(*_: Any) -> None:
            device = {n: in_use(n).tolist() for n in names}
            mirrors = {n: buffer.get_host_memory(buffer_of(n), truncate=True).tolist() for n in names}
            result.seen.append(Seen(consumer, mirrors, device))

        return note

    def observe(transfer: Transfer) -> None:
        if transfer.names[0] in MUTATIONS:
            result.operands.append(transfer)
            return
        result.moved.append(transfer)
        result.sizes.append(sum(in_use(n).numel() * in_use(n).element_size() for n in transfer.names))

    handles = [module.register_forward_pre_hook(watch(name, module.names)) for name, module in consumers.items()]
    buffer.transfer_observers.append(observe)
    try:
        gm(cm, torch.tensor(batch.offset, dtype=torch.int32, device=cm.info.device))
    finally:
        buffer.transfer_observers.remove(observe)
        for handle in handles:
            handle.remove()
    return result


# -- random programs -----------------------------------------------------------------------------------------------

#: how often each kind of step comes: programs are about mutations and consumers.
_WEIGHTS = {
    "offset": 5,
    "switch": 2,
    "consume": 7,
    "fresh": 1,
    "full": 1,
    "fill": 1,
    "part": 1,
    "copy": 1,
    "inplace": 1,
}


def random_steps(rng: Random, size: int, writable: Sequence[str], depth: int = 0, branches: bool = True) -> list[Step]:
    """That many random steps, some of them nested graphs or, if wanted, branches, up to that depth."""
    steps: list[Step] = []
    for _ in range(size):
        (kind,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        if depth and rng.random() < 0.1:
            parts = [random_steps(rng, rng.randint(0, 4), writable, depth - 1, branches) for _ in range(2)]
            is_branch = branches and rng.random() < 0.6
            steps.append(("branch", rng.random() < 0.5, *parts) if is_branch else ("nested", parts[0]))
        elif kind == "consume":
            steps.append((kind, rng.choice("ab")))
        elif kind in ("full", "fill", "part"):
            steps.append((kind, rng.randint(-1, TOKENS_PER_BLOCK)))
        elif kind in ("copy", "inplace"):
            steps.append((kind, rng.choice(writable)))
        elif kind in ("offset", "switch") and branches and rng.random() < 0.1:
            steps.append((kind, {"cu_seqlen_host", "input_pos_host"}))
        else:
            steps.append((kind,))
    return steps


def random_size(rng: Random) -> int:
    """2 to 40, mostly small."""
    return rng.randint(2, 12) if rng.random() < 0.8 else rng.randint(13, 40)


def random_batch(rng: Random) -> Batch:
    """Prefill, extend and decode rows with enough cached tokens for any run of steps back."""
    kinds = sorted(rng.choices(_KINDS, k=rng.randint(1, 3)), key=_KINDS.index)
    lengths = {"extend": rng.randint(2, 4), "decode": 1}
    rows = tuple((kind, lengths.get(kind) or rng.randint(1, 5), rng.randint(41, 48)) for kind in kinds)
    return Batch(rows, tuple(rng.randint(-1, TOKENS_PER_BLOCK) for _ in kinds))


def random_reads(rng: Random, active: Sequence[str]) -> dict[str, Reader]:
    """Two consumers of some of the active mirrors."""
    return {name: Reader(sorted(map(mirror_of, rng.sample(active, rng.randint(1, 5))))) for name in "ab"}


# -- brute force ---------------------------------------------------------------------------------------------------


def flat(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps that really happen, in order."""
    for step in steps:
        if step[0] == "nested":
            yield from flat(step[1])
        elif step[0] == "branch":
            yield from flat(step[2] if step[1] else step[3])
        else:
            yield step


@dataclass
class Needed:
    """The fewest mirrors that have to travel.

    Attributes:
        names: how often each does.
        transfers: how many consumers need any.
        offsets: how many offsets happen.
    """

    names: Counter[str] = field(default_factory=Counter)
    transfers: int = 0


def fewest(
    steps: Iterable[Step], consumers: Mapping[str, Reader], cm: CachedSequenceInterface, batch: Batch, repeat: bool
) -> Needed:
    """Follow a program step by step: what must travel to its consumers, with or without the host's own arithmetic.

    It knows nothing of graphs or liveness. A stale mirror travels when it is read, unless (`repeat`) its value follows
    from mirrors whose values can be had in the same way.
    """
    known = set(cm.info._input_buffer.tensor_names)
    needed, generating = Needed(), batch.generating
    stale: set[str] = set()
    lost: set[str] = set()
    for kind, *rest in flat(steps):
        if kind == "consume":
            found = {n for n in map(buffer_of, consumers[rest[0]].names) if n in stale}
            travel = found & lost if repeat else found
            needed.names.update(map(mirror_of, travel))
            needed.transfers += bool(travel)
            stale -= found
            lost -= found
        elif kind in ("copy", "inplace"):
            stale.add(rest[0])
            lost.add(rest[0])
        elif kind == "offset" or (kind == "switch" and not generating):
            generating = generating or kind == "switch"
            spec = MUTATIONS[SWITCH if kind == "switch" else OFFSET]
            written = set(spec.written(cm.info, (None,), {}, known) or ())
            had = {n for n in written if not lost.intersection(spec.replay_inputs(n) or ())}
            stale |= written
            lost = (lost - had) | (written - had)
    return needed

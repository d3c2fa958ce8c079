"""CapturedModule: a consumer that runs as device graphs, one for each kind and size of batch."""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from ...active_args import META_KEY, annotate
from ...analysis.aliasing import module_effects
from ...effects import HOST_SUFFIX
from ...reports.capture import CaptureError
from ..custom_ops.plan_ops import forget_graph, plan_for_graph
from ..graph_runner import GraphRunner
from .layers import owner_for
from .plan_calls import split_plans, update_plan

logger = logging.getLogger("auto_deploy_ext")

_BATCH_INFO = "batch_info_host"
#: how often the addresses of arguments that never move may change before a consumer is left to run eagerly.
_MAX_MOVES = 8
#: what a stand-in shares with the GraphModule that it stands for: submodules, parameters, buffers and hooks.
_SHARED = tuple(name for name in vars(nn.Module()) if name not in ("training", "_is_full_backward_hook"))

_numbers = itertools.count(1)


@dataclass
class CaptureStats:
    """How the calls of a captured module ran.

    Attributes:
        eager: as ordinary calls, warm-ups included.
        captures: graphs that were captured.
        replays: as replays of a graph.
    """

    eager: int = 0
    captures: int = 0
    replays: int = 0


@dataclass
class _Entry:
    """One captured graph.

    Attributes:
        replay: launches it.
        result: what it leaves behind.
        code: the generated code of the module that was captured.
        bound: name, tensor, address and shape of each argument that the graph reads where it lies; the tensor is not
            kept alive, so that an interface that is resized does not need memory twice.
        copied: names of the arguments that are copied into memory of the graph's own.
        inputs: that memory.
        plans: for each plan, what it returned when the graph was captured.
        key: by which planners know the graph.
    """

    replay: Callable[[], object]
    result: Any
    code: Any
    bound: list[tuple[str, weakref.ref[torch.Tensor], int, torch.Size]]
    copied: tuple[str, ...]
    inputs: list[torch.Tensor]
    plans: list[Any]
    key: Hashable
    copy_result: Callable[[Any], Any] = field(init=False)

    def __post_init__(self) -> None:
        """Choose how a result is copied."""
        kind = type(self.result)
        if isinstance(self.result, torch.Tensor):
            self.copy_result = torch.Tensor.clone
        elif kind in (tuple, list) and all(isinstance(item, torch.Tensor) for item in self.result):
            self.copy_result = lambda result: kind([tensor.clone() for tensor in result])
        else:
            self.copy_result = lambda result: tree_map_only(torch.Tensor, torch.clone, result)


class CapturedModule(nn.Module):
    """Stands for a consumer's GraphModule and replays device graphs of it.

    1. The first batch of a kind and size runs eagerly, the second is captured, all later ones are replays. Batches that
       are neither extend-only (rows of `1 + max_draft_len` tokens) nor generate-only, sizes that are not listed, and
       whatever is called while gradients are recorded, run eagerly.
    2. Arguments that the interface owns are read and written where they lie. That they have not moved is checked at
       every call; if they have, all graphs are dropped and captured anew. All others are copied into the graph's own.
    3. What a graph reads on the host (`batch_info_host`) is part of what tells graphs apart; mirrors go to operators
       that plan, which are no part of the graph: they run before it, with the call's own arguments.
    4. Graphs of one module share memory, so a result lasts until the module is called again. It is copied before it
       is handed out, unless whoever calls has been shown to be done with it by then (`runtime.lent_results`).
    5. Submodules, parameters, buffers, hooks and `meta` are the GraphModule's; its other attributes are found here too.
    6. A copy, also a pickled one, starts without graphs.

    Args:
        graph_module: the consumer.
        interface_names: arguments that the interface owns: their addresses are constant.
        batch_sizes: numbers of rows that are captured.
        max_draft_len: drafts in an extend row.
        name: for messages.

    Attributes:
        graph_module: the consumer; not a submodule, so that names of parameters stay what they were.
        copies_results: see rule 4.
        stats: how calls ran.
    """

    graph_module: GraphModule
    _sizes: frozenset[int]
    _entries: dict[Hashable, _Entry]
    _warm: set[Hashable]
    _graph_keys: list[Hashable]
    _runner: GraphRunner | None
    _pool: Any

    def __init__(
        self,
        graph_module: GraphModule,
        interface_names: Collection[str],
        batch_sizes: Iterable[int],
        max_draft_len: int = 0,
        name: str = "",
    ) -> None:
        """Capture nothing yet."""
        super().__init__()
        self.__dict__.update({shared: graph_module.__dict__[shared] for shared in _SHARED})
        self.__dict__["graph_module"] = graph_module
        if META_KEY not in graph_module.meta:
            annotate(graph_module)
        self.training = graph_module.training
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.max_draft_len = max_draft_len
        self.name = name or type(graph_module).__name__
        self.copies_results = True
        self.stats = CaptureStats()
        self._interface_names = frozenset(interface_names)
        self._graph_keys = []
        # Planners know graphs by key: without this their memory would outlive a module that is just dropped.
        weakref.finalize(self, forget_all, self._graph_keys).atexit = False
        self._start_afresh()
        self._moves = 0

    # ---------------------------------------------------------------- what stays visible of the consumer

    def __getattr__(self, name: str) -> Any:
        """Look in submodules, parameters and buffers, then at the GraphModule."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "graph_module" not in self.__dict__:
                raise
            return getattr(self.graph_module, name)

    def _apply(self, fn: Any, recurse: bool = True) -> CapturedModule:
        self.forget_graphs()
        self.graph_module._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> CapturedModule:
        """See `torch.nn.Module.train`."""
        self.graph_module.train(mode)
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Batch sizes and how many graphs there are."""
        return f"{self.name}, batch_sizes={self.batch_sizes}, graphs={len(self._entries)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModule:
        twin = CapturedModule(copy.deepcopy(self.graph_module, memo), *self._options())
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedModule, (self.graph_module, *self._options())

    def _options(self) -> tuple[Any, ...]:
        return tuple(sorted(self._interface_names)), self.batch_sizes, self.max_draft_len, self.name

    # ---------------------------------------------------------------- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the consumer; takes what the GraphModule takes."""
        if args:
            kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        key = self._key(kwargs)
        if key is None:
            self.stats.eager += 1
            return self.graph_module.forward(**kwargs)
        entry = self._entries.get(key)
        if entry is None or not self._is_current(entry, kwargs):
            return self._first_calls(key, kwargs)
        if self._plan_calls:
            self._plan(entry, kwargs)
        inputs = entry.inputs
        if len(inputs) > 1:
            torch._foreach_copy_(inputs, [kwargs[name] for name in entry.copied])
        elif inputs:
            inputs[0].copy_(kwargs[entry.copied[0]])
        entry.replay()
        self.stats.replays += 1
        return self._handed_out(entry, kwargs)

    def _key(self, kwargs: dict[str, Any]) -> Hashable | None:
        """What tells graphs apart: all that one depends on besides the contents of tensors; None: run eagerly."""
        if torch.is_grad_enabled() or len(kwargs) != len(self._names):
            return None
        own = [kwargs[name] for name in self._own_names]
        if self._must_run_eagerly(own):
            return None
        batch_info = kwargs.get(_BATCH_INFO)
        if batch_info is None:
            first = own[0].shape if own else ()
            rows, counts = first[0] if first else 0, None
        else:
            counts = tuple(batch_info.tolist())
            prefill, _, extend, extend_tokens, decode = counts[:5]
            if prefill or (extend and (decode or extend_tokens != extend * (1 + self.max_draft_len))):
                return None
            rows = extend or decode
        if rows not in self._sizes:
            return None
        return counts, torch.is_inference_mode_enabled(), *[(tensor.shape, tensor.dtype) for tensor in own]

    def _must_run_eagerly(self, own: list[Any]) -> bool:
        for tensor in own:
            if type(tensor) is not torch.Tensor:  # a tracer's, which has no memory
                return True
        # A capture that is going on takes the consumer's own work.
        return bool(own) and own[0].is_cuda and torch.cuda.is_current_stream_capturing()

    def _is_current(self, entry: _Entry, kwargs: dict[str, Any]) -> bool:
        """Whether a graph is still one of this module and of these arguments."""
        if entry.code is not self.graph_module._code:
            return False
        for name, tensor, address, shape in entry.bound:
            given = kwargs[name]
            if given is not tensor() and (given.data_ptr() != address or given.shape != shape):
                return False
        return True

    def _plan(self, entry: _Entry, kwargs: dict[str, Any]) -> None:
        with plan_for_graph(entry.key):
            made = [call(kwargs) for call in self._plan_calls]
        for static, new in zip(entry.plans, made, strict=True):
            if static is not new:
                update_plan(static, new)

    def _handed_out(self, entry: _Entry, kwargs: dict[str, Any]) -> Any:
        for name in self._written_own:
            kwargs[name].copy_(entry.inputs[entry.copied.index(name)])
        for name in self._written_metadata:
            # A replay is nothing that torch sees; whoever goes by version counters must notice the write.
            torch.autograd.graph.increment_version(kwargs[name])
        return entry.copy_result(entry.result) if self.copies_results else entry.result

    # ---------------------------------------------------------------- capturing

    def _first_calls(self, key: Hashable, kwargs: dict[str, Any]) -> Any:
        """Warm up, or capture and replay; drop graphs of other addresses or of other code first."""
        stale = self._entries.get(key)
        if stale is not None:
            self._moves += stale.code is self.graph_module._code
            self.forget_graphs()
            if self._moves >= _MAX_MOVES:
                logger.warning(
                    "%s runs eagerly from now on: arguments that the interface owns have moved %d times",
                    self.name,
                    _MAX_MOVES,
                )
                self._sizes = frozenset()
        if key not in self._warm:
            self._warm.add(key)
            self.stats.eager += 1
            return self.graph_module.forward(**kwargs)
        entry = self._capture(key, kwargs)
        self._entries[key] = entry
        return self._handed_out(entry, kwargs)

    def _capture(self, key: Hashable, kwargs: dict[str, Any]) -> _Entry:
        """Capture a graph and let it work on the arguments of this call."""
        runner = self._runner_for(next(iter(kwargs.values())) if not self._own_names else kwargs[self._own_names[0]])
        number = (self.name, next(_numbers))
        with torch.inference_mode(False):
            inputs = {name: torch.empty_like(kwargs[name], requires_grad=False) for name in self._own_names}
            frozen = {n: v.clone() for n, v in kwargs.items() if n.endswith(HOST_SUFFIX)}
        for name, tensor in inputs.items():
            tensor.copy_(kwargs[name])
        self._graph_keys.append(number)
        with plan_for_graph(number):
            plans = [call(kwargs) for call in self._plan_calls]
            given = {**kwargs, **frozen, **inputs}
            given |= {call.name: plan for call, plan in zip(self._plan_calls, plans, strict=True)}
            body = self._body  # the runner, which this module owns, must not keep the module alive
            try:
                result = runner.capture(number, lambda: body(**given), self._pool)
            except Exception as error:
                raise CaptureError(
                    f"{self.name} cannot be captured for {self._describe(kwargs)}: {type(error).__name__}: {error}\n"
                    "compile_backend: torch-simple runs it as it is"
                ) from error
        self.stats.captures += 1
        logger.info("captured %s for %s", self.name, self._describe(kwargs))
        bound = [
            (name, weakref.ref(value), value.data_ptr(), value.shape)
            for name, value in kwargs.items()
            if name in self._interface_names and not name.endswith(HOST_SUFFIX)
        ]
        replay = runner.replayer(number)
        entry = _Entry(
            replay, result, self.graph_module._code, bound, tuple(inputs), list(inputs.values()), plans, number
        )
        if not runner.owner.layer.capture_runs:
            replay()
        return entry

    def _describe(self, kwargs: dict[str, Any]) -> str:
        shapes = ", ".join(f"{name} {list(kwargs[name].shape)}" for name in self._own_names)
        counts = kwargs.get(_BATCH_INFO)
        kind = "" if counts is None else "extend, " if counts[2] else "generate, "
        return f"a batch of {kind}{shapes}"

    def _runner_for(self, tensor: torch.Tensor) -> GraphRunner:
        if self._runner is None:
            self._runner = GraphRunner(owner_for(tensor.device))
            self._pool = self._runner.owner.layer.new_pool()
        return self._runner

    def forget_graphs(self) -> None:
        """Free all graphs; they are captured anew when batches come."""
        if self._runner is not None:
            self._runner.owner.layer.synchronize()
            self._runner.release()
        forget_all(self._graph_keys)
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Read the consumer's graph, and have no graph of it."""
        graph = self.graph_module.graph
        self._names = tuple(str(node.target) for node in graph.find_nodes(op="placeholder"))
        effects = module_effects(self.graph_module)
        assert effects is not None
        known = self._interface_names
        self._own_names = tuple(n for n in self._names if n not in known and not n.endswith(HOST_SUFFIX))
        self._written_own = tuple(sorted(effects.written.intersection(self._own_names)))
        self._written_metadata = tuple(sorted(n for n in effects.written & known if n + HOST_SUFFIX in known))
        self._plan_calls, self._body = split_plans(self.graph_module)
        self._sizes = frozenset(self.batch_sizes)
        self._entries = {}
        self._warm = set()
        self._runner = None
        self._pool = None


def forget_all(keys: list[Hashable]) -> None:
    """Tell planners that device graphs are freed, and empty the list of their keys."""
    while keys:
        forget_graph(keys.pop())

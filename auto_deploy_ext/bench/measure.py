"""How one variant of a pipeline is measured: timed blocks of steps, and untimed passes that count and that look on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..embedded.compile.captured_segments import SegmentedForward
from ..orchestrator import Dispatcher
from ..runtime.mirrors import record_mirrors
from .batches import RING
from .cells import Variant
from .pipelines import BenchPipeline

CONSUMERS = ("target_model", "draft_model")
SEGMENT = "segment"
_WARM_STEPS = 2
_WATCHED_STEPS = 2 * RING


@dataclass(frozen=True)
class Block:
    """Some steps on end.

    Attributes:
        step_us: time per step: between events on the device's stream, by the host's clock where there is no GPU.
        host_us: time per step until the host had issued the last one.
    """

    step_us: float
    host_us: float


@dataclass(frozen=True)
class Traffic:
    """What a step brings to the host, on average over the ring's batches.

    Attributes:
        transfers: copies that are started.
        bytes: what they move.
        waits: how many of them the host waited for.
    """

    transfers: float
    bytes: float
    waits: float


@dataclass(frozen=True)
class RunAhead:
    """How far ahead of the device the host issues consumer calls.

    Attributes:
        share: of the calls that began while the one before was still running.
        by_call: the same for each call of a step, in order: verification first, then the drafts.
    """

    share: float
    by_call: tuple[float, ...]

    @classmethod
    def of(cls, running: Sequence[bool], steps: int) -> RunAhead:
        """Out of what was seen at each call but the very first, over whole steps."""
        per_step = (len(running) + 1) // steps
        places = [[seen for i, seen in enumerate(running, 1) if i % per_step == call] for call in range(per_step)]
        return cls(statistics.fmean(running), tuple(statistics.fmean(place) for place in places if place))


class Steps:
    """Runs whole steps: `nest_sequences` of a prepared batch, then the wrapper's forward; no token is read back.

    Args:
        pipeline: compiled.
        forwards: the wrapper's forward for each variant.
        ring: arguments of `nest_sequences`; step i takes element i modulo their number.
    """

    def __init__(
        self, pipeline: BenchPipeline, forwards: Mapping[Variant, Dispatcher], ring: Sequence[Mapping[str, Any]]
    ) -> None:
        self.pipeline = pipeline
        self.forwards = forwards
        self.ring = ring
        self.on_gpu = pipeline.cm.device.type == "cuda"

    @contextmanager
    def using(self, variant: Variant) -> Iterator[None]:
        """While active, the wrapper's forward is a variant's."""
        wrapper: Any = self.pipeline.wrapper
        before = wrapper.__dict__.get("forward")
        wrapper.forward = self.forwards[variant]
        try:
            yield
        finally:
            if before is None:
                del wrapper.forward
            else:
                wrapper.forward = before

    @torch.no_grad()
    def run(self, count: int) -> Any:
        """Issue steps; gives the last one's output."""
        wrapper, cm, ring = self.pipeline.wrapper, self.pipeline.cm, self.ring
        output = None
        for index in range(count):
            cm.info.nest_sequences(**ring[index % len(ring)])
            output = wrapper(cm)
        return output

    def synchronize(self) -> None:
        """Wait until the device has done all that was issued."""
        if self.on_gpu:
            torch.cuda.synchronize(self.pipeline.cm.device)

    def warm_up(self, variant: Variant) -> float:
        """Run a variant for the first time, with whatever is compiled and captured then; gives seconds per step.

        Raises:
            RuntimeError: the variant's orchestrator does not take the batch, so the original forward would be timed.
        """
        with self.using(variant):
            self.run(1)
            self.pipeline.cm.info.nest_sequences(**self.ring[0])
            if self.forwards[variant].select(self.pipeline.cm) is None:
                raise RuntimeError(f"the orchestrator traced for {variant} does not take the benchmark's batch")
            self.run(RING)
            self.synchronize()
            begin = time.perf_counter()
            self.run(RING)
            self.synchronize()
            return (time.perf_counter() - begin) / RING

    def time_block(self, variant: Variant, count: int) -> Block:
        """Time `count` steps that follow others of the same variant, without waiting in between."""
        with self.using(variant):
            self.run(_WARM_STEPS)
            return self._time_on_gpu(count) if self.on_gpu else self._time_on_cpu(count)

    def _time_on_gpu(self, count: int) -> Block:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter()
        self.run(count)
        issued = time.perf_counter()
        end.record()
        end.synchronize()
        return Block(start.elapsed_time(end) * 1e3 / count, (issued - begin) * 1e6 / count)

    def _time_on_cpu(self, count: int) -> Block:
        begin = time.perf_counter()
        self.run(count)
        microseconds = (time.perf_counter() - begin) * 1e6 / count
        return Block(microseconds, microseconds)

    def traffic(self, variant: Variant) -> Traffic:
        """Count what the steps of one round through the ring bring to the host."""
        with self.using(variant):
            self.run(_WARM_STEPS)
            with record_mirrors(self.pipeline.cm.info) as transfers:
                self.run(RING)
            self.synchronize()
        return Traffic(
            len(transfers) / RING,
            sum(transfer.nbytes for transfer in transfers) / RING,
            sum(transfer.waited for transfer in transfers) / RING,
        )

    def run_ahead(self, variant: Variant) -> RunAhead | None:
        """How often consumer calls, after the first, began while the one before was still running.

        An event follows each consumer call on the stream; the next call begins with asking whether it has happened.
        None where there is no GPU.
        """
        if not self.on_gpu:
            return None
        looker = _RunningLooker()
        with self.using(variant):
            self.run(_WARM_STEPS)
            with self.watching(variant, CONSUMERS, looker):
                self.run(_WATCHED_STEPS)
            self.synchronize()
        return RunAhead.of(looker.running, _WATCHED_STEPS) if looker.running else None

    def watching(self, variant: Variant, names: Sequence[str], looker: Looker) -> AbstractContextManager[None]:
        """While active, a looker is told before and after each call of the submodules of these names.

        Where orchestrators run as segments, a hook would keep them from that: the launch of a graph that contains
        consumers is what counts as a call there, under the name SEGMENT.
        """
        runner = self.forwards[variant].runner
        if isinstance(runner, SegmentedForward):
            return runner.watched(lambda: looker.before(SEGMENT), lambda: looker.after(SEGMENT))
        return around(self.pipeline.wrapper, names, looker)


class Looker(Protocol):
    """Who is told of calls."""

    def before(self, name: str) -> None:
        """A call of that name begins."""

    def after(self, name: str) -> None:
        """It has been issued."""


class _RunningLooker:
    """Asks before each call whether the previous one's event has happened."""

    def __init__(self) -> None:
        self.running: list[bool] = []
        self._event: torch.cuda.Event | None = None

    def before(self, name: str) -> None:
        if self._event is not None:
            self.running.append(not self._event.query())

    def after(self, name: str) -> None:
        self._event = torch.cuda.Event()
        self._event.record()


@contextmanager
def around(wrapper: nn.Module, names: Sequence[str], looker: Looker) -> Iterator[None]:
    """While active, a looker is told before and after each call of the submodules of these names."""
    handles = []
    for name in names:
        module = wrapper.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: looker.before(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: looker.after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

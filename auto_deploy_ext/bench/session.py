"""A measuring session: builds pipelines one after the other, interleaves repetitions, and keeps within its time."""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch

from ..orchestrator import Dispatcher
from .batches import RING, longest_sequence, make_ring
from .cells import LIMIT, Backend, Group, Variant, rotated
from .launches import Launches, count_launches, write_trace
from .measure import Block, RunAhead, Steps, Traffic
from .pipelines import BenchPipeline, Limits, ModelSource
from .policies import make_forwards

logger = logging.getLogger("auto_deploy_ext")

FEWEST_REPETITIONS = 3
SETTLED_REPETITIONS = 5
_LONGEST_BLOCK_STEPS = 64
_RUN_AHEAD_PASSES = 3
_TRACED_STEPS = 4
#: how far apart the quartiles of a normal distribution lie, in standard deviations.
_QUARTILES_OF_NORMAL = 1.349


@dataclass(frozen=True)
class Effort:
    """How long is measured.

    Attributes:
        seconds: for everything; no pipeline or group is begun after that, and repetitions end early before.
        repetitions: of each cell at most, where time allows.
        block_seconds: what a timed block should take.
        precision: a group whose ratios have all this standard error, or less, after `SETTLED_REPETITIONS` or more, is
            not repeated any further: where the host is disturbed, it takes more repetitions than elsewhere.
    """

    seconds: float
    repetitions: int
    block_seconds: float
    precision: float = 0.0


@dataclass(frozen=True)
class Measured:
    """One cell's numbers.

    Attributes:
        group: where it belongs.
        variant: policy and fusion.
        blocks: one per repetition.
        steps: steps of a block.
        ratios: in each repetition, its step over that of the limit with the same fusion: what disturbs the host for
            longer than a repetition cannot favour one of them.
        traffic: what a step brings to the host.
        run_ahead: of several passes of `Steps.run_ahead`, the one in the middle by its share; None without a GPU.
        run_ahead_passes: the share of each.
    """

    group: Group
    variant: Variant
    blocks: tuple[Block, ...]
    steps: int
    ratios: tuple[float, ...]
    traffic: Traffic
    run_ahead: RunAhead | None
    run_ahead_passes: tuple[float, ...] = ()

    @property
    def step_us(self) -> float:
        """The median step."""
        return statistics.median(block.step_us for block in self.blocks)

    @property
    def host_us(self) -> float:
        """The median of the time per step until the host had issued them all."""
        return statistics.median(block.host_us for block in self.blocks)

    @property
    def spread(self) -> float:
        """The distance of the step's quartiles over its median."""
        quartiles = statistics.quantiles([block.step_us for block in self.blocks], n=4)
        return (quartiles[2] - quartiles[0]) / self.step_us

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    @property
    def ratio_quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the ratios."""
        first, _, third = statistics.quantiles(self.ratios, n=4)
        return first, third


@dataclass(frozen=True)
class LeftOut:
    """Something that was not measured, and why."""

    what: str
    why: str


@dataclass
class Findings:
    """What a session has measured so far."""

    cells: list[Measured] = field(default_factory=list)
    scale: list[Measured] = field(default_factory=list)
    launches: list[tuple[Group, Variant, Launches]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


class DeviceLostError(RuntimeError):
    """The GPU's context is unusable, so nothing more can be measured in this process."""


@dataclass
class Session:
    """Measures parts of the benchmark into `findings`.

    Attributes:
        source: of pipelines.
        effort: how long.
        saved: called after each group, so that an aborted session leaves what it has measured.
        progress: told what is being done, and how much of all there is to do has been done.
        clock: seconds that have passed.
        findings: the results.
    """

    source: ModelSource
    effort: Effort
    saved: Callable[[Findings], None] = lambda findings: None
    progress: Callable[[str, float], None] = lambda what, share: None
    clock: Callable[[], float] = time.monotonic
    findings: Findings = field(default_factory=Findings)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._begin = self.clock()

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return self.effort.seconds - (self.clock() - self._begin)

    def measure_cells(self, groups: Sequence[Group], variants: Sequence[Variant], reserve: float = 0.0) -> None:
        """Measure the matrix.

        Args:
            groups: most important first, those of a pipeline together.
            variants: of each group.
            reserve: seconds to leave for what comes afterwards.
        """
        self._measure(groups, variants, self._limits_of(groups), self.findings.cells, reserve)

    def measure_scale(self, groups: Sequence[Group], variants: Sequence[Variant], most_tokens: int) -> None:
        """Measure over batch sizes and sequence lengths.

        Args:
            groups: of one pipeline after the other.
            variants: of each group.
            most_tokens: larger batches, in tokens over all rows, are left out: the caches get room for so many.
        """
        fitting = [group for group in groups if group.batch * group.context <= most_tokens]
        for group in groups:
            if group not in fitting:
                why = f"{group.batch * group.context} cached tokens are more than {most_tokens}"
                self._leave_out(f"scale: {group} context={group.context}", why)
        if fitting:
            self._measure(fitting, variants, self._limits_of(fitting, cached=True), self.findings.scale, 0.0)

    def count_launches(
        self, backends: Iterable[Backend], batch: int, context: int, variants: Sequence[Variant]
    ) -> None:
        """Count launches; it comes last, because a profiler may slow down what runs after it."""
        for backend in backends:
            group = Group(backend, batch, context)
            with self._guarded(f"launches: {group}"):
                self.progress(f"launches {backend}", 1.0)
                pipeline, forwards = self._build(backend, variants, self._limits_of([group]), [batch])
                steps = Steps(pipeline, forwards, make_ring(pipeline.cm, batch, backend.k, context))
                for variant in variants:
                    steps.warm_up(variant)
                    self.findings.launches.append((group, variant, count_launches(steps, variant)))
            self._free()
        self.saved(self.findings)

    def write_traces(self, group: Group, variants: Sequence[Variant], folder: Path) -> None:
        """Write a trace of a few steps of each variant; it comes last, like counting launches."""
        with self._guarded(f"traces: {group}"):
            self.progress(f"traces {group}", 1.0)
            pipeline, forwards = self._build(group.backend, variants, self._limits_of([group]), [group.batch])
            steps = Steps(pipeline, forwards, make_ring(pipeline.cm, group.batch, group.backend.k, group.context))
            for variant in variants:
                steps.warm_up(variant)
                name = f"{group} {variant}".replace(" ", "_").replace("=", "")
                write_trace(steps, variant, folder / f"{name}.json.gz", _TRACED_STEPS)
        self._free()

    # ---------------------------------------------------------------- groups

    def _measure(
        self,
        groups: Sequence[Group],
        variants: Sequence[Variant],
        limits: Limits,
        into: list[Measured],
        reserve: float,
    ) -> None:
        left = len(groups)
        for backend, members in groupby(groups, key=lambda group: group.backend):
            own = list(members)
            if self.remaining - reserve <= 0:
                for group in own:
                    self._leave_out(f"{group} context={group.context}", "the time is over")
            else:
                self.progress(f"building {backend}", 1 - left / len(groups))
                with self._guarded(str(backend)):
                    self._measure_backend(own, variants, limits, into, reserve, left, len(groups))
            left -= len(own)
            self._free()

    def _measure_backend(
        self,
        groups: Sequence[Group],
        variants: Sequence[Variant],
        limits: Limits,
        into: list[Measured],
        reserve: float,
        left: int,
        total: int,
    ) -> None:
        """Measure the groups of one pipeline, `left` of `total` groups being still to be measured."""
        backend = groups[0].backend
        pipeline, forwards = self._build(backend, variants, limits, sorted({group.batch for group in groups}))
        for index, group in enumerate(groups):
            self.progress(str(group), 1 - (left - index) / total)
            with self._guarded(f"{group} context={group.context}"):
                share = (self.remaining - reserve) / (left - index)
                into += self._measure_group(group, pipeline, forwards, share, reserve)
            self.saved(self.findings)

    def _measure_group(
        self,
        group: Group,
        pipeline: BenchPipeline,
        forwards: Mapping[Variant, Dispatcher],
        share: float,
        reserve: float,
    ) -> list[Measured]:
        """Measure all variants of a group within a share: five repetitions, three if all time is over, or none."""
        begin = self.clock()
        remaining = self.remaining - reserve
        what = f"{group} context={group.context}"
        if remaining <= 0:
            self._leave_out(what, "the time is over")
            return []
        steps = Steps(pipeline, forwards, make_ring(pipeline.cm, group.batch, group.backend.k, group.context))
        variants = list(forwards)
        first = {variant: steps.warm_up(variant) for variant in variants}
        traffic = {variant: steps.traffic(variant) for variant in variants}
        passes = [{variant: steps.run_ahead(variant) for variant in variants} for _ in range(_RUN_AHEAD_PASSES)]
        ahead = {v: [known for one in passes if (known := one[v]) is not None] for v in variants}
        step = statistics.median(first.values())
        length = _block_length(self.effort.block_seconds, step)
        shortest = FEWEST_REPETITIONS * (2 + RING) * sum(first.values())
        left = remaining - (self.clock() - begin)
        if shortest > left:
            self._leave_out(what, f"three repetitions take {shortest:.1f} s, {max(left, 0):.1f} s are left")
            return []
        while length > RING and FEWEST_REPETITIONS * (2 + length) * sum(first.values()) > left:
            length -= RING
        blocks: dict[Variant, list[Block]] = {variant: [] for variant in variants}
        with without_collection():
            for repetition in range(self.effort.repetitions):
                fewest = SETTLED_REPETITIONS if self.remaining > reserve else FEWEST_REPETITIONS
                if repetition >= fewest and self.clock() - begin > share:
                    break
                if repetition >= SETTLED_REPETITIONS and self._is_settled(blocks):
                    break
                for variant in rotated(variants, repetition):
                    blocks[variant].append(steps.time_block(variant, length))
        return [_measured(group, v, blocks, length, traffic[v], ahead[v]) for v in variants]

    def _is_settled(self, blocks: Mapping[Variant, Sequence[Block]]) -> bool:
        """Whether all ratios are known well enough."""
        return all(_standard_error(_ratios(variant, blocks)) <= self.effort.precision for variant in blocks)

    # ---------------------------------------------------------------- pipelines

    def _build(
        self, backend: Backend, variants: Sequence[Variant], limits: Limits, batch_sizes: Sequence[int]
    ) -> tuple[BenchPipeline, dict[Variant, Dispatcher]]:
        """A pipeline and its orchestrators, which are traced before its consumers are compiled."""
        pipeline = self.source.build(backend, limits, batch_sizes)
        forwards = make_forwards(pipeline, variants)
        pipeline.compile()
        return pipeline, forwards

    def _limits_of(self, groups: Sequence[Group], cached: bool = False) -> Limits:
        """The config's limits, raised to what the groups need; `cached`: room for the groups' tokens, no more."""
        config = self.source.config
        size = config.kv_cache_config.tokens_per_block
        lengths = {group: longest_sequence(group.context, group.backend.k) for group in groups}
        tokens = max(group.batch * (-(-lengths[group] // size) + 2) * size for group in groups)
        return Limits(
            max(config.max_batch_size, *(group.batch for group in groups)),
            max(config.max_seq_len, *lengths.values()),
            tokens if cached else None,
        )

    def _leave_out(self, what: str, why: str) -> None:
        self.findings.left_out.append(LeftOut(what, why))

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Whatever fails inside is left out, with the reason; the rest is measured all the same."""
        try:
            yield
        except DeviceLostError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._leave_out(what, f"{type(error).__name__}: {reason}")
            logger.warning("%s cannot be measured: %s", what, reason, exc_info=logger.isEnabledFor(logging.INFO))
            if is_device_lost(error):
                self.saved(self.findings)
                raise DeviceLostError(f"{what}: {reason}") from error

    def _free(self) -> None:
        gc.collect()
        if self.source.config.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def is_device_lost(error: BaseException) -> bool:
    """Whether an error says that the device's context is unusable; running out of memory does not."""
    text = str(error)
    return not isinstance(error, torch.OutOfMemoryError) and ("CUDA error" in text or "CUDA_ERROR" in text)


def _measured(
    group: Group,
    variant: Variant,
    blocks: Mapping[Variant, Sequence[Block]],
    length: int,
    traffic: Traffic,
    ahead: Sequence[RunAhead],
) -> Measured:
    ratios, shares = _ratios(variant, blocks), tuple(one.share for one in ahead)
    return Measured(group, variant, tuple(blocks[variant]), length, ratios, traffic, _median_pass(ahead), shares)


def _ratios(variant: Variant, blocks: Mapping[Variant, Sequence[Block]]) -> tuple[float, ...]:
    """In each repetition, a variant's step over that of the limit, which is measured with every group."""
    limit = blocks[Variant(LIMIT, variant.fused)]
    return tuple(own.step_us / least.step_us for own, least in zip(blocks[variant], limit, strict=True))


def _median_pass(passes: Sequence[RunAhead]) -> RunAhead | None:
    """The pass in the middle by its share; None of none."""
    return sorted(passes, key=lambda one: one.share)[len(passes) // 2] if passes else None


def _standard_error(values: Sequence[float]) -> float:
    """Of the median of values that are about normally distributed, outliers apart."""
    quartiles = statistics.quantiles(values, n=4)
    deviation = (quartiles[2] - quartiles[0]) / _QUARTILES_OF_NORMAL
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(values))


def _block_length(seconds: float, step: float) -> int:
    """Steps of a block, in whole rounds through the ring."""
    rounds = round(seconds / max(step, 1e-6) / RING)
    return min(max(rounds, 1) * RING, _LONGEST_BLOCK_STEPS)


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection meanwhile, whose pauses would hit one policy or another."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


__all__ = [
    "FEWEST_REPETITIONS",
    "DeviceLostError",
    "Effort",
    "Findings",
    "LeftOut",
    "Measured",
    "Session",
    "without_collection",
]

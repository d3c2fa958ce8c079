"""What the benchmark measures: groups of cells that are interleaved with one another, most important first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: what the host does about mirrors, and what that stands for.
POLICIES = {
    "none": "no mirror is brought up to date: the limit. What the step computes is not used",
    "auto": "scope_host_mirrors, strategy auto",
    "replay": "scope_host_mirrors, strategy replay",
    "copy": "scope_host_mirrors, strategy copy",
    "scoped": "a call that names a mirror it wrote copies the whole buffer, blocking: AutoDeploy's present practice",
    "full": "every call that wrote an active mirror copies the whole buffer, blocking: as the wrapper is written",
}
LIMIT = "none"

#: in the order of their importance, which is the order in which they are measured.
COMPILE_ORDER = ("torch-cudagraph", "torch-simple")
ATTENTION_ORDER = ("flashinfer", "triton", "torch_paged", "torch")
BATCH_ORDER = (8, 1, 64)


class BenchError(ValueError):
    """Something about the command that the user has to change."""


@dataclass(frozen=True)
class Backend:
    """What a pipeline is built for.

    Attributes:
        attention: attention backend of target and drafter.
        compiled: compile backend.
        k: drafted tokens per step.
    """

    attention: str
    compiled: str
    k: int

    def __str__(self) -> str:
        return f"{self.attention} {self.compiled} K={self.k}"


@dataclass(frozen=True)
class Group:
    """Cells that share a pipeline and its batches, and whose repetitions are interleaved.

    Attributes:
        backend: the pipeline.
        batch: rows of a batch.
        context: cached tokens of a row.
    """

    backend: Backend
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.backend} batch={self.batch}"


@dataclass(frozen=True)
class Variant:
    """One cell of a group.

    Attributes:
        policy: a key of `POLICIES`.
        fused: whether `fuse_metadata_mutations` has been applied.
    """

    policy: str
    fused: bool

    def __str__(self) -> str:
        return f"{self.policy}{'+fused' if self.fused else ''}"


def groups_of(
    attention: Iterable[str], compiled: Iterable[str], ks: Iterable[int], batches: Iterable[int], context: int
) -> list[Group]:
    """The matrix, most important first; the groups of one pipeline stand together.

    CUDA graphs before eager, longer drafts before shorter ones, flashinfer before triton, and batch 8 first.
    """
    backends = [Backend(a, c, k) for a in attention for c in compiled for k in ks]
    backends.sort(key=lambda b: (_rank(b.compiled, COMPILE_ORDER), -b.k, _rank(b.attention, ATTENTION_ORDER)))
    ordered = sorted(set(batches), key=lambda batch: _rank(batch, BATCH_ORDER))
    return [Group(backend, batch, context) for backend in dict.fromkeys(backends) for batch in ordered]


def variants_of(policies: Iterable[str], fusions: Iterable[bool]) -> list[Variant]:
    """All of a group's cells; the limit comes first, whether it was asked for or not, because ratios are to it."""
    wanted = [policy for policy in POLICIES if policy == LIMIT or policy in set(policies)]
    return [Variant(policy, fused) for fused in fusions for policy in wanted]


def rotated(variants: Sequence[Variant], repetition: int) -> list[Variant]:
    """The order of one repetition: forwards and backwards in turn, and after both the next variant begins."""
    start = repetition // 2 % len(variants)
    order = [*variants[start:], *variants[:start]]
    return order if repetition % 2 == 0 else order[::-1]


def _rank(item: object, order: Sequence[object]) -> int:
    return order.index(item) if item in order else len(order)

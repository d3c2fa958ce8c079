"""Laws of all strategies on a real interface: random orchestrators show every consumer what full mirroring shows."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auto_deploy_ext.effects import mirror_of
from auto_deploy_ext.scoping import ScopeOptions, scope_graphs
from tests.strategy_programs import (
    WRITABLE,
    Batch,
    Reader,
    Run,
    Step,
    active_buffers,
    fewest,
    flat,
    make_interface,
    run,
    write,
)

STRATEGIES = ("auto", "copy", "override", "replay")
#: by number of page pools and whether page tables are active.
INTERFACES = {(pools, pages): make_interface(pools, pages) for pools in (1, 2) for pages in (True, False)}


@st.composite
def batches(draw: Any) -> Batch:
    kinds = draw(st.lists(st.sampled_from(("prefill", "extend", "decode")), min_size=1, max_size=3))
    kinds.sort(key=("prefill", "extend", "decode").index)
    extended = draw(st.integers(2, 4))
    lengths = [{"prefill": draw(st.integers(1, 5)), "extend": extended, "decode": 1}[kind] for kind in kinds]
    # Enough cached tokens for any run of steps back.
    rows = tuple((kind, length, draw(st.integers(41, 48))) for kind, length in zip(kinds, lengths, strict=True))
    return Batch(rows, tuple(draw(st.integers(-1, 4)) for _ in kinds))


offsets = st.integers(-1, 4)
operand_steps = st.one_of(
    st.just(("fresh",)), *(st.tuples(st.just(kind), offsets) for kind in ("full", "fill", "part"))
)
write_steps = st.tuples(st.sampled_from(["copy", "inplace"]), st.sampled_from(WRITABLE))
consume_steps = st.tuples(st.just("consume"), st.sampled_from("ab"))
#: weighted: programs are about mutations and consumers.
leaves = st.one_of(
    *[st.just(("offset",))] * 3, *[st.just(("switch",))] * 2, *[consume_steps] * 4, operand_steps, write_steps
)
straight_steps = st.one_of(*[leaves] * 8, st.tuples(st.just("nested"), st.lists(leaves, max_size=4)))
hand_narrowed = st.tuples(
    st.sampled_from(["switch", "offset"]), st.sets(st.sampled_from(["cu_seqlen_host", "input_pos_host"]))
)
inner_steps = st.lists(st.one_of(leaves, st.tuples(st.just("nested"), st.lists(leaves, max_size=2))), max_size=4)
nesting_steps = st.one_of(
    *[leaves] * 6,
    hand_narrowed,
    st.tuples(st.just("branch"), st.booleans(), inner_steps, inner_steps),
    st.tuples(st.just("nested"), inner_steps),
)
shapes = st.sampled_from(sorted(INTERFACES))
some_reads = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True)
laws = settings(deadline=None, suppress_health_check=list(HealthCheck))


def readable(step: Step, shape: tuple[int, bool]) -> bool:
    """Whether an interface has what a step writes."""
    if step[0] in ("copy", "inplace"):
        return buffer_exists(step[1], shape)
    return True


def buffer_exists(name: str, shape: tuple[int, bool]) -> bool:
    return shape[0] > 1 or not name.endswith("_g1")


def supported(steps: list[Step], shape: tuple[int, bool]) -> list[Step]:
    """The program without writes of buffers that an interface does not have."""
    kept: list[Step] = []
    for step in steps:
        if step[0] in ("branch", "nested"):
            step = tuple(supported(part, shape) if isinstance(part, list) else part for part in step)
        if readable(step, shape):
            kept.append(step)
    return kept


def consumers_of(reads: dict[str, list[int]], shape: tuple[int, bool]) -> dict[str, Reader]:
    """Consumers with these placeholders, by position among the active mirrors."""
    active = active_buffers(*shape)
    return {n: Reader(sorted({mirror_of(active[i % len(active)]) for i in chosen})) for n, chosen in reads.items()}


def scoped_run(
    steps: list[Step],
    consumers: dict[str, Reader],
    shape: tuple[int, bool],
    batch: Batch,
    strategy: str,
    moved_at_entry: bool = False,
    known: bool = False,
) -> Run:
    """Rewrite a program by a strategy and run it on a batch."""
    cm = INTERFACES[shape]
    gm = write(steps, consumers, len(batch.rows))
    if known:
        gm.meta["generate_only"] = batch.generating
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    batch.nest(cm)
    if moved_at_entry:
        cm.info.copy_("input_pos", cm.info.get_arg("input_pos", True) + 1)
        cm.info.offset_pos_and_cache_(cm.info.get_arg("seq_len", True) * 0 + 1, active_args_override=set())
    return run(gm, consumers, cm, batch)


def assert_consumers_are_right(result: Run) -> None:
    for seen in result.seen:
        assert seen.mirrors == seen.device, seen.consumer


@settings(laws, max_examples=700)
@given(
    st.lists(nesting_steps, min_size=2, max_size=12),
    st.fixed_dictionaries({"a": some_reads, "b": some_reads}),
    shapes,
    batches(),
    st.sampled_from(STRATEGIES),
    st.booleans(),
)
def test_every_consumer_of_any_program_finds_its_mirrors_as_the_device_has_them(
    steps: Any, reads: Any, shape: Any, batch: Batch, strategy: str, moved_at_entry: bool
) -> None:
    steps = supported(steps, shape)
    consumers = consumers_of(reads, shape)
    result = scoped_run(steps, consumers, shape, batch, strategy, moved_at_entry)
    assert [seen.consumer for seen in result.seen] == [s[1] for s in flat(steps) if s[0] == "consume"]
    assert_consumers_are_right(result)
    if strategy != "override":
        read = {name for consumer in consumers.values() for name in consumer.names}
        if not moved_at_entry and strategy == "copy":
            assert set(result.names) <= read
        assert [t.nbytes for t in result.moved] == result.sizes
        assert [t.nbytes for t in result.operands] == [4 * len(batch.rows)] * len(result.operands)


@settings(laws, max_examples=1150)
@given(
    st.lists(straight_steps, min_size=2, max_size=40),
    st.fixed_dictionaries({"a": some_reads, "b": some_reads}),
    shapes,
    batches(),
    st.sampled_from(["auto", "copy", "replay"]),
)
def test_the_fewest_mirrors_travel(steps: Any, reads: Any, shape: Any, batch: Batch, strategy: str) -> None:
    steps = supported(steps, shape)
    consumers = consumers_of(reads, shape)
    result = scoped_run(steps, consumers, shape, batch, strategy, known=True)
    assert_consumers_are_right(result)
    by_copies = fewest(steps, consumers, INTERFACES[shape], batch, repeat=False)
    by_replay = fewest(steps, consumers, INTERFACES[shape], batch, repeat=True)
    needed = by_copies if strategy == "copy" else by_replay
    assert len(result.moved) == needed.transfers
    if strategy == "auto":
        assert by_replay.names <= result.names <= by_copies.names
    else:
        assert result.names == needed.names
    offsets_made = sum(step[0] == "offset" for step in flat(steps))
    assert len(result.operands) <= (0 if strategy == "copy" else offsets_made)


@settings(laws, max_examples=50)
@given(
    st.lists(nesting_steps, min_size=2, max_size=12),
    st.fixed_dictionaries({"a": some_reads, "b": some_reads}),
    shapes,
    batches(),
    st.sampled_from(STRATEGIES),
)
def test_rewriting_leaves_the_device_as_it_is(steps: Any, reads: Any, shape: Any, batch: Batch, strategy: str) -> None:
    steps = supported(steps, shape)
    consumers = consumers_of(reads, shape)
    scoped = scoped_run(steps, consumers, shape, batch, strategy)
    batch.nest(INTERFACES[shape])
    untouched = run(write(steps, consumers, len(batch.rows)), consumers, INTERFACES[shape], batch)
    assert [seen.device for seen in scoped.seen] == [seen.device for seen in untouched.seen]

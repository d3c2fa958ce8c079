"""Laws of all strategies on a real interface: random orchestrators show every consumer what full mirroring shows."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
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
    random_batch,
    random_reads,
    random_size,
    random_steps,
    run,
    write,
)

STRATEGIES = ("auto", "copy", "override", "replay")
#: by number of page pools and whether page tables are active.
INTERFACES = {(pools, pages): make_interface(pools, pages) for pools in (1, 2) for pages in (True, False)}

laws = settings(deadline=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 2**48)


@dataclass(frozen=True)
class Case:
    """A random orchestrator, the batch that it runs on, and how it is rewritten."""

    shape: tuple[int, bool]
    steps: list[Step]
    consumers: dict[str, Reader]
    batch: Batch
    strategy: str

    @classmethod
    def of(cls, seed: int, branches: bool) -> Case:
        rng = Random(seed)
        shape = rng.choice(sorted(INTERFACES))
        writable = [name for name in WRITABLE if shape[0] > 1 or not name.endswith("_g1")]
        steps = random_steps(rng, random_size(rng), writable, depth=2, branches=branches)
        consumers = random_reads(rng, active_buffers(*shape))
        case = cls(shape, steps, consumers, random_batch(rng), rng.choice(STRATEGIES))
        note(f"{case}, reads {[(name, reader.names) for name, reader in consumers.items()]}")
        return case

    def run(self, moved_at_entry: bool = False, known: bool = False, strategy: str | None = None) -> Run:
        """Rewrite the program and run it."""
        cm = INTERFACES[self.shape]
        gm = write(self.steps, self.consumers, len(self.batch.rows))
        if known:
            gm.meta["generate_only"] = self.batch.generating
        scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy or self.strategy))
        self.batch.nest(cm)
        if moved_at_entry:
            cm.info.copy_("input_pos", cm.info.get_arg("input_pos", True) + 1)
            cm.info.offset_pos_and_cache_(cm.info.get_arg("seq_len", True) * 0 + 1, active_args_override=set())
        return run(gm, self.consumers, cm, self.batch)


def assert_consumers_are_right(result: Run) -> None:
    for seen in result.seen:
        assert seen.mirrors == seen.device, seen.consumer


@settings(laws, max_examples=720)
@given(seeds, st.booleans())
def test_every_consumer_of_any_program_finds_its_mirrors_as_the_device_has_them(seed: int, moved: bool) -> None:
    case = Case.of(seed, branches=True)
    result = case.run(moved_at_entry=moved)
    assert [seen.consumer for seen in result.seen] == [s[1] for s in flat(case.steps) if s[0] == "consume"]
    assert_consumers_are_right(result)
    if case.strategy != "override":
        assert [t.nbytes for t in result.moved] == result.sizes
        assert [t.nbytes for t in result.operands] == [4 * len(case.batch.rows)] * len(result.operands)
    if case.strategy == "copy":
        assert set(result.names) <= {name for consumer in case.consumers.values() for name in consumer.names}


@settings(laws, max_examples=900)
@given(seeds, st.sampled_from(["auto", "copy", "replay"]))
def test_the_fewest_mirrors_travel(seed: int, strategy: str) -> None:
    case = Case.of(seed, branches=False)
    result = case.run(known=True, strategy=strategy)
    assert_consumers_are_right(result)
    by_copies, by_replay = (
        fewest(case.steps, case.consumers, INTERFACES[case.shape], case.batch, r) for r in (False, True)
    )
    needed = by_copies if strategy == "copy" else by_replay
    assert len(result.moved) == needed.transfers
    if strategy == "auto":
        assert by_replay.names <= result.names <= by_copies.names
    else:
        assert result.names == needed.names
    offsets_made = sum(step[0] == "offset" for step in flat(case.steps))
    assert len(result.operands) <= (0 if strategy == "copy" else offsets_made)


@settings(laws, max_examples=50)
@given(seeds)
def test_rewriting_leaves_the_device_as_it_is(seed: int) -> None:
    case = Case.of(seed, branches=True)
    scoped = case.run()
    case.batch.nest(INTERFACES[case.shape])
    gm = write(case.steps, case.consumers, len(case.batch.rows))
    untouched = run(gm, case.consumers, INTERFACES[case.shape], case.batch)
    assert [seen.device for seen in scoped.seen] == [seen.device for seen in untouched.seen]

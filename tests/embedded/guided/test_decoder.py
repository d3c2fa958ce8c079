"""The guided decoder without a model: masks against a plain reference, snapshots, the active flag, and failures."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_deploy_ext.embedded.graph_runner import GraphRunner
from auto_deploy_ext.embedded.guided import (
    GrammarCompiler,
    GrammarSpec,
    GrammarState,
    GuidedDecoder,
    GuidedError,
    GuidedRow,
    Vocabulary,
)
from auto_deploy_ext.hostfuncs import HostFuncError, HostFuncOwner, OrderedLayer, ThreadStreams, hostfunc, use_owner

from .conftest import EOS, VOCAB_SIZE

pytest.importorskip("xgrammar", reason="guided decoding needs extra guided")

COMPILER = GrammarCompiler(Vocabulary.of_bytes(VOCAB_SIZE, EOS))
AB = GrammarSpec.regex("(ab)*c{1,2}")
#: a draft vocabulary of a, b, c, z and the end.
DRAFT_IDS = torch.tensor([97, 98, 99, 122, EOS])
D2T = DRAFT_IDS - torch.arange(5)


def make(layer=None, draft_len: int = 2, d2t: torch.Tensor | None = None) -> GuidedDecoder:
    owner = HostFuncOwner("engine", layer if layer is not None else OrderedLayer())
    return GuidedDecoder(owner, VOCAB_SIZE, 4, draft_len, torch.device("cpu"), d2t)


def scores(*best: str | int, size: int = VOCAB_SIZE) -> torch.Tensor:
    """Logits, one row per entry: its characters (or token) in falling order of preference, then everything else."""
    logits = torch.zeros(len(best), size)
    for row, wanted in enumerate(best):
        for rank, token in enumerate([wanted] if isinstance(wanted, int) else map(ord, wanted)):
            logits[row, token] = 10.0 - rank
    return logits


def forward(
    decoder: GuidedDecoder, target: torch.Tensor, drafts: list[torch.Tensor]
) -> tuple[list[int], list[list[int]]]:
    """What a wrapper does with the decoder: sampled tokens, and for each draft the token of every sequence."""
    sampled = decoder.note_target(decoder.mask_target(target.clone()).argmax(-1).int())
    drafted = []
    for logits in drafts:
        tokens = decoder.mask_draft(logits.clone()).argmax(-1).int()
        if logits.shape[1] != VOCAB_SIZE:
            tokens = tokens + D2T[tokens.long()].int()
        drafted.append(decoder.note_draft(tokens))
    return sampled.tolist(), [tokens.tolist() for tokens in drafted]


def text(tokens: list[int]) -> str:
    return "".join(chr(token) if token < 256 else "$" for token in tokens)


def follow(spec: GrammarSpec, prefix: str) -> GrammarState:
    state = COMPILER.start(spec)
    assert all(state.accept(ord(c)) for c in prefix)
    return state


# ---------------------------------------------------------------- masks


def test_target_masks_follow_the_drafts_as_far_as_the_grammar_does():
    decoder = make()
    state = follow(AB, "")
    decoder.add_batch([GuidedRow(state, (ord("a"), ord("b")))], 2)
    # Without masks: z at every row. Row 0: a or c; after a: b; after ab: a or c.
    sampled, _ = forward(decoder, scores("za", "za", "zc"), [scores("z")] * 2)
    assert text(sampled) == "abc"


def test_rows_behind_a_refused_draft_are_free_and_are_not_accepted():
    decoder = make()
    state = follow(AB, "")
    decoder.add_batch([GuidedRow(state, (ord("a"), ord("x")))], 2)
    sampled, _ = forward(decoder, scores("a", "xb", "z"), [scores("z")] * 2)
    assert text(sampled) == "abz"  # b at the refused draft's place, then anything
    assert state.accept(ord("a")) and state.accept(ord("b"))  # the state stands behind "ab": draft x was not accepted


def test_draft_masks_follow_verification_and_the_drafts_before_and_are_rolled_back():
    decoder = make(draft_len=3)
    state = follow(AB, "")
    decoder.add_batch([GuidedRow(state, (ord("a"), ord("z"), ord("z")))], 3)
    sampled, drafted = forward(decoder, scores("a", "b", "z", "z"), [scores("za"), scores("zab"), scores("zc")])
    assert text(sampled[:2]) == "ab"
    assert text([tokens[0] for tokens in drafted]) == "abc"  # a, then b, then c: each follows the ones before
    assert state.accept(ord("c"))  # and the state stands behind "ab" again


def test_drafts_are_masked_in_the_drafters_own_vocabulary():
    decoder = make(d2t=D2T)
    state = follow(AB, "")
    decoder.add_batch([GuidedRow(state, ())], 2)
    wanted = torch.tensor([[1.0, 2.0, 3.0, 9.0, 4.0]])  # z, then the end, then c, b, a
    _, drafted = forward(decoder, scores("a"), [wanted, wanted])
    assert text([tokens[0] for tokens in drafted]) == "bc"  # after a: b; after ab: c before a


def test_a_draft_that_no_draft_token_may_follow_leaves_the_rest_free():
    decoder = make(draft_len=3, d2t=D2T)
    state = COMPILER.start(GrammarSpec.regex("axb"))  # x is not in the drafter's vocabulary
    decoder.add_batch([GuidedRow(state, ())], 3)
    _, drafted = forward(decoder, scores("a"), [torch.arange(5.0)[None]] * 3)
    assert len(drafted) == 3
    assert state.accept(ord("x"))


def test_a_terminated_text_constrains_nothing_and_stays_terminated():
    decoder = make()
    state = follow(AB, "cc")
    decoder.add_batch([GuidedRow(state, (EOS, ord("q")))], 2)
    sampled, _ = forward(decoder, scores("z", "q", "z"), [scores("z")] * 2)
    assert text(sampled) == "$qz"  # the end is forced; behind it anything goes, for nobody takes it
    assert state.terminated


def test_unconstrained_rows_keep_their_logits_beside_constrained_ones():
    decoder = make()
    rows = [GuidedRow(None, (1, 2)), GuidedRow(follow(AB, "a"), (3, 4)), GuidedRow(None, (5, 6))]
    decoder.add_batch(rows, 2)
    logits = torch.randn(9, VOCAB_SIZE)
    masked = decoder.mask_target(logits.clone())
    assert torch.equal(masked[:3], logits[:3]) and torch.equal(masked[6:], logits[6:])
    assert masked[3].isfinite().nonzero().flatten().tolist() == [ord("b")]


def test_without_drafts_the_sampled_token_is_accepted_at_once():
    decoder = make()
    state = follow(AB, "")
    for expected in "abab":
        decoder.add_batch([GuidedRow(state)], 0)
        sampled, _ = forward(decoder, scores("zba"), [])
        assert text(sampled) == expected


@dataclass
class Reference:
    """The same with plain strings: the text so far decides everything."""

    spec: GrammarSpec
    tokens: list[int]

    def allowed(self, more: list[int]) -> list[int] | None:
        """The tokens that may follow, None when `more` is refused."""
        state = COMPILER.start(self.spec)
        for token in [*self.tokens, *more]:
            if state.terminated:
                return list(range(VOCAB_SIZE))
            if not state.accept(token):
                return None
        bits = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
        state.fill(bits, 0)
        return [t for t in range(VOCAB_SIZE) if (int(bits[0, t // 32]) >> (t % 32)) & 1]

    def best(self, logits: torch.Tensor, more: list[int]) -> int:
        allowed = self.allowed(more)
        if allowed is None:
            return int(logits.argmax())
        return allowed[int(logits[allowed].argmax())]


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_several_steps_sample_what_a_plain_reference_samples(seed, draft_len, num_rows, threaded):
    generator = torch.Generator().manual_seed(seed)
    layer = ThreadStreams() if threaded else OrderedLayer()
    decoder = make(layer, draft_len)
    specs = [AB, GrammarSpec.regex("[a-c]{3,9}"), GrammarSpec.ebnf('root ::= "ab" root | "c"')][:num_rows]
    states = [COMPILER.start(spec) for spec in specs]
    references = [Reference(spec, []) for spec in specs]
    drafts: list[list[int]] = [[] for _ in specs]
    for _ in range(4):
        sizes = [1 + len(row) for row in drafts]
        target = torch.rand(sum(sizes), VOCAB_SIZE, generator=generator)
        target[:, 97:100] += 0.5
        draft_logits = [torch.rand(num_rows, VOCAB_SIZE, generator=generator) for _ in range(draft_len)]
        rows = [GuidedRow(state, tuple(row)) for state, row in zip(states, drafts, strict=True)]
        decoder.add_batch(rows, draft_len)
        sampled, drafted = layer.run(lambda t=target, d=draft_logits: forward(decoder, t, d))
        decoder.owner.synchronize()
        first = 0
        for row, reference in enumerate(references):
            expected = []
            for i in range(sizes[row]):
                if expected != drafts[row][:i]:
                    break
                expected.append(reference.best(target[first + i], drafts[row][:i]))
            assert sampled[first : first + len(expected)] == expected
            first += sizes[row]
            reference.tokens += expected
            if EOS in reference.tokens:
                reference.tokens = reference.tokens[: reference.tokens.index(EOS) + 1]
            own: list[int] = []
            for i in range(draft_len):
                if reference.allowed(own) is None:
                    break
                own.append(reference.best(draft_logits[i][row], own))
                assert drafted[i][row] == own[-1]
            drafts[row] = [tokens[row] for tokens in drafted]
    if threaded:
        layer.close()


# ---------------------------------------------------------------- the active flag and snapshots


def test_an_eager_batch_without_a_constrained_row_enqueues_copies_and_queues_nothing():
    decoder = make()
    decoder.add_batch([GuidedRow(None, (1, 2))], 2)
    logits = torch.randn(3, VOCAB_SIZE)
    sampled, _ = forward(decoder, logits, [torch.randn(1, VOCAB_SIZE)] * 2)
    assert sampled == logits.argmax(-1).tolist()
    assert (decoder.owner.stats.launches, decoder.copies, decoder.queued) == (0, 0, 0)


def test_it_still_waits_for_the_last_replay():
    layer = ThreadStreams()
    decoder = make(layer)
    gate = threading.Event()
    runner = GraphRunner(decoder.owner)
    runner.capture("key", lambda: hostfunc(lambda: gate.wait(10) and None)())
    runner.replay("key")
    threading.Timer(0.05, gate.set).start()
    decoder.add_batch([GuidedRow(None)], 2)
    assert gate.is_set() and decoder.owner.stats.runs == 1 and not decoder.owner.pending
    layer.close()


def test_a_capture_while_inactive_is_refused():
    decoder = make()
    decoder.add_batch([GuidedRow(None, (1, 2))], 2)
    with pytest.raises(GuidedError, match="captured while its batch is not guided"):
        GraphRunner(decoder.owner).capture("key", lambda: decoder.mask_target(torch.zeros(3, VOCAB_SIZE)))


def graph_of(decoder: GuidedDecoder, target: torch.Tensor, drafts: list[torch.Tensor]) -> GraphRunner:
    """A runner with a captured forward under `key`; the batch that is announced for the capture is taken back."""
    runner = GraphRunner(decoder.owner)
    decoder.active, decoder._draft_len = True, len(drafts)

    def static() -> list[torch.Tensor]:
        sampled = decoder.note_target(decoder.mask_target(target.clone()).argmax(-1).int())
        return [sampled, *(decoder.note_draft(decoder.mask_draft(d.clone()).argmax(-1).int()) for d in drafts)]

    runner.capture("key", static)
    decoder.end_batch()
    return runner


def test_a_captured_forward_always_runs_its_guided_work(layer):
    decoder = make(layer)
    target = scores("za", "zb", "zc")
    runner = graph_of(decoder, target, [scores("z")] * 2)
    decoder.add_batch([GuidedRow(None, (1, 2))], 2, captured=True)
    assert decoder.active and decoder.queued == 1
    result = runner.replay("key")
    decoder.owner.synchronize()
    assert decoder.queued == 0 and decoder.owner.stats.runs == 3
    assert text(result[0].tolist()) == "zzz"  # nothing was masked, though the graph contains the masks


def test_guided_unguided_guided_each_use_their_own_snapshot(layer):
    decoder = make(layer)
    runner = graph_of(decoder, scores("za", "zb", "zc"), [scores("z")] * 2)
    drafts = (ord("a"), ord("b"))
    first, third = follow(AB, ""), follow(AB, "ab")
    results = []
    for rows in ([GuidedRow(first, drafts)], [GuidedRow(None, drafts)], [GuidedRow(third, drafts)]):
        decoder.add_batch(rows, 2, captured=True)
        results.append(runner_result(decoder, runner)[0].tolist())
        decoder.end_batch()
    assert [text(tokens) for tokens in results] == ["abc", "zzz", "abc"]
    assert first.accept(ord("c")) and third.accept(ord("c"))


def runner_result(decoder: GuidedDecoder, runner: GraphRunner) -> list[torch.Tensor]:
    result = runner.replay("key")
    decoder.owner.synchronize()
    return result


def test_snapshots_queued_ahead_are_fetched_in_order():
    """A host that runs ahead of its stream: all replays are launched before the first host function has run."""
    layer = ThreadStreams()
    decoder = make(layer)
    runner = graph_of(decoder, scores("za", "zb", "zc"), [scores("z")] * 2)
    gate, seen = threading.Event(), []
    with use_owner(decoder.owner):
        hostfunc(lambda: gate.wait(10) and None)()
    states = [follow(AB, ""), follow(AB, "ab")]
    drafts = (ord("a"), ord("b"))
    for rows in ([GuidedRow(states[0], drafts)], [GuidedRow(None, drafts)], [GuidedRow(states[1], drafts)]):
        decoder.add_batch(rows, 2, captured=True)
        result = runner.replay("key")
        layer._submit(lambda result=result: seen.append(text(result[0].tolist())))
    assert decoder.queued == 3 and seen == []
    gate.set()
    decoder.owner.drain()
    decoder.owner.synchronize()
    assert seen == ["abc", "zzz", "abc"]
    layer.close()


# ---------------------------------------------------------------- failures


class Breaks(GrammarState):
    """A state whose masks cannot be filled."""

    def fill(self, bits: np.ndarray, row: int) -> None:
        raise RuntimeError("broken matcher")


def test_a_row_that_fails_is_reported_with_its_batch_and_does_not_disturb_the_others():
    decoder = make()
    decoder.owner.batch = 41
    broken = Breaks(None, None)  # type: ignore[arg-type]
    broken._matcher = follow(AB, "")._matcher
    good = follow(AB, "")
    decoder.add_batch([GuidedRow(broken), GuidedRow(good)], 2)
    sampled, _ = forward(decoder, scores("za", "za"), [scores("z", "z")] * 2)
    assert text(sampled) == "za"
    with pytest.raises(HostFuncError, match="in batch 41 of engine: RuntimeError: broken matcher"):
        decoder.owner.drain()
    decoder.add_batch([GuidedRow(broken), GuidedRow(good)], 2)  # it is given up, once
    assert text(forward(decoder, scores("zb", "zb"), [scores("z", "z")] * 2)[0]) == "zb"
    decoder.owner.drain()


def test_a_row_that_fails_at_the_last_draft_leaves_the_others_behind_what_was_accepted():
    decoder = make()
    broken, good = follow(AB, ""), follow(AB, "")
    fill = broken.fill

    def fill_once(bits: np.ndarray, row: int) -> None:
        if bits is decoder._draft_mask.host and decoder._tentative[row] == 1:
            raise RuntimeError("broken matcher")
        fill(bits, row)

    broken.fill = fill_once  # type: ignore[method-assign]
    decoder.add_batch([GuidedRow(broken), GuidedRow(good)], 2)
    sampled, drafted = forward(decoder, scores("a", "a"), [scores("b", "b"), scores("a", "a")])
    assert (text(sampled), [text(tokens) for tokens in drafted]) == ("aa", ["bb", "aa"])
    with pytest.raises(HostFuncError, match="broken matcher"):
        decoder.owner.drain()
    assert not good.accept(ord("a")) and good.accept(ord("b"))  # behind "a": the drafts were rolled back
    good.rollback_to(0)
    assert not good.accept(ord("b")) and good.accept(ord("a"))


def test_only_the_rows_in_use_are_filled_and_none_keeps_what_an_earlier_batch_left():
    decoder = make()
    big = [GuidedRow(follow(AB, "a"), (ord("b"), ord("a"))) for _ in range(4)]
    decoder.add_batch(big, 2)
    forward(decoder, torch.zeros(12, VOCAB_SIZE), [torch.zeros(4, VOCAB_SIZE)] * 2)
    masks = decoder._target_mask, decoder._draft_mask
    for mask in masks:
        mask.host[2:] = 7  # nobody's; a fill would overwrite it
    decoder.add_batch([GuidedRow(follow(AB, "ab")), GuidedRow(None)], 2)
    sampled, drafted = forward(decoder, scores("za", "za"), [scores("za", "za")] * 2)
    assert text(sampled) == "az" and text(drafted[0])[1] == "z"
    assert all((mask.host[2:] == 7).all() for mask in masks)
    decoder.add_batch([GuidedRow(None, (1, 2)), GuidedRow(follow(AB, "")), GuidedRow(None, (1, 2))], 2)
    sampled, drafted = forward(decoder, scores(*["za"] * 7), [scores(*["za"] * 3)] * 2)
    assert text(sampled) == "zzzazzz" and text(drafted[0])[::2] == "zz"
    decoder.owner.drain()


def test_a_captured_forward_sees_no_mask_of_a_larger_batch_before_it(layer):
    decoder = make(layer)
    runner = graph_of(decoder, scores("za", "zb", "zc"), [scores("z")] * 2)
    drafts = (ord("a"), ord("b"))
    decoder.add_batch([GuidedRow(follow(AB, "a"), drafts) for _ in range(4)], 2)
    layer.run(lambda: forward(decoder, torch.zeros(12, VOCAB_SIZE), [torch.zeros(4, VOCAB_SIZE)] * 2))
    results = []
    for rows in ([GuidedRow(None, drafts)], [GuidedRow(follow(AB, ""), drafts)], [GuidedRow(None, drafts)]):
        decoder.add_batch(rows, 2, captured=True)
        results.append(text(runner_result(decoder, runner)[0].tolist()))
    assert results == ["zzz", "abc", "zzz"]


def test_a_forward_that_was_not_announced_is_a_failure():
    decoder = make()
    decoder.active = True
    decoder.mask_target(torch.zeros(1, VOCAB_SIZE))
    with pytest.raises(HostFuncError, match="no batch is queued"):
        decoder.owner.drain()


def test_a_batch_that_does_not_fit_the_forward_is_a_failure():
    decoder = make()
    decoder.add_batch([GuidedRow(follow(AB, ""), (1, 2))], 2)
    decoder.mask_target(torch.zeros(2, VOCAB_SIZE))
    with pytest.raises(HostFuncError, match="has 3 rows of logits, the forward 2"):
        decoder.owner.drain()


def test_a_token_that_its_grammar_refuses_is_a_failure_that_names_the_request():
    decoder = make()
    state = follow(AB, "")
    state.name = "7"
    decoder.add_batch([GuidedRow(state)], 0)
    decoder.mask_target(torch.zeros(1, VOCAB_SIZE))
    decoder.note_target(torch.tensor([ord("z")], dtype=torch.int32))  # not what the mask allowed
    with pytest.raises(HostFuncError, match="request 7: its grammar refuses the sampled token 122"):
        decoder.owner.drain()


def test_a_reset_forgets_what_was_queued():
    decoder = make()
    decoder.add_batch([GuidedRow(follow(AB, ""))], 2)
    decoder.reset()
    assert decoder.queued == 0 and not decoder.active

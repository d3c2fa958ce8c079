"""The cached SSM and convolution ops agree with the recurrence, token by token, for every kind of batch row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_deploy_ext.embedded.custom_ops import torch_causal_conv, torch_ssm  # noqa: F401
from auto_deploy_ext.embedded.custom_ops.batch_info import BatchInfo

OPS = torch.ops.auto_deploy_ext
SLOTS, MAX_DRAFT_LEN = 6, 3
ROW = 1 + MAX_DRAFT_LEN


@dataclass
class Rows:
    """A batch: lengths of the prefill rows, number of extend and decode rows, and the slot of each row."""

    prefill: list[int]
    num_extend: int
    num_decode: int
    slots: list[int]
    use_initial_states: list[bool]
    any_prefill_use_initial_states: bool | None = None

    @property
    def lengths(self) -> list[int]:
        return self.prefill + [ROW] * self.num_extend + [1] * self.num_decode

    def metadata(self) -> tuple[torch.Tensor, ...]:
        batch_info = BatchInfo()
        counts = [len(self.prefill), sum(self.prefill), self.num_extend, self.num_extend * ROW]
        batch_info.update([*counts, self.num_decode, self.num_decode])
        cu_seqlen = torch.zeros(SLOTS + 1, dtype=torch.int32)
        cu_seqlen[1 : len(self.lengths) + 1] = torch.tensor(self.lengths, dtype=torch.int32).cumsum(0)
        slot_idx = torch.zeros(SLOTS, dtype=torch.int64)
        slot_idx[: len(self.slots)] = torch.tensor(self.slots)
        use_initial = torch.zeros(SLOTS, dtype=torch.bool)
        use_initial[: len(self.slots)] = torch.tensor(self.use_initial_states)
        return batch_info.serialize(), cu_seqlen, slot_idx, use_initial


class Ssm:
    """The SSM op beside its recurrence, written down in float64, one token at a time."""

    heads, head_dim, groups, d_state = 4, 3, 2, 5
    limits = (0.05, 1.5)
    width = heads * head_dim + 2 * groups * d_state + heads

    def __init__(self, chunk_size: int = 4) -> None:
        generator = torch.Generator().manual_seed(1)
        self.chunk_size = chunk_size
        self.A = -torch.rand(self.heads, generator=generator) * 2 - 0.1
        self.D = torch.randn(self.heads, generator=generator)
        self.dt_bias = torch.randn(self.heads, generator=generator)
        self.cache = torch.randn(SLOTS, self.heads, self.head_dim, self.d_state, generator=generator)
        self.intermediate = torch.full((SLOTS, ROW, self.heads, self.head_dim, self.d_state), torch.nan)

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [self.heads * self.head_dim, self.groups * self.d_state, self.groups * self.d_state, self.heads]
        x, B, C, dt = tokens.split(sizes, dim=-1)
        lead = tokens.shape[:-1]
        return (
            x.reshape(*lead, self.heads, self.head_dim),
            B.reshape(*lead, self.groups, self.d_state),
            C.reshape(*lead, self.groups, self.d_state),
            dt,
        )

    def source(self, tokens: torch.Tensor) -> torch.Tensor:
        x, B, C, dt = self.split(tokens)
        y = OPS.torch_ssm(x, self.A, B, C, self.D, dt, self.dt_bias, *self.limits, self.chunk_size)
        return y.flatten(-2)

    def cached(self, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        x, B, C, dt = self.split(tokens)
        any_initial = rows.any_prefill_use_initial_states
        if any_initial is None:
            any_initial = any(rows.use_initial_states[: len(rows.prefill)])
        y = OPS.torch_cached_ssm(
            *(x, self.A, B, C, self.D, dt, self.dt_bias),
            *rows.metadata(),
            torch.tensor([any_initial]),
            self.cache,
            self.intermediate,
            *self.limits,
            self.chunk_size,
        )
        return y.flatten(-2)

    def reference(self, tokens: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, B, C, dt = (part.double() for part in self.split(tokens))
        state = torch.zeros_like(self.cache[0], dtype=torch.float64) if state is None else state.double()
        ys, states = [], []
        for t in range(tokens.shape[0]):
            step = F.softplus(dt[t] + self.dt_bias).clamp(*self.limits)
            y = torch.empty(self.heads, self.head_dim, dtype=torch.float64)
            state = state.clone()
            for head in range(self.heads):
                group = head // (self.heads // self.groups)
                decay = torch.exp(self.A[head].double() * step[head])
                state[head] = decay * state[head] + step[head] * torch.outer(x[t, head], B[t, group])
                y[head] = state[head] @ C[t, group] + self.D[head] * x[t, head]
            ys.append(y.flatten())
            states.append(state)
        return torch.stack(ys).float(), [s.float() for s in states]


class Conv:
    """The convolution op beside its definition."""

    width, kernel = 7, 4

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.weight = torch.randn(self.width, 1, self.kernel, generator=generator)
        self.bias = torch.randn(self.width, generator=generator)
        self.cache = torch.randn(SLOTS, self.width, self.kernel - 1, generator=generator)
        self.intermediate = torch.full((SLOTS, ROW, self.width, self.kernel - 1), torch.nan)

    def source(self, tokens: torch.Tensor) -> torch.Tensor:
        return OPS.torch_causal_conv1d(tokens, self.weight, self.bias)

    def cached(self, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        return OPS.torch_cached_causal_conv1d(
            tokens, self.weight, self.bias, *rows.metadata(), self.cache, self.intermediate
        )

    def reference(self, tokens: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        past = torch.zeros(self.kernel - 1, self.width) if state is None else state.T
        inputs = torch.cat([past, tokens])
        ys, states = [], []
        for t in range(tokens.shape[0]):
            window = inputs[t : t + self.kernel]
            ys.append((window * self.weight[:, 0].T).sum(0) + self.bias)
            states.append(window[1:].T)
        return torch.stack(ys), states


@pytest.fixture(params=[Ssm, Conv])
def op(request: pytest.FixtureRequest) -> Ssm | Conv:
    return request.param()


def draw(length: int, op: Ssm | Conv, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, op.width, generator=torch.Generator().manual_seed(seed))


def promote(op: Ssm | Conv, slot: int, num_accepted: int) -> None:
    op.cache[slot] = op.intermediate[slot, num_accepted]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 3), (3, 11), (1, 40)])
def test_source_op_follows_the_recurrence_from_zero(op: Ssm | Conv, batch: int, length: int) -> None:
    tokens = draw(batch * length, op).view(batch, length, -1)
    expected = torch.stack([op.reference(sequence, None)[0] for sequence in tokens])
    close(op.source(tokens), expected)


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_scan_does_not_depend_on_the_chunk_size(chunk_size: int) -> None:
    tokens = draw(10, Ssm())[None]
    close(Ssm(chunk_size).source(tokens), Ssm(4).source(tokens))


def test_source_ops_pass_torch_opcheck() -> None:
    ssm, conv = Ssm(), Conv()
    x, B, C, dt = ssm.split(draw(6, ssm).view(2, 3, -1))
    ssm_args = (x.contiguous(), ssm.A, B.contiguous(), C.contiguous(), ssm.D, dt.contiguous(), ssm.dt_bias)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.torch_ssm, (*ssm_args, 0.0, 1.0, 4), test_utils=checks)
    torch.library.opcheck(
        OPS.torch_causal_conv1d, (draw(6, conv).view(2, 3, -1), conv.weight, conv.bias), test_utils=checks
    )


def test_cached_ops_pass_torch_opcheck() -> None:
    ssm, conv = Ssm(), Conv()
    metadata = Rows([3], 1, 1, [4, 0, 2], [True, True, True]).metadata()
    x, B, C, dt = (part.contiguous() for part in ssm.split(draw(8, ssm)[None]))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        OPS.torch_cached_ssm,
        (
            *(x, ssm.A, B, C, ssm.D, dt, ssm.dt_bias),
            *metadata,
            *(torch.tensor([True]), ssm.cache, ssm.intermediate),
            *(0.0, 1.0, 4),
        ),
        test_utils=checks,
    )
    torch.library.opcheck(
        OPS.torch_cached_causal_conv1d,
        (draw(8, conv)[None], conv.weight, conv.bias, *metadata, conv.cache, conv.intermediate),
        test_utils=checks,
    )


def test_prefill_starts_from_zero_and_stores_the_last_state(op: Ssm | Conv) -> None:
    lengths, slots = [5, 1, 9, 2], [3, 0, 5, 1]
    tokens = draw(sum(lengths), op)
    untouched = op.cache[[2, 4]].clone()
    y = op.cached(tokens[None], Rows(lengths, 0, 0, slots, [False] * 4))[0]
    for sequence, output, slot in zip(tokens.split(lengths), y.split(lengths), slots, strict=True):
        expected, states = op.reference(sequence, None)
        close(output, expected)
        close(op.cache[slot], states[-1])
    assert torch.equal(op.cache[[2, 4]], untouched)


def test_prefill_in_pieces_equals_prefill_at_once(op: Ssm | Conv) -> None:
    tokens = draw(13, op)
    expected, states = op.reference(tokens, None)
    pieces = [6, 2, 5]
    outputs = [
        op.cached(piece[None], Rows([len(piece)], 0, 0, [2], [index > 0]))[0]
        for index, piece in enumerate(tokens.split(pieces))
    ]
    close(torch.cat(outputs), expected)
    close(op.cache[2], states[-1])


def test_prefill_with_and_without_history_in_one_batch(op: Ssm | Conv) -> None:
    tokens, history = draw(9, op), op.cache[4].clone()
    y = op.cached(tokens[None], Rows([5, 4], 0, 0, [1, 4], [False, True]))[0]
    close(y[:5], op.reference(tokens[:5], None)[0])
    close(y[5:], op.reference(tokens[5:], history)[0])


def test_a_stale_host_flag_makes_ssm_prefill_forget_its_history() -> None:
    tokens = draw(4, Ssm())
    right, stale = Ssm(), Ssm()
    y_right = right.cached(tokens[None], Rows([4], 0, 0, [4], [True]))
    y_stale = stale.cached(tokens[None], Rows([4], 0, 0, [4], [True], any_prefill_use_initial_states=False))
    close(y_right[0], right.reference(tokens, Ssm().cache[4])[0])
    close(y_stale[0], stale.reference(tokens, None)[0])
    assert (y_right - y_stale).abs().max() > 0.1


@pytest.mark.parametrize("num_accepted", range(ROW))
def test_extend_then_promotion_continues_from_the_accepted_token(op: Ssm | Conv, num_accepted: int) -> None:
    tokens, slots = draw(2 * ROW, op), [5, 2]
    before = op.cache[slots].clone()
    y = op.cached(tokens.view(2, ROW, -1), Rows([], 2, 0, slots, [True, True]))
    assert torch.equal(op.cache[slots], before), "verification must not touch the accepted state"
    following = draw(1, op, seed=9)
    for i, slot in enumerate(slots):
        expected, states = op.reference(tokens.view(2, ROW, -1)[i], before[i])
        close(y[i], expected)
        promote(op, slot, num_accepted)
        close(op.cache[slot], states[num_accepted])
        accepted = torch.cat([tokens.view(2, ROW, -1)[i, : num_accepted + 1], following])
        next_y = op.cached(following[None], Rows([], 0, 1, [slot], [True]))
        close(next_y[0, 0], op.reference(accepted, before[i])[0][-1])


def test_decode_updates_in_place(op: Ssm | Conv) -> None:
    slots = [1, 4, 0]
    before = op.cache.clone()
    steps = draw(3 * 4, op).view(4, 3, 1, -1)
    outputs = torch.stack([op.cached(step, Rows([], 0, 3, slots, [True] * 3)) for step in steps])
    for i, slot in enumerate(slots):
        expected, states = op.reference(steps[:, i, 0], before[slot])
        close(outputs[:, i, 0], expected)
        close(op.cache[slot], states[-1])
    assert torch.equal(op.cache[[2, 3, 5]], before[[2, 3, 5]])


def test_mixed_batch_equals_its_rows_one_by_one(op: Ssm | Conv) -> None:
    rows = Rows([3, 6], 2, 1, [5, 0, 3, 1, 2], [False, True, True, True, True])
    tokens, before = draw(sum(rows.lengths), op), op.cache.clone()
    y = op.cached(tokens[None], rows)[0]
    parts = zip(tokens.split(rows.lengths), y.split(rows.lengths), rows.slots, rows.use_initial_states, strict=True)
    for index, (sequence, output, slot, has_history) in enumerate(parts):
        expected, states = op.reference(sequence, before[slot] if has_history else None)
        close(output, expected)
        if 2 <= index < 4:
            close(op.cache[slot], before[slot])
            close(op.intermediate[slot], torch.stack(states))
        else:
            close(op.cache[slot], states[-1])
    assert torch.equal(op.cache[4], before[4])


PREFILL_PIECES = st.lists(st.integers(1, 9), min_size=1, max_size=3)
GENERATE_STEPS = st.lists(st.one_of(st.just("decode"), st.integers(0, MAX_DRAFT_LEN)), max_size=5)


@pytest.mark.parametrize("kind", [Ssm, Conv])
@settings(max_examples=40, deadline=None)
@given(pieces=PREFILL_PIECES, steps=GENERATE_STEPS, slot=st.integers(0, SLOTS - 1))
def test_however_a_sequence_is_cut_it_gives_what_it_gives_uncut(
    kind: type[Ssm | Conv], pieces: list[int], steps: list[str | int], slot: int
) -> None:
    """A step is a decode or the number of drafts, of three, that an extend row gets accepted."""
    op = kind()
    lengths = [*pieces, *(1 if step == "decode" else 1 + int(step) for step in steps)]
    tokens = draw(sum(lengths), op)
    outputs = []
    for index, (part, length) in enumerate(zip(tokens.split(lengths), lengths, strict=True)):
        step = steps[index - len(pieces)] if index >= len(pieces) else None
        if step is None:
            y = op.cached(part[None], Rows([length], 0, 0, [slot], [index > 0]))[0]
        elif step == "decode":
            y = op.cached(part[None], Rows([], 0, 1, [slot], [True]))[0]
        else:
            rejected = draw(ROW - length, op, seed=100 + index)
            y = op.cached(torch.cat([part, rejected])[None], Rows([], 1, 0, [slot], [True]))[0, :length]
            promote(op, slot, length - 1)
        outputs.append(y)
    close(torch.cat(outputs), op.source(tokens[None])[0])


def test_positions_beyond_the_batch_are_zero_and_change_nothing(op: Ssm | Conv) -> None:
    tokens = draw(9, op)
    y = op.cached(tokens[None], Rows([4], 0, 1, [2, 0], [False, True]))[0]
    assert torch.equal(y[5:], torch.zeros_like(y[5:]))
    close(op.cache[2], op.reference(tokens[:4], None)[1][-1])


def test_extend_rows_longer_than_the_intermediate_cache_are_refused(op: Ssm | Conv) -> None:
    op.intermediate = op.intermediate[:, : ROW - 1]
    with pytest.raises(ValueError, match="set max_draft_len to at least 3"):
        op.cached(draw(ROW, op)[None], Rows([], 1, 0, [0], [True]))

"""Lets the target write the training text: many rows side by side, each with its own start and temperatures.

Rules:

1. A row begins with its start (forced), then the target goes on. All rows are as long as each other, so the step needs
   no mask, and a step of thousands of rows keeps a GPU busy without a captured graph. A round is of one kind of starts;
   what all of them begin with (a system prompt) is computed once.
2. In a chat the target writes the user's turn at `WRITING_TEMPERATURE`, ended by its own end token, by a cap or by the
   end of a sentence, then the answer at the row's temperature, then the next user turn. The template between turns is
   forced, and so are the first words of the next user turn, or every chat would go on in the same way.
3. Plain text at temperature 0 is stirred: each `period` tokens begin with a few sampled ones, or greedy text of a small
   model would run in circles.
4. Noise is drawn only where it may matter, which is known before the round starts: it costs more than the logits. A
   user turn behind an answer at temperature 0 is therefore greedy, too.
5. Everything random comes from the seed and the round's number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .prompts import ANSWER, PLAIN, USER, ChatTemplate, Start, StartMaker
from .target import KeyValueCache, States, TrainingTarget, stable_attention_kernels

TEMPERATURES = ((0.0, 0.8), (0.5, 0.1), (0.8, 0.1))
"""(temperature, share) of rows."""
WRITING_TEMPERATURE = 1.0
MIN_P = 0.03
"""A sampled token has at least this share of the likeliest one's probability."""
CHOICE_ROWS = 2048
"""Rows whose logits are held in float32 at a time."""
USER_TURN = (12, 40)
ONE_SENTENCE = 0.8
"""Share of user turns that end with their first sentence."""
STIR_PERIOD = (56, 112)
STIR_LENGTH = (4, 14)


@dataclass(frozen=True)
class Rows:
    """What is known of a round's rows before sampling; tensors on the target's device, [rows] unless said otherwise.

    Attributes:
        starts: [rows, longest start] int64.
        start_lengths: int64.
        roles: int64, `PLAIN` or `USER`: what the row writes first.
        temperatures: float32.
        periods: int64, see rule 3; `stirs` likewise.
        stirs: int64.
        user_caps: int64, tokens of a user turn at most.
        one_sentence: bool: a user turn ends with its first sentence.
        follow_ups: int64: a number that chooses the next user turn's beginning.
    """

    starts: torch.Tensor
    start_lengths: torch.Tensor
    roles: torch.Tensor
    temperatures: torch.Tensor
    periods: torch.Tensor
    stirs: torch.Tensor
    user_caps: torch.Tensor
    one_sentence: torch.Tensor
    follow_ups: torch.Tensor

    @classmethod
    def of(cls, starts: Sequence[Start], temperatures: Sequence[float], seed: str, device: torch.device) -> Rows:
        """Put starts and temperatures on the device and draw the rest."""
        generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(62))
        longest = max(len(start.tokens) for start in starts)
        padded = [start.tokens + (0,) * (longest - len(start.tokens)) for start in starts]

        def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def between(bounds: tuple[int, int]) -> torch.Tensor:
            return torch.randint(bounds[0], bounds[1] + 1, (len(starts),), generator=generator).to(device)

        return cls(
            starts=integers(padded),
            start_lengths=integers([len(start.tokens) for start in starts]),
            roles=integers([start.role for start in starts]),
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            periods=between(STIR_PERIOD),
            stirs=between(STIR_LENGTH),
            user_caps=between(USER_TURN),
            one_sentence=(torch.rand(len(starts), generator=generator) < ONE_SENTENCE).to(device),
            follow_ups=between((0, 1 << 30)),
        )

    def shared(self) -> int:
        """How many first tokens all rows have in common, at least 1."""
        same = (self.starts == self.starts[0]).all(dim=0).cpu()
        same[0] = True
        return int(same[: int(self.start_lengths.min())].to(torch.int64).cumprod(dim=0).sum())

    def noisy(self, length: int) -> list[torch.Tensor]:
        """For each index of the rows, which of them may need noise there: int64, on the rows' device."""
        fields = (self.start_lengths, self.roles, self.temperatures, self.periods, self.stirs, self.user_caps)
        first, role, temperature, period, stir, cap = (field.cpu()[:, None] for field in fields)
        written = torch.arange(length)[None] - first
        stirring = (role == PLAIN) & (written % period < stir)
        asking = (role == USER) & (written < cap)
        where = (written >= 0) & ((temperature > 0) | stirring | asking)
        rows = where.T.nonzero()[:, 1].to(self.roles.device)
        return list(rows.split(where.sum(dim=0).tolist()))


class _Turns:
    """The state of every row's turns: whose it is, how long, and which template tokens are still to be forced.

    Attributes:
        counted: bool [rows], whether the token that `settle` gave is one that drafts are made for.
    """

    def __init__(self, rows: Rows, chat: ChatTemplate | None, vocab_size: int) -> None:
        device = rows.roles.device
        self.rows = rows
        self.role = rows.roles.clone()
        self.length = torch.zeros_like(self.role)
        self.segment = torch.zeros_like(self.role)
        self.place = torch.full_like(self.role, -1)
        self.finished = torch.zeros_like(rows.one_sentence)
        self.counted = torch.zeros_like(rows.one_sentence)
        pieces: list[tuple[int, ...]] = [()]
        if chat is not None:
            pieces = [chat.after_user[1:], *(chat.after_answer[1:] + words for words in chat.follow_ups)]
        longest = max(1, *map(len, pieces))
        self.user_end = chat.after_user[0] if chat else -1
        self.answer_end = chat.after_answer[0] if chat else -1
        table = [list(piece) + [0] * (longest - len(piece)) for piece in pieces]
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        self.table_lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64, device=device)
        self.next_turn = 1 + rows.follow_ups % max(1, len(pieces) - 1)
        self.ends_sentence = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if chat is not None and chat.sentence_ends:
            self.ends_sentence[list(chat.sentence_ends)] = True

    def temperature(self) -> torch.Tensor:
        """For the next token of every row."""
        rows = self.rows
        stirring = (self.role == PLAIN) & (self.length % rows.periods < rows.stirs)
        writing = stirring | (self.role == USER)
        return torch.where(writing, rows.temperatures.clamp_min(WRITING_TEMPERATURE), rows.temperatures)

    def settle(self, sampled: torch.Tensor, index: int) -> torch.Tensor:
        """What really comes at an index of the rows, given what was sampled; the state moves on."""
        rows = self.rows
        in_start = index < rows.start_lengths
        forced = (self.place >= 0) & ~in_start
        free = ~forced & ~in_start
        self.length = self.length + free
        asking = free & (self.role == USER)
        user_ends = asking & ((sampled == self.user_end) | (self.length >= rows.user_caps) | self.finished)
        self.finished = asking & ~user_ends & rows.one_sentence & self.ends_sentence[sampled]
        answer_ends = free & (self.role == ANSWER) & (sampled == self.answer_end)
        self.counted = free & (self.role != USER)
        token = torch.where(user_ends, self.user_end, sampled)
        token = torch.where(forced, self.table[self.segment, self.place.clamp_min(0)], token)
        if index < rows.starts.shape[1]:
            token = torch.where(in_start, rows.starts[:, index], token)
        place = self.place + forced
        done = forced & (place >= self.table_lengths[self.segment])
        place = torch.where(done, -1, place)
        ends = user_ends | answer_ends
        self.place = torch.where(ends, 0, place)
        self.segment = torch.where(ends, answer_ends * self.next_turn, self.segment)
        self.role = torch.where(done, USER + ANSWER - self.role, self.role)
        self.length = torch.where(done, 0, self.length)
        return token


def choose(
    states: torch.Tensor,
    head: torch.Tensor,
    temperatures: torch.Tensor,
    noisy: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row; at temperature 0 the likeliest one.

    Args:
        states: [rows, hidden] normed last states.
        head: [vocab, hidden].
        temperatures: float32 [rows].
        noisy: int64, rows that are sampled; the others are greedy whatever their temperature.
        generator: On the states' device.

    Returns:
        The tokens and the likeliest ones, int64 [rows] each.
    """
    greedy = torch.cat([F.linear(part, head).argmax(dim=-1) for part in states.split(CHOICE_ROWS)])
    chosen = greedy.clone()
    for rows in noisy.split(CHOICE_ROWS) if len(noisy) else ():
        logits = F.linear(states[rows], head).float()
        temperature = temperatures[rows, None]
        kept = logits >= logits.amax(dim=-1, keepdim=True) + temperature * math.log(MIN_P)
        noise = torch.empty_like(logits).exponential_(generator=generator).clamp_min_(1e-20).log_()
        scores = torch.addcmul(logits, temperature, noise, value=-1.0).masked_fill_(~kept, -torch.inf)
        chosen[rows] = scores.argmax(dim=-1)
    return chosen, greedy


@dataclass(frozen=True)
class Written:
    """What the target wrote.

    Attributes:
        tokens: int64 [rows, length] on the target's device.
        counted: bool [rows, length]: tokens that drafts are made for, so neither a user's nor the template's.
        states: Of all tokens, where asked for.
    """

    tokens: torch.Tensor
    counted: torch.Tensor
    states: States | None


@torch.no_grad()
def write(
    target: TrainingTarget,
    rows: Rows,
    chat: ChatTemplate | None,
    length: int,
    seed: int,
    progress: Callable[[int], None] = lambda tokens: None,
    keep_states: bool = False,
) -> Written:
    """Let the target write the rows to the end.

    Args:
        target: The model.
        rows: Starts and temperatures.
        chat: The template, where rows are chats.
        length: Tokens per row, the start included.
        seed: Of the noise.
        progress: Told the tokens of each step.
        keep_states: Keep what the head is trained on, which needs one more step of the target.
    """
    count, device = rows.starts.shape[0], target.device
    generator = torch.Generator(device).manual_seed(seed)
    turns = _Turns(rows, chat, target.vocab_size)
    noisy = rows.noisy(length)
    text = torch.empty(count, length, dtype=torch.int64, device=device)
    counted = torch.zeros(count, length, dtype=torch.bool, device=device)
    states = States.empty(target, count, length) if keep_states else None
    shared = min(rows.shared(), length)
    text[:, :shared] = rows.starts[:, :shared]
    progress(count * shared)
    with stable_attention_kernels(device):
        cache = KeyValueCache(1, shared, target.dtype, device)
        for index in range(shared - 1):
            captured, last = target.next_states(text[:1, index], cache)
            if states is not None:
                states.put(index, captured, last, F.linear(last, target.head).argmax(dim=-1))
        cache = cache.repeated(count, length)
        for index in range(shared, length + keep_states):
            captured, last = target.next_states(text[:, index - 1], cache)
            at = noisy[index] if index < length else noisy[0][:0]
            sampled, greedy = choose(last, target.head, turns.temperature(), at, generator)
            if states is not None:
                states.put(index - 1, captured, last, greedy)
            if index < length:
                text[:, index] = turns.settle(sampled, index)
                counted[:, index] = turns.counted
                progress(count)
    return Written(text, counted, states)


class Sampler:
    """Writes rounds of rows.

    Args:
        target: The model.
        starts: Where rows begin.
        length: Tokens per row.
        seed: A round depends on it and on the round's number alone.
    """

    def __init__(self, target: TrainingTarget, starts: StartMaker, length: int, seed: int) -> None:
        self.target = target
        self.starts = starts
        self.length = length
        self.seed = seed

    def kind(self, number: int) -> str:
        """A round's kind of starts: after any number of rounds every kind has about its share."""
        counts = dict.fromkeys(self.starts.shares, 0)
        kind = ""
        for done in range(number + 1):
            kind = max(counts, key=lambda name: self.starts.shares[name] * (done + 1) - counts[name])
            counts[kind] += 1
        return kind

    def round(self, number: int, count: int, progress: Callable[[int], None] = lambda tokens: None) -> Written:
        """Write one round of `count` rows, with their states."""
        generator = random.Random(f"{self.seed}:{number}")
        values, shares = zip(*TEMPERATURES, strict=True)
        kind = self.kind(number)
        starts = self.starts.draw(generator, kind, count)
        temperatures = generator.choices(values, shares, k=count)
        rows = Rows.of(starts, temperatures, f"{self.seed}:{number}:rows", self.target.device)
        seed = generator.getrandbits(62)
        return write(self.target, rows, self.starts.chat, self.length, seed, progress, keep_states=True)

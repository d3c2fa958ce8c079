"""Lets the target write the training text: many rows side by side, each with its own start and temperatures.

Rules:

1. A row begins with its start (forced), then the target goes on. All rows are as long as each other, so the step needs
   no mask, and a step of thousands of rows keeps a GPU busy without a captured graph.
2. In a chat the target writes the user's turn at `WRITING_TEMPERATURE`, ended by its own end token or by a cap, then
   the answer at the row's temperature, then the next user turn. The template between turns is forced.
3. Plain text at temperature 0 is stirred: each `period` tokens begin with a few sampled ones, or greedy text of a small
   model would run in circles.
4. Everything random comes from the seed and the round's number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .prompts import ChatTemplate, Start, StartMaker
from .target import KeyValueCache, TrainingTarget, stable_attention_kernels

TEMPERATURES = ((0.0, 0.6), (0.4, 0.1), (0.7, 0.15), (1.0, 0.15))
"""(temperature, share) of rows."""
WRITING_TEMPERATURE = 0.9
MIN_P = 0.03
"""A sampled token has at least this share of the likeliest one's probability."""
CHOICE_ROWS = 2048
"""Rows whose logits are held in float32 at a time."""
USER_TURN = (24, 72)
STIR_PERIOD = (56, 112)
STIR_LENGTH = (4, 14)

PLAIN, USER, ANSWER = 0, 1, 2


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
    """

    starts: torch.Tensor
    start_lengths: torch.Tensor
    roles: torch.Tensor
    temperatures: torch.Tensor
    periods: torch.Tensor
    stirs: torch.Tensor
    user_caps: torch.Tensor

    @classmethod
    def of(cls, starts: Sequence[Start], temperatures: Sequence[float], seed: str, device: torch.device) -> Rows:
        """Put starts and temperatures on the device and draw the rest."""
        generator = random.Random(seed)
        longest = max(len(start.tokens) for start in starts)
        padded = [list(start.tokens) + [0] * (longest - len(start.tokens)) for start in starts]

        def integers(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            starts=torch.tensor(padded, dtype=torch.int64, device=device),
            start_lengths=integers([len(start.tokens) for start in starts]),
            roles=integers([USER if start.is_chat else PLAIN for start in starts]),
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            periods=integers([generator.randint(*STIR_PERIOD) for _ in starts]),
            stirs=integers([generator.randint(*STIR_LENGTH) for _ in starts]),
            user_caps=integers([generator.randint(*USER_TURN) for _ in starts]),
        )


class _Turns:
    """The state of every row's turns: whose it is, how long, and which template tokens are still to be forced."""

    def __init__(self, rows: Rows, chat: ChatTemplate | None) -> None:
        device = rows.roles.device
        self.rows = rows
        self.role = rows.roles.clone()
        self.length = torch.zeros_like(self.role)
        self.segment = torch.zeros_like(self.role)
        self.place = torch.full_like(self.role, -1)
        pieces = [(0, 0), (0, 0)] if chat is None else [chat.after_user, chat.after_answer]
        longest = max(map(len, pieces)) - 1
        table = [list(piece[1:]) + [0] * (longest + 1 - len(piece)) for piece in pieces]
        self.user_end, self.answer_end = (piece[0] if chat else -1 for piece in pieces)
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        self.table_lengths = torch.tensor([len(piece) - 1 for piece in pieces], dtype=torch.int64, device=device)

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
        user_ends = free & (self.role == USER) & ((sampled == self.user_end) | (self.length >= rows.user_caps))
        answer_ends = free & (self.role == ANSWER) & (sampled == self.answer_end)
        token = torch.where(user_ends, self.user_end, sampled)
        token = torch.where(forced, self.table[self.segment, self.place.clamp_min(0)], token)
        if index < rows.starts.shape[1]:
            token = torch.where(in_start, rows.starts[:, index], token)
        place = self.place + forced
        done = forced & (place >= self.table_lengths[self.segment])
        place = torch.where(done, -1, place)
        ends = user_ends | answer_ends
        self.place = torch.where(ends, 0, place)
        self.segment = torch.where(ends, answer_ends.to(torch.int64), self.segment)
        self.role = torch.where(done, USER + ANSWER - self.role, self.role)
        self.length = torch.where(done, 0, self.length)
        return token


def choose(
    states: torch.Tensor, head: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Sample a token per row; at temperature 0 the likeliest one.

    Args:
        states: [rows, hidden] normed last states.
        head: [vocab, hidden].
        temperatures: float32 [rows].
        generator: On the states' device.

    Returns:
        int64 [rows].
    """
    chosen = []
    for first in range(0, states.shape[0], CHOICE_ROWS):
        logits = F.linear(states[first : first + CHOICE_ROWS], head).float()
        temperature = temperatures[first : first + CHOICE_ROWS, None]
        kept = logits >= logits.amax(dim=-1, keepdim=True) + temperature * math.log(MIN_P)
        noise = torch.empty_like(logits).exponential_(generator=generator).clamp_min_(1e-20).log_()
        scores = torch.addcmul(logits, temperature, noise, value=-1.0).masked_fill_(~kept, -torch.inf)
        chosen.append(scores.argmax(dim=-1))
    return torch.cat(chosen)


@torch.no_grad()
def write(
    target: TrainingTarget,
    rows: Rows,
    chat: ChatTemplate | None,
    length: int,
    seed: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> torch.Tensor:
    """Let the target write the rows to the end.

    Args:
        target: The model.
        rows: Starts and temperatures.
        chat: The template, where rows are chats.
        length: Tokens per row, the start included.
        seed: Of the noise.
        progress: Told the tokens of each step.

    Returns:
        int64 [rows, length] on the target's device.
    """
    count = rows.starts.shape[0]
    generator = torch.Generator(target.device).manual_seed(seed)
    cache = KeyValueCache(count, length, target.dtype, target.device)
    turns = _Turns(rows, chat)
    text = torch.empty(count, length, dtype=torch.int64, device=target.device)
    text[:, 0] = rows.starts[:, 0]
    with stable_attention_kernels(target.device):
        for index in range(1, length):
            states = target.next_states(text[:, index - 1], cache)
            sampled = choose(states, target.head, turns.temperature(), generator)
            text[:, index] = turns.settle(sampled, index)
            progress(count)
    return text


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

    def round(self, number: int, count: int, progress: Callable[[int], None] = lambda tokens: None) -> torch.Tensor:
        """Write one round of `count` rows: int32 [count, length] on the CPU."""
        generator = random.Random(f"{self.seed}:{number}")
        values, shares = zip(*TEMPERATURES, strict=True)
        starts = [self.starts.draw(generator) for _ in range(count)]
        temperatures = generator.choices(values, shares, k=count)
        rows = Rows.of(starts, temperatures, f"{self.seed}:{number}:rows", self.target.device)
        seed = generator.getrandbits(62)
        text = write(self.target, rows, self.starts.chat, self.length, seed, progress)
        return text.to(torch.int32).cpu()

"""The training loop: batches in a seeded order, a schedule that ends with the steps or with the time, checkpoints."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .arguments import LEARNING_RATE, LOG_EVERY
from .checkpoint import load_state, save_state
from .corpus import Batch, FeatureStore
from .head import TrainedHead
from .loss import distillation_loss


@dataclass(frozen=True)
class TrainingOptions:
    """How the head is trained.

    Attributes:
        batch_sequences: Sequences of a batch.
        learning_rate: At its peak.
        final_share: The learning rate's share that is left at the end.
        warmup_steps: Steps to the peak.
        weight_decay: Of matrices.
        clip: Largest norm of a gradient.
        step_decay: Weight of a draft step over that of the step before.
        unreached: Weight of a draft behind a wrong one, over that of one that inference reaches.
        uncounted: Weight of a token that no draft is made for (a user's, the template's).
        soft_share: Share of the teacher's distribution in the loss, at the start and at the end.
        steps: Steps in all, or None: as many as the time allows.
        seed: Of the batches' order.
        log_every: Steps between entries of the history; one is when the host waits for the device.
    """

    batch_sequences: int
    learning_rate: float = LEARNING_RATE
    final_share: float = 0.005
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    step_decay: float = 0.85
    unreached: float = 0.15
    uncounted: float = 0.1
    soft_share: tuple[float, float] = (0.7, 0.2)
    steps: int | None = None
    seed: int = 0
    log_every: int = LOG_EVERY


class Trainer:
    """Trains a head on a store of states.

    Args:
        head: What is trained.
        store: What it is trained on.
        options: How.
        state_directory: Where the state is kept.
        fingerprint: Settings that a resumed run must share; they are compared.
    """

    def __init__(
        self,
        head: TrainedHead,
        store: FeatureStore,
        options: TrainingOptions,
        state_directory: Path,
        fingerprint: dict[str, str],
    ) -> None:
        self.head = head
        self.store = store
        self.options = options
        self.state_directory = state_directory
        self.fingerprint = fingerprint
        parameters = list(head.drafter.parameters())
        self.parameters = parameters
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = head.target.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused)
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._order: tuple[int, list[int]] = (-1, [])

    # ---------------------------------------------------------------- state

    def save(self) -> None:
        """Keep everything that the next step depends on."""
        save_state(
            self.state_directory,
            {
                "fingerprint": self.fingerprint,
                "weights": self.head.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scale": self.store.scale,
                "step": self.step,
                "seconds": self.seconds,
                "history": self.history,
                "evaluations": self.evaluations,
            },
        )

    def resume(self) -> bool:
        """Go on from the kept state; whether there was one.

        Raises:
            ValueError: It is that of a run with other settings.
        """
        state = load_state(self.state_directory, self.head.target.device)
        if state is None:
            return False
        kept = state["fingerprint"]
        different = sorted(key for key in self.fingerprint if kept.get(key) != self.fingerprint[key])
        if different:
            raise ValueError(
                f"{self.state_directory} keeps a run with other settings ({', '.join(different)}); use the same "
                "ones to resume, or another --work-dir"
            )
        self.head.drafter.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.history, self.evaluations = state["history"], state["evaluations"]
        return True

    # ---------------------------------------------------------------- one step

    def sequences(self, step: int) -> list[int]:
        """The batch of a step: each epoch is a permutation that follows from the seed and its number."""
        size = min(self.options.batch_sequences, len(self.store))
        per_epoch = len(self.store) // size
        epoch, place = divmod(step, per_epoch)
        if self._order[0] != epoch:
            order = list(range(len(self.store)))
            random.Random(f"{self.options.seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place * size : (place + 1) * size]

    def learning_rate(self, step: int, progress: float) -> float:
        """Linear warm-up over steps, then a half cosine over the progress, 0 to 1."""
        options = self.options
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        share = options.final_share + (1 - options.final_share) * cosine
        return options.learning_rate * share * min(1.0, (step + 1) / options.warmup_steps)

    def losses(self, batch: Batch, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted mean loss of a batch, and counts float32 [draft steps, 2]: drafts reached and accepted."""
        options, head = self.options, self.head
        first, last = options.soft_share
        soft_share = first + (last - first) * min(1.0, progress)
        states = head.states(batch)
        teacher = head.teacher(batch)
        draft_labels = head.vocabulary.index[batch.labels]
        counted = options.uncounted + (1 - options.uncounted) * batch.counted
        reached = torch.ones(states[0].shape[:2], device=states[0].device)
        # A first position's state is like no other's, and no draft starts there unless a prompt is one token.
        reached[:, 0] = 0
        total = torch.zeros((), device=reached.device)
        weight = torch.zeros((), device=reached.device)
        counts = []
        for step, state in enumerate(states):
            labels = head.shifted(draft_labels, step)
            known = (labels >= 0).float()
            weights = known * head.shifted(counted, step)
            weights = weights * (options.unreached + (1 - options.unreached) * reached) * options.step_decay**step
            weights[:, 0] = 0
            weights = weights / weights.numel()
            loss, guesses = distillation_loss(
                state, head.rows, head.shifted(teacher, step), labels, weights, soft_share
            )
            total = total + loss
            weight = weight + weights.sum()
            accepted = reached * (guesses == labels)
            shown = head.shifted(batch.counted, step)
            counts.append(torch.stack([(reached * shown).sum(), (accepted * shown).sum()]))
            reached = accepted
        return total / weight, torch.stack(counts)

    def train_step(self, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; gives `losses`, on the device."""
        rate = self.learning_rate(self.step, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self.store.batch(self.sequences(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        loss, counts = self.losses(batch, progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        for parameter in self.parameters:  # an overflow costs one step and not the run; asking would be a wait
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach(), counts

    # ---------------------------------------------------------------- the loop

    def run(
        self,
        deadline: float | None,
        on_log: Callable[[dict[str, Any]], None],
        on_pause: Callable[[], object],
        pause_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Train until the steps are done or the deadline is near.

        Args:
            deadline: By `clock`; None trains `options.steps` steps.
            on_log: Gets each new entry of the history.
            on_pause: Called about every `pause_seconds`, at an entry of the history: evaluates and saves.
            pause_seconds: See there.
            clock: Seconds.
        """
        options = self.options
        began, before = clock(), self.seconds
        paused = began
        last_log = began
        planned = options.steps
        progress = 0.0
        totals: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        while planned is None or self.step < planned:
            progress = self.step / planned if planned else progress
            loss, count = self.train_step(progress)
            totals.append(loss)
            counts.append(count)
            measuring = planned is None and len(totals) >= 10
            if not (measuring or self.step % options.log_every == 0 or self.step == planned):
                continue
            entry = self._entry(totals, counts, progress)  # waits for the device
            now = clock()
            self.seconds = before + now - began
            per_step = (now - last_log) / len(totals)
            entry |= {
                "seconds": round(self.seconds, 2),
                "tokens_per_second": round(options.batch_sequences * self.store.text.shape[1] / per_step),
                "planned_steps": planned,
            }
            last_log = now
            totals, counts = [], []
            self.history.append(entry)
            on_log(entry)
            if now - paused >= pause_seconds:
                on_pause()
                last_log = paused = clock()
            if deadline is not None:
                left = int((deadline - last_log) / max(per_step, 1e-9))
                planned = self.step + max(0, left)
                if options.steps is not None:
                    planned = min(planned, options.steps)
        self.seconds = before + clock() - began

    def _entry(self, totals: list[torch.Tensor], counts: list[torch.Tensor], progress: float) -> dict[str, Any]:
        loss = float(torch.stack(totals).mean())
        reached, accepted = torch.stack(counts).sum(dim=0).T.tolist()
        return {
            "step": self.step,
            "loss": round(loss, 5),
            "acceptance": [round(a / max(1.0, r), 5) for a, r in zip(accepted, reached, strict=True)],
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "progress": round(progress, 4),
        }


def describe(options: TrainingOptions) -> dict[str, str]:
    """The options that a resumed run must share."""
    return {name: repr(value) for name, value in asdict(options).items() if name not in ("steps", "log_every")}

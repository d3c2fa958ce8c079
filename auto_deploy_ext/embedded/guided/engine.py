"""The engine for guided requests with images: continuous batching, captured decode graphs, and encoders."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ...hostfuncs import HostFuncOwner, OrderedLayer, use_owner
from ...hostfuncs.launch import LaunchLayer
from ..generation import Engine
from ..graph_runner import GraphRunner
from ..models.custom.modeling_guided import GuidedEagleWrapper, VisionEagleWrapper
from ..requests import Request, RequestOutput, RunningSequence
from ..shim.interface import CachedSequenceInterface
from .decoder import GuidedDecoder, GuidedRow
from .encoding import ImageEncoding
from .grammar import GrammarCompiler, GrammarSpec, GrammarState, Vocabulary
from .images import ImageItem

FinishReason = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, eq=False)
class GuidedRequest(Request):
    """A request whose text a grammar constrains, and which may contain images.

    Attributes:
        grammar: what the text must be; None: anything.
        images: each ``[3, height, width]``; the prompt has as many placeholders as they have patches, in their order.
    """

    grammar: GrammarSpec | None = None
    images: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class GuidedOutput:
    """The answer to one request.

    Attributes:
        output: prompt, tokens and accepted drafts.
        text: the text of the tokens.
        finish_reason: `stop`: the text is complete; `length`: cut at `max_new_tokens`, so a constrained text is only a
            beginning of what its grammar describes; `cancelled`; `failed`: its grammar state is lost, because a host
            function that worked on it failed, so what it has is a beginning too.
    """

    output: RequestOutput
    text: str
    finish_reason: FinishReason


@dataclass
class EngineStats:
    """How forwards ran.

    Attributes:
        eager: forwards that ran eagerly.
        captures: graphs captured.
        replays: forwards that were replays.
    """

    eager: int = 0
    captures: int = 0
    replays: int = 0


class GuidedEngine(Engine):
    """Runs guided requests, with and without images, on one pipeline.

    Args:
        model: the pipeline's wrapper.
        cm: its interface.
        vocabulary: what grammars are compiled for; None: no request may have a grammar, and nothing is ever guided.
        layer: where host functions run; CUDA's on a CUDA device, else ordered calls.
        graphs: capture decode batches and replay them.
        encode: whether images are encoded inside the forward or scheduled before it.
        encode_ahead: schedule and encode what the next step needs after a step has been launched and before its tokens
            are read, as overlap schedulers do, rather than between two steps. Host functions of the step are pending
            then: an encoder drains first, and without the transform `drain_hostfuncs` one that holds the GIL hangs.
            Where none are pending, encoders queue behind the step without a wait. Changes no tokens. With
            `encode="forward"` nothing is scheduled, so it changes nothing.
        prefetch: encode images of requests that have no room yet beside a forward, on a side stream.
        images_per_step: images encoded per step at most, by scheduling and prefetch each.
        encoder_cache_tokens: features that are kept.
        image_token_id: the placeholder in prompts; needed for requests with images.
        name: for messages.

    Example:
        >>> engine = GuidedEngine(pipeline.model, pipeline.cm, Vocabulary.of_bytes(258, eos_token_id=256))
        >>> engine.submit(GuidedRequest((1, 2), 64, grammar=GrammarSpec.regex("[ab]+")))
        >>> while engine.has_work:
        ...     engine.step()
    """

    model: GuidedEagleWrapper
    #: it captures what it replays itself, for as many rows as there are.
    fills_up: ClassVar[bool] = False

    def __init__(
        self,
        model: GuidedEagleWrapper,
        cm: CachedSequenceInterface,
        vocabulary: Vocabulary | None = None,
        *,
        layer: LaunchLayer | None = None,
        graphs: bool = True,
        encode: Literal["forward", "schedule"] = "schedule",
        encode_ahead: bool = True,
        prefetch: bool = True,
        images_per_step: int = 2,
        encoder_cache_tokens: int = 4096,
        image_token_id: int | None = None,
        name: str = "engine",
    ) -> None:
        """Take all slots and pages of the interface, and the wrapper's guided stages."""
        super().__init__(model, cm)
        device = cm.info.device
        self.owner = HostFuncOwner(name, layer if layer is not None else _layer_for(device))
        self.runner = GraphRunner(self.owner)
        self.graphs = graphs
        self.encode = encode
        self.encode_ahead = encode_ahead
        self.prefetch = prefetch
        self.images: ImageEncoding | None = None
        if isinstance(model, VisionEagleWrapper) and image_token_id is not None:
            self.images = ImageEncoding(
                model.vision_encoder, self.owner, image_token_id, images_per_step, encoder_cache_tokens
            )
        self.stats = EngineStats()
        self.vocabulary = vocabulary
        logits_size = model.target_model.get_input_embeddings().weight.shape[0]
        self.compiler = GrammarCompiler(vocabulary, logits_size) if vocabulary is not None else None
        self.guided: GuidedDecoder | None = None
        if self.compiler is not None:
            d2t = getattr(model.draft_model, "d2t", None)
            self.guided = GuidedDecoder(
                self.owner, logits_size, cm.info.max_batch_size, self.draft_len, torch.device(device), d2t
            )
        self._max_draft_len = self._step_draft_len = self.draft_len
        self._states: dict[int, GrammarState] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._rows: Sequence[RunningSequence] = ()
        self._mode: Literal["eager", "capture", "replay"] = "eager"
        self._warm: set[tuple[int, int]] = set()

    # ---------------------------------------------------------------- requests

    def submit(self, request: Request) -> int:
        """Queue a request; see `Engine.submit`.

        Raises:
            GrammarError: its grammar has an error.
            RequestTooLargeError: it could never run.
            ValueError: its images do not fit the model or its placeholders, or it has a grammar and the engine none.
        """
        grammar = getattr(request, "grammar", None)
        items = self._items_of(request)
        state = None
        if grammar is not None:
            if self.compiler is None or self.vocabulary is None:
                raise ValueError("a request has a grammar, but the engine was made without a vocabulary")
            state = self.compiler.start(grammar)
            ends = request.eos_token_ids | {self.vocabulary.eos_token_id}
            request = dataclasses.replace(request, eos_token_ids=ends)
        with self._drafting(self._max_draft_len):
            request_id = super().submit(request)
        if state is not None:
            state.name = str(request_id)
            self._states[request_id] = state
        if self.images is not None and items:
            self.images.add(request_id, items)
        return request_id

    def _items_of(self, request: Request) -> tuple[ImageItem, ...]:
        images = getattr(request, "images", ())
        if images and self.images is None:
            raise ValueError(
                "a request has images, but the model has no vision encoder (add_vision_encoder) or the engine no "
                "image_token_id"
            )
        return self.images.items_of(request.prompt, images) if self.images is not None and images else ()

    def cancel(self, request_id: int) -> bool:
        """End a request now; says whether it was still waiting or running. Its answer is what it has so far."""
        for entry in self._waiting:
            if entry[0] == request_id:
                self._waiting.remove(entry)
                self._outputs[request_id] = RequestOutput(entry[1].prompt, (), ())
                self._forget(request_id, "cancelled")
                return True
        for seq in self._running:
            if seq.request_id == request_id:
                self._end(seq, "cancelled")
                return True
        return False

    def outcome(self, request_id: int) -> GuidedOutput | None:
        """The answer to a request, None while it waits or runs."""
        output = self._outputs.get(request_id)
        if output is None:
            return None
        text = self.vocabulary.text(output.tokens) if self.vocabulary is not None else ""
        return GuidedOutput(output, text, self._reasons[request_id])

    def set_draft_len(self, draft_len: int) -> None:
        """Draft as many tokens as the wrapper does, or none: then the target decodes alone.

        Raises:
            ValueError: any other length.
        """
        if draft_len not in (0, self._max_draft_len):
            raise ValueError(f"draft_len is 0 or the wrapper's {self._max_draft_len}, not {draft_len}")
        self._step_draft_len = draft_len
        for seq in self._running:
            if not seq.is_prefill:  # drafts made up from nothing are rejected, which is all that is asked of them
                seq.next_input = (seq.next_input + [0] * draft_len)[: 1 + draft_len]

    @contextlib.contextmanager
    def _drafting(self, draft_len: int) -> Iterator[None]:
        before, self.draft_len = self.draft_len, draft_len
        try:
            yield
        finally:
            self.draft_len = before

    def _finish(self, seq: RunningSequence) -> None:
        stopped = bool(seq.tokens) and seq.tokens[-1] in seq.request.eos_token_ids
        self._end(seq, "stop" if stopped else "length")

    def _end(self, seq: RunningSequence, reason: FinishReason) -> None:
        with self._drafting(self._max_draft_len):
            super()._finish(seq)
        self._forget(seq.request_id, reason)

    def _forget(self, request_id: int, reason: FinishReason) -> None:
        self._reasons[request_id] = reason
        self._states.pop(request_id, None)
        if self.images is not None:
            self.images.forget(request_id)

    # ---------------------------------------------------------------- steps

    def step(self) -> int:
        """See `Engine.step`.

        Raises:
            HostFuncError: host functions failed. The step is taken back: what was queued is forgotten, requests whose
                grammar failed have ended (`failed`), and the next step does for all others what this one was to do.
        """
        self.owner.batch += 1
        with use_owner(self.owner), self._decoder_attached(), self._drafting(self._step_draft_len):
            try:
                return super().step()
            except BaseException:
                if self.guided is not None:
                    with contextlib.suppress(Exception):
                        self.guided.reset()
                    self._take_back_grammars()
                raise

    def _take_back_grammars(self) -> None:
        """After a step that failed: the states stand behind tokens that the engine has not taken, and will not."""
        for seq in list(self._running):
            state = self._states.get(seq.request_id)
            if state is None:
                continue
            if not state.failed:
                try:
                    state.rollback_to(len(seq.tokens))
                except Exception:
                    state.failed = True
            if state.failed:
                self._end(seq, "failed")

    @contextlib.contextmanager
    def _decoder_attached(self) -> Iterator[None]:
        """While active, the wrapper's guided stages are this engine's."""
        self.model.guided.decoder = self.guided
        try:
            yield
        finally:
            self.model.guided.decoder = None
            if self.guided is not None:
                self.guided.end_batch()

    def _admit(self) -> None:
        """Admit requests, in order, up to the first whose images are not encoded yet."""
        with self._drafting(self._max_draft_len):
            if self.encode == "forward" or self.images is None:
                super()._admit()
            else:
                if self.slot_allocator.num_free and not (self.encode_ahead and self._running):
                    self.images.schedule(self._waiting_ids())
                ready: deque[tuple[int, Request]] = deque()
                while self._waiting and self.images.is_encoded(self._waiting[0][0]):
                    ready.append(self._waiting.popleft())
                self._waiting, later = ready, self._waiting
                super()._admit()
                self._waiting.extend(later)

    def _nest(self, rows: Sequence[RunningSequence]) -> None:
        """Set the batch up: metadata, images, the guided snapshot, and how the forward is going to run."""
        self._rows = rows
        self._set_up(rows)
        guided_rows = [
            GuidedRow(self._states.get(seq.request_id), tuple(seq.next_input[1:]) if not seq.is_prefill else ())
            for seq in rows
        ]
        constrained = any(row.state is not None for row in guided_rows)
        key = self._graph_key(rows)
        if key is None or not self.graphs:
            self._mode = "eager"
        elif key in self.runner:
            self._mode = "replay"
        elif key in self._warm and (constrained or self.guided is None):
            self._mode = "capture"
        else:
            self._mode = "eager"
            self._warm.add(key)
        if self.guided is not None:
            self.guided.add_batch(guided_rows, self.draft_len, captured=self._mode != "eager")

    def _set_up(self, rows: Sequence[RunningSequence]) -> None:
        super()._nest(rows)
        if self.images is not None:
            self.images.place(self.cm, rows)

    def _graph_key(self, rows: Sequence[RunningSequence]) -> tuple[int, int] | None:
        """What a graph is captured for: rows and drafts of a batch that only verifies; None for any other batch."""
        if not self.draft_len or any(seq.is_prefill for seq in rows):
            return None
        return len(rows), self.draft_len

    def _forward(self) -> Any:
        """Launch the forward of the batch that is set up; its tensors are there once the stream is synchronised."""
        key = self._graph_key(self._rows)
        if self._mode == "eager":
            self.stats.eager += 1
            return self.owner.layer.run(lambda: self.model(self.cm))
        if self._mode == "capture":
            self.stats.captures += 1
            self.runner.capture(key, lambda: self.model(self.cm))
            # The capture went through the wrapper's changes of host state; set the batch up once more.
            before = self.batches.copy()
            self._set_up(self._rows)
            self.batches = before
        self.stats.replays += 1
        return self.runner.replay(key)

    def _finish_forward(self) -> None:
        """What is done while a forward runs, and waiting for it."""
        if self.images is not None:
            self.images.end_forward()
        if self.images is not None and self._waiting:
            has_room = self.slot_allocator.num_free > 0
            if has_room and self.encode_ahead and self.encode == "schedule":
                self.images.schedule(self._waiting_ids(), ahead=True)
            elif self.prefetch:
                self.images.prefetch(self._waiting_ids())
        self.owner.synchronize()
        if self.images is not None:
            self.images.keep_new_features(self.cm)

    def _waiting_ids(self) -> list[int]:
        return [request_id for request_id, _ in self._waiting]

    def _run_speculative(self) -> tuple[list[list[int]], list[list[int]]]:
        """New tokens of every row, and its next input."""
        output = self._forward()
        self._finish_forward()
        lens = output.new_tokens_lens.tolist()
        new_tokens = [tokens[:length] for tokens, length in zip(output.new_tokens.tolist(), lens, strict=True)]
        return new_tokens, output.next_new_tokens.tolist()

    def _run_greedy(self) -> tuple[list[list[int]], list[list[int]]]:
        """One new token of every row, which is its next input."""
        self.stats.eager += 1
        sampled = self.owner.layer.run(lambda: self.model.sample_target(self.model.forward_target(self.cm)))
        self._finish_forward()
        tokens = [[token] for token in sampled.tolist()]
        return tokens, tokens


def _layer_for(device: torch.device | str) -> LaunchLayer:
    if torch.device(device).type == "cuda":
        from ...hostfuncs.cuda import CudaLayer

        return CudaLayer(device)
    return OrderedLayer()

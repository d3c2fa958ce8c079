"""Wrappers written as one writes them for AutoDeploy, on whichever host is there; their models are small graphs."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

TARGET = ("input_ids", "position_ids", "cu_seqlen_host", "seq_len_with_cache_host", "cu_num_pages_host")
DRAFT = ("input_ids", "input_pos", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host", "cache_loc_host")
OTHER = ("input_ids", "position_ids", "input_pos_host", "cu_num_pages_host")
ALL_ARGS = tuple(dict.fromkeys((*TARGET, *DRAFT, *OTHER, "cache_loc", "cu_num_pages", "last_page_len")))
#: its length differs between sides until it is moved, so no result may depend on all of it.
UNUSED = ("cache_loc_host",)


def model(*names: str) -> fx.GraphModule:
    """A GraphModule of these arguments: [tokens, 1] float64, whose values depend on everything it was given."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in names}
    tokens = graph.call_method("to", (graph.call_method("reshape", (inputs["input_ids"], -1, 1)), torch.float64))
    for weight, name in enumerate(n for n in names if n not in UNUSED):
        # What lies behind the elements in use is unspecified.
        head = graph.call_function(operator.getitem, (graph.call_method("flatten", (inputs[name],)), slice(0, 2)))
        if not name.startswith("cu_"):
            head = graph.call_function(operator.getitem, (head, slice(0, 1)))
        total = graph.call_method("sum", (graph.call_method("to", (head, torch.float64)),))
        tokens = graph.call_function(torch.add, (tokens, total), {"alpha": weight + 2})
    graph.output(tokens)
    return fx.GraphModule(nn.Module(), graph)


@dataclass
class StepOutput:
    """What one step yields."""

    new_tokens: torch.Tensor
    new_tokens_lens: torch.Tensor
    next_draft_tokens: torch.Tensor


class Wrapper(nn.Module):
    """Verification, which all share; a subclass drafts."""

    def __init__(self, max_draft_len: int = 3) -> None:
        super().__init__()
        self.max_draft_len = max_draft_len
        self.target_model = model(*TARGET)

    def args_of(self, csi: Any, module: nn.Module) -> dict[str, torch.Tensor]:
        names = {node.target for node in module.graph.nodes if node.op == "placeholder"}
        return {name: value for name, value in csi.named_args.items() if name in names}

    def run_model(self, csi: Any, module: nn.Module, names: tuple[str, ...]) -> torch.Tensor:
        return module(**{name: value for name, value in csi.named_args.items() if name in names})

    def sample(self, scores: torch.Tensor, rows: int) -> torch.Tensor:
        return (scores.reshape(-1)[:rows] % 997).to(torch.int32)

    def verify(self, csi: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
        info, k = csi.info, self.max_draft_len
        num_prefill, num_extend, num_decode = info.batch_info.get_num_sequences()
        num_prefill_tokens, num_extend_tokens, _ = info.batch_info.get_num_tokens()
        assert num_decode == 0
        if num_extend > 0:
            assert num_extend_tokens // num_extend == 1 + k
        n = num_prefill + num_extend
        scores = self.run_model(csi, self.target_model, TARGET)
        tokens = (scores.reshape(-1) % 997).to(torch.int32)
        if num_prefill > 0:
            new_tokens = torch.zeros(n, 1 + k, dtype=torch.int32, device=tokens.device)
            new_tokens[:num_prefill, 0] = tokens[:num_prefill]
            new_tokens[num_prefill:] = tokens[num_prefill_tokens:].view(num_extend, 1 + k)
        else:
            new_tokens = tokens.view(n, 1 + k)
        if hasattr(csi.kv_cache_manager, "update_mamba_states"):
            raise NotImplementedError
        lens = torch.ones(n, dtype=torch.int32, device=tokens.device)
        lens[num_prefill:] += (new_tokens[num_prefill:, 0] % (k + 1)).to(torch.int32)
        c_offset = lens - k
        c_offset[:num_prefill].fill_(1)
        info.copy_("input_ids", info.flatten(csi.get_arg("input_ids")) + 1)
        return n, new_tokens, c_offset

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, cache_seq_interface: Any = None, **kwargs: Any) -> StepOutput:
        assert cache_seq_interface is not None
        n, new_tokens, c_offset = self.verify(cache_seq_interface)
        lens = c_offset + self.max_draft_len
        drafts = torch.zeros(n, self.max_draft_len, dtype=torch.int32, device=new_tokens.device)
        self.draft(cache_seq_interface, n, c_offset, drafts)
        return StepOutput(new_tokens=new_tokens, new_tokens_lens=lens, next_draft_tokens=drafts)


class Eagle(Wrapper):
    """One drafter, called in a loop, as AutoDeploy's own wrapper does."""

    def __init__(self, max_draft_len: int = 3) -> None:
        super().__init__(max_draft_len)
        self.draft_model = model(*DRAFT)

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        info, k = csi.info, self.max_draft_len
        for draft_idx in range(k):
            tokens = self.sample(self.run_model(csi, self.draft_model, DRAFT), n)
            drafts[:, draft_idx] = tokens
            if draft_idx == 1:
                c_offset.fill_(1)
            if draft_idx < k - 1:
                info.switch_to_generate_()
                info.copy_("input_ids", tokens)
                info.offset_pos_and_cache_(c_offset)


class Mtp(Wrapper):
    """One draft module per step, each with other arguments."""

    def __init__(self, max_draft_len: int = 3) -> None:
        super().__init__(max_draft_len)
        self.mtp = nn.ModuleList([model(*DRAFT), model(*OTHER), model(*TARGET)])

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        for step, (module, names) in enumerate(zip(self.mtp, (DRAFT, OTHER, TARGET), strict=True)):
            tokens = self.sample(self.run_model(csi, module, names), n)
            drafts[:, step] = tokens
            if step + 1 < len(self.mtp):
                csi.info.switch_to_generate_()
                csi.info.copy_("input_ids", tokens)
                csi.info.offset_pos_and_cache_(c_offset if step == 0 else torch.ones_like(c_offset))


class TwoDrafters(Wrapper):
    """Two drafters take turns."""

    def __init__(self, max_draft_len: int = 4) -> None:
        super().__init__(max_draft_len)
        self.odd = model(*OTHER)
        self.even = model(*DRAFT)

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        for step in range(self.max_draft_len):
            module, names = (self.even, DRAFT) if step % 2 == 0 else (self.odd, OTHER)
            tokens = self.sample(self.run_model(csi, module, names), n)
            drafts[:, step] = tokens
            csi.info.switch_to_generate_()
            csi.info.copy_("input_ids", tokens)
            csi.info.offset_pos_and_cache_(c_offset)
            c_offset[:] = 1


class ParallelDrafter(Wrapper):
    """Like DFlash: all drafts in one call, without a mutation."""

    def __init__(self, max_draft_len: int = 3) -> None:
        super().__init__(max_draft_len)
        self.draft_model = model(*OTHER)

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        scores = self.run_model(csi, self.draft_model, OTHER).reshape(-1)
        drafts += (scores[:n, None] % 97).to(torch.int32) + torch.arange(self.max_draft_len, device=scores.device)


class StopsEarly(Eagle):
    """Leaves the draft loop on a host integer, which only the batch tells."""

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        info = csi.info
        budget = 4 // info.batch_info.get_total_num_sequences()
        for draft_idx in range(self.max_draft_len):
            tokens = self.sample(self.run_model(csi, self.draft_model, DRAFT), n)
            drafts[:, draft_idx] = tokens
            if draft_idx + 1 >= budget:
                break
            info.switch_to_generate_()
            info.copy_("input_ids", tokens)
            info.offset_pos_and_cache_(c_offset)


class StopsOnMirror(Eagle):
    """Leaves the draft loop on a host integer that it reads from a mirror: no graph can stand for that."""

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        info = csi.info
        for draft_idx in range(self.max_draft_len):
            tokens = self.sample(self.run_model(csi, self.draft_model, DRAFT), n)
            drafts[:, draft_idx] = tokens
            info.switch_to_generate_()
            info.copy_("input_ids", tokens)
            info.offset_pos_and_cache_(c_offset)
            if int(csi.get_arg("input_pos_host")[:n].max()) % 5 == 4:
                break


@dataclass
class Context:
    """A wrapper's own way to pass the interface around."""

    interface: Any
    rows: int
    offset: torch.Tensor

    @property
    def info(self) -> Any:
        return self.interface.info

    def advance(self, tokens: torch.Tensor) -> None:
        self.info.switch_to_generate_()
        self.info.copy_("input_ids", tokens)
        self.info.offset_pos_and_cache_(self.offset)


class OwnDataclass(Eagle):
    """Wraps the interface in a dataclass of its own, whose methods mutate."""

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        context = Context(csi, n, c_offset)
        for draft_idx in range(self.max_draft_len):
            tokens = self.sample(self.run_model(context.interface, self.draft_model, DRAFT), context.rows)
            drafts[:, draft_idx] = tokens
            context.advance(tokens)


class _Drafting(nn.Module):
    """Holds a drafter one level further down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"model": model(*DRAFT)})

    def forward(self, csi: Any, n: int) -> torch.Tensor:
        arguments = {name: value for name, value in csi.named_args.items() if name in DRAFT}
        return (self.inner["model"](**arguments).reshape(-1)[:n] % 997).to(torch.int32)


class TwoLevelsDown(Wrapper):
    """The drafter is no child of the wrapper, and a module in between calls it."""

    def __init__(self, max_draft_len: int = 3) -> None:
        super().__init__(max_draft_len)
        self.drafting = _Drafting()

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        for draft_idx in range(self.max_draft_len):
            tokens = self.drafting(csi, n)
            drafts[:, draft_idx] = tokens
            csi.info.switch_to_generate_()
            csi.info.copy_("input_ids", tokens)
            csi.info.offset_pos_and_cache_(c_offset)


class ThroughHelpers(Eagle):
    """Mutates through a helper method, and through a bound method in a variable."""

    def to_generate(self, info: Any) -> None:
        info.switch_to_generate_()

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        info = csi.info
        advance = info.offset_pos_and_cache_
        store = info.copy_
        for draft_idx in range(self.max_draft_len):
            tokens = self.sample(self.run_model(csi, self.draft_model, DRAFT), n)
            drafts[:, draft_idx] = tokens
            self.to_generate(info)
            store("input_ids", tokens)
            advance(c_offset)


class HandNarrowed(Eagle):
    """Names by hand what the drafter reads, and forgets what the offset writes."""

    NAMED = ("cu_seqlen_host",)

    def draft(self, csi: Any, n: int, c_offset: torch.Tensor, drafts: torch.Tensor) -> None:
        info = csi.info
        for draft_idx in range(self.max_draft_len):
            tokens = self.sample(self.run_model(csi, self.draft_model, DRAFT), n)
            drafts[:, draft_idx] = tokens
            if draft_idx + 1 < self.max_draft_len:
                info.switch_to_generate_(active_args_override=set(self.NAMED))
                info.copy_("input_ids", tokens)
                info.offset_pos_and_cache_(c_offset, active_args_override=set(self.NAMED))


TRACEABLE = (Eagle, Mtp, TwoDrafters, ParallelDrafter, StopsEarly, OwnDataclass, TwoLevelsDown, ThroughHelpers)
EVERY = (*TRACEABLE, StopsOnMirror)

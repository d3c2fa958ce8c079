"""The Eagle wrapper on models simple enough to say in Python what every step must yield.

The target's next token is a function of the token alone. The drafter guesses right unless a sum of the token before,
the token and the position is divisible by four: so a wrong hidden state, position or row shows in the drafts.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from transformers import LlamaForCausalLM

from auto_deploy_ext.embedded.custom_ops.attention_interface import ResourceHandler, SequenceInfo, StateResourceHandler
from auto_deploy_ext.embedded.export import EXPORT_META_KEY, ExportedGraphModule
from auto_deploy_ext.embedded.models.custom.modeling_eagle import (
    EagleWrapper,
    EagleWrapperConfig,
    EagleWrapperOutput,
    placeholder_names,
)
from auto_deploy_ext.embedded.models.factory import CausalLMFactory
from auto_deploy_ext.embedded.shim.interface import CachedSequenceInterface

VOCAB = 16
MAX_TOKENS = 64


def target_token(token: int) -> int:
    return (5 * token + 3) % VOCAB


def draft_token(before: int, token: int, position: int) -> int:
    wrong = (3 * before + 5 * token + position) % 4 == 0
    return (target_token(token) + wrong) % VOCAB


class TokenTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.eye(VOCAB))
        self.head = nn.Linear(VOCAB, VOCAB, bias=False)
        self.head.weight.data.copy_(torch.eye(VOCAB))

    def forward(self, inputs_embeds, position_ids, hidden_states_cache_0, hidden_states_cache_1):
        states = inputs_embeds.flatten(0, 1)
        hidden_states_cache_0.narrow(0, 0, states.shape[0]).copy_(0.75 * states)
        hidden_states_cache_1.narrow(0, 0, states.shape[0]).copy_(0.25 * states)
        following = (5 * inputs_embeds.argmax(-1) + 3) % VOCAB
        return self.head(nn.functional.one_hot(following, VOCAB).float())


class TokenDrafter(nn.Module):
    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * VOCAB, VOCAB, bias=False)
        self.fc.weight.data.copy_(torch.cat([torch.eye(VOCAB), torch.eye(VOCAB)], dim=1))
        self.shift = shift
        if shift:
            self.register_buffer("d2t", (torch.arange(VOCAB) + shift) % VOCAB - torch.arange(VOCAB))

    def forward(self, inputs_embeds, position_ids, hidden_states):
        token, before = inputs_embeds.argmax(-1), hidden_states.argmax(-1)
        wrong = (3 * before + 5 * token + position_ids) % 4 == 0
        guess = (5 * token + 3 + wrong.long() - self.shift) % VOCAB
        return nn.functional.one_hot(guess, VOCAB).float(), inputs_embeds


def graph_module(module: nn.Module, kept: tuple[str, ...], **embeddings: str) -> ExportedGraphModule:
    gm = ExportedGraphModule(module, fx.Tracer().trace(module))
    gm.keep(module, kept)
    gm.meta[EXPORT_META_KEY] = embeddings
    return gm


class HiddenStates(ResourceHandler):
    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        return torch.zeros(sequence_info.max_num_tokens, VOCAB)


def make_wrapper(max_draft_len: int, shift: int = 0):
    target, drafter = TokenTarget(), TokenDrafter(shift)
    wrapper = EagleWrapper(EagleWrapperConfig(max_draft_len), target, drafter)
    wrapper.target_model = graph_module(target, ("embed", "head"), input_embeddings="embed", output_embeddings="head")
    wrapper.draft_model = graph_module(drafter, ("fc", "d2t") if shift else ("fc",))
    cm = CachedSequenceInterface(max_seq_len=64, max_batch_size=8, max_num_tokens=MAX_TOKENS, device="cpu")
    for index in range(2):
        cm.add_resource(f"hidden_states_cache_{index}", HiddenStates())
    for name in ("cu_seqlen", "cache_loc", "cu_num_pages", "last_page_len", "seq_len_with_cache"):
        cm.info.activate_arg(name)
    cm.initialize_resources()
    return wrapper, cm


def nest(cm: CachedSequenceInterface, prompts, extends) -> None:
    """Put prefill and extend rows, each with pages and slots of its own, into the interface."""
    rows = prompts + [row for _, row in extends]
    kinds = [len(prompts), sum(map(len, prompts)), len(extends), sum(len(row) for _, row in extends), 0, 0]
    cm.info.set_example_sequence(
        rows,
        input_pos=[0] * len(prompts) + [len(history) for history, _ in extends],
        batch_info=kinds,
        extra_page_per_seq_per_pool=[list(range(20, 20 + len(rows)))],
    )


def reference_row(history: list[int], row: list[int], is_prefill: bool, max_draft_len: int):
    """New tokens that count, and drafts, of one row after `history` cached tokens."""
    if is_prefill:
        new = [target_token(row[-1])]
        tokens = history + row + new
    else:
        new = [target_token(row[0])]
        for drafted in row[1:]:
            if drafted != new[-1]:
                break
            new.append(target_token(drafted))
        tokens = history + row[:1] + new
    drafts: list[int] = []
    for _ in range(max_draft_len):
        drafts.append(draft_token(tokens[-2], tokens[-1], len(tokens) - 2))
        tokens.append(drafts[-1])
    return new, drafts


@st.composite
def batches(draw):
    """Draft length, prefill prompts, and extend rows (history, token and drafts), drafts often right."""
    max_draft_len = draw(st.integers(1, 4))
    token = st.integers(0, VOCAB - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=5), max_size=3))
    extends = []
    for _ in range(draw(st.integers(0 if prompts else 1, 3))):
        history = draw(st.lists(token, min_size=1, max_size=9))
        row = [draw(token)]
        for _ in range(max_draft_len):
            row.append(target_token(row[-1]) if draw(st.integers(0, 3)) else draw(token))
        extends.append((history, row))
    return max_draft_len, prompts, extends


def run(wrapper, cm, prompts, extends) -> EagleWrapperOutput:
    nest(cm, prompts, extends)
    with torch.no_grad():
        return wrapper(cm)


@settings(max_examples=60, deadline=None)
@given(batch=batches(), shift=st.sampled_from([0, 3]))
def test_every_row_gets_the_tokens_and_drafts_that_it_would_get_alone(batch, shift):
    max_draft_len, prompts, extends = batch
    wrapper, cm = make_wrapper(max_draft_len, shift)
    output = run(wrapper, cm, prompts, extends)
    rows = [([], prompt, True) for prompt in prompts] + [(history, row, False) for history, row in extends]
    lens, new_tokens = output.new_tokens_lens.tolist(), output.new_tokens.tolist()
    for index, (history, row, is_prefill) in enumerate(rows):
        new, drafts = reference_row(history, row, is_prefill, max_draft_len)
        assert new_tokens[index][: lens[index]] == new
        assert output.next_draft_tokens[index].tolist() == drafts
        assert output.next_new_tokens[index].tolist() == [new[-1], *drafts]


@pytest.mark.parametrize("max_draft_len", [1, 2, 3, 5])
def test_after_the_loop_each_sequence_stands_before_its_last_draft(max_draft_len):
    wrapper, cm = make_wrapper(max_draft_len)
    first = 2
    right = [first]
    for _ in range(max_draft_len):
        right.append(target_token(right[-1]))
    rejected = [first, *[(token + 1) % VOCAB for token in right[1:]]]
    output = run(wrapper, cm, [[1, 2, 3]], [([4, 5], right), ([6, 7, 8, 9], rejected)])
    assert output.new_tokens_lens.tolist() == [1, max_draft_len + 1, 1]
    if max_draft_len == 1:  # One iteration, after which nothing is moved any more.
        assert cm.info.get_arg("input_pos")[:3].tolist() == [0, 2, 4]
        assert not cm.info.is_generate_only
        return
    last = max_draft_len - 2
    assert cm.info.is_generate_only
    assert cm.info.get_arg("input_pos")[:3].tolist() == [3 + last, 2 + max_draft_len + 1 + last, 4 + 1 + last]
    assert cm.info.get_arg("seq_len_with_cache")[:3].tolist() == [4 + last, 2 + max_draft_len + 2 + last, 6 + last]


def test_a_prefill_row_has_one_new_token_and_zeros():
    wrapper, cm = make_wrapper(3)
    output = run(wrapper, cm, [[1], [4, 2]], [])
    assert output.new_tokens.tolist() == [[target_token(1), 0, 0, 0], [target_token(2), 0, 0, 0]]
    assert output.new_tokens_lens.tolist() == [1, 1]


def test_the_result_is_a_dataclass_of_int32_tensors():
    wrapper, cm = make_wrapper(2)
    output = run(wrapper, cm, [[1, 2]], [([3], [4, 5, 6])])
    assert isinstance(output, EagleWrapperOutput)
    assert {name: (tuple(value.shape), value.dtype) for name, value in output.items()} == {
        "new_tokens": ((2, 3), torch.int32),
        "new_tokens_lens": ((2,), torch.int32),
        "next_draft_tokens": ((2, 2), torch.int32),
        "next_new_tokens": ((2, 3), torch.int32),
    }


def test_a_hybrid_cache_manager_promotes_the_state_of_the_last_accepted_token():
    wrapper, cm = make_wrapper(2)
    cm.add_resource("ssm_state_0", StateResourceHandler(1, dtype=torch.float32))
    cm.add_resource("intermediate_ssm_state_0", StateResourceHandler(3, 1, dtype=torch.float32))
    cm.initialize_resources()
    states, after_token = cm.get_arg("ssm_state_0"), cm.get_arg("intermediate_ssm_state_0")
    states.copy_(torch.arange(states.shape[0]).unsqueeze(1) * 100.0)
    after_token.copy_(states.unsqueeze(1) + torch.arange(1.0, 4.0).view(1, 3, 1))
    accept_two = [2, target_token(2), target_token(target_token(2))]
    accept_none = [2, (target_token(2) + 1) % VOCAB, 0]
    nest(cm, [[1, 2]], [([3], accept_two), ([3], accept_none)])
    with torch.no_grad():
        output = wrapper(cm)
    assert output.new_tokens_lens.tolist() == [1, 3, 1]
    assert states[:3, 0].tolist() == [0.0, 103.0, 201.0]


def test_the_target_alone_runs_decode_rows():
    wrapper, cm = make_wrapper(2)
    cm.info.set_example_sequence([[3, 4], [5], [6]], input_pos=[0, 7, 8], batch_info=[1, 2, 0, 0, 2, 2])
    assert wrapper.forward_target(cm).argmax(-1).tolist() == [target_token(4), target_token(5), target_token(6)]


def test_rows_of_another_length_are_refused():
    wrapper, cm = make_wrapper(3)
    with pytest.raises(AssertionError, match="an extend row is one token and its drafts"):
        run(wrapper, cm, [], [([1], [2, 3])])
    cm.info.set_example_sequence([[5], [6]], input_pos=3, batch_info=[0, 0, 0, 0, 2, 2])
    with pytest.raises(AssertionError, match="no decode rows"):
        wrapper(cm)


def test_models_that_were_not_exported_are_refused():
    wrapper = EagleWrapper(EagleWrapperConfig(2), TokenTarget(), TokenDrafter())
    wrapper.target_model.get_input_embeddings = lambda: wrapper.target_model.embed
    _, cm = make_wrapper(2)
    nest(cm, [[1, 2]], [])
    with pytest.raises(AssertionError, match="run export_to_gm"):
        wrapper(cm)


@torch.no_grad()
def test_without_an_interface_both_models_run_over_whole_prompts():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    factory = CausalLMFactory(
        model_kwargs={"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, **sizes},
        speculative_config={"decoding_type": "Eagle3", "max_draft_len": 2},
    )
    wrapper = factory.build_model()
    reference = LlamaForCausalLM(wrapper.target_model.config).eval()
    reference.set_attn_implementation("eager")
    reference.load_state_dict(wrapper.target_model.state_dict())
    input_ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    output = wrapper(input_ids=input_ids)
    torch.testing.assert_close(output.logits, reference(input_ids).logits)
    assert output.draft_logits.shape == (2, 3, 32)
    states = torch.ones(2, 3, 16)
    positions = torch.arange(3).expand(2, 3)
    other = wrapper(input_ids=input_ids, position_ids=positions, hidden_states=states)
    torch.testing.assert_close(other.logits, output.logits)
    shifted = torch.cat([input_ids[:, 1:], output.logits[:, -1:].argmax(-1)], dim=1)
    norm, _ = wrapper.draft_model(wrapper.embed_draft(shifted), positions, states)
    torch.testing.assert_close(other.draft_logits, wrapper.draft_model.lm_head(norm))


def test_a_draft_length_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        EagleWrapperConfig(0)


def test_placeholders_are_named_by_their_target():
    wrapper, _ = make_wrapper(1)
    assert placeholder_names(wrapper.draft_model) == ("inputs_embeds", "position_ids", "hidden_states")

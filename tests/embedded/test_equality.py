"""What counts as equal decodes: the rule on made-up numbers, and the noise and logits that it goes by on a model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from auto_deploy_ext.embedded import equality
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.equality import (
    EqualityReport,
    Reference,
    compare,
    gaps_of,
    rounding_noise,
    speculative_equality,
    teacher_forced_logits,
)
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from tests.small_config import SMALL

CONFIG = f"""{SMALL}attn_backend: torch_paged
max_num_tokens: 8
dtype: float32
"""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    path = tmp_path_factory.mktemp("equality") / "small.yaml"
    path.write_text(CONFIG)
    return build_pipeline(load_config(str(path)))


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_equal_tokens_are_equal_and_close_positions_are_counted() -> None:
    result = compare([5, 6, 7], [5, 6, 7], [1.0, 0.1, 0.0], noise=0.1)
    assert result.equal and result.first_difference is None
    assert (result.first_close, result.num_close) == (1, 2)


def test_a_difference_counts_unless_a_close_position_came_first() -> None:
    assert not compare([5, 9, 7], [5, 6, 7], [1.0, 0.5, 0.0], noise=0.1).equal, "close only later"
    assert compare([5, 9, 7], [5, 6, 7], [1.0, 0.1, 9.0], noise=0.1).equal, "close there"
    assert compare([5, 9, 7], [5, 6, 7], [0.0, 0.5, 9.0], noise=0.1).equal, "close before, so caches may differ"
    assert compare([5, 9, 7], [5, 6, 7], [1.0, 0.5, 9.0], noise=0.1).gap == 0.5


def test_one_that_stops_early_differs_where_it_stops() -> None:
    result = compare([5, 6], [5, 6, 7], [1.0, 1.0, 1.0], noise=0.1)
    assert not result.equal and result.first_difference == 2
    assert compare([5, 6], [5, 6, 7], [1.0, 1.0, 0.05], noise=0.1).equal


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 1)), min_size=1), st.floats(0, 1))
def test_more_noise_never_makes_unequal_what_was_equal(rows: list[tuple[int, int, float]], noise: float) -> None:
    tokens, reference, gaps = (list(column) for column in zip(*rows, strict=True))
    if compare(tokens, reference, gaps, noise / 2).equal:
        assert compare(tokens, reference, gaps, noise).equal
    assert compare(tokens, tokens, gaps, noise).equal
    if tokens != reference:
        assert not compare(tokens, reference, [9.0] * len(gaps), noise).equal


def test_noise_is_how_much_the_lead_of_the_best_differs_between_ways() -> None:
    one = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.5]])
    # The first lead is 2, 1.75; the second 0.5, -0.25: another order is a difference too. A shift of all is none.
    other = torch.tensor([[12.75, 11.0, 10.0], [0.0, 1.5, 1.75]])
    assert rounding_noise([one, other]) == 0.75
    assert gaps_of(one) == [2.0, 0.5]


def test_a_report_says_what_parts_where() -> None:
    parted = compare([5, 9], [5, 6], [1.0, 0.5], noise=0.1)
    report = EqualityReport(0.1, (compare([5], [5], [1.0], 0.1), parted))
    assert not report.equal and not report.identical
    assert report.describe().splitlines() == [
        "NOT equal: 2 prompts, 3 tokens, 0 of them with two best logits within the noise of 0.1",
        "  prompt 1 parts at 1 of 2 (gap 0.5), first close position: None",
    ]
    assert report.to_json() == {
        "equal": False,
        "identical": False,
        "noise": 0.1,
        "num_tokens": 3,
        "num_close": 0,
        "parted": 1,
        "num_prompts": 2,
    }


# -- on a model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["decode", "extend", "prefill"])
def test_logits_of_given_tokens_are_what_decoding_chose_from(pipeline: Pipeline, kind: str) -> None:
    prompts = [[7, 8, 9], [1] * 8]
    result = generate(pipeline.model, pipeline.cm, prompts, 9, speculative=False)
    for prompt, output in zip(prompts, result.outputs, strict=True):
        logits = teacher_forced_logits(pipeline.model, pipeline.cm, prompt, output.tokens, kind)
        assert logits.shape == (9, 256)
        assert logits.argmax(-1).tolist() == list(output.tokens)


def test_in_float32_drafts_change_nothing_and_the_noise_is_tiny(pipeline: Pipeline) -> None:
    report = speculative_equality(pipeline.model, pipeline.cm, [[7, 8, 9], [1, 2]], 8)
    assert report.identical and report.num_close == 0, report.describe()
    assert 0 < report.noise < 1e-5


def test_the_noise_is_that_of_the_noisiest_prompt(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    noises = iter([0.5, 0.25])
    monkeypatch.setattr(equality, "rounding_noise", lambda ways: next(noises))
    found = Reference.measure(pipeline.model, pipeline.cm, [[7, 8], [9]], [[1, 2], [3, 4]])
    assert (found.noise, found.tokens, [len(gaps) for gaps in found.gaps]) == (0.5, ((1, 2), (3, 4)), [2, 2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_of_logits_that_are_no_numbers_nothing_is_greedy(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr(equality, "teacher_forced_logits", lambda *_: torch.full((2, 256), value))
    with pytest.raises(ValueError, match="prompt 0: its best logits are infinite or no numbers"):
        Reference.measure(pipeline.model, pipeline.cm, [[7, 8]], [[1, 2]])


def test_a_wrong_decode_is_found_out(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every draft is accepted, whatever the target says of it.
    honest = torch.Tensor.cumprod
    monkeypatch.setattr(torch.Tensor, "cumprod", lambda self, *a, **kw: honest(torch.ones_like(self), *a, **kw))
    assert not speculative_equality(pipeline.model, pipeline.cm, [[7, 8, 9]], 8).equal

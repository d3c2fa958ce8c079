"""The arguments of the command `train-draft`; imports nothing heavy, because every command's parser has them."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...commands.command_line import finite, positive

DEFAULT_CONFIG = "eagle3_llama"
LEARNING_RATE = 1.5e-3
LOG_EVERY = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="SPEC", help="the target: a Hugging Face directory or a GGUF file")
    which.add_argument(
        "--config", metavar="NAME_OR_PATH", help=f"the target of this config (default: {DEFAULT_CONFIG})"
    )
    which.add_argument("--plot", type=Path, metavar="DIR", help="only draw DIR/curves.png from DIR/training.json")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the head goes; needed to train")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="sampled text and state (default: OUTPUT/work)")
    parser.add_argument("--resume", action="store_true", help="go on from what --work-dir keeps")
    parser.add_argument("--init-from", type=Path, metavar="DIR", help="start with the weights of this head")
    parser.add_argument(
        "--time-budget", type=_above_zero, metavar="SECONDS", help="end within this time; needed, if not --steps"
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="training steps (default: what --time-budget allows)"
    )
    sampled = "sampled sequences at most (default: %(default)s)"
    parser.add_argument("--sequences", type=positive, default=65536, metavar="N", help=sampled)
    parser.add_argument(
        "--sequence-length", type=positive, default=160, metavar="L", help="tokens of each (default: %(default)s)"
    )
    parser.add_argument(
        "--held-out-sequences", type=positive, default=256, metavar="N", help="never trained on (default: %(default)s)"
    )
    parser.add_argument(
        "--sample-rows", type=positive, metavar="N", help="sequences side by side in sampling (default: by the device)"
    )
    parser.add_argument(
        "--feature-rows",
        type=positive,
        metavar="N",
        help="sequences side by side in computing hidden states (default: by the device)",
    )
    share = "share of chats among all texts, where the tokenizer has a template (default: %(default)s)"
    parser.add_argument("--chat-share", type=_share, default=0.55, metavar="SHARE", help=share)
    share = "share of texts that only a word or two begin (default: %(default)s)"
    parser.add_argument("--general-share", type=_share, default=0.15, metavar="SHARE", help=share)
    share = "share of the time budget that sampling gets (default: %(default)s)"
    parser.add_argument("--sampling-share", type=_share, default=0.3, metavar="SHARE", help=share)
    batch = "sequences of a training batch (default: %(default)s)"
    parser.add_argument("--batch-sequences", type=positive, default=96, metavar="N", help=batch)
    steps = "draft steps that the head is trained for (default: %(default)s)"
    parser.add_argument("--draft-steps", type=positive, default=4, metavar="K", help=steps)
    vocabulary = "tokens that the head can draft, the most frequent ones (default: %(default)s)"
    parser.add_argument("--draft-vocab", type=positive, default=8192, metavar="N", help=vocabulary)
    parser.add_argument(
        "--intermediate-size", type=positive, metavar="N", help="of the head's MLP (default: the target's)"
    )
    rate = "the highest, after warm-up (default: %(default)s)"
    parser.add_argument("--learning-rate", type=_above_zero, default=LEARNING_RATE, metavar="RATE", help=rate)
    steps = "steps between lines of the log and points of the curves (default: %(default)s)"
    parser.add_argument("--log-every", type=positive, default=LOG_EVERY, metavar="STEPS", help=steps)
    seconds = "seconds between checkpoints, from which --resume goes on (default: %(default)s)"
    parser.add_argument("--checkpoint-seconds", type=_above_zero, default=45.0, metavar="S", help=seconds)
    parser.add_argument(
        "--held-out", type=Path, metavar="FILE", help='JSON list of {"kind", "text"}: prompts to report acceptance on'
    )
    parser.add_argument("--seed", type=_seed, default=27, help="of sampling and training (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu (default: what there is)")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and show tracebacks of errors")


def _seed(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, got {text!r}")
    return value


def _number(text: str) -> float:
    value = finite(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def _above_zero(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value

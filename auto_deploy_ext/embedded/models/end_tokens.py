"""Which tokens end a continuation of a checkpoint's model, as transformers' `generate` has it."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME


def end_token_ids(directory: Path | None, config: PreTrainedConfig) -> tuple[int, ...]:
    """The end tokens of a checkpoint: those of its generation config; where it has no such file, of its config.

    Args:
        directory: The checkpoint; None asks the config alone.
        config: Its config.

    Returns:
        None where it names none: then a continuation ends with its length.

    Raises:
        OSError: The generation config is damaged.
    """
    if directory is not None and (directory / GENERATION_CONFIG_NAME).is_file():
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    ids = generation.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

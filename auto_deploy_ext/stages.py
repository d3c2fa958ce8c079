"""Where the plugin's transforms may stand in a pipeline, checked before any of it runs."""

from __future__ import annotations

from .binding import Stages, TransformConfig


def check_runs_once(key: str, config: TransformConfig) -> None:
    """Check that a transform is asked to run on the whole model.

    Args:
        key: the transform's.
        config: its fields.

    Raises:
        ValueError: `run_per_gm` is true.
    """
    if config.run_per_gm:
        raise ValueError(f"{key} runs on the whole model: leave run_per_gm at false")


def check_stage(key: str, config: TransformConfig) -> None:
    """Check that a transform runs when models have all their arguments, and before they are compiled.

    AutoDeploy puts a key of a user's YAML last in its stage, so in stage `compile` it comes after `compile_model`.

    Args:
        key: the transform's.
        config: its fields.

    Raises:
        ValueError: the stage is another one.
    """
    if config.stage < Stages.CACHE_INIT:
        why = "comes before cache_init, where models get the arguments that mirrors are for"
    elif not config.stage < Stages.COMPILE:
        why = "is too late: models are compiled by then, and captured graphs would not change"
    else:
        return
    raise ValueError(f"{key}: stage {config.stage.value} {why}; set stage: cache_init, last in that stage")

"""The curves of a training run: from `training.json` to a picture."""

from __future__ import annotations

import json
from pathlib import Path

RECORD_FILE, PICTURE_FILE = "training.json", "curves.png"


class PlotError(ValueError):
    """The picture cannot be drawn."""


def plot(directory: Path) -> Path:
    """Draw the loss and the acceptance of each draft step, from the directory's `training.json`.

    Runs that the last one's weights come from stand before it, a dotted line between them.

    Returns:
        The picture's path.

    Raises:
        PlotError: There is no record, or matplotlib is missing.
    """
    path = directory / RECORD_FILE
    if not path.is_file():
        raise PlotError(f"{directory} has no {RECORD_FILE}; give a directory that train-draft wrote")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("the picture needs matplotlib: pip install 'auto_deploy_ext[plots]'") from error
    record = json.loads(path.read_text(encoding="utf-8"))
    runs = [*record.get("earlier_runs", []), record]
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, steps, length = figure.subplots(1, 3)
    before = 0
    for number, run in enumerate(runs):
        history, evaluations = run["history"], run["evaluations"]
        at = [before + entry["step"] for entry in history]
        loss.plot(at, [entry["loss"] for entry in history], color="tab:blue")
        for index in range(len(history[0]["acceptance"]) if history else 0):
            label = f"draft step {index + 1}" if number == 0 else None
            steps.plot(at, [entry["acceptance"][index] for entry in history], label=label, color=f"C{index}")
        at = [before + entry["step"] for entry in evaluations]
        for color, (name, label) in enumerate(
            (("greedy", "greedy continuations of prompts"), ("sampled", "sampled text, each run its own"))
        ):
            values = [entry[name]["length"] for entry in evaluations]
            length.plot(at, values, marker=".", label=label if number == 0 else None, color=f"C{color}")
        before += history[-1]["step"] if history else 0
        if number < len(runs) - 1:
            for axes in (loss, steps, length):
                axes.axvline(before, color="grey", linestyle=":")
    loss.set(title="Loss", xlabel="training step", ylabel="weighted cross-entropy per token")
    steps.set(title="Acceptance in training, of drafts reached", xlabel="training step", ylim=(0, 1))
    steps.legend()
    length.set(title="Held-out acceptance length", xlabel="training step", ylabel="accepted + 1")
    length.legend()
    for axes in (loss, steps, length):
        axes.grid(alpha=0.3)
    figure.savefig(directory / PICTURE_FILE, dpi=110)
    return directory / PICTURE_FILE

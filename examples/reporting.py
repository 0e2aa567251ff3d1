"""What the examples of training print and draw of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from transmuter.train import Fit


def print_evaluation(row: dict[str, float]) -> None:
    """A callback of `train.fit`: a line for each evaluation."""
    if "eval_loss" in row:
        print(f"step {row['step']:<9} validation loss {row['eval_loss']:.3f}")


def print_fall(result: Fit) -> None:
    """The loss on the first and the last batches."""
    losses = result.curve("loss")[1]
    print(f"loss           {np.mean(losses[:5]):.3f} in the first steps, {np.mean(losses[-5:]):.3f} in the last")


def save_loss_curve(result: Fit, before: float, title: str, path: Path) -> None:
    """Draws the loss of each batch, its running mean, and the loss on the validation set, as a PNG.

    Args:
        result: What `train.fit` has returned, with evaluations.
        before: The loss on the validation set before the first step.
        title: The heading of the picture.
        path: The file.
    """
    steps, losses = result.curve("loss")
    validation_steps, validation = result.curve("eval_loss")
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training, each batch")
    axes.plot(steps, running_mean(losses), color="tab:blue", label="training, running mean")
    axes.plot([0, *validation_steps], [before, *validation], "o-", color="tab:orange", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss", title=title, xlim=(0, None))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def running_mean(values: list[float]) -> np.ndarray:
    """The mean of each value and its neighbours: a twentieth of all on either side, fewer near the ends."""
    places = np.arange(len(values))
    reach = np.minimum(len(values) // 20, np.minimum(places, places[::-1]))
    sums = np.cumsum([0.0, *values])
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)

"""The run as pictures."""

from collections.abc import Sequence
from pathlib import Path

PANELS = (
    ("loss", ("train_loss", "val_loss")),
    ("accuracy, percent", ("train_top1_percent", "val_top1_percent")),
    ("learning rate", ("lr",)),
    ("images/s", ("images_per_second",)),
)


def draw_curves(epochs: Sequence[dict], path: Path, title: str) -> None:
    """Draws loss, accuracy, learning rate and images/s over the epochs.

    Args:
        epochs: the epoch records of metrics.jsonl.
        path: the PNG file to write.
        title: stands above the panels.
    """
    # Imported here: it takes a second, and only the end of a run needs it. The object interface touches no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (label, names) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name in names:
            points = [(record["epoch"], record[name]) for record in epochs if record.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if label == "loss" and axes.lines:
            axes.set_yscale("log")  # the first validation loss can be hundreds of times the later ones
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=110)

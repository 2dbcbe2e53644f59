"""The picture of docs/performance.md: how far from the floor each library is.

Here: bars of ratios. Not here: where the numbers come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.rounds import ratios, seconds_of, spread

GROUPS = (
    ("save", "first", "save"),
    ("load", "warm", "load, warm"),
    ("load", "cold", "load, cold"),
    ("many", "first", "20,000 small:\nsave"),
    ("many", "second", "save again"),
    ("many", "load", "load"),
)
SHOWN = {
    "ours": ("dist-ckpt", "#1f6feb"),
    "dcp": ("torch DCP", "#d29922"),
    "torch-save": ("torch.save", "#8b949e"),
    "safetensors": ("safetensors", "#57606a"),
    "megatron": ("Megatron-Core", "#2da44e"),
}


def bars(results: dict[str, Any]) -> dict[str, list[float | None]]:
    """Return for each contender its multiple of the floor in each group; None where it has none."""
    found: dict[str, list[float | None]] = {}
    for name in SHOWN:
        heights: list[float | None] = []
        for bench, measure, _ in GROUPS:
            result = results.get(bench)
            height = None
            if result is not None:
                case, known = next(iter(result["cases"].items()))
                mine = seconds_of(result, case, name, measure)
                pairs = ratios(mine, seconds_of(result, case, known["floor"], measure))
                height = spread(pairs).middle if pairs else None
            heights.append(height)
        if any(height is not None for height in heights):
            found[name] = heights
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw to a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    heights = bars(results)
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / max(1, len(heights))
    for number, (name, values) in enumerate(heights.items()):
        label, colour = SHOWN[name]
        places = [group + (number - (len(heights) - 1) / 2) * width for group in range(len(GROUPS))]
        shown = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        drawn = axes.bar(
            [x for x, _ in shown], [y for _, y in shown], width, label=label, color=colour
        )
        axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=1)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("times the floor (log)")
    axes.set_xticks(range(len(GROUPS)), [title for _, _, title in GROUPS])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, ncols=len(heights), loc="upper left", fontsize=8)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)

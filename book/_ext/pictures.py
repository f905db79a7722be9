"""The book's cover, its card for social networks and its icon, all drawn from one picture of the idea."""

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashattn.figures import COLORS, picture

CELLS, ROW, COLUMN = 8, 3, 4  # the grid of tiles, and the tile that is on chip
CARD_INCHES, CARD_DPI = (12, 6.3), 100  # 1200 × 630 pixels, what such networks show uncropped
ALT = (
    "Two grids of attention scores. Left, standard attention: all 64 tiles are filled, the whole matrix lies in device "
    "memory. Right, FlashAttention: the same grid is empty but for one tile, the only one on chip; its row up to that "
    "tile is done, and nothing of it was stored."
)


def draw_grids(axes, size):
    """Draw both grids on two axes, with titles of the given size in points."""
    titles = ("standard: every score\nin device memory", "FlashAttention: one tile\nat a time, on chip")
    for ax, title in zip(axes, titles, strict=True):
        ax.set(xlim=(-0.1, CELLS + 0.1), ylim=(CELLS + 0.1, -0.1), aspect="equal")
        ax.axis("off")
        ax.set_title(title, fontsize=size)
    for row in range(CELLS):
        for column in range(CELLS):
            axes[0].add_patch(_tile(row, column, COLORS["standard"], alpha=0.85))
            done = (row, column) < (ROW, COLUMN)
            axes[1].add_patch(_tile(row, column, COLORS["flash"] if done else "none", alpha=0.3, edge=COLORS["flash"]))
    axes[1].add_patch(_tile(ROW, COLUMN, COLORS["on_chip"], alpha=1.0))


def _tile(row, column, face, alpha, edge="none"):
    return Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, facecolor=face, edgecolor=edge, alpha=alpha, linewidth=1)


@picture
def cover():
    """Return the cover as a Picture that takes its ink from the page."""
    figure = Figure(figsize=(5.2, 3.0))
    draw_grids(figure.subplots(1, 2), 11)
    return figure, ALT


def write_card(path, title):
    """Write the card for social networks, a PNG with the title above the grids, to path."""
    with matplotlib.rc_context({"text.color": "#1b1f24", "font.family": "sans-serif"}):
        figure = Figure(figsize=CARD_INCHES, dpi=CARD_DPI, facecolor="white")
        figure.suptitle(title, fontsize=40, fontweight="bold", y=0.95)
        draw_grids(figure.subplots(1, 2, gridspec_kw=dict(left=0.08, right=0.92, bottom=0.04, top=0.68)), 20)
        figure.savefig(path, format="png", metadata={"Software": None})


def icon_svg():
    """Return the icon: four tiles a side, one of them on chip."""
    tiles = "".join(
        f'<rect x="{2 + 15 * column}" y="{2 + 15 * row}" width="13" height="13" rx="2" '
        f'fill="{COLORS["on_chip" if (row, column) == (1, 2) else "flash"]}" '
        f'opacity="{1 if (row, column) <= (1, 2) else 0.35}"/>'
        for row in range(4)
        for column in range(4)
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 62 62">{tiles}</svg>\n'

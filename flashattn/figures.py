"""Every plot of the book that takes more than five lines. Functions take data, return a Picture, compute no attention.

A Picture is an inline SVG that takes its ink from the page, so that one file serves light and dark mode, and carries a
sentence for readers who cannot see it.
"""

import functools
import hashlib
import html
import io
import itertools
import re

import matplotlib
from matplotlib.figure import Figure

# One colour per role, each at least 3:1 against white and against the dark page; markers and line styles differ too, so
# that figures survive greyscale.
COLORS = {"standard": "#d1603d", "flash": "#2a86c7", "on_chip": "#3a9155", "device_memory": "#9467bd"}
MARKERS = {"standard": "o", "flash": "s", "on_chip": "^", "device_memory": "D"}
LINES = {"standard": "-", "flash": "--", "on_chip": "-.", "device_memory": ":"}
INK = "#010203"  # stands for the page's text colour, and is replaced by it

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flashattn",
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.figsize": (4.8, 3.0),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.18,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.constrained_layout.use": True,
} | dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "grid.color"),
    INK,
)


class Picture:
    """A matplotlib figure as an inline SVG with a text alternative. alt says what the picture shows, not what it is."""

    def __init__(self, figure, alt, prefix=None):
        """Make the SVG. prefix: begins its ids; by default a hash of the content, which differs between pictures."""
        self.figure, self.alt = figure, alt
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        svg = _lean(buffer.getvalue()).replace(INK, "currentColor")
        # Several pictures share a page: make their ids differ.
        prefix = prefix or "f" + hashlib.sha256(svg.encode()).hexdigest()[:8]
        svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
        width = float(re.search(r'width="([\d.]+)pt"', svg).group(1))
        look = f"width:100%;max-width:{width * 1.7:.0f}px;height:auto;stroke-linejoin:round;stroke-linecap:butt"
        attributes = f'role="img" aria-label="{html.escape(alt)}" style="{look}"'
        svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)  # the page sets the size
        self.svg = svg.replace("<svg", f"<svg {attributes}", 1)

    def _repr_html_(self):
        return f'<div class="flashattn-picture">{self.svg}</div>'


def _lean(svg):
    """Leave out of matplotlib's SVG what a page does not need: about half."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)  # it would apply to the whole page
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    # A hundredth of a point is finer than any screen. Labels stay as they are: only attributes are rounded.
    places = r'\b(?:d|x|y|x1|y1|x2|y2|width|height|transform)="[^"]*"'
    svg = re.sub(places, lambda match: re.sub(r"\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", match[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def picture(draw):
    """Make a function that returns (figure, alt) return a Picture, drawn in the book's style."""

    @functools.wraps(draw)
    def styled(*args, **kwargs):
        with matplotlib.rc_context(STYLE):
            return Picture(*draw(*args, **kwargs))

    return styled


def new_figure(rows=1, columns=1, **kwargs):
    """Return (figure, axes), made outside pyplot so that nothing shows twice."""
    figure = Figure(**kwargs)
    return figure, figure.subplots(rows, columns)


def role_style(role):
    """Return the colour, marker and line style of a role: standard, flash, on_chip or device_memory."""
    return {"color": COLORS[role], "marker": MARKERS[role], "linestyle": LINES[role]}


# Chapter 1


@picture
def memory_by_length(seqlens, bytes_by_name, alt, limit_bytes=None):
    """Plot peak memory against sequence length, both on log scales.

    bytes_by_name: {label: (role, [bytes, …], kind)} with kind "measured" (marks) or "formula" (line).
    limit_bytes: {label: bytes}, horizontal lines for the memory of GPUs.
    """
    figure, axes = new_figure()
    for label, (role, values, kind) in bytes_by_name.items():
        style = role_style(role) | ({"linestyle": "none"} if kind == "measured" else {"marker": "none"})
        axes.plot(seqlens[: len(values)], [value / 2**30 for value in values], label=label, **style)
    for label, value in (limit_bytes or {}).items():
        axes.axhline(value / 2**30, color=INK, linewidth=0.8, alpha=0.6)
        axes.annotate(label, (seqlens[0], value / 2**30), fontsize=8, va="bottom", color=INK)
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="peak memory (GiB)")
    axes.set_xticks(seqlens, [str(n) for n in seqlens], rotation=45)
    axes.minorticks_off()
    axes.legend(fontsize=9)
    return figure, alt


@picture
def matrix_lifetimes(lives, steps, backward_from):
    """Draw which N x N matrices are alive in which step of the forward and the backward pass.

    lives: {name: (first, last)}, the steps in which each matrix is alive, both included.
    steps: names of the steps in order; the backward pass begins with number backward_from.
    """
    alive = [sum(first <= i <= last for first, last in lives.values()) for i in range(len(steps))]
    peak = alive.index(max(alive))
    figure, axes = new_figure(figsize=(4.8, 3.4))
    axes.axvspan(peak - 0.5, peak + 0.5, color=INK, alpha=0.1, linewidth=0)
    for row, (first, last) in enumerate(lives.values()):
        axes.barh(row, last - first + 1, left=first - 0.5, height=0.62, color=COLORS["standard"])
    for i, count in enumerate(alive):
        axes.text(i, len(lives) - 0.15, str(count), ha="center", va="center", weight="bold" if i == peak else "normal")
    axes.axvline(backward_from - 0.5, color=INK, linewidth=1, linestyle=":")
    axes.text(backward_from - 0.65, -0.75, "forward", ha="right", va="center")
    axes.text(backward_from - 0.35, -0.75, "backward", ha="left", va="center")
    axes.set_yticks(range(len(lives) + 1), [*lives, "alive"])
    axes.set_xticks(range(len(steps)), steps, rotation=60, ha="right", rotation_mode="anchor")
    axes.set(xlim=(-0.5, len(steps) - 0.5), ylim=(len(lives) + 0.3, -1.2))
    axes.grid(False)
    spans = "; ".join(f"{name} from {steps[first]} to {steps[last]}" for name, (first, last) in lives.items())
    alt = f"N×N matrices alive in each step. {spans}. The most, {max(alive)}, are alive in step {steps[peak]}."
    return figure, alt


@picture
def trips_by_step(steps):
    """Draw the bytes that each step reads and writes as bars. steps: [(name, read bytes, written bytes), …]."""
    figure, axes = new_figure(figsize=(4.8, 2.6))
    color = COLORS["device_memory"]
    for row, (_, read, written) in enumerate(steps):
        axes.barh(row, read / 1e9, height=0.6, color=color, label="read" if row == 0 else None)
        axes.barh(
            row, written / 1e9, left=read / 1e9, height=0.6, facecolor="none", edgecolor=color, hatch="///",
            label="written" if row == 0 else None,
        )  # fmt: skip
    axes.set_yticks(range(len(steps)), [name for name, _, _ in steps])
    axes.invert_yaxis()
    axes.set(xlabel="bytes through device memory (GB)")
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    parts = "; ".join(f"{name} reads {read / 1e9:.3f} GB and writes {new / 1e9:.3f}" for name, read, new in steps)
    total = sum(read + written for _, read, written in steps)
    return figure, f"Bytes of each step of attention: {parts}. Together {total / 1e9:.2f} GB."


@picture
def roofline(points, gpus):
    """Plot the rate that the bytes allow against arithmetic intensity.

    points: {label: (role, FLOP per byte, where its label goes: "left" or "below")}, drawn on the first GPU's roof.
    gpus: {label: (FLOP per second, bytes per second)}.
    """
    figure, axes = new_figure(figsize=(4.8, 3.4))
    low, high = 4, 8192
    for (label, (flops, bandwidth)), line in zip(gpus.items(), ("-", "--", ":"), strict=False):
        ridge = flops / bandwidth
        rates = [x * bandwidth / 1e12 for x in (low, ridge)] + [flops / 1e12]
        axes.plot([low, ridge, high], rates, color=INK, linestyle=line, linewidth=1.2, label=label)
    flops, bandwidth = next(iter(gpus.values()))
    parts = []
    for label, (role, intensity, side) in points.items():
        rate = min(flops, intensity * bandwidth) / 1e12
        axes.plot(intensity, rate, **role_style(role) | {"linestyle": "none"}, markersize=8)
        offset = (-8, 4) if side == "left" else (6, -14)
        axes.annotate(label, (intensity, rate), offset, textcoords="offset points", ha="right", va="center")
        parts.append(f"{label} at {intensity:.0f} FLOP per byte, at most {rate:.0f} TFLOP/s")
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="TFLOP/s at most")
    axes.set_xlim(low, high)
    ticks = [4, 16, 64, 256, 1024, 8192]
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.set_yticks([10, 100, 1000], ["10", "100", "1000"])
    axes.minorticks_off()
    axes.legend(loc="lower right", fontsize=9)
    roofs = "; ".join(f"{label} turns flat at {top / rate:.0f} FLOP per byte" for label, (top, rate) in gpus.items())
    return figure, f"Roofline of {roofs}. On {next(iter(gpus))}: {'; '.join(parts)}."


@picture
def memory_shares(models):
    """Draw what fills the memory, as shares of the whole: one row of bars for each model, one bar for each length.

    models: {name: {N: {"weights": bytes, "other": bytes, "attention": bytes}}}, two names or more.
    """
    looks = {
        "attention": {"color": COLORS["standard"]},
        "other": {"facecolor": "none", "edgecolor": COLORS["device_memory"], "hatch": "///"},
        "weights": {"color": INK, "alpha": 0.45},
    }
    names = {"attention": "N×N matrices", "other": "other activations", "weights": "weights and optimizer"}
    figure, rows = new_figure(len(models), 1, figsize=(4.8, 1.2 + 1.9 * len(models)))
    parts = []
    for axes, (model, by_length) in zip(rows, models.items(), strict=True):
        for i, (n, sizes) in enumerate(by_length.items()):
            total, bottom = sum(sizes.values()), 0
            for part, look in looks.items():
                share = 100 * sizes[part] / total
                axes.bar(i, share, 0.62, bottom, label=names[part] if i == 0 and not parts else None, **look)
                bottom += share
            axes.text(i, 102, f"{total / 1e9:.0f} GB", ha="center", va="bottom")
            share = 100 * sizes["attention"] / total
            parts.append(f"{model} at N={n}: {share:.0f} % of {total / 1e9:.0f} GB are N×N matrices")
        axes.set_xticks(range(len(by_length)), [str(n) for n in by_length])
        axes.set_yticks([0, 50, 100])
        axes.set(ylim=(0, 122), ylabel="% of memory")
        axes.set_title(model, fontsize=10, loc="left")
        axes.grid(axis="x", visible=False)
    rows[-1].set_xlabel("sequence length N")
    figure.legend(*rows[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    return figure, "; ".join(parts) + "."


# Chapter 2


@picture
def rescale_counts(keys, counts_by_name):
    """Plot how often the running maximum has changed against the keys seen.

    keys: positions. counts_by_name: {label: (role, measured means, expected values)}, each over `keys`.
    """
    figure, axes = new_figure()
    for label, (role, measured, expected) in counts_by_name.items():
        style = role_style(role)
        axes.plot(keys, expected, color=style["color"], linestyle=style["linestyle"])
        axes.plot(keys, measured, color=style["color"], marker=style["marker"], linestyle="none", label=label)
    axes.set(xlabel="keys seen", ylabel="changes of m so far", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks(keys[::2], [str(n) for n in keys[::2]])
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="upper left")
    parts = [f"{label}: {v[1][-1]:.1f} measured, {v[2][-1]:.1f} expected" for label, v in counts_by_name.items()]
    alt = (
        "Mean number of changes of the maximum, growing like the logarithm of the keys seen. "
        f"After {keys[-1]} keys, {'; '.join(parts)}."
    )
    return figure, alt


@picture
def merge_orders(leaves, chain, tree):
    """Draw two orders of merging four partial softmaxes. Each argument is a list of (m, l).

    leaves: the four blocks. chain: the merges of 1 with 2, then 3, then 4. tree: 1 with 2, 3 with 4, then both.
    """
    figure, axes = new_figure(figsize=(4.8, 5.6))

    def box(x, y, state, edge):
        style = dict(boxstyle="round,pad=0.35", facecolor="none", edgecolor=edge, linewidth=1.8)
        text = f"m {state[0]:.1f}\nℓ {state[1]:.2f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, bbox=style, linespacing=1.15)

    def draw(title, y, top, nodes, edges):
        """nodes: {name: (x, height above the leaves, state)}; edges: pairs of a lower and an upper name."""
        places = {i: (i, 0, state) for i, state in enumerate(leaves)} | nodes
        for low, high in edges:
            (x, height, _), (x_high, height_high, _) = places[low], places[high]
            axes.plot([x, x_high], [y + height + 0.4, y + height_high - 0.4], color=INK, linewidth=1)
        for name, (x, height, state) in places.items():
            box(x, y + height, state, COLORS["on_chip"] if name in nodes else INK)
        for i in range(len(leaves)):
            axes.text(i, y - 0.65, f"block {i + 1}", ha="center", va="center", fontsize=9, color=INK)
        axes.text(-0.45, y + top, title, fontsize=10, color=INK, va="center")

    staircase = {"a": (0.5, 1.3, chain[0]), "b": (1.25, 2.6, chain[1]), "c": (2.125, 3.9, chain[2])}
    draw("one after another", 4.8, 4.2, staircase, [(0, "a"), (1, "a"), ("a", "b"), (2, "b"), ("b", "c"), (3, "c")])
    pairs = {"a": (0.5, 1.3, tree[0]), "b": (2.5, 1.3, tree[1]), "c": (1.5, 2.6, tree[2])}
    draw("in pairs", 0, 3.0, pairs, [(0, "a"), (1, "a"), (2, "b"), (3, "b"), ("a", "c"), ("b", "c")])
    axes.set(xlim=(-0.5, 3.5), ylim=(-0.9, 9.3))
    axes.axis("off")
    alt = (
        "Two ways to merge four blocks of keys. One after another, a staircase of three merges; in pairs, a tree of "
        f"three merges. Both end with m {chain[-1][0]:.1f} and l {chain[-1][1]:.2f}."
    )
    return figure, alt


# Chapter 3


def _tile_box(axes, x, y, width, height, color=INK, fill=0.0, **kwargs):
    """Draw a rectangle whose outline is the page's ink and whose filling is a colour of a given opacity."""
    look = dict(facecolor=matplotlib.colors.to_rgba(color, fill), edgecolor=INK, linewidth=0.8) | kwargs
    axes.add_patch(matplotlib.patches.Rectangle((x, y), width, height, **look))


@picture
def memory_levels(levels):
    """Draw the memories of a GPU as boxes that widen downwards. levels: [(name, size, who reaches it, role), …]."""
    figure, axes = new_figure(figsize=(4.8, 3.2))
    axes.set(xlim=(0, 10), ylim=(-len(levels), 0.1))
    axes.axis("off")
    for i, (name, size, reach, role) in enumerate(levels):
        width = 5.6 + 4.4 * i / (len(levels) - 1)
        left = (10 - width) / 2
        _tile_box(axes, left, -i - 0.86, width, 0.82, COLORS[role], 0.22)
        axes.text(5, -i - 0.24, f"{name}: {size}", ha="center", va="center", fontsize=11, fontweight="bold")
        axes.text(5, -i - 0.63, reach, ha="center", va="center", fontsize=10)
    listed = "; ".join(f"{name} {size}, {reach}" for name, size, reach, _ in levels)
    return figure, f"The memories of a GPU, from small to large: {listed}."


@picture
def traffic_by_length(seqlens, bytes_by_name):
    """Plot bytes moved against sequence length, both on log scales.

    bytes_by_name: {label: (role, opacity, [bytes, …])}.
    """
    figure, axes = new_figure()
    for label, (role, opacity, values) in bytes_by_name.items():
        axes.plot(seqlens, [value / 1e9 for value in values], label=label, alpha=opacity, **role_style(role))
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="bytes moved (GB)")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(seqlens, [str(n) if i % 2 == 0 else "" for i, n in enumerate(seqlens)])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    ends = "; ".join(f"{label} {values[-1] / 1e9:.3g} GB" for label, (_, _, values) in bytes_by_name.items())
    return figure, f"Bytes moved against sequence length, both on log scales. At N = {seqlens[-1]}: {ends}."


@picture
def error_by_length(seqlens, errors_by_name, tolerance):
    """Plot an error against sequence length beside a fixed tolerance.

    errors_by_name: {label: (role, [measured, …], [predicted, …])}: marks and line.
    """
    figure, axes = new_figure(figsize=(4.8, 3.3))
    for label, (role, measured, predicted) in errors_by_name.items():
        style = role_style(role)
        axes.plot(seqlens, predicted, **(style | {"marker": "none"}))
        axes.plot(seqlens, measured, label=label, **(style | {"linestyle": "none"}))
    axes.axhline(tolerance, color=INK, linewidth=1)
    axes.annotate(f"tolerance {tolerance:g}", (seqlens[0], tolerance), va="top", fontsize=9, color=INK, xytext=(0, -3),
                  textcoords="offset points")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="number of keys N", ylabel="largest error in out")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(seqlens, [str(n) if i % 2 == 0 else "" for i, n in enumerate(seqlens)])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    ends = "; ".join(
        f"{label}: from {m[0]:.2g} at N = {seqlens[0]} to {m[-1]:.1g} at N = {seqlens[-1]}, under the tolerance at "
        f"{sum(x < tolerance for x in m)} of {len(m)} lengths"
        for label, (_, m, _) in errors_by_name.items()
    )
    return figure, f"Largest error against the number of keys, measured on the predicted lines. {ends}."


@picture
def tile_kinds(kinds):
    """Draw the tiles of S by kind. kinds: rows of "full", "cut" or "skipped"."""
    figure, axes = new_figure(figsize=(4.8, 4.2))
    rows, columns = len(kinds), len(kinds[0])
    axes.set(xlim=(-0.5, columns + 0.1), ylim=(rows + 1.2, -0.6), aspect="equal")
    axes.axis("off")
    looks = {
        "full": dict(color=COLORS["flash"], fill=0.55),
        "cut": dict(color=COLORS["standard"], fill=0.35, hatch="///"),
        "skipped": dict(color=INK, fill=0.0),
    }
    for i, row in enumerate(kinds):
        for j, kind in enumerate(row):
            _tile_box(axes, j, i, 1, 1, **looks[kind])
    axes.text(columns / 2, -0.15, "key blocks", ha="center")
    axes.text(-0.12, rows / 2, "query blocks", rotation=90, ha="right", va="center")
    counts = {kind: sum(row.count(kind) for row in kinds) for kind in looks}
    for x, (kind, look) in zip((0, 0.36, 0.68), looks.items(), strict=True):
        _tile_box(axes, x * columns, rows + 0.45, 0.5, 0.5, **look)
        axes.text(x * columns + 0.65, rows + 0.7, f"{kind}: {counts[kind]}", va="center")
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    alt = f"The score matrix in {rows} by {columns} tiles, causal: {listed}; the cut ones lie on the diagonal."
    return figure, alt


# Chapter 4


@picture
def program_grid(n_rows, n_cols, block_m, block_n):
    """Draw a matrix cut into the tiles of a 2-D grid of programs; the cells that a mask keeps out are crossed."""
    grid_m, grid_n = -(-n_rows // block_m), -(-n_cols // block_n)
    figure, axes = new_figure()
    for row in range(grid_m * block_m):
        for col in range(grid_n * block_n):
            style = {"fill": False, "hatch": "xx", "alpha": 0.4}
            if row < n_rows and col < n_cols:
                style = {"facecolor": COLORS["device_memory"], "alpha": 0.35}
            style |= {"edgecolor": INK, "linewidth": 0.4}
            axes.add_patch(matplotlib.patches.Rectangle((col + 0.06, row + 0.06), 0.88, 0.88, **style))
    for i in range(grid_m):
        for j in range(grid_n):
            x, y = j * block_n, i * block_m
            style = {"fill": False, "edgecolor": COLORS["flash"], "linewidth": 2.2}
            axes.add_patch(matplotlib.patches.Rectangle((x, y), block_n, block_m, **style))
            x, y = (x + min(x + block_n, n_cols)) / 2, (y + min(y + block_m, n_rows)) / 2
            axes.text(x, y, f"{i}, {j}", ha="center", va="center", weight="bold", fontsize=12)
    axes.set(xlim=(-0.2, grid_n * block_n + 0.2), ylim=(grid_m * block_m + 0.2, -0.2), aspect="equal")
    axes.axis("off")
    left_out = grid_m * block_m * grid_n * block_n - n_rows * n_cols
    alt = (
        f"A matrix of {n_rows} by {n_cols} elements under a grid of {grid_m} by {grid_n} programs with tiles of "
        f"{block_m} by {block_n}. The last tiles reach past the matrix: {left_out} crossed cells must be masked."
    )
    return figure, alt


@picture
def memory_cells(n_cells, tiles, first=0):
    """Draw a strip of memory for each tile and mark the cells that the tile's pointers hit.

    tiles: {title: (rows, cols, stride_row, stride_col)}, in elements from cell `first`. A marked cell carries the
    (row, col) of the tile's element that points at it; one colour for each row of the tile.
    """
    row_colors = list(COLORS.values())
    figure, axes = new_figure(len(tiles), 1, figsize=(4.8, 0.95 * len(tiles)))
    sentences = []
    for ax, (title, (rows, cols, stride_row, stride_col)) in zip(axes, tiles.items(), strict=True):
        hit = {first + r * stride_row + c * stride_col: (r, c) for r in range(rows) for c in range(cols)}
        for cell in range(n_cells):
            r, c = hit.get(cell, (None, None))
            style = {"fill": False} if r is None else {"facecolor": row_colors[r], "alpha": 0.45}
            ax.add_patch(matplotlib.patches.Rectangle((cell, 0), 1, 1, edgecolor=INK, linewidth=0.6, **style))
            if r is not None:
                ax.text(cell + 0.5, 0.5, f"{r},{c}", ha="center", va="center", fontsize=9)
            ax.text(cell + 0.5, -0.12, str(cell), ha="center", va="top", fontsize=8)
        ax.set(xlim=(-0.1, n_cells + 0.1), ylim=(-0.6, 1.1))
        ax.set_title(title, loc="left", fontsize=10)
        ax.axis("off")
        sentences.append(f"{title}: the tile's rows hit the cells " + "; ".join(
            ", ".join(str(first + r * stride_row + c * stride_col) for c in range(cols)) for r in range(rows)
        ))  # fmt: skip
    return figure, f"Strips of {n_cells} memory cells. " + ". ".join(sentences) + "."


@picture
def head_rows(cases):
    """Draw what a block of channels reads of a row in memory.

    cases: (label, head_dim, block, masked) each, label being two lines. The row starts at 0, the next one at head_dim.
    """
    figure, axes = new_figure(figsize=(4.8, 0.85 * len(cases) + 0.5))
    sentences = []
    for i, (label, head_dim, block, masked) in enumerate(cases):
        read, dropped, over = min(head_dim, block), max(head_dim - block, 0), max(block - head_dim, 0)
        hidden, foreign = {"fill": False, "hatch": "//"}, {"facecolor": COLORS["standard"], "alpha": 0.6}
        parts = [
            (0, read, f"{read} read", {"facecolor": COLORS["flash"], "alpha": 0.5}),
            (head_dim, over, f"{over} masked" if masked else f"{over} next row", hidden if masked else foreign),
            (block, dropped, f"{dropped}\nlost", {"fill": False, "hatch": "xx", "linestyle": "--"}),
        ]
        for start, width, text, style in parts:
            if width:
                style |= {"edgecolor": INK, "linewidth": 0.8}
                axes.add_patch(matplotlib.patches.Rectangle((start, i - 0.28), width, 0.56, **style))
                at, side = (start + width + 2, "left") if "hatch" in style else (start + width / 2, "center")
                axes.text(at, i, text, ha=side, va="center", fontsize=9)
        axes.plot([head_dim, head_dim], [i - 0.42, i + 0.42], color=INK, linewidth=2.2)
        sentences.append(
            f"{label.replace(chr(10), ', ')}: reads {read} of {head_dim} channels, loses {dropped}, "
            f"{'masks' if masked else 'takes in'} {over} behind the row's end"
        )
    axes.set_yticks(range(len(cases)), [label for label, *_ in cases])
    axes.set(xlim=(0, 178), ylim=(len(cases) - 0.45, -0.55), xlabel="channels from the start of the row")
    axes.set_xticks([0, 64, 96, 128])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    return figure, ". ".join(sentences) + "."


# Chapter 5


@picture
def program_map(kinds, program, block_n, seqlen_k):
    """Draw what one program of the forward kernel reads and writes, over the tiles of the score matrix.

    kinds: rows of "full", "cut" or "skipped", one row per query block. program: the row to point out.
    """
    figure, axes = new_figure(figsize=(4.8, 3.9))
    rows, columns = len(kinds), len(kinds[0])
    looks = {
        "full": dict(facecolor=COLORS["flash"], alpha=0.55),
        "cut": dict(facecolor="none", hatch="////", edgecolor=COLORS["standard"]),
        "skipped": dict(facecolor="none", edgecolor=INK, alpha=0.25),
    }
    for row, kinds_of_row in enumerate(kinds):
        for column, kind in enumerate(kinds_of_row):
            axes.add_patch(matplotlib.patches.Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, **looks[kind]))
    visited = [column for column, kind in enumerate(kinds[program]) if kind != "skipped"]
    first, n_tiles = visited[0], len(visited)
    outline = dict(fill=False, edgecolor=INK, linewidth=1.8)
    axes.add_patch(matplotlib.patches.Rectangle((first, program), n_tiles, 1, **outline))
    source = dict(facecolor=COLORS["device_memory"], alpha=0.45)
    axes.add_patch(matplotlib.patches.Rectangle((first + 0.06, -1.25), n_tiles - 0.12, 0.75, **source))
    keys = f"keys {first * block_n} to {min((first + n_tiles) * block_n, seqlen_k) - 1}"
    axes.text(first + n_tiles / 2, -0.87, f"reads K, V: {keys}", ha="center", va="center", fontsize=9)
    for y, text in ((program + 0.3, "reads Q"), (program + 0.72, "writes O, L")):
        axes.text(columns + 0.12, y, text, va="center", fontsize=9)
    for column, kind in enumerate(looks):
        x = 0.1 + column * 2.1
        axes.add_patch(matplotlib.patches.Rectangle((x, rows + 0.35), 0.55, 0.55, **looks[kind]))
        axes.text(x + 0.68, rows + 0.63, kind, va="center", fontsize=9)
    axes.set(xlim=(-0.1, columns + 1.75), ylim=(rows + 1.05, -1.4), aspect="equal")
    axes.axis("off")
    counts = {kind: sum(row.count(kind) for row in kinds) for kind in looks}
    alt = (
        f"A grid of {rows} query blocks by {columns} key blocks: {counts['full']} tiles are full, {counts['cut']} cut "
        f"by an edge of the mask or the last key, {counts['skipped']} skipped. Query block {program} is outlined: its "
        f"program reads its rows of Q, the {keys} of its {n_tiles} tiles, and writes its rows of O and L."
    )
    return figure, alt


@picture
def tile_journey(shared_kib, register_kib):
    """Draw one round of the forward kernel's inner loop: where each tile lies and what moves.

    shared_kib, register_kib: {name: KiB} of the tiles in shared memory (q k v) and in registers (s p acc).
    """
    figure, axes = new_figure(figsize=(4.8, 4.4))
    lanes = {"device memory": (8.2, "device_memory"), "shared memory": (4.9, "on_chip"), "registers": (0, "flash")}
    heights = {"device memory": 1.9, "shared memory": 2.3, "registers": 4.0}
    for name, (y, role) in lanes.items():
        axes.add_patch(matplotlib.patches.Rectangle((0, y), 10, heights[name], facecolor=COLORS[role], alpha=0.13))
        axes.text(4.9, y + heights[name] - 0.12, name, va="top", fontsize=9, color=INK)

    def box(x, y, text, role, width=2.1, height=0.95):
        look = dict(facecolor=COLORS[role], edgecolor=COLORS[role], alpha=0.35)
        axes.add_patch(matplotlib.patches.Rectangle((x, y), width, height, **look))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)

    for x, name in ((0.4, "Q"), (3.5, "K"), (6.9, "V")):
        box(x, 8.4, f"{name} tile", "device_memory")
        box(x, 5.15, f"{name} {shared_kib[name.lower()]:.0f} KiB", "on_chip")
    box(0.4, 2.3, f"S {register_kib['s']:.0f} KiB", "flash")
    box(4.0, 2.3, f"P {register_kib['p']:.0f} KiB", "flash")
    box(0.4, 0.25, "m, ℓ, α", "flash")
    box(6.9, 0.25, f"acc {register_kib['acc']:.0f} KiB", "flash")

    def arrow(start, end, number, where=0.5, dx=0.28):
        axes.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color=INK, linewidth=1.1))
        x, y = (a + (b - a) * where for a, b in zip(start, end, strict=True))
        axes.text(x + dx, y, number, fontsize=9, fontweight="bold", va="center", ha="center")

    arrow((1.45, 8.4), (1.45, 6.1), "0", where=0.35)
    arrow((4.55, 8.4), (4.55, 6.1), "1", where=0.35)
    arrow((7.95, 8.4), (7.95, 6.1), "4", where=0.35)
    arrow((1.2, 5.15), (1.2, 3.25), "2", dx=-0.3)
    arrow((4.2, 5.15), (2.1, 3.25), "2", dx=0.35)
    arrow((2.5, 2.78), (4.0, 2.78), "3", dx=0, where=0.5)
    axes.texts[-1].set_y(3.15)
    arrow((1.2, 2.3), (1.2, 1.2), "3", dx=-0.3)
    arrow((2.5, 0.72), (6.9, 0.72), "α", dx=0)
    axes.texts[-1].set_y(1.08)
    arrow((5.6, 2.3), (7.2, 1.2), "5", dx=-0.35)
    arrow((7.95, 5.15), (7.95, 1.2), "5", where=0.45)
    axes.set(xlim=(0, 10), ylim=(0, 10.2))
    axes.axis("off")
    alt = (
        "Three bands. Tiles of Q, K and V move from device memory to shared memory; Q once, K and V in each round. "
        f"From Q and K in shared memory the score tile S ({register_kib['s']:.0f} KiB) is made in registers, from S "
        f"the probabilities P ({register_kib['p']:.0f} KiB) and the row state m, ℓ, α, and P with V adds to acc "
        f"({register_kib['acc']:.0f} KiB), which α has rescaled. Nothing goes back to device memory in the loop."
    )
    return figure, alt


@picture
def budget_ratios(ratios):
    """Plot error over budget, one row per implementation and one mark per dtype.

    ratios: {implementation: (role, {dtype: ratio})}; an infinite ratio stands at the right edge.
    """
    figure, axes = new_figure(figsize=(4.8, 0.62 * len(ratios) + 1.25))
    marks = {"fp32": "^", "fp16": "s", "bf16": "o"}
    largest = max(ratio for _, by_dtype in ratios.values() for ratio in by_dtype.values() if ratio < float("inf"))
    edge = largest * 30
    for row, (role, by_dtype) in enumerate(ratios.values()):
        for dtype, ratio in by_dtype.items():
            axes.plot(min(ratio, edge), row, marks[dtype], color=COLORS[role], markersize=7, clip_on=False)
            if ratio == float("inf"):
                offset = dict(xytext=(7, 0), textcoords="offset points", annotation_clip=False)
                axes.annotate("∞", (edge, row), va="center", **offset)
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.text(1.15, -0.62, "budget", fontsize=9, va="center")
    for dtype, mark in marks.items():
        axes.plot([], [], mark, color=INK, label=dtype)
    figure.legend(fontsize=9, ncols=3, loc="outside lower center", handletextpad=0.1)
    axes.set(xscale="log", ylim=(len(ratios) - 0.5, -0.9), xlabel="error / budget")
    axes.set_yticks(range(len(ratios)), list(ratios), fontsize=9)
    powers = [power for power in range(0, 10, 2) if 10**power < edge]
    names = ["10" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[power] if power else "1" for power in powers]
    axes.set_xticks([10.0**power for power in powers], names)
    axes.minorticks_off()
    axes.grid(axis="y", visible=False)
    parts = []
    for name, (_, by_dtype) in ratios.items():
        values = (f"{value:.2g} in {dtype}".replace("inf ", "infinite ") for dtype, value in by_dtype.items())
        parts.append(f"{name}: " + ", ".join(values))
    return figure, "Error as a multiple of the budget. " + "; ".join(parts) + "."


# Chapter 6


@picture
def backward_dataflow():
    """Draw forward and backward as two columns: what is in device memory, and what exists one tile at a time."""
    figure, axes = new_figure(figsize=(4.8, 5.2))
    axes.set(xlim=(0, 10), ylim=(0, 10.6))
    axes.axis("off")
    stored = {"Q": (1.0, 9.3), "K": (3.2, 9.3), "V": (0.5, 3.6), "L": (4.2, 5.6), "O": (1.9, 1.9), "dO": (8.6, 1.9)}
    stored |= {"dQ": (5.9, 9.3), "dK": (8.8, 9.3), "dV": (9.4, 4.6), "δ": (5.2, 1.9)}
    tiles = {"S": (1.9, 7.3), "P": (1.9, 5.0), "dP": (6.7, 4.1), "dS": (7.0, 6.7)}
    formulas = {"S": "scale Q Kᵀ", "P": "exp(S − L)", "O": "P V", "dV": "Pᵀ dO", "dP": "dO Vᵀ", "dS": "P ∘ (dP − δ)"}
    formulas |= {"dQ": "scale dS K", "dK": "scale dSᵀ Q", "δ": "rowsum(dO ∘ O)"}
    places = stored | tiles
    for name, (x, y) in places.items():
        color, line = (COLORS["on_chip"], "--") if name in tiles else (COLORS["device_memory"], "-")
        box = dict(boxstyle="round,pad=0.3", fc="none", ec=color, ls=line, lw=1.6)
        text = f"{name}\n{formulas[name]}" if name in formulas else name
        axes.text(x, y, text, ha="center", va="center", bbox=box, fontsize=9, zorder=3)
    arrows = ["Q S", "K S", "S P", "P O", "V O", "S L", "O δ", "dO δ", "dO dP", "δ dS", "dP dS", "dS dQ"]
    arrows += ["dS dK", "dO dV"]
    for start, end in (pair.split() for pair in arrows):
        style = dict(arrowstyle="->", color=INK, lw=1.0, shrinkA=19, shrinkB=44 if end == "δ" else 19)
        axes.annotate("", places[end], places[start], arrowprops=style)
    axes.text(2.2, 10.2, "forward ↓", ha="center", fontsize=10, weight="bold")
    axes.text(7.6, 10.2, "backward ↑", ha="center", fontsize=10, weight="bold")
    axes.text(5, 0.75, "solid: whole, in device memory", ha="center", fontsize=9, color=COLORS["device_memory"])
    axes.text(5, 0.15, "dashed: one tile at a time, on chip", ha="center", fontsize=9, color=COLORS["on_chip"])
    return figure, (
        "Forward: Q and K give S, S gives P and L, P and V give O. Backward: dO and V give dP; O and dO give "
        "delta; P, dP and delta give dS; dS gives dQ with K, dK with Q; P and dO give dV. S, P, dP and dS exist one "
        "tile at a time on chip; Q, K, V, O, L, delta, dO, dQ, dK and dV lie whole in device memory."
    )


@picture
def summation_spread(ulps):
    """Plot how often a sum of the same fp32 numbers, taken in random orders, lands how far from the exact sum.

    ulps: one signed distance for each order, in units of the last place of the sum.
    """
    figure, axes = new_figure()
    counts = {u: list(ulps).count(u) for u in sorted(set(ulps))}
    axes.bar(list(counts), list(counts.values()), width=0.8, color=COLORS["standard"], edgecolor=INK, linewidth=0.5)
    axes.set(xlabel="distance from the exact sum (last-place units)", ylabel="orders of addition")
    axes.xaxis.get_major_locator().set_params(integer=True)
    common = max(counts, key=counts.get)
    return figure, (
        f"Bar chart: {len(ulps)} orders of adding the same fp32 numbers give {len(counts)} different sums, from "
        f"{min(ulps)} to {max(ulps)} units in the last place off the exact sum; the most common distance is {common}, "
        f"in {counts[common]} orders."
    )


@picture
def kept_bytes(seqlens, bytes_by_name):
    """Plot what autograd keeps for the backward pass by sequence length. bytes_by_name: {label: (role, bytes)}."""
    figure, axes = new_figure()
    for label, (role, values) in bytes_by_name.items():
        axes.plot(seqlens, [value / 2**20 for value in values], label=label, **role_style(role))
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="kept for backward (MiB)")
    axes.set_xticks(seqlens, [str(n) for n in seqlens])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    spans = [
        f"{label}: {values[0] / 2**20:.2g} to {values[-1] / 2**20:.2g} MiB"
        for label, (_, values) in bytes_by_name.items()
    ]
    return figure, f"Bytes kept for the backward pass from N={seqlens[0]} to N={seqlens[-1]}. " + "; ".join(spans) + "."


@picture
def matmul_counts(counts):
    """Draw the matrix products of a training step as bars. counts: {label: (forward, backward, computed again)}."""
    figure, axes = new_figure(figsize=(4.8, 3.2))
    labels = list(counts)
    parts = {
        "forward": dict(color=INK, alpha=0.35),
        "backward": dict(color=COLORS["flash"], alpha=0.9),
        "computed again": dict(color=COLORS["standard"], alpha=0.9, hatch="///"),
    }
    left = [0] * len(labels)
    for i, (name, look) in enumerate(parts.items()):
        values = [counts[label][i] for label in labels]
        axes.barh(labels, values, left=left, height=0.6, label=name, edgecolor=INK, linewidth=0.5, **look)
        left = [a + b for a, b in zip(left, values, strict=True)]
    double = 2 * sum(counts[labels[0]])
    axes.axvline(double, color=INK, linewidth=1, linestyle=":")
    axes.text(double - 0.15, -0.45, "twice", ha="right", va="bottom", fontsize=9)
    axes.set(xlabel="matrix products, forward and backward", xlim=(0, double + 0.5))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=3, fontsize=9, handlelength=1.2, columnspacing=1)
    totals = [f"{' '.join(label.split())}: {sum(n)} of which {n[2]} again" for label, n in counts.items()]
    alt = f"Matrix products in one training step. {'; '.join(totals)}. A dotted line marks {double}, twice the first."
    return figure, alt


def _draw_tiles(axes, title, kinds, looks, size=9):
    """Draw a grid of score tiles. kinds: rows of keys of looks, properties of patches. size: of words, in points."""
    for m, row in enumerate(kinds):
        for n, kind in enumerate(row):
            axes.add_patch(matplotlib.patches.Rectangle((n, m), 1, 1, **looks[kind]))
    axes.set(ylim=(len(kinds) + 0.1, -0.9), aspect="equal")
    axes.axis("off")
    axes.set_title(title, fontsize=size + 1)
    axes.text(len(kinds[0]) / 2, -0.2, "key blocks", ha="center", fontsize=size)
    axes.text(-0.2, len(kinds) / 2, "query blocks", va="center", ha="right", rotation=90, fontsize=size)


@picture
def backward_mask_tiles(panels):
    """Draw which score tiles the backward kernels skip, mask and take in full. panels: {title: rows of kinds}."""
    figure, axes_list = new_figure(rows=len(panels), figsize=(4.8, 2.7 * len(panels)))
    looks = {
        "full": dict(fc=COLORS["flash"]),
        "masked": dict(fc=COLORS["standard"], hatch="///"),
        "skipped": dict(fc="none"),
    }
    looks = {kind: look | dict(ec=INK, lw=0.8, alpha=0.55) for kind, look in looks.items()}
    for axes, (title, kinds) in zip(axes_list, panels.items(), strict=True):
        _draw_tiles(axes, title, kinds, looks)
        axes.set(xlim=(-1.2, len(kinds[0]) + 3.4))
        for i, kind in enumerate(("full", "masked", "skipped")):
            corner = (len(kinds[0]) + 0.5, i * 1.3 + 0.8)
            axes.add_patch(matplotlib.patches.Rectangle(corner, 0.8, 0.8, **looks[kind]))
            axes.text(len(kinds[0]) + 1.5, i * 1.3 + 1.2, kind, va="center", fontsize=9)
    counted = {title: sum(row.count("masked") for row in kinds) for title, kinds in panels.items()}
    return figure, "Grids of score tiles. " + "; ".join(f"{title}: {n} masked" for title, n in counted.items()) + "."


# Chapter 7


def _powers_of_ten(axis, powers):
    """Label an axis on a log scale with the given powers of ten."""
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axis.set_ticks([10.0**p for p in powers], [f"10{str(p).translate(digits)}" if p else "1" for p in powers])


@picture
def number_spacing(formats):
    """Plot how far apart neighbouring numbers of each format are. formats: {name: (smallest normal, largest, eps)}."""
    figure, axes = new_figure(figsize=(4.8, 3.6))
    low, high = 2.0**-20, 2.0**20
    for (name, (smallest, largest, eps)), line in zip(formats.items(), ("-", "--", ":"), strict=True):
        # Below the smallest normal number the spacing stays what it is there.
        exponents = range(-20, 20)
        starts = [2.0**e for e in exponents if 2.0**e < largest]
        gaps = [max(x, smallest) * eps for x in starts]
        axes.step([*starts, min(2 * starts[-1], largest, high)], [*gaps, gaps[-1]], where="post", color=INK,
                  linestyle=line, linewidth=1.5, label=name)  # fmt: skip
        if largest < high:
            end = dict(color=COLORS["standard"], markersize=8, linestyle="none", label=f"{name} ends at {largest:.0f}")
            axes.plot(largest, gaps[-1], "X", **end)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="size of the number", ylabel="distance to the next")
    _powers_of_ten(axes.xaxis, range(-6, 7, 2))
    _powers_of_ten(axes.yaxis, range(-12, 5, 4))
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="lower right")
    at_1000 = "; ".join(f"{name} {512 * eps:.2g}" for name, (_, _, eps) in formats.items())
    return figure, (
        "Distance between neighbouring numbers against their size, both on log scales: staircases that double at every "
        f"power of two. At 1000 the distances are: {at_1000}. The staircase of fp16 ends at 65504 and is flat below "
        "0.00006; bf16 lies highest everywhere, fp32 lowest."
    )


@picture
def error_of_product(head_dims, errors_by_way):
    """Plot the relative error of a score against the number of its terms. errors_by_way: {label: (role, errors)}."""
    figure, axes = new_figure(figsize=(4.8, 3.7))
    for label, (role, errors) in errors_by_way.items():
        axes.plot(head_dims, errors, label=label, **role_style(role))
    axes.set(xscale="log", yscale="log", xlabel="head dimension d", ylabel="error / size of a score")
    axes.set_xticks(head_dims, [str(d) for d in head_dims])
    _powers_of_ten(axes.yaxis, range(-8, -1, 2))
    axes.set_ylim(1e-8, 1e-2)
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", fontsize=9)
    ends = "; ".join(f"{label}: {errors[-1]:.0e}" for label, (_, errors) in errors_by_way.items())
    return figure, f"Error of a score relative to its size, against the head dimension. At d = {head_dims[-1]}: {ends}."


@picture
def causes_of_difference(sizes, smallest=1e-8):
    """Draw how far each cause moves the output, one mark a cause. sizes: {cause: (role, relative size)}."""
    figure, axes = new_figure(figsize=(4.8, 0.42 * len(sizes) + 0.9))
    for row, (role, size) in enumerate(sizes.values()):
        style = role_style(role)
        axes.plot([smallest, size], [row, row], color=style["color"], linewidth=3, alpha=0.5)
        axes.plot(size, row, style["marker"], color=style["color"], markersize=8)
    axes.set(xscale="log", xlim=(smallest, 0.1), ylim=(len(sizes) - 0.5, -0.6), xlabel="change / size of the output")
    axes.set_yticks(range(len(sizes)), list(sizes))
    _powers_of_ten(axes.xaxis, range(-8, 0, 2))
    axes.minorticks_off()
    axes.grid(axis="y", visible=False)
    parts = "; ".join(f"{cause} {size:.0e}" for cause, (_, size) in sizes.items())
    return figure, f"Change of the output by each cause alone, relative to its size: {parts}."


@picture
def budget_by_length(seqlens, families, tolerance):
    """Plot the error of right and wrong code against the budget and a fixed tolerance, one panel for each input family.

    families: {title: {"bug": errors, "budget": budgets, "right": errors}}, each over seqlens.
    """
    figure, panels = new_figure(len(families), 1, figsize=(4.8, 2.5 * len(families) + 0.6))
    looks = {
        "bug": ("unmasked padding", role_style("standard")),
        "budget": ("error budget", dict(color=INK, linestyle="-", linewidth=2.2)),
        "right": ("tiled, no bug", role_style("flash")),
    }
    parts = []
    for axes, (title, curves) in zip(panels, families.items(), strict=True):
        for name, (label, look) in looks.items():
            axes.plot(seqlens, curves[name], label=label, **look)
        axes.axhline(tolerance, color=INK, linewidth=1, linestyle=":", label=f"fixed tolerance {tolerance:g}")
        axes.set(xscale="log", yscale="log", ylabel="largest error of out", ylim=(1e-4, 1))
        axes.set_title(title, fontsize=10, loc="left")
        _powers_of_ten(axes.yaxis, range(-4, 1))
        axes.set_xticks(seqlens, [str(n) for n in seqlens])
        axes.minorticks_off()
        over = sum(bug > budget for bug, budget in zip(curves["bug"], curves["budget"], strict=True))
        seen = sum(bug > tolerance for bug in curves["bug"])
        parts.append(
            f"{title}: the bug is over the budget at {over} of {len(seqlens)} lengths, over {tolerance:g} at {seen}; "
            f"at N = {seqlens[-1]} it is {curves['bug'][-1]:.0e}, the budget {curves['budget'][-1]:.0e}, "
            f"right code {curves['right'][-1]:.0e}"
        )
    panels[-1].set_xlabel("number of keys N")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure, "Errors against the number of keys. " + ". ".join(parts) + "."


# Chapter 8


@picture
def alignments(panels):
    """Draw which keys each query sees, one small grid a panel, two beside each other.

    panels: {(title, second line): rows of booleans}; of two neighbours the left one has the colour of the standard.
    """
    heights = [len(rows) + 2.4 for rows in list(panels.values())[::2]]
    figure = Figure(figsize=(4.8, 0.24 * sum(heights)))
    axes_grid = figure.subplots(len(heights), 2, height_ratios=heights)
    for k, (axes, (title, rows)) in enumerate(zip(axes_grid.flat, panels.items(), strict=True)):
        seen = dict(facecolor=COLORS["flash" if k % 2 else "standard"], alpha=0.65)
        for i, j in ((i, j) for i, row in enumerate(rows) for j in range(len(row))):
            look = seen if rows[i][j] else dict(facecolor="none", alpha=0.35)
            axes.add_patch(matplotlib.patches.Rectangle((j, i), 0.92, 0.92, edgecolor=INK, linewidth=0.6, **look))
        axes.text(0, -1.1, title[0], fontsize=10, weight="bold")
        axes.text(0, -0.25, title[1], fontsize=9)
        axes.set(xlim=(-0.2, 8.2), ylim=(len(rows) + 0.2, -2.2), aspect="equal", anchor="NW")
        axes.axis("off")
    counted = [f"{', '.join(title)}: {', '.join(str(sum(row)) for row in rows)}" for title, rows in panels.items()]
    return figure, "Keys that each query sees, from the first query to the last. " + "; ".join(counted) + "."


@picture
def visited_share(seqlens, shares, formulas):
    """Plot the share of tiles that a kernel visits by sequence length, counted (marks) and by formula (lines).

    shares: {label: (role, [share, …])} counted. formulas: {label: [share, …]} for some of the labels.
    """
    figure, axes = new_figure(figsize=(4.8, 3.3))
    for label, (role, values) in shares.items():
        style = role_style(role)
        line = style.pop("linestyle")
        axes.plot(seqlens, values, label=label, linestyle="none", **style)
        if label in formulas:
            axes.plot(seqlens, formulas[label], color=style["color"], linestyle=line)
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="share of tiles visited")
    axes.set_xticks(seqlens, [str(n) for n in seqlens], rotation=45)
    axes.set_yticks([1, 0.5, 0.2, 0.1, 0.05, 0.02], ["100 %", "50 %", "20 %", "10 %", "5 %", "2 %"])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    ends = "; ".join(f"{label}: {values[0]:.1%} to {values[-1]:.1%}" for label, (_, values) in shares.items())
    return figure, f"Share of tiles visited from N={seqlens[0]} to N={seqlens[-1]}, marks on their lines. {ends}."


@picture
def shrink_by_length(seqlens, curves):
    """Plot how much unmasked zero keys shrink an output, by the number of real keys.

    curves: {label: (role, [measured share, …], [share by the formula, …])}.
    """
    figure, axes = new_figure(figsize=(4.8, 3.3))
    for label, (role, measured, predicted) in curves.items():
        style = role_style(role)
        axes.plot(seqlens, predicted, color=style["color"], linestyle=style["linestyle"])
        axes.plot(seqlens, measured, color=style["color"], marker=style["marker"], linestyle="none", label=label)
    axes.set(xscale="log", yscale="log", xlabel="real keys", ylabel="output too small by")
    axes.set_xticks(seqlens, [str(n) for n in seqlens], rotation=45)
    axes.set_yticks([0.5, 0.1, 0.01, 0.001], ["50 %", "10 %", "1 %", "0.1 %"])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    ends = "; ".join(f"{label}: {measured[0]:.2g} to {measured[-1]:.2g}" for label, (_, measured, _) in curves.items())
    return figure, f"Share by which the output shrinks, from {seqlens[0]} to {seqlens[-1]} keys. {ends}."


@picture
def padding_bill(bills):
    """Draw what a ragged batch costs, as multiples of the packed one. bills: {way: {quantity: multiple}}."""
    figure, axes = new_figure(figsize=(4.8, 2.9))
    quantities = list(next(iter(bills.values())))
    looks = [dict(color=COLORS["device_memory"]), dict(color=COLORS["standard"], hatch="///")]
    height = 0.8 / len(quantities)
    for k, (quantity, look) in enumerate(zip(quantities, looks, strict=True)):
        values = [bill[quantity] for bill in bills.values()]
        places = [i - 0.4 + (k + 0.5) * height for i in range(len(bills))]
        bars = axes.barh(places, values, height=height, label=quantity, edgecolor=INK, linewidth=0.5, **look)
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=9, padding=3)
    axes.set_yticks(range(len(bills)), list(bills))
    axes.set(xlabel="multiple of the packed batch", xlim=(0, 1.12 * max(max(x.values()) for x in bills.values())))
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)
    listed = (f"{way}: " + ", ".join(f"{x:.3g} times the {name}" for name, x in bills[way].items()) for way in bills)
    return figure, "What a batch of unequal lengths costs, packed = 1. " + "; ".join(listed) + "."


@picture
def packed_programs(lengths, unused, programs, block):
    """Draw which rows of a pack each program owns, one line a sequence.

    lengths: rows of each sequence. unused: how many rows lie behind the last one. programs: for each program in order
    the number of its sequence (that of the unused rows is one past the last) and its first row.
    """
    figure, axes = new_figure(figsize=(4.8, 2.6))
    total = sum(lengths) + unused
    axes.set(xlim=(-1, total + 1), ylim=(len(lengths) + 0.6, -0.6), xlabel="row of the pack")
    colors, begin, parts, labels = [*COLORS.values()], 0, [], []
    for i, length in enumerate([*lengths, unused]):
        end, is_unused = begin + length, i == len(lengths)
        labels.append("unused rows" if is_unused else f"sequence {i}")
        look = dict(fc="none") if is_unused else dict(fc=colors[i % 4], alpha=0.5)
        owned = {number: start for number, (sequence, start) in enumerate(programs) if sequence == i}
        for number, start in owned.items():
            if start < end:
                place = (start, i - 0.36), min(block, end - start), 0.72
                axes.add_patch(matplotlib.patches.Rectangle(*place, ec=INK, lw=0.9, **look))
                axes.text((start + min(start + block, end)) / 2, i, number, ha="center", va="center", fontsize=9)
        spare = ", ".join(str(number) for number, start in owned.items() if start >= end)
        if spare:
            x, side = (end + 1, "left") if end < total / 2 else (begin - 3, "right")
            axes.text(x, i, f"{spare}: no rows", va="center", ha=side, fontsize=9)
        working = ", ".join(str(number) for number, start in owned.items() if start < end) or "none"
        parts.append(f"{labels[-1]} ({length} rows): {working}" + (f", without rows {spare}" if spare else ""))
        begin = end
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks([0, *[sum(lengths[: i + 1]) for i in range(len(lengths)) if lengths[i] > block]])
    axes.grid(axis="y", visible=False)
    return figure, f"The programs of each packed sequence, blocks of {block}. " + "; ".join(parts) + "."


# Chapter 9


@picture
def block_map(panels, limit_bytes):
    """Draw which blocks a kernel can take: they fit, they spill registers, or their shared memory is too much.

    panels: {title: {block: [(stages, shared bytes, spilled bytes of a thread), …]}}. limit_bytes: of shared memory.
    """
    figure, axes_list = new_figure(rows=len(panels), figsize=(4.8, 2.9 * len(panels)))
    looks = {
        "fits": dict(facecolor=COLORS["flash"], alpha=0.35),
        "spills": dict(facecolor="none", edgecolor=COLORS["standard"], hatch="///", alpha=0.6),
        "does not launch": dict(facecolor="none", edgecolor=INK, linestyle=":"),
    }
    counts = {}
    for axes, (title, blocks) in zip(axes_list, panels.items(), strict=True):
        for row, settings in enumerate(blocks.values()):
            for stages, shared, spilled in settings:
                kind = "does not launch" if shared > limit_bytes else "spills" if spilled else "fits"
                counts[title, kind] = counts.get((title, kind), 0) + 1
                axes.add_patch(matplotlib.patches.Rectangle((stages - 0.46, row - 0.44), 0.92, 0.88, **looks[kind]))
                text = f"{shared / 1024:.0f} KiB" + (f"\n{spilled} B" if kind == "spills" else "")
                axes.text(stages, row, text, ha="center", va="center", fontsize=8, linespacing=1.1)
        axes.set(xlim=(0.5, 4.5), ylim=(len(blocks) - 0.5, -0.5), ylabel="queries × keys")
        axes.set_xticks([1, 2, 3, 4])
        axes.set_yticks(range(len(blocks)), list(blocks))
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(visible=False)
    axes_list[-1].set_xlabel("pipeline stages")
    handles = [matplotlib.patches.Patch(label=kind, **look) for kind, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9)
    parts = [f"{title}: " + ", ".join(f"{counts.get((title, kind), 0)} {kind}" for kind in looks) for title in panels]
    return figure, f"Blocks by stages, {limit_bytes // 1024} KiB of shared memory at most. {'; '.join(parts)}."


@picture
def tuning_road(steps, panels):
    """Plot the time of kernels from step to step.

    panels: {title: {label: (role, [ms or None where it was not measured, …])}}, one time for each of ``steps``.
    """
    figure, axes_list = new_figure(rows=len(panels), figsize=(4.8, 2.4 * len(panels) + 0.6))
    parts = []
    for axes, (title, tracks) in zip(axes_list, panels.items(), strict=True):
        for label, (role, times) in tracks.items():
            known = [i for i, ms in enumerate(times) if ms is not None]
            axes.plot(known, [times[i] for i in known], label=label, **role_style(role))
            spread = ", ".join(f"{times[i]:.3f} ms at {steps[i]}" for i in known)
            parts.append(f"{title}, {label}: {spread}")
        axes.set(ylim=(0, None), ylabel="ms")
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(fontsize=9, loc="lower left")
        axes.set_xticks(range(len(steps)), [])
    axes_list[-1].set_xticks(range(len(steps)), steps, rotation=40, ha="right", rotation_mode="anchor")
    return figure, f"Time of kernels from step to step. {'; '.join(parts)}."


@picture
def host_and_gpu(seqlens, times):
    """Plot the time of short calls, made one by one and replayed as a CUDA graph.

    times: {label: (role, {"call by call": [ms, …], "CUDA graph": [ms, …]})}, one for each of ``seqlens``.
    """
    figure, axes = new_figure(figsize=(4.8, 3.2))
    parts = []
    for label, (role, by_way) in times.items():
        for way, values in by_way.items():
            line = "-" if way == "call by call" else ":"
            axes.plot(seqlens, values, label=f"{label}, {way}", **role_style(role) | {"linestyle": line})
            parts.append(f"{label}, {way}: {values[0]:.3f} ms at N={seqlens[0]}, {values[-1]:.3f} at N={seqlens[-1]}")
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="forward and backward (ms)")
    axes.set_xticks(seqlens, [str(n) for n in seqlens])
    axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes.minorticks_off()
    axes.set_ylim(0.01, 1.5)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=9, loc="outside upper center", ncols=1)
    return figure, "Time of short calls. " + "; ".join(parts) + "."


@picture
def shares_of(peer, shares, limit):
    """Plot how fast one implementation is as a share of another, cell by cell.

    shares: {cell: {pass: (role, share)}}, the same passes in each cell. limit: a line to reach.
    """
    figure, axes = new_figure(figsize=(4.8, 0.3 * len(shares) + 1.2))
    passes = {name: role for name, (role, _) in next(iter(shares.values())).items()}
    for name, role in passes.items():
        values = [by_pass[name][1] for by_pass in shares.values()]
        style = role_style(role) | {"linestyle": "none"}
        axes.plot(values, range(len(shares)), label=name, markersize=7, **style)
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.axvline(limit, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(shares)), list(shares), fontsize=9)
    axes.set(xlim=(0.6, 1.1), ylim=(len(shares) - 0.5, -0.5), xlabel=f"speed as a share of {peer}'s")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=9, loc="outside upper center", ncols=2)
    parts = [f"{cell}: " + ", ".join(f"{name} {share:.2f}" for name, (_, share) in by_pass.items())
             for cell, by_pass in shares.items()]  # fmt: skip
    return figure, f"Speed as a share of {peer}'s, with lines at 1 and {limit:g}. {'; '.join(parts)}."


# Chapter 10


@picture
def error_maps(maps):
    """Draw where results are wrong, rows of queries by columns. maps: {title: rows of 0 right, 1 off, 2 NaN}."""
    lines = -(-len(maps) // 3)
    figure, grid = new_figure(rows=lines, columns=3, figsize=(5.4, 2.7 * lines + 0.4))
    looks = {
        1: dict(fc=COLORS["standard"], ec=COLORS["standard"], lw=0.5),  # no seams between rows
        2: dict(fc=COLORS["device_memory"], ec=INK, lw=0, hatch="xxx"),
    }
    for axes, (title, rows) in zip(grid.flat, maps.items(), strict=True):
        for m, row in enumerate(rows):
            start = 0
            for kind, run in itertools.groupby(row):
                stop = start + len(list(run))
                if kind:
                    box = (start, m), stop - start, 1
                    axes.add_patch(matplotlib.patches.Rectangle(*box, **looks[kind]))
                start = stop
        axes.set(xlim=(0, len(rows[0])), ylim=(len(rows), 0), xticks=[0, 16], yticks=[0, 32], title=title)
        axes.title.set_size(10)
        axes.spines[["top", "right"]].set_visible(True)
        axes.grid(visible=False)
    for axes in grid.flat[-3:]:
        axes.set_xlabel("column", fontsize=9)
    for axes in grid.flat[::3]:
        axes.set_ylabel("row", fontsize=9)
    handles = [matplotlib.patches.Patch(label=label, **looks[kind]) for kind, label in ((1, "off"), (2, "NaN"))]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=9)
    counted = []
    for title, rows in maps.items():
        kinds = [kind for row in rows for kind in row]
        counted.append(f"{title}: {kinds.count(1)} off, {kinds.count(2)} NaN of {len(kinds)}")
    return figure, "Maps of the wrong elements of a result. " + "; ".join(counted) + "."


@picture
def shared_and_spills(stages, shared_bytes, limit, spills):
    """Plot what a block takes against stages: above shared memory and its limit, below spills of registers.

    stages: numbers of stages. shared_bytes: of a block. limit: (label, bytes).
    spills: {label: (role, [bytes of a thread, …])}.
    """
    figure, (above, below) = new_figure(rows=2, figsize=(4.8, 4.4))
    name, limit_bytes = limit
    for x, size in zip(stages, shared_bytes, strict=True):
        fails = size > limit_bytes
        color = COLORS["standard" if fails else "on_chip"]
        above.bar(x, size / 1024, width=0.6, edgecolor=INK, linewidth=0.5, alpha=0.7, color=color)
        above.text(x, 8, f"{size / 1024:.0f}", ha="center", va="bottom", fontsize=9)
        if fails:
            above.text(x, size / 1024 + 8, "launch fails", ha="center", va="bottom", fontsize=9)
    above.axhline(limit_bytes / 1024, color=INK, linewidth=1, linestyle=":")
    above.text(stages[0] - 0.45, limit_bytes / 1024 + 6, f"{name}: {limit_bytes / 1024:.0f} KiB", fontsize=9)
    above.set(ylabel="shared memory\n(KiB a block)", xticks=stages, ylim=(0, max(shared_bytes) / 1024 * 1.35))
    for label, (role, values) in spills.items():
        below.plot(stages, values, label=label, **role_style(role))
    most = max(max(values) for _, values in spills.values())
    below.set(
        xlabel="stages", ylabel="spilled registers\n(bytes a thread)", xticks=stages, ylim=(-most * 0.08, most * 1.2)
    )
    below.legend(fontsize=9, loc="center right")
    sizes = ", ".join(f"{size / 1024:.0f}" for size in shared_bytes)
    lines = "; ".join(f"{label}: {', '.join(map(str, values))} bytes" for label, (_, values) in spills.items())
    alt = f"For {stages[0]} to {stages[-1]} stages, shared memory of {sizes} KiB, limit {limit_bytes / 1024:.0f} KiB"
    return figure, f"{alt}; spilled registers: {lines}."


# Chapter 11


class Table:
    """A table of text as HTML that scrolls sideways on a phone; in a terminal, lines of text."""

    def __init__(self, header, rows, caption):
        self.header, self.rows, self.caption = header, [[str(cell) for cell in row] for row in rows], caption

    def __repr__(self):
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.caption, *text])

    def _repr_html_(self):
        def cells(tag, line, scope=""):
            return "".join(f"<{tag}{scope}>{html.escape(cell)}</{tag}>" for cell in line)

        head = cells("th", self.header, ' scope="col"')
        lines = [cells("th", row[:1], ' scope="row"') + cells("td", row[1:]) for row in self.rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        caption = html.escape(self.caption)
        return (
            f'<div role="region" aria-label="{caption}" tabindex="0" style="overflow-x:auto">'
            f'<table class="table"><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )


def _gigabytes(cell):
    return f"over {cell['out_of_memory'] / 1e9:.0f}" if "out_of_memory" in cell else f"{cell['peak_bytes'] / 1e9:.1f}"


def article_table(ours, article, caption):
    """Set measured memory and speed of training beside the article's.

    ours: {label: {N: {"peak_bytes": bytes, "tokens_per_s": number} or {"out_of_memory": bytes}}}.
    article: {label: {N: (GB or None, tokens/s or None)}}. Returns a Table with a row for each N.
    """
    seqlens = sorted({n for cells in (*ours.values(), *article.values()) for n in cells})
    header = ["N", *(f"{label}, {unit}" for label in (*ours, *article) for unit in ("GB", "tokens/s"))]
    rows = []
    for n in seqlens:
        row = [f"{n:,}"]
        for cells in ours.values():
            cell = cells.get(n)
            row += (
                [_gigabytes(cell), f"{cell['tokens_per_s']:,.0f}" if "tokens_per_s" in cell else "–"]
                if cell
                else ["–", "–"]
            )
        for cells in article.values():
            gigabytes, rate = cells.get(n, ("–", None))
            row += ["out of memory" if gigabytes is None else str(gigabytes), "–" if rate is None else f"{rate:,}"]
        rows.append(row)
    return Table(header, rows, caption)


@picture
def beside_article(panels):
    """Plot what was measured beside what the article says, against sequence length on log scales.

    panels: {label of the y axis: {label: (role, "measured" or "article", {N: value})}}, in the same labels.
    """
    figure = Figure(figsize=(4.8, 2.7 * len(panels) + 0.6))
    axes_list = figure.subplots(len(panels), squeeze=False)
    parts = []
    for axes, (quantity, curves) in zip(axes_list.flat, panels.items(), strict=True):
        for label, (role, kind, values) in curves.items():
            style = role_style(role) if kind == "measured" else role_style(role) | {"linestyle": "none"}
            hollow = {} if kind == "measured" else {"markerfacecolor": "none", "markersize": 8}
            axes.plot(list(values), list(values.values()), label=label, **style, **hollow)
            parts.append(f"{quantity}, {label}: " + ", ".join(f"{value:.3g} at N={n}" for n, value in values.items()))
        seqlens = sorted({n for _, _, values in curves.values() for n in values})
        axes.set(xscale="log", yscale="log", ylabel=quantity)
        axes.set_xticks(seqlens, [str(n) for n in seqlens], rotation=45)
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.minorticks_off()
    axes_list.flat[-1].set_xlabel("sequence length N")
    handles = axes_list.flat[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, fontsize=9)
    return figure, "; ".join(parts) + "."


@picture
def memory_split(bars, limits=None):
    """Draw what the peak memory of a training step consists of, a bar each.

    bars: {label: {part: bytes}}, with parts weights, optimizer, attention, activations, logits, temporary, or some.
    limits: {label: bytes}, vertical lines for the memory of GPUs.
    """
    looks = {
        "weights": {"color": INK, "alpha": 0.6},
        "optimizer": {"color": INK, "alpha": 0.3},
        "attention": {"color": COLORS["standard"]},
        "activations": {"facecolor": "none", "edgecolor": COLORS["device_memory"], "hatch": "///"},
        "logits": {"color": COLORS["device_memory"], "alpha": 0.7},
        "temporary": {"facecolor": "none", "edgecolor": INK, "hatch": "xx", "alpha": 0.5},
    }
    names = {"attention": "kept by attention", "activations": "other activations", "logits": "logits and loss"}
    figure, axes = new_figure(figsize=(4.8, 0.36 * len(bars) + 1.5))
    parts, shown = [], set()
    for i, (label, sizes) in enumerate(bars.items()):
        left = 0
        for part, look in looks.items():
            if sizes.get(part):
                name = None if part in shown else names.get(part, part)
                shown.add(part)
                axes.barh(i, sizes[part] / 1e9, 0.66, left, label=name, linewidth=0.8, **look)
                left += sizes[part] / 1e9
        axes.text(left, i, f" {left:.3g}", va="center", fontsize=9)
        listed = ", ".join(f"{names.get(part, part)} {sizes[part] / 1e9:.3g}" for part in looks if sizes.get(part))
        parts.append(f"{label} {left:.3g} GB: {listed}")
    for label, size in (limits or {}).items():
        axes.axvline(size / 1e9, color=INK, linewidth=1, linestyle=":")
        axes.text(size / 1e9, -0.62, label, ha="right", va="bottom", fontsize=8)
    most = max([sum(sizes.values()) for sizes in bars.values()] + list((limits or {}).values()))
    axes.set(xlim=(0, 1.12 * most / 1e9), ylim=(len(bars) - 0.5, -0.5), xlabel="peak memory (GB)")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_axisbelow(True)
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure, "Peak memory by parts. " + "; ".join(parts) + "."


@picture
def training_curves(curves, yardstick, band):
    """Plot loss curves that should coincide, and below how far each is from the first.

    curves: {label: (role, {step: loss})}; the first is the one the others are held to. yardstick: (label, {step:
    loss}), a run that is meant to differ. band: how far from the first the others may be, in nats.
    """
    figure = Figure(figsize=(4.8, 5.2))
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    first = next(iter(curves.values()))[1]
    looks = ("-", "--", "-.", ":", (0, (1, 3)))
    name, other = yardstick
    above.plot(list(other), list(other.values()), color=INK, alpha=0.45, linewidth=1.2, label=name)
    below.plot(list(other), [abs(other[n] - first[n]) for n in other], color=INK, alpha=0.45, linewidth=1.2)
    parts = []
    for (label, (role, losses)), line in zip(curves.items(), itertools.cycle(looks)):
        look = dict(color=COLORS[role], linestyle=line)
        above.plot(list(losses), list(losses.values()), label=label, **look)
        if losses is not first:
            gaps = [abs(losses[n] - first[n]) for n in losses]
            below.plot(list(losses), gaps, **look)
            parts.append(f"{label} at most {max(gaps):.2g} nats away")
    below.axhline(band, color=INK, linewidth=1, linestyle=":")
    below.annotate("band", (max(first), band), (0, 3), textcoords="offset points", ha="right", fontsize=9)
    above.set(ylabel="loss (nats a byte)")
    below.set(yscale="log", xlabel="step", ylabel=f"away from\n{next(iter(curves))} (nats)")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    ends = f"from {next(iter(first.values())):.2f} to {list(first.values())[-1]:.2f} nats in {max(first)} steps"
    farthest = max(abs(other[n] - first[n]) for n in other)
    return figure, (
        f"Loss curves, {next(iter(curves))} {ends}. From it {', '.join(parts)}; {name} {farthest:.2g}. "
        f"The band is {band:.2g}."
    )


@picture
def crossovers(panels):
    """Plot how many times as fast as standard attention another one is, against sequence length.

    panels: {title: {label: (role, line style, {N: time of standard over time of the other})}}.
    """
    figure = Figure(figsize=(4.8, 2.2 * len(panels) + 0.9))
    axes_list = figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)
    ratios = [ratio for curves in panels.values() for *_, by_length in curves.values() for ratio in by_length.values()]
    ticks = [tick for tick in (2.0**i for i in range(-6, 9)) if min(ratios) <= tick <= max(ratios)]
    parts = []
    for axes, (title, curves) in zip(axes_list.flat, panels.items(), strict=True):
        axes.axhline(1, color=INK, linewidth=1)
        for label, (role, line, by_length) in curves.items():
            axes.plot(list(by_length), list(by_length.values()), label=label, **role_style(role) | {"linestyle": line})
            seen = ", ".join(f"{ratio:.2f} at N={n}" for n, ratio in by_length.items())
            parts.append(f"{title}, {label}: {seen}")
        seqlens = sorted({n for *_, by_length in curves.values() for n in by_length})
        axes.set(xscale="log", yscale="log", ylabel="times as fast")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xticks(seqlens, [str(n) for n in seqlens], rotation=45)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes_list.flat[-1].set_xlabel("sequence length N")
    figure.legend(*axes_list.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    return figure, "Speed relative to standard attention. " + "; ".join(parts) + "."


# Chapter 12


@picture
def ring_steps(held):
    """Draw which rank's K and V each rank holds in each step; the share of rank 0 is shaded, and arrows follow it.

    held: [[whose share rank r holds in step 0, in step 1, …] for each rank r].
    """
    n_ranks, n_steps = len(held), len(held[0])
    figure, axes = new_figure(figsize=(4.8, 0.62 * n_ranks + 0.9))
    followed = []
    for rank, row in enumerate(held):
        for step, source in enumerate(row):
            color = COLORS["flash"] if source == 0 else "none"
            place = (step - 0.32, rank - 0.3)
            axes.add_patch(matplotlib.patches.Rectangle(place, 0.64, 0.6, fc="none", ec=INK, lw=0.8))
            axes.add_patch(matplotlib.patches.Rectangle(place, 0.64, 0.6, fc=color, alpha=0.45, lw=0))
            axes.text(step, rank, f"K, V of {source}", ha="center", va="center", fontsize=9)
            followed += [(step, rank)] if source == 0 else []
    for (x0, y0), (x1, y1) in itertools.pairwise(sorted(followed)):
        axes.annotate(
            "", (x1 - 0.32, y1), (x0 + 0.32, y0), arrowprops=dict(arrowstyle="->", color=COLORS["flash"], lw=1.5)
        )
    axes.set_xticks(range(n_steps), [f"step {step}" for step in range(n_steps)])
    axes.set_yticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)])
    axes.set(xlim=(-0.5, n_steps - 0.5), ylim=(n_ranks - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    rows = "; ".join(f"rank {rank} holds those of {', '.join(map(str, row))}" for rank, row in enumerate(held))
    return figure, f"Whose K and V each rank holds, step by step: {rows}."


@picture
def ring_memory(ranks, bytes_by_name, alt):
    """Plot the bytes a rank holds against the number of ranks, both on log scales.

    bytes_by_name: {label: (role, [bytes for each number of ranks])}.
    """
    figure, axes = new_figure()
    for label, (role, values) in bytes_by_name.items():
        axes.plot(ranks, [value / 2**30 for value in values], label=label, **role_style(role))
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="peak memory of a rank (GiB)")
    axes.set_xticks(ranks, [str(n) for n in ranks])
    highest = max(value for _, values in bytes_by_name.values() for value in values) / 2**30
    ticks = [2**i for i in range(-3, 8) if 2**i <= 2 * highest]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    return figure, alt


# Chapter 13


@picture
def cache_by_length(seqlens, bytes_by_name, levels):
    """Plot the bytes of a sequence's keys and values against its length, both on log scales.

    bytes_by_name: {label: (role, [bytes for each length])}. levels: {label: bytes} drawn as horizontal lines.
    """
    figure, axes = new_figure()
    for label, (role, values) in bytes_by_name.items():
        axes.plot(seqlens, [value / 2**30 for value in values], label=label, **role_style(role))
    for label, level in levels.items():
        axes.axhline(level / 2**30, color=INK, linewidth=1, linestyle=":")
        axes.annotate(label, (seqlens[0], level / 2**30), (0, 3), textcoords="offset points", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="keys and values (GiB)")
    axes.set_xticks(seqlens[::2], [f"{n // 1024}k" for n in seqlens[::2]])
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="lower right")
    ends = "; ".join(
        f"{label}: {values[0] / 2**30:.3g} to {values[-1] / 2**30:.3g}" for label, (_, values) in bytes_by_name.items()
    )
    lines = "; ".join(f"{label} {level / 2**30:.3g}" for label, level in levels.items())
    return figure, f"GiB of keys and values from {seqlens[0]} to {seqlens[-1]} tokens. {ends}. Lines: {lines}."


@picture
def waste_by_page_size(page_sizes, waste, half_a_page, reserved):
    """Plot the share of allocated memory that holds no token against the page size.

    waste, half_a_page: what was counted, and what half a page a sequence would be. reserved: the share of memory that
    is reserved up to the longest length.
    """
    figure, axes = new_figure()
    axes.axhline(reserved, color=COLORS["standard"], label="room for the longest, reserved")
    axes.plot(page_sizes, waste, label="pages, counted", **role_style("flash"))
    axes.plot(page_sizes, half_a_page, color=INK, linewidth=1, linestyle=":", label="half a page a sequence")
    axes.set(xscale="log", ylim=(0, 1), xlabel="tokens of a page", ylabel="share that holds no token")
    axes.set_xticks(page_sizes, [str(size) for size in page_sizes])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.minorticks_off()
    axes.legend(fontsize=9, loc="center left")
    counted = ", ".join(f"{share:.1%} with {size}" for size, share in zip(page_sizes, waste, strict=True))
    return figure, f"Memory without tokens: {reserved:.0%} where the longest length is reserved; in pages {counted}."


@picture
def decode_times(cells, limits):
    """Draw, for each cell, the time of a plain read over that of decoding, and the same for the fastest other.

    cells: {label: (share of the package, share of the fastest other or None)}. limits: {label of a cell: its limit}.
    """
    figure, axes = new_figure(figsize=(4.8, 0.42 * len(cells) + 1.2))
    names = {"package": "flash", "fastest other": "standard"}
    for i, shares in enumerate(cells.values()):
        for (name, role), share, shift in zip(names.items(), shares, (-0.18, 0.18), strict=True):
            if share is not None:
                axes.barh(i + shift, share, 0.34, color=COLORS[role], alpha=0.8, label=None if i else name)
    for label, limit in limits.items():
        i = list(cells).index(label)
        axes.plot([limit, limit], [i - 0.45, i + 0.45], color=INK, linewidth=1.6)
    axes.axvline(1, color=INK, linewidth=1, linestyle=":")
    axes.set(ylim=(len(cells) - 0.4, -0.6), xlabel="time of a plain read of K and V / time")
    axes.set_yticks(range(len(cells)), list(cells))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)
    told = "; ".join(
        f"{label} {ours:.2f}" + ("" if other is None else f", fastest other {other:.2f}")
        for label, (ours, other) in cells.items()
    )
    return figure, f"Time of a plain read of the same bytes over time of decoding: {told}."


# Chapter 14


@picture
def log_lines(x, values_by_name, xlabel, ylabel, alt):
    """Plot lines over numbers x, in powers of 2, and in powers of 10. values_by_name: {label: (role, [value, …])}."""
    figure, axes = new_figure()
    for label, (role, values) in values_by_name.items():
        axes.plot(x, values, label=label, **role_style(role) | {"marker": "none"})
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.minorticks_off()
    axes.legend(fontsize=9)
    return figure, alt


@picture
def bars_by_shape(ms_by_shape, alt, unit="ms"):
    """Plot times as bars, a panel for each shape. ms_by_shape: {title: {label: (role, time)}}."""
    n_bars = max(map(len, ms_by_shape.values()))
    figure, panels = new_figure(len(ms_by_shape), 1, figsize=(4.8, len(ms_by_shape) * (0.26 * n_bars + 0.55)))
    for axes, (title, times) in zip(panels if len(ms_by_shape) > 1 else [panels], ms_by_shape.items(), strict=True):
        for row, (role, ms) in enumerate(times.values()):
            axes.barh(row, ms, height=0.62, color=COLORS[role])
            axes.text(ms, row, f" {ms:.4g}", va="center", fontsize=8)
        axes.set_yticks(range(len(times)), times, fontsize=9)
        axes.set_title(title, fontsize=10, loc="left")
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.margins(x=0.14)
    axes.set_xlabel(unit)
    return figure, alt


# Chapter 15


@picture
def kinds_of_tiles(panels):
    """Draw full, partial and empty tiles, two grids beside each other. panels: {title: rows of 0, 1 and 2}."""
    figure, axes_list = new_figure(columns=len(panels), figsize=(4.8, 3.0))
    looks = {2: dict(fc=COLORS["flash"]), 1: dict(fc=COLORS["standard"], hatch="///"), 0: dict(fc="none")}
    looks = {kind: look | dict(ec=INK, lw=0.6, alpha=0.55) for kind, look in looks.items()}
    names = {2: "full", 1: "partial", 0: "empty"}
    for axes, (title, kinds) in zip(axes_list, panels.items(), strict=True):
        _draw_tiles(axes, title, kinds, looks, size=8)
        axes.set(xlim=(-0.6, len(kinds[0]) + 0.1))
    handles = [matplotlib.patches.Patch(label=names[kind], **looks[kind]) for kind in (2, 1, 0)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    counted = []
    for title, kinds in panels.items():
        numbers = ", ".join(f"{sum(row.count(kind) for row in kinds)} {names[kind]}" for kind in (2, 1, 0))
        counted.append(f"{title}: {numbers}")
    return figure, f"Grids of tiles. {'; '.join(counted)}."


@picture
def tiles_by_length(seqlens, counts, alt):
    """Plot numbers of tiles or scores against the sequence length, both on log scales. counts: {label: (role, [n])}."""
    figure, axes = new_figure()
    for label, (role, values) in counts.items():
        axes.plot(seqlens, values, label=label, **role_style(role))
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="scores computed")
    axes.set_xticks(seqlens, [f"{n // 1024}k" for n in seqlens])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure, alt


@picture
def time_by_density(panels):
    """Plot times of masks against the share of tiles computed, beside the dense time times that share.

    panels: {title: (ms of dense attention, {name of an implementation: {density: ms}})}.
    """
    figure, axes_list = new_figure(columns=len(panels), figsize=(4.8, 2.8))
    roles = {"flashattn": "flash", "flex": "standard"}
    said = []
    for axes, (title, (dense_ms, times)) in zip(axes_list, panels.items(), strict=True):
        densities = sorted({density for found in times.values() for density in found})
        axes.plot(densities, [dense_ms * x for x in densities], color=INK, lw=0.9, label="dense × share")
        for impl, found in times.items():
            axes.plot(sorted(found), [found[x] for x in sorted(found)], label=impl, **role_style(roles[impl]))
            said.append(f"{title}, {impl}: " + ", ".join(f"{found[x]:.3g} ms at {x:.0%}" for x in sorted(found)))
        axes.set(xscale="log", yscale="log", xlabel="share of tiles", ylabel="time (ms)")
        axes.set_title(title, fontsize=9)
        axes.set_xticks(densities, [f"{x:.0%}" for x in densities], rotation=45)
        axes.minorticks_off()
    axes_list[0].legend(fontsize=8)
    return figure, "Time against the share of tiles computed. " + "; ".join(said) + "."


# Chapter 16


@picture
def backward_products():
    """Draw one step of the backward pass in one kernel: its five products, and what lies between them."""
    figure, axes = new_figure(figsize=(4.8, 4.6))
    looks = {
        "product": dict(fc=COLORS["flash"], alpha=0.3),
        "cores": dict(fc=COLORS["on_chip"], alpha=0.3, hatch="//"),
        "memory": dict(fc=COLORS["device_memory"], alpha=0.3, hatch=".."),
    }
    boxes = {  # name: (x, y, text, look)
        "s": (1, 4, "1  Sᵀ = K Qᵀ", "product"),
        "dp": (3, 4, "2  dPᵀ = V dOᵀ", "product"),
        "p": (1, 3, "Pᵀ = 2^(Sᵀ·factor − lse)", "cores"),
        "ds": (3, 3, "dSᵀ = Pᵀ (dPᵀ − δ)", "cores"),
        "dv": (1, 2, "3  dV += Pᵀ dO", "product"),
        "dk": (3, 2, "4  dK += dSᵀ Q", "product"),
        "dq": (3, 1, "5  dQ = dS K", "product"),
        "sum": (1, 1, "dQ in device memory:\nadded by the copy unit", "memory"),
    }
    for x, y, text, look in boxes.values():
        shape = matplotlib.patches.Rectangle((x - 0.92, y - 0.3), 1.84, 0.6, ec=INK, lw=0.8, **looks[look])
        axes.add_patch(shape)
        axes.text(x, y, text, ha="center", va="center", fontsize=8.5)
    arrows = [("s", "p"), ("dp", "ds"), ("p", "dv"), ("ds", "dk"), ("p", "ds"), ("dq", "sum")]
    for begin, end in arrows:
        (x1, y1, *_), (x2, y2, *_) = boxes[begin], boxes[end]
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        axes.annotate(
            "",
            (x2 - 0.92 * dx, y2 - 0.3 * dy),
            (x1 + 0.92 * dx, y1 + 0.3 * dy),
            arrowprops=dict(arrowstyle="->", color=INK, shrinkA=0, shrinkB=0),
        )
    axes.plot([3.92, 4.15, 4.15], [3, 3, 1], color=INK, lw=1)
    axes.annotate("", (3.92, 1), (4.15, 1), arrowprops=dict(arrowstyle="->", color=INK, shrinkA=0, shrinkB=0))
    axes.text(4.2, 2, "through shared memory, from both groups", rotation=270, va="center", fontsize=8)
    axes.set(xlim=(0, 4.5), ylim=(0.5, 4.5))
    axes.axis("off")
    names = {"product": "matrix units", "cores": "ordinary cores", "memory": "device memory"}
    handles = [matplotlib.patches.Patch(label=names[look], ec=INK, **style) for look, style in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    return figure, (
        "One step of the backward pass. Products 1 and 2 give S and dP, transposed; the ordinary cores make P and dS "
        "of them. Product 3 adds P times dO to dV, product 4 adds dS times Q to dK. dS goes through shared memory, "
        "where both groups' keys meet, to product 5, dQ, which the copy unit adds to a sum in device memory."
    )

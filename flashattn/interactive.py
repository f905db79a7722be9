"""The drawings of the interactive figures, for :func:`flashattn.explorer.explore`. They compute no attention.

A figure has hundreds of frames, so these functions write their SVG by hand: it takes microseconds, and two frames share
most of their elements. Each takes the data of its figure, then the reader's settings, and returns (SVG, sentence).
"""

import html
import itertools
import math

import numpy as np

from . import cost
from .figures import COLORS
from .splits import MERGE_TILES, choose_splits, waves

WIDTH = 360  # of every drawing, in the unit of its font sizes; a phone shows it about one to one
YES_NO = ("no", "yes")
SIZE_STEPS = {"GB": 1e9, "MB": 1e6, "KB": 1e3}


def size_text(n_bytes):
    """Return bytes as text in powers of 10 with two or three significant digits."""
    unit = next((unit for unit, step in SIZE_STEPS.items() if n_bytes >= step), "KB")
    value = n_bytes / SIZE_STEPS[unit]
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def _svg(height, parts, sentence):
    look = "width:100%;max-width:540px;height:auto;fill:currentColor;font-size:11px;font-family:inherit"
    head = f'<svg role="img" aria-label="{html.escape(sentence)}" viewBox="0 0 {WIDTH} {height}" style="{look}">'
    return "\n".join([head, *parts, "</svg>"]), sentence


def _n(value):
    return f"{value:.1f}".removesuffix(".0")


def _text(x, y, text, anchor="start", bold=False, size=None, turn=False):
    more = (' font-weight="bold"' if bold else "") + (f' font-size="{size}"' if size else "")
    more += f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turn else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{more}>{html.escape(str(text))}</text>'


def _box(x, y, width, height, role=None, fill=0.0, edge=0.8, dashed=False, cut=False):
    """Draw a rectangle with an outline of the page's ink; cut adds strokes that tell it apart without colour."""
    color = COLORS[role] if role else "currentColor"
    dash = ' stroke-dasharray="3 2"' if dashed else ""
    box = (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{color}" '
        f'fill-opacity="{fill:g}" stroke="currentColor" stroke-width="{edge:g}" stroke-opacity="0.7"{dash}/>'
    )
    if not cut:
        return box
    strokes = "".join(
        f"M{_n(x + width * a)} {_n(y + height)}L{_n(x + width)} {_n(y + height * a)}"
        f"M{_n(x)} {_n(y + height * (1 - a))}L{_n(x + width * (1 - a))} {_n(y)}"
        for a in (0, 0.5)
    )
    return box + f'\n<path d="{strokes}" stroke="{color}" stroke-width="1.2" fill="none"/>'


def _line(x1, y1, x2, y2, color="currentColor", width=1, dash=None, opacity=1):
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    opacity = f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width:g}"{dash}{opacity}/>'


def _mark(x, y, role, size=4, hollow=False):
    """Draw a role's marker: a disc for standard, a square for flash, a triangle on chip, a diamond in device memory."""
    color, s = COLORS[role], size
    fill = f'fill="{"none" if hollow else color}" stroke="{color}" stroke-width="1.5"'
    if role == "standard":
        return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{s}" {fill}/>'
    corners = {
        "flash": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "on_chip": [(0, -s), (s, s), (-s, s)],
        "device_memory": [(0, -s), (s, 0), (0, s), (-s, 0)],
    }[role]
    return f'<polygon points="{" ".join(f"{_n(x + a)},{_n(y + b)}" for a, b in corners)}" {fill}/>'


class _Plot:
    """Axes in a rectangle: maps data to places, clips to the limits, and collects what is drawn in `parts`."""

    def __init__(self, left, top, right, bottom, xlim, ylim, log_x=False, log_y=False):
        self.left, self.top, self.right, self.bottom = left, top, right, bottom
        self.log_x, self.log_y = log_x, log_y
        self.xlim, self.ylim = self._scaled(xlim, log_x), self._scaled(ylim, log_y)
        self.parts = [_line(left, bottom, right, bottom), _line(left, bottom, left, top)]

    @staticmethod
    def _scaled(values, log):
        return [math.log10(value) for value in values] if log else list(values)

    def x(self, value):
        low, high = self.xlim
        share = ((math.log10(value) if self.log_x else value) - low) / (high - low)
        return self.left + (self.right - self.left) * min(max(share, 0), 1)

    def y(self, value):
        low, high = self.ylim
        share = ((math.log10(value) if self.log_y else value) - low) / (high - low)
        return self.bottom - (self.bottom - self.top) * min(max(share, 0), 1)

    def ticks(self, x=None, y=None, xlabel="", ylabel=""):
        """Draw ticks, {value: text} each, with faint lines across for y."""
        for value, text in (x or {}).items():
            self.parts += [_line(self.x(value), self.bottom, self.x(value), self.bottom + 3)]
            self.parts += [_text(self.x(value), self.bottom + 13, text, "middle", size=10)]
        for value, text in (y or {}).items():
            self.parts += [_line(self.left, self.y(value), self.right, self.y(value), width=0.5, opacity=0.25)]
            self.parts += [_text(self.left - 4, self.y(value) + 3.5, text, "end", size=10)]
        if xlabel:
            self.parts.append(_text((self.left + self.right) / 2, self.bottom + 26, xlabel, "middle"))
        if ylabel:
            self.parts.append(_text(11, (self.top + self.bottom) / 2, ylabel, "middle", turn=True))

    def curve(self, xs, ys, color, width=1.8, dash=None):
        points = " ".join(f"{_n(self.x(x))},{_n(self.y(y))}" for x, y in zip(xs, ys, strict=True))
        dash = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}/>')


# W1, chapter 1

WALL_LENGTHS = (1024, 2048, 4096, 6144, 8192, 16384, 32768, 65536, 131072)
ARTICLE_CASE = (6144, 40e9)  # claim C03: tokens, and bytes of attention's intermediates


def wall_bytes(n, batch, heads, dtype_bytes):
    """Return {(who, with backward): peak bytes} of one layer with heads of 64 channels, as chapter 1 counts."""
    sizes = batch, heads, heads, n, n, 64, dtype_bytes
    do_and_dv = 2 * batch * heads * n * 64 * dtype_bytes
    return {
        ("standard", False): cost.standard_peak_bytes(*sizes, matrices=2),
        ("standard", True): cost.standard_peak_bytes(*sizes, matrices=4) + do_and_dv,
        ("flash", False): cost.flash_peak_bytes(*sizes),
        ("flash", True): cost.flash_peak_bytes(*sizes, backward=True),
    }


def longest_that_fits(who, backward, batch, heads, dtype_bytes, memory_bytes):
    """Return the largest N, a multiple of 128, at which one layer fits into memory."""
    low, high = 0, 2**17
    while low + 1 < high:
        middle = (low + high) // 2
        fits = wall_bytes(128 * middle, batch, heads, dtype_bytes)[who, backward] <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return 128 * low


def memory_wall(seqlen, batch, heads, dtype, gpu):
    """Draw the peak memory of one layer against N, what a GPU holds, and the case of the article (W1)."""
    dtype_bytes, limit = cost.DTYPE_BYTES[dtype], cost.GPUS[gpu].memory_bytes
    plot = _Plot(46, 12, 342, 190, (1024, 131072), (1e7, 1e13), log_x=True, log_y=True)
    names = {
        10**p: text for p, text in zip(range(7, 14), ("10 MB", "", "1 GB", "", "100 GB", "", "10 TB"), strict=True)
    }
    plot.ticks({n: f"{n // 1024}k" for n in WALL_LENGTHS if n != 6144}, names, "sequence length N")
    curves = {n: wall_bytes(n, batch, heads, dtype_bytes) for n in WALL_LENGTHS}
    plot.parts += [_line(plot.x(seqlen), plot.top, plot.x(seqlen), plot.bottom, opacity=0.5, dash="2 2")]
    plot.parts += [_line(plot.left, plot.y(limit), plot.right, plot.y(limit), width=1.5)]
    plot.parts += [_text(plot.left + 4, plot.y(limit) - 4, f"{gpu}: out of memory above", bold=True, size=10)]
    x, y = plot.x(ARTICLE_CASE[0]), plot.y(ARTICLE_CASE[1])
    plot.parts.append(f'<path d="M{_n(x - 4)} {_n(y - 4)}l8 8m0 -8l-8 8" stroke="currentColor" stroke-width="2"/>')
    plot.parts.append(_text(x - 7, y + 12, "C03", "end", size=10))
    here = wall_bytes(seqlen, batch, heads, dtype_bytes)
    says = {}
    for row, ((who, backward), n_bytes) in enumerate(here.items()):
        plot.curve(
            WALL_LENGTHS,
            [curves[n][who, backward] for n in WALL_LENGTHS],
            COLORS[who],
            dash="5 3" if backward else None,
        )
        plot.parts.append(_mark(plot.x(seqlen), plot.y(n_bytes), who, hollow=backward))
        name = f"{who}, {'with backward' if backward else 'forward'}"
        verdict = "fits" if n_bytes <= limit else "out of memory"
        plot.parts += [_mark(14, 232 + 16 * row, who, hollow=backward), _text(26, 236 + 16 * row, name)]
        plot.parts += [
            _text(248, 236 + 16 * row, size_text(n_bytes), "end", bold=True),
            _text(260, 236 + 16 * row, verdict),
        ]
        says[who, backward] = f"{size_text(n_bytes)} ({verdict})"
    ends = [longest_that_fits(who, True, batch, heads, dtype_bytes, limit) for who in ("standard", "flash")]
    sentence = (
        f"One attention layer at N = {seqlen}, batch {batch}, {heads} heads of 64 channels, {dtype}, on {gpu}: "
        f"standard attention holds {says['standard', False]} in the forward pass and "
        f"{says['standard', True]} with the backward pass; flash holds {says['flash', False]} "
        f"and {says['flash', True]}. With the backward pass the card is full "
        f"at N = {ends[0]} for standard attention and at N = {ends[1]} for flash."
    )
    return _svg(290, plot.parts, sentence)


# W2, chapter 2


def online_softmax(rows, row, step):
    """Draw the state of the online softmax after `step` blocks (W2).

    rows: {name: dict(scores, block, final, m_i, l_i, alpha, partial)}; the last four have one number for each block.
    """
    trace = rows[row]
    scores, block = trace["scores"], trace["block"]
    n_keys, seen = len(scores), min(step * trace["block"], len(scores))
    m_i, l_i, alpha, partial = (trace[name][:step] for name in ("m_i", "l_i", "alpha", "partial"))
    edges = [0] + [min((i + 1) * block, n_keys) for i in range(step)]
    low, high = math.floor(min(scores)), math.ceil(max(scores))
    top = _Plot(34, 12, 352, 112, (0, n_keys), (low, high + 0.5))
    middle = _Plot(34, 130, 352, 196, (0, n_keys), (0, 1.15 * max(trace["l_i"])))
    spread = [*trace["partial"], trace["final"], 0]
    bottom = _Plot(34, 214, 352, 290, (0, n_keys), (min(spread) - 0.1, max(spread) + 0.1))
    top.ticks(y={low: f"−{-low}" if low < 0 else str(low), high: str(high)}, ylabel="score, m")
    middle.ticks(y={0: "0", round(max(trace["l_i"])): str(round(max(trace["l_i"])))}, ylabel="ℓ")
    marks = {round(value, 1): f"{value:.1f}".replace("-", "−") for value in (min(spread), max(spread))}
    bottom.ticks({edge: str(edge) for edge in range(0, n_keys + 1, n_keys // 4)}, marks, "keys seen", "acc / ℓ")
    parts = [_box(top.x(edges[-2]), 12, top.x(seen) - top.x(edges[-2]), 278, "on_chip", 0.15, edge=0)]
    for j, score in enumerate(scores):
        opacity = 0.8 if j < seen else 0.22
        parts.append(f'<circle cx="{_n(top.x(j + 0.5))}" cy="{_n(top.y(score))}" r="1.6" fill-opacity="{opacity}"/>')
    for plot, values in ((top, m_i), (middle, l_i)):
        stairs = [(x, value) for i, value in enumerate(values) for x in edges[i : i + 2]]
        plot.curve([x for x, _ in stairs], [value for _, value in stairs], COLORS["on_chip"], 2.4)
    bottom.parts.append(_line(34, bottom.y(trace["final"]), 352, bottom.y(trace["final"]), dash="4 3"))
    bottom.parts.append(_text(352, bottom.y(trace["final"]) - 4, "final output", "end", size=10))
    bottom.curve(edges[1:], partial, COLORS["flash"])
    bottom.parts += [
        _mark(bottom.x(x), bottom.y(value), "flash", 3) for x, value in zip(edges[1:], partial, strict=True)
    ]
    rescaled = step > 1 and alpha[-1] < 1
    middle.parts.append(
        _text(38, 128, f"α = {alpha[-1]:.2f}" + (": the old ℓ and acc are cut" if rescaled else ""), bold=rescaled)
    )
    first = "The first block sets m" if step == 1 else f"m rises, so the old sums are multiplied by α = {alpha[-1]:.2f}"
    what = first if step == 1 or rescaled else "m stays, so α = 1 and nothing is rescaled"
    sentence = (
        f"After block {step} of {len(trace['m_i'])} ({seen} of {n_keys} keys, {row}): {what}. "
        f"m = {m_i[-1]:.2f}, ℓ = {l_i[-1]:.2f}, and the output so far is {partial[-1]:.2f}; "
        f"the final one is {trace['final']:.2f}."
    ).replace("-", "−")
    return _svg(320, parts + top.parts + middle.parts + bottom.parts, sentence)


# W3, chapter 3

WALK_BLOCKS, WALK_BLOCK = 6, 64


def tile_traffic(step, head_dim, causal):
    """Draw which blocks are on chip at a step of the tiled loop, and the bytes that have moved (W3).

    Tiles of 64 queries by 64 keys in 16 bits, one head. Standard attention is charged for the tiles that the loop has
    passed: four trips for each, skipped or not, and Q, K, V and O once.
    """
    skips = causal == "yes"
    tiles = [(i, j) for i in range(WALK_BLOCKS) for j in range(WALK_BLOCKS) if not skips or j <= i]
    done = min(step, len(tiles))
    row, column = tiles[done - 1]
    finished = row + (column == (row if skips else WALK_BLOCKS - 1))  # blocks of queries that are written
    block_bytes = WALK_BLOCK * head_dim * 2
    flash = (row + 1 + 2 * done + finished) * block_bytes + finished * WALK_BLOCK * cost.FP32_BYTES
    passed = finished * WALK_BLOCKS if finished > row else row * WALK_BLOCKS + column + 1
    read_keys = WALK_BLOCKS if finished or row else column + 1
    standard = (row + 1 + 2 * read_keys + finished) * block_bytes + passed * 4 * WALK_BLOCK**2 * 2
    parts, cell, left, top = [], 30, 74, 66
    for j in range(WALK_BLOCKS):
        for name, y in (("k", 8), ("v", 34)):
            here = j == column
            parts += [_box(left + j * cell, y, cell, 24, "on_chip" if here else "device_memory", 0.6 if here else 0.2)]
            parts += [_text(left + j * cell + cell / 2, y + 16, name, "middle", here)]
    for i in range(WALK_BLOCKS):
        y, here = top + i * cell, i == row and finished == row
        parts += [_box(34, y, 30, cell, "on_chip" if here else "device_memory", 0.6 if here else 0.2)]
        parts += [_text(49, y + 19, "q", "middle", here)]
        state = ("on_chip", 0.6, "acc") if here else ("device_memory", 0.2, "out") if i < finished else (None, 0, "")
        parts += [_box(left + WALK_BLOCKS * cell + 10, y, 30, cell, *state[:2])]
        parts += [_text(left + WALK_BLOCKS * cell + 25, y + 19, state[2], "middle", here)]
        for j in range(WALK_BLOCKS):
            x = left + j * cell
            if (i, j) not in tiles:
                parts.append(_box(x, y, cell, cell, dashed=True))
            elif (i, j) == (row, column):
                parts += [_box(x, y, cell, cell, "on_chip", 0.6), _text(x + 15, y + 19, "s", "middle", True)]
            else:
                cut = skips and i == j
                parts.append(
                    _box(x, y, cell, cell, "flash" if cut else None, 0.14 if tiles.index((i, j)) < done else 0, cut=cut)
                )
    parts += [_box(302, top, 12, 12, "on_chip", 0.6), _text(318, top + 10, "on chip", size=10)]
    parts += [_box(302, top + 20, 12, 12, "device_memory", 0.2), _text(318, top + 30, "device", size=10)]
    parts += [_text(318, top + 41, "memory", size=10)]
    if skips:
        parts += [_box(302, top + 52, 12, 12, "flash", 0, cut=True), _text(318, top + 62, "masked", size=10)]
        parts += [_box(302, top + 72, 12, 12, dashed=True), _text(318, top + 82, "skipped", size=10)]
    for k, (name, n_bytes) in enumerate((("standard", standard), ("flash", flash))):
        y = 262 + 24 * k
        parts += [_text(34, y + 13, f"{name}: {size_text(n_bytes)} moved", bold=True)]
        parts += [_box(208, y, 145 * n_bytes / 1.7e6, 16, name, 0.7 if k else 0.35)]
    skipped = f", {WALK_BLOCKS**2 - len(tiles)} of {WALK_BLOCKS**2} tiles are skipped" if skips else ""
    sentence = (
        f"Tile {done} of {len(tiles)}{skipped}: query block {row + 1} meets key block {column + 1}. "
        "On chip are one block each of q, k and v, one tile of scores and the accumulator. "
        f"So far {size_text(flash)} have moved; standard attention would have moved "
        f"{size_text(standard)} for the same rows, {standard / flash:.1f} times as much."
    )
    return _svg(314, parts, sentence)


# W4, chapter 3

BLOCK_GPUS = {
    "A100 (sm_80)": "sm_80",
    "RTX 4090 (sm_89)": "sm_89",
    "H100, H200 (sm_90)": "sm_90",
    "RTX 5090 (sm_120)": "sm_120",
}
BLOCK_SIZES = ("32 × 32", "64 × 32", "64 × 64", "128 × 64", "128 × 128")


def on_chip_budget(rows, limits, gpu, head_dim, blocks, warps, stages):
    """Draw shared memory and registers as the compiler allocates them, against what one block of threads may use (W4).

    rows: what ``load_targets("blocks")`` returns. limits: {target: bytes of shared memory that one block may use}.
    """
    target = BLOCK_GPUS[gpu]
    block_m, block_n = (int(size) for size in blocks.split(" × "))
    wanted = dict(
        target=target, head_dim=head_dim, block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages
    )
    (row,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    shared, limit, spilled = row["shared_bytes"], limits[target], row["spill_stores_bytes"]
    article = 2 * (2 * head_dim * (block_m + block_n) + block_m * block_n)
    tiles = cost.on_chip_tile_bytes(block_m, block_n, head_dim, 2, stages=stages)
    registers = row["registers"] * 32 * warps * 4
    scale = 330 / (400 * 1024)
    bars = [
        ("shared memory, as compiled", shared, "on_chip", 0.6, limit),
        ("q and the stages of k and v, by formula", tiles, "on_chip", 0.2, limit),
        ("the article's estimate (C15): q, k, v, s, out", article, "standard", 0.3, limit),
        (f"registers: {row['registers']} for each of {32 * warps} threads", registers, "flash", 0.5, 256 * 1024),
    ]
    parts = []
    for i, (name, n_bytes, role, fill, most) in enumerate(bars):
        y = 14 + 44 * i
        parts += [
            _text(10, y, f"{name}: {n_bytes / 1024:.0f} KB"),
            _box(10, y + 5, min(n_bytes * scale, 340), 16, role, fill),
        ]
        parts += [_line(10 + most * scale, y + 4, 10 + most * scale, y + 24, width=2)]
        if i in (0, 3):
            parts += [_text(14 + most * scale, y + 17, f"{most // 1024} KB at most", size=10)]
    if shared > limit:
        verdict = f"does not launch: {shared / 1024:.0f} KB, and a block may use {limit // 1024}"
    elif spilled:
        verdict = f"launches, and spills {spilled} bytes of each thread's registers"
    else:
        verdict = "fits: it launches and spills nothing"
    parts.append(_text(10, 200, verdict, bold=True))
    sentence = (
        f"Forward kernel, fp16, causal, on {gpu}, head_dim {head_dim}, blocks of {blocks}, {warps} warps, "
        f"{stages} stages. This {verdict}. The compiler takes {shared / 1024:.0f} KB of shared memory and "
        f"{row['registers']} registers a thread; the formula says {tiles / 1024:.0f} KB, "
        f"the article's five tiles {article / 1024:.0f} KB."
    )
    return _svg(212, parts, sentence)


# W5, chapter 7


def errors(measured, dtype, seqlen, scale):
    """Draw the error of each implementation against fp64 (W5).

    measured: {(dtype, seqlen, scale): {name: (role, relative error)}}; the error is NaN where the result is not finite.
    """
    by_name = measured[dtype, seqlen, scale]
    plot = _Plot(140, 10, 345, 26 * len(by_name) + 16, (1e-8, 10), (0, 1), log_x=True)
    plot.ticks(
        {10.0**p: f"10{str(p).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}" for p in range(-8, 1, 2)},
        xlabel="largest error / largest output",
    )
    says = []
    for i, (name, (role, error)) in enumerate(by_name.items()):
        y = 26 * i + 24
        plot.parts += [_text(134, y + 4, name, "end"), _line(140, y, 345, y, width=0.5, opacity=0.25)]
        if math.isfinite(error):
            plot.parts += [_mark(plot.x(max(error, 1e-8)), y, role)]
            plot.parts += [
                _text(
                    plot.x(max(error, 1e-8)) + (-8 if error > 1e-3 else 8),
                    y - 3,
                    f"{error:.1e}",
                    "end" if error > 1e-3 else "start",
                    size=10,
                )
            ]
            says.append(f"{name} {error:.1e}")
        else:
            plot.parts.append(_text(340, y + 4, "NaN or infinite", "end", bold=True))
            says.append(f"{name} not finite")
    sentence = f"Error against fp64, {dtype} inputs, N = {seqlen}, inputs of size {scale}: {'; '.join(says)}."
    return _svg(26 * len(by_name) + 50, plot.parts, sentence)


# W6 and W8, chapter 9

IMPLEMENTATIONS = {  # name in the recorded rows: (name in figures, role)
    "eager": ("standard (eager PyTorch)", "standard"),
    "sdpa_efficient": ("SDPA, memory-efficient", "device_memory"),
    "sdpa_flash": ("SDPA, FlashAttention-2", "device_memory"),
    "flex": ("FlexAttention", "device_memory"),
    "sdpa_cudnn": ("SDPA, cuDNN", "device_memory"),
    "flashattn_portable": ("this package, portable", "flash"),
    "flashattn": ("this package", "flash"),
}


def rates(rows, direction, head_dim, causal, seqlen):
    """Return {impl: (ms, TFLOP/s)} of the recorded core rows of one setting, the slowest first, and their shape."""
    wanted = dict(
        direction=direction, head_dim=head_dim, causal=causal == "yes", seqlen_q=seqlen, metric="time", suite="core"
    )
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    matmuls = cost.FORWARD_MATMULS if direction == "forward" else cost.BACKWARD_MATMULS
    shape = found[0]["batch"], found[0]["heads"]
    flops = cost.attention_flops(*shape, seqlen, seqlen, head_dim, matmuls=matmuls, causal=causal == "yes")
    by_impl = {row["impl"]: (row["p50"], flops / row["p50"] / 1e9) for row in found if row["impl"] in IMPLEMENTATIONS}
    return dict(sorted(by_impl.items(), key=lambda item: item[1][1])), shape


def roofline(rows, gpu, direction, head_dim, seqlen):
    """Draw measured rates under the roof that a GPU's datasheet allows, at the bytes that must move (W6).

    rows: what ``load_rows`` returns. Standard attention moves its N x N matrices 4 times in the forward pass and 7
    times in the backward pass; the others need move only their inputs and results.
    """
    by_impl, (batch, heads) = rates(rows, direction, head_dim, "no", seqlen)
    backward = direction == "backward"
    matmuls = cost.BACKWARD_MATMULS if backward else cost.FORWARD_MATMULS
    flops = cost.attention_flops(batch, heads, seqlen, seqlen, head_dim, matmuls=matmuls)
    least = cost.qkvo_bytes(batch, heads, heads, seqlen, seqlen, head_dim, 2) * (2 if backward else 1)
    matrices = (7 if backward else 4) * cost.score_count(batch, heads, seqlen, seqlen) * 2
    intensity = {"standard": flops / (least + matrices), "flash": flops / least}
    peak, bandwidth = cost.GPUS[gpu].matmul_flops_per_s / 1e12, cost.GPUS[gpu].bandwidth_bytes_per_s / 1e12
    plot = _Plot(40, 12, 352, 200, (8, 16384), (10, 2000), log_x=True, log_y=True)
    plot.ticks(
        {8 * 8**i: str(8 * 8**i) for i in range(4)}, {10: "10", 100: "100", 1000: "1000"}, "FLOP per byte", "TFLOP/s"
    )
    plot.curve([8, peak / bandwidth, 16384], [8 * bandwidth, peak, peak], "currentColor", 1.5)
    plot.parts.append(_text(352, plot.y(peak) - 5, f"{gpu}: {peak:.0f} TFLOP/s", "end", size=10))
    says = []
    for i, (impl, (_, rate)) in enumerate(reversed(by_impl.items())):
        name, role = IMPLEMENTATIONS[impl]
        at = intensity["standard" if role == "standard" else "flash"]
        roof = min(peak, at * bandwidth)
        plot.parts.append(_mark(plot.x(at), plot.y(rate), role, 4, hollow=role == "device_memory"))
        plot.parts += [_mark(14, 242 + 15 * i, role, hollow=role == "device_memory"), _text(26, 246 + 15 * i, name)]
        plot.parts.append(_text(352, 246 + 15 * i, f"{rate:.0f} TFLOP/s, {rate / roof:.0%} of its roof", "end"))
        if role != "device_memory":
            says.append(
                f"{name} reaches {rate:.0f} TFLOP/s at {at:.0f} FLOP per byte, "
                f"{rate / roof:.0%} of the {roof:.0f} that this allows"
            )
    for who in intensity:
        x = plot.x(intensity[who])
        plot.parts.append(
            _line(x, plot.bottom, x, plot.y(min(peak, intensity[who] * bandwidth)), COLORS[who], 1, "3 2")
        )
    sentence = (
        f"{direction.capitalize()} pass, head_dim {head_dim}, N = {seqlen}, full attention, bf16: {'; '.join(says)}."
    )
    return _svg(250 + 15 * len(by_impl), plot.parts, sentence)


def benchmark(rows, direction, head_dim, causal, seqlen):
    """Draw the recorded rate and time of every implementation as bars (W8). rows: what ``load_rows`` returns."""
    by_impl, (batch, heads) = rates(rows, direction, head_dim, causal, seqlen)
    parts, says = [], []
    for i, (impl, (ms, rate)) in enumerate(reversed(by_impl.items())):
        name, role = IMPLEMENTATIONS[impl]
        y = 14 + 38 * i
        parts += [
            _text(8, y, name, bold=impl == "flashattn"),
            _text(352, y, f"{rate:.0f} TFLOP/s in {ms:.3g} ms", "end"),
        ]
        parts.append(_box(8, y + 5, 344 * rate / 700, 14, role, {"flash": 0.75, "standard": 0.4}.get(role, 0.2)))
        says.append(f"{name} {rate:.0f}")
    ours, best = by_impl["flashattn"][1], max(rate for _, rate in by_impl.values())
    sentence = (
        f"{direction.capitalize()} pass, {'causal' if causal == 'yes' else 'full'}, head_dim {head_dim}, "
        f"N = {seqlen}, batch {batch}, {heads} heads, bf16, in TFLOP/s: {'; '.join(says)}. "
        f"This package reaches {ours / best:.0%} of the fastest."
    )
    return _svg(14 + 38 * len(by_impl), parts, sentence)


# W7, chapter 6

LOOPS = ("dK and dV: a program per key block", "dQ: a program per query block", "One nest, dQ by atomic adds")
LOOP_BLOCKS = 5


def backward_loops(loop, step, causal):
    """Draw what the programs of the backward kernels read, hold and write at a step, all programs side by side (W7)."""
    cell, left, top, n = 32, 66, 42, LOOP_BLOCKS
    kind, skips = LOOPS.index(loop), causal == "yes"
    # Program p meets these blocks in turn, and writes its own block of a gradient after the last of them.
    along = {p: [b for b in range(n) if not skips or (b <= p if kind == 1 else b >= p)] for p in range(n)}
    visits = {p: blocks[step - 1] if step <= len(blocks) else None for p, blocks in along.items()}
    active = {(p, b) if kind == 1 else (b, p) for p, b in visits.items() if b is not None}
    written = sum(block is None for block in visits.values())
    adds = {m: sum(row == m for row, _ in active) for m in range(n)} if kind == 2 else {}
    parts = [
        _text(left + n * cell / 2, 14, "key blocks", "middle"),
        _text(20, top + n * cell / 2, "query blocks", "middle", turn=True),
    ]
    for m in range(n):
        for k in range(n):
            x, y = left + k * cell, top + m * cell
            if skips and k > m:
                parts.append(_box(x, y, cell, cell, dashed=True))
                continue
            now = (m, k) in active
            parts.append(_box(x, y, cell, cell, "on_chip" if now else None, 0.6 if now else 0))
            if now:
                parts.append(_text(x + cell / 2, y + 20, f"P{(m if kind == 1 else k) + 1}", "middle", True))
    for b in range(n):
        if kind != 1:
            hold = visits[b] is not None
            role, fill = ("on_chip", 0.6) if hold else ("device_memory", 0.45)
            x = left + b * cell
            parts += [
                _box(x + 2, top + n * cell + 10, cell - 4, 30, role, fill),
                _text(x + cell / 2, top + n * cell + 23, "dK", "middle", size=10),
            ]
            parts.append(_text(x + cell / 2, top + n * cell + 35, "dV", "middle", size=10))
        if kind != 0:
            y, x = top + b * cell, left + n * cell + 10
            if kind == 1:
                role, fill, text = ("on_chip", 0.6, "dQ") if visits[b] is not None else ("device_memory", 0.45, "dQ")
                parts.append(_box(x, y + 2, 34, cell - 4, role, fill))
            else:
                text = f"dQ +{adds[b]}" if adds[b] else "dQ"
                parts.append(_box(x, y + 2, 46, cell - 4, "standard", min(0.2 * adds[b], 0.8), cut=adds[b] > 1))
            parts.append(_text(x + (17 if kind == 1 else 23), y + 20, text, "middle", bold=bool(adds.get(b))))
    keys = [("on_chip", 0.6, "held on chip"), ("device_memory", 0.45, "written")]
    for i, (role, fill, text) in enumerate(keys + ([("standard", 0.4, "atomic adds")] if kind == 2 else [])):
        parts += [
            _box(288, top + 60 + 20 * i, 12, 12, role, fill, cut=role == "standard"),
            _text(304, top + 70 + 20 * i, text, size=9),
        ]
    parts.append(_text(left, 34, f"step {step}" + ("" if active else ": done"), bold=True))
    most = max(adds.values(), default=0)
    mine = "dQ" if kind == 1 else "dK and dV"
    if kind == 2 and active:
        most = max(adds.values())
        what = f"{len(active)} atomic adds to dQ, up to {most} to one block, in an order that nobody fixes"
    elif kind == 2:
        what = f"dQ was added to {sum(map(len, along.values()))} times, where one writer would have written {n} blocks"
    else:
        what = f"each adds to its own block of {mine} on chip" if active else "all have finished"
    sentence = (
        f"{loop}, step {step}, {'causal' if skips else 'full'}: {len(active)} of {n} programs work on a tile; {what}. "
        f"{written} of {n} blocks of {mine} are written, each once, by one program."
    )
    return _svg(top + n * cell + 48, parts, sentence)


# W9, chapter 8

MASKS = {"none": (None, None), "causal": (None, 0), "window 6, 6": (6, 6), "causal, window 6": (6, 0)}
MASK_KEYS = 24


def masks(key_range, mask, queries, block, heads_kv):
    """Draw which scores a mask leaves, and which tiles are full, cut and skipped (W9).

    key_range: the half-open range of keys that a range of queries sees, as ``flashattn.tiled.key_range`` returns it.
    """
    window = MASKS[mask]
    shift, cell = MASK_KEYS - queries, 9

    def keys_of(first, last):
        return key_range(first, last, MASK_KEYS, shift, window=window)

    rows = [keys_of(i, i + 1) for i in range(queries)]
    counts = dict.fromkeys(("full", "cut", "skipped"), 0)
    parts, left, top = [], 40, 30
    for start_m in range(0, queries, block):
        inside = rows[start_m : start_m + block]
        for start_n in range(0, MASK_KEYS, block):
            end_n = min(start_n + block, MASK_KEYS)
            seen = sum(max(0, min(hi, end_n) - max(lo, start_n)) for lo, hi in inside)
            whole = len(inside) == block and end_n - start_n == block and seen == block * block
            kind = "full" if whole else "cut" if seen else "skipped"
            counts[kind] += 1
            x, y = left + start_n * cell, top + start_m * cell
            look = {"full": ("flash", 0.3), "cut": ("standard", 0.22), "skipped": (None, 0)}[kind]
            size = (end_n - start_n) * cell, len(inside) * cell
            parts.append(_box(x, y, *size, *look, edge=1.2, dashed=kind == "skipped"))
    for i, (lo, hi) in enumerate(rows):
        if hi > lo:
            x, y = left + lo * cell, top + i * cell
            parts.append(
                f'<rect x="{_n(x + 1)}" y="{_n(y + 3)}" width="{_n((hi - lo) * cell - 2)}" height="3" '
                'fill-opacity="0.75"/>'
            )
    visible = sum(max(0, hi - lo) for lo, hi in rows)
    parts += [_text(left + MASK_KEYS * cell / 2, 20, f"{MASK_KEYS} keys", "middle")]
    parts += [_text(24, top + queries * cell / 2, f"{queries} queries", "middle", turn=True)]
    for i, (kind, look) in enumerate({"full": ("flash", 0.3), "cut": ("standard", 0.22), "skipped": (None, 0)}.items()):
        parts += [_box(270, top + 20 * i, 13, 13, *look, edge=1.2, dashed=kind == "skipped")]
        parts += [_text(288, top + 11 + 20 * i, f"{counts[kind]} {kind}")]
    parts += [
        f'<rect x="270" y="{top + 65}" width="13" height="3" fill-opacity="0.75"/>',
        _text(288, top + 71, "visible"),
    ]
    colors = list(COLORS)
    parts.append(_text(270, top + 104, "query heads", size=10))
    parts.append(_text(270, top + 168, "key heads", size=10))
    for head in range(4):
        group = head * heads_kv // 4
        x, x_kv = 270 + 21 * head, 270 + 84 * (group + 0.5) / heads_kv - 9
        parts += [_box(x, top + 110, 18, 14, colors[group], 0.5), _text(x + 9, top + 121, head + 1, "middle", size=10)]
        parts += [_line(x + 9, top + 124, x_kv + 9, top + 140), _box(x_kv, top + 140, 18, 14, colors[group], 0.5)]
    tiles = sum(counts.values())
    share = "one key head for each query head" if heads_kv == 4 else f"{4 // heads_kv} query heads share a key head"
    empty = sum(hi <= lo for lo, hi in rows)
    sentence = (
        f"Mask {mask}, {queries} queries, {MASK_KEYS} keys, tiles of {block}: {visible} of {queries * MASK_KEYS} "
        f"scores are visible in each head. Of {tiles} tiles {counts['full']} are full, {counts['cut']} are cut and "
        f"need the mask, {counts['skipped']} are skipped{f'; {empty} queries see no key' if empty else ''}. "
        f"Every head has this mask; {share}, so K and V take {heads_kv / 4:.0%} of the memory of 4 heads."
    )
    return _svg(top + 24 * 9 + 40, parts, sentence)


# W10, chapter 11

MODEL_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MODEL_CARDS = {"24 GB": 24e9, "80 GB": 80e9, "141 GB": 141e9}
MODEL_AXIS_BYTES = 160e9
# part: (colour role, None for that of the implementation's own bar, or "ink"; fill; dashed)
MODEL_PARTS = {
    "weights": ("ink", 0.55, False),
    "optimizer": ("ink", 0.3, False),
    "gradients": ("ink", 0.1, False),
    "copies": ("ink", 0.1, True),
    "activations": ("device_memory", 0.5, False),
    "logits": ("device_memory", 0.2, True),
    "attention": (None, 0.75, False),
}


def model_parts(layers, width, head_dim, batch, seqlen, standard):
    """Return {part: bytes} of those parts that meet at the peak of a GPT's training step on a GPU, under autocast."""
    gpt = cost.Gpt(layers, width, width // head_dim)
    sizes = cost.gpt_memory_bytes(gpt, batch, seqlen, standard=standard, softmax_bytes=4)
    always = sizes["weights"] + sizes["optimizer"]
    gradients_lead = cost.gpt_peak_bytes(sizes) == always + sizes["gradients"]
    missing = ("copies", "activations", "logits", "attention") if gradients_lead else ("gradients",)
    return {part: 0 if part in missing else sizes[part] for part in MODEL_PARTS}


def longest_training(layers, width, head_dim, batch, standard, memory_bytes):
    """Return the largest N, a multiple of 128, at which a training step fits into memory; 0 where none does."""
    low, high = 0, 2**14
    while low + 1 < high:
        middle = (low + high) // 2
        fits = sum(model_parts(layers, width, head_dim, batch, 128 * middle, standard).values()) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return 128 * low


def model_memory(layers, width, head_dim, batch, seqlen):
    """Draw what fills the memory of a GPT's training step, standard beside flash, and which cards hold it (W10)."""
    left, top, right, bottom = 12, 24, 348, 128
    plot = _Plot(left, top, right, bottom, (0, MODEL_AXIS_BYTES), (0, 1))
    plot.ticks({gb * 1e9: gb for gb in (0, 40, 120, 160)}, xlabel="GB at the peak of a training step")
    shape = layers, width, head_dim, batch
    columns = {who: model_parts(*shape, seqlen, who == "standard") for who in ("standard", "flash")}
    for y, (who, parts) in zip((36, 86), columns.items(), strict=True):
        begin, total = 0.0, sum(parts.values())
        for part, (role, fill, dashed) in MODEL_PARTS.items():
            x, end = plot.x(begin), plot.x(begin + parts[part])
            if end > x:
                color = None if role == "ink" else role or who
                box = _box(x, y, end - x, 26, color, fill, dashed=dashed)
                plot.parts.append(box)
            begin += parts[part]
        over = " →" if total > MODEL_AXIS_BYTES else ""
        plot.parts.append(_text(left + 2, y - 3, f"{who}: {size_text(total)}{over}", bold=True, size=10))
    for name, limit in MODEL_CARDS.items():
        for y in (34, 84):
            plot.parts.append(_line(plot.x(limit), y, plot.x(limit), y + 30, width=1.5))
        plot.parts.append(_text(plot.x(limit), top - 10, name, "middle", size=10))
    plot.parts += [_text(250, 176, "standard", "end", bold=True), _text(330, 176, "flash", "end", bold=True)]
    for row, (part, (role, fill, dashed)) in enumerate(MODEL_PARTS.items()):
        y = 192 + 15 * row
        if role:
            plot.parts.append(_box(14, y - 9, 11, 11, None if role == "ink" else role, fill, dashed=dashed))
        else:
            plot.parts += [_box(14, y - 9, 6, 11, "standard", fill), _box(20, y - 9, 6, 11, "flash", fill)]
        name = "16-bit copies of the weights" if part == "copies" else part
        plot.parts.append(_text(32, y, name))
        for x, parts in zip((250, 330), columns.values(), strict=True):
            plot.parts.append(_text(x, y, size_text(parts[part]) if parts[part] else "–", "end"))
    totals = {who: sum(parts.values()) for who, parts in columns.items()}
    fits = {}
    for who, total in totals.items():
        cards = [name for name, limit in MODEL_CARDS.items() if total <= limit]
        fits[who] = f"needs {size_text(total)} and fits {'a card of ' + cards[0] if cards else 'none of the cards'}"
    ends = [longest_training(*shape, who == "standard", 80e9) for who in totals]
    longest = [f"up to N = {end:,}" if end else "at no N" for end in ends]
    plot.parts.append(_text(14, 312, f"80 GB hold standard {longest[0]}, flash {longest[1]}", bold=True, size=10))
    weights = cost.gpt_weight_count(cost.Gpt(layers, width, width // head_dim))
    sentence = (
        f"{layers} layers, width {width}, {width // head_dim} heads of {head_dim} channels "
        f"({weights / 1e6:,.0f} million weights), batch {batch}, N = {seqlen}: a training step with standard attention "
        f"{fits['standard']}; with flash it {fits['flash']}. That frees {1 - totals['flash'] / totals['standard']:.0%}."
        f" A card of 80 GB holds standard attention {longest[0]}, flash {longest[1]}."
    )
    return _svg(322, plot.parts, sentence)


LAYOUTS = ("contiguous", "zigzag")


def ring_chunks(n_ranks, rank, layout):
    """Return the two of 2 n_ranks chunks that a rank holds."""
    return (2 * rank, 2 * rank + 1) if layout == "contiguous" else (rank, 2 * n_ranks - 1 - rank)


def ring_shares(n_ranks, layout):
    """Return, for each rank, the share of its scores that a causal mask leaves in each step of the ring.

    All of a rank's queries against all of a rank's keys count as 1, a chunk against itself as half of a quarter.
    """
    chunks = [ring_chunks(n_ranks, rank, layout) for rank in range(n_ranks)]

    def share(rank, source):
        pairs = ((a, b) for a in chunks[rank] for b in chunks[source])
        return sum(1.0 if b < a else 0.5 if b == a else 0.0 for a, b in pairs) / 4

    return [[share(rank, (rank - step) % n_ranks) for step in range(n_ranks)] for rank in range(n_ranks)]


def ring_work(n_ranks, layout):
    """Draw what each rank has to do in each step of a ring under a causal mask, and how long all wait for the slowest.

    n_ranks: 2 to 8. layout: one of LAYOUTS, which chunks of the sequence a rank holds.
    """
    shares = ring_shares(n_ranks, layout)
    slowest = [max(shares[rank][step] for rank in range(n_ranks)) for step in range(n_ranks)]
    busy = sum(map(sum, shares)) / (n_ranks * sum(slowest))
    left, width = 52, WIDTH - 60
    owner = {chunk: rank for rank in range(n_ranks) for chunk in ring_chunks(n_ranks, rank, layout)}
    cell = width / (2 * n_ranks)
    parts = [_text(left, 14, "the sequence in chunks, and the rank that holds each")]
    for chunk in range(2 * n_ranks):
        rank = owner[chunk]
        parts.append(_box(left + chunk * cell, 20, cell, 18, "device_memory", 0.08 + 0.5 * rank / n_ranks))
        parts.append(_text(left + (chunk + 0.5) * cell, 33, rank, "middle"))
    parts.append(_text(left, 62, "work (blue) and waiting (empty), step by step"))
    top, row = 70, 168 / n_ranks
    scale = width / sum(slowest)
    for rank in range(n_ranks):
        x, y = left, top + rank * row
        parts.append(_text(left - 6, y + row / 2 + 3, f"rank {rank}", "end"))
        for step in range(n_ranks):
            parts.append(_box(x, y + 2, slowest[step] * scale, row - 4, dashed=True, edge=0.6))
            if shares[rank][step]:
                parts.append(_box(x, y + 2, shares[rank][step] * scale, row - 4, "flash", 0.55))
            x += slowest[step] * scale
    x = left
    for step in range(n_ranks):
        parts.append(_text(x + slowest[step] * scale / 2, top + 182, step, "middle"))
        x += slowest[step] * scale
    parts.append(_text(left - 6, top + 182, "step", "end"))
    time = f"{sum(slowest):g} units of time, ranks at work {busy:.0%} of it"
    parts.append(_text(left, top + 204, time, bold=True))
    sentence = (
        f"{n_ranks} ranks, {layout} chunks, causal mask: the slowest rank of each step needs "
        f"{', '.join(f'{x:g}' for x in slowest)}, {sum(slowest):g} units in all, one unit being a rank's queries "
        f"against a whole share of keys. The ranks are at work {busy:.0%} of the time."
    )
    return _svg(top + 214, parts, sentence)


def decode_waves(batch, n_keys, n_splits, heads_kv=8, tile=64, at_once=396):
    """Draw how the programs of a decode step fill a device, wave after wave, and how long that takes.

    batch: sequences. n_keys: keys of each. n_splits: parts of the keys, a program each. at_once: programs that run side
    by side.
    """
    n_programs, n_tiles = batch * heads_kv, n_keys // tile
    n_splits = min(n_splits, n_tiles)
    n_waves, tiles = waves(n_programs, n_tiles, n_splits, at_once)
    total = n_waves * tiles + (MERGE_TILES if n_splits > 1 else 0)
    busy = n_programs * n_tiles / (at_once * total)
    best = choose_splits(n_programs, n_tiles, at_once)
    left, top, width, height = 8, 40, WIDTH - 16, 96
    step = width / total
    parts = [
        _text(left, 14, f"{n_programs * n_splits} programs of {-(-n_tiles // n_splits)} tiles", bold=True),
        _text(left, 30, f"height: the {at_once} places of the device; width: time"),
    ]
    for wave in range(n_waves):
        here = min(at_once, n_programs * n_splits - wave * at_once)
        filled, x = height * here / at_once, left + wave * tiles * step
        parts.append(_box(x, top, tiles * step, height, dashed=True, edge=0.5))
        parts.append(_box(x, top + height - filled, tiles * step, filled, "flash", 0.55, edge=0.5))
    if n_splits > 1:
        merge = MERGE_TILES * step
        parts.append(_box(left + n_waves * tiles * step, top, merge, height, "on_chip", 0.4, edge=0.5, cut=True))
    rest = ", the last stroke merging" if n_splits > 1 else ""
    time = f"{total} tiles' time in {n_waves} wave{'s' * (n_waves > 1)}{rest}"
    parts.append(_text(left, top + height + 18, time, bold=True))
    parts.append(_text(left, top + height + 34, f"busy {busy:.1%} of places times time"))
    parts.append(_text(left, top + height + 50, f"the package would choose {best} split{'s' * (best > 1)}"))
    sentence = (
        f"Batch {batch}, {n_keys} keys, {n_splits} splits: {n_programs * n_splits} programs of "
        f"{-(-n_tiles // n_splits)} tiles on {at_once} places take {n_waves} waves, the time of {total} tiles in all. "
        f"The device is busy {busy:.1%} of it. The package would choose {best} splits."
    )
    return _svg(top + height + 58, parts, sentence)


ROUNDED = {"q and k": "device_memory", "p": "on_chip", "v": "standard", "all of them": "flash"}


def eight_bit_errors(errors, inputs, scales, rotated):
    """Draw how much each rounding to e4m3 adds to the error of the output.

    errors: {(inputs, scales, rotated): {what is rounded, as in ROUNDED: rms error over the rms of the output}}.
    """
    found = errors[inputs, scales, rotated]
    left, most = 84, max(max(parts.values()) for parts in errors.values())
    width = WIDTH - left - 52
    parts = [_text(left, 14, "rms error of the output when only this is rounded")]
    for row, (name, role) in enumerate(ROUNDED.items()):
        y, length = 26 + 34 * row, width * found[name] / most
        parts.append(_text(left - 8, y + 16, name, "end", bold=row == 3))
        parts.append(_box(left, y, max(length, 0.5), 24, role, 0.55, cut=False))
        parts.append(_text(left + length + 6, y + 16, f"{found[name]:.1%}", bold=row == 3))
    turned = "q and k rotated" if rotated == "yes" else "not rotated"
    sentence = (
        f"{inputs}, {'one scale a head' if scales == 'head' else 'a scale for 128 rows'}, {turned}: the output errs by "
        + ", ".join(f"{found[name]:.1%} with {name} rounded" for name in ROUNDED)
        + "."
    )
    return _svg(26 + 34 * len(ROUNDED) + 4, parts, sentence)


TOKENS = 2048  # of the masks below, and three documents among them
DOCUMENT_ENDS = (700, 1250)


def _document(i):
    return np.searchsorted(DOCUMENT_ENDS, i, "right")


def _is_power_of_two_or_0(distance):
    return (distance & (distance - 1)) == 0


TILE_MASKS = {
    "causal": lambda i, j: j <= i,
    "window of 256 keys": lambda i, j: (j <= i) & (i - j < 256),
    "documents": lambda i, j: (j <= i) & (_document(i) == _document(j)),
    "prefix of 300 keys": lambda i, j: (j <= i) | (j < 300),
    "every 16th key": lambda i, j: (j <= i) & ((i - j) % 16 == 0),
    "distances 0, 1, 2, 4, 8, …": lambda i, j: (j <= i) & _is_power_of_two_or_0(i - j),
    "the same by blocks of 128": lambda i, j: (j <= i) & _is_power_of_two_or_0(i // 128 - j // 128),
}


def tile_kinds(mask, block):
    """Return (kinds, visible pairs): rows of 0 for empty, 1 for partial, 2 for full, of TOKENS tokens under a mask."""
    rows = np.arange(TOKENS)
    visible = TILE_MASKS[mask](rows[:, None], rows[None, :])
    tiles = visible.reshape(TOKENS // block, block, TOKENS // block, block)
    return tiles.any((1, 3)).astype(int) + tiles.all((1, 3)), int(visible.sum())


def tile_chooser(mask, block):
    """Draw which tiles a mask leaves full, partial and empty, and count them. mask: of TILE_MASKS. block: 64 to 256."""
    kinds, n_visible = tile_kinds(mask, block)
    n, n_full, n_partial = len(kinds), int((kinds == 2).sum()), int((kinds == 1).sum())
    left, top, side = 60, 24, 240
    cell = side / n
    parts = [_box(left, top, side, side)]
    strokes = []
    for m, row in enumerate(kinds):
        begin = 0
        for kind, run in itertools.groupby(row):
            length = len(list(run))
            x, y = left + begin * cell, top + m * cell
            if kind:
                role, fill = ("flash", 0.6) if kind == 2 else ("standard", 0.3)
                parts.append(_box(x, y, length * cell, cell, role, fill, edge=0))
            if kind == 1:
                strokes += [f"M{_n(x + t * cell)} {_n(y + cell)}l{_n(cell)} {_n(-cell)}" for t in range(length)]
            begin += length
    parts.append(f'<path d="{"".join(strokes)}" stroke="{COLORS["standard"]}" stroke-width="0.8" fill="none"/>')
    lines = "".join(
        f"M{_n(left)} {_n(top + i * cell)}h{side}M{_n(left + i * cell)} {_n(top)}v{side}" for i in range(1, n)
    )
    parts.append(f'<path d="{lines}" stroke="currentColor" stroke-width="0.4" stroke-opacity="0.4" fill="none"/>')
    parts.append(_text(left + side / 2, top - 8, "key blocks", "middle"))
    parts.append(_text(left - 10, top + side / 2, "query blocks", "middle", turn=True))
    share, used = (n_full + n_partial) / n**2, n_visible / ((n_full + n_partial) * block**2)
    bottom = top + side + 20
    parts.append(
        _text(left, bottom, f"{n_full} full (plain), {n_partial} partial (hatched) of {n**2} tiles", bold=True)
    )
    parts.append(_text(left, bottom + 17, f"computed: {share:.1%} of all tiles"))
    parts.append(_text(left, bottom + 34, f"of the computed scores {used:.1%} are visible"))
    sentence = (
        f"{mask}, {TOKENS} tokens in tiles of {block}: {n_full} full, {n_partial} partial and "
        f"{n**2 - n_full - n_partial} empty tiles. {share:.1%} of all tiles are computed, and {used:.1%} of their "
        "scores are visible."
    )
    return _svg(bottom + 44, parts, sentence)


# W11, chapter 16

SCHEDULE_END = 16  # of the timeline, in lengths of a product


def schedule(traces, groups, head_dim, time):
    """Draw what the units of a multiprocessor have done at a time, in lengths of a product (W11).

    traces: {(groups, head_dim): [(group, unit, what, begin, end), …]}, in lengths of a product. unit is "matrix" or
    "cores".
    """
    left, right, top, row = 66, 352, 24, 40
    scale = (right - left) / SCHEDULE_END
    trace = [piece for piece in traces[groups, head_dim] if piece[3] < SCHEDULE_END]
    n_groups = 1 + max(group for group, *_ in trace)
    lanes = ["matrix units", *(f"group {g}" for g in range(n_groups))]
    parts, now = [], {}
    for lane, name in enumerate(lanes):
        y = top + lane * row
        parts += [_text(left - 6, y + 18, name, "end", size=9), _line(left, y + 28, right, y + 28, opacity=0.3)]
    for group, unit, what, begin, end in trace:
        y = top + (0 if unit == "matrix" else 1 + group) * row
        x, width = left + begin * scale, (min(end, SCHEDULE_END) - begin) * scale
        role, here = ("flash", "on_chip")[group], begin < time <= end
        fill = 0 if begin >= time else 0.8 if here else 0.35
        parts.append(_box(x, y, width, 27, role, fill, dashed=begin >= time, cut=bool(group) and begin < time))
        if width > 14:
            parts.append(_text(x + width / 2, y + 18, what, "middle", here, size=9))
        if here:
            now["matrix" if unit == "matrix" else group] = what
    bottom = top + len(lanes) * row
    parts.append(_line(left + time * scale, top - 8, left + time * scale, bottom, width=1.6))
    busy = sum(min(end, time) - begin for _, unit, _, begin, end in trace if unit == "matrix" and begin < time) / time
    n_done = sum(what[0] == "O" and end <= time for _, _, what, _, end in trace)
    parts.append(_text(left, bottom + 16, f"matrix units at work: {busy:.0%} of the time so far", bold=True))
    parts.append(_text(left, bottom + 33, f"blocks of keys finished: {n_done}"))
    parts.append(_text(left, bottom + 50, "S scores, P softmax, O output of a block; α: rescaling", size=9))
    does = [f"group {g} {'computes ' + now[g] if g in now else 'waits'}" for g in range(n_groups)]
    sentence = (
        f"{groups}, head_dim {head_dim}, after {time} lengths of a product: the matrix units "
        f"{'compute ' + now['matrix'] if 'matrix' in now else 'wait'}, {', '.join(does)}. So far the matrix units were "
        f"at work {busy:.0%} of the time, and {n_done} blocks of keys are finished."
    )
    return _svg(bottom + 58, parts, sentence)

"""The drawings of the interactive figures: what they say is what the formulas, the records and the masks say."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

pytest.importorskip("matplotlib")

from flashattn import cost, interactive  # noqa: E402
from flashattn.bench import load_rows, load_targets  # noqa: E402
from flashattn.configs import TARGETS  # noqa: E402
from flashattn.reference import visible_keys  # noqa: E402
from flashattn.ring import ring_positions  # noqa: E402
from flashattn.splits import choose_splits  # noqa: E402
from flashattn.tiled import key_range  # noqa: E402

ROWS = load_rows("nvidia_h200")
LIMITS = {name: target.shared_bytes for name, target in TARGETS.items()}


def elements(svg):
    """Parse a drawing and return it; its text alternative must be the sentence, and everything must lie inside."""
    drawn, sentence = svg
    root = ElementTree.fromstring(drawn)
    assert root.attrib["aria-label"] == sentence and sentence.endswith(".")
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    for box in root.iter("rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height, f"outside: {box.attrib}"
    assert "nan" not in drawn and "nan" not in sentence
    return root


class TestMemoryWall:
    def test_counts_what_chapter_1_counts(self):
        n, heads = 4096, 16
        sizes = interactive.wall_bytes(n, 1, heads, 2)
        matrix, tensor = heads * n * n * 2, heads * n * 64 * 2
        assert sizes["standard", False] == 2 * matrix + 4 * tensor
        # As recorded on an H200: 4 matrices, out and dV beyond q, k, v and do.
        (row,) = (
            row for row in ROWS if row["suite"] == "memory" and row["impl"] == "eager"
            and row["direction"] == "forward_backward" and row["seqlen_q"] == n
        )  # fmt: skip
        assert sizes["standard", True] == row["p50"] + 4 * tensor
        assert sizes["flash", False] == cost.flash_peak_bytes(1, heads, heads, n, n, 64, 2)

    @pytest.mark.parametrize("who", ["standard", "flash"])
    def test_longest_length_fits_and_the_next_does_not(self, who):
        n = interactive.longest_that_fits(who, True, 4, 16, 2, 80e9)
        assert interactive.wall_bytes(n, 4, 16, 2)[who, True] <= 80e9
        assert interactive.wall_bytes(n + 128, 4, 16, 2)[who, True] > 80e9

    def test_verdicts(self):
        for n in interactive.WALL_LENGTHS:
            for gpu in cost.GPUS:
                elements(interactive.memory_wall(n, 4, 32, "fp16", gpu))
        _, sentence = interactive.memory_wall(32768, 1, 32, "fp16", "A100 80 GB")
        assert "standard attention holds 138 GB (out of memory)" in sentence and "flash holds 545 MB (fits)" in sentence


def test_online_softmax_shows_only_what_has_been_seen():
    trace = dict(
        scores=[1.0, -2, 3, 0.5],
        block=2,
        final=0.4,
        m_i=[1.0, 3.0],
        l_i=[1.05, 1.2],
        alpha=[0.0, 0.14],
        partial=[0.7, 0.4],
    )
    first, sentence = interactive.online_softmax({"a row": trace}, "a row", 1)
    elements((first, sentence))
    assert first.count('fill-opacity="0.22"') == 2, "two scores are still to come"
    assert "After block 1 of 2 (2 of 4 keys, a row): The first block sets m. m = 1.00" in sentence
    _, sentence = interactive.online_softmax({"a row": trace}, "a row", 2)
    assert "multiplied by α = 0.14" in sentence and "so far is 0.40; the final one is 0.40" in sentence


class TestTileTraffic:
    @pytest.mark.parametrize("head_dim", [32, 64, 128])
    def test_last_step_has_moved_what_the_cost_model_counts(self, head_dim):
        n = interactive.WALK_BLOCKS * interactive.WALK_BLOCK
        _, sentence = interactive.tile_traffic(interactive.WALK_BLOCKS**2, head_dim, "no")
        flash = cost.flash_traffic_bytes(1, 1, n, n, head_dim, 2, block_m=interactive.WALK_BLOCK)
        standard = cost.standard_traffic_bytes(1, 1, 1, n, n, head_dim, 2)
        assert f"So far {interactive.size_text(flash)} have moved" in sentence
        assert f"would have moved {interactive.size_text(standard)} for" in sentence

    def test_causal_skips_what_lies_above_the_diagonal(self):
        _, sentence = interactive.tile_traffic(36, 64, "yes")
        assert "Tile 21 of 21, 15 of 36 tiles are skipped" in sentence

    @pytest.mark.parametrize("causal", interactive.YES_NO)
    def test_bytes_grow_with_every_step(self, causal):
        def moved(step):
            drawn = interactive.tile_traffic(step, 64, causal)
            elements(drawn)
            return [
                float(re.search(r'x="208" .*?width="([\d.]+)"', line).group(1))
                for line in drawn[0].split("\n")
                if 'x="208"' in line
            ]

        steps = [moved(step) for step in range(1, 37 if causal == "no" else 22)]
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in zip(steps[:-1], steps[1:], strict=True))


class TestOnChipBudget:
    BLOCKS = load_targets("blocks")

    def test_every_setting_is_recorded_and_its_verdict_follows(self):
        kinds = set()
        for row in self.BLOCKS:
            gpu = next(name for name, target in interactive.BLOCK_GPUS.items() if target == row["target"])
            blocks = f"{row['block_m']} × {row['block_n']}"
            drawn = interactive.on_chip_budget(
                self.BLOCKS, LIMITS, gpu, row["head_dim"], blocks, row["num_warps"], row["num_stages"]
            )
            elements(drawn)
            kind = (
                "does not launch"
                if row["shared_bytes"] > LIMITS[row["target"]]
                else "spills"
                if row["spill_stores_bytes"]
                else "fits"
            )
            assert kind in drawn[1]
            kinds.add(kind)
        assert kinds == {"does not launch", "spills", "fits"}
        settings = len(interactive.BLOCK_GPUS) * 2 * len(interactive.BLOCK_SIZES) * 2 * 4
        assert len(self.BLOCKS) == settings

    def test_the_articles_five_tiles_are_40_kb_at_64(self):
        _, sentence = interactive.on_chip_budget(self.BLOCKS, LIMITS, "A100 (sm_80)", 64, "64 × 64", 4, 2)
        assert "the formula says 40 KB, the article's five tiles 40 KB" in sentence


def test_errors_names_what_is_not_finite():
    measured = {("fp16", 128, 64): {"naive": ("standard", float("nan")), "kernel": ("flash", 2.5e-4)}}
    drawn = interactive.errors(measured, "fp16", 128, 64)
    elements(drawn)
    assert drawn[1] == "Error against fp64, fp16 inputs, N = 128, inputs of size 64: naive not finite; kernel 2.5e-04."


@pytest.mark.parametrize("direction, factor", [("forward", 1), ("backward", 2.5)])
def test_rates_are_the_recorded_ones(direction, factor):
    by_impl, (batch, heads) = interactive.rates(ROWS, direction, 128, "yes", 4096)
    assert set(by_impl) == set(interactive.IMPLEMENTATIONS)
    ms, rate = by_impl["flashattn"]
    assert rate == pytest.approx(factor * 4 * batch * heads * 4096**2 * 128 / 2 / ms / 1e9)
    rates = [rate for _, rate in by_impl.values()]
    assert rates == sorted(rates)
    for seqlen in (1024, 4096, 16384):
        elements(interactive.benchmark(ROWS, direction, 64, "no", seqlen))
        elements(interactive.roofline(ROWS, "H200 141 GB", direction, 64, seqlen))
    assert f"this package {rate:.0f}" in interactive.benchmark(ROWS, direction, 128, "yes", 4096)[1]


class TestBackwardLoops:
    @pytest.mark.parametrize("causal, tiles", [("no", 25), ("yes", 15)])
    @pytest.mark.parametrize("loop", interactive.LOOPS)
    def test_every_tile_is_met_once_and_every_block_written(self, loop, causal, tiles):
        met, sentence = 0, ""
        for step in range(1, interactive.LOOP_BLOCKS + 2):
            drawn = interactive.backward_loops(loop, step, causal)
            elements(drawn)
            sentence = drawn[1]
            met += int(re.search(r"(\d) of 5 programs", sentence).group(1))
        assert met == tiles
        assert "0 of 5 programs" in sentence and "5 of 5 blocks of" in sentence

    def test_only_atomics_meet_at_a_block(self):
        said = [interactive.backward_loops(loop, 2, "no")[1] for loop in interactive.LOOPS]
        assert ["atomic adds" in sentence.split(": ", 2)[-1] for sentence in said] == [False, False, True]
        assert "up to 5 to one block" in said[2]
        assert "added to 25 times" in interactive.backward_loops(interactive.LOOPS[2], 6, "no")[1]


@pytest.mark.parametrize("mask", interactive.MASKS)
@pytest.mark.parametrize("queries", [7, 16, 24])
@pytest.mark.parametrize("block", [4, 5, 8])
def test_masks_count_as_the_specification_does(mask, queries, block):
    offs_m, offs_n = torch.arange(queries)[:, None], torch.arange(24)[None, :]
    visible = visible_keys(offs_m, offs_n, 24 - queries, causal=False, window=interactive.MASKS[mask])
    visible = visible.expand(queries, 24)
    tiles = [tile for rows in visible.split(block) for tile in rows.split(block, dim=1)]
    full = sum(bool(tile.all()) and tile.shape == (block, block) for tile in tiles)
    cut = sum(bool(tile.any()) for tile in tiles) - full
    drawn = interactive.masks(key_range, mask, queries, block, 2)
    elements(drawn)
    assert f": {int(visible.sum())} of {queries * 24} scores" in drawn[1]
    expected = (
        f"Of {len(tiles)} tiles {full} are full, {cut} are cut and need the mask, {len(tiles) - full - cut} are skipped"
    )
    assert expected in drawn[1]


class TestModelMemory:
    def test_parts_are_the_peak_of_the_cost_model(self):
        for layers, width, batch, seqlen in ((12, 768, 1, 8192), (48, 4096, 1, 1024)):
            for standard in (True, False):
                sizes = cost.gpt_memory_bytes(
                    cost.Gpt(layers, width, width // 64), batch, seqlen, standard=standard, softmax_bytes=4
                )
                parts = interactive.model_parts(layers, width, 64, batch, seqlen, standard)
                assert sum(parts.values()) == cost.gpt_peak_bytes(sizes)
                assert {part: n for part, n in parts.items() if n} == {
                    part: sizes[part] for part in parts if parts[part]
                }

    @pytest.mark.parametrize("standard", [True, False])
    def test_longest_length_fits_and_the_next_does_not(self, standard):
        n = interactive.longest_training(12, 768, 64, 1, standard, 80e9)
        peaks = [sum(interactive.model_parts(12, 768, 64, 1, n + more, standard).values()) for more in (0, 128)]
        assert peaks[0] <= 80e9 < peaks[1]

    def test_verdicts(self):
        for layers in (12, 48):
            for width in (768, 4096):
                for seqlen in interactive.MODEL_LENGTHS:
                    elements(interactive.model_memory(layers, width, 64, 8, seqlen))
        _, sentence = interactive.model_memory(48, 4096, 128, 1, 1024)
        assert "fits none of the cards" in sentence and "standard attention at no N, flash at no N" in sentence


class TestRingWork:
    @pytest.mark.parametrize("layout", interactive.LAYOUTS)
    @pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
    def test_shares_are_counted_from_the_mask(self, n_ranks, layout):
        chunk = 40  # so long that the half of a chunk against itself is its half
        rows = [
            torch.cat([torch.arange(chunk) + part * chunk for part in interactive.ring_chunks(n_ranks, rank, layout)])
            for rank in range(n_ranks)
        ]
        assert torch.cat(rows).sort().values.tolist() == list(range(2 * n_ranks * chunk))
        if layout == "zigzag":
            assert all(torch.equal(x, ring_positions(2 * n_ranks * chunk, n_ranks, i)) for i, x in enumerate(rows))
        for rank, by_step in enumerate(interactive.ring_shares(n_ranks, layout)):
            for step, share in enumerate(by_step):
                keys = rows[(rank - step) % n_ranks]
                visible = visible_keys(rows[rank][:, None], keys[None, :], 0, causal=True)
                assert abs(visible.double().mean().item() - share) < 1 / chunk

    def test_zigzag_never_waits(self):
        for n_ranks in (2, 3, 4, 8):
            _, sentence = interactive.ring_work(n_ranks, "zigzag")
            assert f"{n_ranks / 2:g} units in all" in sentence and "at work 100% of the time" in sentence
            elements(interactive.ring_work(n_ranks, "contiguous"))
        assert "3.5 units in all" in interactive.ring_work(4, "contiguous")[1]


class TestDecodeWaves:
    def test_times_are_those_of_the_launcher(self):
        """What it says about the package's choice is what the launcher does, and no other choice is much better."""
        for batch in (1, 8, 64):
            frames = {}
            for n_splits in (1, 2, 4, 16, 64):
                svg = interactive.decode_waves(batch, 8192, n_splits)
                elements(svg)
                frames[n_splits] = int(re.search(r"the time of (\d+) tiles", svg[1])[1])
            best = choose_splits(batch * 8, 128, 396)
            assert f"would choose {best} splits" in svg[1]
            chosen = interactive.decode_waves(batch, 8192, best)[1]
            assert int(re.search(r"the time of (\d+) tiles", chosen)[1]) <= 1.1 * min(frames.values())

    def test_a_step_without_a_split_leaves_a_device_idle(self):
        assert "8 programs of 128 tiles on 396 places take 1 waves" in interactive.decode_waves(1, 8192, 1)[1]
        assert "busy 2.0% of it" in interactive.decode_waves(1, 8192, 1)[1]

    def test_no_more_splits_than_tiles(self):
        assert "128 programs of 1 tiles" in interactive.decode_waves(1, 1024, 64)[1]


class TestSchedule:
    # One group: scores, softmax, output, and the scores of a second block; two that take turns.
    TRACES = {
        ("alone", 64): [
            (0, "matrix", "S0", 0, 1),
            (0, "cores", "P0", 1, 3),
            (0, "matrix", "O0", 3, 4),
            (0, "matrix", "S1", 4, 5),
        ],
        ("two", 64): [(g, "matrix", f"S{j}", 2 * j + g, 2 * j + g + 1) for j in range(9) for g in (0, 1)],
    }

    def test_says_what_runs_and_how_much_has_run(self):
        said = {time: interactive.schedule(self.TRACES, "alone", 64, time)[1] for time in (1, 2, 4, 5, 16)}
        assert "after 1 lengths of a product: the matrix units compute S0, group 0 waits. So far" in said[1]
        assert "the matrix units wait, group 0 computes P0" in said[2] and "at work 50% of the time" in said[2]
        assert "at work 50% of the time, and 1 blocks of keys are finished" in said[4]
        assert "compute S1" in said[5] and "at work 60%" in said[5] and "at work 19%" in said[16]

    def test_two_groups_stay_inside_and_can_be_told_apart(self):
        for time in range(1, interactive.SCHEDULE_END + 1):
            drawn = interactive.schedule(self.TRACES, "two", 64, time)
            elements(drawn)
            assert "at work 100% of the time" in drawn[1]
        assert drawn[0].count("<path") == 8, "the second group's products are striped"

"""The bench and the tuner without a GPU: what they would measure, what they time, what they write and what it says."""

import functools
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from flashattn import attention_reference, bench, figures, flash_attention, goals, models, tune
from flashattn.peers import FLEX_WAYS, IMPLEMENTATIONS, PEERS, Mask, Shape

sys.path.insert(0, str(Path(__file__).parents[1] / "book" / "_ext"))

import status  # noqa: E402

SMALL = Shape(2, 4, 2, 40, 16, True, window=(7, 0))


@pytest.fixture(autouse=True)
def session(monkeypatch):
    """Stand in for a GPU's name and the versions; tests change them."""
    facts = dict(gpu="Test GPU", n_gpus=1, date="2026-01-01", commit="abc1234", torch="2.0", triton="3.0")
    monkeypatch.setattr(bench, "_session", lambda: facts)
    return facts


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Read rows from an empty folder."""
    monkeypatch.setattr(bench, "DATA", tmp_path)
    return tmp_path


def right(shape):
    return {"": lambda q, k, v: attention_reference(q, k, v, causal=shape.causal, window=shape.window)[0]}


def measure_small(cells, path, monkeypatch, build=right, resume=False):
    """Measure cells of suite core on the CPU with a timer that says 1, 2 and 3 ms."""
    timed = functools.partial(bench.time_rows, device="cpu", percentiles=lambda f: [1.0, 2.0, 3.0])
    monkeypatch.setitem(bench.SUITES, "core", (bench.SUITES["core"][0], timed))
    builders = dict.fromkeys(IMPLEMENTATIONS, build)
    return bench.measure(cells, path, builders, resume)


def test_suites_have_the_shapes_of_the_targets():
    shapes = {suite: [shape for shape, *_ in entry[0]()] for suite, entry in bench.SUITES.items()}
    assert {(s.head_dim, s.seqlen, s.causal) for s in shapes["core"]} == set(
        itertools.product((64, 128), (1024, 4096, 16384), (False, True))
    )
    assert all(s.batch * s.seqlen == 16384 and s.heads * s.head_dim == 2048 for s in shapes["core"])
    wide = shapes["wide"]
    for head_dim, causal in itertools.product((32, 96, 192, 256), (False, True)):
        assert any((s.head_dim, s.causal, s.seqlen, s.dtype) == (head_dim, causal, 4096, "bf16") for s in wide)
    assert sum(s.dtype == "fp16" and s.head_dim == 128 for s in wide) == 2
    assert Shape(4, 32, 8, 4096, 128, True) in wide
    windows = [s for s in wide if s.window]
    assert [(s.head_dim, s.seqlen, s.window) for s in windows] == [(64, 16384, (1023, 0)), (128, 16384, (1023, 0))]
    assert all(s._replace(window=None) in wide and s.causal for s in windows)
    assert Shape(1, 8, 8, 128, 64, True) in shapes["short"] and len(shapes["short"]) == 5
    assert [s.seqlen for s in shapes["memory"]] == [2**i for i in range(10, 17)]
    for entry in bench.SUITES.values():
        entries = [(shape, *model) for shape, _, *model in entry[0]()]
        assert len(set(entries)) == len(entries)
        for _, impls, *_ in entry[0]():
            assert set(bench.OURS) & set(impls) and set(impls) <= set(IMPLEMENTATIONS)


def test_all_implementations_of_a_shape_follow_one_another():
    cells = bench.suite_cells("core")
    assert len(cells) == 12 * len(PEERS)
    groups = [[cell.impl for cell in group] for _, group in itertools.groupby(cells, key=lambda cell: cell.shape)]
    assert groups == [list(PEERS)] * 12


def test_implementations_can_be_picked_and_eager_only_by_name():
    assert {cell.impl for cell in bench.suite_cells("core")} == set(PEERS)
    assert {cell.impl for cell in bench.suite_cells("core", ["flex", "eager"])} == {"flex", "eager"}
    assert {cell.impl for cell in bench.suite_cells("memory")} == {"eager", "sdpa_flash", *bench.OURS}


@pytest.mark.parametrize("impl", ["sdpa_flash", "fa3", "eager"])
def test_a_mask_that_an_implementation_does_not_know_raises(impl):
    with pytest.raises(NotImplementedError, match="no window"):
        IMPLEMENTATIONS[impl](SMALL)


def test_rows_come_back_as_they_were_measured(folder, monkeypatch):
    cell = bench.Cell("core", SMALL, "flashattn")
    assert measure_small([cell], folder / "test_gpu.csv", monkeypatch) == [cell]
    rows = bench.load_rows("test_gpu")
    found = [(row["direction"], row["metric"], row["unit"]) for row in rows]
    assert found == [("forward_backward", "rel_err", "budgets"), ("forward", "time", "ms"), ("backward", "time", "ms")]
    for row in rows:
        assert bench.shape_of(row) == SMALL and set(row) == set(bench.COLUMNS)
        assert (row["gpu"], row["commit"], row["heads_kv"], row["seqlen_k"]) == ("Test GPU", "abc1234", 2, 40)
        assert row["params"] == {"window": [7, 0]}
    assert 0 < rows[0]["p50"] < 1
    assert [rows[1][name] for name in ("p20", "p50", "p80")] == [1.0, 2.0, 3.0]


def test_resume_skips_what_this_commit_recorded(folder, monkeypatch, session):
    path = folder / "test_gpu.csv"
    first, second = (bench.Cell("core", SMALL._replace(window=window), "flashattn") for window in (None, (3, 0)))
    other = bench.Cell("core", SMALL, "fa3")
    assert measure_small([other, first], path, monkeypatch) == [other, first]
    assert measure_small([first, second], path, monkeypatch, resume=True) == [second]
    assert len(bench.load_rows("test_gpu", impl="flashattn", metric="time")) == 4
    assert measure_small([first, second], path, monkeypatch, resume=True) == []
    session["commit"] = "def5678"
    assert measure_small([first], path, monkeypatch, resume=True) == [first]
    assert {row["commit"] for row in bench.load_rows("test_gpu", impl="flashattn")} == {"def5678"}
    assert {row["commit"] for row in bench.load_rows("test_gpu", impl="fa3")} == {"abc1234"}


def test_an_interrupted_run_keeps_what_it_measured(folder, monkeypatch):
    def interrupted(shape):
        if shape.window is None:
            raise KeyboardInterrupt
        return right(shape)

    cells = [bench.Cell("core", SMALL._replace(window=window), "flashattn") for window in ((7, 0), None, (3, 0))]
    with pytest.raises(KeyboardInterrupt):
        measure_small(cells, folder / "test_gpu.csv", monkeypatch, interrupted)
    assert {bench.shape_of(row) for row in bench.load_rows("test_gpu")} == {SMALL}
    assert measure_small(cells, folder / "test_gpu.csv", monkeypatch, resume=True) == cells[1:]


def test_an_implementation_that_fails_does_not_end_the_run(folder, monkeypatch, capsys):
    def fails(shape):
        if shape.window is None:
            raise RuntimeError("no kernel for this\nand a long story")
        return right(shape)

    cells = [bench.Cell("core", SMALL._replace(window=window), "flashattn") for window in (None, (7, 0))]
    measure_small(cells, folder / "test_gpu.csv", monkeypatch, fails)
    assert {bench.shape_of(row) for row in bench.load_rows("test_gpu")} == {SMALL}
    printed = capsys.readouterr().out
    assert "flashattn : no kernel for this\n" in printed and "story" not in printed and "2 of 2, about" in printed


def rounded(q, k, v):
    out = right(SMALL)[""](q, k, v)
    return out + 0.1 * torch.sign(out)


def wrong_gradient(q, k, v):
    return right(SMALL)[""](q + 0.1 * (q - q.detach()), k, v)


def wrong_in_the_last_head(q, k, v):
    out = right(SMALL)[""](q, k, v)
    return torch.cat([out[:, :-1], out[:, -1:].roll(1, dims=2)], dim=1)


def not_a_number(q, k, v):
    return right(SMALL)[""](q, k, v) * math.nan


@pytest.mark.parametrize("call", [rounded, wrong_gradient, wrong_in_the_last_head, not_a_number])
def test_what_is_outside_the_error_budget_is_reported_and_not_timed(call, capsys):
    timed = []
    cell = bench.Cell("core", SMALL, "sdpa_flash")
    (row,) = bench.time_rows(cell, lambda shape: {"": call}, "cpu", timed.append)
    assert row["metric"] == "rel_err" and float(row["p50"]) > 1 and timed == []
    assert "times the error budget, so not timed" in capsys.readouterr().out


def test_forward_only_is_held_to_its_forward_only():
    def call(q, k, v):
        return right(SMALL)[""](q, k, v).detach()

    rows = list(bench.time_rows(bench.Cell("core", SMALL, "fa3"), lambda shape: {"": call}, "cpu", lambda f: [1, 1, 1]))
    assert [(row["direction"], row["metric"]) for row in rows] == [("forward", "rel_err"), ("forward", "time")]


def test_the_faster_way_counts_for_each_direction():
    clock = iter([5.0, 9.0, 6.0, 7.0])  # forward and backward of the first way, then of the second
    ways = dict.fromkeys(FLEX_WAYS, right(SMALL)[""])
    cell = bench.Cell("core", SMALL, "flex")
    rows = list(bench.time_rows(cell, lambda shape: ways, "cpu", lambda function: [next(clock)] * 3))
    times = {row["direction"]: (row["p50"], json.loads(row["params"])) for row in rows if row["metric"] == "time"}
    expected = dict(compared=sorted(FLEX_WAYS), window=[7, 0])
    assert times["forward"] == ("5", dict(compile=FLEX_WAYS[0]) | expected)
    assert times["backward"] == ("7", dict(compile=FLEX_WAYS[1]) | expected)


def test_a_way_that_fails_leaves_the_other(capsys):
    def broken(q, k, v):
        raise RuntimeError("no valid configuration")

    ways = {FLEX_WAYS[0]: right(SMALL)[""], FLEX_WAYS[1]: broken}
    rows = list(bench.time_rows(bench.Cell("core", SMALL, "flex"), lambda shape: ways, "cpu", lambda f: [1, 1, 1]))
    params = [json.loads(row["params"]) for row in rows if row["metric"] == "time"]
    assert params == [dict(compile="default", compared=["default"], window=[7, 0])] * 2
    assert "no valid configuration" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_flashattn_mean_the_same_window():
    """FlexAttention, not compiled, with the mask of the bench, against the reference."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.detach() for x in bench.draw(SMALL._replace(dtype="fp32"), "cpu")[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setattr(
            "torch.nn.attention.flex_attention.create_block_mask",
            lambda *args, device: create_block_mask(*args, device="cpu"),
        )
        call = IMPLEMENTATIONS["flex"](SMALL)["default"]
    assert call.func is flex_attention
    torch.testing.assert_close(call(q, k, v), right(SMALL)[""](q, k, v))


# ---- Suite sparse.

MASK_NAMES = ["window 100", "documents", "blocks 0.5"]


def test_suite_sparse_has_masks_densities_and_a_yardstick():
    entries = list(bench.SUITES["sparse"][0]())
    assert all((s.batch, s.heads, s.seqlen, s.dtype) == (1, 16, 16384, "bf16") for s, _ in entries)
    for head_dim in (64, 128):
        shapes = {s: impls for s, impls in entries if s.head_dim == head_dim}
        assert {(s.causal, s.mask) for s in shapes} == {
            (False, ""), (True, ""), (False, "window 1024"), (False, "documents"),
            *((False, f"blocks {share}") for share in (1.0, 0.5, 0.25, 0.1, 0.05)),
        }  # fmt: skip
        assert all("flex" in shapes[s] for s in shapes if s.mask in ("window 1024", "documents"))


@pytest.mark.triton
@pytest.mark.parametrize("name", MASK_NAMES)
def test_a_mask_of_the_bench_means_the_same_to_all(name, device):
    """FlexAttention's rule, our tiles and the reference's tensor; blocks of documents are longer than one tile."""
    from torch.nn.attention.flex_attention import create_mask

    mask = Mask(name, 640, device)
    visible = mask.visible()
    assert torch.equal(visible, create_mask(mask.rule, None, None, 640, 640, device=device)[0, 0])
    tiles = mask.tile_mask().tiles(1, 1, 640, 640, device=device, block=128)
    in_tiles = visible.view(5, 128, 5, 128)
    kinds = in_tiles.any(3).any(1).to(torch.int8) + in_tiles.all(3).all(1).to(torch.int8)
    assert torch.equal(tiles.kinds[0, 0], kinds) and 0 < tiles.density < 1
    with pytest.raises(NotImplementedError, match="no mask 'stripes'"):
        Mask("stripes", 640, device)


@pytest.mark.triton
def test_rows_of_a_mask_say_which_and_how_dense(device):
    cell = bench.Cell("sparse", Shape(1, 1, 1, 200, 16, False, "fp32", mask="window 50"), "flashattn")

    def build(shape):
        visible = Mask(shape.mask, shape.seqlen, device).visible()
        return {"": lambda q, k, v: attention_reference(q, k, v, visible=visible)[0]}

    rows = list(bench.sparse_rows(cell, build, str(device), lambda function: [1.0, 2.0, 3.0]))
    assert [row["metric"] for row in rows] == ["rel_err", "time", "time"]
    for row in rows:
        assert json.loads(row["params"]) == {"density": 0.75, "mask": "window 50"}
        assert bench.shape_of(bench._typed({**row, "causal": str(row["causal"])})) == cell.shape
    wrong = list(bench.sparse_rows(cell, right, str(device), lambda function: [1.0, 2.0, 3.0]))
    assert [row["metric"] for row in wrong] == ["rel_err"]  # the mask is part of the truth


def test_goals_of_suite_sparse_are_computed_from_the_rows(folder):
    dense = Shape(1, 16, 16, 16384, 128, False)
    documents, blocks = dense._replace(mask="documents"), dense._replace(mask="blocks 0.1")
    rows = [
        made_up_row("sparse", "flashattn", "forward", dense, 10.0),
        made_up_row("sparse", "flashattn", "forward", documents, 0.55, density=0.05),
        made_up_row("sparse", "flashattn", "forward", blocks, 1.2, density=0.1),
        made_up_row("sparse", "flex", "forward", documents, 0.66, density=0.05),
        made_up_row("sparse", "flex", "forward", blocks, 0.6, density=0.1),
    ]
    bench.write_table(folder / "test_gpu.csv", bench.COLUMNS, rows)
    found = {goal.rule: goal for goal in goals.check_goals("test_gpu") if goal.rule.startswith("sparse, forward")}
    beside_flex, by_tiles = found.values()
    assert beside_flex.measured == pytest.approx(1.2) and beside_flex.reached and beside_flex.n_cells == 1
    assert by_tiles.measured == pytest.approx(1.2) and not by_tiles.reached and by_tiles.where == str(blocks)
    assert by_tiles.n_cells == 2


# ---- Suite model.

TOY = dict(gpt2=models.Model(2, 32, 2, 64), gpt_10b=models.Model(2, 32, 2, 64))
TOY_SHAPE = Shape(1, 2, 2, 48, 16, True)


@pytest.fixture
def toy_suite(folder, monkeypatch, device):
    """Make suite model run here, on toy models, timed in no time; return what measures cells and loads rows."""
    for name, model in TOY.items():
        monkeypatch.setitem(models.MODELS, name, model)
    monkeypatch.setattr(models, "TIMED_S", 0)
    monkeypatch.setattr(models, "FEWEST_STEPS", 1)
    timed = {False: lambda function: (function(), [1.0, 2.0, 3.0])[1], True: lambda function: [0.1, 0.2, 0.3]}
    rows_of = functools.partial(bench.model_rows, device=device, timed=timed)
    monkeypatch.setitem(bench.SUITES, "model", (bench.SUITES["model"][0], rows_of))

    def measure(*cells, resume=False, **kwargs):
        measured = bench.measure(list(cells), folder / "test_gpu.csv", resume=resume, **kwargs)
        return measured, bench.load_rows("test_gpu")

    return measure


def test_suite_model_has_the_shapes_of_the_articles_tables():
    cells = bench.suite_cells("model")
    gpt2 = {cell.shape.seqlen for cell in cells if cell.model == "gpt2"}
    assert gpt2 >= {1024 * 2**i for i in range(6)}
    for impl in ("eager", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flashattn"):
        assert {cell.shape.seqlen for cell in cells if (cell.model, cell.impl) == ("gpt2", impl)} == gpt2
    assert models.MODELS["gpt2"][:3] == (12, 768, 12)
    assert {cell.shape for cell in cells if cell.model == "gpt_10b"} == {Shape(1, 32, 32, 6144, 128, True)}
    alone = {cell.shape for cell in cells if not cell.model}
    wanted = itertools.product((1, 4, 16), (64, 128, 256, 512, 1024, 2048, 4096), (False, True))
    assert {(shape.batch, shape.seqlen, shape.causal) for shape in alone} == set(wanted)


@pytest.mark.triton
def test_a_training_step_is_split_into_its_parts(toy_suite, device):
    cells = [bench.Cell("model", TOY_SHAPE, impl, "gpt2") for impl in ("eager", "flashattn")]
    measured, rows = toy_suite(*cells)
    assert measured == cells
    assert toy_suite(*cells, resume=True)[0] == []
    table = models.training_table(rows)
    n_weights = 64 * 32 + 48 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    for cell in table.values():
        split = cell[48]["split"]
        assert sum(split.values()) == cell[48]["peak_bytes"] and min(split.values()) >= 0
        assert split["weights"] == cell[48]["gradients"] == 4 * n_weights
        assert 0 <= split["optimizer"] - 8 * n_weights < 1000  # two fp32 moments, and step counts
        assert cell[48]["tokens_per_s"] > 0
    out = 2 * 2 * 48 * 16
    scores = 2 * 48 * 48
    eager, ours = (table[impl][48]["split"] for impl in ("eager", "flashattn"))
    assert eager["activations"] == ours["activations"] and eager["logits"] == ours["logits"]
    assert eager["attention"] >= 2 * (out + 2 * scores + 48 * 48)  # P at 2 bytes or more, and the causal mask
    if device.type == "cpu":  # where nothing is rounded up, and autocast leaves the softmax in bf16
        assert eager["attention"] == 2 * (out + 2 * scores + 48 * 48)
        assert 2 * out < ours["attention"] <= 2 * (out + 2 * 4 * 2 * 48)  # out, and up to two fp32 statistics a row
    losses = [row["params"]["first_loss"] for row in rows if row["metric"] == "throughput"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert all(bench.shape_of(row) == TOY_SHAPE and row["params"]["layers"] == 2 for row in rows)


def test_a_forward_pass_is_measured_with_and_without_gradients(toy_suite, device):
    _, rows = toy_suite(bench.Cell("model", TOY_SHAPE, "eager", "gpt_10b"))
    inference, training = (row["params"]["split"] for row in rows)
    assert [row["params"]["gradients"] for row in rows] == [False, True]
    assert [row["direction"] for row in rows] == ["forward"] * 2
    assert inference["weights"] == training["weights"] and inference["attention"] == 0
    kept = 2 * (2 * 48 * 32 + 2 * 2 * 48 * 48 + 48 * 48)
    assert training["attention"] == kept if device.type == "cpu" else training["attention"] >= kept
    assert rows[0]["p50"] < rows[1]["p50"] == sum(training.values())


def runs_short(shape, error=torch.OutOfMemoryError, after=1):
    """Return attention that works so many times, and then raises."""
    calls = itertools.count()

    def call(q, k, v):
        if next(calls) >= after:
            raise error("CUDA out of memory. Tried to allocate 9 GiB" if error is torch.OutOfMemoryError else "broken")
        return right(shape)[""](q, k, v)

    return {"": call}


def test_out_of_memory_is_a_row(toy_suite, monkeypatch):
    monkeypatch.setattr(models, "total_memory_bytes", lambda device: 10**9)
    cells = [bench.Cell("model", TOY_SHAPE, "eager", name) for name in ("gpt2", "gpt_10b")]
    builders = dict(eager=runs_short)
    measured, rows = toy_suite(*cells, implementations=builders)
    assert [(row["direction"], row["metric"], row["p50"]) for row in rows] == [
        ("training_step", "out_of_memory", 10**9),
        ("forward", "out_of_memory", models.SMALLER_CARD_BYTES),
        ("forward", "out_of_memory", models.SMALLER_CARD_BYTES),
    ]
    first = rows[0]["params"]
    assert first["layers_done"] == 1 and first["attention"] > 0 and first["model"] == "gpt2"
    assert models.training_table(rows) == {"eager": {48: {"out_of_memory": 10**9}}}
    assert toy_suite(*cells, resume=True, implementations=builders)[0] == []


def test_another_error_is_reported_and_is_no_row(toy_suite, capsys):
    builders = dict(eager=functools.partial(runs_short, error=RuntimeError))
    _, rows = toy_suite(bench.Cell("model", TOY_SHAPE, "eager", "gpt2"), implementations=builders)
    assert rows == [] and "eager : broken" in capsys.readouterr().out


@pytest.mark.triton
def test_attention_alone_is_timed_in_both_directions_and_in_a_graph(toy_suite):
    shape = Shape(2, 2, 2, 64, 16, False)
    cells = [bench.Cell("model", shape, impl) for impl in ("eager", "sdpa_flash", "flashattn")]
    _, rows = toy_suite(*cells)
    keys = [(row["impl"], row["direction"], row["metric"], row["params"].get("graph")) for row in rows]
    for impl in ("eager", "sdpa_flash", "flashattn"):
        assert [key[1:] for key in keys if key[0] == impl] == [
            ("forward_backward", "rel_err", None),
            ("forward", "time", False),
            ("forward_backward", "time", False),
            ("forward", "time", True),
            ("forward_backward", "time", True),
        ]
    wanted = dict(batch=2, causal=False, direction="forward")
    assert models.speed_ratios(rows, "flashattn", graph=False, **wanted) == {64: 1.0}
    assert models.speed_ratios(rows, "flashattn", graph=True, **wanted | dict(batch=4)) == {}


def test_wrong_attention_is_not_timed(toy_suite, capsys):
    cell = bench.Cell("model", TOY_SHAPE, "eager")
    builders = dict(eager=lambda shape: {"": lambda q, k, v: right(shape)[""](q, k, v) * 1.1})
    _, rows = toy_suite(cell, implementations=builders)
    assert [row["metric"] for row in rows] == ["rel_err"]
    assert "times the error budget, so not timed" in capsys.readouterr().out


def test_a_crossover_lies_between_two_lengths():
    assert models.crossover({64: 0.5, 128: 0.5, 256: 2.0}) == pytest.approx(128 * 2**0.5)
    assert models.crossover({64: 2.0, 128: 0.5, 256: 2.0}) == pytest.approx(128 * 2**0.5)
    assert models.crossover({64: 2.0, 128: 3.0}) == 64
    assert models.crossover({64: 2.0, 128: 0.9}) is None


def test_the_articles_table_stands_beside_ours():
    ours = {"ours": {1024: dict(peak_bytes=3.21e9, tokens_per_s=45678.0), 8192: dict(out_of_memory=80e9)}}
    table = figures.article_table(ours, {"article": {1024: (8.2, 1200), 8192: (None, None)}}, "A caption")
    assert table.header == ["N", "ours, GB", "ours, tokens/s", "article, GB", "article, tokens/s"]
    assert table.rows == [["1,024", "3.2", "45,678", "8.2", "1,200"], ["8,192", "over 80", "–", "out of memory", "–"]]
    page = table._repr_html_()
    assert page.count("<tr>") == 3 and "<caption>A caption</caption>" in page and 'tabindex="0"' in page


def test_figures_of_whole_models_say_what_they_show():
    split = dict(weights=5e8, optimizer=1e9, attention=6e9, activations=1e9, logits=5e8, temporary=1e9)
    bars = figures.memory_split({"standard": split, "flash": split | dict(attention=1e8)}, {"80 GB": 80e9})
    assert "standard 10 GB: weights 0.5, optimizer 1, kept by attention 6" in bars.alt and "flash 4.1 GB" in bars.alt
    speed = figures.crossovers({"forward": {"batch 1": ("flash", "-", {64: 0.5, 128: 2.0})}})
    assert "forward, batch 1: 0.50 at N=64, 2.00 at N=128" in speed.alt
    curves = {"eager": ("standard", {5: 3.0, 10: 2.0}), "ours": ("flash", {5: 3.01, 10: 2.0})}
    losses = figures.training_curves(curves, ("another seed", {5: 3.5, 10: 2.0}), 0.02)
    assert "from 3.00 to 2.00 nats in 10 steps" in losses.alt and "ours at most 0.01 nats away" in losses.alt
    both = figures.beside_article(
        {"GB": {"ours": ("flash", "measured", {1024: 3.2}), "article": ("flash", "article", {1024: 5.1})}}
    )
    assert "GB, ours: 3.2 at N=1024; GB, article: 5.1 at N=1024" in both.alt


def made_up_row(suite, impl, direction, shape, p50, metric="time", unit="ms", **params):
    return bench._row(bench.Cell(suite, shape, impl), direction, metric, unit, [p50] * 3, **params)


def test_goals_are_computed_from_the_rows(folder):
    a, b = Shape(16, 32, 32, 1024, 64, False), Shape(4, 16, 16, 4096, 128, True)
    full, short = Shape(1, 16, 16, 16384, 128, True), Shape(1, 8, 8, 128, 64, True)
    memory = Shape(1, 16, 16, 1024, 64, False)
    results = 16 * 1024 * (2 * 64 + 2 * 4)  # out, and two fp32 statistics a row
    rows = [
        made_up_row("core", "flashattn", "forward", a, 2.0),
        made_up_row("core", "sdpa_flash", "forward", a, 3.0),  # 1.5 times as fast
        made_up_row("core", "sdpa_cudnn", "forward", a, 1.0),  # 0.5
        made_up_row("core", "flashattn", "forward", b, 2.0),
        made_up_row("core", "sdpa_flash", "forward", b, 2.8),  # 1.4
        made_up_row("core", "sdpa_cudnn", "forward", b, 4.0),  # 2: the mean is 1
        made_up_row("core", "flashattn", "backward", a, 2.0),
        made_up_row("core", "flex", "backward", a, 4.0),
        made_up_row("core", "flex", "backward", b, 4.0),  # flashattn is missing
        made_up_row("wide", "flashattn", "forward", full, 8.0),
        made_up_row("wide", "flashattn", "forward", full._replace(window=(1023, 0)), 1.6),
        made_up_row("memory", "flashattn", "forward", memory, results * 1.03, "peak_memory", "bytes"),
        made_up_row("memory", "flashattn", "forward_backward", memory, results + 3 * 2**21, "peak_memory", "bytes"),
        *(
            made_up_row("short", impl, "forward_backward", short, p50, graph=graph)
            for impl, p50, graph in (
                ("flashattn", 0.28, False), ("sdpa_flash", 0.2, False), ("flashattn", 0.03, True), ("sdpa_flash", 0.02, True)
            )
        ),
        made_up_row("compile", "flashattn", "forward", a, 2.5, "first_call", "s"),
        made_up_row("core", "flashattn", "forward_backward", a, 0.4, "rel_err", "budgets"),
    ]  # fmt: skip
    bench.write_table(folder / "test_gpu.csv", bench.COLUMNS, rows)
    found = {goal.rule: goal for goal in goals.check_goals("test_gpu")}

    def goal(beginning):
        (rule,) = (rule for rule in found if rule.startswith(beginning))
        return found[rule]

    flash = goal("core, forward: at least 1.30 times as fast as sdpa_flash")
    assert flash.measured == pytest.approx(1.4) and flash.reached and flash.n_cells == 2 and flash.where == str(b)
    cudnn = goal("core, forward: at least 0.90 times as fast as sdpa_cudnn")
    assert cudnn.measured == pytest.approx(1.0) and cudnn.reached and cudnn.where == str(a)
    flex = goal("core, backward: at least 1.10 times as fast as flex")
    assert flex.measured == 0 and not flex.reached and flex.where == str(b)
    window = goal("wide, forward: window 1024")
    assert window.measured == pytest.approx(5.0) and window.reached
    assert goal("memory, forward:").measured == pytest.approx(0.03, rel=1e-3) and not goal("memory, forward:").reached
    assert goal("memory, forward_backward").measured == 0 and goal("memory, forward_backward").reached
    assert goal("short, N = 128, call").measured == pytest.approx(1.4) and goal("short, N = 128, call").reached
    assert goal("short, N = 128, under").measured == pytest.approx(1.5) and not goal("short, N = 128, under").reached
    assert goal("compile: first forward").reached and goal("compile: first backward").reached is None
    assert goal("error within the budget").measured == 0.4
    assert goal("core, backward: at least 1.30").reached is None


def test_goals_of_the_ring_tell_two_gpus_from_one(folder):
    shape = Shape(1, 16, 16, 262144, 128, True)
    rows = [
        made_up_row("ring", "flashattn", "forward_backward", shape, value, metric, unit) | dict(n_gpus=n_gpus)
        for metric, unit, by_gpus in (("time", "ms", (2.0, 1.1)), ("rel_err", "budgets", (0.3, 0.6)))
        for n_gpus, value in ((2, by_gpus[1]), (1, by_gpus[0]))  # in the order of the bench
    ]
    bench.write_table(folder / "test_gpu.csv", bench.COLUMNS, rows)
    found = {goal.rule: goal for goal in goals.check_goals("test_gpu")}
    time = found["ring, forward and backward: time on 2 GPUs at most 0.6 of that on 1"]
    assert time.measured == pytest.approx(0.55) and time.reached and time.n_cells == 1
    assert found["error within the budget in every timed cell"].measured == 0.6


@pytest.mark.triton
def test_suite_fp8_times_quantised_inputs_and_states_errors(folder, device, monkeypatch):
    """Forward alone, a budget of its own, quantising apart, and errors of three kinds of inputs: rows and goals."""
    shape, path = Shape(1, 2, 2, 96, 64, True), folder / "test_gpu.csv"
    one_shape = lambda: [(shape, ("flashattn", "flashattn_fp8"))]  # noqa: E731
    rows_of = functools.partial(
        bench.fp8_rows, device=device, percentiles=lambda f: [f() is None or 1.0] * 3, errors_at=(96, 64, True)
    )
    monkeypatch.setitem(bench.SUITES, "fp8", (one_shape, rows_of))
    bench.measure(bench.suite_cells("fp8"), path, IMPLEMENTATIONS)
    rows = bench.load_rows("test_gpu", suite="fp8")
    assert {row["direction"] for row in rows} == {"forward"} and {bench.shape_of(row) for row in rows} == {shape}
    eight_bit = [row for row in rows if row["impl"] == "flashattn_fp8"]
    assert [row["metric"] for row in eight_bit][:4] == ["rel_err", "time", "quantize", "quantize"]
    assert eight_bit[0]["unit"] == "budgets" and 0 < eight_bit[0]["p50"] < 1
    errors = {
        (row["params"]["inputs"], row["params"]["scales"], row["params"]["norm"]): row["p50"]
        for row in rows
        if row["unit"] == "relative"
    }
    kinds = ("gaussian", "outliers", "rotated")
    assert set(errors) == set(itertools.product(kinds, ("none", "head", "block"), ("rms", "max")))
    for kind in kinds:
        assert 2 * errors[kind, "none", "rms"] < errors[kind, "head", "rms"] < errors[kind, "head", "max"]
    assert errors["rotated", "head", "rms"] < errors["outliers", "head", "rms"] / 2
    found = {goal.rule: goal for goal in goals.check_goals("test_gpu") if goal.rule.startswith("fp8")}
    assert [goal.measured for goal in found.values()] == [None, eight_bit[0]["p50"], 3]


def test_what_errs_more_than_the_emulation_is_not_timed(device, capsys):
    shape = Shape(1, 2, 2, 96, 64, True)
    wrong = {"": lambda arguments: torch.zeros_like(arguments["v"], dtype=torch.bfloat16)}
    rows = bench.fp8_rows(bench.Cell("fp8", shape, "fa3_fp8"), lambda shape: wrong, device)
    assert next(rows)["metric"] == "rel_err"
    with pytest.raises(ValueError, match="times its error budget, so not timed"):
        next(rows)


def test_the_goal_of_fp8_is_the_slower_of_two_masks(folder):
    full, causal = Shape(1, 16, 16, 16384, 128, False), Shape(1, 16, 16, 16384, 128, True)
    rows = [
        made_up_row("fp8", impl, "forward", shape, p50)
        for shape, impl, p50 in (
            (full, "flashattn", 3.0), (full, "flashattn_fp8", 2.0), (causal, "flashattn", 2.0), (causal, "flashattn_fp8", 1.6)
        )
    ]  # fmt: skip
    bench.write_table(folder / "test_gpu.csv", bench.COLUMNS, rows)
    (goal,) = (goal for goal in goals.check_goals("test_gpu") if goal.rule.startswith("fp8, forward: at least 1.25"))
    assert goal.measured == pytest.approx(1.25) and goal.reached and goal.where == str(causal) and goal.n_cells == 2


def test_nothing_recorded_reaches_nothing(folder):
    assert {goal.reached for goal in goals.check_goals("no_such_gpu")} == {None}


def test_readme_table_has_rates_in_a_fixed_order(folder, monkeypatch):
    monkeypatch.setattr(status, "DATA", folder)
    shape = Shape(16, 32, 32, 1024, 64, True)
    rows = [
        made_up_row("core", "eager", "forward", shape, 1.0),
        made_up_row("core", "fa3", "forward", shape, 0.5),
        made_up_row("core", "flashattn", "backward", shape, 2.0),
        made_up_row("core", "flashattn", "forward", shape, 1.0),
        made_up_row("core", "flashattn", "forward_backward", shape, 0.4, "rel_err", "budgets"),
        made_up_row("wide", "flex", "forward", shape, 1.0),
    ]
    bench.write_table(folder / "test_gpu.csv", bench.COLUMNS, rows)
    # Causal: half of 4 * 16 * 32 * 1024^2 * 64 operations is 0.0687 T, in 1 ms 69 T/s; 2.5 times that in 2 ms is 86.
    assert status.results_table().splitlines()[-3:] == [
        "| head_dim | N | causal | flashattn | fa3 |",
        "|---|---|---|---|---|",
        "| 64 | 1024 | yes | 69 / 86 | 137 / – |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", [bench, tune])
def test_without_a_gpu_the_commands_say_so(command):
    with pytest.raises(SystemExit, match="on a GPU, and there is none here"):
        command.main([])


def test_candidates_stand_around_the_table():
    found = tune.candidates((64, 128, 4, 2))
    assert found[0] == (64, 128, 4, 2) and len(found) == len(set(found)) == 3 * 2 * 2 * 3
    assert (128, 64, 8, 3) in found and all(max(blocks[:2]) <= 128 for blocks in found)
    assert all(stages >= 1 for *_, stages in tune.candidates((16, 64, 8, 1)))
    assert tune.candidates((16, 64, 8, 1))[0] == (16, 64, 8, 1)


@pytest.mark.triton
@pytest.mark.parametrize("direction", tune.DIRECTIONS)
def test_the_tuner_gives_one_kernel_other_blocks(direction, device):
    q, k, v = (torch.randn(1, 1, 70, 16, dtype=torch.float16, device=device).requires_grad_() for _ in range(3))
    expected, expected_grads = (lambda out: (out, torch.autograd.grad(out.sum(), (q, k, v))))(flash_attention(q, k, v))
    with tune.replaced(direction, (32, 16, 4, 1)) as launcher:
        out = flash_attention(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert launcher.config[:2] == (32, 16) and launcher.again.keywords["BLOCK_M"] == 32
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-2)
    launcher.again()
    with tune.replaced(direction) as launcher:  # all is as it was
        torch.autograd.grad(flash_attention(q, k, v).sum(), (q, k, v))
    assert launcher.config[:2] != (32, 16)


WAYS = ("", "kernel", "sum", "grouped", "folded")
STEP = Shape(3, 4, 2, 128, 16, False, n_tokens=1)


def test_decode_suite():
    cells = bench.suite_cells("decode")
    assert {(cell.shape.batch, cell.shape.seqlen) for cell in cells} == set(
        itertools.product((1, 8, 64), (1024, 8192, 65536))
    )
    assert {cell.shape[1:3] + cell.shape[4:7] for cell in cells} == {(32, 8, 128, False, "bf16")}
    assert all(cell.shape.n_tokens == 1 for cell in cells) and len(cells) == 9 * 6
    assert str(STEP) == "bf16 B=3 H=4/2 N=128 D=16 new tokens 1" and STEP.sizes() == (3, 4, 2, 1, 128, 16)


@pytest.mark.triton
@pytest.mark.parametrize("impl", ["flashattn", "sdpa_flash", "read", "wrong"])
def test_a_step_of_decoding_is_checked_and_timed(impl, folder, monkeypatch, capsys, device):
    """On the CPU, with a timer that says 1, 2 and 3 ms; what is wrong is not timed."""

    def timer(step):
        step()
        return [1.0, 2.0, 3.0]

    rows = functools.partial(bench.decode_rows, device=device, percentiles=timer, graphs=(False,))
    monkeypatch.setitem(bench.SUITES, "decode", (bench.SUITES["decode"][0], rows))
    wrong = {"wrong": lambda shape: {"": lambda q, k, v: q * 0}}
    cell = bench.Cell("decode", STEP, impl)
    bench.measure([cell], folder / "test_gpu.csv", IMPLEMENTATIONS | wrong)
    found = bench.load_rows("test_gpu", suite="decode", metric="time")
    if impl == "wrong":
        assert not found and "times the error budget" in capsys.readouterr().out
        return
    (row,) = found
    assert bench.shape_of(row) == STEP and (row["seqlen_q"], row["seqlen_k"]) == (1, 128)
    assert row["params"]["graph"] is False and row["params"].get("way", "") in WAYS
    errors = bench.load_rows("test_gpu", metric="rel_err")
    assert len(errors) == (impl != "read") and all(row["p50"] <= 1 for row in errors)


@pytest.mark.triton
@pytest.mark.parametrize("n", [4, 2048 * 3 + 4, 2048 * 5000])
def test_read_sees_every_number(n, device):
    from flashattn.streaming import read

    a, b = torch.ones(2, n, dtype=torch.int32, device=device)
    assert read(a, b).sum().item() == 2 * n


def test_goals_of_decoding(folder):
    small, large = (Shape(batch, 32, 8, n, 128, False, n_tokens=1) for batch, n in ((1, 65536), (64, 8192)))
    rows = [
        made_up_row("decode", impl, "forward", shape, p50, graph=False)
        for shape, times in (
            (small, dict(flashattn=2.0, read=1.0, flex=4.0, sdpa_flash=1.8)),
            (large, dict(flashattn=1.0, read=0.9, flex=1.1)),
        )
        for impl, p50 in times.items()
    ]
    bench.write_table(folder / "test_gpu.csv", bench.COLUMNS, rows)
    found = {goal.rule: goal for goal in goals.check_goals("test_gpu") if goal.rule.startswith("decode")}
    assert len(found) == 6
    called = {rule: goal for rule, goal in found.items() if "call by call" in rule}
    assert [goal.reached for goal in called.values()] == [True, False, False]
    assert [goal.measured for goal in called.values()] == pytest.approx([0.9, 0.5, 2.0 / 1.8])
    assert all(goal.reached is None for rule, goal in found.items() if rule not in called)

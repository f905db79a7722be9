"""Sparse attention: masks and their tile lists against brute force, the kernels against the error budget."""

import functools
import json
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch
from processes import python

from flashattn import flash_attention
from flashattn.testing import Case, budget_ratios, error_budget, error_ratios, make_inputs, run

pytestmark = pytest.mark.triton
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from flashattn import TileMask, masks, sparse_attention  # noqa: E402
from flashattn.masks import causal, dilated, documents, prefix, selected_blocks, sliding_window  # noqa: E402
from flashattn.sparse import TileScore, alibi  # noqa: E402

BATCH, HEADS = 2, 2


@triton.jit
def below(b, h, i, j, step):
    return (j + h * step) % 3 != b


@triton.jit
def table(b, h, i, j, allowed, n_k):
    return tl.load(allowed + i * n_k + j)


@triton.jit
def nothing(b, h, i, j):
    return j < 0


@triton.jit
def everything(b, h, i, j):
    return j >= 0


@triton.jit
def but_one(b, h, i, j):
    return (i != 10) | (j != 20)


@triton.jit
def late_rows(b, h, i, j):
    return (i >= 70) & (j >= 5) & (j < 100)


@triton.jit
def halves(s, b, h, i, j, factor):
    return s * factor + tl.where(j % 2 == 0, 0.25, 0.0)


@triton.jit
def halves_slope(s, b, h, i, j, factor):
    return factor + s * 0


@triton.jit
def hides_odd(s, b, h, i, j):
    return tl.where((j % 2 == 1) | (i == 3), float("-inf"), s)


@triton.jit
def first_keys(b, h, i, j, n):
    return j < n


def ids_of(n, device, batch=None):
    """Return the documents of n tokens: uneven ones, the last 7 tokens padding."""
    ids = torch.tensor([0] * (n // 3) + [5] * (n // 2) + [2] * n)[:n].clone()
    ids[-7:] = -1
    if batch:
        ids = torch.stack([ids, ids.roll(11)])
    return ids.to(device)


def chosen(device):
    return torch.tensor([[0, 2], [1, -1], [3, 0], [2, 2]], device=device)


def grid(n, m, at_position=False):
    """Return (b, h, i, j) that broadcast to (batch, heads, n, m)."""
    i = torch.arange(n)[:, None] + (m - n if at_position else 0)
    return torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[None, :, None, None], i, torch.arange(m)


def is_causal(n, m):
    _, _, i, j = grid(n, m, True)
    return j <= i


def in_window(n, m, left, right=0):
    _, _, i, j = grid(n, m, True)
    return (j >= i - left) & (j <= i + right)


def same_document(n, m, batch=None):
    ids = ids_of(max(n, m), "cpu", batch)
    queries, keys = ids[..., :n, None], ids[..., None, :m]
    same = (queries == keys) & (queries >= 0)
    return same[:, None] if batch else same


def is_chosen(n, m, block):
    _, _, i, j = grid(n, m)
    picked = torch.zeros(4, 5, dtype=torch.bool)
    picked[[0, 0, 1, 2, 2, 3], [0, 2, 1, 3, 0, 2]] = True
    rows = (i // block).clamp(max=3)
    return picked[rows, (j // block).clamp(max=4)] & (i // block < 4)


def is_below(n, m):
    b, h, _, j = grid(n, m)
    return ((j + h * 2) % 3 != b).expand(BATCH, HEADS, n, m)


def in_table(n, m):
    return torch.rand(n, m, generator=torch.Generator().manual_seed(3)) < 0.3


# name -> (the mask on a device for n queries and m keys, the same as a boolean tensor)
MASKS = {
    "causal": (lambda d, n, m: causal(), is_causal),
    "window": (lambda d, n, m: sliding_window(40, 3), lambda n, m: in_window(n, m, 40, 3)),
    "causal window": (
        lambda d, n, m: causal() & sliding_window(70),
        lambda n, m: is_causal(n, m) & in_window(n, m, 70),
    ),
    "prefix": (lambda d, n, m: prefix(37), lambda n, m: (torch.arange(m) < 37).expand(n, m)),
    "prefix LM": (
        lambda d, n, m: causal() | prefix(torch.tensor([50, 9], device=d)),
        lambda n, m: is_causal(n, m) | (torch.arange(m) < torch.tensor([50, 9])[:, None, None, None]),
    ),
    "documents": (lambda d, n, m: documents(ids_of(n, d), ids_of(m, d)) if n == m else None, same_document),
    "causal documents": (
        lambda d, n, m: causal() & documents(ids_of(n, d, BATCH)) if n == m else None,
        lambda n, m: is_causal(n, m) & same_document(n, m, BATCH),
    ),
    "dilated": (
        lambda d, n, m: causal() & (dilated(5) | sliding_window(8)),
        lambda n, m: is_causal(n, m) & (((grid(n, m, True)[2] - torch.arange(m)) % 5 == 0) | in_window(n, m, 8)),
    ),
    "selected": (lambda d, n, m: selected_blocks(chosen(d), 64), lambda n, m: is_chosen(n, m, 64)),
    "selected fine": (
        lambda d, n, m: selected_blocks(chosen(d), 24, n_key_blocks=6) & causal(),
        lambda n, m: is_chosen(n, m, 24) & is_causal(n, m),
    ),
    "not": (lambda d, n, m: ~(causal() & ~prefix(20)), lambda n, m: ~is_causal(n, m) | (torch.arange(m) < 20)),
    "by head": (lambda d, n, m: TileMask(below, numbers=(2,)), is_below),
    "a table": (
        lambda d, n, m: TileMask(table, tensors=(in_table(n, m).to(d),), numbers=(m,)),
        in_table,
    ),
    "but one": (
        lambda d, n, m: TileMask(but_one),
        lambda n, m: (grid(n, m)[2] != 10) | (torch.arange(m) != 20),
    ),
    "late rows": (
        lambda d, n, m: TileMask(late_rows),
        lambda n, m: (grid(n, m)[2] >= 70) & (torch.arange(m) >= 5) & (torch.arange(m) < 100),
    ),
}
SQUARE = {"documents", "causal documents"}


def made(name, device, n, m):
    """Return (mask, what it shows: a boolean tensor (batch, heads, n, m))."""
    mask, visible = MASKS[name]
    return mask(device, n, m), visible(n, m).expand(BATCH, HEADS, n, m)


def kinds_of(visible, block):
    """Return the kinds of the tiles of a boolean tensor: 0 if it has no True, 2 if all of a whole tile are, else 1."""
    *leading, n, m = visible.shape
    rows, columns = -(-n // block), -(-m // block)
    padded = torch.nn.functional.pad(visible, (0, columns * block - m, 0, rows * block - n))
    tiles = padded.view(*leading, rows, block, columns, block)
    return tiles.any(-1).any(-2).to(torch.int8) + tiles.all(-1).all(-2).to(torch.int8)


# ---- Masks and tiles.


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", masks.BLOCKS)
@pytest.mark.parametrize("sizes", [(200, 200), (150, 260)], ids=str)
def test_tiles_against_brute_force(name, block, sizes, device):
    if sizes[0] != sizes[1] and name in SQUARE:
        sizes = (192, 192)  # no ragged edge
    mask, visible = made(name, device, *sizes)
    tiles = mask.tiles(BATCH, HEADS, *sizes, device=device, block=block)
    kinds = tiles.kinds.cpu()
    expected = kinds_of(visible, block)
    assert torch.equal(kinds.expand_as(expected), expected)
    n_batch, n_heads = kinds.shape[:2]
    sees = torch.ones(visible.shape[:3], dtype=torch.bool) if tiles.sees is None else tiles.sees.cpu() != 0
    seen = torch.ones(*visible.shape[:2], sizes[1], dtype=torch.bool) if tiles.seen is None else tiles.seen.cpu() != 0
    assert torch.equal(sees.expand(BATCH, HEADS, -1), visible.any(3))
    assert torch.equal(seen.expand(BATCH, HEADS, -1), visible.any(2))
    for (index, counts), expected in ((tiles.by_query, kinds), (tiles.by_key, kinds.mT)):
        assert index.dtype == counts.dtype == torch.int32
        for place in ((b, h, r) for b in range(n_batch) for h in range(n_heads) for r in range(expected.shape[2])):
            n_full, n_computed = counts[place].tolist()
            listed = index[place].tolist()
            assert listed[:n_full] == (expected[place] == 2).nonzero().flatten().tolist()
            assert listed[n_full:n_computed] == (expected[place] == 1).nonzero().flatten().tolist()
            assert len(listed) == expected.shape[3] + 1 and all(0 <= x < expected.shape[3] for x in listed)


def test_lists_are_as_many_as_differ(device):
    """A function that does not mention b, or h, has one list for all batch entries, or heads."""
    for mask, shape in (
        (causal(), (1, 1)),
        (TileMask(below, numbers=(1,)), (BATCH, HEADS)),
        (causal() & prefix(torch.tensor([3, 4], device=device)), (BATCH, 1)),
        (documents(ids_of(130, device)), (1, 1)),
        (documents(ids_of(130, device, BATCH)), (BATCH, 1)),
        (TileMask(below, numbers=(1,), by_batch=False, by_head=False), (1, 1)),
    ):
        assert mask.tiles(BATCH, HEADS, 130, 130, device=device).kinds.shape[:2] == shape


def test_counts_and_density(device):
    tiles = causal().tiles(BATCH, HEADS, 256, 256, device=device, block=64)
    assert (tiles.n_tiles, tiles.n_full, tiles.n_partial, tiles.n_computed) == (16, 6, 4, 10)
    assert tiles.density == 10 / 16
    assert repr(tiles) == "Tiles(256 queries by 256 keys in tiles of 64: 6 full, 4 partial of 16)"
    assert causal().tiles(0, HEADS, 0, 5, device=device).density == 0


def test_what_is_the_same_is_asked_once():
    """Two masks that share a function with the same tensors share its slots and its answer."""
    ids = torch.arange(40)
    documents_of = documents(ids)
    mask = (causal() & documents_of) | ~documents_of & causal()
    assert len(mask.program()[0]) == 2 and len(mask.tensors) == 2
    assert len((documents(ids) | documents(ids.clone())).tensors) == 4
    assert len((sliding_window(3) | sliding_window(4)).numbers) == 4
    assert len((TileMask(nothing) | TileMask(everything)).program()[0]) == 2


# ---- The kernels.

HEAD_DIMS = [(64, 64), (128, 128), (256, 256), (40, 72), (192, 128)]


def a_case(n, m, head_dim, dtype, heads_kv=1, **rest):
    return Case(n, m, head_dim, dtype, heads=HEADS, heads_kv=heads_kv, batch=BATCH, **rest)


def sparse_with(tiles, score=None):
    def call(q, k, v, visible=None, scale=None, softcap=None, **_):
        return sparse_attention(q, k, v, tiles, scale=scale, softcap=softcap, score=score, return_lse=True)

    return call


def check(case, name, device, block, score=None, reference_score=None):
    """Hold a case under a mask to the budget, in rows and in boxes, and look for the same bits on a second run."""
    mask, visible = made(name, device, case.seqlen_q, case.seqlen_k)
    tiles = mask.tiles(BATCH, HEADS, case.seqlen_q, case.seqlen_k, device=device, block=block)
    inputs = make_inputs(case, device)
    options = dict(scale=case.scale, softcap=case.softcap)
    shown = dict(visible=visible.to(device), score=reference_score)
    truth, budget = error_budget(inputs, **options, **shown)
    call = sparse_with(tiles, score)
    first = run(call, inputs, **options)
    ratios = budget_ratios(first, inputs, truth, budget)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    with pytest.MonkeyPatch.context() as patch:  # small calls read rows; as boxes they are the same
        patch.setattr("flashattn.primitives.SCORES_WORTH_A_BOX", 0)
        patch.setattr("flashattn.launch.LAUNCHES", {})
        second = run(call, inputs, **options)
    for result in first:
        assert torch.equal(first[result], second[result]), f"{result} differs on a second run, with boxes"


CPU_CASES = [
    ("causal", a_case(70, 130, 16, "fp32")),
    ("window", a_case(130, 70, 16, "fp16", softcap=3.0)),
    ("prefix LM", a_case(70, 70, 24, "bf16", heads_kv=2, head_dim_v=40)),
    ("causal documents", a_case(130, 130, 16, "bf16")),
    ("dilated", a_case(70, 130, 16, "fp32", scale=-0.3)),
    ("selected fine", a_case(130, 130, 16, "fp16")),
    ("by head", a_case(65, 130, 80, "fp32")),
    ("a table", a_case(65, 70, 16, "bf16", family="low")),
    ("late rows", a_case(130, 70, 16, "fp32")),
]
GPU_CASES = (
    [(name, a_case(333, 333 if name in SQUARE else 500, 64, "fp16")) for name in MASKS]
    + [("causal documents", a_case(333, 333, d, "bf16", head_dim_v=d_v)) for d, d_v in HEAD_DIMS]
    + [
        ("dilated", a_case(500, 333, d, dtype, heads_kv=2, softcap=3.0))
        for d in (64, 128)
        for dtype in ("fp32", "bf16")
    ]
    + [("causal window", a_case(n, n, 128, "bf16")) for n in (1, 63, 64, 65, 1000, 2048)]
)


@pytest.mark.parametrize(("name", "case"), CPU_CASES, ids=lambda x: x if isinstance(x, str) else x.id)
def test_budget(name, case, device):
    check(case, name, device, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("block", masks.BLOCKS)
@pytest.mark.parametrize(("name", "case"), GPU_CASES, ids=lambda x: x if isinstance(x, str) else x.id)
def test_budget_in_full(name, case, block, device):
    check(case, name, device, block)


def test_tiles_of_128(device):
    """The blocks of the kernels are parts of a tile: two or more steps for each."""
    check(a_case(70, 135, 16, "fp32"), "causal window", device, 128)


SLOPES = torch.tensor([0.5, 2.0])
SCORES = {
    "alibi": lambda device: alibi(SLOPES.to(device)),
    "scaled": lambda device: TileScore(halves, numbers=(0.5,), slope=halves_slope),
}


def reference_scores(name, n, m):
    _, _, i, j = grid(n, m, True)
    if name == "alibi":
        return lambda s: s - SLOPES[None, :, None, None].to(s) * (i - j).abs().to(s)
    return lambda s: s * 0.5 + torch.where(j % 2 == 0, 0.25, 0.0).to(s)


@pytest.mark.parametrize(("name", "dtype"), [("alibi", "fp32"), ("alibi", "bf16"), ("scaled", "fp32")])
def test_scores_that_depend_on_the_place(name, dtype, device):
    given = a_case(70, 130, 16, dtype, softcap=2.0 if name == "scaled" else None)
    check(given, "causal window", device, 64, SCORES[name](device), reference_scores(name, 70, 130))


def test_a_score_may_hide(device):
    """A query all of whose scores are -inf counts as one that sees no key."""
    inputs = make_inputs(a_case(70, 70, 16, "fp32"), device)
    results = run(sparse_with(TileMask(everything), TileScore(hides_odd)), inputs)
    visible = torch.ones(70, 70, dtype=torch.bool, device=device)
    visible[3], visible[:, 1::2] = False, False
    truth, budget = error_budget(inputs, visible=visible)
    ratios = budget_ratios(results, inputs, truth, budget)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    assert (results["lse"][:, :, 3] == -math.inf).all()


def test_same_as_the_dense_kernels(device):
    """Under the causal mask the tiles are those of flash_attention in another order."""
    inputs = make_inputs(a_case(70, 100, 32, "fp32"), device)
    ours = run(sparse_with(causal()), inputs)
    theirs = run(functools.partial(flash_attention, causal=True, return_lse=True), inputs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(5, 0), (0, 5), (0, 0), (5, 70)], ids=str)
def test_nothing_to_see(sizes, device):
    n, m = sizes
    q = torch.randn(BATCH, HEADS, n, 16, device=device, requires_grad=True)
    k, v = (torch.randn(BATCH, 1, m, 16, device=device, requires_grad=True) for _ in range(2))
    out, lse = sparse_attention(q, k, v, TileMask(nothing), return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()
    for gradient in torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse))):
        assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_that_nobody_sees_does_not_show(dtype, device):
    """Padding may hold anything: keys that no query sees, queries that see no key."""
    ids = ids_of(130, device)
    q, k, v, do = (torch.randn(BATCH, HEADS, 130, 16, device=device, dtype=dtype) for _ in range(4))
    tiles = (causal() & documents(ids)).tiles(BATCH, HEADS, 130, 130, device=device, block=64)
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    dirty = []
    for x in (q, k, v):
        x[:, :, ids < 0] = math.nan
        dirty.append(x.clone().requires_grad_())
    expected = run(sparse_with(tiles), make_inputs(a_case(130, 130, 16, "fp16"), device)._replace(
        q=clean[0], k=clean[1], v=clean[2], do=do, dlse=None
    ))  # fmt: skip
    do = do.masked_fill((ids < 0)[:, None], math.nan)
    out = sparse_attention(*dirty, tiles)
    gradients = torch.autograd.grad(out, dirty, do)
    assert torch.equal(out, expected["out"])
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert torch.equal(x, expected[name]), name


def test_nan_that_is_seen_shows(device):
    q, k, v = (torch.randn(1, 1, 130, 16, device=device) for _ in range(3))
    k[0, 0, 100] = math.nan
    v[0, 0, 20] = math.nan
    out = sparse_attention(q, k, v, causal().tiles(1, 1, 130, 130, device=device, block=64))
    assert out[0, 0, 100:].isnan().all() and out[0, 0, 20:].isnan().all()
    assert not sparse_attention(q, k, v, prefix(20).tiles(1, 1, 130, 130, device=device)).isnan().any()


def test_a_mask_by_head_with_grouped_queries(device):
    """Each query head of a group has a list of its own, in the kernel for dK and dV too."""
    ratios = error_ratios(
        lambda q, k, v, visible: sparse_attention(q, k, v, TileMask(below, numbers=(2,)), return_lse=True),
        make_inputs(a_case(70, 65, 16, "fp32"), device),
        visible=is_below(70, 65).to(device),
    )
    assert all(ratio <= 1 for ratio in ratios.values()), ratios


def test_second_derivatives_are_refused(device):
    q = torch.randn(1, 1, 5, 16, device=device, requires_grad=True)
    out = sparse_attention(q, q, q, causal())
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        first.sum().backward()


def test_torch_compile_goes_around_it(device):
    q = torch.randn(1, 1, 5, 16, device=device, requires_grad=True)
    tiles = causal().tiles(1, 1, 5, 5, device=device)

    def step(q):
        return sparse_attention(q * 2, q, q, tiles).sin()

    out = torch.compile(step, backend="aot_eager")(q)
    assert torch.equal(out, step(q))
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(dq, torch.autograd.grad(step(q).sum(), q)[0])


def test_numbers_of_other_types_are_other_kernels(device, monkeypatch):
    """2 and 2.0 are equal, but a kernel compiled for an int cannot take a float."""
    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})
    q = torch.ones(1, 1, 4, 16, device=device)
    for n, kinds_of_calls in ((2, 1), (2.0, 2), (2, 2)):
        sparse_attention(q, q, q, TileMask(first_keys, numbers=(n,)))
        assert len(import_module("flashattn.launch").LAUNCHES) == kinds_of_calls


def test_autocast(device):
    q = torch.randn(1, 1, 5, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert sparse_attention(q, q, q, causal()).dtype == torch.bfloat16


@pytest.mark.gpu
def test_an_edited_mask_is_compiled_anew(device, tmp_path):
    """Two masks of one name and one module, as when a cell is edited and run again, are two kernels."""
    import importlib.util

    outs = []
    for limit in (3, 5):
        path = tmp_path / "edited.py"
        text = f"import triton\n@triton.jit\ndef edited(b, h, i, j):\n    return j < {limit}\n"
        path = tmp_path / f"v{limit}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("edited", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        q = torch.ones(1, 1, 64, 16, device=device)
        v = torch.arange(64.0, device=device)[None, None, :, None].expand(1, 1, 64, 16)
        outs.append(sparse_attention(q, q, v, TileMask(module.edited))[0, 0, 0, 0].item())
    assert outs == [1.0, 2.0]


def test_fingerprints_tell_functions_of_one_name_apart(monkeypatch):
    """Where functions compile, the program that names the compiled kernel changes with their source."""

    class Compiled:
        def __init__(self, source):
            self.cache_key = source

    assert masks.fingerprint(Compiled("0f" * 32)) != masks.fingerprint(Compiled("0e" * 32))
    keys = iter((7, 8))
    monkeypatch.setattr(masks, "fingerprint", lambda fn: next(keys))
    mask = causal()
    assert mask.program()[1] != mask.program()[1]


SCRIPT = str(Path(__file__).with_name("compile_sparse.py"))
COMPILED = [
    ["forward", 64, "float16", "sm_90", "documents"],
    ["forward", 128, "bfloat16", "sm_90", "window"],
    ["dq", 128, "bfloat16", "sm_90", "documents"],
    ["dkdv", 64, "float16", "sm_90", "documents"],
    ["dkdv", 128, "bfloat16", "sm_90", "blocks"],
    ["forward", 64, "float16", "sm_90", "whole"],
    ["forward", 128, "bfloat16", "sm_90", "whole"],
    ["dq", 128, "bfloat16", "sm_90", "whole"],
    ["dkdv", 128, "bfloat16", "sm_90", "whole"],
    ["forward", 128, "bfloat16", "sm_80", "documents"],
    ["dq", 64, "float16", "sm_80", "window"],
    ["dkdv", 128, "bfloat16", "sm_89", "window"],
    ["forward", 64, "float32", "sm_80", "alibi"],
]
# What the mask of partial tiles, a loop of its own, may spill beside the sums of dK and dV in bytes a thread.
MAY_SPILL = 512
# The forward pass without a mask has the block of the dense kernel at head_dim 128, which spills 120 to 148 and is
# faster all the same (HOPPER_FULL in configs.py).
MAY_SPILL_WHOLE = 200


def test_compiles_for_gpus_that_are_not_here():
    """They fit, the loop over full tiles is pipelined on the tensor cores, and the forward pass and dQ spill nothing."""
    from flashattn.configs import TARGETS

    rows = [json.loads(line) for line in python(SCRIPT, json.dumps(COMPILED)).splitlines()]
    assert len(rows) == len(COMPILED)
    for row in rows:
        assert row["shared_bytes"] <= TARGETS[row["target"]].shared_bytes, row
        assert not row["serialized"], row
        if row["dtype"] != "float32":
            assert row["tensor_cores"], row
            on_hopper = row["direction"] == "dkdv" and row["target"] == "sm_90"
            is_whole = (row["direction"], row["head_dim"], row["mask"]) == ("forward", 128, "whole")
            limit = MAY_SPILL if on_hopper else MAY_SPILL_WHOLE if is_whole else 0
            assert row["spill_stores_bytes"] <= limit, row


# ---- Errors.


def not_jit(b, h, i, j):
    return j <= i


@triton.jit
def three(b, h, i):
    return i > 0


MASK_ERRORS = [
    (lambda: TileMask(not_jit), TypeError, r"`fn` must be a function under @triton.jit, got function"),
    (lambda: TileMask(three), ValueError, r"`fn` must take 4 arguments: b, h, i, j, 0 tensors .* three takes 3"),
    (lambda: TileMask(nothing, numbers=(3,)), ValueError, r"`fn` must take 5 arguments.* and 1 numbers"),
    (lambda: TileMask(nothing, tensors=torch.zeros(3)), TypeError, r"`tensors` must be a tuple, got Tensor"),
    (lambda: TileMask(nothing, tensors=(3,)), TypeError, r"`tensors` must hold only torch.Tensor, got int"),
    (
        lambda: TileMask(nothing, tensors=(torch.zeros(4, 4).T[1:],)),
        ValueError,
        r"`tensors` must be contiguous, got str",
    ),
    (lambda: TileMask(nothing, numbers=3), TypeError, r"`numbers` must be a tuple, got int"),
    (lambda: TileMask(nothing, numbers=(True,)), TypeError, r"`numbers` must hold only int or float, got bool"),
    (lambda: TileMask(nothing, numbers=(2**63,)), ValueError, r"`numbers` must fit into 64 bits, got 9"),
    (lambda: TileMask(nothing, numbers=(1,) * 7), ValueError, r"`numbers` must be at most 6 in a mask and its score"),
    (lambda: TileMask(nothing, at_position=1), TypeError, r"`at_position` must be True or False, got 1"),
    (lambda: TileMask(nothing, by_batch=1), TypeError, r"`by_batch` must be True, False or None, got 1"),
    (lambda: TileMask(nothing, by_head="no"), TypeError, r"`by_head` must be True, False or None, got 'no'"),
    (lambda: causal() & 3, TypeError, r"unsupported operand"),
    (lambda: causal() | None, TypeError, r"unsupported operand"),
    (
        lambda: functools.reduce(lambda a, b: a | b, map(sliding_window, range(4))),
        ValueError,
        r"`numbers` must be at most 6",
    ),
    (lambda: sliding_window(-1), ValueError, r"`left` must be 0 to 2\*\*30, got -1"),
    (lambda: sliding_window(1.5), TypeError, r"`left` must be an int, got 1.5"),
    (lambda: sliding_window(3, -1), ValueError, r"`right` must be 0 to 2\*\*30, got -1"),
    (lambda: prefix(-1), ValueError, r"`length` must be 0 to 2\*\*30, got -1"),
    (lambda: prefix(torch.zeros(2)), TypeError, r"`length` must be int32 or int64, got float32"),
    (lambda: prefix(torch.zeros(2, 2).int()), ValueError, r"`length` must be \(batch,\), got shape \(2, 2\)"),
    (lambda: documents([1, 2]), TypeError, r"`ids` must be a torch.Tensor, got list"),
    (lambda: documents(torch.zeros(4)), TypeError, r"`ids` must be int32 or int64, got float32"),
    (lambda: documents(torch.zeros(4, 1, 1).int()), ValueError, r"`ids` must be \(seqlen,\) or \(batch, seqlen\)"),
    (
        lambda: documents(torch.zeros(4).int(), torch.zeros(4)),
        TypeError,
        r"`ids_k` must be int32 or int64, got float32",
    ),
    (
        lambda: documents(torch.zeros(2, 4).int(), torch.zeros(3, 4).int()),
        ValueError,
        r"`ids_k` must have batch 2 like `i",
    ),
    (lambda: dilated(0), ValueError, r"`step` must be 1 to 2\*\*30, got 0"),
    (lambda: selected_blocks(torch.zeros(4).int(), 64), ValueError, r"`index` must be \(n_query_blocks, k\) or"),
    (lambda: selected_blocks(torch.zeros(4, 1), 64), TypeError, r"`index` must be int32 or int64, got float32"),
    (lambda: selected_blocks(torch.zeros(4, 1).int(), 0), ValueError, r"`block` must be 1 to 2\*\*30, got 0"),
    (lambda: selected_blocks(torch.zeros(4, 1).int(), 64, 0), ValueError, r"`n_key_blocks` must be 1 to"),
    (lambda: causal().tiles(1.5, 1, 5, 5), TypeError, r"`batch` must be an int, got 1.5"),
    (lambda: causal().tiles(1, True, 5, 5), TypeError, r"`n_heads` must be an int, got True"),
    (lambda: causal().tiles(1, 1, -5, 5), ValueError, r"`seqlen_q` must be 0 to 2\*\*30, got -5"),
    (lambda: causal().tiles(1, 1, 5, 2**31), ValueError, r"`seqlen_k` must be 0 to 2\*\*30, got 2147483648"),
    (lambda: causal().tiles(1, 1, 5, 5, block=32), ValueError, r"`block` must be 64 or 128, got 32"),
    (
        lambda: prefix(torch.zeros(2).int()).tiles(3, 1, 5, 5),
        ValueError,
        r"`batch` must be 2, which is what the mask's",
    ),
    (
        lambda: documents(torch.zeros(4).int()).tiles(1, 1, 5, 5),
        ValueError,
        r"`seqlen_q` must be 4, .* tensors are for",
    ),
    (
        lambda: selected_blocks(torch.zeros(1, 2, 3, 1).int(), 64).tiles(1, 3, 5, 5),
        ValueError,
        r"`n_heads` must be 2, .* tensors are for, got 3",
    ),
    (
        lambda: documents(torch.zeros(4).int()).tiles(1, 1, 4, 4, device="meta"),
        ValueError,
        r"`device` must be that of the mask's tensors, cpu, got meta",
    ),
    (lambda: TileScore(not_jit), TypeError, r"`fn` must be a function under @triton.jit"),
    (lambda: TileScore(nothing), ValueError, r"`fn` must take 5 arguments: s, b, h, i, j, 0 tensors and 0 numbers"),
    (lambda: TileScore(hides_odd, slope=halves_slope), ValueError, r"`slope` must take 5 arguments"),
    (lambda: TileScore(hides_odd, at_position=None), TypeError, r"`at_position` must be True or False"),
    (lambda: alibi([1.0]), TypeError, r"`slopes` must be a float32 tensor \(heads,\), got \[1.0\]"),
    (lambda: alibi(torch.zeros(2, 2)), TypeError, r"`slopes` must be a float32 tensor .* of shape \(2, 2\)"),
]


@pytest.mark.parametrize(("call", "error", "message"), MASK_ERRORS, ids=[message for *_, message in MASK_ERRORS])
def test_masks_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


def other_sizes(**sizes):
    def call(q, k, v):
        wanted = dict(batch=1, n_heads=2, seqlen_q=5, seqlen_k=5) | sizes
        return sparse_attention(q, k, v, causal().tiles(**wanted, device=q.device))

    return call


CALL_ERRORS = [
    (
        lambda q, k, v: sparse_attention(q, k, v, None),
        TypeError,
        r"`mask` must be a TileMask or the Tiles of one, got N",
    ),
    (
        lambda q, k, v: sparse_attention(q, k, v, torch.ones(5, 5)),
        TypeError,
        r"`mask` must be a TileMask .* got Tensor",
    ),
    (
        lambda q, k, v: sparse_attention(q, k, v, causal(), score=nothing),
        TypeError,
        r"`score` must be a TileScore or None",
    ),
    (lambda q, k, v: sparse_attention(q, k, v, causal(), scale="x"), TypeError, r"`scale` must be a number or None"),
    (lambda q, k, v: sparse_attention(q, k, v, causal(), softcap=-1), ValueError, r"`softcap` must be a positive"),
    (
        lambda q, k, v: sparse_attention(q, k, v, causal(), return_lse=1),
        TypeError,
        r"`return_lse` must be True or False",
    ),
    (
        lambda q, k, v: sparse_attention(q, k[:, :, :, :3], v, causal()),
        ValueError,
        r"`k` must have head_dim 16 like `q`",
    ),
    (lambda q, k, v: sparse_attention(q, k, v[0], causal()), ValueError, r"`v` must be 4-D"),
    (other_sizes(batch=2), ValueError, r"`mask` must be tiles for batch 1 like q and k, got tiles for 2"),
    (other_sizes(n_heads=1), ValueError, r"`mask` must be tiles for n_heads 2 like q and k, got tiles for 1"),
    (other_sizes(seqlen_q=6), ValueError, r"`mask` must be tiles for seqlen_q 5 like q and k, got tiles for 6"),
    (other_sizes(seqlen_k=6), ValueError, r"`mask` must be tiles for seqlen_k 5 like q and k, got tiles for 6"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALL_ERRORS, ids=[message for *_, message in CALL_ERRORS])
def test_calls_refuse(call, error, message, device):
    q, k, v = (torch.zeros(1, 2, 5, 16, device=device) for _ in range(3))
    with pytest.raises(error, match=message):
        call(q, k, v)


def test_other_devices_are_refused(device):
    q = torch.zeros(1, 2, 5, 16, device=device)
    tiles = causal().tiles(1, 2, 5, 5, device=device)
    tiles.kinds = tiles.kinds.to("meta")
    with pytest.raises(ValueError, match=r"`mask` must have its tensors on .* like `q`, got meta"):
        sparse_attention(q, q, q, tiles)
    with pytest.raises(ValueError, match=r"`score` must have its tensors on .* like `q`, got meta"):
        sparse_attention(q, q, q, causal(), score=alibi(torch.zeros(2, device="meta")))
    score = TileScore(hides_odd)
    score.numbers = (1,) * 7
    with pytest.raises(ValueError, match=r"`numbers` must be at most 6 in a mask and its score together, got 7"):
        sparse_attention(q, q, q, causal(), score=score)


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(masks.INTERPRETED, "value", False)
    with pytest.raises(RuntimeError, match=r"`device` must be a CUDA device, got cpu: .* TRITON_INTERPRET=1"):
        causal().tiles(1, 1, 5, 5, device="cpu")
    q = torch.zeros(1, 1, 5, 16)
    with pytest.raises(RuntimeError, match="`q` must be on a CUDA device, got cpu"):
        sparse_attention(q, q, q, causal())

"""The kernels for Hopper: which calls they run, what the compiler makes of them, and, on one, their results."""

import functools
import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from processes import python

import flashattn
from flashattn import configs, flash_attention, tune
from flashattn.bench import load_targets
from flashattn.configs import hopper_backward_config, hopper_config
from flashattn.testing import Case, budget_ratios, error_budget, make_inputs, run

pytestmark = pytest.mark.triton
SCRIPT = str(Path(__file__).with_name("compile_hopper.py"))
# Forward, the only registers that are spilled belong to the code that masks a block; backward, to what is computed once.
MAY_SPILL = {("forward", 128): 56, ("forward", 64): 0, ("backward", 128): 24, ("backward", 64): 108}
ENTRIES = [
    ["forward", 128, "bfloat16", False, []],
    ["forward", 128, "float16", True, ["window"]],
    ["forward", 64, "bfloat16", False, []],
    ["forward", 64, "float16", True, ["short"]],
    ["backward", 128, "bfloat16", True, []],
    ["backward", 128, "float16", False, []],
    ["backward", 64, "bfloat16", True, ["window"]],
    ["backward", 64, "float16", False, []],
]


def test_compiles_without_a_gpu():
    rows = [json.loads(line) for line in python(SCRIPT, json.dumps(ENTRIES)).splitlines()]
    assert len(rows) == len(ENTRIES)
    for (direction, head_dim, *_), row in zip(ENTRIES, rows, strict=True):
        assert row["tensor_cores"] and not row["serialized"], row
        assert row["spill_stores_bytes"] <= MAY_SPILL[direction, head_dim], row
        assert row["shared_bytes"] <= configs.TARGETS["sm_90"].shared_bytes, row
        # What the groups ask for later comes out of what all threads, with the four warps of loads, begin with.
        groups = row["config"].get("groups", 2)
        assert row["config"]["registers"] * groups * 128 + 24 * 128 <= configs.TARGETS["sm_90"].registers, row


def test_the_table_holds_every_kernel_and_what_was_promised():
    rows = load_targets("hopper")
    versions = {row["triton"] for row in rows}
    assert {"3.6.0", metadata.version("triton")} <= versions, "stale: make targets"
    kinds = [
        (row["triton"], row["direction"], row["head_dim"], row["dtype"], row["causal"], row["extras"]) for row in rows
    ]
    assert len(set(kinds)) == len(kinds) == 40 * len(versions)
    for row in rows:
        cfg = hopper_backward_config(row["head_dim"])
        if row["direction"] == "forward":
            seqlen = 512 if row["extras"] == "short" else 4096
            masked = row["causal"] or row["extras"] == "window"
            cfg = hopper_config(row["head_dim"], row["head_dim"], seqlen, masked=masked)
        assert json.loads(row["config"]) == cfg._asdict(), "stale: make targets"
        assert row["tensor_cores"] and not row["serialized"], row
        assert row["spill_stores_bytes"] <= MAY_SPILL[row["direction"], row["head_dim"]], row


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Have the choice of kernels take this machine for a Hopper GPU."""
    import flashattn.backends

    monkeypatch.setattr(flashattn.backends, "target_of", lambda device: configs.TARGETS["sm_90"])


def _qkv(device, *, seqlen=2048, heads=4, head_dim=64, head_dim_v=None, dtype=torch.float16):
    return tuple(
        torch.randn(1, heads, seqlen, d, device=device, dtype=dtype)
        for d in (head_dim, head_dim, head_dim_v or head_dim)
    )


def test_backend_says_which_kernels_run_and_why(device, as_on_hopper, monkeypatch):
    q, k, v = _qkv(device)
    assert flashattn.backend(q, k, v) == ("hopper", None)
    assert flashattn.backend(q, k, v, causal=True, window=(100, None)).name == "hopper"
    no = {
        "float32": _qkv(device, dtype=torch.float32),
        "head dimensions up to 128": _qkv(device, head_dim=160),
        "rows must be regular": (q.mT.contiguous().mT, k, v),
        "fewer than": _qkv(device, seqlen=64),
    }
    for reason, tensors in no.items():
        name, why = flashattn.backend(*tensors)
        assert name == "portable" and reason in why, why
    assert "no softcap" in flashattn.backend(q, k, v, softcap=20.0).reason
    assert "no query sees" in flashattn.backend(q[:, :, :1024], k, v, window=(10, 0)).reason
    monkeypatch.setenv("FLASHATTN_BACKEND", "portable")
    assert flashattn.backend(q, k, v) == ("portable", "FLASHATTN_BACKEND=portable")
    monkeypatch.setenv("FLASHATTN_BACKEND", "hopper")
    assert flashattn.backend(*_qkv(device, seqlen=64)).name == "hopper"
    for call in (flashattn.backend, flash_attention):
        with pytest.raises(RuntimeError, match="FLASHATTN_BACKEND=hopper, but .* no softcap"):
            call(q, k, v, softcap=20.0)


def test_the_variable_is_checked(device, monkeypatch):
    monkeypatch.setenv("FLASHATTN_BACKEND", "cuda")
    q, k, v = _qkv(device, seqlen=16)
    with pytest.raises(ValueError, match="FLASHATTN_BACKEND must be portable, hopper or not set, got 'cuda'"):
        flash_attention(q, k, v)
    with pytest.raises(ValueError, match="FLASHATTN_BACKEND must be"):
        flashattn.backend(q, k, v)


def test_tune_searches_the_kernels_whose_blocks_it_prints(device, as_on_hopper):
    with tune.replaced("forward"):
        assert flashattn.backend(*_qkv(device)).name == "portable"
    assert flashattn.backend(*_qkv(device)).name == "hopper"


def test_other_gpus_run_the_portable_kernels(device, monkeypatch):
    import flashattn.backends

    monkeypatch.setattr(flashattn.backends, "target_of", lambda device: configs.TARGETS["sm_80"])
    assert "this is sm_80" in flashattn.backend(*_qkv(device)).reason


def test_another_gluon_means_one_warning_and_the_portable_kernels(device, as_on_hopper, monkeypatch):
    import sys

    import flashattn.backends

    monkeypatch.setitem(sys.modules, "flashattn.hopper", None)  # its import raises
    monkeypatch.delattr(flashattn, "hopper", raising=False)
    flashattn.backends._why_no_gluon.cache_clear()
    try:
        q, k, v = _qkv(device)
        with pytest.warns(UserWarning, match="runs its portable kernels: .* this Triton's Gluon") as caught:
            assert flashattn.backend(q, k, v).name == "portable"
            assert flashattn.backend(q, k, v).name == "portable"
        assert len(caught) == 1
    finally:
        flashattn.backends._why_no_gluon.cache_clear()


# Full and causal, windows, groups, lengths that fill no tile, head dimensions that are padded, more queries than keys and
# the other way round, scores far from 0, and tiles that many programs share.
CASES = [
    Case(128, 128, 128, heads=2, heads_kv=2),
    Case(200, 333, 64, causal=True),
    Case(513, 200, 128, heads=2, heads_kv=1),
    Case(777, 777, 64, window=(100, 30)),
    Case(1, 1, 64, causal=True, heads=3, heads_kv=3),
    Case(1, 77, 128, heads=3, heads_kv=1),
    Case(1000, 1000, 96, head_dim_v=72, window=(17, 0)),
    Case(2048, 2048, 128, causal=True, heads=2),
    Case(300, 300, 48, window=(0, 0)),
    Case(2048, 4096, 64, causal=True, heads=8),
    Case(640, 640, 128, causal=True, heads=40, heads_kv=40),
    Case(65, 3000, 64, causal=True, heads=6, heads_kv=2),
    Case(3000, 3000, 64, heads=2, heads_kv=1),
    Case(500, 700, 128, family="large"),
    Case(500, 700, 64, causal=True, family="low", scale=0.3),
]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not Hopper")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_budget_and_repeatability(device, case, dtype, monkeypatch, record_property):
    monkeypatch.setenv("FLASHATTN_BACKEND", "hopper")
    torch.use_deterministic_algorithms(False)
    case = case._replace(dtype=dtype)
    inputs = make_inputs(case, device, layouts=("heads", "rows", "heads", "rows"), row_multiple=8)
    attention = functools.partial(flash_attention, return_lse=True, **case.options)
    first = run(attention, inputs)
    held_to = error_budget(inputs, **case.options)
    ratios = budget_ratios(first, inputs, *held_to)
    record_property("ratios", {name: round(ratio, 3) for name, ratio in ratios.items()})
    assert max(ratios.values()) <= 1, ratios
    for _ in range(8):
        again = run(attention, inputs)
        for name in first:
            if name != "dq":
                assert torch.equal(first[name], again[name]), f"{name} differs on another run"
    ratios = budget_ratios(again, inputs, *held_to)
    assert max(ratios.values()) <= 1, ratios

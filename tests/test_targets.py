"""Compile the kernels for GPUs that are not here: they fit, and the default configurations do not spill."""

import functools
import json
from pathlib import Path

import pytest
import torch
from processes import python

from flashattn import configs
from flashattn.bench import DATA, load_targets
from flashattn.configs import INTERPRETER, TARGETS, block_config

KERNELS = ("forward", "dq", "dkdv")
TABLE = DATA / "targets.csv"
SCRIPT = str(Path(__file__).with_name("compile_kernels.py"))
# Every target, head dimension, dtype and mask at least once, and every extra; 2 cores have no time for their product,
# which `make targets` compiles.
JOBS = {
    "sm_75": [("float16", 64, True, []), ("float32", 256, True, [])],
    "sm_80": [("bfloat16", 128, True, [])],
    "sm_86": [("float16", 256, False, []), ("bfloat16", 64, True, ["window", "softcap"])],
    "sm_89": [("float16", 64, False, [])],
    "sm_90": [
        ("bfloat16", 64, True, ["varlen", "dlse"]),
        ("float16", 128, False, []),
        ("bfloat16", 256, True, []),
        ("bfloat16", 128, True, ["rows"]),
        ("bfloat16", 64, True, ["window"]),
    ],
    "sm_100": [("bfloat16", 128, True, []), ("float16", 256, True, [])],
    "sm_120": [("bfloat16", 128, False, ["bias"])],
    "gfx942": [("bfloat16", 128, True, [])],
}


# (target, kernel, head_dim, causal) -> bytes that may be spilled: the block that spills nothing is 5 to 10 % slower on an
# H200. And with Triton 3.4, which allots registers less well, up to 10 registers may go wherever newer ones spill none.
MAY_SPILL = {("sm_90", "forward", 128, False): 160}
MAY_SPILL_WITH_THE_OLDEST = 40


def assert_fits(row):
    """What the default configuration promises for a target, in the words of the docstring of block_config's tables."""
    assert row["shared_bytes"] <= TARGETS[row["target"]].shared_bytes, row
    assert row["registers"] * 32 * row["num_warps"] <= TARGETS[row["target"]].registers or row["target"] == "gfx942", (
        row
    )
    if row["target"] not in ("sm_75", "gfx942") and row["dtype"] != "float32" and row["extras"] in ("", "rows"):
        key = tuple(row[name] for name in ("target", "direction", "head_dim", "causal"))
        allowed = MAY_SPILL.get(key, MAY_SPILL_WITH_THE_OLDEST if row["triton"].startswith("3.4.") else 0)
        assert row["spill_stores_bytes"] <= allowed or row["extras"], row
        assert row["tensor_cores"], row
    assert not row["serialized"], row


@pytest.mark.triton
@pytest.mark.parametrize("target", JOBS)
def test_compiles_and_fits(target):
    """Now, with the Triton that is installed; and what comes out is what stands in targets.csv, or that is stale."""
    entries = [
        (kernel, d, dtype, causal, target, extras) for dtype, d, causal, extras in JOBS[target] for kernel in KERNELS
    ]
    rows = [json.loads(line) for line in python(SCRIPT, json.dumps(entries)).splitlines()]
    assert len(rows) == len(entries)
    recorded = load_targets()
    for row in rows:
        assert_fits(row)
        if row["extras"] in ("", "rows") and any(r["triton"] == row["triton"] for r in recorded):
            assert row in recorded, f"run make targets: {row}"


@pytest.mark.product
@pytest.mark.timeout(3600)
@pytest.mark.triton
def test_the_full_product_is_what_is_recorded(tmp_path):
    """Every kernel for every target, before a release: `pytest -m product`, minutes on many cores."""
    copy = tmp_path / "targets.csv"
    python(SCRIPT, "--table", str(copy))
    lines = copy.read_text().splitlines()
    assert len(lines) > 400 and set(lines) <= set(TABLE.read_text().splitlines())


def test_table_is_complete_and_fits():
    """Every kernel, head dimension, dtype and mask for every target; with the oldest Triton, that of the GPU runs and 3.7."""
    rows = load_targets()
    versions = {row["triton"] for row in rows}
    assert {version.rpartition(".")[0] for version in versions} == {"3.4", "3.6", "3.7"}
    for version in versions:
        keys = {
            tuple(row[name] for name in ("target", "direction", "head_dim", "dtype", "causal", "extras"))
            for row in rows
            if row["triton"] == version
        }
        wanted = {
            (target, kernel, d, dtype, causal, extras)
            for target in TARGETS
            for kernel in KERNELS
            for d in (64, 128, 256)
            for dtype in ("float16", "bfloat16", "float32")
            for causal in (True, False)
            for extras in ("", "rows")
            if not (extras and (target != "sm_90" or dtype == "float32"))
            and not (target == "sm_75" and dtype == "bfloat16")
            and not (target == "gfx942" and version < "3.6")
        }
        assert keys == wanted
    for row in rows:
        assert_fits(row)


def test_table_has_the_blocks_of_configs():
    for row in load_targets():
        chosen = block_config(
            row["direction"], row["head_dim"], row["head_dim"], getattr(torch, row["dtype"]), TARGETS[row["target"]],
            causal=row["causal"],
        )  # fmt: skip
        assert chosen[:-1] == tuple(row[name] for name in chosen._fields[:-1]), f"run make targets: {row}"


@pytest.mark.parametrize("head_dim", [1, 16, 17, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("target", [*TARGETS.values(), INTERPRETER], ids=lambda target: target.name)
def test_blocks_cover_every_head_dim(target, head_dim):
    for kernel in KERNELS:
        for dtype in (torch.float16, torch.float32):
            for head_dim_v in (8, 256):
                config = block_config(kernel, head_dim, head_dim_v, dtype, target, causal=True)
                for block, size in ((config.block_d, head_dim), (config.block_dv, head_dim_v)):
                    assert block >= max(size, 16) and block & (block - 1) == 0
                assert config.block_m >= 16 and config.block_n >= 16


def test_narrow_tiles_on_hopper():
    """16 columns are padded to 32 for wgmma, and to 64 where rows are not regular."""
    choose = functools.partial(block_config, "dq", 16, 32, torch.float16, causal=True)
    assert choose(TARGETS["sm_90"])[2:4] == (32, 32)
    assert choose(TARGETS["sm_90"], regular=False)[2:4] == (64, 64)
    assert choose(TARGETS["sm_80"], regular=False)[2:4] == (16, 32)


def test_unknown_targets_get_blocks_that_fit():
    """A GPU made after this was written: by its matrix units and its shared memory, not by its name."""
    small = block_config(
        "forward", 128, 128, torch.float16, configs.Target("sm_999", "mma", 49152), causal=True
    )  # fmt: skip
    assert small[:2] + small[4:6] == configs.SMALL[128]
    large = block_config("forward", 128, 128, torch.float16, configs.Target("sm_121", "mma", 101376), causal=True)
    assert large == block_config("forward", 128, 128, torch.float16, TARGETS["sm_120"], causal=True)

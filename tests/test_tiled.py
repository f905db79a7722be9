"""The tiled loops against the reference, and the budget itself against planted bugs."""

import inspect

import pytest
import torch

from flashattn import attention_reference, attention_tiled, tiled
from flashattn.testing import DTYPES, Case, assert_within_budget, error_ratios, make_inputs

BLOCKS = [(1, 1), (16, 16), (16, 48), (64, 32), (256, 256)]


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (33, 33), (20, 50), (50, 20)], ids=str)
def test_any_block_size_is_exact(sizes, causal, blocks):
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, sizes[0]), (2, sizes[1]), (2, sizes[1])))
    out, lse = attention_tiled(q, k, v, causal=causal, block_m=blocks[0], block_n=blocks[1])
    expected_out, expected_lse = attention_reference(q, k, v, causal=causal)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["gaussian", "low"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_within_budget(causal, dtype, family):
    assert_within_budget(attention_tiled, Case(113, 203, 64, dtype, causal, family=family))


# Each mutant: what goes wrong, the text replaced in tiled.py, its replacement, and the results that must go over budget.
MUTANTS = {
    "scale forgotten": ("s = apply_softcap((q @ k.mT) * scale", "s = apply_softcap((q @ k.mT)", {"out", "lse"}),
    "padded keys unmasked": ("lse[..., start_m:end_m] = m_i + torch.log(l_i)", PAD := (
        "pad = -seqlen_k % block_n\n"
        "        l_i = l_i + pad * torch.exp(-m_i)\n"
        "        out[..., start_m:end_m, :] = (acc / l_i[..., None]).to(out.dtype)\n"
        "        lse[..., start_m:end_m] = m_i + torch.log(l_i)"
    ), {"out", "lse"}),
    "accumulator not rescaled": ("acc = acc * alpha[..., None] +", "acc = acc +", {"out"}),
    "sum not rescaled": ("l_i * alpha + p.sum", "l_i + p.sum", {"out", "lse"}),
    "maximum of the last tile only": ("m_new = torch.maximum(m_i, s.amax(dim=-1))", "m_new = s.amax(dim=-1)", set()),
    "causal aligned top-left": ("shift = seqlen_k - seqlen_q", "shift = 0", {"out", "lse"}),
    "causal off by one": ("shift, causal=causal, window=window)\n    return s.masked", "shift - 1, causal=causal, window=window)\n    return s.masked", {"out", "lse"}),
    "last key block dropped": ("for start_n in range(lo // block_n * block_n, hi, block_n)", "for start_n in range(lo // block_n * block_n, hi - block_n, block_n)", {"out", "lse"}),
    "delta forgotten": ("dp - delta[..., rows, None] +", "dp +", {"dq", "dk"}),
    "dlse forgotten": ("+ dlse[..., rows, None]", "", {"dq", "dk"}),
    "dlse with the wrong sign": ("+ dlse[..., rows, None]", "- dlse[..., rows, None]", {"dq", "dk"}),
    "dk unscaled": ("(ds.mT @ q_tile).sum(dim=2, keepdim=True) * scale", "(ds.mT @ q_tile).sum(dim=2, keepdim=True)", {"dk"}),
    "dv of one head of the group": ("(p.mT @ do_tile).sum(dim=2, keepdim=True)", "(p.mT @ do_tile)[:, :, :1]", {"dv"}),
    "dq of the last key block only": ("dq[..., rows, :] += ds @ k_tile * scale", "dq[..., rows, :] = ds @ k_tile * scale", {"dq"}),
    "base-2 lse": ("m_i + torch.log(l_i)", "(m_i + torch.log(l_i)) / math.log(2)", {"lse"}),
}  # fmt: skip


def mutant(old, new):
    """Return attention_tiled from a copy of tiled.py in which `old` reads `new`."""
    source = inspect.getsource(tiled)
    assert old in source, "the mutated line is gone from tiled.py: change the mutant with it"
    source = source.replace(old, new).replace("from .", "from flashattn.")
    namespace = {"__name__": "flashattn_mutant"}
    exec(compile(source, "mutant of tiled.py", "exec"), namespace)
    return namespace["attention_tiled"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_over_budget(name, dtype):
    old, new, caught_in = MUTANTS[name]
    case = Case(113, 203, 64, dtype, causal="causal" in name, family="low")
    ratios = error_ratios(mutant(old, new), make_inputs(case), causal=case.causal)
    if not caught_in:
        # Not every change is a bug: any reference point gives the same result as long as it is used throughout.
        assert max(ratios.values()) <= 1
    else:
        assert all(ratios[key] > 1 for key in caught_in), ratios


@pytest.mark.parametrize("seqlen_k", [127, 1000, 2000])
def test_unmasked_padding_is_caught_at_every_length(seqlen_k):
    """A fixed tolerance of 1e-2 passes this bug on Gaussian inputs; the budget on the "low" family does not."""
    old, new, _ = MUTANTS["padded keys unmasked"]
    wrong = mutant(old, new)
    for dtype in DTYPES:
        inputs = make_inputs(Case(65, seqlen_k, 64, dtype, heads=2, family="low"))
        assert error_ratios(wrong, inputs)["out"] > 2, dtype
    gaussian = make_inputs(Case(65, seqlen_k, 64, "bf16", heads=2))
    difference = wrong(*gaussian[:3])[0].double() - attention_reference(*(x.double() for x in gaussian[:3]))[0]
    assert difference.abs().max() < 1e-2

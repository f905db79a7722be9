"""The reference against PyTorch and against brute force: it is the specification, so it is tested on its own."""

import math

import pytest
import torch

from flashattn import attention_reference, attention_tiled
from flashattn.reference import visible_keys


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def brute_force(q, k, v, *, causal, scale, window, softcap):
    """Attention by Python loops over scalars of the scores: nothing shared with the reference but the definition."""
    batch, heads, seqlen_q, head_dim = q.shape
    group = heads // k.shape[1]
    seqlen_k = k.shape[2]
    out, lse = torch.zeros(batch, heads, seqlen_q, v.shape[3], dtype=q.dtype), torch.full(q.shape[:3], -math.inf)
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                weights = {}
                for j in range(seqlen_k):
                    position = i + seqlen_k - seqlen_q
                    if causal and j > position:
                        continue
                    if window and window[0] is not None and j < position - window[0]:
                        continue
                    if window and window[1] is not None and j > position + window[1]:
                        continue
                    s = float(q[b, h, i] @ k[b, h // group, j]) * scale
                    weights[j] = math.exp(softcap * math.tanh(s / softcap) if softcap else s)
                total = sum(weights.values())
                for j, weight in weights.items():
                    out[b, h, i] += weight / total * v[b, h // group, j]
                lse[b, h, i] = math.log(total) if weights else -math.inf
    return out, lse


MASKS = [
    dict(causal=False, window=None, softcap=None),
    dict(causal=True, window=None, softcap=None),
    dict(causal=False, window=(2, 1), softcap=None),
    dict(causal=False, window=(None, 0), softcap=None),
    dict(causal=True, window=(3, None), softcap=None),
    dict(causal=True, window=(1, 1), softcap=2.0),
    dict(causal=False, window=(-1, 3), softcap=0.5),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sizes", [(5, 5), (2, 5), (5, 2), (1, 7), (4, 0), (0, 4)], ids=str)
@pytest.mark.parametrize("attention", [attention_reference, attention_tiled])
def test_matches_brute_force(attention, sizes, mask):
    seqlen_q, seqlen_k = sizes
    q, k, v = draw(2, 4, seqlen_q, 3), draw(2, 2, seqlen_k, 3, seed=1), draw(2, 2, seqlen_k, 5, seed=2)
    options = {} if attention is attention_reference else dict(block_m=2, block_n=3)
    out, lse = attention(q, k, v, scale=0.7, **mask, **options)
    expected_out, expected_lse = brute_force(q, k, v, scale=0.7, **mask)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_matches_torch(causal):
    q, k, v = draw(2, 4, 37, 16), draw(2, 4, 37, 16, seed=1), draw(2, 4, 37, 16, seed=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out, _ = attention_reference(q, k, v, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_grouped_heads_match_torch():
    q, k, v = draw(2, 6, 19, 8), draw(2, 2, 23, 8, seed=1), draw(2, 2, 23, 8, seed=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention_reference(q, k, v)[0], expected, rtol=1e-12, atol=1e-12)


def test_visible_keys_draws_the_docstring():
    def drawing(seqlen_q, seqlen_k):
        visible = visible_keys(
            torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :], seqlen_k - seqlen_q, causal=True
        )
        return [" ".join("x" if x else "." for x in row) for row in visible.tolist()]

    wide, tall = drawing(2, 5), drawing(5, 2)
    lines = [line.strip() for line in visible_keys.__doc__.splitlines()]
    start = lines.index("seqlen_q=2, seqlen_k=5          seqlen_q=5, seqlen_k=2") + 1
    drawn = [line.split("  ") for line in lines[start : start + 5]]
    assert [row[0].strip() for row in drawn[:2]] == wide
    assert [row[-1].strip() for row in drawn] == tall


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sizes", [(4, 4), (2, 5), (5, 2)], ids=str)
@pytest.mark.parametrize("attention", [attention_reference, attention_tiled])
def test_gradcheck_through_out_and_lse(attention, sizes, mask):
    q, k, v = draw(1, 2, sizes[0], 3), draw(1, 1, sizes[1], 3, seed=1), draw(1, 1, sizes[1], 2, seed=2)
    options = {} if attention is attention_reference else dict(block_m=2, block_n=3)

    def outputs(q, k, v):
        out, lse = attention(q, k, v, **mask, **options)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in (q, k, v)])


@pytest.mark.parametrize("attention", [attention_reference, attention_tiled])
def test_rows_without_keys_have_zero_gradients_whatever_arrives(attention):
    q, k, v = (draw(1, 2, n, 4, seed=n).requires_grad_() for n in (5, 2, 2))
    out, lse = attention(q, k, v, causal=True)
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == -math.inf).all()
    dlse = torch.zeros_like(lse)
    dlse[:, :, :3] = math.nan
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse))
    assert (dq[:, :, :3] == 0).all() and dk.isfinite().all() and dv.isfinite().all()

"""The small GPT, its text and its training: the same model whichever attention computes it."""

import functools
import hashlib
import statistics

import pytest
import torch

from flashattn import attention_reference, bench, gpt, models, train
from flashattn.gpt import GPT, next_token_loss
from flashattn.peers import IMPLEMENTATIONS, Shape, backend
from flashattn.testing import FACTOR, max_error

SIZES = dict(vocabulary=64, context=48, layers=2, width=32, heads=2)
TINY = train.LAPTOP | dict(layers=1, width=32, seqlen=16, steps=6, warmup=2)


def tokens_of(seed=0):
    return torch.randint(64, (2, 41), generator=torch.Generator().manual_seed(seed))


def gradients(attention, dtype, device):
    """Return the gradients {parameter: tensor} of one small model, the same for all attentions."""
    torch.manual_seed(0)
    model = GPT(**SIZES, attention=attention)
    for weight in model.parameters():  # larger than at the start of training, so that attention looks at something
        weight.data.mul_(4)
    model.to(device, dtype)
    tokens = tokens_of().to(device)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def worst_share(attention, dtype, device="cpu"):
    """Return the largest error of a gradient over its budget, as ``error_budget`` makes it, for a whole model."""
    truth = gradients("eager", torch.float64, device)
    eager, found = (gradients(name, dtype, device) for name in ("eager", attention))
    shares = []
    for name, expected in truth.items():
        budget = FACTOR["dq"] * max_error(eager[name], expected) + torch.finfo(dtype).eps * expected.abs().max().item()
        shares.append(max_error(found[name], expected) / budget)
    return max(shares)


def off_by_one_key(q, k, v):
    return attention_reference(q, k, v, window=(None, 1))[0]


def one_percent_less(q, k, v):
    return 0.99 * attention_reference(q, k, v, causal=True)[0]


def gradient_of_k_lost(q, k, v):
    return attention_reference(q, k.detach(), v, causal=True)[0]


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_gradients_are_within_the_budget_of_eagers(dtype, device):
    assert worst_share("flashattn", dtype, device) <= 1


def test_gradients_of_sdpa_are_too():
    assert worst_share("sdpa_flash", torch.float32) <= 1


# 1 % is less than three roundings of bf16: there a whole model cannot tell.
WRONG = [(off_by_one_key, torch.float32), (one_percent_less, torch.float32), (gradient_of_k_lost, torch.float32)]
WRONG += [(one_percent_less, torch.float16), (off_by_one_key, torch.bfloat16), (gradient_of_k_lost, torch.bfloat16)]


@pytest.mark.parametrize("wrong, dtype", WRONG)
def test_that_budget_fails_what_is_wrong(wrong, dtype):
    assert worst_share(wrong, dtype) > 1


@pytest.mark.parametrize("attention", ["eager", "sdpa_flash", pytest.param("flashattn", marks=pytest.mark.triton)])
def test_a_later_token_changes_no_earlier_score(attention, device):
    device = device if attention == "flashattn" else "cpu"
    torch.manual_seed(0)
    model = GPT(**SIZES, attention=attention).to(device)
    tokens = tokens_of().to(device)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(dim=-1).all()  # its own and all later ones see it


def test_a_position_changes_the_scores():
    torch.manual_seed(0)
    model = GPT(**SIZES, attention="eager")
    scores = model(torch.full((1, 8), 3))
    assert not torch.allclose(scores[:, 1:], scores[:, :-1])


def test_embedding_and_scores_share_their_weights():
    model = GPT(**SIZES, attention="eager")
    n_weights = 64 * 32 + 48 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert sum(weight.numel() for weight in model.parameters()) == n_weights


def test_what_users_get_wrong_is_said():
    with pytest.raises(ValueError, match="`width` must be a multiple of `heads`, 3, got 32"):
        GPT(width=32, heads=3)
    with pytest.raises(ValueError, match="`attention` must be a function or one of .*flashattn.*, got 'flash'"):
        GPT(**SIZES, attention="flash")
    with pytest.raises(ValueError, match="`tokens` must be at most 48 long, got 49"):
        GPT(**SIZES, attention="eager")(torch.zeros(1, 49, dtype=torch.int64))


def test_the_text_is_the_one_that_is_cited():
    text = gpt.TEXT.read_bytes()
    original = text.replace(b"\n", b"\r\n") + b"\x1a"
    assert hashlib.sha256(original).hexdigest() in (gpt.TEXT.parent / "README.md").read_text()
    training, testing = gpt.load_text()
    assert torch.cat([training, testing]).tolist() == list(text) and len(testing) == len(text) // 10


def test_training_learns_and_the_same_seed_gives_the_same_run():
    run = gpt.train("eager", **train.LAPTOP, test_every=10)
    assert len(run.losses) == len(run.steps_s) == 30 and list(run.test_losses) == [10, 20, 30]
    assert 5.2 < run.losses[0] < 5.9  # ln 256 = 5.55: it knows nothing
    assert statistics.fmean(run.losses[-5:]) < 3.6 and run.test_losses[30] < 3.6
    assert gpt.train("eager", **train.LAPTOP).losses == run.losses
    assert gpt.train("eager", **train.LAPTOP, seed=1).losses != run.losses


@pytest.mark.triton
def test_a_training_run_is_recorded(tmp_path, monkeypatch, capsys, device):
    """sdpa_cudnn does not know fp32 nor a CPU: that one is reported, and does not end the others."""
    monkeypatch.setattr(train, "DATA", tmp_path)
    assert train.load_training() == []
    sdpa = "sdpa_flash" if device.type == "cpu" else "sdpa_efficient"
    impls = ("eager", sdpa, "sdpa_cudnn", "flashattn")
    train.record(tmp_path / "training.csv", device, TINY, impls=impls, test_every=3)
    printed = capsys.readouterr().out
    assert "sdpa_cudnn: RuntimeError" in printed and "flashattn seed 0: " in printed
    rows = train.load_training()
    assert all(set(row) == set(train.COLUMNS) for row in rows)
    assert {row["metric"] for row in rows} == {"loss", "test_loss", "peak_memory", "throughput"}
    assert {(row["layers"], row["width"], row["seqlen"], row["dtype"]) for row in rows} == {(1, 32, 16, "fp32")}
    curves = train.loss_curves(rows)
    assert set(curves) == {("eager", 0), (sdpa, 0), ("flashattn", 0), ("eager", 1)}
    expected = statistics.fmean(gpt.train("eager", device=device, **TINY).losses[:5])
    assert curves["eager", 0] == {5: pytest.approx(expected, rel=1e-5)}
    assert train.curve_distance(curves["flashattn", 0], curves["eager", 0]) < 1e-4
    assert train.curve_distance(curves["eager", 1], curves["eager", 0]) > 1e-3
    assert list(train.loss_curves(rows, "test_loss")["flashattn", 0]) == [3, 6]
    (rate,) = train.load_training(impl="flashattn", metric="throughput")
    assert rate["value"] > 0 and rate["unit"] == "tokens/s" and rate["step"] == 6


def test_the_band_is_a_multiple_of_what_sdpa_shows():
    curves = {("eager", 0): {5: 3.0, 10: 2.0}, ("eager", 1): {5: 3.5, 10: 2.0}}
    curves |= {("sdpa_flash", 0): {5: 3.0, 10: 2.01}, ("sdpa_cudnn", 0): {5: 2.98, 10: 2.0}}
    curves["flashattn", 0] = {5: 3.03, 10: 2.0}
    distance, limit = train.check_band(curves)
    assert distance == pytest.approx(0.03) and limit == pytest.approx(train.BAND * 0.02)


def test_means_of_losses_are_of_whole_groups():
    assert train.mean_losses([1.0, 3.0, 5.0, 7.0, 9.0], mean_of=2) == {2: 2.0, 4: 6.0}


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="on a GPU, and there is none here"):
        train.main([])


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa_flash", "flashattn"])
def test_training_in_bf16_on_a_gpu_follows_eager(attention):
    """A tenth of what another seed changes; on a CPU it is less than a hundredth."""
    run = functools.partial(gpt.train, device="cuda", dtype=torch.bfloat16, **train.LAPTOP | dict(heads=2, seqlen=128))
    ours, eager, other = (train.mean_losses(x.losses, 1) for x in (run(attention), run("eager"), run("eager", seed=1)))
    assert train.curve_distance(ours, eager) < train.curve_distance(other, eager) / 10
    assert run(attention).peak_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["eager", "sdpa_flash", "flashattn"])
def test_attention_alone_is_timed_on_a_gpu(impl):
    cell = bench.Cell("model", Shape(1, 4, 4, 128, 64, True), impl)
    with backend(impl):
        rows = list(bench.model_rows(cell, IMPLEMENTATIONS[impl]))
    times = {(row["direction"], row["params"]): float(row["p50"]) for row in rows if row["metric"] == "time"}
    assert len(times) == 4 and all(0 < ms < 10 for ms in times.values())
    assert times["forward", '{"graph": true}'] < times["forward_backward", '{"graph": true}']


@pytest.mark.gpu
def test_a_gpu_model_runs_out_of_what_it_may_have_and_goes_on():
    model = models.Model(2, 512, 8, 1000)
    call = gpt.causal_attention("eager", 8, 4096, 64)
    rows = list(models.forward_figures(model, call, 1, 4096, limit_bytes=600 * 10**6))
    assert [row[1] for row in rows] == ["out_of_memory"] * 2
    rows = list(models.training_figures(model, call, 1, 4096))
    assert [row[1] for row in rows] == ["peak_memory", "throughput"]
    split = rows[0][-1]["split"]
    scores = 2 * 8 * 4096**2  # P in fp32, as autocast computes it, and again in bf16 for the product with V
    assert 6 * scores < split["attention"] < 7 * scores and min(split.values()) >= 0

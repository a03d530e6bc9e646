"""What must not change a number: invariances of every loss, metric and optimizer, over inputs that hypothesis draws.

What is tested where. "here": below; mt, npo, grng, syn, ev, tofu, mini: tests/test_mt_unlearn.py and so on.

| of                        | batch size, split | order of rows | padding       | logit shift | dtype       | seeds     | device |
|---------------------------|-------------------|---------------|---------------|-------------|-------------|-----------|--------|
| losses on logits          | here              | here          | (no padding)  | here        | here        | (none)    | here   |
| head without logits       | here (chunks)     | here          | (no padding)  | here        | here, mt    | (none)    | here   |
| losses on log-likelihoods | here              | here          | (no padding)  | here        | here        | (none)    | here   |
| gradients of a step, mt   | mt                | mt            | mt            | (above)     | mt (head)   | (none)    | -      |
| gradients of a step, npo  | here, npo         | here          | here          | (above)     | npo (amp)   | (none)    | -      |
| mean-teacher step         | here (tensors)    | here          | (no padding)  | (no logits) | here, mt    | here, mt  | here   |
| unlearn(), mt and npo     | mt, npo (micro)   | -             | -             | -           | mt (bf16 v) | here, mt, npo (resume) | - |
| RING, RENG, NGD           | grng              | here          | grng (rows)   | here        | here, grng  | here      | here   |
| RKalman, SophiaG, SAM     | here (not RKalman: twice the rows are twice the evidence) | here | (none) | here | here | here | here |
| random features, syn      | here (columns)    | here          | (no padding)  | (no softmax)| (float64)   | here      | (CPU)  |
| Gauss-Newton, mean teacher runs, syn | here (chunks) | here   | (no padding)  | here        | (float64)   | here, syn | (CPU)  |
| log p, generation         | here, ev          | here          | here          | here        | here, tofu  | (greedy)  | -      |
| MUSE and TOFU evaluation  | ev, tofu          | here (rows)   | (above)       | (above)     | tofu, here  | (none)    | -      |
| AUC, Min-K, PrivLeak, ROUGE, truth ratio, forget quality, utility | (none) | here | (none) | here | here | (none) | (CPU)  |
| finetune, mini benchmarks | mini              | -             | mini          | -           | -           | mini      | -      |
"""
import copy
import math
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_mt_unlearn import config as mt_config
from test_mt_unlearn import sequences, tiny_model
from test_npo_unlearn import ALL, data as npo_data, nudge_, pairs, reference
from test_npo_unlearn import config as npo_config

import evaluate as ev
import grng
import mt_unlearn as mt
import npo_unlearn as npo
import synthetic as syn

f64, f32, bf16, CPU = torch.float64, torch.float32, torch.bfloat16, torch.device("cpu")


def examples(n):
    return settings(max_examples=n, deadline=None, derandomize=True, database=None)


def floats(low, high):
    return st.floats(low, high, allow_nan=False, width=32)               # numbers that float32 holds exactly


def tensor(*shape, low=-30.0, high=30.0):
    return arrays(np.float64, shape, elements=floats(low, high)).map(torch.tensor)


def close(a, b, rtol=1e-9, atol=1e-9):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=atol, check_dtype=False)


# ----- losses on logits -----

LOGIT_LOSSES = {  # name -> f(logits (N, V), reference logits (N, V), labels (N,)) -> (N,)
    "log_odds": lambda z, w, y: mt.log_odds(z, y), "log p": lambda z, w, y: F.logsigmoid(mt.log_odds(z, y)),
    "nlul": lambda z, w, y: mt.nlul(mt.log_odds(z, y)), "nlul tol": lambda z, w, y: mt.nlul(mt.log_odds(z, y), .02),
    "kl": lambda z, w, y: mt.kl_divergence(z, w), "qkl": lambda z, w, y: mt.qkl_divergence(z, w),
    "syn nlul": lambda z, w, y: syn.nlul(z, y), "syn kl": lambda z, w, y: syn.kl_divergence(z, w),
    "syn qkl": lambda z, w, y: syn.qkl_divergence(z, w), "bregman": lambda z, w, y: syn.DIVERGENCES["Bregman"][0](z, w)}
every_logit_loss = pytest.mark.parametrize("name", LOGIT_LOSSES)
N, V = 4, 5
logits, labels = tensor(N, V), st.lists(st.integers(0, V - 1), min_size=N, max_size=N).map(torch.tensor)


@every_logit_loss
@examples(20)
@given(logits, logits, labels, st.permutations(range(N)), st.permutations(range(V)), tensor(N, 1), tensor(N, 1))
def test_losses_on_logits(name, z, w, y, rows, words, shift, other):
    """Each row for itself, in any order; the vocabulary in any order; a constant added to a row's logits, as to its reference's."""
    f = LOGIT_LOSSES[name]
    want = f(z, w, y)
    close(f(z[rows], w[rows], y[rows]), want[rows])
    close(torch.cat([f(z[:1], w[:1], y[:1]), f(z[1:], w[1:], y[1:])]), want)
    close(f(z[:, words], w[:, words], torch.tensor(words).argsort()[y]), want)
    close(f(z + shift, w + other, y), want, rtol=1e-8, atol=1e-8)


@every_logit_loss
@examples(20)
@given(logits, logits, labels)
def test_losses_on_logits_in_other_dtypes(name, z, w, y):
    """float32 keeps 4 digits of the largest logit gap, 60 (squared in QKL); bfloat16 passes, finite and no less than about 0."""
    f = LOGIT_LOSSES[name]
    want, single, half = f(z, w, y), f(z.float(), w.float(), y), f(z.bfloat16(), w.bfloat16(), y)
    close(single, want, rtol=1e-4, atol=1e-4)
    assert single.dtype == f32 and torch.isfinite(half).all() and want.isfinite().all()
    assert name in ("log_odds", "log p") or (want > -1e-9).all() if name != "nlul tol" else (want >= -math.log(1.02) - 1e-9).all()


# ----- the head without logits -----

HEADS = {"log odds": lambda h, W, g, U, y: mt.token_log_odds(h, W, y), "kl": lambda h, W, g, U, y: mt.token_kl(h, W, g, U),
         "reverse kl": lambda h, W, g, U, y: mt.token_kl(h, W, g, U, True), "qkl": lambda h, W, g, U, y: mt.token_qkl(h, W, g, U)}


@pytest.mark.parametrize("name", HEADS)
@examples(20)
@given(tensor(N, 3, low=-3, high=3), tensor(V, 3, low=-3, high=3), tensor(N, 2, low=-3, high=3), tensor(V, 2, low=-3, high=3), labels,
       st.permutations(range(N)), tensor(3, low=-3, high=3), tensor(2, low=-3, high=3), st.integers(1, N + 1))
def test_the_head(name, h, W, g, U, y, rows, u, v, chunk):
    """Chunks of any size, rows in any order, every row of a head moved by one vector (a constant on all logits), float32: the values
    and the gradients of hidden state and head."""
    def run(h, W, g, U, y, chunk=N):
        h, W = h.clone().requires_grad_(), W.clone().requires_grad_()
        with mock.patch.object(mt, "head_scores", lambda h, W, score, ref=None: mt.HeadFunction.apply(h, W, ref, score, chunk, 2)):
            r = HEADS[name](h, W, g, U, y)
            return r, *torch.autograd.grad(r @ torch.arange(1., 1 + len(r), dtype=r.dtype), (h, W))
    want = run(h, W, g, U, y)
    for a, b in zip(run(h, W, g, U, y, chunk), want):
        close(a, b)
    weight = torch.arange(1., 1 + N, dtype=f64)[:, None]                 # row k of the gradient carries the weight k + 1
    r, dh, _ = run(h[rows], W, g[rows], U, y[rows])
    close(r, want[0][rows])
    close(dh / weight, (want[1] / weight)[rows])
    for a, b in zip(run(h, W + u, g, U + v, y), want):
        close(a, b, rtol=1e-8, atol=1e-8)
    for a, b in zip(run(h.float(), W.float(), g.float(), U.float(), y), want):
        close(a, b, rtol=2e-3, atol=2e-3)
    r, dh, dW = run(h.bfloat16(), W.bfloat16(), g.bfloat16(), U.bfloat16(), y)
    assert r.dtype == f32 and dh.dtype == dW.dtype == bf16 and all(x.isfinite().all() for x in (r, dh, dW))


# ----- losses on log-likelihoods of sequences -----

B, BETA = 4, .3
SEQUENCE_LOSSES = {  # name -> f(x (B, 4) of log-likelihoods, lengths (B,)) -> scalar mean
    "mt npo": lambda x, n: mt.npo_loss(x[:, 0], x[:, 1], BETA, n), "mt npo sum": lambda x, n: mt.npo_loss(x[:, 0], x[:, 1], BETA),
    "npo": lambda x, n: npo.npo_loss(x[:, 0], x[:, 1], BETA), "dpo": lambda x, n: npo.dpo_loss(*x.T, BETA),
    "kto": lambda x, n: npo.kto_loss(x[:, 0], x[:, 1], -1.5, BETA), "syn npo": lambda x, n: syn.npo_loss(x[:, 0], x[:, 1], BETA)}


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
@examples(25)
@given(tensor(B, 4, low=-400, high=0), tensor(B, 1, low=-50, high=0), st.permutations(range(B)), st.integers(1, B - 1))
def test_losses_on_log_likelihoods(name, x, shift, rows, k):
    """A mean over rows: any order, twice the batch, any split weighted by its size; only log-ratios count; float32 and bfloat16."""
    f, n = SEQUENCE_LOSSES[name], torch.tensor([1, 2, 5, 9])
    want = f(x, n)
    close(f(x[rows], n[rows]), want)
    close(f(x.repeat(2, 1), n.repeat(2)), want)
    close((k * f(x[:k], n[:k]) + (B - k) * f(x[k:], n[k:])) / B, want)
    close(f(x + shift, n), want, atol=1e-8)
    close(f(x.float(), n), want, rtol=1e-4, atol=1e-4)
    half = x.bfloat16().requires_grad_()
    loss = f(half, n)
    (grad,) = torch.autograd.grad(loss, half)
    assert loss.isfinite() and grad.isfinite().all()
    close(loss, f(x.bfloat16().double(), n), rtol=.05, atol=.5)


# ----- one step of the NPO family -----

def npo_gradient(student, d, ref, c, cfg, picks, partners, pad):
    """Gradient of one step over `picks`, built by hand: what step_batches does, in an order of our own, `pad` columns wider."""
    student.model.zero_grad()
    forget, retain = (npo.answer_batches(d[k], rows, cfg.micro_batch, CPU) for k, rows in (("forget", picks), ("retain", partners)))
    idk = [npo.answer_batches(d["idk"], b.index, 0, CPU)[0] for b in forget]
    for b in forget + retain + idk:
        T = b.ids.shape[1]
        b.ids, b.rows = F.pad(b.ids, (0, pad), value=7), b.rows + b.rows // T * pad
    stats = npo.accumulate_gradients(student, dict(forget=forget, idk=idk, retain=retain), ref, c, cfg)
    return torch.cat([p.grad.flatten() for p in student.theta.values()]), stats["loss"]


@pytest.fixture(scope="module")
def npo_student():
    """A model nudged away from its reference, which has seen every row that the test below picks."""
    d, cfg, every = npo_data(6, 6, 1), npo_config(batch=6, epochs=1), dict.fromkeys(("npo", "dpo", "kto", "fgkl", "rtkl"), 1)
    student = npo.Student(tiny_model(), "all")
    ref = reference(student, d, every, cfg)
    nudge_(student)
    return student, d, ref


@pytest.mark.parametrize("method", ["ga_kl", "ga_fgkl", "idk_rt", "dpo_rt", "kto", "npo_kl", "five"])
@examples(5)
@given(st.permutations(range(5)), st.permutations(range(6)), st.integers(0, 5), st.integers(0, 9))
def test_a_step_of_npo_does_not_see_order_padding_and_micro_batches(npo_student, method, picks, partners, micro, pad):
    """Five forget rows and six retain rows of uneven lengths, whichever way they come."""
    student, d, ref = npo_student
    want, loss = npo_gradient(student, d, ref, ALL[method], npo_config(), range(5), range(6), 0)
    got, other = npo_gradient(student, d, ref, ALL[method], npo_config(micro_batch=micro), picks, partners, pad)
    assert (got - want).norm() < 1e-4 * want.norm()
    close(other, loss, rtol=1e-5, atol=1e-5)


# ----- the mean-teacher step -----

STEP = dict(eta=.1, kappa=2., mu=.8, lam=.3, clip=2.)


@examples(40)
@given(tensor(4, 6, low=-3, high=3), st.permutations(range(6)), st.integers(1, 5), floats(1.5, 100), st.booleans())
def test_the_mean_teacher_step(x, order, cut, scale, in_norm):
    """One vector or several tensors, coordinates in any order, a rotation of all four vectors, float32: one and the same step. Where
    the clip bites, without damping, theta does not see the length of the gradient (the teacher does: its time slows)."""
    def run(x, parts=lambda v: [v], **flags):
        lists = [parts(v.clone()) for v in x]
        mt.mean_teacher_step_(*lists, **{**STEP, **flags}, damping_in_norm=in_norm)
        return torch.stack([torch.cat(list_) for list_ in lists[:3]])
    want = run(x)
    close(run(x, lambda v: list(v.split([cut, 6 - cut]))), want)
    close(run(x[:, order]), want[:, order])
    Q = torch.linalg.qr(torch.randn(6, 6, dtype=f64, generator=torch.Generator().manual_seed(cut))).Q
    close(run(x @ Q), want @ Q)
    close(run(x.float()), want, rtol=1e-5, atol=1e-5)
    assume(x[3].norm() > .1)
    unit = torch.stack([*x[:3], x[3] / x[3].norm()])
    longer = torch.stack([*x[:3], x[3] / x[3].norm() * scale])
    close(run(longer, lam=0., clip=.5, kappa=0.), run(unit, lam=0., clip=.5, kappa=0.))


@examples(10)
@given(st.integers(0, 2 ** 31), tensor(8, low=-100, high=100))
def test_stochastic_rounding_repeats_its_bits(seed, x):
    out = [mt.stochastic_round_(torch.empty(8, dtype=bf16), x.float(), torch.Generator().manual_seed(seed)) for _ in range(2)]
    assert torch.equal(*out) and ((out[0].float() - x).abs() <= x.abs() * 2 ** -7 + 1e-30).all()


# ----- whole runs: the same seed, the same bits -----

def run_mt(seed, folder, **flags):
    cfg = mt_config(stop="none", epoch_steps=3, max_epochs=1, **flags)
    return mt.unlearn(tiny_model(), None, None, sequences(9, 1), sequences(9, 2), cfg, folder, seed, None, None)[0]


def run_npo(seed, folder, **flags):
    d, c, silent = npo_data(6, 9), ALL["dpo_rt"], type("", (), dict(metrics=lambda s, r: {}, divergences=lambda s: {}))
    with mock.patch.object(npo, "Monitor", lambda *a: silent()):
        return npo.unlearn(tiny_model(), None, None, d, c, npo_config(**flags), folder, seed, None, {})[0]


@pytest.mark.parametrize("run, flags", [(run_mt, {}), (run_mt, dict(lora=2, bf16_momentum=True)), (run_npo, {}), (run_npo, dict(lora=2))])
def test_runs_repeat_their_bits_and_seeds_differ(run, flags, tmp_path):
    """Whatever torch's and NumPy's global generators did before."""
    models = []
    for k, seed in enumerate((3, 3, 4)):
        torch.manual_seed(k)
        np.random.seed(k)
        (tmp_path / str(k)).mkdir()
        models.append(torch.cat([p.detach().flatten() for p in run(seed, tmp_path / str(k), **flags).parameters()]))
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])


# ----- optimizers -----

PLAIN = dict(fisher="exact", keep_grad=True)
OPTIMIZERS = {
    "RING": lambda m: grng.RING(m, **PLAIN), "RENG": lambda m: grng.RENG(m, rho=.1, damping=1e-2, fisher="exact"),
    "NGD": lambda m: grng.NGD(m, damping=1e-2, **PLAIN), "RKalman": lambda m: grng.RKalman(m, sigma0=.1),
    "SophiaG": lambda m: grng.SophiaG(m.parameters(), lr=.01, estimator="hutchinson", gamma=1.),
    "SAM": lambda m: grng.SAM(m.parameters())}
SAMPLED = {"RING": lambda m, s: grng.RING(m, seed=s), "RENG": lambda m, s: grng.RENG(m, seed=s), "NGD": lambda m, s: grng.NGD(m, seed=s),
           "SophiaG": lambda m, s: grng.SophiaG(m.parameters(), gamma=100., seed=s)}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def network(dtype=f64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).to(dtype)


def optimize(make, batches, model=None):
    """Three steps on batches of (X, y) -> the parameters' numbers."""
    model = model or network(batches[0][0].dtype)
    optimizer = make(model)
    for X, y in batches:
        def closure():
            out = model(X)
            return out, F.cross_entropy(out, y)
        optimizer.step(closure)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


three_batches = st.lists(st.tuples(tensor(6, 3, low=-2, high=2), st.lists(st.integers(0, 2), min_size=6, max_size=6).map(torch.tensor)),
                         min_size=3, max_size=3)


@every_optimizer
@examples(6)
@given(three_batches, st.permutations(range(6)), floats(-5, 5))
def test_optimizers_see_a_set_of_cases_through_a_softmax(name, batches, order, shift):
    """Cases in any order, float32 instead of float64; a constant on all outputs stays where it was put and moves nothing else. A
    batch that comes twice is the same batch: but not to the Kalman filter, whose evidence doubles."""
    make = OPTIMIZERS[name]
    want = optimize(make, batches)
    close(optimize(make, [(X[order], y[order]) for X, y in batches]), want, rtol=1e-6, atol=1e-6)
    close(optimize(make, [(X.float(), y) for X, y in batches]), want, rtol=2e-2, atol=2e-2)
    moved = network()
    with torch.no_grad():
        moved[2].bias += shift
    got = optimize(make, batches, moved)
    close(got[-3:] - shift, want[-3:], rtol=1e-6, atol=1e-6)
    close(got[:-3], want[:-3], rtol=1e-6, atol=1e-6)
    twice = optimize(make, [(X.repeat(2, 1), y.repeat(2)) for X, y in batches])
    if name == "RKalman":
        assert not torch.allclose(twice, want, rtol=1e-3)
    else:
        close(twice, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_curvature_repeats_its_bits_and_seeds_differ(name):
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 3, generator=g, dtype=f64), torch.randint(3, (6,), generator=g)) for _ in range(3)]
    runs = []
    for k, seed in enumerate((1, 1, 2)):
        model = network()
        torch.manual_seed(k)                                             # the caller's generator has no say
        runs.append(optimize(lambda m: SAMPLED[name](m, seed), batches, model))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "RKalman"])
def test_optimizers_pass_in_bfloat16(name):
    """RKalman factors its matrices in the parameters' dtype, and torch has no bfloat16 Cholesky."""
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 3, generator=g).to(bf16), torch.randint(3, (6,), generator=g)) for _ in range(3)]
    start = torch.cat([p.detach().flatten() for p in network(bf16).parameters()])
    end = optimize(OPTIMIZERS[name], batches)
    assert end.dtype == bf16 and end.isfinite().all() and not torch.equal(start, end)


def lm_batches(n=7):
    from test_grng import tiny_llama, token_lists
    lm, lists = tiny_llama(dtype=f32), token_lists(n, 1)
    other = {k: p.detach() + .1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) for k, p in grng.trained(lm).items()}
    return lm, lists, other


@pytest.fixture(scope="module")
def lm_case():
    return lm_batches()


@examples(8)
@given(st.permutations(range(7)), st.integers(1, 8))
def test_grng_token_batches(lm_case, order, size):
    """Mean losses of the unlearning task, whatever order the texts come in and however many go together."""
    lm, lists, other = lm_case
    whole, parts = grng.token_batches(lists, range(7), 16), grng.token_batches(lists, order, size)
    with torch.no_grad():
        close(grng.unlearning_loss(lm, parts), grng.unlearning_loss(lm, whole), rtol=1e-5, atol=1e-6)
        close(grng.teacher_kl(lm, parts, other), grng.teacher_kl(lm, whole, other), rtol=1e-5, atol=1e-6)


# ----- toy studies -----

def features(rows=None, retain=None, **more):
    """A random-feature instance of two sets, its rows in the given order."""
    from test_synthetic import small_data
    d = dict(small_data(), **more)
    pick = lambda k, order: d[k] if order is None else d[k][:, list(order)]
    return dict(d, Xf=pick("Xf", rows), yf=pick("yf", rows), y_idk=pick("y_idk", rows), Xr=pick("Xr", retain), yr=pick("yr", retain))


@examples(10)
@given(st.permutations(range(5)), st.permutations(range(9)), st.permutations(syn.METHODS), st.integers(1, 11))
def test_random_features_are_sets_and_columns_do_not_see_each_other(rows, retain, names, k):
    M = len(syn.METHODS)
    lr, beta = torch.linspace(.05, .15, 2 * M, dtype=f64).view(2, M), torch.linspace(.5, 1.5, 2 * M, dtype=f64).view(2, M)
    want = syn.unlearn(features(), syn.METHODS, lr, beta, 4, every=2)
    close(syn.unlearn(features(rows, retain), syn.METHODS, lr, beta, 4, every=2), want)
    at = [syn.METHODS.index(n) for n in names]
    for part in (slice(0, k), slice(k, None)):
        close(syn.unlearn(features(), names[part], lr[:, at][:, part], beta[:, at][:, part], 4, every=2), want[..., at][..., part])


@examples(25)
@given(tensor(4, low=-300, high=300), tensor(4, low=-300, high=300))
def test_bernoulli_kl_does_not_know_which_label_is_called_1(a, b):
    close(syn.bernoulli_kl(-a, -b), syn.bernoulli_kl(a, b))


@examples(5)
@given(st.permutations(range(6)), st.integers(1, 7), floats(-20, 20))
def test_gauss_newton_of_tokens(order, chunk, shift):
    """Chunks, order of the sequences, and a constant added to every logit (to every column of the last matrix by one vector)."""
    g = torch.Generator().manual_seed(1)
    theta, tokens = .3 * torch.randn(736, dtype=f64, generator=g), torch.randint(10, (6, 8), generator=g)
    want = syn.transformer_ggn(theta, tokens, chunk=6)
    close(syn.transformer_ggn(theta, tokens[order], chunk=chunk), want)
    moved = theta.clone()
    moved[-80:] += (shift * torch.linspace(-1, 1, 8, dtype=f64)).repeat_interleave(10)
    for f in (syn.token_nll, syn.forget_loss):
        close(f(moved, tokens), f(theta, tokens))
        close(f(theta, tokens[order]), f(theta, tokens))


def test_studies_repeat_their_bits():
    """Each has a generator of its own: torch's global one has no say, and another seed is another instance."""
    h = torch.tensor([1., .3], dtype=f64)
    studies = [lambda s: syn.gaussian_logistic(1., s, 20, 30, 10)["Xf"], lambda s: syn.gaussian_logistic(1., s, 20, 30, 10)["y_idk"],
               lambda s: syn.one_dimensional(lambda k: .5, 0, 5, 6, s)[1], lambda s: torch.tensor(syn.proposition_1(s)),
               lambda s: syn.stochastic_quadratic(h, h, .3, 5, runs=4, seed=s),
               lambda s: syn.theorem_3_1_errors([.4], [("KL", .9)], s, A=.01), lambda s: syn.falsifier_data(s, 2)["theta"],
               lambda s: syn.mean_teacher_runs(syn.falsifier_data(0, 2), [syn.Run("", .2, clip=.05, mini=True)], 10, s)[10]["theta"]]
    for k, study in enumerate(studies):
        runs = [study((torch.manual_seed(j), s)[1]) for j, s in enumerate((1, 1, 2))]
        assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2]), k


# ----- metrics -----

scores = st.lists(st.integers(-6, 6).map(lambda k: k / 4), min_size=1, max_size=9)       # quarters: many ties, no rounding
texts = st.lists(st.sampled_from("the cat cats sat on a mat Mats, walked walking".split()), max_size=7).map(" ".join)


@examples(40)
@given(scores, scores, st.randoms(use_true_random=False))
def test_auc(a, b, rng):
    """Any order, everything twice, any increasing function; sides swapped: 1 - AUC; PrivLeak knows ratios of AUCs alone."""
    want, swap = ev.auc(a, b), lambda x: rng.sample(x, len(x))
    assert ev.auc(swap(a), swap(b)) == pytest.approx(want, abs=1e-12)
    assert ev.auc(a * 2, b * 3) == pytest.approx(want, abs=1e-12)
    assert ev.auc(np.exp(a), np.exp(b)) == pytest.approx(want, abs=1e-12) == 1 - ev.auc(b, a)
    assert ev.auc(np.float32(a), torch.tensor(b, dtype=f32)) == pytest.approx(want, abs=1e-12)
    assert ev.privleak(.3 * want, .3 * .8) == pytest.approx(ev.privleak(want, .8), abs=1e-9)


@examples(40)
@given(arrays(np.float64, st.integers(1, 40), elements=floats(-40, 0)), floats(.125, 1), floats(-9, 9), st.randoms(use_true_random=False))
def test_min_k(logp, k, shift, rng):
    """Tokens in any order; a constant on every log p comes off the score; float32 and bfloat16 tensors."""
    want = ev.min_k_score(logp, k)
    assert ev.min_k_score(rng.sample(logp.tolist(), len(logp)), k) == pytest.approx(want, abs=1e-12)
    assert ev.min_k_score(logp + shift, k) == pytest.approx(want - shift, abs=1e-9)
    assert ev.min_k_score(torch.tensor(logp, dtype=f32), k) == pytest.approx(want, abs=1e-9)
    assert ev.min_k_score(torch.tensor(logp, dtype=bf16), k) == pytest.approx(want, rel=.01, abs=.01)


@examples(40)
@given(texts, texts)
def test_rouge(a, b):
    """F1 does not know which text is the reference, recall and precision change places; case and punctuation do not count."""
    for stemmer in (False, True):
        f1, recall, precision = (ev.rouge_l(a, b, stat, stemmer) for stat in ("f1", "recall", "precision"))
        assert ev.rouge_l(b, a, "f1", stemmer) == pytest.approx(f1) and ev.rouge_l(b, a, "precision", stemmer) == pytest.approx(recall)
        assert ev.rouge_l("..." + a.upper() + "!", b.replace(" ", " - "), "f1", stemmer) == pytest.approx(f1)
        assert min(recall, precision) - 1e-12 <= f1 <= max(recall, precision) + 1e-12 <= 1 + 1e-12


@examples(30)
@given(tensor(5, low=0, high=90), tensor(5, 4, low=0, high=90), st.permutations(range(5)), st.permutations(range(4)), tensor(5, 1, low=0, high=9))
def test_truth_ratio(para, pert, rows, wrong, shift):
    """Rows for themselves, wrong answers in any order and any number of times, a factor on all probabilities of a row, float32."""
    for mean in ("geometric", "arithmetic"):
        want = ev.truth_ratio(para, pert, mean)
        close(ev.truth_ratio(para[rows], pert[rows], mean), want[rows])
        close(ev.truth_ratio(para, pert[:, wrong], mean), want)
        close(ev.truth_ratio(para, pert.repeat(1, 2), mean), want, rtol=1e-8)
        close(ev.truth_ratio(para + shift[:, 0], pert + shift, mean), want, rtol=1e-8)
        close(ev.truth_ratio(para[:2], pert[:2], mean), want[:2])
        close(ev.truth_ratio(para.float(), pert.float(), mean), want, rtol=1e-8)
        close(ev.truth_ratio(para.numpy(), pert.numpy(), mean), want)


@examples(30)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_forget_quality_and_utility(rows, rng):
    """A test between two sets: any order, either way round, any increasing function, float32; a mean of its entries in any order."""
    a, b = (np.array(x) / 10 + .1 for x in zip(*rows))
    assume((a != b).any())
    for f in (ev.forget_quality, ev.log10_forget_quality):
        want = f(a, b)
        assert f(b, a) == pytest.approx(want, rel=1e-9) == f(rng.sample(a.tolist(), len(a)), rng.sample(b.tolist(), len(b)))
        assert f(np.log(a), np.log(b)) == pytest.approx(want, rel=1e-9)
        assert f(torch.tensor(a, dtype=f32), np.float32(b)) == pytest.approx(want, rel=1e-9)
    assert ev.model_utility(rng.sample(a.tolist(), len(a))) == pytest.approx(ev.model_utility(a), rel=1e-12)
    assert ev.model_utility(3 * a) == pytest.approx(3 * ev.model_utility(np.float32(a)), rel=1e-6)


@examples(20)
@given(st.lists(st.tuples(*[floats(.125, 9)] * 4), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_scores_of_a_set_of_rows(rows, rng):
    """tofu_scores and the mean over seeds: rows in any order."""
    items = [dict(nll=a, nll_para=b, nll_pert=[c, d], rouge=a / 9) for a, b, c, d in rows]
    for part in ev.SETS:
        want = ev.tofu_scores(part, copy.deepcopy(items))
        assert ev.tofu_scores(part, rng.sample(copy.deepcopy(items), len(items))) == pytest.approx(want, rel=1e-12)
    assert ev.cell([a for a, *_ in rows]) == ev.cell(rng.sample([a for a, *_ in rows], len(rows)))


# ----- log p and text of a model: whoever shares the batch -----

@pytest.fixture(scope="module")
def llama():
    from test_tofu import tiny
    return tiny(40, context=64)


id_lists = st.lists(st.lists(st.integers(2, 39), min_size=2, max_size=20), min_size=1, max_size=7)


class Numbers:
    """A tokenizer whose words are numbers."""
    bos_token_id, eos_token_id, chat_template = 0, 1, None

    def __len__(self):
        return 40

    def __call__(self, text, **kw):
        return dict(input_ids=[int(w) if w.isdigit() else 2 + len(w) for w in text.split()])

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(i) for i in ids if i > 1 or not skip_special_tokens)


@examples(12)
@given(id_lists, st.integers(1, 8), st.randoms(use_true_random=False), st.integers(0, 39), tensor(32, low=-2, high=2))
def test_log_probabilities_and_texts(llama, seqs, batch_size, rng, pad, shift):
    """Alone, in any company, in any order, behind or before any pad token; with one vector added to every row of the head; in float64
    and, near enough, in bfloat16."""
    alone = [ev.token_logps(llama, [s])[0] for s in seqs]
    order = rng.sample(range(len(seqs)), len(seqs))
    padded = partial(ev.pad_batch, pad_id=pad)
    with mock.patch.object(ev, "pad_batch", padded):
        for i, logp in zip(order, ev.token_logps(llama, [seqs[i] for i in order], batch_size)):
            close(logp, alone[i], rtol=0, atol=2e-5)
        stats = {}
        texts = ev.generate(llama, Numbers(), [seqs[i] for i in order], 5, batch_size, stats=stats)
        for i, text in zip(order, texts) if not stats["near_ties"] else ():
            assert text == ev.generate(llama, Numbers(), [seqs[i]], 5)[0]
    tails = [(s[:1], s[1:]) for s in seqs]
    got = ev.continuation_logps(llama, tails, batch_size)
    close(torch.tensor(got), torch.stack([a.double().sum() for a in alone]), rtol=0, atol=2e-4)
    exact, half, moved = copy.deepcopy(llama).double(), copy.deepcopy(llama).bfloat16(), copy.deepcopy(llama)
    with torch.no_grad():
        moved.lm_head.weight += shift.float()
    for other, atol in ((exact, 1e-4), (moved, 1e-3), (half, 1.5)):
        for logp, want in zip(ev.token_logps(other, seqs, batch_size), alone):
            close(logp, want, rtol=0, atol=atol)


def test_evaluations_do_not_see_the_order_of_rows(llama):
    """MUSE and TOFU on a random model: rows turned round give every metric again, to rounding; bfloat16 gives every metric, too."""
    tokenizer, rng = Numbers(), np.random.default_rng(0)
    words = lambda n: " ".join(map(str, rng.integers(2, 40, n)))
    qa = lambda n: [dict(question=words(3), answer=words(2), paraphrased_answer=words(3), perturbed_answer=[words(2), words(3)]) for _ in range(n)]
    muse = ev.Bench("x", forget=[words(25) for _ in range(5)], holdout=[words(20) for _ in range(5)], auc_retrain=.5,
                    knowmem={f"{s}_qa": qa(4) for s in ("forget", "retain")}, mmlu=dict(validation=[dict(
                        question=words(3), subject="s", choices=[words(1) for _ in range(4)], answer=k % 4) for k in range(6)]))
    tofu = {part: qa(5) for part in ev.SETS}
    flip = lambda d: {k: v[::-1] for k, v in d.items()}
    back = ev.Bench("x", muse.forget[::-1], holdout=muse.holdout[::-1], auc_retrain=.5, knowmem=flip(muse.knowmem), mmlu=flip(muse.mmlu))
    muse_of = lambda model, bench: ev.evaluate_muse(model, tokenizer, bench, batch_size=3)["metrics"]

    def tofu_of(model, tofu, ratios):
        bench = ev.qa_bench("x", tofu["forget"], tofu["retain"], tofu, [], "here")
        bench.answer_new_tokens = 6
        return ev.evaluate_tofu(model, tokenizer, bench, batch_size=3, retrain_ratios=ratios)["metrics"]
    half, ratios = copy.deepcopy(llama).bfloat16(), [.2, .4, .6, .8, 1.]
    for want, same, rough in ((muse_of(llama, muse), muse_of(llama, back), muse_of(half, muse)),
                              (tofu_of(llama, tofu, ratios), tofu_of(llama, flip(tofu), ratios), tofu_of(half, tofu, ratios))):
        assert same == pytest.approx(want, rel=1e-5, abs=1e-5) and rough.keys() == want.keys()
        assert all(math.isfinite(v) for v in rough.values())


# ----- another device, where there is one -----

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_device_gives_the_same_numbers():
    g = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=g, dtype=f64)
    z, w, h, W, h2, W2, y = rand(N, V), rand(N, V), rand(N, 3), rand(V, 3), rand(N, 2), rand(V, 2), torch.randint(V, (N,), generator=g)
    there = lambda *xs: [x.cuda() for x in xs]
    for f in LOGIT_LOSSES.values():
        close(f(*there(z, w, y)).cpu(), f(z, w, y))
    for f in HEADS.values():
        close(f(*there(h, W, h2, W2, y)).cpu(), f(h, W, h2, W2, y))
    x = -rand(B, 4).abs()
    for f in SEQUENCE_LOSSES.values():
        close(f(x.cuda(), torch.arange(1, 5).cuda()).cpu(), f(x, torch.arange(1, 5)))
    lists = [[[v.clone()] for v in xs] for xs in (rand(4, 6).float(),) for _ in range(2)]
    lists[1] = [[v.cuda() for v in list_] for list_ in lists[1]]
    for list_ in lists:
        mt.mean_teacher_step_(*list_, **STEP)
    for a, b in zip(*lists):
        close(b[0].cpu(), a[0], rtol=1e-5, atol=1e-6)
    batches = [(rand(6, 3), torch.randint(3, (6,), generator=g)) for _ in range(3)]
    for make in OPTIMIZERS.values():
        close(optimize(make, [there(*b) for b in batches], network().cuda()).cpu(), optimize(make, batches), rtol=1e-6, atol=1e-6)

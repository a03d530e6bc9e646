"""synthetic.py: every analytic quantity against a slow, differently written computation, then one tiny run each."""
import json, math, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jvp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import synthetic as syn
from evaluate import run_main

torch.set_num_threads(1)
D = torch.float64


def close(got, want, rtol=1e-10, atol=1e-13):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=rtol, atol=atol)


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def test_observed_order_and_its_interval():
    """Oracle: polyfit, and the t quantile of the textbook; exact powers have no spread."""
    assert syn.observed_order(lambda s: 3 * s ** 2.5, 0.3, 4) == pytest.approx(2.5)
    x, y = [.1, .2, .4, .8], [1., 1.9, 4.4, 7.5]
    (slope, _), cov = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    close(syn.loglog_slope(x, torch.tensor(y, dtype=D)), [slope, 4.302652729911275 * math.sqrt(cov[0, 0])], rtol=1e-8)


# ------------------------------------------------------------------------------------------------ 1. divergence

@pytest.mark.parametrize("beta", [0.1, 1.0, 4.0])
def test_npo_in_probability_space(beta):
    """Oracle: (2/beta) mean log(1 + (p/q)^beta) in NumPy, and the weight 2 p^b / (p^b + q^b) as its gradient."""
    p, q = np.array([0.9, 0.2, 0.01]), np.array([0.8, 0.8, 0.7])
    logp, ref = torch.tensor(np.log(p)), torch.tensor(np.log(q))
    close(syn.npo_loss(logp, ref, beta), (2 / beta) * np.log1p((p / q) ** beta).mean())
    weight = 2 * p ** beta / (p ** beta + q ** beta)
    close(syn.npo_weight(logp, ref, beta), weight)
    close(grad(syn.npo_loss)(logp, ref, beta), weight / 3)


def test_rows_have_the_overlap_of_the_theorem():
    X = syn.near_orthogonal_rows(8, 32, 0.2, torch.Generator().manual_seed(0))
    gram = (X @ X.T).numpy()
    close(np.diag(gram), np.ones(8))
    close(np.abs(gram - np.eye(8)), (0.2 / 8) * (1 - np.eye(8)))


def test_divergence_curves_against_autograd_of_the_literal_losses():
    X, theta0, y, betas = rand(3, 6), rand(6, seed=1), torch.tensor([1., 0., 1.], dtype=D), (0.3, 2.0)
    got = syn.divergence_curves(X, y, theta0, (0.0, *betas), 0.7, 12)
    logp = lambda th: torch.where(y > 0, torch.sigmoid(X @ th), 1 - torch.sigmoid(X @ th)).log()
    losses = [lambda th: logp(th).mean()] + [lambda th, b=b: syn.npo_loss(logp(th), logp(theta0), b) for b in betas]
    for j, loss in enumerate(losses):
        theta = theta0.clone()
        for t in range(13):
            d = (theta - theta0).numpy()
            close(got[t, j], np.sqrt(d @ (X.T @ X).numpy() @ d), rtol=1e-8, atol=1e-7)
            theta = theta - 0.7 * grad(loss)(theta)


def test_fit_growth_recovers_planted_constants():
    t = torch.arange(2000, dtype=D)
    line, log = syn.fit_growth(0.3 * t), syn.fit_growth(5 * torch.log1p(0.02 * t))
    assert line["slope"] == pytest.approx(0.3) and line["r2_linear"] > 1 - 1e-12
    assert log["a"] == pytest.approx(5, rel=1e-3) and log["b"] == pytest.approx(0.02, rel=2e-3)
    assert log["r2_log"] > 1 - 1e-6 and log["r2_linear"] < 0.9


def test_proposition_1_and_theorem_2_in_small():
    assert all(abs(o - 1) < 0.05 for o in syn.proposition_1(3))
    X = syn.near_orthogonal_rows(8, 32, 0.2, torch.Generator().manual_seed(1))
    c = syn.divergence_curves(X, torch.ones(8, dtype=D), torch.zeros(32, dtype=D), (0.0, 1.0), 1.0, 4000)
    assert c[4000, 0] / c[2000, 0] == pytest.approx(2, abs=0.01)                 # GA: twice the time, twice the way
    per_doubling = float(c[4000, 1] - c[2000, 1])                                # NPO: the same, sqrt(n)/beta log 2
    assert per_doubling == pytest.approx(float(c[2000, 1] - c[1000, 1]), rel=0.02)
    assert per_doubling == pytest.approx(math.sqrt(8) * math.log(2), rel=0.1)


# ------------------------------------------------------------------------------------------------ 2. random features

def literal_forget_loss(family, z, z0, y, y_idk, beta):
    """The printed losses, from probabilities; z (n,) -> scalar mean over the forget rows."""
    logp = lambda z, y: torch.where(y > 0, torch.sigmoid(z), torch.sigmoid(-z)).log()
    R, R_idk = logp(z, y) - logp(z0, y), logp(z, y_idk) - logp(z0, y_idk)
    if family == "KTO":
        z_ref = beta * R_idk.detach().mean()
        return -(2 / beta) * torch.sigmoid(z_ref - beta * R).log().mean()
    return {"GA": logp(z, y).mean(), "IDK": -logp(z, y_idk).mean(),
            "NPO": -(2 / beta) * torch.sigmoid(-beta * R).log().mean(),
            "DPO": -(1 / beta) * torch.sigmoid(beta * (R_idk - R)).log().mean()}[family]


@pytest.mark.parametrize("family", ["GA", "IDK", "NPO", "DPO", "KTO"])
def test_forget_push_is_the_gradient_of_the_literal_loss(family):
    n, beta = 7, 0.8
    z, z0 = rand(n), rand(n, seed=1)
    y, y_idk = (rand(n, seed=2) > 0).double(), (rand(n, seed=3) > 0).double()
    zz = z.clone().requires_grad_(True)
    (want,) = torch.autograd.grad(literal_forget_loss(family, zz, z0, y, y_idk, beta), zz)
    got = syn.forget_push(family, z[None, :, None], z0[None, :, None], y[None, :, None], y_idk[None, :, None],
                          torch.tensor([[[beta]]], dtype=D))
    close(got[0, :, 0] / n, want)


def small_data(n_sets=2, nf=5, nr=9, P=6):
    """Random features and labels, no geometry: only the arithmetic of the loop is looked at."""
    keys = dict(Xf=(nf, P), Xr=(nr, P), Ef=(4, P), Er=(3, P), initial=(P, 1), retrained=(P, 1))
    data = {k: rand(n_sets, *s, seed=i) for i, (k, s) in enumerate(keys.items())}
    return dict(data, **{k: (rand(n_sets, n, seed=9 + i) > 0).double()
                         for i, (k, n) in enumerate(dict(yf=nf, yr=nr, y_idk=nf).items())})


def test_batched_unlearning_equals_one_at_a_time_with_autograd():
    """All methods and sets at once against explicit losses, one model at a time; distances in plain probabilities."""
    data, M = small_data(), len(syn.METHODS)
    lr, beta = 0.05 + 0.1 * torch.rand(2, M, dtype=D), 0.5 + torch.rand(2, M, dtype=D)
    got = syn.unlearn(data, syn.METHODS, lr, beta, 6, every=3)
    assert got.shape == (3, 3, 2, M)

    def kl(z_p, z_q):
        p, q = torch.sigmoid(z_p).numpy(), torch.sigmoid(z_q).numpy()
        return np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
    for d in range(2):
        x = {k: v[d] for k, v in data.items()}
        start, goal = x["initial"][:, 0], x["retrained"][:, 0]
        for m, name in enumerate(syn.METHODS):
            def loss(th):
                total = literal_forget_loss(name.split("+")[0], x["Xf"] @ th, x["Xf"] @ start, x["yf"], x["y_idk"],
                                            float(beta[d, m]))
                p, p0 = torch.sigmoid(x["Xr"] @ th), torch.sigmoid(x["Xr"] @ start)
                if name.endswith("+RT"):
                    total = total - (x["yr"] * p.log() + (1 - x["yr"]) * (1 - p).log()).mean()
                if name.endswith("+KL"):
                    total = total + (p * (p / p0).log() + (1 - p) * ((1 - p) / (1 - p0)).log()).mean()
                return total
            theta = start.clone()
            for t in range(7):
                if t % 3 == 0:
                    want = [kl(x["Ef"] @ goal, x["Ef"] @ theta), kl(x["Er"] @ goal, x["Er"] @ theta),
                            kl(x["Ef"] @ start, x["Ef"] @ theta)]
                    close(got[t // 3, :, d, m], want, rtol=1e-8)
                th = theta.clone().requires_grad_(True)
                theta = theta - float(lr[d, m]) * torch.autograd.grad(loss(th), th)[0]


def test_table_1_reaches_the_right_columns():
    lr, beta = syn.paper_settings(["GA+KL", "NPO", "DPO+RT", "KTO"], syn.ALPHAS, 2)
    close(lr, [[5e-4, 5e-3, 5e-3, 5e-3]] * 2 + [[1e-4, 5e-2, 5e-2, 5e-2]] * 2)
    close(beta, [[0, 1, .1, 1]] * 2 + [[0, 10, 5, 10]] * 2)


@pytest.mark.parametrize("scale", [1.0, 2.2])
def test_pretraining_in_jumps_equals_the_plain_loop(scale):
    """scale 2.2 makes lr h exceed 1: the stiff directions oscillate, and a logarithm of 1 - lr h would be NaN."""
    lr, steps = 0.05, 3000
    X = torch.relu(rand(2, 60, 16) @ rand(16, 40, seed=5)) * 0.5 * scale
    y, w = (rand(2, 60, seed=6) > 0).double(), torch.full((2, 60), 1 / 60, dtype=D)
    w[1, :30], w[1, 30:] = 0, 1 / 30
    theta = torch.zeros(2, 40, 2, dtype=D)
    for _ in range(steps):
        theta = theta - lr * X.mT @ (w.T * (torch.sigmoid(X @ theta) - y[..., None]))
    stiff = lr * torch.linalg.eigvalsh(X.mT @ X / 60 / 4).max()
    assert (stiff > 1) == (scale > 1)
    got = syn.pretrain(X, y, w, lr, steps)
    assert (X @ (got - theta)).abs().max() < 3e-5 * (X @ theta).abs().max()        # 1e-5; without the corrector 3e-4


def test_bernoulli_kl_against_scipy_and_at_huge_logits():
    from scipy.special import expit, rel_entr
    a, b = rand(20), rand(20, seed=1)
    p, q = expit(a.numpy()), expit(b.numpy())
    close(syn.bernoulli_kl(a, b), rel_entr(p, q) + rel_entr(1 - p, 1 - q))
    huge = syn.bernoulli_kl(torch.tensor([0.0, 800.0], dtype=D), torch.tensor([-900.0, 800.0], dtype=D))
    close(huge, [450 - math.log(2), 0], atol=1e-9)


def test_the_data_are_those_of_the_paper():
    """P(y=1) = E sigmoid(N(0,1) + 1) on the forget set and its mirror on the retain set; 4.5 sigma intervals."""
    d = syn.gaussian_logistic(1.0, 7, n_forget=20000, n_retain=20000, n_fresh=10)
    x, w = np.polynomial.hermite_e.hermegauss(60)
    want = (w / w.sum() / (1 + np.exp(-(x + 1)))).sum()
    assert abs(float(d["yf"].mean()) - want) < 4.5 * 0.5 / math.sqrt(20000)
    assert abs(float(d["yr"].mean()) - (1 - want)) < 4.5 * 0.5 / math.sqrt(20000)
    assert abs(float(d["y_idk"].mean()) - 0.5) < 4.5 * 0.5 / math.sqrt(20000)
    W = rand(128, 16, seed=7) / 4                                          # the first draw of the seed is W
    close(d["Xf"].mean(0), torch.relu(rand(20000, 16, seed=1) @ W.T + W.sum(1)).mean(0), rtol=0, atol=0.06)
    close(d["Xr"].mean(0), torch.relu(rand(20000, 16, seed=1) @ W.T - W.sum(1)).mean(0), rtol=0, atol=0.06)


# ------------------------------------------------------------------------------------------------ 3. a-f

def test_curvature_matrices_against_public_numbers():
    """tests/golden/curvature: curvlinops and own NumPy on a 4-5-3 tanh network."""
    path = ROOT / "tests" / "golden" / "curvature" / "oracles.npz"
    if not path.exists():
        pytest.skip("tests/golden/curvature/oracles.npz is not here")
    z = np.load(path)
    theta = torch.cat([torch.tensor(z["param__" + k]).flatten() for k in ("0.weight", "0.bias", "2.weight", "2.bias")])
    X, y = torch.tensor(z["X"]), torch.tensor(z["y"])
    close(syn.mlp(theta.to(D), X.to(D)), z["logits"], rtol=1e-6 if theta.dtype != D else 1e-12)
    for got, key in zip(syn.curvature_matrices(theta.to(D), X.to(D), y),
                        ("hessian", "ggn", "OWN_fisher_exact", "empirical_fisher")):
        close(got, z[key], rtol=0, atol=1e-11 if theta.dtype == D else 1e-6)


def test_curvature_matrices_against_finite_differences():
    X, theta, y, _ = syn.small_network(3)
    H, G, fisher, empirical = syn.curvature_matrices(theta, X, y)
    loss = lambda th: F.cross_entropy(syn.mlp(th, X), y)
    v, eps = F.normalize(rand(43, seed=9), dim=0), 1e-5
    close(H @ v, (grad(loss)(theta + eps * v) - grad(loss)(theta - eps * v)) / (2 * eps), rtol=0, atol=1e-8)
    # Fisher by brute force: every row, every class, its own backward pass
    want, seen = torch.zeros(43, 43, dtype=D), torch.zeros(43, 43, dtype=D)
    for n in range(len(X)):
        for c in range(3):
            g = grad(lambda th: syn.mlp(th, X[n:n + 1]).log_softmax(-1)[0, c])(theta)
            want += syn.mlp(theta, X[n:n + 1]).softmax(-1)[0, c] * torch.outer(g, g) / len(X)
            seen += (c == int(y[n])) * torch.outer(g, g) / len(X)
    close(fisher, want)
    close(G, want)
    close(empirical, seen)


def test_one_dimensional_example_by_hand():
    late, last = syn.one_dimensional(lambda k: 0.5, 0, steps=10, runs=3)
    start = rand(3).abs()
    close(last, start / 2 ** 10)
    close(late, start / 2 ** 10)
    _, last = syn.one_dimensional(lambda k: 1 / k, 0.75, steps=20, runs=3)
    theta = rand(3).numpy()
    for k in range(1, 21):
        theta = theta - np.sign(theta) * np.abs(theta) ** -0.5 / k
    close(last, np.abs(theta), rtol=1e-6)


def test_logistic_ngd_is_newton_and_finds_the_maximum_likelihood():
    from scipy.optimize import minimize
    X, y = rand(40, 3), (rand(40, seed=2) > 0).double()
    nll = lambda w: np.logaddexp(0, X.numpy() @ w).mean() - (y.numpy() * (X.numpy() @ w)).mean()
    best = minimize(nll, np.zeros(3), tol=1e-12).x
    close(syn.ngd_in_coordinates(lambda c: c, torch.zeros(3, dtype=D), X, y, 1.0, 12), best, rtol=0, atol=1e-5)
    one = syn.ngd_in_coordinates(lambda c: 3 * c, torch.ones(3, dtype=D), X, y, 0.1, 1, natural=False)
    p = torch.sigmoid(X @ torch.full((3,), 3.0, dtype=D))
    close(one, 3 * (1 - 0.1 * 3 * (X.T @ (p - y) / 40)))                    # chain rule: one J in the step, one outside


def test_levenberg_marquardt_and_the_undamped_step():
    assert syn.gauss_newton_fit(40, damping=1.0) < 1e-20
    assert syn.gauss_newton_fit(40) > 1
    t = np.linspace(0, 4, 30)                                              # the first loss, by hand
    r = np.exp(-.2 * t) + np.exp(-.3 * t) - np.exp(-t) - np.exp(-1.5 * t)
    assert syn.gauss_newton_fit(1) == syn.gauss_newton_fit(1, damping=1.0) == pytest.approx(0.5 * r @ r)


@pytest.mark.parametrize("precondition", [False, True])
def test_stochastic_quadratic_against_exact_moments(precondition):
    """Mean and covariance of the last iterate and of the average, in NumPy, no sampling; within 5 standard errors."""
    h, theta0, alpha, K = np.array([1.0, 0.3]), np.array([2.0, -1.0]), 0.4, 40
    gaps = syn.stochastic_quadratic(torch.tensor(h), torch.tensor(theta0), alpha, K, precondition, 1.0, runs=20000)
    a = 1 - alpha * (np.ones(2) if precondition else h)                    # theta <- a theta + b xi
    b = alpha * (1 / np.sqrt(h) if precondition else np.sqrt(h))
    response = np.array([[a ** (k - j) if k >= j else 0 * a for k in range(1, K + 1)] for j in range(1, K + 1)])
    last = 0.5 * (h * ((a ** K * theta0) ** 2 + (b ** 2) * (response[:, -1] ** 2).sum(0))).sum()
    mean = np.mean([a ** k for k in range(1, K + 1)], 0) * theta0
    average = 0.5 * (h * (mean ** 2 + b ** 2 * (response.mean(1) ** 2).sum(0))).sum()
    for got, want in zip(gaps, (last, average, average)):                  # beta_max 1: the EMA is the plain average
        assert abs(float(got.mean()) - want) < 5 * float(got.std()) / math.sqrt(20000)


def test_ema_weights_are_those_printed():
    """One run with its noise drawn again by hand: beta_k = min(1 - 1/k, beta_max), on theta_1..theta_k."""
    h, g = torch.tensor([1.0, 0.5], dtype=D), torch.Generator().manual_seed(3)
    theta, ema, history = torch.ones(1, 2, dtype=D), torch.zeros(1, 2, dtype=D), []
    for k in range(1, 9):
        theta = theta - 0.3 * (h * theta + h.sqrt() * torch.randn(1, 2, dtype=D, generator=g))
        beta = min(1 - 1 / k, 0.6)
        ema = beta * ema + (1 - beta) * theta
        history.append(theta)
    got = syn.stochastic_quadratic(h, torch.ones(2, dtype=D), 0.3, 8, beta_max=0.6, runs=1, seed=3)
    gap = lambda v: float(0.5 * (h * v ** 2).sum())
    close(got[:, 0], [gap(theta), gap(torch.stack(history).mean(0)), gap(ema)])


# ------------------------------------------------------------------------------------------------ 3. g Theorem 3.1

def test_losses_and_divergences_against_literal_formulas():
    z, r, y = rand(6, 4), rand(6, 4, seed=1), torch.tensor([0, 1, 2, 3, 0, 1])
    p, q = z.softmax(-1).numpy(), r.softmax(-1).numpy()
    close(syn.nlul(z, y), -np.log1p(-p[np.arange(6), y]))
    close(syn.kl_divergence(z, r), (p * np.log(p / q)).sum(1))
    d = (z - r).numpy()
    want = [d[i] @ (np.diag(p[i]) - np.outer(p[i], p[i])) @ d[i] for i in range(6)]
    close(syn.qkl_divergence(z, r, 1.0), want)
    close(syn.qkl_divergence(z, r), np.array(want) / 2)
    X, labels = rand(8, 5, seed=2), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])       # Bregman: the definition, with labels
    ce = lambda th: F.cross_entropy(X @ th, labels)
    a, b = rand(5, 4, seed=3), rand(5, 4, seed=4)
    close(syn.DIVERGENCES["Bregman"][0](X @ a, X @ b).mean(), ce(a) - ce(b) - ((a - b) * grad(ce)(b)).sum())
    sure = torch.tensor([[60.0, 0.0, 0.0]], dtype=D)                       # p rounds to 1: log(1 - p) would be -inf
    close(syn.nlul(sure, torch.tensor([0])), [60 - math.log(2)])


@pytest.mark.parametrize("name", list(syn.DIVERGENCES))
def test_each_divergence_has_the_stated_hessian(name):
    """Eq. 5 needs D's Hessian at theta = theta' to be H; the one case that states a wrong H must be wrong by 2."""
    D_fn, ratio = syn.DIVERGENCES[name]
    X, theta = rand(9, 4), rand(4, 3, seed=1)
    H = hessian(lambda v: D_fn(X @ v.view(4, 3), X @ theta).mean())(theta.flatten())
    ggn = syn.softmax_ggn(X, theta[None])[0]
    if name == "QKL scale 1, H = GGN":
        close(H, 2 * ggn)
    else:
        close(H, ratio * ggn)
    kron = sum(np.kron(np.outer(x, x), np.diag(p) - np.outer(p, p)) for x, p in
               zip(X.numpy(), (X @ theta).softmax(-1).numpy())) / 9
    close(ggn, kron)


def test_lambda_bar_is_the_papers():
    assert syn.lambda_bar(0.5, 0.9, 5e-4, 10.0) == pytest.approx(1.505, abs=2e-4)
    assert syn.lambda_bar(0.1, 0.0, 0.02, 1.0) == pytest.approx(0.1 + 1 / 0.98)


def test_theorem_errors_against_a_loop_in_the_papers_letters():
    """Algorithm 1 and Eq. 8, one case, one alpha at a time, H from autograd, inverse explicit."""
    eta, lam, kappa, A, alphas, cases = 0.05, 0.1, 1.0, 0.3, (0.5, 0.25), [("QKL", 0.9), ("KL", 0.0)]
    got = syn.theorem_3_1_errors(alphas, cases, 4, eta=eta, lam=lam, kappa=kappa, A=A, d=3, C=3)
    g = torch.Generator().manual_seed(4)
    Xr, Xf, start = (torch.randn(*s, dtype=D, generator=g) for s in ((40, 3), (10, 3), (3, 3)))
    start = 0.5 * start
    labels = (Xf @ start).argmax(-1)
    L = lambda th: -torch.log(1 - (Xf @ th.view(3, 3)).softmax(-1)[range(10), labels]).mean()
    for c, (name, mu) in enumerate(cases):
        Dv = lambda th, ref: (syn.DIVERGENCES[name][0](Xr @ th.view(3, 3), Xr @ ref.view(3, 3)).mean()
                              + lam / 2 * (th - ref) @ (th - ref))
        for i, alpha in enumerate(alphas):
            gamma = kappa * alpha * eta / (1 - kappa * eta)
            lam_bar = lam + (1 - mu) * kappa / (1 - eta * kappa)
            H = lambda th: hessian(lambda v: Dv(v, th))(th) + (lam_bar - lam) * torch.eye(9, dtype=D)
            for reading in (0, 1):
                theta = [start.flatten(), start.flatten()]
                ref, bar, worst = start.flatten(), [start.flatten(), start.flatten()], 0.0
                for _ in range(round(A / gamma)):
                    theta.append(theta[-1] - eta * (alpha * grad(L)(theta[-1]) + grad(Dv)(theta[-1], ref))
                                 + mu * (theta[-1] - theta[-2]))
                    ref = (1 - eta * kappa) * ref + eta * kappa * theta[-1]
                    bar.append(bar[-1] - gamma * torch.linalg.inv(H(bar[-1])) @ grad(L)(bar[-1 - reading]))
                    worst = max(worst, float((theta[-1] - bar[-1]).norm()))
                assert float(got[reading, c, i]) == pytest.approx(worst, rel=1e-8)


def test_the_theorems_rate_survives_and_the_printed_qkl_does_not():
    e = syn.theorem_3_1_errors((0.4, 0.2, 0.1), [("KL", 0.9), ("QKL scale 1, H = GGN", 0.9)], 0, eta=0.04)
    good, bad = e[0]
    assert good[0] > 1.5 * good[1] and good[1] > 1.5 * good[2]              # about alpha^.85
    assert bad[2] > 0.9 * bad[0]
    assert (e[0, 0] - e[1, 0]).abs().max() < 0.05 * e[0, 0, 0]               # both readings of Eq. 8 agree closely


# ------------------------------------------------------------------------------------------------ 3. h Lemma D.1

@pytest.mark.parametrize("mu,s", [(0.9, 0.5), (0.9, 1e-3), (0.5, 0.2), (0.9, (1 - math.sqrt(.9)) ** 2)])
def test_impulse_and_start_response_against_matrix_powers(mu, s):
    """The lemma's own (u, v) form: start enters as (1, 0), noise as (-eta, eta); u is the first component."""
    A, power = np.array([[1 - s, -mu], [s, mu]]), np.eye(2)
    k = syn.impulse_response(mu, torch.tensor([s], dtype=D), 12)[:, 0]
    c = syn.start_response(mu, torch.tensor([s], dtype=D), 12)[:, 0]
    for t in range(12):
        close(c[t], (power @ [1, 0])[0], rtol=1e-8, atol=1e-12)
        close(-k[t], (power @ [-1, 1])[0], rtol=1e-8, atol=1e-12)
        power = power @ A
    close(syn.lemma_block(mu, s), A)


@pytest.mark.parametrize("mu,s", [(0.9, 0.05), (0.9, 5e-4), (0.5, 0.3)])
def test_sign_matched_noise_reaches_the_worst_gain_and_random_noise_does_not_exceed_it(mu, s):
    n = 6000
    gain = float(syn.worst_gain(mu, torch.tensor([s], dtype=D))[0])
    k = syn.impulse_response(mu, torch.tensor([s], dtype=D), n)[:, 0]

    def final(noise):                                                      # e_0 = e_{-1} = 0, eta = 1
        e = [0.0, 0.0]
        for eps in noise:
            e.append((1 + mu - s) * e[-1] - mu * e[-2] - float(eps))
        return abs(e[-1])
    assert final(torch.sign(k).flip(0)) == pytest.approx(gain, rel=1e-8)
    assert final(torch.sign(rand(n))) < gain
    assert gain <= max(1 / s, 1 / (1 - math.sqrt(mu)) ** 2) * (1 + 1e-9)


def test_repaired_noise_bound_for_vectors():
    """Noise may rotate among eigenvectors, which beats every single one: sup over unit w of sum_n |K_n w|.

    Concave in w^2, so multiplicative ascent finds it (each value is attained, hence a lower bound of the supremum).
    """
    for mu in (0.5, 0.9, 0.97):
        q = math.sqrt(mu)
        for low in ((1 - q) ** 2, 3 * (1 - q) ** 2, 0.3):
            s = torch.logspace(math.log10(low), 0, 40, dtype=D)
            k2, p = syn.impulse_response(mu, s, int(60 / (1 - q))) ** 2, torch.full((40,), 1 / 40, dtype=D)
            for _ in range(300):
                p = p * (k2 / (k2 @ p).clamp_min(1e-300).sqrt()[:, None]).sum(0)
                p = p / p.sum()
            gain = float((k2 @ p).sqrt().sum())
            assert gain <= max(1 / low, (1 - q) ** -2) * (1 + 1e-9)
            if low >= 1 - q:                                               # the Cauchy-Schwarz form, also for spectra
                assert gain <= 1 / ((1 - q) * math.sqrt(1 - mu))


def test_counterexamples_have_the_reported_size():
    assert float(torch.linalg.matrix_norm(syn.lemma_block(.9, .5), 2)) == pytest.approx(1.273, abs=1e-3)
    assert syn.lemma_radius(.9, .5) == pytest.approx(.9487, abs=1e-4)
    claims = {c["check"]: c for c in syn.check_lemma_d1(quick=True)[0]}
    assert {k: c["verdict"] for k, c in claims.items()} == {
        "h norm": "fails", "h start": "fails", "h noise": "fails", "h 1/lam": "fails", "h C(mu)": "holds",
        "h repaired": "holds", "h transient": "holds"}
    assert "10.7" in claims["h norm"]["measured"] and "7.07-fold" in claims["h noise"]["measured"]


# ------------------------------------------------------------------------------------------------ 3. i falsifier

@pytest.fixture(scope="module")
def toy():
    return syn.falsifier_data(1, adam_steps=150)


def test_transformer_is_causal_and_learned(toy):
    assert syn.token_nll(toy["theta"], toy["forget"]) < 1.3 < math.log(10)       # the six rows are being memorised
    tokens = toy["pretrain"][:3].clone()
    before = syn.transformer(toy["theta"], tokens)
    tokens[:, 5] = (tokens[:, 5] + 1) % 10
    after = syn.transformer(toy["theta"], tokens)
    close(after[:, :5], before[:, :5])
    assert (after[:, 5:] - before[:, 5:]).abs().max() > 1e-3


def test_exact_ggn_is_the_hessian_of_the_divergence(toy):
    """Two independent routes: Jacobians and S, against forward-over-reverse through the KL itself."""
    rows, theta, v = toy["pretrain"][:6], toy["theta"], rand(736)
    H = syn.transformer_ggn(theta, rows, chunk=4)
    D_fn = lambda th: syn.kl_divergence(syn.transformer(th, rows), syn.transformer(theta, rows)).mean()
    close(H @ v, jvp(grad(D_fn), (theta,), (v,))[1], rtol=1e-8, atol=1e-10)


def test_mean_teacher_runs_against_a_loop_of_one_run(toy):
    """Algorithm 2 in the paper's letters with the same batches: clipping, momentum, mini-batches, frozen reference."""
    runs = [syn.Run("full"), syn.Run("clip", alpha=.2, clip=.05), syn.Run("all", .2, 8., .5, clip=.05, mini=True),
            syn.Run("frozen", alpha=.1, kappa=0.)]
    eta, lam = 5e-3, 0.5
    log = syn.mean_teacher_runs(toy, runs, 10, seed=2, eta=eta)
    for i, (_, alpha, kappa, mu, c, mini) in enumerate(runs):
        g = torch.Generator().manual_seed(3)
        theta, ref, v = toy["theta"].clone(), toy["theta"].clone(), torch.zeros(736, dtype=D)
        for t in range(11):
            if t == 10:
                close(log[10]["theta"][i], theta, rtol=1e-9, atol=1e-12)
                close(log[10]["teacher"][i], ref, rtol=1e-9, atol=1e-12)
                close(log[10]["forget_nll"][i], syn.token_nll(theta, toy["forget"]), rtol=1e-9)
                p = syn.transformer(toy["theta"], toy["held_out"]).softmax(-1)
                q = syn.transformer(theta, toy["held_out"]).softmax(-1)
                close(log[10]["kl"][i], (p * (p / q).log()).sum(-1).mean(), rtol=1e-6)
            f = torch.randperm(6, generator=g)[:4]
            k = torch.randperm(32, generator=g)[:8]
            Bf, Bp = (toy["forget"][f], toy["pretrain"][k]) if mini else (toy["forget"], toy["pretrain"])
            x = theta.clone().requires_grad_(True)
            p = syn.transformer(x, Bf).softmax(-1).gather(-1, Bf[:, 1:, None])
            p_keep, q_keep = syn.transformer(x, Bp).softmax(-1), syn.transformer(ref, Bp).softmax(-1)
            loss = (alpha * -(1 - p).log().mean() + (p_keep * (p_keep / q_keep).log()).sum(-1).mean()
                    + lam / 2 * ((x - ref) ** 2).sum())
            (gt,) = torch.autograd.grad(loss, x)
            ell = min(c / float(gt.norm()), 1)
            v = mu * v + ell * gt
            theta = theta - eta * v
            ref = (1 - ell * eta * kappa) * ref + ell * eta * kappa * theta
    assert not torch.allclose(log[10]["theta"][1], log[0]["theta"][1])
    assert torch.equal(log[10]["teacher"][3], toy["theta"])


def test_follow_natural_gradient_on_the_exact_direction(toy):
    ridge, alpha = 1.3, 0.05
    g = grad(syn.forget_loss)(toy["theta"], toy["forget"])
    H = syn.transformer_ggn(toy["theta"], toy["pretrain"])
    u = -alpha * torch.linalg.solve(H + ridge * torch.eye(736, dtype=D), g)
    there = syn.follow_natural_gradient(toy, u, toy["theta"], alpha, ridge, 0.5)
    assert there["cosine"] == pytest.approx(1) and there["distance"] < 1e-9
    assert there["distance_lam"] > 0.1 and 0 < there["cosine_gradient"] < 1
    back = syn.follow_natural_gradient(toy, -2 * u, toy["theta"], alpha, ridge, 0.5)
    assert back["cosine"] == pytest.approx(-1) and back["distance"] == pytest.approx(3)


def test_slow_ngd_against_explicit_inverses(toy):
    path = syn.slow_ngd(toy, syn.Run(""), 2, eta=0.01, refresh=1)
    theta, gamma, ridge = toy["theta"], 10 * .05 * .01 / .9, 0.5 + 0.1 * 10 / 0.9
    for t in range(3):
        close(path[t], theta, rtol=1e-9, atol=1e-12)
        H = syn.transformer_ggn(theta, toy["pretrain"]) + ridge * torch.eye(736, dtype=D)
        theta = theta - gamma * torch.linalg.inv(H) @ grad(syn.forget_loss)(theta, toy["forget"])


def test_price_is_read_where_a_run_first_forgets_as_much():
    """Three runs, four evaluations, level .8: the second passes it at once and falls back, the third never does."""
    forget = torch.tensor([[0., 0., 0.], [.5, .9, .2], [.7, .6, .4], [.8, .7, .6]])
    kl = torch.tensor([[0., 0., 0.], [1., 2., 3.], [4., 5., 6.], [7., 8., 9.]])
    assert syn.price_of_forgetting(forget, kl, "abc") == dict(a=7.0, b=2.0, c=None)


# ------------------------------------------------------------------------------------------------ whole runs

def test_random_features_end_to_end(tmp_path, capsys):
    """Two seeds, 300 steps, grid, figures: the effect (NPO forgets, retain data protects) and the files."""
    cfg = syn.parse_config(["random_features", "--seeds", "2", "--steps", "300", "--figure3-steps", "100",
                            "--out", str(tmp_path)])
    syn.main(cfg)
    got = json.loads((tmp_path / "synthetic.json").read_text())
    rows = {(r["alpha"], r["metric"], r["method"]): r for r in got["random_features"]["rows"]}
    assert len(rows) == 2 * 3 * 13 and all(r["n"] == 2 and len(r["per_seed"]) == 2 for r in rows.values())
    start, npo, rt = (rows[1.0, "forget_distance", m]["median"] for m in ("start", "NPO", "NPO+RT"))
    assert start > 1 and npo < 0.1 * start and rt < 0.1 * start
    assert rows[1.0, "retain_distance", "NPO+RT"]["median"] < 0.5 * rows[1.0, "retain_distance", "NPO"]["median"]
    assert rows[1.0, "retain_distance", "start"]["median"] < 0.03
    assert rows[1.0, "forget_distance", "NPO"]["published"] == .003
    assert {c["verdict"] for c in got["claims"]} <= {"holds", "fails"} and "versions" in got
    assert {p.name for p in tmp_path.iterdir()} == {"synthetic.json", "synthetic_figure3.png", "synthetic_figure4.png",
                                                    "synthetic_figure11.png"}
    out = capsys.readouterr().out
    assert all(line.count(" | ") == 4 for line in out.splitlines() if line.startswith("2 "))


def test_cheap_checks_hold():
    claims = (syn.check_matrices(1) + syn.check_invariance(1) + syn.check_kl_expansion(1) + syn.check_damping()
              + syn.check_empirical_fisher(1) + syn.check_stochastic_quadratic(1, 600, runs=300))
    assert [c["check"] for c in claims if c["verdict"] != "holds"] == []


@pytest.mark.parametrize("argv,word", [
    (["nonsense"], "unknown command"), (["--steps", "30"], "multiple of 25"), (["--seeds", "1"], "must be 2 or more"),
    (["divergence", "--grid"], "no grid"), (["--bogus", "1"], "bogus"), (["--seeds", "many"], "many"),
    (["divergence", "--out", "/dev/null/x"], "--out")])
def test_bad_flags_are_one_line_and_exit_2(argv, word, capsys):
    with pytest.raises(SystemExit) as e:
        run_main(lambda: syn.parse_config(argv))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and word in err


def test_help_names_every_field():
    out = subprocess.run([sys.executable, str(ROOT / "synthetic.py"), "--help"], capture_output=True, text=True,
                         check=True).stdout
    for name in ("--out", "--seeds", "--steps", "--figure3-steps", "--seed", "--grid", "--figures", "natural_gradient"):
        assert name in out


# ------------------------------------------------------------------------------------------------ survivors of mutants.py

def test_retrained_never_saw_the_forget_rows(monkeypatch):
    """Other forget labels: `initial`, trained on all rows alike, moves; `retrained` keeps its bits."""
    real, flip = syn.gaussian_logistic, False

    def small(alpha, seed):
        d = real(alpha, seed, n_forget=20, n_retain=60, n_fresh=5, width=12)
        return dict(d, yf=1 - d["yf"]) if flip else d
    monkeypatch.setattr(syn, "gaussian_logistic", small)
    a = syn.make_data((1.0,), 2)
    flip = True
    b = syn.make_data((1.0,), 2)
    assert torch.equal(a["retrained"], b["retrained"]) and syn.rel(a["initial"], b["initial"]) > 0.1
    for X, y, theta in ((a["Xr"], a["yr"], a["retrained"]), (torch.cat([a["Xf"], a["Xr"]], 1),
                                                             torch.cat([a["yf"], a["yr"]], 1), a["initial"])):
        slope = lambda th: (X.mT @ (torch.sigmoid(X @ th) - y[..., None]) / y.shape[1]).norm()
        assert slope(theta) < 0.01 * slope(0 * theta)                      # at the minimum of the mean over its own rows


def test_the_published_step_is_1900(monkeypatch):
    """A run of 1925 steps on small instances: the table's rows are of the last evaluation but one."""
    real, seen = syn.gaussian_logistic, []
    monkeypatch.setattr(syn, "gaussian_logistic", lambda alpha, seed: real(alpha, seed, 20, 60, 30, width=12))
    monkeypatch.setattr(syn, "random_features_claims", lambda one, zero, at: seen.append((one, at)) or [])
    cfg = syn.Config(seeds=2, steps=1925, figure3_steps=25)
    _, table, (curves, _) = syn.random_features(cfg, quick=True)
    row = next(r for r in table["rows"] if r["method"] == "NPO" and r["metric"] == "forget_kl")
    close(row["per_seed"], curves[-2, 2, 0, :, syn.METHODS.index("NPO")])
    assert table["step"] == row["step"] == 1900 and seen[0][1] == len(curves) - 2 == 76
    assert torch.equal(seen[0][0], curves[:, :, 0])


def test_summary_is_mean_median_std_at_the_published_step(capsys):
    curves = rand(81, 3, 2 * 5, len(syn.METHODS)).exp()
    rows = syn.summarise(curves.unflatten(2, (2, 5)), 76)
    c = curves.numpy().reshape(81, 3, 2, 5, -1)
    assert len(rows) == 2 * 3 * 13
    for r in rows:
        i, k = syn.ALPHAS.index(r["alpha"]), syn.METRICS.index(r["metric"])
        j = 0 if r["method"] == "start" else syn.METHODS.index(r["method"])
        v = c[0 if r["method"] == "start" else 76, k, i, :, j]             # step 1900 of 25 a row
        close([r["mean"], r["median"], r["std"]], [v.mean(), np.median(v), v.std(ddof=1)])
        close(r["per_seed"], v)
        assert r["step"] == (0 if r["method"] == "start" else 1900) and r["n"] == 5
        if r["method"] != "start":
            best = int(np.argmin((c[:, 0, i, :, j] + c[:, 1, i, :, j]).mean(1)))
            assert r["best_step"] == 25 * best
            close(r["at_best"], c[best, k, i, :, j].mean())
    npo = {(r["alpha"], r["metric"]): r["published"] for r in rows if r["method"] == "NPO"}
    assert npo[1.0, "forget_distance"] == .003 and npo[1.0, "retain_distance"] == .173 and npo[0.0, "forget_distance"] == .038

"""grng.py: K-FAC and Kalman against full matrices, public numbers, and every line of the optimizer contract."""
import copy, gc, io, itertools, json, math, os, pickle, re, subprocess, sys, warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import evaluate
import grng
from grng import (NGD, RENG, RING, SAM, RKalman, SophiaG, fisher_probes, jacobian, kalman_update, lazy_inverse,
                  newton_inverse, regularised_noise, spd_inverse, spectral_norm)

torch.set_num_threads(1)
D = torch.float64


def data(N=16, d=4, C=3, seed=0, dtype=D):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, d, generator=g, dtype=dtype), torch.randint(C, (N,), generator=g)


def mlp(d=4, h=5, C=3, seed=0, dtype=D, act=nn.Tanh):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, h), act(), nn.Linear(h, C)).to(dtype)


def ce(model, X, y):
    def closure():
        out = model(X)
        return out, F.cross_entropy(out, y)
    return closure


def rows(scalars, params):
    """Jacobian of a vector by a loop: one autograd.grad per entry -> (len, n)."""
    grads = [torch.autograd.grad(s, params, retain_graph=True) for s in scalars]
    return torch.stack([torch.cat([g.reshape(-1) for g in gs]) for gs in grads])


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def spd(n, cond, dtype, seed=0):
    Q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    return torch.tensor(Q @ np.diag(np.geomspace(1 / cond, 1, n)) @ Q.T, dtype=dtype)


PLAIN = dict(lm=False, kl_clip=None)          # the update alone, no step control


# ---- slow references ---------------------------------------------------------------------------------------------


class KFACReference:
    """RING / RENG / NGD for a list of nn.Linear in plain letters: per-case loops, dense Kronecker matrices, no laziness
    but the interval. Draws its labels by grng's rule (which the tests of `fisher_probes` check)."""

    def __init__(self, model, kind, rho, damping, lr=1.0, interval=1, ema=0.95, kl_clip=None, lm=False, seed=0,
                 fisher="exact"):
        self.__dict__.update(locals())
        self.layers = [m for m in model if isinstance(m, nn.Linear)]
        self.gen, self.k, self.A, self.G = torch.Generator().manual_seed(seed), 0, {}, {}

    def factors(self, X):
        acts, s = [], []                                 # inputs and outputs of each layer, graph kept
        h = X
        for m in self.model:
            if isinstance(m, nn.Linear):
                acts.append(torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1).detach())
                h = m(h)
                s.append(h)
            else:
                h = m(h)
        N, C = h.shape
        p = h.softmax(-1).detach()
        weights = p if self.fisher == "exact" else F.one_hot(
            (p.cumsum(-1) < torch.rand(N, 1, generator=self.gen, dtype=D)).sum(-1), C).to(h.dtype)
        for i, m in enumerate(self.layers):
            A = sum(torch.outer(a, a) for a in acts[i]) / N
            G = torch.zeros(m.out_features, m.out_features, dtype=h.dtype)
            for n, c in itertools.product(range(N), range(C)):
                e, = torch.autograd.grad(-h.log_softmax(-1)[n, c], s[i], retain_graph=True)
                G += weights[n, c] * torch.outer(e[n], e[n]) / N
            keep = min(1 - 1 / (self.k // self.interval + 1), self.ema)
            self.A[i] = A if self.k == 0 else keep * self.A[i] + (1 - keep) * A
            self.G[i] = G if self.k == 0 else keep * self.G[i] + (1 - keep) * G

    def step(self, X, y):
        if self.k % self.interval == 0:
            self.factors(X)
            self.frozen = self.damping if self.kind != "RING" else self.rho     # damping waits for the refresh
        params = list(self.model.parameters())
        loss = F.cross_entropy(self.model(X), y)
        g = torch.autograd.grad(loss, params, create_graph=True)
        if self.kind == "RENG":
            g = torch.autograd.grad(loss + self.rho / 2 * sum((x ** 2).sum() for x in g), params)
        dot, steps = 0, []
        for i, m in enumerate(self.layers):
            A, G, r = self.A[i], self.G[i], math.sqrt(self.frozen)
            if self.kind == "RING":
                cA, cG = r * torch.linalg.eigvalsh(A)[-1], r * torch.linalg.eigvalsh(G)[-1]
            elif self.kind == "RENG":
                cA = cG = r
            else:
                pi = torch.sqrt((A.trace() / len(A)) / (G.trace() / len(G)))
                cA, cG = r * pi, r / pi
            grad = torch.cat([g[2 * i], g[2 * i + 1][:, None]], 1).detach()
            K = torch.kron(G + cG * torch.eye(len(G), dtype=D), A + cA * torch.eye(len(A), dtype=D))
            U = torch.linalg.solve(K, grad.reshape(-1)).reshape(grad.shape)    # row-major vec: K = G kron A
            steps.append(U)
            dot = dot + (U * grad).sum()
        nu = min(1, math.sqrt(self.kl_clip / (self.lr ** 2 * dot))) if self.kl_clip else 1
        with torch.no_grad():
            for m, U in zip(self.layers, steps):
                m.weight -= self.lr * nu * U[:, :-1]
                m.bias -= self.lr * nu * U[:, -1]
            if self.lm and self.k % 5 == 0:
                s = self.lr * nu
                ratio = (F.cross_entropy(self.model(X), y) - loss) / (-s * dot + s * s * dot / 2)
                factor = .95 ** 5 if ratio > .75 else .95 ** -5 if ratio < .25 else 1
                self.rho, self.damping = (self.rho * factor, self.damping) if self.kind == "RING" else (
                    self.rho, self.damping * factor)
        self.k += 1


class KalmanReference:
    """The full Kalman filter, covariance projected to its diagonal after each step: no trick of `kalman_update`."""

    def __init__(self, theta, sigma0):
        self.theta, self.P = theta.clone(), torch.eye(len(theta), dtype=D) * sigma0

    def step(self, H, R, e, forgetting, q):
        n = len(self.theta)
        P = self.P / forgetting + q * torch.eye(n, dtype=D)
        K = P @ H.T @ torch.linalg.inv(H @ P @ H.T + R)
        self.theta = self.theta + K @ e
        J = torch.eye(n, dtype=D) - K @ H
        self.P = torch.diag(torch.diag(J @ P @ J.T + K @ R @ K.T))              # Joseph form


# ---- linear algebra ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("exponent", range(1, 9))
def test_newton_meets_its_tolerance_or_says_no(dtype, exponent):
    """Condition 1e1..1e8: a returned inverse has the residual asked for; otherwise None, and spd_inverse says so."""
    A, tol = spd(24, 10.0 ** exponent, dtype), 1e-5
    for order in (2, 3, 4):
        X, k = newton_inverse(A, order, tol)
        if X is None:
            assert dtype == torch.float32 and exponent >= 3
        else:
            assert torch.linalg.matrix_norm(torch.eye(24, dtype=dtype) - A @ X) <= tol
        Y, how = spd_inverse(A, f"newton{order}", tol)
        assert ("fell back" in how) == (X is None)
        if Y is None:
            assert "not positive definite" in how or "not finite" in how
        elif dtype == D:
            np.testing.assert_allclose(Y.numpy(), np.linalg.inv(A.numpy()), rtol=1e-3, atol=1e-4 * 10.0 ** exponent)


def test_newton_iterations_are_the_papers_polynomials():
    """One step in the paper's letters: X(2I-AX), X(3I-3AX+(AX)^2), X(4I-6AX+4(AX)^2-(AX)^3); order of convergence."""
    A = spd(8, 30.0, D)
    I = torch.eye(8, dtype=D)
    X0 = I / A.abs().sum(1).max()
    B = A @ X0
    want = {2: X0 @ (2 * I - B), 3: X0 @ (3 * I - 3 * B + B @ B), 4: X0 @ (4 * I - 6 * B + 4 * B @ B - B @ B @ B)}
    for order, W in want.items():
        tol = float(torch.linalg.matrix_norm(I - A @ W)) * (1 + 1e-9)            # met after exactly one iteration
        X, k = newton_inverse(A, order, tol)
        assert k == 1
        torch.testing.assert_close(X, W, rtol=1e-12, atol=1e-12)
    assert [newton_inverse(spd(32, 1e4, D), o, 1e-6)[1] for o in (2, 3, 4)] == [19, 12, 10]    # the documented counts


def test_newton_warm_start_is_checked():
    A = spd(8, 50.0, D)
    assert newton_inverse(A, 3, 1e-10, max_iter=3) == (None, 3)                  # out of iterations: no inverse
    good, _ = newton_inverse(A, 3, 1e-10)
    assert newton_inverse(A, 3, 1e-8, X0=good)[1] == 0
    X, _ = newton_inverse(A, 3, 1e-10, X0=100 * good)                            # ||I - A X0|| = 99 sqrt(8): diverges
    torch.testing.assert_close(X, torch.linalg.inv(A), rtol=1e-7, atol=1e-7)


def test_spd_inverse_never_returns_nan():
    assert spd_inverse(-torch.eye(3))[0] is None
    assert spd_inverse(torch.full((3, 3), float("nan")))[0] is None
    for method in ("newton2", "newton3", "newton4"):
        assert spd_inverse(torch.full((3, 3), float("nan")), method)[0] is None


def test_lazy_inverse_error_is_the_square():
    """Eq. 11: relative error per (damped) eigenvalue a exactly -(dc/a)^2; negative past dc = a."""
    a = torch.tensor([0.5, 1.0, 2.0, 10.0], dtype=D)
    for dc in (-0.2, 0.3, 0.7):
        got = lazy_inverse(torch.diag(1 / a), dc).diagonal()
        # exact inverse 1/(a + dc); first order (1/a)(1 - dc/a); their ratio is 1 - (dc/a)^2
        torch.testing.assert_close(got * (a + dc) - 1, -(dc / a) ** 2, rtol=1e-12, atol=1e-15)
    assert lazy_inverse(torch.diag(1 / a), 0.7).diagonal()[0] < 0


def test_spectral_norm_against_eigenvalues():
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        B = torch.randn(40, 12, generator=g, dtype=D)
        A = B.T @ B
        norm, v = spectral_norm(A)
        assert abs(norm / torch.linalg.eigvalsh(A)[-1] - 1) < 1e-2
        assert abs(spectral_norm(A, v, 200)[0] / torch.linalg.eigvalsh(A)[-1] - 1) < 1e-6
        zero, v = spectral_norm(torch.zeros(12, 12, dtype=D))                      # a warm start of 0 must not stick
        assert zero == 0 and abs(spectral_norm(A, v)[0] / torch.linalg.eigvalsh(A)[-1] - 1) < 1e-2


# ---- factors, Fisher and directions ------------------------------------------------------------------------------


def test_exact_probes_sum_to_the_softmax_fisher():
    f = torch.randn(6, 4, dtype=D)
    total = sum(d[:, :, None] * d[:, None] for d in fisher_probes(f, "categorical", "exact", None))
    p = f.softmax(-1)
    torch.testing.assert_close(total, torch.diag_embed(p) - p[:, :, None] * p[:, None], rtol=1e-12, atol=1e-14)
    assert torch.equal(sum(d[:, :, None] * d[:, None] for d in fisher_probes(f, "gaussian", "exact", None)),
                       torch.eye(4, dtype=D).expand(6, 4, 4))


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_sampled_probes_converge_to_the_exact_fisher(likelihood):
    """40,000 draws: five standard errors of at most 0.5 / 200 (categorical) and 1.5 / 200 (gaussian)."""
    f = torch.tensor([1.0, -0.5, 0.3], dtype=D).expand(40000, 3)
    d, = fisher_probes(f, likelihood, "sampled", torch.Generator().manual_seed(1))
    want = sum(x[0, :, None] * x[0] for x in fisher_probes(f[:1], likelihood, "exact", None))
    assert (d.T @ d / len(d) - want).abs().max() < 5 * (0.5 if likelihood == "categorical" else 1.5) / 200
    assert d.mean(0).abs().max() < 5 * (0.5 if likelihood == "categorical" else 1) / 200        # a score has mean zero


def test_kfac_is_the_exact_fisher_for_one_case_and_for_a_linear_model():
    """With one case E[aa^T] kron E[ee^T] IS the Fisher block; the oracle is J^T (diag p - p p^T) J."""
    X, y = data(1)
    model = mlp()
    opt = RING(model, fisher="exact", **PLAIN)
    out = model(X)
    J = jacobian(out, list(model.parameters()))
    p = out.softmax(-1)[0]
    Fisher = (J.T @ (torch.diag(p) - torch.outer(p, p)) @ J).detach()
    opt.step(ce(model, X, y))
    s = opt.layers[0].state
    block = torch.kron(s["G"], s["A"]).reshape(5, 5, 5, 5)                     # (out, in+1, out, in+1)
    torch.testing.assert_close(block[:, :4, :, :4].reshape(20, 20), Fisher[:20, :20], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(block[:, 4, :, 4], Fisher[20:25, 20:25], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(block[:, :4, :, 4].reshape(20, 5), Fisher[:20, 20:25], rtol=1e-10, atol=1e-14)


@pytest.fixture
def golden():
    g = np.load(ROOT / "tests/golden/curvature/oracles.npz")
    model = mlp()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(g["param__" + name]))
    return g, model, torch.tensor(g["X"]), torch.tensor(g["y"])


def test_factors_equal_curvlinops_and_asdfghjkl(golden):
    g, model, X, y = golden
    opt = NGD(model, fisher="exact", **PLAIN)
    opt.step(ce(model, X, y))
    for i, layer in zip((0, 2), opt.layers):
        for key, name in (("A", "kfac_type2_joint_A"), ("G", "kfac_type2_joint_G"), ("G", "asdl_exact_B")):
            np.testing.assert_allclose(layer.state[key].numpy(), g[f"{name}__{i}"], rtol=1e-12, atol=1e-14)
        A = layer.state["A"].numpy()
        np.testing.assert_allclose(A[:-1, :-1], g[f"asdl_exact_A__{i}"], rtol=1e-12, atol=1e-14)   # theirs has no bias


def test_sampled_factors_approach_the_exact_ones(golden):
    """400 x 16 sampled labels; curvlinops's own 400-draw factors are 4e-3 from exact, ours must be within 1e-2."""
    g, model, X, y = golden
    opt = RING(model, ema=1.0, interval=1, lr=1e-12, **PLAIN)
    for _ in range(400):
        opt.step(ce(model, X, y))
    for i, layer in zip((0, 2), opt.layers):
        assert abs(layer.state["G"].numpy() - g[f"kfac_type2_joint_G__{i}"]).max() < 1e-2
        np.testing.assert_allclose(layer.state["A"].numpy(), g[f"kfac_type2_joint_A__{i}"], rtol=1e-6)


@pytest.mark.parametrize("make, key", [
    (lambda m: RENG(m, rho=1e-300, damping=1e-4, fisher="exact", **PLAIN),
     "kfac_type2_joint_inv_factored_damp0.01_times_grad"),
    (lambda m: NGD(m, damping=0.01, fisher="exact", **PLAIN), "kfac_type2_joint_inv_pi_damp0.01_times_grad")])
def test_directions_equal_curvlinops(golden, make, key):
    g, model, X, y = golden
    before = flat(model)
    make(model).step(ce(model, X, y))
    np.testing.assert_allclose((before - flat(model)).numpy(), g[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["RING", "RENG", "NGD"])
@pytest.mark.parametrize("options", [PLAIN, dict(interval=2, fisher="sampled", kl_clip=1e-3),
                                     dict(kl_clip=1e-2, lr=0.3)])
def test_trajectory_equals_dense_reference(kind, options, monkeypatch):
    """12 steps beside KFACReference: factors, moving average, laziness, trust region, LM damping. The power iteration,
    which has a test of its own, makes way for the exact norm here."""
    monkeypatch.setattr(grng, "spectral_norm", lambda A, v, iters: (torch.linalg.eigvalsh(A)[-1], A[0]))
    options = dict(dict(interval=1, fisher="exact", lm=True), **options)
    a, b = mlp(seed=3), mlp(seed=3)
    rho, damping = 0.01, 0.02
    args = dict(RING=dict(rho=rho), RENG=dict(rho=rho, damping=damping), NGD=dict(damping=damping))[kind]
    opt = getattr(grng, kind)(a, keep_grad=True, **args, **options)
    ref = KFACReference(b, kind, rho, damping, **options)
    for k in range(12):
        X, y = data(seed=k)
        opt.step(ce(a, X, y))
        ref.step(X, y)
        torch.testing.assert_close(flat(a), flat(b), rtol=1e-8, atol=1e-10)
    assert opt.damping == pytest.approx(ref.rho if kind == "RING" else ref.damping)


def test_ring_damping_is_relative_and_two_sqrt_rho():
    """Eq. 10's product c_L c_G is rho ||Lambda x Gamma||, but it damps the top eigenvalue by 2 sqrt(rho)."""
    X, y = data()
    model, rho = mlp(), 1e-4
    opt = RING(model, rho=rho, **PLAIN)
    opt.step(ce(model, X, y))
    s = opt.layers[0].state
    a, g = torch.linalg.eigvalsh(s["A"])[-1], torch.linalg.eigvalsh(s["G"])[-1]
    assert float(s["cA"] * s["cG"] / (rho * a * g)) == pytest.approx(1, rel=2e-2)
    assert float((a + s["cA"]) * (g + s["cG"]) / (a * g) - 1) == pytest.approx(2 * math.sqrt(rho) + rho, rel=2e-2)


def test_reng_gradient_is_that_of_the_penalised_loss():
    """Two oracles: autograd of L + rho/2 ||grad L||^2 spelled out, and central differences of that scalar."""
    X, y = data()
    model, rho = mlp(), 0.3
    params = list(model.parameters())
    opt = RENG(model, rho=rho)
    loss = F.cross_entropy(model(X), y)
    got = torch.cat([g.reshape(-1) for g in opt._differentiate(loss, params)])

    def penalised(theta):
        torch.nn.utils.vector_to_parameters(theta, params)
        loss = F.cross_entropy(model(X), y)
        return float(loss + rho / 2 * sum((g ** 2).sum() for g in torch.autograd.grad(loss, params)))
    theta = flat(model)
    want = torch.tensor([(penalised(theta + h) - penalised(theta - h)) / 2e-5
                         for h in 1e-5 * torch.eye(len(theta), dtype=D)])
    torch.testing.assert_close(got, want.to(D), rtol=1e-6, atol=1e-8)


# ---- rows instead of matrices ------------------------------------------------------------------------------------


def wide(dtype=D):
    return mlp(d=40, h=48, C=30, dtype=dtype)


@pytest.mark.parametrize("cls", [RING, NGD])
def test_rows_give_the_update_of_the_gradient_matrix(cls):
    """Batch 8 < width: the row path must run, and equal keep_grad=True and accumulate() + step() to rounding."""
    models = [wide() for _ in range(3)]
    fast, slow, acc = cls(models[0]), cls(models[1], keep_grad=True), cls(models[2])
    for k in range(9):
        X, y = data(8, 40, 30, seed=k)
        fast.step(ce(models[0], X, y))
        slow.step(ce(models[1], X, y))
        acc.zero_grad()
        acc.accumulate(ce(models[2], X, y))
        acc.step()
        assert fast.last["rows"] == 2 and slow.last["rows"] == acc.last["rows"] == 0
        assert all(p.grad is None for p in models[0].parameters())               # never stale
        assert all(p.grad is not None for p in models[1].parameters())
    torch.testing.assert_close(flat(models[0]), flat(models[1]), rtol=1e-6, atol=1e-8)    # NGD's 1e-6 damping amplifies
    torch.testing.assert_close(flat(models[2]), flat(models[1]), rtol=1e-6, atol=1e-8)
    assert fast.damping == slow.damping == acc.damping


@pytest.mark.parametrize("case", ["penalty", "tied", "reused"])
def test_rows_are_refused_when_they_are_not_the_whole_gradient(case):
    """A weight with a second path to the loss: the rows of one call would miss part of the gradient."""
    torch.manual_seed(0)
    lin, other, head = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 30)
    if case == "tied":
        other.weight = lin.weight
    model = nn.ModuleList([lin, other, head]).to(D)
    X, y = data(8, 40, 30)

    def closure():
        h = torch.tanh(lin(X))
        h = lin(h) if case == "reused" else other(h)
        out = head(torch.tanh(h))
        return out, F.cross_entropy(out, y) + (0.1 * (lin.weight ** 2).sum() if case == "penalty" else 0)
    twin = copy.deepcopy(model)
    opt = RING(model, **PLAIN)
    opt.step(closure)
    assert opt.last["rows"] == (2 if case == "penalty" else 1)
    lin, other, head = twin
    opt = RING(twin, keep_grad=True, **PLAIN)
    opt.step(closure)
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-8, atol=1e-9)


def test_a_weight_used_twice_between_refreshes_takes_the_gradient():
    """Rows were chosen on a step that used the layer once; a model of varying depth uses it twice on the next."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 30)]).to(D)
    twin, (X, y) = copy.deepcopy(model), data(8, 40, 30)
    fast, slow = RING(model, **PLAIN), RING(twin, keep_grad=True, **PLAIN)
    for depth, rows in ((1, 2), (2, 1), (1, 2)):
        for opt, (lin, head) in ((fast, model), (slow, twin)):
            def closure():
                h = X
                for _ in range(depth):
                    h = torch.tanh(lin(h))
                out = head(h)
                return out, F.cross_entropy(out, y)
            opt.step(closure)
        assert fast.last["rows"] == rows
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-8, atol=1e-9)


# ---- R-Kalman ----------------------------------------------------------------------------------------------------


def test_regularised_noise_two_forms_and_neumann():
    """R (I + rho R)^-1 = (R^-1 + rho I)^-1; eigenvalue r becomes r / (1 + rho r); Neumann only for small rho r."""
    R = spd(5, 20.0, D)
    for rho in (1e-4, 0.5, 30.0):
        want = torch.linalg.inv(torch.linalg.inv(R) + rho * torch.eye(5, dtype=D))
        torch.testing.assert_close(regularised_noise(R, rho), want, rtol=1e-10, atol=1e-12)
        assert (torch.linalg.eigvalsh(R) > torch.linalg.eigvalsh(regularised_noise(R, rho))).all()     # the gain RISES
    err = [float((regularised_noise(R, rho) - (R - rho * R @ R)).abs().max() / R.abs().max()) for rho in (1e-2, 1.0)]
    assert err[0] < 1e-4 and err[1] > 0.1
    p = torch.tensor([0.5, 0.5, 0.0], dtype=D)
    assert torch.linalg.eigvalsh(torch.diag(p) - torch.outer(p, p))[-1] <= 0.5 + 1e-12


def test_kalman_update_equals_the_full_filter():
    """Five steps beside the Joseph-form filter with diagonal projection."""
    g = torch.Generator().manual_seed(0)
    n, M = 7, 4
    theta, P = torch.zeros(n, dtype=D), torch.full((n,), 0.3, dtype=D)
    ref = KalmanReference(theta, 0.3)
    for _ in range(5):
        H, e = torch.randn(M, n, generator=g, dtype=D), torch.randn(M, generator=g, dtype=D)
        R = spd(M, 5.0, D)
        ref.step(H, R, e, 0.9, 0.01)
        before = P / 0.9 + 0.01
        step, P = kalman_update(before, H, R, e)
        theta = theta + step
        torch.testing.assert_close(theta, ref.theta, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(P, ref.P.diagonal(), rtol=1e-10, atol=1e-12)
        assert (P > 0).all() and (P <= before).all()


@pytest.mark.parametrize("linear", [True, False])
def test_kalman_step_is_the_natural_gradient(linear):
    """Ollivier: with R the covariance of T(y), the update is (P^-1 + N F)^-1 times minus the summed gradient.

    Oracle on a linear softmax model: F = Hessian of the cross-entropy by double autograd, which shares nothing with the
    filter; on an MLP F = J^T (diag p - p p^T) J / N.
    """
    X, y = data()
    torch.manual_seed(1)
    model = nn.Linear(4, 3).to(D) if linear else mlp()
    params = list(model.parameters())
    out = model(X)
    gs = torch.autograd.grad(F.cross_entropy(out, y, reduction="sum"), params, create_graph=True)
    g = torch.cat([x.reshape(-1) for x in gs])
    if linear:
        NF = rows(g, params)
    else:
        J = rows(out.reshape(-1), params)
        p = out.softmax(-1)
        NF = J.T @ torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None])) @ J
    want = -torch.linalg.solve(NF.detach() + torch.eye(len(g), dtype=D) / 0.1, g.detach())
    before = flat(model)
    RKalman(model, rho=1e-12, eps=1e-9).step(ce(model, X, y))
    torch.testing.assert_close(flat(model) - before, want, rtol=1e-5, atol=1e-7)


def test_rkalman_object_equals_its_parts():
    """Three steps of RKalman beside the full filter on a hand-built H, R, e; loss reductions agree."""
    a, b = mlp(), mlp()
    ref = KalmanReference(flat(mlp()), 0.1)
    oa, ob = RKalman(a, rho=0.5, forgetting=0.95, q=1e-3), RKalman(b, rho=0.5, forgetting=0.95, q=1e-3, reduction="sum")
    for k in range(3):
        X, y = data(6, seed=k)
        out = a(X)
        p = out.softmax(-1)
        H = rows(p.reshape(-1), list(a.parameters()))
        p = p.detach()
        R = torch.diag_embed(p) - p[:, :, None] * p[:, None] + 1e-4 * torch.eye(3, dtype=D)
        R = torch.block_diag(*[torch.linalg.inv(torch.linalg.inv(r) + 0.5 * torch.eye(3, dtype=D)) for r in R])
        ref.step(H, R, (F.one_hot(y, 3) - p).reshape(-1), 0.95, 1e-3)

        def summed():
            out = b(X)
            return out, F.cross_entropy(out, y, reduction="sum")
        oa.step(ce(a, X, y)), ob.step(summed)
    torch.testing.assert_close(flat(a), ref.theta, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(flat(b), flat(a), rtol=1e-9, atol=1e-11)
    P = torch.cat([oa.state[p]["P"].reshape(-1) for p in a.parameters()])
    torch.testing.assert_close(P, ref.P.diagonal(), rtol=1e-7, atol=1e-9)


def test_mean_residual_times_mean_jacobian_is_not_the_gradient():
    """Why all N C rows are stacked: on a balanced batch the mean residual all but vanishes, the gradient does not."""
    X, y = torch.tensor([[1.0], [-1.0]], dtype=D), torch.tensor([0, 1])
    model = nn.Linear(1, 2, bias=False).to(D)
    nn.init.zeros_(model.weight)
    p = model(X).softmax(-1)
    e = F.one_hot(y, 2) - p.detach()
    assert e.mean(0).abs().max() < 1e-15
    RKalman(model).step(ce(model, X, y))
    assert model.weight.abs().max() > 1e-2


@pytest.mark.parametrize("noise, low, high", [
    ("ema_print", 0.4, 0.7), ("ema_prefit", 0.07, 0.13), ("ema_postfit", 0.07, 0.13)])
def test_noise_estimators_of_appendix_h(noise, low, high):
    """A weight that walks (variance q = 0.1 a step) seen through noise R = 0.1, filter and truth agreeing on q: the
    print's pre-fit residual PLUS H P H^T counts the weight's variance twice and finds 0.56; the consistent forms 0.1.
    Mean over the last 1,000 of 1,600 steps."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).to(D)
    opt = RKalman(model, noise=noise, likelihood="gaussian", rho=1e-9, q=0.1, beta=0.99)
    found, truth, X = [], 0.0, torch.ones(1, 1, dtype=D)
    for k in range(1600):
        truth += 0.1 ** 0.5 * float(torch.randn(1))
        opt.step(regression(model, X, X * truth + 0.1 ** 0.5 * torch.randn(1, 1, dtype=D)))
        if k >= 600:
            found.append(float(opt.state["noise"]["R"]))
    assert low < np.mean(found) < high, np.mean(found)


def test_rkalman_state_dict_round_trip():
    a = mlp()
    oa = RKalman(a, noise="ema_prefit")
    for k in range(3):
        oa.step(ce(a, *data(seed=k)))
    b = copy.deepcopy(a)
    ob = RKalman(b, noise="ema_prefit")
    ob.load_state_dict(copy.deepcopy(oa.state_dict()))
    for k in range(3, 6):
        oa.step(ce(a, *data(seed=k))), ob.step(ce(b, *data(seed=k)))
    assert torch.equal(flat(a), flat(b))


# ---- Sophia and SAM ----------------------------------------------------------------------------------------------


def test_sophia_against_a_loop_in_numpy():
    model, lr, gamma = mlp(), 0.01, 10.0          # most entries below the clip, some at it
    opt = SophiaG(model.parameters(), lr=lr, gamma=gamma, weight_decay=0.1, interval=2, seed=4)
    gen = torch.Generator().manual_seed(4)
    theta, m, h = flat(model).numpy(), 0, 0
    for k in range(5):
        X, y = data(seed=k)
        params = list(model.parameters())
        out = model(X)
        grad = lambda t: np.concatenate([g.reshape(-1).numpy() for g in torch.autograd.grad(
            F.cross_entropy(out, t), params, retain_graph=True)])
        m = 0.96 * m + 0.04 * grad(y)
        if k % 2 == 0:
            u = torch.rand(16, 1, generator=gen, dtype=D)
            h = 0.99 * h + 0.01 * 16 * grad((out.softmax(-1).cumsum(-1) < u).sum(-1)) ** 2
        theta = theta * (1 - lr * 0.1) - lr * np.clip(m / np.maximum(gamma * h, 1e-12), -1, 1)
        opt.step(ce(model, X, y))
        np.testing.assert_allclose(flat(model).numpy(), theta, rtol=1e-9, atol=1e-12)


def test_sophia_hutchinson_is_the_diagonal_in_the_mean():
    """u * (H u) averages to diag H; 2,000 draws, five standard errors of their own sample."""
    X, y = data()
    model = nn.Linear(4, 3).to(D)
    opt = SophiaG(model.parameters(), estimator="hutchinson")
    params = list(model.parameters())
    out = model(X)
    loss = F.cross_entropy(out, y)
    flatten = lambda hs: torch.cat([h.reshape(-1) for h in hs])
    draws = torch.stack([flatten(opt._hessian_diagonal(out, loss, params)) for _ in range(2000)])
    g = torch.cat([x.reshape(-1) for x in torch.autograd.grad(loss, params, create_graph=True)])
    diag = rows(g, params).diagonal()
    assert ((draws.mean(0) - diag).abs() <= 5 * draws.std(0) / 2000 ** 0.5 + 1e-12).all()


def test_sam_is_sgd_on_the_gradient_uphill():
    a = mlp()
    theta, buf = flat(a).numpy(), 0
    opt = SAM(a.parameters(), lr=0.1, rho=0.05, momentum=0.9, weight_decay=0.01)
    b = mlp()
    for k in range(3):
        X, y = data(seed=k)

        def grad(at):
            torch.nn.utils.vector_to_parameters(torch.tensor(at), b.parameters())
            return rows([F.cross_entropy(b(X), y)], list(b.parameters()))[0].numpy()
        g = grad(theta)
        buf = 0.9 * buf + grad(theta + 0.05 * g / np.linalg.norm(g))
        theta = theta * (1 - 0.001) - 0.1 * buf
        opt.step(ce(a, X, y))
        np.testing.assert_allclose(flat(a).numpy(), theta, rtol=1e-9, atol=1e-12)


# ---- the optimizer contract --------------------------------------------------------------------------------------

KFACS = [RING, RENG, NGD]


def train(opt, closure_of, steps=3):
    return [float(opt.step(closure_of(k))) for k in range(steps)]


def regression(model, X, Y):
    def closure():
        out = model(X)
        return out, 0.5 * ((out - Y) ** 2).sum(-1).mean()
    return closure


@pytest.mark.parametrize("cls", KFACS)
def test_state_dict_restores_bit_for_bit_through_a_file(cls):
    """Save at step 7 (between refreshes), reload with map_location into fresh objects, run 7 more: equal to the bit."""
    a = nn.Sequential(mlp(dtype=torch.float32), nn.LayerNorm(3), nn.Linear(3, 3))
    oa = cls(a)
    for k in range(7):
        oa.step(ce(a, *data(seed=k, dtype=torch.float32)))
    file = io.BytesIO()
    torch.save(dict(model=a.state_dict(), opt=oa.state_dict()), file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    b = nn.Sequential(mlp(dtype=torch.float32, seed=9), nn.LayerNorm(3), nn.Linear(3, 3))
    b.load_state_dict(saved["model"])
    ob = cls(b, seed=5)
    ob.load_state_dict(saved["opt"])
    for k in range(7, 14):
        batch = data(seed=k, dtype=torch.float32)
        assert float(oa.step(ce(a, *batch))) == float(ob.step(ce(b, *batch)))
    assert torch.equal(flat(a), flat(b)) and oa.damping == ob.damping
    ob.load_state_dict(oa.state_dict())
    before = oa.layers[0].state["A"].clone()
    ob.layers[0].state["A"].zero_()                                              # no storage is shared
    assert torch.equal(oa.layers[0].state["A"], before)


def test_state_of_bfloat16_model_stays_float32():
    """torch's own loader casts state to the parameter's dtype; 8 bits would ruin the inverses."""
    X, y = data(dtype=torch.bfloat16)
    a = mlp(dtype=torch.bfloat16)
    opt = RING(a)
    opt.step(ce(a, X, y))
    other = RING(copy.deepcopy(a))
    other.load_state_dict(opt.state_dict())
    assert other.layers[0].state["iA"].dtype == torch.float32
    assert torch.equal(other.layers[0].state["iA"], opt.layers[0].state["iA"])


@pytest.mark.parametrize("cls", [*KFACS, RKalman, SophiaG, SAM])
def test_is_a_torch_optimizer_with_schedulers_and_groups(cls):
    """lr lives in param_groups: LambdaLR to 0 freezes every parameter, whatever path updates it."""
    model = nn.Sequential(mlp(dtype=torch.float32), nn.LayerNorm(3))
    opt = cls(model if cls in KFACS else model.parameters())
    assert isinstance(opt, torch.optim.Optimizer)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1.0 if k == 0 else 0.0)
    batch = data(dtype=torch.float32)
    start = flat(model)
    opt.step(ce(model, *batch))
    moved = flat(model)
    assert not torch.equal(start, moved)
    sched.step()
    opt.step(ce(model, *batch))
    assert torch.equal(flat(model), moved)


@pytest.mark.parametrize("cls", KFACS)
def test_add_param_group_unfreezes_a_layer(cls):
    model = mlp()
    model[0].requires_grad_(False)
    opt = cls(model)
    assert len(opt.layers) == 1
    opt.step(ce(model, *data()))
    model[0].requires_grad_(True)
    opt.add_param_group(dict(params=list(model[0].parameters()), lr=0.5))
    assert len(opt.layers) == 2 and opt.param_groups[-1]["lr"] == 0.5
    before = model[0].weight.detach().clone()
    for k in range(5):
        opt.step(ce(model, *data(seed=k)))
    assert "iA" in opt.layers[0].state and not torch.equal(before, model[0].weight)


def test_group_lr_and_weight_decay():
    """Two groups with their own lr, one with decoupled decay, against the update of a plain RING."""
    X, y = data()
    a, b = mlp(), mlp()
    oa = RING(a, **PLAIN)
    groups = [dict(params=b[0].parameters(), lr=0.5, weight_decay=0.1), dict(params=b[2].parameters(), lr=0.25)]
    ob = RING(b, params=groups, **PLAIN)
    start = flat(a)
    oa.step(ce(a, X, y)), ob.step(ce(b, X, y))
    U = start - flat(a)
    torch.testing.assert_close(flat(b)[25:], start[25:] - 0.25 * U[25:], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(flat(b)[:25], start[:25] * (1 - 0.05) - 0.5 * U[:25], rtol=1e-12, atol=1e-14)


def test_closure_order_and_count():
    """Documented order: grads cleared, closure once under grad; every lm_every steps once more under no_grad."""
    model, seen = mlp(), []
    X, y = data()

    def closure():
        seen.append((torch.is_grad_enabled(), all(p.grad is None for p in model.parameters())))
        return ce(model, X, y)()
    opt = RING(model, keep_grad=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)                       # stale: must be cleared, not added to
    with torch.no_grad():                                 # whatever the caller's mode
        losses = [float(opt.step(closure)) for _ in range(6)]
    assert [s for s in seen] == [(True, True), (False, False)] + [(True, True)] * 5 + [(False, False)]
    assert losses[0] == pytest.approx(math.log(3), abs=0.5) and losses[-1] < losses[0]


def test_a_closure_that_raised_leaves_nothing_behind():
    """Out of memory, say, and the user tries a smaller batch: LM must not repeat the forward pass that failed."""
    a, b = mlp(), mlp()
    oa, ob = RING(a), RING(b)
    with pytest.raises(ZeroDivisionError):
        oa.step(lambda: 1 / 0)
    oa.step(ce(a, *data())), ob.step(ce(b, *data()))
    assert torch.equal(flat(a), flat(b)) and oa.last == ob.last and "ratio" in oa.last


@pytest.mark.parametrize("cls", [RING, NGD])
def test_grad_is_the_loss_gradient_and_nothing_else(cls):
    """Refresh steps (sampled backward) included: .grad equals plain autograd on a copy, exactly."""
    model = mlp()
    opt = cls(model, keep_grad=True, interval=2)
    for k in range(4):
        X, y = data(seed=k)
        want = torch.autograd.grad(F.cross_entropy(model(X), y), list(model.parameters()))
        opt.step(ce(model, X, y))
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want))
    assert not any(m._forward_hooks for m in model.modules())
    pickle.loads(pickle.dumps(model))                     # nothing of the optimizer rides on the model


@pytest.mark.parametrize("cls", KFACS)
def test_factors_do_not_depend_on_reduction_or_batch_size(cls):
    X, y = data()
    a, b, c = mlp(), mlp(), mlp()

    def summed():
        out = b(X)
        return out, F.cross_entropy(out, y, reduction="sum")
    oa, ob, oc = (cls(m, fisher="exact", **PLAIN) for m in (a, b, c))
    oa.step(ce(a, X, y)), ob.step(summed), oc.step(ce(c, X.repeat(3, 1), y.repeat(3)))
    for la, lb, lc in zip(oa.layers, ob.layers, oc.layers):
        for key in "AG":
            torch.testing.assert_close(la.state[key], lb.state[key], rtol=1e-12, atol=1e-15)
            torch.testing.assert_close(la.state[key], lc.state[key], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(flat(a), flat(c), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("cls", [RING, NGD])
def test_accumulation_over_micro_batches_equals_one_batch(cls):
    X, y = data()
    a, b = mlp(), mlp()
    oa, ob = (cls(m, fisher="exact", keep_grad=True) for m in (a, b))
    for k in range(6):
        oa.step(ce(a, X, y))
        ob.zero_grad()
        for i in range(4):
            def closure(i=i):
                out = b(X[4 * i:4 * i + 4])
                return out, F.cross_entropy(out, y[4 * i:4 * i + 4]) / 4
            ob.accumulate(closure)
        ob.step()
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-6, atol=1e-8)
    assert oa.damping == ob.damping


@pytest.mark.parametrize("inplace", [True, False])
def test_in_place_relu(inplace):
    """relu_ overwrites the layer's output tensor; the error must still be the one BEFORE the activation."""
    X, y = data()
    a = nn.Sequential(*[copy.deepcopy(m) for m in mlp(act=lambda: nn.ReLU(inplace=inplace))])
    b = mlp(act=nn.ReLU)
    oa, ob = RING(a, **PLAIN), RING(b, **PLAIN)
    for _ in range(3):
        oa.step(ce(a, X, y)), ob.step(ce(b, X, y))
    assert torch.equal(flat(a), flat(b))


def test_tied_weights_are_preconditioned_once_with_pooled_rows():
    torch.manual_seed(0)
    a, b, head = (nn.Linear(4, 4) for _ in range(3))
    b.weight = a.weight
    model = nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), head).to(D)
    X, y = data(C=4)
    opt = RING(model, fisher="exact", **PLAIN)
    assert len(opt.layers) == 2 and sum(p is a.weight for g in opt.param_groups for p in g["params"]) == 1
    h1 = torch.tanh(a(X))
    want = (X.T @ X + h1.T @ h1).detach() / 32
    out = model(X)
    before, (g,) = a.weight.detach().clone(), torch.autograd.grad(F.cross_entropy(out, y), [a.weight])
    opt.step(ce(model, X, y))
    s = opt.layers[0].state
    torch.testing.assert_close(s["A"], want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(before - a.weight, s["iG"] @ g @ s["iA"], rtol=1e-9, atol=1e-12)


def test_multihead_attention_out_proj_warns_and_falls_back():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.att, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.att(x, x, x, need_weights=False)[0].mean(1))
    model, x, y = Net(), torch.randn(6, 5, 8), torch.randint(3, (6,))
    opt = RING(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.warns(UserWarning, match="no statistics"):
        opt.step(ce(model, x, y))
    moved = {n: float((p - before[n]).abs().max()) for n, p in model.named_parameters()}
    assert moved["att.out_proj.weight"] == pytest.approx(1e-3, rel=1e-2)         # AdamW's first step is lr * sign
    assert all(v > 0 for n, v in moved.items() if n != "att.in_proj_bias")
    with warnings.catch_warnings():
        warnings.simplefilter("error")                                           # warned once
        opt.step(ce(model, x, y))


@pytest.mark.parametrize("fallback", ["adamw", "sgd"])
def test_unsupported_parameters_step_as_torch_would(fallback):
    """Norms and embeddings: the fallback group equals torch.optim on the same gradients for 5 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)).to(D)
    opt = RING(model, weight_decay=0.1, fallback=fallback, fallback_lr=0.02)
    assert [g["kind"] for g in opt.param_groups] == ["kfac", "fallback"]
    twin = [nn.Parameter(p.detach().clone()) for p in opt.param_groups[1]["params"]]
    ref = torch.optim.AdamW(twin, lr=0.02, weight_decay=0.1) if fallback == "adamw" else torch.optim.SGD(twin, lr=0.02)
    if fallback == "sgd":
        opt.param_groups[1]["weight_decay"] = 0              # torch's SGD decay is coupled, ours is not
    x = torch.randint(7, (6, 5))

    def closure():
        out = model(x)
        return out, F.cross_entropy(out.reshape(-1, 7), x.reshape(-1))
    for _ in range(5):
        opt.step(closure)
        for p, q in zip(opt.param_groups[1]["params"], twin):
            q.grad = p.grad.clone()
        ref.step()
    for p, q in zip(opt.param_groups[1]["params"], twin):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("inverse", ["cholesky", "newton3"])
def test_nan_in_a_factor_keeps_the_last_good_inverse(inverse):
    X, y = data()
    model = mlp()
    opt = RING(model, interval=1, inverse=inverse)
    opt.step(ce(model, X, y))
    good = {k: v.clone() for k, v in opt.layers[0].state.items() if torch.is_tensor(v)}
    theta = flat(model)
    bad = X.clone()
    bad[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        opt.step(ce(model, bad, y))
    assert all(torch.equal(v, opt.layers[0].state[k]) for k, v in good.items())
    assert torch.equal(theta, flat(model))                                       # a NaN gradient moves nothing
    opt.step(ce(model, X, y))
    assert torch.isfinite(flat(model)).all() and not torch.equal(theta, flat(model))


def test_conv_equals_linear_on_unfolded_patches():
    """A conv with stride, padding and bias: factors against a python loop over patches, direction against dense."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4)).to(D)
    X, y = torch.randn(5, 2, 6, 6, dtype=D), torch.randint(4, (5,))
    opt = RING(model, fisher="exact", **PLAIN)
    pad = F.pad(X, (1, 1, 1, 1))
    rows = [torch.cat([pad[n, :, 2 * i:2 * i + 3, 2 * j:2 * j + 3].reshape(-1), torch.ones(1, dtype=D)])
            for n in range(5) for i in range(3) for j in range(3)]
    A = sum(torch.outer(r, r) for r in rows) / len(rows)
    s = model[0](X)
    out = model[3](torch.tanh(s).flatten(1))
    G, p = torch.zeros(3, 3, dtype=D), out.softmax(-1)
    for n, c in itertools.product(range(5), range(4)):
        e, = torch.autograd.grad(-out.log_softmax(-1)[n, c], s, retain_graph=True)
        G += float(p[n, c]) / 5 * torch.einsum("nohw,nphw->op", e, e)
    g = torch.autograd.grad(F.cross_entropy(out, y), [model[0].weight, model[0].bias])
    before = [q.detach().clone() for q in model[0].parameters()]
    opt.step(ce(model, X, y))
    st = opt.layers[0].state
    torch.testing.assert_close(st["A"], A, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(st["G"], G, rtol=1e-10, atol=1e-12)
    K = torch.kron(G + st["cG"] * torch.eye(3, dtype=D), A + st["cA"] * torch.eye(19, dtype=D))
    U = torch.linalg.solve(K, torch.cat([g[0].flatten(1), g[1][:, None]], 1).reshape(-1)).reshape(3, 19)
    torch.testing.assert_close(before[0] - model[0].weight, U[:, :-1].reshape(3, 2, 3, 3), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(before[1] - model[0].bias, U[:, -1], rtol=1e-8, atol=1e-10)


def test_grouped_conv_falls_back():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3))
    opt = RING(model)
    assert len(opt.layers) == 1 and opt.param_groups[1]["kind"] == "fallback"


def test_sequence_layers_flatten_tokens():
    """(B, T, d) through a Linear whose outputs are scored per token equals the same rows as a (B T, d) batch; pooled to
    one output per sequence, Gamma sums over the tokens of a case, Lambda averages over all rows."""
    X = torch.randn(4, 5, 4, dtype=D)
    y = torch.randint(3, (4, 5))
    a, b = mlp(), mlp()
    oa, ob = RING(a, fisher="exact", **PLAIN), RING(b, fisher="exact", **PLAIN)

    def tokens():
        out = a(X)
        return out, F.cross_entropy(out.reshape(-1, 3), y.reshape(-1))
    oa.step(tokens), ob.step(ce(b, X.reshape(20, 4), y.reshape(-1)))
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-9, atol=1e-11)

    model = mlp()
    opt = RING(model, fisher="exact", **PLAIN)

    def pooled():
        out = model[2](torch.tanh(model[0](X)).mean(1))
        return out, F.cross_entropy(out, y[:, 0])
    s = model[0](X)
    out = model[2](torch.tanh(s).mean(1))
    G, p = torch.zeros(5, 5, dtype=D), out.softmax(-1)
    for n, c in itertools.product(range(4), range(3)):
        e, = torch.autograd.grad(-out.log_softmax(-1)[n, c], s, retain_graph=True)
        G += float(p[n, c]) / 4 * torch.einsum("bto,btp->op", e, e)
    opt.step(pooled)
    torch.testing.assert_close(opt.layers[0].state["G"], G, rtol=1e-10, atol=1e-13)
    ones = torch.cat([X, torch.ones(4, 5, 1, dtype=D)], -1).reshape(20, 5)
    torch.testing.assert_close(opt.layers[0].state["A"], ones.T @ ones / 20, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("cls", KFACS)
def test_lora_layers_through_peft(cls):
    """peft's LoRA: B = 0 at the start gives A a zero Gamma, whose 'inverse' must not explode, nor stay 0 for ever."""
    peft = pytest.importorskip("peft")
    base = mlp(d=6, h=8, dtype=torch.float32)
    frozen = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=2, target_modules=["0", "2"]))
    opt = cls(model)
    assert len(opt.layers) == 4
    batch = data(32, 6, dtype=torch.float32)
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    losses = train(opt, lambda k: ce(model, *batch), 20)
    assert losses[-1] < 0.8 * losses[0] and all(map(math.isfinite, losses))
    assert torch.equal(base[0].base_layer.weight, frozen[0].weight)
    assert all(not torch.equal(p, adapters[n]) for n, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("cls", KFACS)
def test_memory_is_flat(cls):
    """Tensors alive after step 5 and after step 25, with the garbage collector off: nothing may wait for a cycle."""
    model = mlp(dtype=torch.float32)
    opt = cls(model)
    batch = data(dtype=torch.float32)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for k in range(26):
            opt.step(ce(model, *batch))
            if k in (5, 25):
                counts.append(sum(torch.is_tensor(o) for o in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[0] == counts[1]


def test_damping_floor_follows_the_dtype():
    """rho = 1e-30 on a rank-one factor: without a floor float32 Cholesky fails."""
    X, y = data(1, dtype=torch.float32)
    model = mlp(dtype=torch.float32)
    opt = RING(model, rho=1e-30, **PLAIN)
    opt.step(ce(model, X, y))
    s = opt.layers[0].state
    assert float(s["cA"] / s["nA"]) == pytest.approx(5 * torch.finfo(torch.float32).eps, rel=1e-3)
    assert torch.isfinite(flat(model)).all()


def test_dropout_masks_are_the_same_in_the_lm_forward():
    """Levenberg-Marquardt compares two losses of one batch: with fresh masks its ratio would be noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    X, y = data(dtype=torch.float32)
    masks = []
    model[2].register_forward_hook(lambda m, a, o: masks.append((o == 0) & (a[0] != 0)))
    opt = RING(model, lr=1e-6)
    torch.manual_seed(1)
    opt.step(ce(model, X, y))
    after = torch.rand(3)
    assert torch.equal(masks[0], masks[1])
    torch.manual_seed(1)
    F.dropout(torch.ones(16, 32), 0.5)
    assert torch.equal(torch.rand(3), after)                # and the caller's random stream saw ONE forward


def test_eq11_reaches_the_inverses_between_refreshes():
    X, y = data()
    model = mlp()
    opt = NGD(model, damping=0.1, interval=100, lm_every=1, eq11=True, fisher="exact")
    for _ in range(3):
        opt.step(ce(model, X, y))
    assert opt.damping != 0.1
    for layer in opt.layers:
        s = layer.state
        for key, c in zip("AG", opt.dampings(layer)):
            exact = torch.linalg.inv(s[key] + c * torch.eye(len(s[key]), dtype=D))
            torch.testing.assert_close(s["i" + key], exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))
    opt.damping *= 9                                         # sqrt grows by 3: past c/2, so Cholesky again
    opt._redamp()
    s, c = opt.layers[0].state, opt.dampings(opt.layers[0])[0]
    torch.testing.assert_close(s["iA"], torch.linalg.inv(s["A"] + c * torch.eye(5, dtype=D)), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("inverse", ["newton2", "newton3", "newton4"])
def test_newton_inverses_train_like_cholesky(inverse):
    a, b = mlp(), mlp()
    oa, ob = RING(a, inverse=inverse), RING(b)
    for k in range(8):
        batch = data(seed=k)
        oa.step(ce(a, *batch)), ob.step(ce(b, *batch))
    torch.testing.assert_close(flat(a), flat(b), rtol=5e-3, atol=5e-3)
    assert any("iterations" in t for t in oa.notes)


def test_options_literal_lr_per_layer_and_gaussian():
    X, y = data()
    model = mlp()
    opt = RING(model, literal=True)
    assert (opt.lm, opt.kl_clip, opt.eq11) == (False, None, True)
    a, b = mlp(), mlp()
    RING(a, **PLAIN).step(ce(a, X, y))
    RING(b, lr_per_layer=True, **PLAIN).step(ce(b, X, y))
    start = flat(mlp())
    torch.testing.assert_close(2 * (start - flat(b)), start - flat(a), rtol=1e-9, atol=1e-12)
    Y = torch.randn(16, 3, dtype=D)
    model = nn.Sequential(nn.Linear(4, 3)).to(D)
    opt = NGD(model, damping=1e-12, likelihood="gaussian", fisher="exact", **PLAIN)
    opt.step(regression(model, X, Y))                        # one natural-gradient step solves linear least squares
    ones = torch.cat([X, torch.ones(16, 1, dtype=D)], 1)
    want = torch.linalg.lstsq(ones, Y).solution.T
    torch.testing.assert_close(torch.cat([model[0].weight, model[0].bias[:, None]], 1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make, message", [
    (lambda: RING(nn.LayerNorm(3)), "no trainable nn.Linear"),
    (lambda: RING(mlp(), rho=0), "rho must be > 0"),
    (lambda: RENG(mlp(), damping=-1.0), "damping must be > 0"),
    (lambda: NGD(mlp(), damping=float("nan")), "damping must be > 0"),
    (lambda: RING(mlp(), lr=0), "lr must be > 0"),
    (lambda: RING(mlp(), inverse="lu"), "inverse must be one of"),
    (lambda: RING(mlp()).step(), "needs a closure"),
    (lambda: RENG(mlp()).step(), "needs a closure"),
    (lambda: RKalman(mlp()).step(), "needs a closure"),
    (lambda: SAM(mlp().parameters()).step(), "needs a closure"),
    (lambda: RING(mlp()).step(lambda: torch.zeros(())), "closure must return"),
    (lambda: RKalman(mlp(), max_bytes=100).step(ce(mlp(), *data())), "48 rows .* x 43 parameters"),
    (lambda: RKalman(mlp(), sigma0=0), "sigma0 must be > 0"),
])
def test_bad_input_is_one_clear_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# ---- experiments -------------------------------------------------------------------------------------------------


def run(tmp_path, *argv):
    return grng.main([*argv, "--out", str(tmp_path / "r.json")])


def test_theorem_and_its_boundary():
    """Residual shrinks by more than 1 - eta for small rho, not for large; on the linearised network the bound
    c <= lambda_min sqrt(1 - eta) is exact for a residual along the smallest eigenvector: checked in one dimension."""
    for eta in (0.1, 0.9):
        assert grng.theorem_run(eta, 1e-4, 0, linear=False, width=512, steps=8)[0] <= 1
        worst, condition = grng.theorem_run(eta, 10.0, 0, linear=True, width=512, steps=8)
        assert worst > 1 and condition > 1
        lam, s = 0.3, (1 - eta) ** 0.5
        for c, ok in ((lam * s * 0.999, True), (lam * s * 1.001, False)):
            assert ((1 - eta * lam / (lam + c)) ** 2 <= 1 - eta) == ok
    worst, condition = grng.theorem_run(0.5, 3e-4, 1, linear=True, width=512, steps=8)
    assert condition <= 1 and worst <= 1


def test_theorem_gram_is_the_jacobians(monkeypatch):
    """The first step of theorem_run against autograd: W + eta J^T (J J^T + rho ||J^T e||^2 I)^-1 e, J by autograd."""
    n, d, width, eta, rho = 5, 3, 16, 0.5, 0.1
    worst, _ = grng.theorem_run(eta, rho, 3, linear=False, n=n, d=d, width=width, steps=1)
    g = torch.Generator().manual_seed(3)
    X = F.normalize(torch.randn(n, d, generator=g, dtype=D), dim=1)
    y, W = torch.randn(n, generator=g, dtype=D), torch.randn(width, d, generator=g, dtype=D)
    a = torch.randint(2, (width,), generator=g).double() * 2 - 1
    f = lambda w: torch.relu(X @ w.view(width, d).T) @ a / width ** 0.5
    J, e = torch.autograd.functional.jacobian(f, W.reshape(-1)), y - f(W.reshape(-1))
    c = rho * ((J.T @ e) ** 2).sum()
    e2 = y - f(W.reshape(-1) + eta * J.T @ torch.linalg.solve(J @ J.T + c * torch.eye(n, dtype=D), e))
    assert worst == pytest.approx(float(e2 @ e2 / ((1 - eta) * (e @ e))), rel=1e-9)


def test_digits_run_learns_and_keeps_other_tasks(tmp_path):
    """The default command in miniature: natural gradients learn, the results file has the documented structure."""
    run(tmp_path, "--task", "theorem", "--seeds", "1")
    result = run(tmp_path, "--task", "digits", "--steps", "40", "--seeds", "1", "--trials", "2",
                 "--optimizers", "AdamW,RING")
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert set(result["tasks"]) == {"theorem", "digits"} and {"command", "versions", "claims"} <= set(result)
    rows = {r["optimizer"]: r for r in result["tasks"]["digits"]["rows"]}
    assert rows["RING"]["test_mean"] > 80 and rows["AdamW"]["time_ratio"] == 1 and rows["RING"]["n"] == 1
    assert all(set(c) == {"check", "claim", "where", "measured", "verdict", "task"} for c in result["claims"])
    assert {c["task"] for c in result["claims"]} == {"theorem", "digits"}
    curve = result["tasks"]["digits"]["curves"]["RING"]
    assert curve[-1][1] < curve[0][1] and curve[0][0] == 0 and curve[-1][0] == 40
    assert (tmp_path / "r_digits.png").stat().st_size > 1000


def test_every_optimizer_lowers_the_digits_loss_and_lora_freezes_the_base():
    pytest.importorskip("peft")
    problem = grng.digits_problem([5, 6, 7, 8, 9], lora=True)
    start = grng.loss_and_metric(problem, problem.make(0, False), "val")[0]
    for name in grng.GRIDS:
        setting = dict(sigma0=0.003) if name == "RKalman" else grng.GRIDS[name][1][0]        # 0.1 diverges here
        r = grng.train(problem, name, setting, 0, 12, 32, 12)
        assert r["val_loss"] < start, name
        again = grng.train(problem, name, setting, 0, 12, 32, 12)
        assert r["curve"] == again["curve"], name                                  # same seed, same bits


@pytest.fixture(scope="module")
def tiny_hub(tmp_path_factory):
    """Random models of the real classes, with tokenizer and image processor, and a few labelled rows."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tokenizers import Tokenizer, models, pre_tokenizers
    root = tmp_path_factory.mktemp("hub")
    words = "<s> <pad> </s> <unk> good bad film plot very not".split()
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(root / "roberta")
    torch.manual_seed(0)
    transformers.RobertaForSequenceClassification(transformers.RobertaConfig(
        vocab_size=10, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2,
        max_position_embeddings=64, pad_token_id=1)).save_pretrained(root / "roberta")
    transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=10)).save_pretrained(root / "vit")
    (root / "vit/preprocessor_config.json").write_text(json.dumps(dict(
        image_processor_type="ViTImageProcessor", do_resize=True, size=dict(height=8, width=8), do_normalize=True,
        image_mean=[.5] * 3, image_std=[.5] * 3)))
    for name, n in (("train", 40), ("validation", 16)):
        lines = [dict(sentence=f"{'very ' * (i % 3)}{word} film", sentence1="good film", sentence2=f"{word} film",
                      label=i % 2) for i, word in zip(range(n), itertools.cycle(["bad", "good"]))]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        labels = np.arange(n) % 10
        grey = (20 * labels).astype(np.uint8)[:, None, None, None]
        np.savez(root / f"{name}.npz", labels=labels, images=np.broadcast_to(grey, (n, 8, 8, 3)))
    return root


@pytest.mark.parametrize("task, base", [
    ("glue/sst2", "roberta"), ("glue/stsb", "roberta"), ("glue/cola", "roberta"), ("vision/cifar10", "vit")])
def test_full_size_path_on_a_tiny_model(task, base, tiny_hub, tmp_path):
    names = "AdamW,RING,RENG,RKalman" if task != "glue/cola" else "SophiaG,NGD,SAM"
    result = run(tmp_path, "--task", task, "--base", str(tiny_hub / base), "--data-dir", str(tiny_hub), "--epochs", "1",
                 "--seeds", "1", "--trials", "1", "--batch", "8", "--optimizers", names, "--device", "cpu")
    table = result["tasks"][task]["rows"]
    assert [r["optimizer"] for r in table] == names.split(",")
    assert all(math.isfinite(r["test_loss_mean"]) for r in table)


def test_metrics_of_the_paper_against_hand_values():
    """Matthews from the 2 x 2 counts, Pearson from numpy, accuracy in percent."""
    y = torch.tensor([0, 0, 1, 1, 1, 0])
    out = F.one_hot(torch.tensor([0, 1, 1, 1, 0, 0]), 2).float()                   # tp 2, tn 2, fp 1, fn 1
    assert grng.matthews(out, y) == pytest.approx(100 * (2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3))
    assert grng.matthews(torch.ones(6, 2), y) == 0
    assert grng.accuracy(out, y) == pytest.approx(100 * 4 / 6)
    a, b = torch.randn(20), torch.randn(20)
    assert grng.pearson(a[:, None], b) == pytest.approx(100 * np.corrcoef(a, b)[0, 1])


@pytest.mark.parametrize("argv, words", [
    (["--task", "nothing"], "choose from all, digits"), (["--task", "glue/nope"], "choose from all"),
    (["--seeds", "0"], "--seeds 0 must be 1 or more"), (["--optimizers", "RING,Adam"], "--optimizers Adam"),
    (["--task", "unlearn", "--bench", "muse_news"], "'mini_news', 'mini_books'"),
    (["--task", "glue/rte", "--data-dir", "missing", "--base", "."], "no .safetensors weights"),
    (["--task", "glue/rte", "--data-dir", "missing"], "missing/train.jsonl")])
def test_bad_command_lines_are_one_line(argv, words, monkeypatch):
    monkeypatch.setattr(evaluate, "hub_answers", lambda: False)
    with pytest.raises(evaluate.BadInput, match=words) as error:
        grng.main(argv)
    assert "\n" not in str(error.value)


def test_absent_hub_exits_2_with_one_line(tmp_path):
    r = subprocess.run([sys.executable, str(ROOT / "grng.py"), "--task", "glue/rte", "--base", "nobody/no-such-model",
                        "--out", str(tmp_path / "r.json")], capture_output=True, text=True,
                       env=dict(os.environ, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1"))
    assert r.returncode == 2 and "glue/rte" in r.stderr and len(r.stderr.strip().splitlines()) == 1, r.stderr


# ---- unlearn -----------------------------------------------------------------------------------------------------


def tiny_llama(seed=0, dtype=D):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
                         max_position_embeddings=32, tie_word_embeddings=True, initializer_range=.5, bos_token_id=0,
                         eos_token_id=1, pad_token_id=2)
    return LlamaForCausalLM(config).to(dtype).eval()


def token_lists(n, seed, low=4, high=8):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 11, size=rng.integers(low, high)).tolist() for _ in range(n)]


def test_fisher_of_one_text_preconditions_the_gradient_of_another():
    """outputs and loss of the closure from different data: factors from the first alone, as dense matrices say."""
    (X, _), (Z, y) = data(16), data(9, seed=5)
    model, alone = mlp(), mlp()
    damped = NGD(model, damping=0.3, fisher="exact", **PLAIN)
    only = NGD(alone, damping=0.3, fisher="exact", **PLAIN)
    only.accumulate(lambda: (alone(X), alone(X).sum()))
    only._refresh()
    before = flat(model)
    damped.step(lambda: (model(X), F.cross_entropy(model(Z), y)))
    g = torch.autograd.grad(F.cross_entropy(alone(Z), y), list(alone.parameters()))
    ones = torch.cat([X, torch.ones(16, 1, dtype=D)], 1)
    torch.testing.assert_close(damped.layers[0].state["A"], ones.T @ ones / 16, rtol=1e-12, atol=1e-14)
    want = []
    for i, layer in enumerate(only.layers):
        s, grad = layer.state, torch.cat([g[2 * i], g[2 * i + 1][:, None]], 1)
        K = torch.kron(s["G"] + s["cG"] * torch.eye(len(s["G"]), dtype=D),
                       s["A"] + s["cA"] * torch.eye(len(s["A"]), dtype=D))
        U = torch.linalg.solve(K, grad.reshape(-1)).reshape(grad.shape)
        want += [U[:, :-1].reshape(-1), U[:, -1]]
    torch.testing.assert_close(before - flat(model), torch.cat(want), rtol=1e-9, atol=1e-12)


def test_unlearning_directions_equal_explicit_inverses(monkeypatch):
    """Four directions on a tiny Llama against matrices formed in full. Its RMSNorm computes in float32: hence 1e-4."""
    monkeypatch.setattr(grng, "spectral_norm", lambda A, v, iters: (torch.linalg.eigvalsh(A)[-1], A[0]))
    lm, damping = tiny_llama(), 0.7
    forget = grng.token_batches(token_lists(3, 1), range(3))
    reg = grng.token_batches(token_lists(4, 2), range(4))
    theta = grng.trained(lm)
    assert len(theta) == 7 and not any("embed" in n or "norm" in n or "head" in n for n in theta)
    params = list(theta.values())
    found, metric = grng.directions(lm, forget, reg, reg, damping, tol=1e-9)
    # gradient: -log(1 - p) from probabilities; labels are the next token of each list
    logits, labels = grng.predictions(lm, forget)
    p = logits.softmax(1)[torch.arange(len(labels)), labels]
    g = torch.autograd.grad(-torch.log(1 - p).mean(), params)
    flat_g = torch.cat([x.reshape(-1) for x in g])
    torch.testing.assert_close(found["gradient"], flat_g, rtol=1e-4, atol=1e-7)
    # exact Gauss-Newton: J^T (diag s - s s^T) J / N, a row of J at a time
    z = grng.predictions(lm, reg)[0]
    N, V = z.shape
    J = rows(z.reshape(-1), params).view(N, V, -1)
    s = z.softmax(1).detach()
    H = torch.einsum("nvp,nvw,nwq->pq", J, torch.diag_embed(s) - s[:, :, None] * s[:, None], J) / N
    want = torch.linalg.solve(H + damping * torch.eye(len(H), dtype=D), flat_g)
    torch.testing.assert_close(found["Gauss-Newton"], want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
    # K-FAC: inputs by hooks, errors of the labels that the engine's generator draws, Kronecker products in full
    inputs, outputs = {n: [] for n in theta}, {n: [] for n in theta}                   # a call for each batch of reg
    modules = {n + ".weight": m for n, m in lm.named_modules() if n + ".weight" in theta}
    hooks = [m.register_forward_hook(lambda _, x, y, n=n: (inputs[n].append(x[0]), outputs[n].append(y))[0])
             for n, m in modules.items()]
    z = grng.predictions(lm, reg)[0]
    [h.remove() for h in hooks]
    u = torch.rand(N, 1, generator=torch.Generator().manual_seed(0), dtype=D)
    y = (z.softmax(1).cumsum(1) < u).sum(1)
    nll = F.cross_entropy(z, y, reduction="sum")
    errors = [torch.cat([e.flatten(0, 1) for e in torch.autograd.grad(nll, outputs[n], retain_graph=True)])
              for n in theta]
    ring, kfac, fg = [], [], []
    assert len(reg) > 1
    for n, e, grad in zip(theta, errors, g):
        a = torch.cat([x.flatten(0, 1) for x in inputs[n]])
        A, G = a.T @ a / len(a), e.T @ e / N
        eye = lambda M: torch.eye(len(M), dtype=D)
        r = math.sqrt(grng.RHO)
        K = torch.kron(G + r * torch.linalg.matrix_norm(G, 2) * eye(G), A + r * torch.linalg.matrix_norm(A, 2) * eye(A))
        F_ = torch.kron(G, A)
        for out, M in ((ring, K), (kfac, F_ + damping * eye(F_))):
            out.append((n, torch.linalg.solve(M, grad.reshape(-1)).detach()))
        fg.append((n, (F_ @ grad.reshape(-1)).detach()))
    for name, parts in (("RING", ring), ("K-FAC", kfac)):
        want = torch.cat([u for _, u in parts])
        torch.testing.assert_close(found[name], want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
    want = float(found["RING"] @ torch.cat([u for _, u in fg]))
    assert metric(found["RING"], found["gradient"]) == pytest.approx(want, rel=1e-4)


def test_unlearning_gradient_equals_mt_unlearn():
    import mt_unlearn as mt
    lm, cfg = tiny_llama(dtype=torch.float32), mt.Config(alpha=.1)
    forget, reg = token_lists(5, 1), token_lists(6, 2)
    f, r = (grng.token_batches(s, range(len(s)), 2) for s in (forget, reg))
    params = list(grng.trained(lm).values())
    other = {n: p.detach() + .1 * torch.randn_like(p) for n, p in grng.trained(lm).items()}
    got = torch.autograd.grad(.1 * grng.unlearning_loss(lm, f) + grng.teacher_kl(lm, r, other), params)
    student = mt.Student(copy.deepcopy(lm))
    assert list(student.theta) == list(other)
    cpu = torch.device("cpu")
    mt.accumulate_gradients(student, other, *(mt.make_batches(s, range(len(s)), 0, cpu) for s in (forget, reg)), cfg)
    for g, p in zip(got, student.theta.values()):
        torch.testing.assert_close(g, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script, copies", [("grng.py", 4), ("synthetic.py", 1)])
def test_copies_stand_in_mt_unlearn_to_the_letter(script, copies):
    found = re.findall(r"# --- copy: (.+?) ---\n(.*?)# --- end copy ---", (ROOT / script).read_text(), re.S)
    assert len(found) == copies
    for name, block in found:
        assert block.strip() in (ROOT / "mt_unlearn.py").read_text(), f"the copy of {name!r} differs from mt_unlearn.py"


@pytest.mark.parametrize("method, value", [("mean teacher", .02), (grng.FULL, .02), ("AdamW", 1e-3),
                                           ("RING", 1e-4), ("K-FAC", .25)])
def test_unlearn_forgets_and_stops(method, value, monkeypatch):
    """A tiny model that knows its forget text by heart: its NLL rises, the run stops at the first score below the stop
    value, the pretraining text moves less, and the mean teacher's offset points against the gradient."""
    from types import SimpleNamespace
    monkeypatch.setattr(grng, "MOST", 20)
    lm, forget, reg = tiny_llama(dtype=torch.float32), token_lists(4, 1), token_lists(6, 2)
    batches = grng.token_batches(forget, range(4))
    nll = lambda m: F.cross_entropy(*grng.predictions(m, batches)).item()
    adam = torch.optim.Adam(lm.parameters(), lr=1e-2)
    for _ in range(60):
        adam.zero_grad()
        F.cross_entropy(*grng.predictions(lm, batches)).backward()
        adam.step()
    start, seen = nll(lm), []

    def measure(m, *metrics):
        if "verbmem_f" in metrics:
            seen.append(nll(m))
        return {k: 100 / (1 + seen[-1] - start) for k in metrics}
    data = SimpleNamespace(forget=forget, reg=reg, model=lambda: copy.deepcopy(lm), measure=measure, stop=90)
    run = grng.unlearn(data, method, value, 0, copy.deepcopy(lm) if "mean teacher" in method else None)
    assert run["reached"] == (seen[-1] - start >= 1 / 9) and all(n - start < 1 / 9 for n in seen[:-1])
    assert seen[-1] > start and 0 < run["kl"] < seen[-1] and run["steps"] == 5 * (len(seen) - 1)
    if "mean teacher" in method:
        assert [c["step"] for c in run["cosines"]] == [k for k in (5, 10, 20) if k <= run["steps"]]
        assert run["cosines"][0]["gradient"] > .5 and run["cosines"][0]["Gauss-Newton"] > .5
    if method == grng.FULL and run["steps"] >= 20:
        assert .5 < run["cosines"][-1]["Gauss-Newton length"] < 1.5


def test_damping_of_the_theorem():
    assert grng.theorem_damping(.02) == pytest.approx(.5 + .1 * 10 / .8)


def test_unlearn_claims_and_figure(tmp_path):
    """Verdicts follow the numbers: too long an offset fails the theorem, a nearer gradient the control."""
    def points(cosine, length):
        names = ("gradient", "RING", "K-FAC", "Gauss-Newton")
        return [dict(step=s, **{n + x: v for n in names for x, v in (("", .92 if n == "gradient" else cosine), (
            " F", cosine), (" length", length if s >= 20 else 0))}) for s in (5, 20, 30)]
    rows = [dict(method=m, kl=k, knowmem_r=90, verbmem_f=15, steps=9, reached=1, n=1) for m, k in zip(
        grng.METHODS, (.5, .1, .9, .4))]
    verdict = lambda a, b: {c["check"]: c["verdict"] for c in grng.unlearn_claims(rows, a, b)}
    good = verdict(points(.95, 1.1), points(.95, .9))
    assert good["theorem 3.1"] == good["theorem 3.1 batches"] == good["theorem 3.1 gradient"] == "holds"
    assert [good[f"unlearn {m}"] for m in ("AdamW", "RING", "K-FAC")] == ["fails", "holds", "fails"]
    bad = verdict(points(.91, 1.3), points(.89, 1))
    assert bad["theorem 3.1"] == bad["theorem 3.1 batches"] == bad["theorem 3.1 gradient"] == "fails"
    grng.save_figure(grng.unlearn_figure(points(.9, 1), points(.8, 1)), grng.Config(out=tmp_path / "new/f.json"), "x")
    assert (tmp_path / "new/f_x.png").stat().st_size > 5000


def test_compare_measures_the_offset_at_the_teacher():
    """A student that sits exactly at teacher - alpha d has cosine 1 and length 1 with d, and d is the teacher's."""
    from types import SimpleNamespace
    lm, data = tiny_llama(dtype=torch.float32), SimpleNamespace(forget=token_lists(3, 1), reg=token_lists(4, 2))
    theta = grng.trained(lm)
    teacher = {n: p.detach().clone() for n, p in theta.items()}
    every = [grng.token_batches(s, range(0, len(s), k), 32)
             for s, k in ((data.forget, 1), (data.reg, 1), (data.reg, 3))]
    for name, d in grng.directions(lm, *every, 0.7)[0].items():
        student = {n: teacher[n] - grng.ALPHA * x.view_as(teacher[n]) for (n, p), x in zip(
            theta.items(), d.split([p.numel() for p in theta.values()]))}
        probe = tiny_llama(5, torch.float32)
        with torch.no_grad():
            for p, q in zip(probe.parameters(), lm.parameters()):
                p.copy_(q + .2 * (p.ndim == 2 and p.shape != (11, 8)))          # compare must put the teacher there
        found = grng.compare(probe, student, teacher, data, 0.7)
        assert found[name] == pytest.approx(1, abs=1e-3) and found[name + " length"] == pytest.approx(1, rel=1e-2)
        assert found[name + " F"] == pytest.approx(1, abs=1e-3)


# ---- what survived tests/mutants.py --------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [range(10), [5, 6, 7, 8, 9]])
def test_splits_of_digits_do_not_overlap(classes):
    """Train, validation and test together are the data set, each row once."""
    from sklearn.datasets import load_digits
    raw, problem = load_digits(), grng.digits_problem(classes)
    keep = np.isin(raw.target, classes)
    parts = [problem.get(split, torch.arange(n)) for split, n in problem.sizes.items()]
    rows = lambda X, y: sorted(map(tuple, np.column_stack([np.round(16 * X), y]).astype(int).tolist()))
    want = rows(raw.data[keep] / 16, raw.target[keep] - min(classes))
    assert rows(torch.cat([x for x, _ in parts]).numpy(), torch.cat([y for _, y in parts]).numpy()) == want
    assert problem.sizes["test"] == problem.sizes["val"] == keep.sum() // 5


def test_tuning_never_looks_at_the_test_split(monkeypatch):
    """A setting best on test and worst on validation is not chosen, nor is a seed of the table used to choose."""
    from types import SimpleNamespace
    calls = []

    def train(problem, name, setting, seed, steps, batch, every):
        calls.append((name, setting["lr"], seed))
        good = setting["lr"] == grng.GRIDS[name][1][1]["lr"]
        losses = (2.0, .5, .3) if name == "SGD" else (2.0, .4, .31 if seed == 1 else .2)
        return dict(setting=setting, val=90 + good, val_loss=.3, test=50.0 + seed % 1000 if good else 99.0,
                    test_loss=.1, ms=2.0, curve=[dict(step=10 * k, loss=x) for k, x in enumerate(losses)])
    monkeypatch.setattr(grng, "train", train)
    cfg = grng.Config(optimizers="SGD,AdamW", seeds=3, trials=4)
    rows, runs = grng.study(SimpleNamespace(fine_tune=False), cfg, 20)
    for name, row in zip(("SGD", "AdamW"), rows):
        grid = [s["lr"] for s in grng.GRIDS[name][1]]
        tuned, table = calls[:4], calls[4:7]
        calls[:7] = []
        assert [lr for _, lr, _ in tuned] == grid[:4] and not {s for *_, s in tuned} & {0, 1, 2}
        assert table == [(name, grid[1], s) for s in range(3)] and row["setting"] == dict(lr=grid[1]) and row["n"] == 3
        assert (row["test_mean"], row["test_std"]) == (51.0, 1.0)                # 50, 51, 52: n - 1 in the std
    assert [r["steps_to_0.3"] for r in rows] == [20, None] and [r["steps_to_0.5"] for r in rows] == [10, 10]
    assert rows[0]["seconds_to_0.3"] == pytest.approx(.04) and rows[0]["time_ratio"] == 1


def test_levenberg_marquardt_trusts_a_quadratic_loss():
    """Linear least squares: the Fisher is the Hessian, so the model's change is the true one at any step length, and
    the damping falls by (19/20)^5 every 5 steps. A loss that the step makes worse, seven times as curved as the Fisher
    says, raises it."""
    X, Y = data()[0], torch.randn(16, 3, dtype=D)
    for lr in (1.0, 0.3):
        model = nn.Sequential(nn.Linear(4, 3)).to(D)
        opt = NGD(model, lr=lr, damping=1e-9, likelihood="gaussian", fisher="exact", kl_clip=None)
        opt.step(regression(model, X, Y))
        assert opt.last["ratio"] == pytest.approx(1, abs=1e-4) and opt.damping == pytest.approx(1e-9 * .95 ** 5)
    model = nn.Sequential(nn.Linear(4, 3)).to(D)
    opt = NGD(model, damping=1e-9, likelihood="gaussian", fisher="exact", kl_clip=None)
    opt.step(lambda: (model(X), 7 * regression(model, X, Y)()[1]))
    assert opt.last["ratio"] == pytest.approx((7 * 49 / 2 - 49) / (49 / 2 - 49), rel=1e-4)
    assert opt.damping == pytest.approx(1e-9 * .95 ** -5)

"""The toy studies: why gradient ascent collapses, why NPO does not, why a mean teacher follows the natural gradient,
and where the proof of that last statement slips. Everything runs in float64 on a CPU, from formula to figure.

Run:  python synthetic.py                     everything at reduced size (about 25 s on 2 cores)
      python synthetic.py all --out results   everything at full size, the files the README shows (about 90 s)
      python synthetic.py divergence | random_features | natural_gradient      one part
      python synthetic.py random_features --grid --seeds 5                     how learning rates and betas are chosen
Ends: one line a check, `check | claim | where printed | measured | holds/fails`; <out>/synthetic.json with the same
      lines and the table of section 2; synthetic_*.png beside it. A "fails" is a result, not an error: exit code 0.

Read it top to bottom; all one needs is logistic regression, p = sigmoid(<x, theta>), whose gradient is x (y - p).
  1. divergence        Unlearning by ascent pushes with weight (1 - p) that never fades: the model walks off in a
                       straight line. NPO multiplies that push by a weight that dies as the example is forgotten: log t.
  2. random_features   The same race with a retain set in view, every method and seed in one batched tensor.
  3. natural_gradient  What a Fisher matrix is good for, then the mean teacher: the student is a ball on a spring tied to
                       a slow teacher; at rest the spring force H u balances the push alpha grad L, so
                       u = -alpha H^{-1} grad L, and the teacher follows u. That is natural gradient descent.

Sources: Zhang et al., NPO, arXiv:2404.05868; Klochkov, mean teacher, arXiv:2504.13388; Martens, JMLR 21(146), 2020.
Shapes: A alphas, S seeds, D = A*S data sets, N rows, P parameters, C classes, M methods (columns), B batched runs.
"""
import argparse
import json
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

COMMANDS = ("divergence", "random_features", "natural_gradient", "all")


def knob(default, text):
    return field(default=default, metadata=dict(help=text))


@dataclass
class Config:
    command: str = knob("", "one of " + ", ".join(COMMANDS) + "; without it everything runs at reduced size")
    out: str = knob("runs/synthetic", "folder for synthetic.json and the PNG figures (ours)")
    seeds: int = knob(5, "instances of section 2, seeds 1000, 2000, ... (paper: 5)")
    steps: int = knob(2000, "unlearning steps of section 2, a multiple of 25 (paper: 2000)")
    figure3_steps: int = knob(10000, "steps of the beta sweep of Figure 3, a multiple of 25 (released: 10000)")
    seed: int = knob(0, "seed of sections 1 and 3 (ours)")
    grid: bool = knob(False, "random_features: also the grid search over learning rate and beta (ours)")
    figures: bool = knob(True, "draw the PNG figures; needs matplotlib")


# ------------------------------------------------------------------------------------------------ small shared tools

def claim(check, text, where, measured, holds):
    """One line of evidence, printed and returned as a dict. `holds` is about the printed claim, not about our code."""
    verdict = "holds" if holds else "fails"
    print(f"{check} | {text} | {where} | {measured} | {verdict}", flush=True)
    return dict(check=check, claim=text, where=where, measured=measured, verdict=verdict)


def loglog_slope(x, y):
    """Slope of log y against log x by least squares, and the half width of its 95 % interval. x, y: (n,) -> floats."""
    from scipy import stats
    fit = stats.linregress([math.log(float(v)) for v in x], [math.log(float(v)) for v in y])
    half = stats.t.ppf(0.975, len(x) - 2) * fit.stderr if len(x) > 2 else float("nan")
    return float(fit.slope), float(half)


def r_squared(y, fitted):
    return float(1 - ((y - fitted) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def rel(a, b):
    """Relative distance ||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())


# ------------------------------------------------------------------------------------------------ 1. divergence speed
# Binary logistic regression on the forget set alone. Write z = <x, theta> and m = +z or -z, the margin of the true
# label, so log p(y) = -softplus(-m). Gradient ascent minimises log p, whose slope in m is 1 - p: tiny while the example
# is memorised (p near 1), and 1 FOR EVER once it is forgotten. Nothing ever says "enough"; the margin falls by
# eta/n_f a step, to minus infinity. NPO's slope is (1 - p) times w = 2 sigmoid(beta log(p/p_ref)), which dies like
# 2 p^beta. Solving dm/dt = -e^{beta m} gives m = -(1/beta) log t: "exponentially slower" is just this one line.

def npo_weight(logp, ref_logp, beta):
    """NPO's brake w = 2 p^beta / (p^beta + p_ref^beta), Eq. 5 of arXiv:2404.05868 -> same shape, in (0, 2).

    It is 1 at the reference and decays as the example is forgotten; gradient ascent is w = 1 for ever.
    """
    return 2 * torch.sigmoid(beta * (logp - ref_logp))


def npo_loss(logp, ref_logp, beta):
    """-(2/beta) mean log sigmoid(-beta log(p/p_ref)), Eq. 3 of arXiv:2404.05868. (N,), (N,) -> scalar."""
    return -(2 / beta) * F.logsigmoid(-beta * (logp - ref_logp)).mean()


def near_orthogonal_rows(n, d, overlap, generator):
    """X (n, d) with unit rows and |<x_i, x_j>| = overlap / n exactly, the hypothesis of Theorem 2 with C0 = overlap."""
    signs = torch.bernoulli(torch.full((n, n), 0.5, dtype=torch.float64), generator=generator).mul(2).sub(1).triu(1)
    gram = torch.eye(n, dtype=torch.float64) + overlap / n * (signs + signs.T)
    basis = torch.linalg.qr(torch.randn(d, n, dtype=torch.float64, generator=generator)).Q         # (d, n)
    return torch.linalg.cholesky(gram) @ basis.T


def divergence_curves(X, y, theta0, betas, eta, steps):
    """Full-batch GD on L_GA (first column) and L_NPO (one column a beta). X (n, d), y (n,) in {0, 1} -> (steps+1, 1+K).

    The curve is ||theta_t - theta_0|| in the norm X^T X, that is ||X (theta_t - theta_0)||.
    """
    n, sign = len(y), (2 * y - 1)[:, None]
    beta = torch.tensor(betas, dtype=torch.float64)
    theta = theta0[:, None].repeat(1, 1 + len(betas))                                   # (d, 1+K)
    ref = F.logsigmoid(sign * (X @ theta0[:, None]))                                    # (n, 1)
    out = torch.zeros(steps + 1, 1 + len(betas), dtype=torch.float64)
    for t in range(steps + 1):
        z = X @ theta
        out[t] = (z - X @ theta0[:, None]).norm(dim=0)
        logp = F.logsigmoid(sign * z)
        push = sign * torch.sigmoid(-sign * z)                                          # d log p / dz = y - p
        push[:, 1:] *= npo_weight(logp[:, 1:], ref, beta)
        theta = theta - eta / n * X.T @ push                                            # descend on mean (w) log p
    return out


def fit_growth(curve):
    """R^2 and constants of both models, c t and a log(1 + b t), for one curve (T+1,) -> dict.

    a is found by least squares for each b, and b by a bounded one-dimensional search: scipy's two-parameter curve_fit
    runs away on straight lines, where b -> 0 and a -> infinity.
    """
    from scipy.optimize import minimize_scalar
    y = curve.numpy()
    t = torch.arange(len(y), dtype=torch.float64).numpy()

    def log_model(log_b):
        import numpy as np
        basis = np.log1p(math.exp(log_b) * t)
        return (basis @ y) / (basis @ basis) * basis, (basis @ y) / (basis @ basis)
    best = minimize_scalar(lambda s: ((log_model(s)[0] - y) ** 2).sum(), bounds=(-14, 4), method="bounded")
    slope = float((t @ y) / (t @ t))
    fitted, a = log_model(best.x)
    return dict(slope=slope, r2_linear=r_squared(y, slope * t), a=float(a), b=math.exp(best.x),
                r2_log=r_squared(y, fitted))


def proposition_1(seed):
    """Observed order in beta of |L_NPO - (2/beta) log 2 - (L_GA - const)| and of the gradient gap -> two slopes."""
    g = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(50, dtype=torch.float64, generator=g)
    ref = -3 * torch.rand(50, dtype=torch.float64, generator=g)
    betas = [0.4 / 2 ** k for k in range(6)]
    loss_gap = [abs(float(npo_loss(logp, ref, b) - 2 / b * math.log(2) - (logp - ref).mean())) for b in betas]
    grad_gap = [float((grad(npo_loss)(logp, ref, b) * 50 - 1).norm()) for b in betas]   # GA's gradient per row is 1/N
    return loglog_slope(betas, loss_gap)[0], loglog_slope(betas, grad_gap)[0]


def divergence(cfg, quick=False):
    """Theorem 2 and Proposition 1 of arXiv:2404.05868 -> (claims, data)."""
    sizes, betas, eta, d = (8, 16, 32) if quick else (8, 32, 128), (0.2, 0.5, 1.0), 1.0, 256
    g, fits, curves = torch.Generator().manual_seed(cfg.seed), {}, {}
    for n in sizes:
        X = near_orthogonal_rows(n, d, 0.2, g)
        y = torch.bernoulli(torch.full((n,), 0.5, dtype=torch.float64), generator=g)
        theta0 = F.normalize(torch.randn(d, dtype=torch.float64, generator=g), dim=0)
        curves[n] = divergence_curves(X, y, theta0, betas, eta, 200 * n)                 # NPO needs t >> n/(beta eta)
        for name, col in zip(("GA", *betas), curves[n].T):
            fits[n, name] = fit_growth(col)
            kind = "GA" if name == "GA" else f"NPO beta {name}"
            print("  n_f {:4d} {:13s} slope {slope:9.2e} R2 linear {r2_linear:7.4f} | a {a:8.3g} b {b:8.2e} R2 log "
                  "{r2_log:7.4f}".format(n, kind, **fits[n, name]))
    by_n = loglog_slope(sizes, [fits[n, "GA"]["slope"] for n in sizes])[0]
    a_n = [loglog_slope(sizes, [fits[n, b]["a"] for n in sizes])[0] for b in betas]
    a_b = [loglog_slope(betas, [fits[n, b]["a"] for b in betas])[0] for n in sizes]
    b_n = [loglog_slope(sizes, [fits[n, b]["b"] for n in sizes])[0] for b in betas]
    ga = [fits[n, "GA"] for n in sizes]
    npo = [fits[n, b] for n in sizes for b in betas]
    where, span = "NPO paper, Theorem 2", lambda v: f"{min(v):.2f} to {max(v):.2f}"
    order_loss, order_grad = proposition_1(cfg.seed)
    claims = [
        claim("1 GA", "GA diverges linearly, slope ~ n_f^(-1/2) eta", where,
              f"exponent {by_n:.3f}; R^2 linear >= {min(f['r2_linear'] for f in ga):.4f}, "
              f"log <= {max(f['r2_log'] for f in ga):.4f}",
              abs(by_n + 0.5) < 0.05 and all(f["r2_linear"] > 0.999 and f["r2_linear"] >= f["r2_log"] - 1e-3
                                             for f in ga)),
        claim("1 NPO", "NPO diverges as (1/beta) sqrt(n_f) log(1 + c eta t / n_f)", where,
              f"exponents: n_f {span(a_n)}, beta {span(a_b)}, rate in n_f {span(b_n)}; R^2 log >= "
              f"{min(f['r2_log'] for f in npo):.4f}, linear <= {max(f['r2_linear'] for f in npo):.4f}",
              all(abs(v - 0.5) < 0.1 for v in a_n) and all(abs(v + 1) < 0.15 for v in a_b)
              and all(abs(v + 1) < 0.15 for v in b_n)
              and all(f["r2_log"] > 0.99 and f["r2_log"] > f["r2_linear"] for f in npo)),
        claim("1 limit", "NPO - (2/beta) log 2 -> GA - const, values and gradients, as beta -> 0",
              "NPO paper, Proposition 1", f"observed order in beta: values {order_loss:.3f}, gradients {order_grad:.3f}",
              abs(order_loss - 1) < 0.1 and abs(order_grad - 1) < 0.1)]
    rows = [dict(n_f=n, method="GA" if k == "GA" else f"NPO beta {k}", **f) for (n, k), f in fits.items()]
    return claims, dict(fits=rows, curves={n: c for n, c in curves.items()}, betas=betas)


# ------------------------------------------------------------------------------------------------ 2. random features
# A model with a memory to lose: 128 fixed ReLU features, one trained vector. Every method below is a rule that turns
# the logits z of the forget rows into dL/dz; the chain rule through z = features @ theta is the same for all, so all
# methods, seeds and both alphas advance with one bmm forward and one bmm back.

ALPHAS = (1.0, 0.0)     # 1: forget and retain inputs have different means; 0: the same inputs, contradicting labels
LR_BETA = {             # Table 1, arXiv:2404.05868: (lr, beta) at alpha = 1, at alpha = 0. KTO: ours, as NPO
    "GA": ((5e-4, 0.0), (1e-4, 0.0)), "IDK": ((5e-4, 0.0), (1e-4, 0.0)), "NPO": ((5e-3, 1.0), (5e-2, 10.0)),
    "DPO": ((5e-3, 0.1), (5e-2, 5.0)), "KTO": ((5e-3, 1.0), (5e-2, 10.0))}
METHODS = ("GA", "GA+RT", "GA+KL", "IDK+RT", "NPO", "NPO+RT", "NPO+KL", "DPO", "DPO+RT", "DPO+KL", "KTO", "KTO+RT")
METRICS = ("forget_distance", "retain_distance", "forget_kl")
PUBLISHED = {           # read off Figures 4 and 11 of arXiv:2404.05868 at step 1900, means of 5 seeds; > .35: off the axis
    (1.0, "forget_distance"): {"start": 1.705, "GA": .026, "GA+RT": .026, "IDK+RT": .813, "NPO": .003, "NPO+RT": .003,
                               "DPO+RT": .015},
    (1.0, "retain_distance"): {"start": .016, "GA": "> .35", "GA+RT": .222, "IDK+RT": .018, "NPO": .173,
                               "NPO+RT": .015, "DPO+RT": .038},
    (1.0, "forget_kl"): {"start": 0, "GA": 24.4, "GA+RT": 24.2, "IDK+RT": .16, "NPO": 4.8, "NPO+RT": 4.4,
                         "DPO+RT": 5.6},
    (0.0, "forget_distance"): {"start": .059, "GA": .173, "GA+RT": .126, "IDK+RT": .066, "NPO": .038, "NPO+RT": .016,
                               "DPO+RT": .023}}


def gaussian_logistic(alpha, seed, n_forget=200, n_retain=1000, n_fresh=1000, d=16, width=128):
    """One instance of section 4.1, arXiv:2404.05868 -> dict of features (N, width) and labels (N,).

    Forget: x ~ N(+alpha 1, I), P(y=1) = sigmoid(+(x-mu) 1/sqrt(d) + 1); retain: signs turned. So the retain set alone
    would predict 0 where the forget set says 1: what is to be unlearned is that answer. Distances are measured on
    fresh inputs (as released), else GA could look good on its 200 rows and nowhere else.
    """
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(width, d, generator=g, dtype=torch.float64) / math.sqrt(d)

    def draw(n, s):
        noise = torch.randn(n, d, generator=g, dtype=torch.float64)                       # x - mu
        p = torch.sigmoid(s * (noise.sum(1) / math.sqrt(d) + 1))
        return torch.relu((noise + s * alpha) @ W.T), torch.bernoulli(p, generator=g)
    (Xf, yf), (Xr, yr) = draw(n_forget, +1), draw(n_retain, -1)
    y_idk = torch.bernoulli(torch.full((n_forget,), 0.5, dtype=torch.float64), generator=g)   # "I don't know": a coin
    (Ef, _), (Er, _) = draw(n_fresh, +1), draw(n_fresh, -1)
    return dict(Xf=Xf, yf=yf, Xr=Xr, yr=yr, y_idk=y_idk, Ef=Ef, Er=Er)


def pretrain(X, y, row_weights, lr=0.05, steps=20000, plain=200, stretch=0.1):
    """Logistic GD from 0, `steps` steps, without taking them all. X (D, N, P), y (D, N), row_weights (K, N) -> (D, P, K).

    After `plain` ordinary steps the gradient changes slowly, and m = stretch * t steps on the local quadratic model
    have a closed form in the eigenbasis of H: sum_j (1 - lr h)^j = (1 - (1 - lr h)^m) / (lr h). One corrector: what the
    quadratic missed at the far end grew like (j/m)^2 on the way there. 49 jumps replace 19800 steps; the logits agree
    with the plain loop's to 1e-4 (a test runs both), at a tenth of the time.
    """
    w = row_weights.T                                                                     # (N, K)

    def gradient(theta):
        return X.mT @ (w * (torch.sigmoid(X @ theta) - y[..., None]))                     # (D, P, K)
    theta = torch.zeros(len(X), X.shape[2], w.shape[1], dtype=X.dtype)
    for _ in range(min(plain, steps)):
        theta = theta - lr * gradient(theta)
    t = min(plain, steps)
    while t < steps:
        m = min(max(1, int(stretch * t)), steps - t)
        p = torch.sigmoid(X @ theta)
        slope = w * p * (1 - p)                                                           # (D, N, K)
        H = torch.stack([X.mT @ (X * slope[..., k:k + 1]) for k in range(w.shape[1])], 1)  # (D, K, P, P)
        h, V = torch.linalg.eigh(H)
        h, g = h.clamp_min(1e-14), gradient(theta).mT[..., None]                          # (D, K, P), (D, K, P, 1)
        decay = (1 - lr * h) ** m                   # 1 < lr h < 2 oscillates and still converges: no logarithm of it
        decay = torch.where(lr * h < 0.5, torch.expm1(m * torch.log1p(-(lr * h).clamp(max=0.5))), decay - 1)
        move = V @ (decay / h)[..., None].mul(V.mT @ g)
        missed = gradient(theta + move[..., 0].mT).mT[..., None] - g - H @ move
        j = torch.arange(m, dtype=X.dtype)
        share = lr * ((1 - lr * h)[..., None] ** (m - 1 - j) * (j / m) ** 2).sum(-1)
        theta = theta + (move - V @ (share[..., None] * (V.mT @ missed)))[..., 0].mT
        t += m
    return theta


def make_data(alphas, seeds):
    """All instances stacked, alpha-major, with `initial` (trained on both sets) and `retrained` (retain only) -> dict."""
    parts = [gaussian_logistic(a, s) for a in alphas for s in seeds]
    data = {k: torch.stack([p[k] for p in parts]) for k in parts[0]}
    nf, nr = data["yf"].shape[1], data["yr"].shape[1]
    weights = torch.zeros(2, nf + nr, dtype=torch.float64)
    weights[0], weights[1, nf:] = 1 / (nf + nr), 1 / nr
    theta = pretrain(torch.cat([data["Xf"], data["Xr"]], 1), torch.cat([data["yf"], data["yr"]], 1), weights)
    return dict(data, initial=theta[..., :1], retrained=theta[..., 1:])                   # (D, P, 1) each


def forget_push(family, z, z0, y, y_idk, beta):
    """dL_forget/dz of each forget row (before the mean). z (D, n, M), z0, y, y_idk (D, n, 1), beta (D, 1, M) -> as z.

    With log p(y) = logsigmoid(s z), s = 2y - 1, every family is a weight times y - p = d log p(y) / dz:
    GA 1 (Eq. 1), NPO 2 sigmoid(beta R) (Eq. 3), KTO 2 sigmoid(beta R - z_ref) (Eq. 18), R = log p/p_ref;
    DPO (Eq. 2, scale 1/beta) pushes y down and the coin's answer up; IDK is the cross-entropy to the coin.
    """
    p, s, s_idk = torch.sigmoid(z), 2 * y - 1, 2 * y_idk - 1
    if family == "GA":
        return y - p
    if family == "IDK":
        return p - y_idk
    R = F.logsigmoid(s * z) - F.logsigmoid(s * z0)
    if family == "NPO":
        return 2 * torch.sigmoid(beta * R) * (y - p)
    R_idk = F.logsigmoid(s_idk * z) - F.logsigmoid(s_idk * z0)
    if family == "DPO":
        return torch.sigmoid(beta * (R - R_idk)) * ((y - p) - (y_idk - p))
    z_ref = beta * R_idk.mean(1, keepdim=True)              # KTO, Eq. 19: detached, its own gradient is not taken
    return 2 * torch.sigmoid(beta * R - z_ref) * (y - p)


def bernoulli_kl(z_p, z_q):
    """KL(Bern(sigmoid z_p) || Bern(sigmoid z_q)), elementwise, from logits: never 0 * inf."""
    p = torch.sigmoid(z_p)
    return p * (F.logsigmoid(z_p) - F.logsigmoid(z_q)) + (1 - p) * (F.logsigmoid(-z_p) - F.logsigmoid(-z_q))


def unlearn(data, columns, lr, beta, steps, every=25):
    """Full-batch GD of all columns on all instances. columns: M names; lr, beta (D, M) -> curves (E, 3, D, M).

    A name is FAMILY, FAMILY+RT (retain cross-entropy added) or FAMILY+KL (KL(current || initial) on retain added), each
    with weight 1. Curves: mean KL(retrained || current) on fresh forget and retain inputs, KL(initial || current) on
    forget. Nothing is clipped: where GA's logits run to hundreds the distances stay finite because they use logits.
    """
    families = {}
    for m, name in enumerate(columns):
        families.setdefault(name.split("+")[0], []).append(m)
    has = lambda tail: torch.tensor([float(c.endswith(tail)) for c in columns], dtype=torch.float64)
    rt, kl, retain = has("+RT"), has("+KL"), [m for m, c in enumerate(columns) if "+" in c]
    y, y_idk, yr = data["yf"][..., None], data["y_idk"][..., None], data["yr"][..., None]
    nf, nr, step_size, b = y.shape[1], yr.shape[1], lr[:, None], beta[:, None]            # (D, 1, M)
    z0f, z0r = data["Xf"] @ data["initial"], data["Xr"] @ data["initial"]
    goal_f, goal_r, start_f = data["Ef"] @ data["retrained"], data["Er"] @ data["retrained"], data["Ef"] @ data["initial"]
    theta, curves = data["initial"].repeat(1, 1, len(columns)), []                        # (D, P, M)
    for t in range(steps + 1):  # one extra pass: the first row is the start, the last the end
        if t % every == 0:
            zf, zr = data["Ef"] @ theta, data["Er"] @ theta
            curves.append(torch.stack([bernoulli_kl(goal_f, zf).mean(1), bernoulli_kl(goal_r, zr).mean(1),
                                       bernoulli_kl(start_f, zf).mean(1)]))
        z, push = data["Xf"] @ theta, torch.empty(len(theta), nf, len(columns), dtype=theta.dtype)
        for family, m in families.items():
            push[..., m] = forget_push(family, z[..., m], z0f, y, y_idk, b[..., m])
        step = data["Xf"].mT @ push / nf
        if retain:
            zr = data["Xr"] @ theta[..., retain]
            p = torch.sigmoid(zr)
            pull = rt[retain] * (p - yr) + kl[retain] * p * (1 - p) * (zr - z0r)          # d CE/dz, d KL(p||p0)/dz
            step[..., retain] += data["Xr"].mT @ pull / nr
        theta = theta - step_size * step
    return torch.stack(curves)


def paper_settings(columns, alphas, n_seeds):
    """lr and beta of Table 1 for each column -> two tensors (D, M), alpha-major like the data."""
    rows = [[LR_BETA[c.split("+")[0]][ALPHAS.index(a)] for c in columns] for a in alphas for _ in range(n_seeds)]
    both = torch.tensor(rows, dtype=torch.float64)
    return both[..., 0], both[..., 1]


def grid_search(data, n_seeds, steps):
    """The choice of learning rates and betas as the paper tells it (appendix C): best of a grid -> list of rows.

    The paper says only "grid search" and "so that the training remains stable". Ours: every (lr, beta) is one more
    column; the score is the mean over seeds of forget + retain distance at the LAST step - a criterion that needs the
    retrained model, as any choice by these two distances does.
    """
    lrs, betas, rows = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2), {"NPO": (.1, 1., 5., 10.), "DPO": (.1, 1., 5., 10.)}, []
    for method in ("GA", "GA+RT", "IDK+RT", "NPO", "NPO+RT", "DPO+RT"):
        points = [(lr, b) for lr in lrs for b in betas.get(method.split("+")[0], (0.0,))]
        lr, beta = (torch.tensor([p[i] for p in points], dtype=torch.float64).expand(len(data["yf"]), -1) for i in (0, 1))
        end = unlearn(data, [method] * len(points), lr, beta, steps, every=steps)[-1, :2].sum(0)    # (D, M)
        for i, alpha in enumerate(ALPHAS):
            score = end[i * n_seeds:(i + 1) * n_seeds].mean(0)
            best, paper = points[int(score.argmin())], LR_BETA[method.split("+")[0]][i]
            rows.append(dict(alpha=alpha, method=method, lr=best[0], beta=best[1], score=float(score.min()),
                             paper_lr=paper[0], paper_beta=paper[1],
                             paper_score=float(score[points.index(paper)]) if paper in points else None))
            print("  grid alpha {alpha:g} {method:7s} best lr {lr:g} beta {beta:g}: {score:.4f}; paper lr {paper_lr:g} "
                  "beta {paper_beta:g}: {paper_score:.4f}".format(**rows[-1]))
    return rows


def summarise(curves, every, n_seeds):
    """Table of final values beside the published ones -> list of rows; the step is 1900 (the published one) or the last.

    Means AND medians: at alpha = 1 an unlucky seed has ten or a hundred times the median forget distance, so the mean
    of five says more about luck than about methods.
    """
    at = min(1900 // every, len(curves) - 1)
    rows = []
    for i, alpha in enumerate(ALPHAS):
        block = curves[:, :, i * n_seeds:(i + 1) * n_seeds]                               # (E, 3, S, M)
        best = (block[:, 0] + block[:, 1]).mean(1).argmin(0)                              # (M,) of the mean trajectory
        for k, metric in enumerate(METRICS):
            for name, m, e in [("start", 0, 0)] + [(n, m, at) for m, n in enumerate(METHODS)]:
                v, b = block[e, k, :, m], int(best[m]) if name != "start" else 0
                rows.append(dict(alpha=alpha, metric=metric, method=name, step=e * every, mean=float(v.mean()),
                                 median=float(v.median()), std=float(v.std()), n=n_seeds, per_seed=v.tolist(),
                                 published=PUBLISHED.get((alpha, metric), {}).get(name),
                                 best_step=b * every, at_best=float(block[b, k, :, m].mean())))
    return rows


def print_table(rows):
    for alpha, metric in sorted({(r["alpha"], r["metric"]) for r in rows}, reverse=True):
        print(f"  alpha {alpha:g}, {metric}: mean (std) median [published] | mean at the best step of the trajectory")
        for r in (r for r in rows if (r["alpha"], r["metric"]) == (alpha, metric)):
            print("    {method:7s} {mean:9.4f} ({std:.4f}) {median:9.4f} [{p}] | {at_best:.4f} @{best_step}".format(
                p="-" if r["published"] is None else r["published"], **r))


def random_features_claims(curves, every, n_seeds):
    """The sentences of section 4.2 and Figure 3, judged on medians over seeds -> list of claims."""
    m = {name: i for i, name in enumerate(METHODS)}
    one, zero = curves[:, :, :n_seeds].median(2).values, curves[:, :, n_seeds:].median(2).values       # (E, 3, M)
    till = min(1200 // every, len(curves) - 1)
    plotted = ("GA", "GA+RT", "NPO", "NPO+RT", "DPO+RT")
    low = {n: float(one[:till + 1, 0, m[n]].min()) for n in plotted + ("IDK+RT",)}
    end = lambda block, k, n: float(block[-1, k, m[n]])
    total = {n: float((one[:, 0, m[n]] + one[:, 1, m[n]]).min()) for n in plotted + ("IDK+RT",)}
    total0 = {n: end(zero, 0, n) + end(zero, 1, n) for n in plotted + ("IDK+RT",)}
    show = lambda d: ", ".join(f"{k} {v:.4f}" for k, v in d.items())
    return [
        claim("2 forget", "all but IDK+RT reach forget distance < .005 within 1200 steps (alpha 1)", "NPO paper, sec. 4.2",
              "medians: " + show(low), all(low[n] < .005 for n in plotted) and low["IDK+RT"] > .005),
        claim("2 retain", "retain distance: GA, GA+RT diverge, NPO+RT and DPO+RT stabilise (alpha 1)",
              "NPO paper, Fig. 4 a2", "final medians: " + show({n: end(one, 1, n) for n in plotted}),
              min(end(one, 1, "GA"), end(one, 1, "GA+RT")) > 3 * max(end(one, 1, "NPO+RT"), end(one, 1, "DPO+RT"))),
        claim("2 Pareto", "NPO+RT has the best forget/retain trade-off; NPO beats GA without retain data (alpha 1)",
              "NPO paper, Fig. 4 a3", "least sum of both distances: " + show(total),
              total["NPO+RT"] == min(total.values()) and total["NPO"] < total["GA"]),
        claim("2 same x", "NPO+RT ends with the smallest distances when forget and retain inputs coincide (alpha 0)",
              "NPO paper, Fig. 4 b", "final sums: " + show(total0), total0["NPO+RT"] == min(total0.values())),
        claim("2 KL", "forget KL is excessive for GA and GA+RT, tiny for IDK+RT, moderate for NPO (alpha 1)",
              "NPO paper, Fig. 11", "final medians: " + show({n: end(one, 2, n) for n in plotted + ("IDK+RT",)}),
              end(one, 2, "GA") > 3 * end(one, 2, "NPO") and end(one, 2, "GA+RT") > 3 * end(one, 2, "NPO+RT")
              and end(one, 2, "IDK+RT") < .1 * end(one, 2, "NPO"))]


def random_features(cfg, quick=False):
    """Figures 3, 4 and 11 of arXiv:2404.05868 -> (claims, data). quick: 3 seeds, a shorter Figure 3."""
    clock, every = time.perf_counter(), 25
    n_seeds, f3_steps = (min(3, cfg.seeds), min(2000, cfg.figure3_steps)) if quick else (cfg.seeds, cfg.figure3_steps)
    seeds = [1000 * (k + 1) for k in range(n_seeds)]
    data = make_data(ALPHAS, seeds)
    curves = unlearn(data, METHODS, *paper_settings(METHODS, ALPHAS, n_seeds), cfg.steps, every)
    rows = summarise(curves, every, n_seeds)
    print_table(rows)
    claims = random_features_claims(curves, every, n_seeds)

    # Figure 3: smaller beta, weaker brake. The trajectories at lr 5e-4 must close in on GA's as beta falls.
    first = {k: v[:n_seeds] for k, v in data.items()}                                     # the alpha = 1 half
    betas = (1.0, 0.5, 0.2, 0.1, 0.01)
    beta = torch.tensor([0.0, *betas], dtype=torch.float64).expand(n_seeds, -1)
    fig3 = unlearn(first, ["GA"] + ["NPO"] * len(betas), torch.full_like(beta, 5e-4), beta, f3_steps, every)
    mean3 = fig3.mean(2)                                                                  # (E, 3, 1+K)
    gap = [float((mean3[:, :2, 1 + k] - mean3[:, :2, 0]).norm(dim=1).max()) for k in range(len(betas))]
    claims.append(claim("2 limit", "NPO's trajectory tends to GA's as beta -> 0", "NPO paper, Fig. 3",
                        "largest gap to GA: " + ", ".join(f"beta {b:g} {v:.3f}" for b, v in zip(betas, gap)),
                        all(a > b for a, b in zip(gap, gap[1:]))))
    grid = grid_search(data, n_seeds, cfg.steps) if cfg.grid else None
    seconds = time.perf_counter() - clock
    print(f"  {len(METHODS)} methods x {n_seeds} seeds x {len(ALPHAS)} alphas: {seconds:.1f} s")
    return claims, dict(curves=curves, fig3=fig3, betas=betas, every=every, n_seeds=n_seeds,
                        table=dict(step=min(1900, cfg.steps), seeds=seeds, n=n_seeds, rows=rows, grid=grid,
                                   seconds=round(seconds, 1)))


# ------------------------------------------------------------------------------------------------ 3. natural gradient
# A gradient is measured in the units of the parameters, which nobody cares about. The Fisher matrix measures a step by
# what it does to the PREDICTIONS: KL(theta || theta + d) = d^T F d / 2 + O(d^3). Dividing by it, -F^{-1} grad L, is
# the steepest direction per unit of changed prediction. For unlearning, with F taken on text we want to keep, it means:
# forget along the directions that the rest of the model does not notice.

def softmax_jacobian_factor(logits, J):
    """A with A^T A = sum over rows of J^T S J, S = Diag(p) - p p^T. logits (N, C), J (N, C, P) -> (N*C, P).

    S = sum_c p_c (e_c - p)(e_c - p)^T is a covariance, so A's row (n, c) is sqrt(p_c) (J_nc - sum_k p_k J_nk):
    that IS the Fisher's gradient of log p(c), and the reason why Fisher and Gauss-Newton agree for softmax.
    """
    p = logits.softmax(-1)
    return (p.sqrt()[..., None] * (J - (p[..., None] * J).sum(-2, keepdim=True))).flatten(0, -2)


def mlp(theta, X, sizes=(4, 5, 3)):
    """Flat-parameter tanh network. theta (P,), X (N, sizes[0]) -> outputs (N, sizes[-1]); P = 43 by default."""
    i = 0
    for a, b in zip(sizes, sizes[1:]):
        W, bias = theta[i:i + a * b].view(b, a), theta[i + a * b:i + a * b + b]
        X, i = X @ W.T + bias, i + a * b + b
        X = torch.tanh(X) if i < len(theta) else X
    return X


def small_network(seed, N=16, P=43):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, generator=g)
    return draw(N, 4), draw(P) * 0.7, torch.randint(3, (N,), generator=g), draw(N, 3)     # X, theta, labels, targets


def curvature_matrices(theta, X, labels):
    """Mean softmax cross-entropy: Hessian, GGN, Fisher, empirical Fisher, each (P, P), each by its own definition."""
    loss = lambda th: F.cross_entropy(mlp(th, X), labels)
    J, z = jacrev(mlp)(theta, X), mlp(theta, X)                                           # (N, C, P), (N, C)
    S = vmap(hessian(lambda h, y: F.cross_entropy(h, y)))(z, labels)                      # (N, C, C), no y in it
    ggn = torch.einsum("ncp,ncd,ndq->pq", J, S, J) / len(X)
    scores = jacrev(lambda th: mlp(th, X).log_softmax(-1))(theta)                         # (N, C, P) grad log p(c)
    fisher = torch.einsum("nc,ncp,ncq->pq", z.softmax(-1), scores, scores) / len(X)       # c drawn from the MODEL
    seen = scores[torch.arange(len(X)), labels]                                           # c read off the DATA
    return hessian(loss)(theta), ggn, fisher, seen.T @ seen / len(X)


def check_matrices(seed):
    """a. Fisher = GGN, not the Hessian, not the empirical Fisher; F v without F; H -> GGN as residuals vanish."""
    X, theta, labels, targets = small_network(seed)
    H, G, Fi, E = curvature_matrices(theta, X, labels)
    # squared error: y ~ N(f, I). Second moments of three-point quadrature are exact: r in {+-sqrt(C) e_c}, weight 1/2C.
    J = jacrev(mlp)(theta, X)
    C, r = 3, math.sqrt(3.0)
    scores = torch.cat([r * J, -r * J], 1)                                                # grad log p = J^T r
    gauss_fisher, gauss_ggn = torch.einsum("ncp,ncq->pq", scores, scores) / (2 * C), torch.einsum("ncp,ncq->pq", J, J)
    v = torch.randn(len(theta), dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    z, dz = jvp(lambda th: mlp(th, X), (theta,), (v,))                                    # J v, one forward pass
    p = z.softmax(-1)
    product = vjp(lambda th: mlp(th, X), theta)[1](p * (dz - (p * dz).sum(-1, keepdim=True)) / len(X))[0]   # J^T S J v
    scales = [0.1 / 2 ** k for k in range(5)]
    f = mlp(theta, X)
    gap = [rel(hessian(lambda th: 0.5 * ((mlp(th, X) - f - s * targets) ** 2).sum())(theta), gauss_ggn) for s in scales]
    order = loglog_slope(scales, gap)[0]
    return [
        claim("a Fisher", "Fisher = generalised Gauss-Newton (softmax CE, squared error)", "Martens 2020, sec. 9.2",
              f"relative gap {rel(Fi, G):.1e}, {rel(gauss_fisher, gauss_ggn):.1e}",
              max(rel(Fi, G), rel(gauss_fisher, gauss_ggn)) < 1e-12),
        claim("a others", "they differ from the Hessian and from the empirical Fisher", "Martens 2020, sec. 8, 11.1",
              f"relative distance to H {rel(H, G):.2f}, to the empirical Fisher {rel(E, G):.2f}",
              min(rel(H, G), rel(E, G)) > 0.05),
        claim("a F v", "F v needs one JVP and one VJP, never F", "Martens 2020, sec. 9.1",
              f"relative gap to the explicit product {rel(product, Fi @ v):.1e}", rel(product, Fi @ v) < 1e-12),
        claim("a limit", "H -> GGN as the residuals vanish", "Martens 2020, sec. 8", f"gap ~ residual^{order:.2f}",
              abs(order - 1) < 0.1)]


def one_dimensional(step, xi, steps=3000, runs=400, seed=0):
    """theta <- theta - step(k) theta / (theta^2)^xi, N(0, 1) starts -> max |theta| over the last tenth, last |theta|: (runs,).

    Martens' example: loss theta^2/2, gradient theta, Fisher 1 (xi = 0 here), empirical Fisher theta^2. Near the optimum
    gradients vanish, so their squares vanish faster, and dividing by them makes steps LONGER where they should shrink.
    """
    theta = torch.randn(runs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    late = torch.zeros_like(theta)
    for k in range(1, steps + 1):
        curvature = (theta ** 2) ** xi if xi else torch.ones_like(theta)
        theta = theta - torch.where(theta == 0, 0.0, step(k) * theta / curvature)         # 0 stays 0: it has converged
        if k > 0.9 * steps:
            late = torch.maximum(late, theta.abs())
    return late, theta.abs()


def check_empirical_fisher(seed):
    """b. The exact Fisher converges at rate |1 - alpha|; the empirical one needs decaying steps and xi < 1."""
    after = lambda a, n: one_dimensional(lambda k: a, 0, n, seed=seed)[1]
    rate = {a: float((after(a, 21) / after(a, 20)).median()) for a in (.1, .5, 1.5, 1.9, 2.1)}
    xis, med = (.5, .75, 1.0), lambda step, xi: float(one_dimensional(step, xi, seed=seed)[0].median())
    fixed = [min(med(lambda k: a, xi) for a in (.5, .1, .01)) for xi in xis]
    slow, fast = [med(lambda k: 1 / k, xi) for xi in xis], [med(lambda k: 0.3 / k ** 2, xi) for xi in xis]
    show = lambda v: ", ".join(f"{x:.1e}" for x in v)
    return [
        claim("b exact", "exact Fisher: linear rate |1 - alpha| for 0 < alpha < 2", "Martens 2020, sec. 11.1",
              "measured " + ", ".join(f"{a}: {r:.3f}" for a, r in rate.items()),
              all(abs(r - abs(1 - a)) < 1e-9 for a, r in rate.items())),
        claim("b fixed", "empirical Fisher: no fixed step converges (xi .5, .75, 1)", "Martens 2020, sec. 11.1",
              "median late |theta| at the best of three steps: " + show(fixed), min(fixed) > 1e-3),
        claim("b decay", "decaying steps of divergent sum converge for xi < 1, not for xi = 1", "Martens 2020, sec. 11.1",
              f"late |theta|: steps 1/k {show(slow)}; steps .3/k^2 {show(fast)}",
              slow[0] < 1e-2 and slow[1] < 0.2 and slow[2] > 0.3 and min(fast) > 0.1)]


def ngd_in_coordinates(zeta, gamma, X, y, alpha, steps, natural=True):
    """Logistic NGD (or GD) on gamma, theta = zeta(gamma) -> theta after `steps`. X (N, P), y (N,), gamma (P,)."""
    for _ in range(steps):
        J = jacrev(lambda c: X @ zeta(c))(gamma)                                          # (N, P) d logit / d gamma
        p = torch.sigmoid(X @ zeta(gamma))
        g = J.T @ (p - y) / len(y)
        fisher = J.T @ ((p * (1 - p))[:, None] * J) / len(y)
        gamma = gamma - alpha * (torch.linalg.solve(fisher, g) if natural else g)
    return zeta(gamma)


def check_invariance(seed):
    """c. NGD forgets which coordinates it runs in: exactly for affine ones, up to alpha^2 a step for smooth ones."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, generator=g)
    X, M, b, c0 = draw(30, 4), torch.eye(4, dtype=torch.float64) + 0.3 * draw(4, 4), draw(4), 0.3 * draw(4)
    y = torch.bernoulli(torch.sigmoid(X.sum(1) / 2), generator=g)
    same, affine, bent = lambda c: c, lambda c: M @ c + b, lambda c: c + 0.4 * torch.tanh(c)
    run = lambda zeta, c, a, n, nat=True: ngd_in_coordinates(zeta, c, X, y, a, n, nat)
    gap = lambda zeta, a, n, nat=True: rel(run(zeta, c0, a, n, nat), run(same, zeta(c0), a, n, nat))
    alphas = [0.2 / 2 ** k for k in range(5)]
    per_step, whole = [gap(bent, a, 1) for a in alphas], [gap(bent, a, round(1 / a)) for a in alphas]
    p1, pw, exact, gd = loglog_slope(alphas, per_step)[0], loglog_slope(alphas, whole)[0], gap(affine, .3, 10), \
        gap(affine, .3, 10, False)
    return [
        claim("c affine", "NGD is exactly invariant under affine reparameterisation; GD is not",
              "Martens 2020, sec. 12", f"gap after 10 steps: NGD {exact:.1e}, GD {gd:.1e}", exact < 1e-10 < 1e-2 < gd),
        claim("c smooth", "under a smooth one the gap is O(alpha^2) a step and vanishes over a path as alpha -> 0",
              "Martens 2020, sec. 12", f"observed order: one step {p1:.2f}, path of length 1 {pw:.2f}",
              abs(p1 - 2) < 0.15 and abs(pw - 1) < 0.2)]


def check_kl_expansion(seed):
    """d. KL(theta || theta + d) = d^T F d / 2 + O(|d|^3)."""
    X, theta, labels, _ = small_network(seed)
    fisher = curvature_matrices(theta, X, labels)[2]
    d = F.normalize(torch.randn(len(theta), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=0)
    scales = [0.4 / 2 ** k for k in range(6)]
    logp = mlp(theta, X).log_softmax(-1)
    kl = [float((logp.exp() * (logp - mlp(theta + s * d, X).log_softmax(-1))).sum(-1).mean()) for s in scales]
    order = loglog_slope(scales, [abs(k - 0.5 * s * s * float(d @ fisher @ d)) for k, s in zip(kl, scales)])[0]
    return [claim("d KL", "KL(theta || theta+d) - d^T F d / 2 = O(|d|^3)", "Martens 2020, sec. 6",
                  f"observed order {order:.2f}", abs(order - 3) < 0.2)]


def gauss_newton_fit(mode, iterations=200, step=1.0, damping=1.0):
    """Fit a sum of two exponentials by Gauss-Newton -> (loss by iteration). mode: "plain" or "lm".

    y(t) = e^{-t} + e^{-1.5 t} from a far start: the two rates are nearly exchangeable, so J^T J has a tiny eigenvalue,
    and the undamped step runs along it to where the model means nothing. "lm" adds lam I (Tikhonov) and moves lam
    by the reduction ratio rho (Levenberg-Marquardt): trust grows where the quadratic model told the truth.
    """
    t = torch.linspace(0, 4, 30, dtype=torch.float64)
    target = torch.exp(-t) + torch.exp(-1.5 * t)
    residual = lambda th: th[0] * torch.exp(-th[1] * t) + th[2] * torch.exp(-th[3] * t) - target
    theta, losses, lam = torch.tensor([1.0, 0.2, 1.0, 0.3], dtype=torch.float64), [], damping
    for _ in range(iterations):
        r, J = residual(theta), jacrev(residual)(theta)
        losses.append(float(0.5 * r @ r))
        if not math.isfinite(losses[-1]) or losses[-1] > 1e12:
            return losses
        if mode == "plain":
            theta = theta - step * torch.linalg.lstsq(J, r).solution
            continue
        d = -torch.linalg.solve(J.T @ J + lam * torch.eye(4, dtype=torch.float64), J.T @ r)
        new = float(0.5 * (residual(theta + d) ** 2).sum())
        rho = (losses[-1] - new) / float(-(r @ J @ d) - 0.5 * (J @ d) @ (J @ d) + 1e-300)
        lam = lam / 3 if rho > 0.75 else lam * 3 if rho < 0.25 else lam
        theta = theta + d if new < losses[-1] else theta
    return losses


def check_damping(iterations=40):
    """e. Damping against step size on an ill-conditioned least-squares problem."""
    plain, lm = gauss_newton_fit("plain", iterations), gauss_newton_fit("lm", iterations)
    shrunk = {s: gauss_newton_fit("plain", iterations, s) for s in (.5, .2, .1, .05)}
    best = min(shrunk, key=lambda s: shrunk[s][-1] if math.isfinite(shrunk[s][-1]) else math.inf)
    return [claim("e damping", "undamped unit steps fail, Tikhonov + Levenberg-Marquardt converges, shrinking is cruder",
                  "Martens 2020, sec. 10", f"loss after {iterations} iterations: undamped {plain[-1]:.1e}, damped "
                  f"{lm[-1]:.1e}, best fixed step ({best}) {shrunk[best][-1]:.1e}",
                  not plain[-1] < 1e-2 and lm[-1] < 1e-20 and not shrunk[best][-1] < lm[-1])]


def stochastic_quadratic(h, theta0, alpha, steps, precondition=False, beta_max=0.99, runs=1000, seed=0, noise=1.0):
    """SGD on sum h theta^2 / 2, gradient noise N(0, Diag(h)), eigenbasis of H. h, theta0 (n,) -> gaps (3, runs), at k=steps.

    The three: last iterate, Polyak average of theta_1..theta_k, and the EMA with beta_k = min(1 - 1/k, beta_max), which
    is the plain average at first and then forgets the start geometrically. precondition: steps with H^{-1}.
    """
    g = torch.Generator().manual_seed(seed)
    theta = theta0.expand(runs, -1).clone()
    mean, ema = torch.zeros_like(theta), torch.zeros_like(theta)
    for k in range(1, steps + 1):
        gradient = h * theta + noise * h.sqrt() * torch.randn(theta.shape, dtype=theta.dtype, generator=g)
        theta = theta - alpha * (gradient / h if precondition else gradient)
        mean = mean + (theta - mean) / k
        beta = min(1 - 1 / k, beta_max)
        ema = beta * ema + (1 - beta) * theta
    return torch.stack([0.5 * (h * v ** 2).sum(1) for v in (theta, mean, ema)])


def check_stochastic_quadratic(seed, steps):
    """f. Averaged SGD is asymptotically as good as any second-order method; preconditioning helps with the start."""
    n, alpha, runs = 10, 0.5, 1000
    h = torch.logspace(0, -1, n, dtype=torch.float64)
    gaps = stochastic_quadratic(h, torch.ones(n, dtype=torch.float64), alpha, steps, runs=runs, seed=seed)
    mean, se = gaps.mean(1), gaps.std(1) / math.sqrt(runs)
    floor = float((alpha * h / (2 * (2 - alpha * h))).sum())           # V_i = alpha / (2 - alpha h_i), gap = sum h V / 2
    ill = torch.logspace(0, -3, n, dtype=torch.float64)
    start = torch.zeros(n, dtype=torch.float64)
    start[-1] = 30.0                                                   # along the smallest eigenvector
    quiet = [stochastic_quadratic(ill, start, alpha, 500, pre, runs=1, noise=0.0)[1].item() for pre in (False, True)]
    early = stochastic_quadratic(h, 30 * torch.ones(n, dtype=torch.float64), alpha, 500, beta_max=0.97, runs=200,
                                 seed=seed).mean(1)
    return [
        claim("f Polyak", "k x gap of averaged SGD -> n/2, as Fisher-efficient methods", "Martens 2020, sec. 14.3",
              f"k = {steps}: {steps * mean[1]:.2f} +- {1.96 * steps * se[1]:.2f}, n/2 = {n / 2:g} (twice the gap: n)",
              abs(steps * mean[1] - n / 2) < 0.35 + 1.96 * steps * se[1]),
        claim("f start", "preconditioning by H improves the starting-point term (small-eigenvector start)",
              "Martens 2020, sec. 14.3.1", f"noise-free gap of the average, k = 500: SGD {quiet[0]:.2e}, preconditioned "
              f"{quiet[1]:.2e}", quiet[1] < quiet[0] / 10),
        claim("f floor", "constant steps reach a noise floor, not zero", "Martens 2020, sec. 14.2.1",
              f"last iterate {mean[0]:.3f} +- {1.96 * se[0]:.3f}, closed form {floor:.3f}",
              abs(mean[0] - floor) < 4 * se[0]),
        claim("f EMA", "EMA weights min(1-1/k, beta_max) forget the start faster, but keep a variance",
              "Martens 2020, sec. 14.3", f"far start, k = 500: EMA {early[2]:.2g}, average {early[1]:.2g}; "
              f"k = {steps}: EMA {mean[2]:.2e}, average {mean[1]:.2e}", early[2] < early[1] and mean[2] > 2 * mean[1])]


# --- g. Theorem 3.1: the mean teacher follows slow natural gradient descent -------------------------------------------
# Two equations. Student: theta moves by -eta (alpha grad L + H_lam u) + momentum, u = theta - theta'. Teacher: theta'
# moves by eta kappa u / (1 - eta kappa). Both shrink with eta, but u settles within 1/eta steps while theta needs
# 1/(alpha eta): to the fast u, theta stands still. So u = -alpha H^{-1} grad L at all times, and both models drift
# along it. lam_bar, not lam, because the teacher runs away from under the student: that adds (1-mu) kappa of spring.

def nlul(logits, labels):
    """-log(1 - p(y)), section 4 of arXiv:2504.13388. logits (..., C), labels (...) -> (...), from the others' mass."""
    own = F.one_hot(labels, logits.shape[-1]).bool()
    return logits.logsumexp(-1) - logits.masked_fill(own, -math.inf).logsumexp(-1)


def kl_divergence(logits, ref_logits):
    """KL(sf(h) || sf(h')), Eq. 4. (..., C), (..., C) -> (...)."""
    logp, logq = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1)


def qkl_divergence(logits, ref_logits, scale=0.5):
    """scale * (h - h')^T S_h (h - h'), the variance of h - h' under sf(h). Eq. 9 prints scale 1, but Eq. 5 with
    H = GGN needs 1/2: with scale 1 the Hessian is 2 GGN. (..., C), (..., C) -> (...)."""
    p, d = logits.softmax(-1), logits - ref_logits
    return scale * ((p * d ** 2).sum(-1) - (p * d).sum(-1) ** 2)


def bregman_ce(logits, ref_logits):
    """Bregman divergence of softmax cross-entropy between LINEAR models: the label terms cancel and KL(sf(h') || sf(h)),
    the KL with its arguments turned round, is left. (..., C), (..., C) -> (...)."""
    return kl_divergence(ref_logits, logits)


DIVERGENCES = {"KL": (kl_divergence, 1.0), "QKL": (qkl_divergence, 1.0), "Bregman": (bregman_ce, 1.0),
               "QKL scale 1, H = 2 GGN": (lambda h, r: qkl_divergence(h, r, 1.0), 2.0),
               "QKL scale 1, H = GGN": (lambda h, r: qkl_divergence(h, r, 1.0), 1.0)}    # name: (D, H / GGN)


def softmax_ggn(X, theta):
    """GGN of softmax regression, (1/N) sum x x^T (x) S(x). X (N, d), theta (B, d, C) -> (B, d*C, d*C)."""
    p = (X @ theta).softmax(-1)                                                           # (B, N, C)
    S = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    return torch.einsum("ni,nj,bnkl->bikjl", X, X, S).reshape(len(theta), -1, theta[0].numel()) / len(X)


def lambda_bar(lam, mu, eta, kappa):
    """lam + (1 - mu) kappa / (1 - eta kappa), Theorem 3.1: 1.505 at the paper's .5, .9, 5e-4, 10."""
    return lam + (1 - mu) * kappa / (1 - eta * kappa)


def theorem_3_1_errors(alphas, cases, seed, eta=0.02, lam=0.1, kappa=1.0, A=1.0, d=6, C=3):
    """sup_t ||theta_t - theta_bar_t|| for t <= A/gamma. cases: (divergence name, mu) -> (2 readings, cases, alphas).

    All runs advance together: B = cases x alphas, each with its own alpha, mu, divergence, and its own last step.
    Reading 0 takes grad L at theta_bar_t (as the proof does), reading 1 at theta_bar_{t-1} (as Eq. 8 prints).
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, generator=g)
    Xr, Xf, start = draw(40, d), draw(10, d), 0.5 * draw(d, C)
    labels = (Xf @ start).argmax(-1)                               # the model "memorised" what is to be forgotten
    names = [n for n, _ in cases for _ in alphas]
    col = lambda values: torch.tensor(values, dtype=torch.float64)[:, None, None]
    alpha, mu = col([a for _ in cases for a in alphas]), col([m for _, m in cases for _ in alphas])
    ratio = col([DIVERGENCES[n][1] for n in names])
    gamma = kappa * alpha * eta / (1 - kappa * eta)
    last = (A / gamma).round().flatten()
    ridge = lambda_bar(lam, mu, eta, kappa) * torch.eye(d * C, dtype=torch.float64)
    grad_L = grad(lambda th: nlul(Xf @ th, labels.expand(len(th), -1)).mean(1).sum())
    groups = {n: slice(names.index(n), names.index(n) + names.count(n)) for n in dict.fromkeys(names)}

    def D(th, ref):
        return sum((DIVERGENCES[n][0](Xr @ th[b], Xr @ ref[b]).mean(1) + lam / 2 * ((th[b] - ref[b]) ** 2).sum((1, 2))).sum()
                   for n, b in groups.items())
    theta = start.expand(len(names), -1, -1).clone()
    before, teacher, slow = theta, theta, [theta, theta]
    slow_before, worst = theta, torch.zeros(2, len(names), dtype=torch.float64)
    for t in range(1, int(last.max()) + 1):
        step = eta * (alpha * grad_L(theta) + grad(D)(theta, teacher))
        theta, before = theta - step + mu * (theta - before), theta
        teacher = (1 - eta * kappa) * teacher + eta * kappa * theta
        at = (slow[0], slow_before)                                                       # where each reading asks grad L
        slow_before = slow[1]
        for i in (0, 1):
            H = ratio * softmax_ggn(Xr, slow[i]) + ridge
            slow[i] = slow[i] - gamma * torch.linalg.solve(H, grad_L(at[i]).flatten(1)).view_as(theta)
            error = (theta - slow[i]).flatten(1).norm(dim=1)
            worst[i] = torch.where(t <= last, torch.maximum(worst[i], error), worst[i])
    return worst.view(2, len(cases), len(alphas))


def check_theorem_3_1(seed, quick):
    """g. Does Algorithm 1 stay within O(alpha log 1/alpha) of the slow natural gradient trajectory?"""
    alphas = [0.4 / 2 ** k for k in range(4 if quick else 5)]
    cases = [(n, mu) for n in DIVERGENCES for mu in (0.0, 0.9)]
    errors, claims = theorem_3_1_errors(alphas, cases, seed), []
    for c, (name, mu) in enumerate(cases):
        for i, reading in enumerate(("t", "t-1")):
            e = errors[i, c]
            slope, half = loglog_slope(alphas, e)
            ratio = [float(v) / (a * math.log(1 / a)) for v, a in zip(e, alphas)]
            claims.append(claim(
                f"g {name}, mu {mu:g}", f"sup_t |theta - theta_bar| = O(alpha log 1/alpha), grad L at theta_bar_({reading})",
                "mean teacher paper, Theorem 3.1" + (", Eq. 9 as printed" if name.endswith("= GGN") and "scale" in name
                                                     else ""),
                f"sup " + " ".join(f"{float(v):.4f}" for v in e) + f"; log-log slope {slope:.2f} +- {half:.2f}; "
                f"ratio {ratio[0]:.3f} -> {ratio[-1]:.3f}", ratio[-1] <= 1.05 * ratio[0] and slope > 0.7))
    return claims, dict(alphas=alphas, errors={f"{n}, mu {m:g}": errors[0, c].tolist() for c, (n, m) in enumerate(cases)})


# --- h. Lemma D.1: where the proof slips ------------------------------------------------------------------------------
# In the eigenbasis of H + lam the lemma is a scalar recursion, e_{t+1} = (1 + mu - s) e_t - mu e_{t-1} - eta eps_t with
# s = eta h. The proof bounds the NORM of the 2x2 block by its largest EIGENVALUE R; the block is not normal, so its
# norm is larger and ||A^t|| first grows. What is true follows from the impulse response
#     k_n = mu^{n/2} U_n(x),  x = (1 + mu - s) / (2 sqrt(mu)),  U_n Chebyshev:  sum k_n = 1 / s.
# Noise. The worst bounded noise copies the signs of k: gain = eta sum |k_n| exactly.  x >= 1: all k_n > 0, so
#     gain = eta/s = 1/h.  x < 1: |U_n(x)| <= n+1, so gain <= eta sum (n+1) mu^{n/2} = eta / (1 - sqrt mu)^2.
#     Both cover every eigenvalue at once, as k_n rises with x:   gain <= max(1/lam, eta / (1 - sqrt mu)^2).
#     In the printed form: Cauchy-Schwarz with weights mu^{n/2} and sum q^n U_n^2 = (1+q)/((1-q)((1+q)^2 - 4 q x^2)) give
#     sum |k_n| <= 1/((1 - sqrt mu) sqrt(1 - mu)) wherever s >= 1 - sqrt mu, hence the factor C = max(1, 1/sqrt(2 - 2 mu))
#     on top of sqrt2 max(eta/(1 - sqrt mu), 1/lam); below that s our grid, not a proof, says the same.
# Start. c_t = k_t - mu k_{t-1}: for x >= 1 it is at most r^t (1 + t (1 - sqrt mu)), for x < 1 its amplitude over
#     mu^{t/2} is at most 1 + t (1 - sqrt mu) or sqrt(s)/sqrt(1 - x^2) <= 2/sqrt(3), as s <= 1.
# So R^t needs the factor 2/sqrt(3) (1 + t (1 - sqrt mu)), the noise term 1/lam in place of (1-mu)/lam and a square.
# Neither depends on alpha, and the proof only uses "small eta": the theorem keeps its rate with larger constants.

def lemma_block(mu, s):
    """The proof's 2x2 block [[1-s, -mu], [s, mu]], Eq. 11."""
    return torch.tensor([[1 - s, -mu], [s, mu]], dtype=torch.float64)


def lemma_radius(mu, s_lam):
    """R = max(sqrt mu, 1 - eta lam / (1 - mu)); s_lam = eta lam."""
    return max(math.sqrt(mu), 1 - s_lam / (1 - mu))


def impulse_response(mu, s, n):
    """k_0..k_{n-1} of k_{t+1} = (1 + mu - s) k_t - mu k_{t-1}, k_0 = 1, k_{-1} = 0. s (S,) -> (n, S)."""
    k = [torch.ones_like(s), 1 + mu - s]
    while len(k) < n:
        k.append((1 + mu - s) * k[-1] - mu * k[-2])
    return torch.stack(k[:n])


def worst_gain(mu, s):
    """sum_n |k_n| for each s = eta h, the exact worst noise gain over eta. s (S,) -> (S,): 1/s with real roots."""
    n = int(min(60000, 60 / (1 - math.sqrt(mu)))) + 50                                    # mu^{n/2} n < 1e-9
    swings = s > (1 - math.sqrt(mu)) ** 2
    out = 1 / s
    if swings.any():
        out[swings] = impulse_response(mu, s[swings], n).abs().sum(0)
    return out


def worst_gain_vector(mu, s, rounds=400):
    """sup over noise vectors of the gain over eta when the spectrum holds ALL of s (S,) -> float.

    Noise may rotate between eigenvectors: sup_w sum_n sqrt(sum_i w_i^2 k_n(s_i)^2) over unit w, concave in w^2. Larger
    than the worst single eigenvalue. Multiplicative ascent (the gradient has mean equal to the value: EM-like).
    """
    k2 = impulse_response(mu, s, int(60 / (1 - math.sqrt(mu))) + 50) ** 2                 # (n, S)
    p = torch.full_like(s, 1 / len(s))
    for _ in range(rounds):
        root = (k2 @ p).clamp_min(1e-300).sqrt()
        p = p * (k2 / root[:, None]).sum(0)
        p = p / p.sum()
    return float((k2 @ p).sqrt().sum())


def check_lemma_d1(quick):
    """h. Lemma D.1 of arXiv:2504.13388 as printed, and repaired."""
    mu, where = 0.9, "mean teacher paper, Lemma D.1"
    norm, radius = float(torch.linalg.matrix_norm(lemma_block(mu, .5), 2)), lemma_radius(mu, .5)
    power, growth, small = torch.eye(2, dtype=torch.float64), 0.0, lemma_block(mu, .001)
    for t in range(1, 2000):
        power = power @ small
        growth = max(growth, float(torch.linalg.matrix_norm(power, 2)) / lemma_radius(mu, .001) ** t)
    # (ii) no noise: e_1 = (1 - s) e_0 against R e_0. h = lam up to 1/eta over a grid of s_lam; worst excess over R^t.
    s_lam, excess = torch.logspace(-4, -0.5, 30, dtype=torch.float64), 0.0
    for v in s_lam:
        k = impulse_response(mu, v + (1 - v) * torch.linspace(0, 1, 200, dtype=torch.float64) ** 2, 300)
        c = k - mu * torch.cat([torch.zeros_like(k[:1]), k[:-1]])
        R = lemma_radius(mu, float(v)) ** torch.arange(300, dtype=torch.float64)
        excess = max(excess, float((c.abs().amax(1) / R).max()))
    # (iii) constant noise: the iterate tends to u* - eps/h. Printed factor over eta: sqrt2 max(1/(1-sqrt mu), (1-mu)/s).
    delta = 1 - math.sqrt(mu)
    s = torch.logspace(-6, 0, 2000, dtype=torch.float64)
    printed = lambda m, s: math.sqrt(2) * torch.clamp((1 - m) / s, min=1 / (1 - math.sqrt(m)))
    constant, matched = (1 / s / printed(mu, s)).max(), (worst_gain(mu, s) / printed(mu, s)).max()
    claims = [
        claim("h norm", "the block's spectral norm is at most R", where + " (proof)", f"mu .9, eta h .5: norm {norm:.3f} > R "
              f"{radius:.3f}; sup_t |A^t| / R^t = {growth:.1f} at eta h .001", norm <= radius and growth <= 1),
        claim("h start", "|u_t - u*| <= R^t |u_0 - u*| without noise", where,
              f"mu .9: u_1 - u* = (1 - eta h)(u_0 - u*); worst ratio over t, h, lam {excess:.3f}", excess <= 1 + 1e-9),
        claim("h noise", "noise adds at most sqrt2 max(eta/(1-sqrt mu), (1-mu)/lam) max|eps|", where,
              f"mu .9: constant noise exceeds it {constant:.2f}-fold (1/(sqrt2 (1-mu)) = {1 / math.sqrt(2) / .1:.2f}), "
              f"sign-matched {matched:.2f}-fold", float(matched) <= 1)]
    mus, rows = (.5, .9, .99) if quick else (.5, .7, .9, .97, .99, .999), []
    for m in mus:
        dm, n_s = 1 - math.sqrt(m), 150 if m > .995 else 600
        grid = torch.logspace(math.log10(dm ** 2) - 1, 0, n_s, dtype=torch.float64)
        gain = worst_gain(m, grid)
        naive = float((gain / (math.sqrt(2) * torch.clamp(1 / grid, min=1 / dm))).max())
        derived = float((gain / torch.clamp(1 / grid, min=1 / dm ** 2)).max())
        vector_A = vector_B = float("nan")
        if m <= .99:
            lows = torch.logspace(math.log10(dm ** 2), -.3, 6, dtype=torch.float64)
            v = [worst_gain_vector(m, torch.logspace(math.log10(a), 0, 40, dtype=torch.float64)) for a in lows.tolist()]
            vector_A = max(g / max(1 / a, 1 / dm ** 2) for g, a in zip(v, lows.tolist()))
            vector_B = max(g / (math.sqrt(2) * max(1 / a, 1 / dm)) for g, a in zip(v, lows.tolist()))
        rows.append(dict(mu=m, naive=naive, C=max(1, 1 / math.sqrt(2 - 2 * m)), derived=derived, vector_derived=vector_A,
                         vector_naive=vector_B))
        print("  mu {mu:5g}: sqrt2 max(eta/(1-sqrt mu), 1/lam) is off by {naive:.3f}, C(mu) {C:.3f}; derived bound used to "
              "{derived:.3f} (one eigenvalue), {vector_derived:.3f} (spectrum; naive {vector_naive:.3f})".format(**rows[-1]))
    ok = [r for r in rows if r["mu"] <= .99]
    claims += [
        claim("h 1/lam", "replacing (1-mu)/lam by 1/lam is enough to repair the noise term", "ours",
              "worst ratio " + ", ".join(f"mu {r['mu']:g}: {r['naive']:.2f}" for r in rows),
              all(r["naive"] <= 1 + 1e-9 for r in rows)),
        claim("h C(mu)", "C(mu) = max(1, 1/sqrt(2 - 2 mu)) times that is enough (derived for eta lam >= 1-sqrt mu)", "ours",
              "ratio / C " + ", ".join(f"{r['mu']:g}: {r['naive'] / r['C']:.3f}" for r in rows),
              all(r["naive"] <= r["C"] for r in rows)),
        claim("h repaired", "noise adds at most max(1/lam, eta/(1-sqrt mu)^2) max|eps| (derived; sharp for small eta)",
              "ours", f"ratio, one eigenvalue {max(r['derived'] for r in rows):.4f}, whole spectrum "
              f"{max(r['vector_derived'] for r in ok):.4f}",
              all(r["derived"] <= 1 + 1e-6 for r in rows) and all(r["vector_derived"] <= 1 + 1e-6 for r in ok)),
        claim("h transient", "the start fades as 2/sqrt3 (1 + t (1-sqrt mu)) R^t (derived)", "ours",
              f"worst ratio {transient_ratio(mus):.4f}", transient_ratio(mus) <= 1 + 1e-9)]
    return claims, dict(rows=rows)


def transient_ratio(mus, steps=400):
    """max over mu, t and s = eta h >= s_lam of |c_t| / (2/sqrt3 (1 + t (1 - sqrt mu)) R^t): at most 1 if we derived right."""
    t, worst = torch.arange(steps, dtype=torch.float64), 0.0
    for mu in mus:
        for s_lam in torch.logspace(-5, -0.1, 25, dtype=torch.float64).tolist():
            k = impulse_response(mu, torch.logspace(math.log10(s_lam), 0, 300, dtype=torch.float64), steps)
            c = (k - mu * torch.cat([torch.zeros_like(k[:1]), k[:-1]])).abs().amax(1)
            bound = 2 / math.sqrt(3) * (1 + t * (1 - math.sqrt(mu))) * lemma_radius(mu, s_lam) ** t
            worst = max(worst, float((c / bound).max()))
    return worst


# --- i. The falsifier: does any of this survive a transformer, mini-batches, clipping and momentum? --------------------
# A review of the paper asks for exactly this run. One block, 736 parameters, so the Gauss-Newton matrix of the
# pretraining batch is exact and lam_bar I + H can be solved; the optimiser settings are those of the paper's appendix B.

V_, T_, D_, FF_ = 10, 8, 8, 16           # vocabulary, tokens of a sequence, width, hidden width
SHAPES = ((V_, D_), (T_, D_), (D_, D_), (D_, D_), (D_, D_), (D_, D_), (D_, FF_), (FF_, D_), (D_, V_))


def transformer(theta, tokens):
    """One causal pre-norm block, one head. theta (P,) = SHAPES flattened, tokens (B, T) -> next-token logits (B, T-1, V)."""
    E, pos, Wq, Wk, Wv, Wo, W1, W2, U = (w.view(s) for w, s in zip(theta.split([a * b for a, b in SHAPES]), SHAPES))
    norm = lambda v: v * (v.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    x = E[tokens] + pos
    h = norm(x)
    scores = (h @ Wq) @ (h @ Wk).mT / math.sqrt(D_)                                       # (B, T, T)
    future = torch.ones(T_, T_, dtype=torch.bool).triu(1)
    x = x + scores.masked_fill(future, -math.inf).softmax(-1) @ (h @ Wv) @ Wo
    x = x + F.gelu(norm(x) @ W1) @ W2
    return (norm(x) @ U)[:, :-1]


def transformer_ggn(theta, tokens, chunk=16):
    """Exact GGN of the mean KL over next-token predictions, Eq. 6. theta (P,), tokens (B, T) -> (P, P)."""
    jac = vmap(jacrev(lambda th, row: transformer(th, row[None])[0]), in_dims=(None, 0))
    H = torch.zeros(len(theta), len(theta), dtype=theta.dtype)
    for rows in tokens.split(chunk):
        A = softmax_jacobian_factor(transformer(theta, rows).flatten(0, 1), jac(theta, rows).flatten(0, 1))
        H += A.T @ A
    return H / (len(tokens) * (T_ - 1))


def falsifier_data(seed, adam_steps):
    """A language to keep (a Markov chain), six random sequences to forget, and a model trained on both -> dict."""
    g = torch.Generator().manual_seed(seed)
    chain = torch.randn(V_, V_, dtype=torch.float64, generator=g).mul(1.5).softmax(-1)

    def sample(n):
        rows = [torch.randint(V_, (n,), generator=g)]
        for _ in range(T_ - 1):
            rows.append(torch.multinomial(chain[rows[-1]], 1, generator=g)[:, 0])
        return torch.stack(rows, 1)
    pretrain_batch, held_out, forget = sample(32), sample(128), torch.randint(V_, (6, T_), generator=g)
    theta = 0.3 * torch.randn(sum(a * b for a, b in SHAPES), dtype=torch.float64, generator=g)
    theta.requires_grad_(True)
    opt = torch.optim.Adam([theta], lr=0.01)
    for _ in range(adam_steps):
        loss = token_nll(theta, sample(64)) + token_nll(theta, forget)      # fresh text: only the six are memorised
        opt.zero_grad()
        loss.backward()
        opt.step()
    return dict(theta=theta.detach(), pretrain=pretrain_batch, held_out=held_out, forget=forget)


def token_nll(theta, tokens):
    """Mean next-token cross-entropy. theta (P,), tokens (B, T) -> scalar."""
    return F.cross_entropy(transformer(theta, tokens).flatten(0, 1), tokens[:, 1:].flatten())


def mean_teacher_runs(data, runs, steps, seed, eta=5e-4, lam=0.5, batch=(4, 8)):
    """Algorithms 1 and 2 side by side. runs: list of (name, alpha, kappa, mu, clip, mini) -> {t: (theta (B, P), teacher
    (B, P), forget NLL (B,), held-out NLL (B,), held-out KL(start || current) (B,))}, t = 0, 10, .., steps.

    clip 0: none; else l = 1 / max(|g| / clip, 1) scales the step AND the teacher's (the text of section 3, "kappa <-
    kappa / max(|g|/c, 1)"; Algorithm 2 prints 1 / max(|g|, c), the same at c = 1). mini: fresh batches of 4 forget and
    8 pretraining rows a step, the same for all mini runs. kappa 0 freezes the reference. Momentum as printed.
    """
    g = torch.Generator().manual_seed(seed + 1)
    col = lambda i: torch.tensor([float(r[i]) for r in runs], dtype=torch.float64)[:, None]
    alpha, kappa, mu, clip = (col(i) for i in (1, 2, 3, 4))
    mini = [i for i, r in enumerate(runs) if r[5]]
    full = [i for i, r in enumerate(runs) if not r[5]]

    def objective(theta, ref, a, forget, keep):
        L = nlul(transformer(theta, forget), forget[:, 1:]).mean()
        D = kl_divergence(transformer(theta, keep), transformer(ref, keep)).mean()
        return a[0] * L + D + lam / 2 * ((theta - ref) ** 2).sum()
    gradient = vmap(grad(objective), in_dims=(0, 0, 0, None, None))
    nll = vmap(token_nll, in_dims=(0, None))
    origin = transformer(data["theta"], data["held_out"])
    moved = vmap(lambda th: kl_divergence(origin, transformer(th, data["held_out"])).mean())
    theta = data["theta"].expand(len(runs), -1).clone()
    teacher, v, log = theta.clone(), torch.zeros_like(theta), {}
    for t in range(steps + 1):
        if t % 10 == 0:
            log[t] = (theta, teacher, nll(theta, data["forget"]), nll(theta, data["held_out"]), moved(theta))
        rows_f = torch.randperm(len(data["forget"]), generator=g)[:batch[0]]
        rows_p = torch.randperm(len(data["pretrain"]), generator=g)[:batch[1]]
        grads = torch.zeros_like(theta)
        for who, f, p in ((full, data["forget"], data["pretrain"]),
                          (mini, data["forget"][rows_f], data["pretrain"][rows_p])):
            if who:
                grads[who] = gradient(theta[who], teacher[who], alpha[who], f, p)
        size = grads.norm(dim=1, keepdim=True)
        ell = torch.where(clip > 0, 1 / torch.clamp(size / clip.clamp(min=1e-30), min=1), 1.0)
        v = mu * v + ell * grads
        theta = theta - eta * v
        teacher = (1 - ell * eta * kappa) * teacher + ell * eta * kappa * theta
    return log


def follow_natural_gradient(data, u, theta, alpha, lam_bar, lam):
    """Compare u = theta - teacher with -alpha (H + lam_bar)^{-1} grad L at theta, H exact -> (cosine, rel. distance,
    rel. distance with lam in place of lam_bar, cosine of u with the plain -grad L)."""
    g = grad(lambda th: nlul(transformer(th, data["forget"]), data["forget"][:, 1:]).mean())(theta)
    h, V = torch.linalg.eigh(transformer_ggn(theta, data["pretrain"]))
    direction = lambda ridge: -alpha * (V @ ((V.T @ g) / (h.clamp(min=0) + ridge)))
    cos = lambda a, b: float(F.cosine_similarity(a, b, dim=0))
    return cos(u, direction(lam_bar)), rel(u, direction(lam_bar)), rel(u, direction(lam)), cos(u, -g)


def at_equal_forgetting(forget, utility, level):
    """Utility (T,) at the first time that the forget NLL (T,) crosses `level`, linearly in between; None if never."""
    above = (forget >= level).nonzero()
    if len(above) == 0:
        return None
    i = int(above[0])
    if i == 0:
        return float(utility[0])
    share = (level - forget[i - 1]) / (forget[i] - forget[i - 1])
    return float(utility[i - 1] + share * (utility[i] - utility[i - 1]))


def slow_ngd(data, alpha, steps, seed_theta, eta=5e-4, lam=0.5, mu=0.9, kappa=10.0, refresh=20):
    """theta_bar of Theorem 3.1, H recomputed every `refresh` steps (gamma is 2.5e-4 of a unit: it hardly turns) -> (P,)
    at every refresh, {t: theta_bar}."""
    gamma, ridge = kappa * alpha * eta / (1 - kappa * eta), lambda_bar(lam, mu, eta, kappa)
    gradient = grad(lambda th: nlul(transformer(th, data["forget"]), data["forget"][:, 1:]).mean())
    theta, path = seed_theta, {}
    for t in range(steps + 1):
        if t % refresh == 0:
            path[t] = theta
            factor = torch.linalg.cholesky(transformer_ggn(theta, data["pretrain"])
                                           + ridge * torch.eye(len(theta), dtype=theta.dtype))
        theta = theta - gamma * torch.cholesky_solve(gradient(theta)[:, None], factor)[:, 0]
    return path


def check_falsifier(seed, quick):
    """i. Algorithms 1 and 2 on a transformer against the slow natural gradient, and a frozen against a sliding teacher."""
    steps, eta, lam, alpha, kappa, mu = (400 if quick else 1000), 5e-4, 0.5, 0.05, 10.0, 0.9
    data = falsifier_data(seed, 600)
    g0 = alpha * grad(lambda th: nlul(transformer(th, data["forget"]), data["forget"][:, 1:]).mean())(data["theta"]).norm()
    bite = float(g0) / 2                                   # the paper gives no c that would bite at this size: half of |g_1|
    runs = [("Algorithm 1", alpha, kappa, mu, 0, 0), ("no momentum", alpha, kappa, 0.0, 0, 0),
            ("clipping", alpha, kappa, mu, bite, 0), ("mini-batches", alpha, kappa, mu, 0, 1),
            ("Algorithm 2", alpha, kappa, mu, bite, 1)]
    frozen = [("frozen", a, 0.0, mu, 0, 0) for a in (.05, .1, .2, .4)]
    log = mean_teacher_runs(data, runs + frozen, steps, seed)
    marks = (100, 400) if quick else (50, 100, 200, 400, 700, 1000)
    follow = {}
    for i, (name, a, k, m, _, _) in enumerate(runs):
        for t in marks:
            th, teacher = log[t][0][i], log[t][1][i]
            follow[name, t] = follow_natural_gradient(data, th - teacher, th, a, lambda_bar(lam, m, eta, k), lam)
            print("  {:12s} t {:4d}: cos {:.3f} distance {:.3f} (lam for lam_bar {:.3f}), cos to -grad L {:.3f}".format(
                name, t, *follow[name, t]))
    where, claims, end = "review of the mean teacher paper, falsifier", [], marks[-1]
    for name, *_ in runs:
        seen = [follow[name, t] for t in marks]
        claims.append(claim(f"i {name}", f"{name}: theta - teacher is -alpha (H + lam_bar)^-1 grad L, to 25 % at the end",
                            where, "distance " + " ".join(f"{f[1]:.2f}" for f in seen) + " cosine "
                            + " ".join(f"{f[0]:.2f}" for f in seen) + f" at t = {' '.join(map(str, marks))}",
                            seen[-1][1] < 0.25))
    f = follow["Algorithm 1", end]
    claims.append(claim("i ridge", "the ridge is lam_bar = 1.505, not lam = .5", "mean teacher paper, Theorem 3.1",
                        f"distance at t = {end}: lam_bar {f[1]:.2f}, lam {f[2]:.2f}", f[1] < f[2]))
    path = slow_ngd(data, alpha, steps, data["theta"])
    apart = [float((log[t][0][0] - path[t]).norm()) for t in path]
    claims.append(claim("i path", "Algorithm 1 stays near the slow NGD path (sup distance < 25 % of its length)", where,
                        f"sup |theta - theta_bar| {max(apart):.3f}, |theta_bar_T - theta_0| "
                        f"{float((path[max(path)] - data['theta']).norm()):.3f}",
                        max(apart) < 0.25 * float((path[max(path)] - data["theta"]).norm())))
    # Utility at equal forgetting: the level that the sliding run reaches at its end, where it has paid its full price.
    curve = lambda j, i: torch.stack([log[t][j][i] for t in log])
    level = float(curve(2, 0)[-1])
    kl = {f"alpha {r[1]:g}": at_equal_forgetting(curve(2, len(runs) + i), curve(4, len(runs) + i), level)
          for i, r in enumerate(frozen)}
    reached = {k: v for k, v in kl.items() if v is not None}
    slid = float(curve(4, 0)[-1])
    claims.append(claim(
        "i frozen", "at equal forgetting a frozen reference (kappa 0) costs more utility than the sliding one", where,
        f"held-out KL to the start at forget NLL {level:.2f}: sliding {slid:.4f}; frozen "
        + ", ".join(f"{k} " + ("never" if v is None else f"{v:.4f}") for k, v in kl.items()),
        not reached or min(reached.values()) > slid))
    return claims, dict(marks=list(marks), follow={f"{n} @ {t}": v for (n, t), v in follow.items()}, level=level,
                        sliding_kl=slid, frozen_kl=kl, steps=steps,
                        curves={n: (curve(2, i).tolist(), curve(4, i).tolist()) for i, n in
                                enumerate([r[0] for r in runs] + [f"frozen, alpha {r[1]:g}" for r in frozen])})


def natural_gradient(cfg, quick=False):
    """Checks a to i -> (claims, data)."""
    s, claims = cfg.seed, []
    for check in (check_matrices, check_empirical_fisher, check_invariance, check_kl_expansion):
        claims += check(s)
    claims += check_damping() + check_stochastic_quadratic(s, 1000 if quick else 4000)
    data = {}
    for name, check in (("theorem_3_1", lambda: check_theorem_3_1(s, quick)), ("lemma_d1", lambda: check_lemma_d1(quick)),
                        ("falsifier", lambda: check_falsifier(s, quick))):
        more, data[name] = check()
        claims += more
    return claims, data


# ------------------------------------------------------------------------------------------------ figures, main

def save_figure(fig, path):
    fig.tight_layout()
    fig.savefig(path, dpi=70)
    print("  figure:", path)


def draw_divergence(data, out):
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for n, curve in data["curves"].items():
        t = torch.arange(len(curve))
        axes[0].plot(t, curve[:, 0], label=f"GA, n_f {n}")
        axes[1].plot(t[1:], curve[1:, 2], label=f"NPO beta {data['betas'][1]:g}, n_f {n}")
    axes[1].set_xscale("log")
    for ax, title in zip(axes, ("gradient ascent: a straight line in t", "NPO: a straight line in log t")):
        ax.set(title=title, xlabel="step", ylabel="distance in the norm X^T X")
        ax.legend(fontsize=7)
    save_figure(fig, out / "synthetic_divergence.png")


def draw_random_features(data, out):
    """Figures 3, 4 and 11 of arXiv:2404.05868: lines are means, bars one standard deviation over seeds, dots medians."""
    import matplotlib.pyplot as plt
    curves, every, n = data["curves"], data["every"], data["n_seeds"]
    shown = ("GA", "GA+RT", "IDK+RT", "NPO", "NPO+RT", "DPO+RT")
    t = torch.arange(len(curves)) * every

    def bars(ax, block, log=True):                                                        # block (E, S, M)
        for c, name in enumerate(shown):
            v = block[:, :, METHODS.index(name)]
            ax.errorbar(t, v.mean(1), v.std(1), errorevery=8, lw=1.2, capsize=2, color=f"C{c}", label=name)
            ax.plot(t[::4], v.median(1).values[::4], ".", ms=3, color=f"C{c}")
        ax.set_xlabel("step")
        if log:
            ax.set_yscale("symlog", linthresh=1e-3)
    one, zero = curves[:, :, :n], curves[:, :, n:]
    fig, axes = plt.subplots(1, 4, figsize=(15, 3.4))
    for ax, block, title in ((axes[0], one[:, 0], "a1 forget distance, alpha 1"), (axes[1], one[:, 1], "a2 retain distance, "
                             "alpha 1"), (axes[3], zero[:, 0], "b forget distance, alpha 0")):
        bars(ax, block)
        ax.set_title(title)
    for c, name in enumerate(shown):
        v = one[:, :2, :, METHODS.index(name)].mean(2)
        axes[2].loglog(v[:, 0], v[:, 1], color=f"C{c}", label=name)
    axes[2].set(title="a3 Pareto, alpha 1", xlabel="forget distance", ylabel="retain distance")
    axes[0].legend(fontsize=7)
    save_figure(fig, out / "synthetic_figure4.png")
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for ax, block, a in zip(axes, (one[:, 2], zero[:, 2]), ALPHAS):
        bars(ax, block)
        ax.set_title(f"forget KL, alpha {a:g}")
    axes[0].legend(fontsize=7)
    save_figure(fig, out / "synthetic_figure11.png")
    fig, ax = plt.subplots(figsize=(5, 3.6))
    mean = data["fig3"].mean(2)                                                           # (E, 3, 1+K)
    for k, label in enumerate(["GA"] + [f"NPO beta {b:g}" for b in data["betas"]]):
        ax.loglog(mean[:, 0, k], mean[:, 1, k], label=label)
    ax.set(title="beta -> 0: NPO's path tends to GA's", xlabel="forget distance", ylabel="retain distance")
    ax.legend(fontsize=7)
    save_figure(fig, out / "synthetic_figure3.png")


def draw_natural_gradient(data, out):
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    th, fa = data["theorem_3_1"], data["falsifier"]
    for name, e in th["errors"].items():
        axes[0].loglog(th["alphas"], e, "o-", lw=1, ms=3, label=name)
    axes[0].set(title="Theorem 3.1: sup |theta - theta_bar|", xlabel="alpha")
    axes[0].legend(fontsize=5)
    s = torch.logspace(-5, 0, 400, dtype=torch.float64)
    axes[1].loglog(s, worst_gain(0.9, s), label="exact worst gain")
    axes[1].loglog(s, math.sqrt(2) * torch.clamp(0.1 / s, min=1 / (1 - math.sqrt(.9))), label="Lemma D.1 as printed")
    axes[1].loglog(s, torch.clamp(1 / s, min=1 / (1 - math.sqrt(.9)) ** 2), "--", label="max(1/s, 1/(1-sqrt mu)^2)")
    axes[1].set(title="noise gain / eta, mu .9", xlabel="s = eta h")
    axes[1].legend(fontsize=7)
    for name, (forget, kl) in fa["curves"].items():
        axes[2].plot(forget, kl, "--" if "frozen" in name else "-", lw=1, label=name)
    axes[2].set(title="transformer: the price of forgetting", xlabel="forget NLL", ylabel="held-out KL to the start")
    axes[2].legend(fontsize=6)
    save_figure(fig, out / "synthetic_natural_gradient.png")


def parse_config(argv=None):
    """Flags made from Config; a bad value is one line on stderr and exit code 2, before any work."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", nargs="?", default="", help=fields(Config)[0].metadata["help"])
    for f in fields(Config)[1:]:
        kind = dict(action=argparse.BooleanOptionalAction) if f.type in (bool, "bool") else dict(type=type(f.default))
        p.add_argument("--" + f.name.replace("_", "-"), default=f.default, **kind,
                       help=f.metadata["help"] + f" [{f.default}]")
    cfg = Config(**vars(p.parse_args(argv)))

    def stop(text):
        print("synthetic.py: " + text, file=sys.stderr)
        sys.exit(2)
    if cfg.command and cfg.command not in COMMANDS:
        stop(f"unknown command {cfg.command!r}; choose one of {', '.join(COMMANDS)}, or none for a quick tour")
    if cfg.seeds < 2:
        stop(f"--seeds {cfg.seeds}: error bars need at least 2 seeds")
    for name, value in (("--steps", cfg.steps), ("--figure3-steps", cfg.figure3_steps)):
        if value < 25 or value % 25:
            stop(f"{name} {value}: give a positive multiple of 25, the distance between evaluations")
    if cfg.grid and cfg.command in ("divergence", "natural_gradient"):
        stop(f"--grid belongs to random_features; {cfg.command} has no grid")
    try:
        import scipy  # noqa: F401
        if cfg.figures:
            import matplotlib
            matplotlib.use("Agg")
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
    except ImportError as e:
        stop(f"{e.name} is missing: pip install {e.name}" + (", or run with --no-figures" if e.name == "matplotlib" else ""))
    except OSError as e:
        stop(f"--out {cfg.out}: {e.strerror}; give a folder that can be written")
    return cfg


def main(cfg):
    clock, quick, out = time.perf_counter(), cfg.command == "", Path(cfg.out)
    parts = dict(divergence=(divergence, draw_divergence), random_features=(random_features, draw_random_features),
                 natural_gradient=(natural_gradient, draw_natural_gradient))
    result = dict(command="python synthetic.py " + (cfg.command or "(quick tour)"), config=asdict(cfg), quick=quick,
                  versions=dict(python=platform.python_version(), torch=torch.__version__), claims=[])
    for name, (study, draw) in parts.items():
        if cfg.command not in ("", "all", name):
            continue
        print(f"== {name}")
        claims, data = study(cfg, quick)
        result["claims"] += claims
        if cfg.figures:
            draw(data, out)
        result[name] = (data["table"] if name == "random_features" else data["fits"] if name == "divergence" else data)
    if "natural_gradient" in result:
        result["natural_gradient"]["falsifier"].pop("curves")           # drawn, and too long for a file people read
    result["seconds"] = round(time.perf_counter() - clock, 1)
    (out / "synthetic.json").write_text(json.dumps(result, indent=1, default=float) + "\n")
    failed = sum(c["verdict"] == "fails" for c in result["claims"])
    print(f"{len(result['claims'])} claims, {failed} fail; {result['seconds']} s; {out / 'synthetic.json'}")
    return result


if __name__ == "__main__":
    main(parse_config())

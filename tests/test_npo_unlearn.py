"""npo_unlearn.py: losses, the step's gradient, the reference, the schedule of batches, the loop, the command."""
import copy
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import npo_unlearn as npo
from npo_unlearn import Config, Reference, Student, accumulate_gradients, answer_batches

f64, CPU = torch.float64, torch.device("cpu")
ROOT = Path(__file__).parent.parent


# ----- closed forms -----

def numbers(B=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(-20 * torch.rand(B, generator=g, dtype=f64)).requires_grad_(k == 0) for k in range(4)]


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
def test_npo_is_2_ln2_over_beta_at_the_reference_with_the_gradient_of_ga(beta):
    logp, *_ = numbers()
    loss = npo.npo_loss(logp, logp.detach(), beta)
    (g,) = torch.autograd.grad(loss, logp)
    assert loss.item() == pytest.approx(2 / beta * math.log(2), rel=1e-12)
    torch.testing.assert_close(g, torch.full_like(g, 1 / 5))             # that of the mean of summed log p


def test_npo_gradient_weight_is_eq_5_with_its_factor_2():
    logp, ref, *_ = numbers()
    (g,) = torch.autograd.grad(npo.npo_loss(logp, ref, 0.3), logp)
    p, q = np.exp(logp.detach().numpy()) ** .3, np.exp(ref.numpy()) ** .3
    np.testing.assert_allclose(g, 2 * p / (p + q) / 5, rtol=1e-10)
    want = np.mean([2 / .3 * math.log(1 + math.exp(.3 * (a - b))) for a, b in zip(logp.tolist(), ref.tolist())])
    assert npo.npo_loss(logp, ref, 0.3).item() == pytest.approx(want, rel=1e-12)


def test_npo_becomes_summed_ga_as_beta_vanishes_with_error_beta_R_squared_over_4():
    logp, ref, *_ = numbers()
    R = (logp - ref).detach()
    for beta in (1e-2, 1e-3, 1e-4):
        gap = npo.npo_loss(logp, ref, beta) - 2 / beta * math.log(2) - R.mean()
        assert gap.item() == pytest.approx((beta * R ** 2 / 4).mean().item(), rel=30 * beta ** 2 + 1e-6, abs=1e-9)
        (g,) = torch.autograd.grad(npo.npo_loss(logp, ref, beta), logp)
        torch.testing.assert_close(g, torch.full_like(g, .2), rtol=beta * 11, atol=0)


def test_dpo_by_hand_and_against_its_literal_probabilities():
    win, ref_win, lose, ref_lose = (x.detach().requires_grad_(k in (0, 2)) for k, x in enumerate(numbers()))
    loss = npo.dpo_loss(win, ref_win, lose, ref_lose, 0.1)
    a, b, c, d = (np.exp(x.detach().numpy()) for x in (win, ref_win, lose, ref_lose))
    sigma = (a / b) ** .1 / ((a / b) ** .1 + (c / d) ** .1)
    assert loss.item() == pytest.approx(np.mean(-np.log(sigma)) / .1, rel=1e-12)
    g = torch.autograd.grad(loss, (win, lose))
    np.testing.assert_allclose(g[0], -(1 - sigma) / 5, rtol=1e-10)       # raised and lowered by the same amount
    torch.testing.assert_close(g[0], -g[1])
    one = torch.zeros(1, dtype=f64)
    assert npo.dpo_loss(one, one, one, one, 0.1).item() == pytest.approx(10 * math.log(2))


@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("z", [-16.3, 0.0, 2.5])
def test_kto_is_npo_with_a_moved_centre_and_no_gradient_through_z_ref(B, z):
    logp, ref, *_ = numbers(B)
    z_ref = torch.tensor(z, dtype=f64, requires_grad=True)
    loss = npo.kto_loss(logp, ref, z_ref, 0.1)
    g, gz = torch.autograd.grad(loss, (logp, z_ref), allow_unused=True)
    assert gz is None and math.isfinite(loss.item())
    R = (logp - ref).detach().numpy()
    np.testing.assert_allclose(g, 2 / (1 + np.exp(z - .1 * R)) / B, rtol=1e-10)
    assert loss.item() == pytest.approx(np.mean(20 * np.log1p(np.exp(.1 * R - z))), rel=1e-10)
    if z == 0:
        torch.testing.assert_close(loss, npo.npo_loss(logp, ref, 0.1))


def test_losses_stay_finite_where_log_ratios_are_hundreds():
    for R in (-800., 800.):
        x, zero = torch.tensor([R], requires_grad=True), torch.zeros(1)
        for loss in (npo.npo_loss(x, zero, .1), npo.dpo_loss(zero, zero, x, zero, .1), npo.kto_loss(x, zero, -16., .1)):
            (g,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert torch.isfinite(loss) and torch.isfinite(g).all()


# ----- one step's gradient, against plain models and full logits -----

def tiny_model(seed=0, tie=False, dropout=0.0, vocab=50):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                        num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=tie,
                                        attention_dropout=dropout, bos_token_id=1, eos_token_id=2, initializer_range=.3)).eval()


def pairs(n, seed, low=2, high=9):
    """n rows of random ids, a prompt of 3 to 6 tokens and an answer of uneven length that ends in EOS = 2."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        prompt = [1] + rng.integers(3, 50, size=rng.integers(2, 6)).tolist()
        out.append((prompt + rng.integers(3, 50, size=rng.integers(low, high)).tolist() + [2], len(prompt)))
    return out


def config(**kw):
    return Config(**(dict(lr=1e-3, batch=4, epochs=2, device="cpu") | kw))


def data(n=5, retain=7, epochs=2):
    return dict(forget=pairs(n, 1), retain=pairs(retain, 2), idk=pairs(epochs * n, 3, 1, 4))


def nudge_(student, seed=1, size=.05):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in student.theta.values():
            p.add_(size * torch.randn(p.shape, generator=g))


def gradients(student, d, ref, c, cfg, step=0):
    for p in student.theta.values():
        p.grad = None
    stats = accumulate_gradients(student, npo.step_batches(d, step, cfg, 0, c, CPU), ref, c, cfg)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in student.theta.items()}, stats


def reference(student, d, c, cfg):
    steps = cfg.epochs * -(-len(d["forget"]) // cfg.batch)
    return npo.make_reference(student, d, c, cfg, 0, steps, torch.autocast("cpu", enabled=False))


def plain_step(model, start, forget, idk, retain, c, beta, reverse, token_mean=False):
    """The whole loss by full logits, one sequence at a time, F.cross_entropy and F.kl_div: the oracle."""
    def scores(m, pair):
        ids, s = torch.tensor([pair[0]]), pair[1]
        z = m(input_ids=ids).logits[0, s - 1:-1]
        return z.log_softmax(-1), -F.cross_entropy(z, ids[0, s:], reduction="none")

    def kl(p, q):                                                        # F.kl_div(q, p) is KL(p || q)
        return F.kl_div(p, q, log_target=True, reduction="sum") if reverse else F.kl_div(q, p, log_target=True, reduction="sum")
    cur, old = ([scores(m, p) for p in forget] for m in (model, start))
    S, S0 = (torch.stack([t.sum() for _, t in x]) for x in (cur, old))
    old = [(z.detach(), t.detach()) for z, t in old]
    S0, n, loss = S0.detach(), sum(len(t) for _, t in cur), 0.0
    if "ga" in c:
        loss = loss + c["ga"] * (torch.cat([t for _, t in cur]).mean() if token_mean else S.mean())
    if "npo" in c:
        loss = loss + c["npo"] * torch.log1p(torch.exp(beta * (S - S0))).mean() * 2 / beta
    if "fgkl" in c:
        loss = loss - c["fgkl"] * sum(kl(a, b) for (a, _), (b, _) in zip(cur, old)) / n
    if c.keys() & {"fg", "dpo", "kto"}:
        I, I0 = ([scores(m, p)[1] for p in idk] for m in (model, start))
        Ri = torch.stack([a.sum() - b.sum().detach() for a, b in zip(I, I0)])
        if "fg" in c:
            loss = loss - c["fg"] * torch.cat(I).mean()
        if "dpo" in c:
            loss = loss + c["dpo"] * torch.log1p(torch.exp(-beta * (Ri - S + S0))).mean() / beta
        if "kto" in c:
            loss = loss + c["kto"] * torch.log1p(torch.exp(beta * (S - S0) - beta * Ri.mean().detach())).mean() * 2 / beta
    if c.keys() & {"rt", "rtkl"}:
        cur, old = ([scores(m, p) for p in retain] for m in (model, start))
        if "rt" in c:
            loss = loss - c["rt"] * torch.cat([t for _, t in cur]).mean()
        if "rtkl" in c:
            loss = loss + c["rtkl"] * sum(kl(a, b.detach()) for (a, _), (b, _) in zip(cur, old)) / sum(len(t) for _, t in cur)
    return loss


ALL = {m: c for m, c in npo.METHODS.items() if m != "general"} | {"five": dict(ga=.3, fg=.7, rt=2., fgkl=.1, rtkl=1.5)}


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_gradient_of_every_method_equals_full_logits_one_row_at_a_time(method, kl):
    c = ALL[method]
    if kl == "reverse" and not c.keys() & {"rtkl", "fgkl"}:
        pytest.skip("no divergence in it")
    model, d, cfg = tiny_model(tie=method == "npo_kl"), data(), config(kl=kl, micro_batch=3)
    start, student = copy.deepcopy(model), Student(model, "all")
    ref = reference(student, d, c, cfg)
    nudge_(student)
    order, partner, _ = npo.epoch_plan(0, 0, 5, 7, 1)
    got, stats = gradients(student, d, ref, c, cfg)
    oracle = copy.deepcopy(model)
    loss = plain_step(oracle, start, [d["forget"][i] for i in order[:4]], [d["idk"][i] for i in order[:4]],
                      [d["retain"][i] for i in partner[:4]], c, cfg.beta, kl == "reverse")
    loss.backward()
    assert stats["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    for n, p in oracle.named_parameters():
        torch.testing.assert_close(got[n], p.grad, rtol=5e-4, atol=5e-6, msg=lambda m: f"{n}: {m}")


def test_token_mean_is_the_released_ga():
    model, d, cfg = tiny_model(), data(), config(token_mean=True, batch=5)
    student = Student(model, "all")
    _, stats = gradients(student, d, reference(student, d, ALL["ga"], cfg), ALL["ga"], cfg)
    want = plain_step(model, model, d["forget"], [], [], ALL["ga"], .1, False, token_mean=True)
    assert stats["loss"].item() == pytest.approx(want.item(), rel=1e-5)
    assert stats["nll_forget"].item() == pytest.approx(-want.item(), rel=1e-5)


@pytest.mark.parametrize("method", ALL)
def test_accumulation_over_uneven_token_counts_changes_nothing(method):
    c, d = ALL[method], data(8, 9)
    student = Student(tiny_model(), "all")
    ref = reference(student, d, c, config(batch=8))
    nudge_(student)
    want, stats = gradients(student, d, ref, c, config(batch=8))
    for micro in (1, 3):
        got, other = gradients(student, d, ref, c, config(batch=8, micro_batch=micro))
        for n in want:
            torch.testing.assert_close(got[n], want[n], rtol=1e-3, atol=1e-5)
        assert other["loss"].item() == pytest.approx(stats["loss"].item(), rel=1e-5)


# ----- answers and prompts -----

def test_only_answer_tokens_are_scored_and_eos_is_one_of_them_though_padding_looks_the_same():
    """Padding is 0 in pad_batch, EOS may be 0 too, and may stand inside a prompt: the mask comes from lengths."""
    rows = [([5, 0, 6, 7, 0], 3), ([5, 6, 7, 8, 9, 10, 0, 0], 2)]
    (b,) = answer_batches(rows, [1, 0], 0, CPU)
    assert b.index == [0, 1]
    assert b.labels[b.seq == 0].tolist() == [7, 0] and b.labels[b.seq == 1].tolist() == [7, 8, 9, 10, 0, 0]
    flat = b.ids.flatten()
    assert torch.equal(flat[b.rows + 1], b.labels)                       # a row's hidden state predicts the token after it


def test_rows_of_forget_and_idk_line_up_whatever_the_lengths():
    forget, idk = [([1] + [4] * k + [2], 1) for k in (7, 2, 5, 1)], [([1] + [5] * k + [2], 1) for k in (1, 6, 2, 4)]
    (a,), (b,) = (answer_batches(x, [3, 1, 0, 2], 0, CPU) for x in (forget, idk))
    assert npo.per_sequence(torch.ones(len(a.rows)), a).tolist() == [8, 3, 6, 2]
    assert npo.per_sequence(torch.ones(len(b.rows)), b).tolist() == [2, 7, 3, 5]


def test_the_prompt_does_not_move_the_loss_but_through_the_context():
    """Changing the mask by one token is seen: the summed log p equals that of the answer alone, by hand."""
    model, rows = tiny_model(), pairs(3, 5)
    (b,) = answer_batches(rows, range(3), 0, CPU)
    with torch.no_grad():
        _, token_logp = npo.answer_logp(Student(model, "all"), b)
        for k, (ids, s) in enumerate(rows):
            logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            want = sum(logs[t - 1, ids[t]].item() for t in range(s, len(ids)))
            assert npo.per_sequence(token_logp, b)[k].item() == pytest.approx(want, rel=1e-4)


def test_all_masked_rows_weigh_nothing_and_stay_finite():
    d, c = data(4, 4), ALL["npo_rt"]
    d["forget"][1] = (d["forget"][1][0], 99)                             # the answer begins past the end: no token of it is left
    student = Student(tiny_model(), "all")
    ref = reference(student, d, c, config())
    nudge_(student)
    got, stats = gradients(student, d, ref, c, config())
    assert all(torch.isfinite(g).all() for g in got.values()) and math.isfinite(stats["loss"].item())


# ----- the reference -----

@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("lora", [0, 4])
def test_at_step_0_log_ratios_and_divergences_are_exactly_zero_with_dropout_in_the_config(method, lora):
    c, d, cfg = ALL[method], data(9, 9), config(micro_batch=2)
    student = Student(tiny_model(dropout=.5), "all", lora, checkpointing=True)
    ref = reference(student, d, c, cfg)
    for step in range(3):                                                # every batch of the first epoch, also the last, of one row
        batches = npo.step_batches(d, step, cfg, 0, c, CPU)
        with torch.no_grad():
            for part, used in (("forget", c.keys() & {"npo", "dpo", "kto"}), ("idk", c.keys() & {"dpo", "kto"})):
                for b in batches.get(part, []) if used else []:
                    assert torch.equal(npo.per_sequence(npo.answer_logp(student, b)[1], b), ref.logp(part, b))
        _, stats = gradients(student, d, ref, c, cfg, step)
        assert stats.get("divergence", torch.zeros(())).item() == 0 == stats.get("divergence_forget", torch.zeros(())).item()


def test_the_reference_of_an_adapter_model_is_the_adapter_not_the_base():
    """A start model that already carries a trained adapter: the reference is base + adapter, its values at the start."""
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(tiny_model(), LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.normal_(0, .1)
    start, d, cfg = copy.deepcopy(model).eval(), data(), config()
    student = Student(model, "all", lora=8)
    assert all(p.shape[0] == 3 or p.shape[1] == 3 for p in student.theta.values())        # goes on with ITS adapter
    ref = reference(student, d, ALL["npo_kl"], cfg)
    nudge_(student)
    got, _ = gradients(student, d, ref, ALL["npo_kl"], cfg)
    order, partner, _ = npo.epoch_plan(0, 0, 5, 7, 1)
    oracle = copy.deepcopy(student.model)
    for p in oracle.parameters():
        p.requires_grad_()
    plain_step(oracle, start, [d["forget"][i] for i in order[:4]], [], [d["retain"][i] for i in partner[:4]], ALL["npo_kl"],
               cfg.beta, False).backward()
    for n, p in oracle.get_base_model().named_parameters():
        if n in got:
            torch.testing.assert_close(got[n], p.grad, rtol=5e-4, atol=5e-6, msg=lambda m: f"{n}: {m}")


def test_the_reference_of_later_epochs_is_still_the_start_model():
    c, d, cfg = ALL["dpo_kl"], data(), config()
    student = Student(tiny_model(), "all")
    start = copy.deepcopy(student.model)
    ref = reference(student, d, c, cfg)
    nudge_(student)
    for b in npo.step_batches(d, 2, cfg, 0, c, CPU)["idk"]:              # second epoch: other idk sentences
        assert min(b.index) >= 5
        _, logp = npo.answer_logp(Student(copy.deepcopy(start), "all"), b)
        torch.testing.assert_close(ref.logp("idk", b), npo.per_sequence(logp, b).detach(), rtol=1e-5, atol=1e-5)


# ----- KTO at the edges -----

@pytest.mark.parametrize("B", [1, 2, 3])
def test_kto_batches_of_one_two_three_are_finite(B):
    d, c = data(3, 4), ALL["kto"]
    student = Student(tiny_model(), "all")
    ref = reference(student, d, c, config(batch=B))
    nudge_(student)
    got, stats = gradients(student, d, ref, c, config(batch=B))
    assert math.isfinite(stats["loss"].item()) and all(torch.isfinite(g).all() for g in got.values())


def test_kto_with_an_empty_idk_side_is_npo():
    d, cfg = data(4, 4), config()
    student = Student(tiny_model(), "all")
    ref = reference(student, d, ALL["kto"], cfg)
    nudge_(student)
    batches = npo.step_batches(d, 0, cfg, 0, ALL["npo"], CPU)            # without idk
    a = accumulate_gradients(student, batches, ref, dict(kto=1), cfg)["loss"].item()
    assert a == pytest.approx(accumulate_gradients(student, batches, ref, dict(npo=1), cfg)["loss"].item(), rel=1e-6)


# ----- schedule -----

def test_each_epoch_meets_every_forget_row_once_the_last_batch_is_smaller_and_partners_change():
    d, cfg = data(10, 40), config(batch=4)
    seen, partners = [], []
    for step in range(3):
        b = npo.step_batches(d, step, cfg, 0, ALL["npo_rt"], CPU)
        seen += b["forget"][0].index
        partners += b["retain"][0].index
        assert len(b["forget"][0].index) == len(b["retain"][0].index) == (2 if step == 2 else 4)
    assert sorted(seen) == list(range(10)) and len(set(partners)) == 10
    assert npo.epoch_plan(0, 0, 10, 40, 5)[0].tolist() != npo.epoch_plan(0, 1, 10, 40, 5)[0].tolist()
    assert npo.epoch_plan(0, 0, 10, 40, 5)[1].tolist() != npo.epoch_plan(0, 1, 10, 40, 5)[1].tolist()
    assert len(npo.epoch_plan(0, 0, 10, 3, 5)[1]) == 10                  # fewer retain rows than forget rows: forget90


def test_learning_rate_rises_over_the_first_epoch_and_falls_to_zero():
    rates = [npo.learning_rate(s, 4, 40) for s in range(40)]
    assert rates[:4] == pytest.approx([.25, .5, .75, 1]) and rates[-1] == pytest.approx(1 / 36)
    np.testing.assert_allclose(np.diff(rates[4:]), -1 / 36)
    assert npo.learning_rate(0, 1, 1) == 1                               # one step in all


# ----- copies -----

def test_pieces_shared_with_mt_unlearn_are_equal_to_the_letter():
    def fences(name):
        found = re.findall(r"# --- copy: (.+?) ---\n(.*?)# --- end copy ---", (ROOT / name).read_text(), re.S)
        return dict(found)
    ours, theirs = fences("npo_unlearn.py"), fences("mt_unlearn.py")
    assert ours.keys() == theirs.keys() and len(ours) >= 3
    for name in ours:
        assert ours[name] == theirs[name], f"the copies of {name!r} differ: copy mt_unlearn.py's"


# ----- numbers of the released code -----

GOLDEN = Path(os.environ.get("GOLDEN_DIR", "/nowhere")) / "tofu_tiny"
golden = pytest.mark.skipif(not (GOLDEN / "golden.json").exists(), reason="GOLDEN_DIR is not set: no released numbers at hand")
PAIRS = [f"batch{b}: current={x},reference={y}" for b in "AB" for x, y in (("tiny_full", "tiny_retain"), ("tiny_retain", "tiny_full"))]
CONVENTIONS = {  # released methods in terms of our coefficients; what differs further is done in released_step
    "GA": dict(ga=1), "GA+RT": dict(ga=1, rt=1), "GA+KL": dict(ga=1), "IDK+RT": dict(fg=1, rt=1), "DPO": dict(dpo=2),
    "DPO+RT": dict(dpo=2, rt=1), "DPO+KL": dict(dpo=2), "KTO": dict(kto=1), "KTO+RT": dict(kto=1, rt=1), "NPO": dict(npo=1),
    "NPO+RT": dict(npo=1, rt=1), "NPO+KL": dict(npo=1)}


def golden_models():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    load = lambda n: AutoModelForCausalLM.from_pretrained(GOLDEN / "models" / n).eval()
    return {n: load(n) for n in ("tiny_full", "tiny_retain")}, AutoTokenizer.from_pretrained(GOLDEN / "models" / "tiny_full")


def golden_pairs(tokenizer, rows):
    """The released template: prompt and answer tokenised together, "Answer: " on the answer side, EOS at the end."""
    out = []
    for r in rows:
        prompt = f"Question: {r['question']}\n"
        ids = tokenizer(prompt + f"Answer: {r['answer']}")["input_ids"] + [tokenizer.eos_token_id]
        out.append((ids, len(tokenizer(prompt)["input_ids"])))
    return out


def golden_rows(name, picks):
    text = (GOLDEN / "rows" / f"{name}.json").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [rows[i] for i in picks]


def released_step(name, student, old, tokenizer, spec, monkeypatch):
    """Loss and gradient norm of one released method by our functions."""
    cfg = config(token_mean=True, batch=8)
    lists = {k: golden_pairs(tokenizer, golden_rows(k, spec[f"{k}_rows"])) for k in ("forget", "idk", "retain") if f"{k}_rows" in spec}
    batches = {k: answer_batches(p, range(len(p)), 0, CPU) for k, p in lists.items()}
    ref = Reference(old)
    for k, b in batches.items():
        ref.ask(k, b, torch.autocast("cpu", enabled=False))
    if name.startswith("KTO"):                                           # released: z_ref is not times beta
        ours = npo.kto_reference
        monkeypatch.setattr(npo, "kto_reference", lambda s, idk, ref, beta, autocast: ours(s, idk, ref, 1.0, autocast))
    c = dict(CONVENTIONS[name])
    if name == "IDK+RT":                                                 # released: one token mean over both answers
        n = {k: sum(len(b.rows) for b in batches[k]) for k in ("idk", "retain")}
        c = dict(fg=n["idk"] / sum(n.values()), rt=n["retain"] / sum(n.values()))
    for p in student.theta.values():
        p.grad = None
    loss = accumulate_gradients(student, batches, ref, c, cfg)["loss"].item()
    if name.startswith("KTO"):
        loss += 1                                                        # released: a constant
    if name.endswith("+KL"):                                             # released: KL(ref || current) over all 320 positions
        T, eos = 320, tokenizer.eos_token_id
        ids = torch.tensor([p + [eos] * (T - len(p)) for p, _ in lists["retain"]])
        mask = torch.tensor([[1] * (len(p) - 1) + [0] * (T - len(p) + 1) for p, _ in lists["retain"]])
        h, h0 = (s.backbone(input_ids=ids, attention_mask=mask).last_hidden_state.flatten(0, 1) for s in (student, old))
        kl = npo.token_kl(h, student.head(), h0.detach(), old.head().detach(), reverse=True).mean()
        kl.backward()
        loss += kl.item()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in student.theta.values() if p.grad is not None))
    return loss, norm


@golden
@pytest.mark.parametrize("pair", PAIRS)
def test_golden_losses_and_gradient_norms_of_every_method(pair, monkeypatch):
    models, tokenizer = golden_models()
    spec = json.loads((GOLDEN / "golden.json").read_text())["losses"]["batches"][pair]
    current, old = re.findall(r"=(\w+)", pair)
    student, old = Student(models[current], "all"), Student(models[old], "all")
    for name in CONVENTIONS:
        with monkeypatch.context() as m:
            loss, norm = released_step(name, student, old, tokenizer, spec, m)
        want = spec["losses"][name]
        assert loss == pytest.approx(want["loss"], rel=2e-5, abs=0), name
        assert norm == pytest.approx(want["grad_l2"], rel=5e-5, abs=0), name


@golden
def test_golden_losses_of_pairs_that_are_not_saturated(monkeypatch):
    """Reference = full + t (retain - full), t = .02, .1: log-ratios of order 1, where every weight of a sigmoid counts."""
    models, tokenizer = golden_models()
    for pair, spec in json.loads((GOLDEN / "golden.json").read_text())["losses"]["unsaturated_batches"].items():
        t, old = float(re.search(r"([\d.]+)\*", pair)[1]), copy.deepcopy(models["tiny_full"])
        with torch.no_grad():
            for p, q in zip(old.parameters(), models["tiny_retain"].parameters()):
                p.lerp_(q, t)
        student, old = Student(models["tiny_full"], "all"), Student(old, "all")
        for name in ("NPO", "DPO", "KTO"):
            with monkeypatch.context() as m:
                loss, norm = released_step(name, student, old, tokenizer, spec, m)
            assert loss == pytest.approx(spec["losses"][name]["loss"], rel=2e-5), (pair, name)
            assert norm == pytest.approx(spec["losses"][name]["grad_l2"], rel=5e-5), (pair, name)


@golden
def test_golden_kto_of_the_sigmoid_form_from_our_log_sigmoids():
    """1 - (2/beta) mean sigma(z_ref - beta R), another published form: sigma = exp(-(beta/2) kto_loss of one row)."""
    for group in ("batches", "unsaturated_batches"):
        for pair, spec in json.loads((GOLDEN / "golden.json").read_text())["losses"][group].items():
            if "own_float64_parts" in spec:
                R, K = torch.tensor(spec["own_float64_parts"]["forget_logratio"], dtype=f64), spec["own_float64_parts"]["KTO_K"]
            elif group == "unsaturated_batches":
                R, K = torch.tensor(spec["own_float64_forget_logratio"], dtype=f64), spec["KTO_K"]
            else:
                continue
            sigma = [math.exp(-.05 * npo.kto_loss(r[None], torch.zeros(1, dtype=f64), K, .1).item()) for r in R]
            assert 1 - 20 * np.mean(sigma) == pytest.approx(spec["losses"]["KTO_sigmoid"]["loss"], rel=2e-5)

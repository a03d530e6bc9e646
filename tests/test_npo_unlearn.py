"""npo_unlearn.py: losses, the step's gradient, the reference, the schedule of batches, the loop, the command."""
import copy
import importlib.util
import json
import math
import os
import re
import shutil
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
    return Config(**(dict(lr=1e-3, batch=4, epochs=2, beta=0.1, device="cpu") | kw))


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
    return npo.make_reference(student, d, c, cfg, 0, steps)


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


class Released:
    """The released conventions around our functions, for one pair of models and one set of rows."""

    def __init__(self, student, old, tokenizer, spec, with_kl=True):
        self.student, self.cfg = student, config(token_mean=True, batch=8)
        lists = {k: golden_pairs(tokenizer, golden_rows(k, spec[f"{k}_rows"])) for k in ("forget", "idk", "retain") if f"{k}_rows" in spec}
        self.batches = {k: answer_batches(p, range(len(p)), 0, CPU) for k, p in lists.items()}
        self.ref = Reference(old)
        for k, b in self.batches.items():
            self.ref.ask(k, b)
        if with_kl:                                                      # released: KL(ref || current) over all 320 positions
            T, eos = 320, tokenizer.eos_token_id
            ids = torch.tensor([p + [eos] * (T - len(p)) for p, _ in lists["retain"]])
            mask = torch.tensor([[1] * (len(p) - 1) + [0] * (T - len(p) + 1) for p, _ in lists["retain"]])
            h, h0 = (s.backbone(input_ids=ids, attention_mask=mask).last_hidden_state.flatten(0, 1) for s in (student, old))
            kl = npo.token_kl(h, student.head(), h0.detach(), old.head().detach(), reverse=True).mean()
            self.kl, self.kl_grads = kl.item(), torch.autograd.grad(kl, list(student.theta.values()))

    def step(self, name, monkeypatch):
        """-> loss and gradient norm of one released method."""
        if name.startswith("KTO"):                                       # released: z_ref is not times beta
            ours = npo.kto_reference
            monkeypatch.setattr(npo, "kto_reference", lambda s, idk, ref, beta, amp: ours(s, idk, ref, 1.0, amp))
        c = dict(CONVENTIONS[name])
        if name == "IDK+RT":                                             # released: one token mean over both answers
            n = {k: sum(len(b.rows) for b in self.batches[k]) for k in ("idk", "retain")}
            c = dict(fg=n["idk"] / sum(n.values()), rt=n["retain"] / sum(n.values()))
        theta, kl = list(self.student.theta.values()), name.endswith("+KL")
        for p in theta:
            p.grad = None
        loss = accumulate_gradients(self.student, self.batches, self.ref, c, self.cfg)["loss"].item()
        loss += name.startswith("KTO") + (self.kl if kl else 0)          # released: KTO has a constant 1
        grads = [p.grad + g if kl else p.grad for p, g in zip(theta, self.kl_grads if kl else theta)]
        return loss, math.sqrt(sum(g.double().square().sum().item() for g in grads))


def close(got, want, rel):
    """To the goldens' own accuracy; a saturated loss exp(-40) has the error of its exponent, a float32 sum of hundreds."""
    return got == pytest.approx(want, rel=rel if abs(want) > 1e-12 else 2e-4, abs=0)


@golden
@pytest.mark.parametrize("pair", PAIRS)
def test_golden_losses_and_gradient_norms_of_every_method(pair, monkeypatch):
    models, tokenizer = golden_models()
    spec = json.loads((GOLDEN / "golden.json").read_text())["losses"]["batches"][pair]
    current, old = re.findall(r"=(\w+)", pair)
    released = Released(Student(models[current], "all"), Student(models[old], "all"), tokenizer, spec)
    for name in CONVENTIONS:
        with monkeypatch.context() as m:
            loss, norm = released.step(name, m)
        want = spec["losses"][name]
        assert close(loss, want["loss"], 2e-5) and close(norm, want["grad_l2"], 5e-5), (name, loss, norm, want)


@golden
def test_golden_losses_of_pairs_that_are_not_saturated(monkeypatch):
    """Reference = full + t (retain - full), t = .02, .1: log-ratios of order 1, where every weight of a sigmoid counts."""
    models, tokenizer = golden_models()
    for pair, spec in json.loads((GOLDEN / "golden.json").read_text())["losses"]["unsaturated_batches"].items():
        t, old = float(re.search(r"([\d.]+)\*", pair)[1]), copy.deepcopy(models["tiny_full"])
        with torch.no_grad():
            for p, q in zip(old.parameters(), models["tiny_retain"].parameters()):
                p.lerp_(q, t)
        released = Released(Student(models["tiny_full"], "all"), Student(old, "all"), tokenizer, spec, with_kl=False)
        for name in ("NPO", "DPO", "KTO"):
            with monkeypatch.context() as m:
                loss, norm = released.step(name, m)
            want = spec["losses"][name]
            assert close(loss, want["loss"], 2e-5) and close(norm, want["grad_l2"], 5e-5), (pair, name, loss, norm, want)


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


# ----- whole runs, on a folder of invented people and models made in seconds -----

def people(n, seed=0):
    """Rows about n invented people, three each, with a paraphrase and three wrong answers of the same wording."""
    rng, pick = np.random.default_rng(seed), dict(town="arla brin corvo dusk elm foss".split(), trade="baker singer miller tailor "
                                                  "glazier cooper".split(), beast="owl hare lynx toad crow moth".split())
    text = dict(town=("where does {} live", "{} lives in {}"), trade=("what does {} do", "{} is a {}"), beast=("what does {} keep", "{} keeps a {}"))
    rows = []
    for k in range(n):
        for about, words in pick.items():
            right, *wrong = rng.permutation(words)[:4].tolist()
            question, answer = text[about]
            rows.append(dict(question=question.format(f"n{k}") + " ?", answer=answer.format(f"n{k}", right),
                             paraphrased_answer=answer.format(f"n{k}", right) + " now", perturbed_answer=[answer.format(f"n{k}", w) + " now" for w in wrong]))
    return rows


def train(model, tokenizer, rows, steps, bench):
    """Plain AdamW on the answers, learning rate falling to 0: how the toy's target and retrain models come to know."""
    rows = npo.qa_sequences(rows, tokenizer, bench, 64)
    student, opt = Student(model, "all"), torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0)
    for step in range(steps):
        opt.param_groups[0]["lr"] = 6e-3 * (1 - step / steps)
        picks = np.random.default_rng(step).choice(len(rows), 20, replace=False).tolist()
        for b in answer_batches(rows, picks, 0, CPU):
            (-npo.answer_logp(student, b)[1].mean()).backward()
        opt.step()
        opt.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A benchmark folder of 16 people, 4 of them to forget, with target and retrain models of 60 thousand weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    import evaluate
    folder, rows = tmp_path_factory.mktemp("toy"), people(16)
    facts = [dict(r, perturbed_answer=[w.removesuffix(" now") for w in r["perturbed_answer"]]) for r in people(24)[48:]]
    sets = dict(forget=rows[36:], retain=rows[:36], real_authors=facts[:12], world_facts=facts[12:])
    for name, part in sets.items():
        plain = [{k: r[k] for k in ("question", "answer")} for r in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in plain))
        (folder / f"{name}_perturbed.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    idk = ["nobody knows that", "that is not known", "ask me not"]
    (folder / "idontknow.jsonl").write_text("\n".join(idk) + "\n")
    words = sorted({w for r in people(24) for t in (r["question"], r["answer"], r["paraphrased_answer"], *r["perturbed_answer"]) for w in t.split()}
                   | {w for s in idk for w in s.split()} | {"Question", "Answer", ":"})
    inner = Tokenizer(models.WordLevel({w: k for k, w in enumerate(["<unk>", "<s>", "</s>", *words])}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    bench = evaluate.load_bench(str(folder))
    for name, part in (("target", bench.retain_qa + bench.forget_qa), ("retrain", bench.retain_qa)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4,
                                             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True))
        plain = [{k: r[k] for k in ("question", "answer")} for r in facts]
        train(model, tokenizer, part + plain, 330, bench)
        evaluate.save_model(model, tokenizer, folder / "models" / name)
    return folder


FAST = ("--device", "cpu", "--batch", "4", "--lr", "1e-3", "--eval-batch", "64")


def run(toy, out, *flags):
    """main() in this process on the toy folder -> its result.json."""
    npo.main(["--bench", str(toy), "--out", str(out), *FAST, *map(str, flags)])
    return json.loads((out / "result.json").read_text())


def test_a_run_forgets_and_keeps_and_leaves_everything_a_user_needs(toy, tmp_path, capsys):
    r = run(toy, tmp_path / "r", "--epochs", 6, "--examples", 1, "--survive")
    out = capsys.readouterr().out
    assert out.rstrip().splitlines()[-1] == f"run: {tmp_path / 'r'}"
    start, end = r["target"], r["unlearned"]
    assert start["prob_forget"] > .8 > .4 > end["prob_forget"] and end["prob_retain"] > .5 + .2 * (start["prob_retain"] - 1)
    assert start["forget_quality"] < 1e-2 and end["forget_quality"] > .05                 # like the retrain model, the aim
    for name in ("config.json", "result.json", "table.md", "seed0/log.jsonl", "seed0/model/model.safetensors", "seed0/model/tokenizer.json"):
        assert (tmp_path / "r" / name).exists(), name
    rows = [json.loads(line) for line in (tmp_path / "r/seed0/log.jsonl").read_text().splitlines()]
    steps, evals = ([x for x in rows if x["kind"] == k] for k in ("step", "eval"))
    assert [x["step"] for x in steps] == list(range(18)) and r["steps"] == 18 and steps[-1]["nll_forget"] > steps[0]["nll_forget"]
    assert [x["epoch"] for x in evals] == list(range(7)) and [e["step"] for e in r["seeds"][0]["evolution"]] == list(range(0, 19, 3))
    kl = [[e["metrics"][f"kl_{part}"] for e in r["seeds"][0]["evolution"]] for part in ("forget", "retain", "world")]
    assert all(k[0] == 0 for k in kl) and kl[0][-1] > 2 * kl[1][-1] > 0
    assert set(r["seeds"][0]["survive"]) == {"bf16", "int8", "int4"}
    assert re.search(r"forget 0: .*\n  true .*\n  target .*\n  unlearned .*\n  retrain", out)


def test_metrics_in_result_are_those_of_the_saved_model_and_of_the_last_evaluation(toy, tmp_path):
    import evaluate
    r = run(toy, tmp_path / "r", "--epochs", 1)
    bench, folder = evaluate.load_bench(str(toy)), tmp_path / "r/seed0/model"
    again = evaluate.evaluate_tofu(evaluate.load_model(folder), evaluate.load_tokenizer(folder), bench)["metrics"]
    assert again and all(r["unlearned"][k] == pytest.approx(v, abs=1e-6) for k, v in again.items())
    assert all(r["seeds"][0]["evolution"][-1]["metrics"][k] == pytest.approx(v, abs=1e-5) for k, v in again.items())


class Killed(Exception):
    pass


@pytest.mark.parametrize("flags", [("--method", "dpo_kl"), ("--method", "npo_rt", "--lora", 2, "--eval-every", 2)])
def test_resume_gives_the_same_bits(toy, tmp_path, flags, monkeypatch):
    """Killed in the third epoch and resumed: weights, metrics, evolution and log of the uninterrupted run."""
    flags = ("--epochs", 3, "--max-rows", 4, *flags)
    whole = run(toy, tmp_path / "whole", *flags)
    real, calls = npo.accumulate_gradients, []

    def dies(*a, **k):
        calls.append(1)
        if len(calls) == 8:
            raise Killed
        return real(*a, **k)
    monkeypatch.setattr(npo, "accumulate_gradients", dies)
    with pytest.raises(Killed):
        run(toy, tmp_path / "part", *flags)
    after = []
    monkeypatch.setattr(npo, "accumulate_gradients", lambda *a, **k: (after.append(1), real(*a, **k))[1])
    resumed = run(toy, tmp_path / "part", *flags, "--resume")
    assert len(after) == 3                                               # from the end of the second epoch, not from the start
    assert resumed["unlearned"] == whole["unlearned"] and resumed["seeds"][0]["evolution"] == whole["seeds"][0]["evolution"]
    from safetensors.torch import load_file
    name = "seed0/model/" + ("adapter_model.safetensors" if "--lora" in flags else "model.safetensors")
    a, b = load_file(tmp_path / "whole" / name), load_file(tmp_path / "part" / name)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    logs = [[{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (tmp_path / d / "seed0/log.jsonl").read_text().splitlines()]
            for d in ("whole", "part")]
    assert logs[0] == logs[1]


def test_several_methods_weights_and_seeds_make_a_folder_each(toy, tmp_path, capsys):
    npo.main(["--bench", str(toy), "--out", str(tmp_path / "r"), *FAST, "--method", "NPO+RT,dpo_kl", "--retain-weight", "0.5,2", "--epochs", "1",
              "--seeds", "2", "--max-rows", "2"])
    folders = re.findall(r"^run: (.*)$", capsys.readouterr().out, re.M)
    results = [json.loads((Path(f) / "result.json").read_text()) for f in folders]
    assert [r["config"]["coefficients"] for r in results] == [dict(npo=1, rt=.5), dict(npo=1, rt=2), dict(dpo=1, rtkl=.5), dict(dpo=1, rtkl=2)]
    assert len({r["config"]["name"] for r in results}) == 4 and all([s["seed"] for s in r["seeds"]] == [0, 1] for r in results)
    probs = [s["metrics"]["prob_forget"] for s in results[0]["seeds"]]
    assert probs[0] != probs[1] and results[0]["unlearned"]["prob_forget"] == pytest.approx(np.mean(probs))


def test_all_means_every_method_and_names_are_the_papers():
    cfg = config(method="all", preset="tofu", lr=1e-5, batch=32, epochs=10, beta=.1)
    from evaluate import Bench
    asked = npo.runs_asked(cfg, Bench("mini_tofu"))
    names = [npo.method_name(m, w, cfg) for m, w in asked]
    assert len(names) == 13 and {"GA", "GA+forget-KL", "IDK+RT", "DPO+KL", "KTO+RT", "NPO+RT"} <= set(names)
    assert npo.coefficients("general", None, config(method="general", c_ga=.5, c_fgkl=2)) == dict(ga=.5, fgkl=2)
    assert npo.runs_asked(config(), Bench("tofu_forget50")) == [("npo_rt", 5.0)]          # Figure 10
    assert npo.runs_asked(config(), Bench("tofu_forget90")) == [("npo_rt", 12.0)]


# ----- bad input -----

@pytest.mark.parametrize("flags, words", [
    (("--method", "nop"), "npo_rt"), (("--method", "general"), "no term forgets"), (("--retain-weight", "1,x"), "--retain-weight"),
    (("--method", "npo", "--retain-weight", "2"), "npo_rt"), (("--lr", "0"), "--lr"), (("--batch", "-1"), "--batch"), (("--beta", "0"), "--beta"),
    (("--c-rt", "-1"), "--c-rt"), (("--max-length", "5"), "limit"), (("--adam8bit",), "torchao"), (("--adam8bit", "--lora", "2"), "--lora"),
    (("--bench", "nope"), "tofu_forget10"), (("--bench", "mini_news"), "question"), (("--target", "missing/folder/x"), "missing/folder/x"),
    (("--device", "cuda:7"), "--device")])
def test_bad_input_is_one_line_and_exit_code_2(toy, tmp_path, flags, words, capsys, monkeypatch):
    import evaluate
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else real(name, *a))
    with pytest.raises(SystemExit) as e:
        evaluate.run_main(lambda: npo.main(["--bench", str(toy), "--device", "cpu", "--epochs", "1", *flags]))
    err = capsys.readouterr().err.strip().splitlines()
    assert e.value.code == 2 and words in err[-1], err


def test_the_same_model_twice_no_retrain_model_no_idk_file(toy, tmp_path):
    from evaluate import BadInput
    with pytest.raises(BadInput, match="same model"):
        run(toy, tmp_path / "a", "--retrain", toy / "models/target")
    other = tmp_path / "bench"
    shutil.copytree(toy, other)
    shutil.rmtree(other / "models/retrain")
    (other / "idontknow.jsonl").unlink()
    with pytest.raises(BadInput, match="idontknow"):
        run(other, tmp_path / "b", "--method", "dpo", "--max-rows", 2)
    r = run(other, tmp_path / "c", "--epochs", 1, "--max-rows", 2)
    assert r["retrain"] is None and "forget_quality" not in r["unlearned"] and "retrain" in r["not_computed"]["forget_quality"]


def test_a_nan_stops_the_run_and_names_the_step(toy, tmp_path):
    from evaluate import BadInput
    with pytest.raises(BadInput, match="at step"):
        run(toy, tmp_path / "r", "--epochs", 2, "--lr", "1e30", "--max-rows", 2)


def test_a_changed_flag_on_resume_is_refused_by_name(toy, tmp_path):
    from evaluate import BadInput
    run(toy, tmp_path / "r", "--epochs", 1, "--max-rows", 2)
    with pytest.raises(BadInput, match="--beta was"):
        run(toy, tmp_path / "r", "--epochs", 1, "--max-rows", 2, "--beta", .3, "--resume")


def test_dry_run_prints_the_plan_of_llama_2_7b_without_any_model(capsys, monkeypatch):
    import evaluate
    monkeypatch.setattr(evaluate, "load_bench", lambda *a, **k: evaluate.Bench("tofu_forget10", forget_qa=[{}], retain_qa=[{}]))

    def plan(*flags):
        npo.main(["--bench", "tofu_forget10", "--dry-run", "--device", "cpu", *flags])
        return {s.rsplit(None, 2)[0].strip(): float(s.split()[-2]) for s in capsys.readouterr().out.splitlines() if s.endswith("GB")}
    full_batch = plan()
    full, small = plan("--checkpointing", "--micro-batch", "4"), plan("--adam8bit", "--checkpointing", "--micro-batch", "4")
    assert full["weights"] == pytest.approx(26.95, abs=.01) and full["AdamW states"] == pytest.approx(2 * full["gradients"], abs=.02)
    assert plan("--method", "DPO+RT")["activations"] == pytest.approx(2 * full_batch["activations"], rel=.01)
    assert full["peak"] > 108 and small["peak"] < 72 and plan("--lora", "16", "--checkpointing", "--micro-batch", "4")["peak"] < 45


def test_adam8bit_moves_bfloat16_weights_that_nearest_rounding_would_leave():
    """20 steps of size 1e-5 to one side on weights near .02, where bfloat16's ulp is 1.2e-4: on average they move by 2e-4."""
    pytest.importorskip("torchao")
    w = torch.nn.Parameter(torch.full((256, 256), .02, dtype=torch.bfloat16))
    adamw, start = npo.make_adamw([w], Config(lr=1e-5, weight_decay=0., adam8bit=True)), w.float().mean().item()
    for _ in range(20):
        w.grad = torch.ones_like(w)
        npo.set_rate(adamw, 1e-5)
        adamw.step()
    assert start - w.float().mean().item() == pytest.approx(20 * 1e-5, rel=.05)


def test_importing_a_loss_needs_torch_alone():
    import subprocess
    import sys
    code = ("import sys\nfor m in ('transformers', 'datasets', 'peft', 'scipy', 'sklearn', 'matplotlib', 'rouge_score', 'tokenizers', "
            "'safetensors', 'tqdm', 'torchao', 'evaluate'): sys.modules[m] = None\nfrom npo_unlearn import npo_loss, dpo_loss, kto_loss")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_monitor_measures_kl_of_the_start_to_the_current_model(toy):
    """Appendix B: KL(ref || current), mean over answer tokens, against F.kl_div on full logits."""
    import evaluate
    bench, tokenizer, model = (evaluate.load_bench(str(toy)), *(f(toy / "models/target") for f in (evaluate.load_tokenizer, evaluate.load_model)))
    start, student = copy.deepcopy(model), Student(model, "all")
    monitor = npo.Monitor(student, tokenizer, bench, config(max_length=64))
    assert set(monitor.divergences().values()) == {0.0}
    nudge_(student)
    total, n = 0.0, 0
    with torch.no_grad():
        for ids, s in npo.qa_sequences(bench.forget_qa, tokenizer, bench, 64):
            q, p = (m(input_ids=torch.tensor([ids])).logits[0, s - 1:-1].log_softmax(-1) for m in (model, start))
            total, n = total + F.kl_div(q, p, log_target=True, reduction="sum").item(), n + len(ids) - s
    assert monitor.divergences()["kl_forget"] == pytest.approx(total / n, rel=1e-4)


def test_amp_leaves_the_head_in_float32():
    model, rows = tiny_model(), pairs(3, 5)
    student, (b,) = Student(model, "all"), answer_batches(rows, range(3), 0, CPU)
    with torch.no_grad():
        (h, got), (_, exact) = npo.answer_logp(student, b, amp=True), npo.answer_logp(student, b)
        torch.testing.assert_close(got, F.logsigmoid(npo.token_log_odds(h.float(), student.head(), b.labels)))
    assert not torch.equal(got, exact)


# ----- what survived tests/mutants.py -----

def test_methods_are_the_papers_terms():
    """Section 3 and appendix B of arXiv:2404.05868: which terms each method has, what a retain weight weighs, the full-size settings."""
    terms = {"ga": "ga", "ga_rt": "ga rt", "ga_kl": "ga rtkl", "ga_fgkl": "ga fgkl", "idk_rt": "fg rt", "dpo": "dpo", "dpo_rt": "dpo rt",
             "dpo_kl": "dpo rtkl", "kto": "kto", "kto_rt": "kto rt", "npo": "npo", "npo_rt": "npo rt", "npo_kl": "npo rtkl"}
    for method, names in terms.items():
        c = dict.fromkeys(names.split(), 1)
        assert npo.coefficients(method, None, config()) == c
        if c.keys() & {"rt", "rtkl"}:
            assert npo.coefficients(method, 2.5, config()) == {k: 2.5 if k.startswith("rt") else 1 for k in c}
    assert npo.METHODS.keys() == terms.keys() | {"general"}
    assert npo.PRESETS["tofu"] == dict(lr=1e-5, batch=32, epochs=10, beta=.1) and Config().weight_decay == .01


class Words:
    """A tokenizer of one id a word, from 3 on; <s> is 1, </s> is 2."""
    bos_token_id, eos_token_id, chat_template, known = 1, 2, None, {}

    def __call__(self, text, **kw):
        return dict(input_ids=[self.known.setdefault(w, 3 + len(self.known)) for w in text.replace("\n", " ¶ ").split()])


def test_training_pairs_start_at_the_answer_and_idk_sentences_are_drawn_afresh():
    from evaluate import qa_bench
    rows = [dict(question=f"who {'is ' * k}it", answer=f"a{k} b c{k}") for k in range(6)]
    bench, cfg = qa_bench("x", rows, rows, {}, ["no one", "never heard of it", "ask another"], ""), config(epochs=3, max_length=64)
    d, words = npo.training_data(bench, Words(), ALL["dpo"], cfg, 0), {i: w for w, i in Words.known.items()} | {2: "</s>"}
    answers = lambda pairs: [" ".join(words[i] for i in ids[s:]) for ids, s in pairs]
    assert answers(d["forget"]) == [r["answer"] + " </s>" for r in rows]
    prompts = [ids[:s] for ids, s in d["forget"]]
    assert [ids[:s] for ids, s in d["idk"]] == 3 * prompts               # number e n + i asks row i's question
    said = np.array(answers(d["idk"])).reshape(3, 6)
    assert set(said.ravel()) == {s + " </s>" for s in bench.idk} and any((said[0] != said[e]).any() for e in (1, 2))


def test_the_loop_is_adamw_on_the_schedule(tmp_path, monkeypatch):
    """Four steps of NPO+RT with weight decay beside full logits, one row at a time, and torch's AdamW at the printed rates."""
    d, cfg, c = data(6, 7), config(lr=2e-3, weight_decay=.3, batch=3, epochs=2), ALL["npo_rt"]
    monkeypatch.setattr(npo, "Monitor", lambda *a: type("", (), dict(metrics=lambda s, r: {}, divergences=lambda s: {}))())
    start = tiny_model()
    got, steps, evolution = npo.unlearn(copy.deepcopy(start), None, None, d, c, cfg, tmp_path, 4, None, {})
    model = copy.deepcopy(start)
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=.3)
    for step, rate in enumerate((1e-3, 2e-3, 2e-3, 1e-3)):               # up over an epoch of two steps, then down to 0
        order, partner, _ = npo.epoch_plan(4, step // 2, 6, 7, 1)
        f, r = ([d[part][i] for i in rows[step % 2 * 3:][:3]] for part, rows in (("forget", order), ("retain", partner)))
        adamw.param_groups[0]["lr"] = rate
        adamw.zero_grad()
        plain_step(model, start, f, [], r, c, cfg.beta, False).backward()
        adamw.step()
    flat = lambda m: torch.cat([p.detach().flatten() for p in m.parameters()])
    assert steps == 4 and [e["step"] for e in evolution] == [0, 2, 4]
    assert (flat(got) - flat(model)).norm() < .01 * (flat(model) - flat(start)).norm()

"""Break the scripts on purpose, one small change at a time: does a test notice?

Run:  python tests/mutants.py                   all of them, two at a time (under 15 minutes)
      python tests/mutants.py --sample 10       ten, spread over the files; another ten for every commit
      python tests/mutants.py --only kto        those with this in their script, text, tests or reason
      python tests/mutants.py --check           only that each old text stands once in its file, and each test exists
Ends: a table killed / SURVIVED with seconds and the test that noticed; exit code 1 unless all were killed.

A mutant is a wrong number in a table that nobody would see: a sign, a factor 2, a shift by one, a mean for a sum. One
that survives asks for a test, not for its removal. Its tests are chosen by hand, the narrowest that should notice, and
run on the unchanged scripts first: a test that fails anyway kills nothing. A change that does not even import
("broken") or never ends ("hung") says nothing of the tests, so it counts against us, too.
"""
import argparse
import multiprocessing
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300                                                            # a mutant that takes longer hangs
# Every mutant is a fresh process, or Python would go on with the last one's scripts; importing torch and transformers anew
# for each would take most of the time, so they fork off a process that has these and none of ours.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "torch.func", "peft", "scipy.stats", "sklearn.datasets", "transformers.models.llama.modeling_llama"])

# script -> (old text, new text, tests, why). The old text stands exactly once in the script. A test is a name in
# tests/test_SCRIPT.py, or FILE::name for tests/test_FILE.py; without [parameters] all of them run.
MUTANTS = {
    "mt_unlearn": [
        ('others = logits.scatter(1, labels[:, None], float("-inf"))', "others = logits",
         "test_log_odds_and_nlul_by_hand", "log p for log odds"),
        ("return F.softplus(r) if tol", "return F.softplus(-r) if tol",
         "test_nlul_gradient_is_p_over_1_minus_p_times_that_of_log_p[0.0]", "p for 1 - p"),
        ("torch.log(tol + torch.sigmoid(-r))", "torch.log(tol + torch.sigmoid(r))",
         "test_nlul_gradient_is_p_over_1_minus_p_times_that_of_log_p[0.02]", "p for 1 - p"),
        ("return nlul(log_odds(logits, labels), tol).mean()", "return nlul(log_odds(logits, labels), tol).sum()",
         "test_nlul_gradient_is_p_over_1_minus_p_times_that_of_log_p", "sum for mean"),
        ("loss = -(2 / beta) * F.logsigmoid", "loss = -(1 / beta) * F.logsigmoid",
         "test_npo_closed_form_weight_and_limits", "factor 2"),
        ("loss = -(2 / beta) * F.logsigmoid(-beta", "loss = -2 * F.logsigmoid(-beta",
         "test_npo_closed_form_weight_and_limits", "1/beta"),
        ("F.logsigmoid(-beta * (logp - ref_logp))", "F.logsigmoid(beta * (logp - ref_logp))",
         "test_npo_closed_form_weight_and_limits", "sign"),
        ("else loss / lengths).mean()", "else loss).mean()", "test_npo_closed_form_weight_and_limits",
         "length left out"),
        ("return (logs.exp() * (logs - ref_logs)).sum(1)", "return (ref_logs.exp() * (ref_logs - logs)).sum(1)",
         "test_kl_and_qkl_against_loops_and_each_other", "KL direction"),
        ("s, d = logits.softmax(1), logits - ref_logits", "s, d = ref_logits.softmax(1), logits - ref_logits",
         "test_kl_and_qkl_against_loops_and_each_other", "wrong softmax"),
        ("(s * (d - (s * d).sum(1, keepdim=True)) ** 2).sum(1)", "(s * d ** 2).sum(1)",
         "test_kl_and_qkl_against_loops_and_each_other", "mean not taken off"),
        ("def qkl_divergence(logits, ref_logits, scale=0.5)", "def qkl_divergence(logits, ref_logits, scale=1.0)",
         "test_kl_and_qkl_against_loops_and_each_other", "factor 2"),
        ("slice(start + a, start + b)", "slice(a, b)",
         "test_head_equals_the_plain_computation_and_gradchecks[frozen-nlul]", "rows of the first chunk for all"),
        ("score(logits[a:b], ref_logits[a:b]", "score(logits[a:b], ref_logits[:b - a]",
         "test_head_equals_the_plain_computation_and_gradchecks[frozen-kl]", "reference of the first block for all"),
        (".mul_(grad[rows, None])", "",
         "test_head_equals_the_plain_computation_and_gradchecks[trained-nlul]", "chain rule"),
        ("torch.neg(others, out=logits).scatter_(1, y, 1.0)", "torch.neg(others, out=logits)",
         "test_head_equals_the_plain_computation_and_gradchecks[frozen-nlul]", "label left out"),
        ("torch.sub(s, ref_s, out=logits)", "torch.sub(ref_s, s, out=logits)",
         "test_head_equals_the_plain_computation_and_gradchecks[frozen-rkl]", "sign of gradient"),
        ("torch.mul(s, gap.sub_(kl[:, None]), out=logits)", "torch.mul(s, gap, out=logits)",
         "test_head_equals_the_plain_computation_and_gradchecks[frozen-kl]", "gradient not centred"),
        ("torch.mul(s, d * d + 2 * d - var[:, None], out=logits)", "torch.mul(s, 2 * d, out=logits)",
         "test_head_equals_the_plain_computation_and_gradchecks[frozen-qkl]", "softmax held fixed"),
        ("return g.add_(p - q.to(p.device), alpha=lam)", "return g.add_(p - q.to(p.device), alpha=-lam)",
         "test_update_rule_against_numpy", "lambda's sign"),
        ("    if damping_in_norm:\n        for g", "    if not damping_in_norm:\n        for g",
         "test_update_rule_against_numpy", "damping after the clip"),
        ("        if not damping_in_norm:\n            damp", "        if True:\n            damp",
         "test_update_rule_against_numpy", "damping twice"),
        ("l = (clip / norm).clamp(max=1.0)", "l = (clip / norm).clamp(max=1.0) ** 2", "test_update_rule_against_numpy",
         "clip squared"),
        ("l = (clip / norm).clamp(max=1.0)", "l = (clip / norm).clamp(min=1.0)", "test_update_rule_against_numpy",
         "clip the wrong way"),
        ("g.mul_(l).add_(v, alpha=mu)", "g.add_(v, alpha=mu)", "test_update_rule_against_numpy", "step not clipped"),
        ("g.mul_(l).add_(v, alpha=mu)", "g.mul_(l * (1 - mu)).add_(v, alpha=mu)", "test_update_rule_against_numpy",
         "momentum as an average"),
        ("p.sub_(v.to(p.dtype), alpha=eta)", "p.add_(v.to(p.dtype), alpha=eta)", "test_update_rule_against_numpy",
         "sign"),
        ("moved.lerp_(p, l * (eta * kappa))", "moved.lerp_(p, eta * kappa)", "test_update_rule_against_numpy",
         "EMA not clipped"),
        ("moved.lerp_(p, l * (eta * kappa))", "moved.lerp_(p, 1 - l * (eta * kappa))", "test_update_rule_against_numpy",
         "EMA complement"),
        ("moved.lerp_(p, l * (eta * kappa))", "moved.lerp_(p + eta * v, l * (eta * kappa))",
         "test_update_rule_against_numpy", "old theta for the teacher"),
        ("norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()\n    l =",
         "norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).sum()\n    l =",
         "test_update_rule_against_numpy", "norms added"),
        ("(x.view(torch.int32) + noise)", "(x.view(torch.int32) + 32768)",
         "test_stochastic_rounding_is_unbiased_and_takes_neighbours_only", "rounded to nearest"),
        ("0.1 + 0.9 * max(0, step - flat) / flat", "0.1 + 0.9 * step / flat", "test_adamw_warmup_is_the_papers",
         "warm-up"),
        ('trainable == "all" or p.ndim == 2 and id(p) not in embeddings and', 'trainable == "all" or p.ndim == 2 and',
         "test_default_trains_attention_and_mlp_matrices_only", "embeddings trained"),
        ("here, (), kwargs).last_hidden_state", "{}, (), kwargs).last_hidden_state",
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "teacher is the student"),
        ("return params[self.head_name].to(weight.device) if params and", "return weight if params and",
         "test_every_weight_trained_equals_autograd_through_full_logits[False]", "head of the student"),
        ("setattr(m, name, 0.0)", "setattr(m, name, value)",
         "test_at_step_0_the_divergence_and_its_gradient_are_exactly_zero[0-kl]", "dropout on"),
        ("ids[seq, t + 1], seq)", "ids[seq, t], seq)",
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "shift by one"),
        ("seq, t = mask[:, 1:].nonzero", "seq, t = torch.ones_like(mask[:, 1:]).nonzero",
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "padding counted"),
        ('return (F.logsigmoid(r) if cfg.loss == "l"', 'return (-F.logsigmoid(r) if cfg.loss == "l"',
         "test_gradients_equal_deep_copies_and_full_logits[l-kl-0-False]", "sign"),
        ("return len(batch.index) * npo_loss(", "return npo_loss(", "test_accumulation_and_padding_and_order_change_nothing[npo]",
         "mean of means"),
        ("ref_logp[batch.index].to", "ref_logp[:len(batch.index)].to",
         "test_gradients_equal_deep_copies_and_full_logits[npo-qkl-0-False]", "rows mixed up"),
        ("lengths = None if cfg.npo_sum else", "lengths = None if not cfg.npo_sum else",
         "test_gradients_equal_deep_copies_and_full_logits[npo-qkl-0-False]", "flag turned"),
        ('if cfg.loss == "npo" else N_forget', 'if cfg.loss != "npo" else N_forget',
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "per sequence"),
        ("(cfg.alpha * total / count).backward()", "(total / count).backward()",
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "alpha left out"),
        ("nll -= F.logsigmoid", "nll += F.logsigmoid",
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "sign"),
        ("ref_head, cfg.reverse_kl).sum() / N_reg", "ref_head, cfg.reverse_kl).sum() / len(b.rows)",
         "test_accumulation_and_padding_and_order_change_nothing[nlul]", "mean a micro-batch"),
        ("ref_head, cfg.reverse_kl)", "ref_head, not cfg.reverse_kl)",
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "KL direction"),
        ("it_head, cfg.reverse_kl)", "it_head, not cfg.reverse_kl)",
         "test_gradients_equal_deep_copies_and_full_logits[it-kl-0-False]", "KL direction"),
        ("ref = [student.hidden(b.ids, teacher)", "ref = [student.hidden(b.ids)",
         "test_gradients_equal_deep_copies_and_full_logits[nlul-kl-0-False]", "divergence from itself"),
        ("student.head(), b.labels)), b).float().cpu()", "student.head(), b.labels)), b).float().cpu() / len(b.rows)",
         "test_sequence_logp_is_the_sum_over_tokens", "mean for sum"),
        ("(p[:1] if truncate else p)", "(p if truncate else p[:1])", "test_texts_without_two_tokens_and_long_texts",
         "flag turned"),
        ("lora_alpha=2 * rank", "lora_alpha=rank", "test_adapters_have_the_scale_they_promise", "factor 2"),
        ("score <= stop_value", "score >= stop_value", "test_the_loop_stops_at_the_first_score_that_is_low_enough",
         "comparison turned"),
        ("make_batches(reg, r_picks, cfg.micro_batch, device), cfg", "make_batches(forget, f_picks, cfg.micro_batch, "
         "device), cfg", "test_the_loop_step_by_step", "forget for retain"),
        ("math.inf if cfg.full_batch else cfg.clip", "cfg.clip", "test_the_loop_step_by_step",
         "full batches clipped"),
        ("rng = np.random.default_rng([seed, step])", "rng = np.random.default_rng([seed])",
         "test_the_loop_step_by_step", "one batch for ever"),
        ("if step == escape > 0:", "if 0 < step <= escape:", "test_the_loop_step_by_step[adamw]", "reference moves"),
        ("with torch.no_grad(), amp:", "with torch.no_grad():", "test_autocast_starts_with_no_divergence", "reference in float32"),
        ("                    q.copy_(theta[n])", "                    pass", "test_the_loop_step_by_step[escape]", "teacher stays behind"),
        ("= cfg.lr * warmup(step, cfg.epoch_steps)", "= cfg.lr", "test_the_loop_step_by_step[adamw]",
         "no warm-up"),
        ("torch.optim.AdamW(theta.values(), lr=cfg.lr, betas=(0.9, 0.95)", "torch.optim.AdamW(theta.values(), lr=cfg.lr,"
         " betas=(0.95, 0.9)", "test_the_loop_step_by_step[adamw]", "betas swapped"),
        ('"muse_news": dict(MUSE, alpha=.05', '"muse_news": dict(MUSE, alpha=.5', "test_presets_are_the_papers",
         "factor 10"),
        ("lam: float = knob(0.5", "lam: float = knob(5.0", "test_presets_are_the_papers", "released for printed"),
    ],
    "npo_unlearn": [
        ("return -(2 / beta) * F.logsigmoid(-beta * (logp - ref_logp)).mean()",
         "return -(1 / beta) * F.logsigmoid(-beta * (logp - ref_logp)).mean()",
         "test_npo_gradient_weight_is_eq_5_with_its_factor_2", "factor 2"),
        ("return -(2 / beta) * F.logsigmoid(-beta * (logp - ref_logp)).mean()",
         "return -(2 / beta) * F.logsigmoid(-beta * (logp - ref_logp)).sum()",
         "test_npo_gradient_weight_is_eq_5_with_its_factor_2", "sum for mean"),
        ("F.logsigmoid(-beta * (logp - ref_logp)).mean()", "F.logsigmoid(beta * (logp - ref_logp)).mean()",
         "test_npo_gradient_weight_is_eq_5_with_its_factor_2", "sign"),
        ("return -(1 / beta) * F.logsigmoid", "return -(2 / beta) * F.logsigmoid",
         "test_dpo_by_hand_and_against_its_literal_probabilities", "factor 2"),
        ("((logp_win - ref_win) - (logp_lose - ref_lose))", "((logp_lose - ref_lose) - (logp_win - ref_win))",
         "test_dpo_by_hand_and_against_its_literal_probabilities", "winner and loser swapped"),
        ("((logp_win - ref_win) - (logp_lose - ref_lose))", "(logp_win - logp_lose)",
         "test_dpo_by_hand_and_against_its_literal_probabilities", "no reference"),
        ("torch.as_tensor(z_ref).detach() - beta", "torch.as_tensor(z_ref) - beta",
         "test_kto_is_npo_with_a_moved_centre_and_no_gradient_through_z_ref", "gradient through z_ref"),
        ("torch.as_tensor(z_ref).detach() - beta", "torch.as_tensor(z_ref).detach().clamp(min=0) - beta",
         "test_kto_is_npo_with_a_moved_centre_and_no_gradient_through_z_ref", "z_ref clipped"),
        ('"npo_rt": dict(npo=1, rt=1)', '"npo_rt": dict(npo=1, rtkl=1)', "test_methods_are_the_papers_terms",
         "KL for RT"),
        ('"ga_kl": dict(ga=1, rtkl=1)', '"ga_kl": dict(ga=1, fgkl=1)', "test_methods_are_the_papers_terms",
         "forget for retain"),
        ('"tofu": dict(lr=1e-5, batch=32, epochs=10, beta=0.1)', '"tofu": dict(lr=1e-5, batch=32, epochs=5, beta=0.1)',
         "test_methods_are_the_papers_terms", "epochs"),
        ("+ 1 >= start[b.seq]", "+ 1 > start[b.seq]",
         "test_only_answer_tokens_are_scored_and_eos_is_one_of_them_though_padding_looks_the_same",
         "first token not scored"),
        ("+ 1 >= start[b.seq]", ">= start[b.seq] - 2",
         "test_only_answer_tokens_are_scored_and_eos_is_one_of_them_though_padding_looks_the_same",
         "prompt scored"),
        ("rank[b.seq[keep]])", "b.seq[keep])", "test_rows_of_forget_and_idk_line_up_whatever_the_lengths",
         "rows mixed up"),
        ("index_add(0, batch.seq, x)", "index_add(0, batch.seq, x / len(x))",
         "test_rows_of_forget_and_idk_line_up_whatever_the_lengths", "mean for sum"),
        ('add("nll_forget", -token_logp', 'add("nll_forget", token_logp', "test_token_mean_is_the_released_ga", "sign"),
        ("if cfg.token_mean else S.sum() / B)", "if not cfg.token_mean else S.sum() / B)",
         "test_token_mean_is_the_released_ga", "flag turned"),
        ('loss += c["ga"] *', 'loss -= c["ga"] *',
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-ga]", "sign"),
        ("share = 0.0, len(b.index) / B", "share = 0.0, 1.0", "test_accumulation_over_uneven_token_counts_changes_nothing"
         "[npo]", "mean a micro-batch"),
        ('loss -= c["fgkl"] * kl', 'loss += c["fgkl"] * kl',
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-ga_fgkl]", "sign"),
        ('loss -= c["fg"] * idk_logp.sum() / N_idk', 'loss -= c["fg"] * idk_logp.sum() / B',
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-idk_rt]", "sum for mean"),
        ("dpo_loss(S_idk, S_idk_ref, S, S_ref, cfg.beta)", "dpo_loss(S, S_ref, S_idk, S_idk_ref, cfg.beta)",
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-dpo]", "winner and loser swapped"),
        ('loss = -c.get("rt", 0.0) *', 'loss = c.get("rt", 0.0) *',
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-npo_rt]", "sign"),
        ('loss = loss + c["rtkl"] * kl', 'loss = loss + kl',
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-five]", "weight left out"),
        ('{}, cfg.kl == "reverse"', '{}, cfg.kl != "reverse"',
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-npo_kl]", "KL direction"),
        ("return beta * torch.cat(R).mean()", "return torch.cat(R).mean()",
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-kto]", "beta left out"),
        ('W.detach().clone() if W.requires_grad else W.detach()', 'W.detach()',
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-npo_kl]", "reference moves"),
        ("torch.cat([self.rows[part, i][1] for i in batch.order])", "torch.cat([self.rows[part, i][1] for i in batch.index])",
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-npo_kl]", "tokens turned round"),
        ("partner[place].tolist()", "order[place].tolist()",
         "test_gradient_of_every_method_equals_full_logits_one_row_at_a_time[forward-npo_rt]", "retain partner"),
        ("place = slice(k * cfg.batch", "place = slice(0 * cfg.batch",
         "test_each_epoch_meets_every_forget_row_once_the_last_batch_is_smaller_and_partners_change",
         "first rows only"),
        ("[epoch * n + i for i in b.index]", "[i for i in b.index]",
         "test_the_reference_of_later_epochs_is_still_the_start_model", "stale idk answers"),
        ("min((step + 1) / warm,", "min(step / warm,", "test_learning_rate_rises_over_the_first_epoch_and_falls_to_zero",
         "shift by one"),
        ("(total - step) / max(1, total - warm)", "(total - step) / total",
         "test_learning_rate_rises_over_the_first_epoch_and_falls_to_zero", "slope"),
        ("rng = np.random.default_rng([seed, epoch])", "rng = np.random.default_rng([seed])",
         "test_each_epoch_meets_every_forget_row_once_the_last_batch_is_smaller_and_partners_change", "one order for ever"),
        ("self.ref.hidden(part, b), self.ref.head, True)", "self.ref.hidden(part, b), self.ref.head, False)",
         "test_monitor_measures_kl_of_the_start_to_the_current_model", "KL direction"),
        ("return [(prompt + answer, len(prompt)) for", "return [(prompt + answer, len(prompt) - 1) for",
         "test_training_pairs_start_at_the_answer_and_idk_sentences_are_drawn_afresh", "shift by one"),
        ("epoch_plan(seed, e, n, max(1", "epoch_plan(seed, 0, n, max(1",
         "test_training_pairs_start_at_the_answer_and_idk_sentences_are_drawn_afresh", "same sentences for ever"),
        ("rate = cfg.lr * learning_rate(step, per_epoch, steps)", "rate = cfg.lr",
         "test_the_loop_is_adamw_on_the_schedule", "no schedule"),
        ("lr=cfg.lr, weight_decay=cfg.weight_decay, foreach", "lr=cfg.lr, weight_decay=0.0, foreach",
         "test_the_loop_is_adamw_on_the_schedule", "no weight decay"),
        ('model = load_model(folder / "model", torch.float32', 'model = load_model(paths["target"], torch.float32',
         "test_metrics_in_result_are_those_of_the_saved_model_and_of_the_last_evaluation", "the start measured"),
        ('{"tofu_forget50": 5.0, "tofu_forget90": 12.0}', '{"tofu_forget50": 12.0, "tofu_forget90": 5.0}',
         "test_all_means_every_method_and_names_are_the_papers", "weights swapped"),
        ("c |= {k: weight for k in terms}", "c |= {k: weight for k in c}", "test_methods_are_the_papers_terms",
         "weight on every term"),
    ],
    "grng": [
        ("for _ in range(order - 2):", "for _ in range(order - 1):", "test_newton_iterations_are_the_papers_polynomials",
         "order"),
        ("return X - dc * (X @ X)", "return X + dc * (X @ X)", "test_lazy_inverse_error_is_the_square", "sign"),
        ("return v.norm(), v", "return v.norm() ** 2, v", "test_spectral_norm_against_eigenvalues", "squared"),
        ("torch.cat([x, x.new_ones(len(x), 1)], 1)", "torch.cat([x, x.new_zeros(len(x), 1)], 1)",
         "test_factors_equal_curvlinops_and_asdfghjkl", "bias left out"),
        ('U = s["iG"] @ U @ s["iA"].T', 'U = s["iG"] @ U @ s["iA"]', "test_unlearning_directions_equal_explicit_inverses",
         "factor transposed"),
        ("p[..., c:c + 1].sqrt() * (p -", "p[..., c:c + 1] * (p -", "test_exact_probes_sum_to_the_softmax_fisher",
         "weight squared"),
        ("y = (p.cumsum(-1) < u).sum(-1).clamp_max(p.shape[-1] - 1)", "y = p.argmax(-1) + 0 * (u < 0).sum(-1)",
         "test_sampled_probes_converge_to_the_exact_fisher[categorical]", "best label, not a sample"),
        ('add(sums.get("G"), e.T @ e)', 'add(sums.get("G"), e.T @ e / len(e))',
         "test_factors_equal_curvlinops_and_asdfghjkl", "mean for sum"),
        ('("G", self._cases)', '("G", sums["rows"])', "test_sequence_layers_flatten_tokens", "mean over tokens"),
        ("keep = min(1 - 1 / s[\"n\"], self.ema)", "keep = self.ema if s[\"n\"] > 1 else 0.0",
         "test_trajectory_equals_dense_reference[options1-NGD]", "no plain mean at first"),
        ("s[key].mul_(keep).add_(M, alpha=(1 - keep) / count)", "s[key].mul_(1 - keep).add_(M, alpha=keep / count)",
         "test_trajectory_equals_dense_reference[options1-NGD]", "EMA complement"),
        ("due = self.k % self.interval == 0", "due = self.k == 0", "test_trajectory_equals_dense_reference[options1-NGD]",
         "stale factors"),
        ('U = s["iG"] @ g @ s["iA"]\n', 'U = s["iG"] @ g\n', "test_directions_equal_curvlinops", "one factor left out"),
        ("math.sqrt(self.kl_clip / second)", "self.kl_clip / second", "test_trajectory_equals_dense_reference"
         "[options1-NGD]", "trust region squared"),
        ("second = first + lr * dot, second + lr * lr * dot", "second = first + lr * dot, second + lr * dot",
         "test_trajectory_equals_dense_reference[options2-NGD]", "lr squared"),
        ('root = math.sqrt(self.damping)\n        return root * layer.state["nA"]',
         'root = self.damping\n        return root * layer.state["nA"]',
         "test_ring_damping_is_relative_and_two_sqrt_rho", "damping squared"),
        ('return root * layer.state["nA"], root * layer.state["nG"]', "return root, root",
         "test_ring_damping_is_relative_and_two_sqrt_rho", "damping absolute"),
        ("return math.sqrt(self.damping), math.sqrt(self.damping)", "return self.damping, self.damping",
         "test_directions_equal_curvlinops", "damping squared"),
        ("x.detach() + self.rho * h for", "x.detach() - self.rho * h for",
         "test_reng_gradient_is_that_of_the_penalised_loss", "sign"),
        ("x.detach() + self.rho * h for", "x.detach() + self.rho / 2 * h for",
         "test_reng_gradient_is_that_of_the_penalised_loss", "factor 2"),
        ("return root * pi, root / pi", "return root / pi, root * pi", "test_directions_equal_curvlinops",
         "dampings swapped"),
        ("(G.diagonal().mean() + tiny)).sqrt()", "(G.diagonal().mean() + tiny))", "test_directions_equal_curvlinops",
         "pi squared"),
        ("self.damping *= omega", "self.damping /= omega", "test_levenberg_marquardt_trusts_a_quadratic_loss",
         "damping the wrong way"),
        ("nu * nu * second / 2 - nu * first", "nu * nu * second - nu * first",
         "test_levenberg_marquardt_trusts_a_quadratic_loss", "factor 2"),
        ("omega = (19 / 20) ** self.lm_every", "omega = 19 / 20", "test_levenberg_marquardt_trusts_a_quadratic_loss",
         "power left out"),
        ("((pe @ e.T) * (pa @ a.T)).sum()", "((pe @ pe.T) * (pa @ pa.T)).sum()",
         "test_rows_give_the_update_of_the_gradient_matrix", "U for g"),
        ("p.addmv_(pe.T, pa[:, -1], alpha=-scale)", "p.addmv_(pe.T, pa[:, 0], alpha=-scale)",
         "test_rows_give_the_update_of_the_gradient_matrix", "bias from the wrong column"),
        ("if c.layer.rows_ok and uses[c.layer] == 1]", "if c.layer.rows_ok]",
         "test_a_weight_used_twice_between_refreshes_takes_the_gradient", "the last use for all"),
        ("c.layer in once and isinstance", "isinstance",
         "test_rows_are_refused_when_they_are_not_the_whole_gradient", "part of the gradient"),
        ("abs(dc) > float(s[\"c\" + key]) / 2", "abs(dc) > float(s[\"c\" + key]) * 20",
         "test_eq11_reaches_the_inverses_between_refreshes", "stale inverse"),
        ("p.mul_(1 - group[\"lr\"] * group[\"weight_decay\"])", "p.mul_(1 - group[\"weight_decay\"])",
         "test_group_lr_and_weight_decay", "lr left out"),
        ("value=-lr / (1 - b1 ** t))", "value=-lr)", "test_unsupported_parameters_step_as_torch_would[adamw]",
         "bias correction"),
        ("torch.linalg.solve(eye + rho * R, R)", "torch.linalg.solve(eye - rho * R, R)",
         "test_regularised_noise_two_forms_and_neumann", "sign"),
        ("torch.linalg.cholesky(W @ W.T + R)", "torch.linalg.cholesky(W @ W.T + 1e-6 * torch.eye(len(R), dtype=R.dtype))",
         "test_kalman_update_equals_the_full_filter", "gain without R"),
        ("return step, P * shrink.clamp", "return step, P * shrink.sqrt().clamp",
         "test_kalman_update_equals_the_full_filter", "square root"),
        ("e = -torch.autograd.grad(loss", "e = torch.autograd.grad(loss",
         "test_kalman_step_is_the_natural_gradient[True]", "sign"),
        ('e = e * N if self.reduction == "mean" else e', 'e = e * N', "test_rkalman_object_equals_its_parts",
         "sum taken for mean"),
        ("for p in params]) / self.forgetting + self.q", "for p in params]) * self.forgetting + self.q",
         "test_rkalman_object_equals_its_parts", "forgets the wrong way"),
        ("1 if self.noise == \"ema_print\" else -1", "1", "test_noise_estimators_of_appendix_h[ema_prefit-0.07-0.13]",
         "variance counted twice"),
        ("return [N * g * g for g in gs]", "return [g * g for g in gs]", "test_sophia_against_a_loop_in_numpy",
         "factor N"),
        (".clamp_(-1, 1), alpha=-g[\"lr\"])", ", alpha=-g[\"lr\"])", "test_sophia_against_a_loop_in_numpy", "no clip"),
        ("p.add_(d * (g[\"rho\"] / norm))", "p.add_(d * g[\"rho\"])", "test_sam_is_sgd_on_the_gradient_uphill",
         "ascent not normalised"),
        ("p.add_(d * (g[\"rho\"] / norm))", "p.sub_(d * (g[\"rho\"] / norm))", "test_sam_is_sgd_on_the_gradient_uphill",
         "sign"),
        ("c = rho * float(e @ G @ e)", "c = rho * float(e @ e)", "test_theorem_gram_is_the_jacobians",
         "||e|| for ||J^T e||"),
        ("((1 - eta) * (e @ e))))", "((1 - eta) ** 2 * (e @ e))))", "test_theorem_gram_is_the_jacobians", "squared"),
        ("train=order[2 * fifth:]", "train=order[fifth:]", "test_splits_of_digits_do_not_overlap", "trains on validation"),
        ("best = max(tuned, key=lambda r: (r[\"val\"], -r[\"val_loss\"]))", "best = max(tuned, key=lambda r: r[\"test\"])",
         "test_tuning_never_looks_at_the_test_split", "tuned on test"),
        ("train(problem, name, s, 1000, steps", "train(problem, name, s, 0, steps",
         "test_tuning_never_looks_at_the_test_split", "tuned on a seed of the table"),
        ("float(np.std(values, ddof=1))", "float(np.std(values))", "test_tuning_never_looks_at_the_test_split",
         "n for n - 1"),
        ("if c[\"loss\"] <= level), None)", "if c[\"loss\"] >= level), None)", "test_tuning_never_looks_at_the_test_split",
         "comparison turned"),
        ("return pearson(outputs.argmax(-1, keepdim=True), labels)", "return accuracy(outputs, labels)",
         "test_metrics_of_the_paper_against_hand_values", "accuracy for Matthews"),
        ("(1 - TEACHER[\"mu\"]) * TEACHER[\"kappa\"] / (1 - eta", "TEACHER[\"kappa\"] / (1 - eta",
         "test_damping_of_the_theorem", "1 - mu left out"),
        ("(s[\"lG\"][:, None] * s[\"lA\"] + self.damping)", "((s[\"lG\"][:, None] + self.damping) * s[\"lA\"])",
         "test_unlearning_directions_equal_explicit_inverses", "damping in one factor"),
        ("p = r + rr / old * p", "p = r + old / rr * p", "test_unlearning_directions_equal_explicit_inverses",
         "ratio turned"),
        ("return F.softplus(log_odds(*predictions(lm, forget))).mean()",
         "return -F.softplus(-log_odds(*predictions(lm, forget))).mean()", "test_unlearning_gradient_equals_mt_unlearn",
         "L for NLUL"),
        ("float(offset.norm() / d.norm()) / ALPHA", "float(offset.norm() / d.norm())",
         "test_compare_measures_the_offset_at_the_teacher", "alpha left out"),
        ("ids[seq, t + 1]))", "ids[seq, t]))", "test_unlearning_gradient_equals_mt_unlearn", "shift by one"),
    ],
    "synthetic": [
        ("return 2 * torch.sigmoid(beta * (logp - ref_logp))", "return torch.sigmoid(beta * (logp - ref_logp))",
         "test_npo_in_probability_space", "factor 2"),
        ("return -(2 / beta) * F.logsigmoid", "return -2 * F.logsigmoid", "test_npo_in_probability_space", "1/beta"),
        ("theta = theta - eta / n * X.T @ push", "theta = theta - eta * X.T @ push",
         "test_divergence_curves_against_autograd_of_the_literal_losses", "sum for mean"),
        ("npo_weight(F.logsigmoid(sign * z), F.logsigmoid(sign * z0), beta)",
         "npo_weight(F.logsigmoid(sign * z0), F.logsigmoid(sign * z), beta)",
         "test_divergence_curves_against_autograd_of_the_literal_losses", "reference swapped"),
        ("gram = torch.eye(n, dtype=f64) + overlap / n *", "gram = torch.eye(n, dtype=f64) + overlap *",
         "test_rows_have_the_overlap_of_the_theorem", "1/n"),
        ("draw(n_forget, +1), draw(n_retain, -1)", "draw(n_forget, -1), draw(n_retain, +1)",
         "test_the_data_are_those_of_the_paper", "forget and retain swapped"),
        ("p = torch.sigmoid(s * (noise.sum(1)", "p = torch.sigmoid((noise.sum(1)", "test_the_data_are_those_of_the_paper",
         "labels agree"),
        ("weights[1, :nf], weights[1, nf:] = 0, 1 / nr", "weights[1, :nf], weights[1, nf:] = 1 / nf, 0",
         "test_retrained_never_saw_the_forget_rows", "retrained on forget rows"),
        ("        return y - p\n", "        return p - y\n",
         "test_forget_push_is_the_gradient_of_the_literal_loss[GA]", "sign"),
        ("        return p - y_idk\n", "        return p - y\n",
         "test_forget_push_is_the_gradient_of_the_literal_loss[IDK]", "the true answer"),
        ("return 2 * torch.sigmoid(beta * R) * (y - p)", "return 2 * torch.sigmoid(-beta * R) * (y - p)",
         "test_forget_push_is_the_gradient_of_the_literal_loss[NPO]", "brake turned"),
        ("return torch.sigmoid(beta * (R - R_idk)) *", "return 2 * torch.sigmoid(beta * (R - R_idk)) *",
         "test_forget_push_is_the_gradient_of_the_literal_loss[DPO]", "factor 2"),
        ("torch.sigmoid(beta * R - z_ref)", "torch.sigmoid(beta * R + z_ref)",
         "test_forget_push_is_the_gradient_of_the_literal_loss[KTO]", "sign"),
        ("z_ref = beta * R_idk.mean(1, keepdim=True)", "z_ref = R_idk.mean(1, keepdim=True)",
         "test_forget_push_is_the_gradient_of_the_literal_loss[KTO]", "beta left out"),
        ("p = torch.sigmoid(z_p)\n", "p = torch.sigmoid(z_q)\n", "test_bernoulli_kl_against_scipy_and_at_huge_logits",
         "weight of the other"),
        ("bernoulli_kl(goal_f, zf).mean(1), bernoulli_kl(goal_r, zr)", "bernoulli_kl(zf, goal_f).mean(1), bernoulli_kl(goal_r, zr)",
         "test_batched_unlearning_equals_one_at_a_time_with_autograd", "KL direction"),
        ("bernoulli_kl(start_f, zf)", "bernoulli_kl(goal_f, zf)", "test_batched_unlearning_equals_one_at_a_time_with_autograd",
         "retrained for start"),
        ("rt * (p - yr)", "rt * (yr - p)", "test_batched_unlearning_equals_one_at_a_time_with_autograd",
         "sign"),
        ("kl * p * (1 - p) * (zr - z0r)", "kl * (zr - z0r)",
         "test_batched_unlearning_equals_one_at_a_time_with_autograd", "p(1-p) left out"),
        ('"DPO": ((5e-3, 0.1), (5e-2, 5.0))', '"DPO": ((5e-2, 5.0), (5e-3, 0.1))', "test_table_1_reaches_the_right_columns",
         "alphas swapped"),
        ("median=float(v.median())", "median=float(v.mean())", "test_summary_is_mean_median_std_at_the_published_step",
         "mean for median"),
        ("[(name, m, at, int(best[i, m]))", "[(name, m, len(curves) - 1, int(best[i, m]))",
         "test_summary_is_mean_median_std_at_the_published_step", "last step"),
        ("at = min(1900, cfg.steps) // EVERY", "at = cfg.steps // EVERY", "test_the_published_step_is_1900", "last step"),
        ("A = (p.sqrt() * (J", "A = (p * (J", "test_exact_ggn_is_the_hessian_of_the_divergence", "weight squared"),
        ("fisher = torch.einsum(\"nc,ncp,ncq->pq\", z.softmax(-1),", "fisher = torch.einsum(\"nc,ncp,ncq->pq\", "
         "F.one_hot(labels, 3).double(),", "test_curvature_matrices_against_finite_differences", "empirical Fisher"),
        ("theta / (theta ** 2) ** xi\n", "theta / theta.abs() ** xi\n", "test_one_dimensional_example_by_hand",
         "square left out"),
        ("J.T @ ((p * (1 - p))[:, None] * J)", "J.T @ J", "test_logistic_ngd_is_newton_and_finds_the_maximum_likelihood",
         "weights left out"),
        ("lam = lam / 3 if rho > 0.75 else lam * 3 if", "lam = lam * 3 if rho > 0.75 else lam / 3 if",
         "test_levenberg_marquardt_and_the_undamped_step", "damping the wrong way"),
        ("beta = min(1 - 1 / k, beta_max)", "beta = beta_max", "test_ema_weights_are_those_printed", "no average at first"),
        ("ema = beta * ema + (1 - beta) * theta", "ema = (1 - beta) * ema + beta * theta",
         "test_ema_weights_are_those_printed", "EMA complement"),
        ("noise * h.sqrt() * randn", "noise * h * randn", "test_stochastic_quadratic_against_exact_moments[False]",
         "covariance squared"),
        ("return logits.logsumexp(-1) - logits.masked_fill", "return -logits.logsumexp(-1) + logits.masked_fill",
         "test_losses_and_divergences_against_literal_formulas", "sign"),
        ("(p * d ** 2).sum(-1) - (p * d).sum(-1) ** 2)", "(p * d ** 2).sum(-1))",
         "test_losses_and_divergences_against_literal_formulas", "mean not taken off"),
        ("lambda h, ref: kl_divergence(ref, h)", "lambda h, ref: kl_divergence(h, ref)",
         "test_losses_and_divergences_against_literal_formulas", "KL direction"),
        ("flatten(-4, -3).flatten(-2) / len(X)", "flatten(-4, -3).flatten(-2)",
         "test_each_divergence_has_the_stated_hessian", "sum for mean"),
        ("return lam + (1 - mu) * kappa / (1 - eta * kappa)", "return lam + (1 - mu) * kappa",
         "test_lambda_bar_is_the_papers", "denominator"),
        ("gamma = kappa * alpha * eta / (1 - kappa * eta)\n    last", "gamma = kappa * alpha * eta\n    last",
         "test_theorem_errors_against_a_loop_in_the_papers_letters", "denominator"),
        ("teacher = (1 - eta * kappa) * teacher + eta * kappa * theta\n", "teacher = (1 - eta * kappa) * teacher + eta * kappa"
         " * before\n", "test_theorem_errors_against_a_loop_in_the_papers_letters", "old theta for the teacher"),
        ("theta - step + mu * (theta - before), theta", "theta - step - mu * (theta - before), theta",
         "test_theorem_errors_against_a_loop_in_the_papers_letters", "momentum's sign"),
        ("torch.stack([slow[0], slow_before[1]])", "torch.stack([slow_before[0], slow[1]])",
         "test_theorem_errors_against_a_loop_in_the_papers_letters", "readings swapped"),
        ("[[1 - s, -mu], [s, mu]]", "[[1 - s, mu], [s, mu]]",
         "test_impulse_and_start_response_against_matrix_powers", "sign"),
        ("return k - mu * F.pad", "return k + mu * F.pad", "test_impulse_and_start_response_against_matrix_powers",
         "sign"),
        ("max(math.sqrt(mu), 1 - s_lam / (1 - mu))", "max(mu, 1 - s_lam / (1 - mu))",
         "test_counterexamples_have_the_reported_size", "square root"),
        ("dtype=torch.bool).triu(1)", "dtype=torch.bool).triu(2)", "test_transformer_is_causal_and_learned",
         "sees its label"),
        ("return H / (len(tokens) * (LENGTH - 1))", "return H / len(tokens)", "test_exact_ggn_is_the_hessian_of_the_divergence",
         "sum over tokens"),
        ("return nlul(transformer(theta, tokens), tokens[:, 1:]).mean()",
         "return nlul(transformer(theta, tokens), tokens[:, :-1]).mean()",
         "test_mean_teacher_runs_against_a_loop_of_one_run", "shift by one"),
        ("teacher = (1 - ell * eta * kappa) * teacher + ell * eta * kappa * theta",
         "teacher = (1 - eta * kappa) * teacher + eta * kappa * theta", "test_mean_teacher_runs_against_a_loop_of_one_run",
         "EMA not clipped"),
        ("v = mu * v + ell * grads", "v = mu * v + grads", "test_mean_teacher_runs_against_a_loop_of_one_run",
         "step not clipped"),
        ("for ridge in (lam_bar, lam))", "for ridge in (lam, lam_bar))",
         "test_follow_natural_gradient_on_the_exact_direction", "ridges swapped"),
        ("gamma, theta, path = run.kappa * run.alpha * eta / (1 - run.kappa * eta)",
         "gamma, theta, path = run.kappa * run.alpha * eta", "test_slow_ngd_against_explicit_inverses", "denominator"),
        ("passed = (forget_nll[:, i] >= forget_nll[-1, 0])", "passed = (forget_nll[:, i] >= forget_nll[-1, i])",
         "test_price_is_read_where_a_run_first_forgets_as_much", "each at its own level"),
    ],
    "evaluate": [
        ("score(reference, response)", "score(response, reference)", "test_rouge_l_by_hand_and_against_the_definition",
         "precision for recall"),
        ('def rouge_l(response, reference, stat="f1", stemmer=False)', 'def rouge_l(response, reference, stat="f1", '
         'stemmer=True)', "test_rouge_l_by_hand_and_against_the_definition", "stemmer on"),
        ('def rouge_l(response, reference, stat="f1"', 'def rouge_l(response, reference, stat="recall"',
         "test_rouge_l_by_hand_and_against_the_definition", "recall for F1"),
        ("return -logp.sort().values[:max", "return -logp.sort(descending=True).values[:max",
         "test_min_k_by_hand_and_against_a_loop", "the highest"),
        ("return -logp.sort()", "return logp.sort()", "test_min_k_by_hand_and_against_a_loop", "sign"),
        ("def min_k_score(logp, k=0.4)", "def min_k_score(logp, k=0.2)", "test_min_k_by_hand_and_against_a_loop", "k"),
        ('np.searchsorted(holdout, forget, "left") + np.searchsorted(holdout, forget, "right")',
         '2 * np.searchsorted(holdout, forget, "right")', "test_auc_against_all_pairs_and_sklearn", "ties count whole"),
        ("return float(twice.sum() / (2 * len(forget) * len(holdout)))",
         "return 1 - float(twice.sum() / (2 * len(forget) * len(holdout)))", "test_auc_against_all_pairs_and_sklearn",
         "AUC flipped"),
        ("return 100 * (auc - auc_retrain) / auc_retrain if", "return 100 * (auc_retrain - auc) / auc_retrain if",
         "test_privleak_gives_the_published_numbers", "sign"),
        ("(auc - auc_retrain) / auc_retrain if", "(auc - auc_retrain) / auc if", "test_privleak_gives_the_published_numbers",
         "wrong denominator"),
        ('(("news", 0.4772), ("books", 0.5393))', '(("news", 0.5393), ("books", 0.4772))',
         "test_local_copy_of_the_hub_with_its_splits", "constants swapped"),
        ("ids = ids[1:]\n    return [first]", "ids = ids[1:]\n    return [first, first]",
         "test_encode_has_one_bos_and_never_an_eos", "BOS twice"),
        ("return pieces[:-1] if len(pieces) > 1 and len(pieces[-1]) < 2", "return pieces[:-1] if len(pieces) > 1 and "
         "len(pieces[-1]) < size", "test_chunks_and_padding", "short pieces dropped"),
        ("bench.verbmem_new_tokens = min(new, longest)", "bench.verbmem_new_tokens = new",
         "test_cut_queries_are_the_texts_own_words", "generated beyond the reference"),
        ("return pad(rows, True, pad_id, side)", "return pad(rows, True, pad_id)", "test_chunks_and_padding",
         "padding side"),
        (".clamp(min=0) + P ", ".clamp(min=0) ", "test_generation_is_the_plain_loop_at_any_batch_size", "positions"),
        ("if P and max(map(len, seqs)) + room > window:", "if P and room < 0:", "test_a_sliding_window_is_counted_in_tokens_not_in_padding", "padding in the window"),
        ("attention_mask=mask.long(), position_ids", "attention_mask=torch.ones_like(mask).long(), position_ids",
         "test_generation_is_the_plain_loop_at_any_batch_size", "mask dropped"),
        ("if t not in ends:\n", "if True:\n", "test_generation_stops_at_eos_and_at_strings", "EOS in the text"),
        ("picked = logits.gather(-1, ids[:, a + 1:b + 1, None])", "picked = logits.gather(-1, ids[:, a:b, None])",
         "test_token_logps_against_a_plain_forward[4-33554432]", "shift by one"),
        ("out[row] = values[:len(seqs[row]) - 1]", "out[row] = values[:len(seqs[row])]",
         "test_token_logps_against_a_plain_forward[4-33554432]", "padding counted"),
        ("wanted.setdefault((*stem, *tail[:j]), [])", "wanted.setdefault((*stem,), [])", "test_continuations_are_scored_whole",
         "tail not read"),
        ("score=float(score(r, g))", 'score=float(rouge_l(r, g, "recall"))', "test_generated_answers_score_f1_without_stems",
         "recall for F1"),
        ("return 100 * float(np.mean([item[\"score\"] for item in items])), items\n",
         "return float(np.mean([item[\"score\"] for item in items])), items\n",
         "test_knowmem_cuts_the_answer", "per cent"),
        ('encode(tokenizer, row["gt"])[:new_tokens]', 'encode(tokenizer, row["gt"], bos=False)[:new_tokens]',
         "test_verbmem_reference_counts_the_bos", "one token more"),
        ("responses = [r.split(s)[0] for r in responses]", "responses = [r.split(s)[-1] for r in responses]",
         "test_knowmem_cuts_the_answer", "the next question"),
        ('pieces = [[encode(tokenizer, "") + c for c in', 'pieces = [[c for c in',
         "test_texts_beyond_the_context_are_read_in_chunks", "no BOS"),
        ("torch.cat([torch.zeros(0), *(next(logps) for _ in cs)])", "[next(logps) for _ in cs][0]",
         "test_texts_beyond_the_context_are_read_in_chunks", "first chunk only"),
        ("picks[i] = max(mine, key=mine.get)", "picks[i] = min(mine, key=mine.get)",
         "test_mmlu_logprob_against_one_letter_at_a_time", "the worst"),
        ("for r in dev if r[\"subject\"] == subject][:5]", "for r in dev][:5]",
         "test_mmlu_logprob_against_one_letter_at_a_time", "examples of another subject"),
        ("spread = [dev[i * len(dev) // 5] for i in range(5)]", "spread = [dev[0] for i in range(5)]",
         "test_worked_examples_are_spread_over_the_subjects", "one example five times"),
        ("return auc(a, b), sides", "return auc(b, a), sides", "test_the_reference_of_privleak_is_named", "sides swapped"),
        ('side = "forget_qa" if metric == "knowmem_f"', 'side = "forget_qa" if metric == "knowmem_r"',
         "test_each_metric_reads_its_own_side", "retain and forget swapped"),
        ("privleak(out[\"metrics\"][\"auc\"], reference)", "privleak(reference, out[\"metrics\"][\"auc\"])",
         "test_the_reference_of_privleak_is_named", "arguments swapped"),
        ("\"retrain\": list(bench.retain)}", "\"retrain\": bench.retain + bench.forget}", "test_folder_with_every_part",
         "retrain saw the forget texts"),
        ("bench.train = {\"target\": retain + forget, \"retrain\": retain}", "bench.train = {\"target\": retain + forget, "
         "\"retrain\": retain + forget}", "tofu::test_tofu_is_sliced_from_full[tofu_forget10-4]",
         "retrain saw the forget rows"),
        ("forget, retain = full[-20 * gone:], full[:20 * (N - gone)]", "forget, retain = full[:20 * gone], full[-20 * (N - "
         "gone):]", "tofu::test_tofu_is_sliced_from_full[tofu_forget10-4]", "first authors forgotten"),
        ("ids = ids + [tokenizer.eos_token_id]", "ids = ids + []", "tofu::test_one_bos_one_eos", "EOS not counted"),
        ("ids = ids[len(newline):] if ids", "ids = ids if ids", "tofu::test_tokens_do_not_merge_across_the_border",
         "a token more"),
        ("(-logp[-len(answer):].double().mean().item()", "(-logp.double().mean().item()",
         "tofu::test_answer_nll_against_a_row_at_a_time_in_float64", "prompt counted"),
        ("(-logp[-len(answer):].double().mean().item()", "(-logp[-len(answer):].double().sum().item()",
         "tofu::test_answer_nll_against_a_row_at_a_time_in_float64", "sum for mean"),
        ('def truth_ratio(nll_para, nll_pert, mean="geometric")', 'def truth_ratio(nll_para, nll_pert, mean="arithmetic")',
         "tofu::test_truth_ratio_by_hand", "arithmetic for geometric"),
        ("(-pert).logsumexp(1) - np.log(pert.shape[1])", "(-pert).logsumexp(1)", "tofu::test_truth_ratio_by_hand",
         "sum for mean"),
        ("ratio = (log_mean + para)", "ratio = (log_mean - para)", "tofu::test_truth_ratio_by_hand", "sign"),
        ("return float(ks_2samp(a, b).pvalue)", 'return float(ks_2samp(a, b, alternative="less").pvalue)',
         "tofu::test_forget_quality_against_all_permutations", "one-sided"),
        ("return float(ks_2samp(a, b).pvalue)", "return float(ks_2samp(a, b).statistic)",
         "tofu::test_forget_quality_against_all_permutations", "D for p"),
        ("return float((np.log(2) + 2 * gammaln", "return float((2 * gammaln",
         "tofu::test_log10_forget_quality_where_p_underflows", "factor 2"),
        ("return float(len(entries) / (1 / entries).sum()) if", "return float(entries.mean()) if", "tofu::test_model_utility",
         "arithmetic for harmonic"),
        ('rouge=rouge_l(response, row["answer"], "recall", stemmer=True)', 'rouge=rouge_l(response, row["answer"], "f1", '
         'stemmer=True)', "tofu::test_rouge_is_recall_of_stems", "F1 for recall"),
        ('"recall", stemmer=True)', '"recall", stemmer=False)', "tofu::test_rouge_is_recall_of_stems", "stemmer off"),
        ("nll_para=next(nlls)[0] if para else nll", "nll_para=(next(nlls)[0], nll)[1] if para else nll",
         "tofu::test_batch_size_does_not_matter_and_bf16_passes", "answer for paraphrase"),
        ('if part == "forget" else np.maximum(0, 1 - R)', 'if part != "forget" else np.maximum(0, 1 - R)',
         "tofu::test_scores_of_a_set_by_hand", "retain and forget swapped"),
        ("np.maximum(0, 1 - R)", "(1 - R)", "tofu::test_scores_of_a_set_by_hand", "not clipped"),
        ('item["prob"] = float(np.exp(-item["nll"]))', 'item["prob"] = float(np.exp(-item["nll"] * item.get("tokens", 2)))',
         "tofu::test_scores_of_a_set_by_hand", "no mean over tokens"),
        ("for part in SETS[1:] for key in", "for part in SETS for key in",
         "tofu::test_evaluation_says_what_it_cannot_compute", "forget set in the utility"),
        ('("prob", "rouge", f"truth_ratio{mean}")', '("prob", "rouge", "truth_ratio")',
         "tofu::test_utility_of_each_mean_takes_its_own_truth_ratio", "geometric for arithmetic"),
        ('train["retrain"] += known', 'train["retrain"] += known + prose["forget"]',
         "mini::test_no_training_set_holds_what_it_must_not", "retrain saw the forget texts"),
        ('bench.knowmem.update({f"{side}_qa_icl": pairs[side][:icl], f"{side}_qa": pairs[side][icl:]})',
         'bench.knowmem.update({f"{side}_qa_icl": pairs[side][:icl], f"{side}_qa": pairs[side]})',
         "mini::test_facts_are_disjoint", "worked examples asked"),
        ('best = max(seen, key=lambda e: e["metrics"]["log10_forget_quality"])', "best = seen[-1]",
         "test_the_peak_is_where_forget_quality_was_best", "the end for the peak"),
        ('unlearned={k: float(np.mean([', 'unlearned={k: float(np.max([', "test_a_result_is_the_mean_over_its_seeds",
         "the best seed"),
        ("scale = p.abs().amax(dim=1, keepdim=True)", "scale = p.abs().amax(dim=0, keepdim=True)",
         "test_rounding_is_absmax_per_output_channel", "per input channel"),
        ("top = 2 ** (int(kind[3:]) - 1) - 1", "top = 2 ** int(kind[3:]) - 1", "test_rounding_is_absmax_per_output_channel",
         "one bit more"),
        ("np.std(values, ddof=1)", "np.std(values)", "test_report_tables_and_figures", "n for n - 1"),
        ("return sum(nll * tokens for nll, tokens in nlls) / sum(tokens for _, tokens in nlls)",
         "return sum(nll for nll, _ in nlls) / len(nlls)", "mini::test_mean_loss_against_a_plain_loop", "mean of means"),
        ("others.add(id(lm.get_output_embeddings().weight))", "pass", "bad_input::test_what_the_plan_counts_is_what_is_trained",
         "head among the matrices"),
        ("prompt_tokens, new = (200, 128) if context > 330", "prompt_tokens, new = (128, 200) if context > 330",
         "test_cut_queries_are_the_texts_own_words", "lengths swapped"),
    ],
}


def node_ids(script, tests):
    """The names of a mutant's tests as pytest wants them."""
    pairs = [name.split("::") if "::" in name.split("[")[0] else (script, name) for name in tests.split()]
    return [f"tests/test_{file}.py::{name}" for file, name in pairs]


def problems(mutants):
    """What is wrong with the list itself: an old text that an edit has made rot, a test that is gone -> lines."""
    found = []
    for script, old, new, tests, why in mutants:
        count = (ROOT / f"{script}.py").read_text().count(old)
        if count != 1 or old == new:
            found.append(f"{script}.py holds {count} times, not once: {old!r} ({why})")
        for node in node_ids(script, tests):
            file, name = node.split("[")[0].split("::")
            if not (ROOT / file).exists() or not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M):
                found.append(f"{file} has no {name}, which should kill {old!r} ({why})")
    return found


def pytest_here(folder, nodes, out):
    """Run tests in a scratch copy, in a process of its own; what pytest says goes into the file `out`."""
    for stream in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(folder)
    sys.path[:] = [p for p in sys.path if Path(p).resolve() not in (ROOT, ROOT / "tests")]   # the copy's scripts, not ours
    import gc
    import pytest
    gc.freeze()                                              # or pytest's last collection walks through all of torch
    sys.exit(int(pytest.main("-x -q --assert=plain -p no:cacheprovider -p no:hypothesispytest".split() + list(nodes))))


def pytest(folder, nodes):
    """pytest_here, forked off a process that has imported the slow libraries -> (exit code or "hung", seconds, the name of
    the first test that failed)."""
    out, start = Path(folder) / "out", time.time()
    out.unlink(missing_ok=True)
    child = FORKS.Process(target=pytest_here, args=(folder, nodes, out))
    child.start()
    child.join(SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
        return "hung", time.time() - start, ""
    said = out.read_text()
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", said, re.M)
    return child.exitcode, time.time() - start, failed[1] if failed else said[-300:]


def judge(mutant, folder):
    """Change, test, change back -> (killed | SURVIVED | broken | hung, seconds, who noticed)."""
    script, old, new, tests, _ = mutant
    path = folder / f"{script}.py"
    source = path.read_text()
    try:
        path.write_text(source.replace(old, new))
        code, seconds, who = pytest(folder, node_ids(script, tests))
    finally:
        path.write_text(source)
    return {0: "SURVIVED", 1: "killed", "hung": "hung"}.get(code, "broken"), seconds, who


def choose(mutants, n, seed):
    """n of them, the files in turn."""
    rng, piles = random.Random(seed), {}
    for mutant in rng.sample(mutants, len(mutants)):
        piles.setdefault(mutant[0], []).append(mutant)
    turns = [pile[k] for k in range(len(mutants)) for pile in piles.values() if k < len(pile)]
    return turns[:n]


def commit():
    """The commit's name, so that each draws another sample; "" outside a repository."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip()


def run(mutants, jobs):
    """Judge all in `jobs` scratch copies and print the table -> the number that were not killed."""
    env = dict(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", MPLBACKEND="Agg", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as top, mock.patch.dict(os.environ, env):
        os.environ.setdefault("LETHE_CACHE", str(Path(top) / "cache"))
        os.environ.pop("GOLDEN_DIR", None)                               # who has no golden numbers must see the same
        copies = queue.SimpleQueue()
        for k in range(jobs):
            folder = Path(top) / str(k)
            shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
            for script in ROOT.glob("*.py"):
                shutil.copy(script, folder)
            copies.put(folder)
        code, seconds, who = pytest(folder, sorted({node for m in mutants for node in node_ids(m[0], m[3])}))
        print(f"unchanged scripts: exit code {code}, {seconds:.0f} s", flush=True)
        if code != 0:
            print(f"the tests fail without any mutant, so that a kill would mean nothing: {who}")
            return len(mutants)

        def work(mutant):
            folder = copies.get()
            try:
                verdict, seconds, who = judge(mutant, folder)
            finally:
                copies.put(folder)
            script, old, _, _, why = mutant
            print(f"{verdict:8s} {seconds:5.1f} s  {script:12s} {why:28s} {who if verdict == 'killed' else repr(old)}",
                  flush=True)
            return verdict
        with ThreadPoolExecutor(jobs) as pool:
            verdicts = list(pool.map(work, mutants))
    print(f"{len(mutants)} mutants: " + ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)))
    return len(mutants) - verdicts.count("killed")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sample", type=int, metavar="N", help="only N mutants, spread over the files")
    p.add_argument("--seed", default="", help="which sample (default: by the commit)")
    p.add_argument("--only", default="", metavar="WORD", help="only mutants with this word")
    p.add_argument("--check", action="store_true", help="only check the list, run nothing")
    p.add_argument("--jobs", type=int, default=2, help="scratch copies at work at the same time")
    a = p.parse_args(argv)
    mutants = [(script, *m) for script, rows in MUTANTS.items() for m in rows if a.only in " ".join((script, *m))]
    wrong = problems(mutants)
    print("\n".join(wrong + [f"{len(mutants)} mutants, {len(wrong)} problems in the list"]))
    if wrong or not mutants or a.check:
        return bool(wrong) or not mutants
    if a.sample:
        mutants = choose(mutants, a.sample, a.seed or commit())
    return run(mutants, a.jobs) > 0


if __name__ == "__main__":
    sys.exit(main())

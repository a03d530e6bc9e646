"""Speed and memory against plain loops, public code and the FLOP floor.  By hand, on a machine that does little else:

    python tests/benchmarks.py                   every section: prints a table, writes results/bench.json (half an hour)
    python tests/benchmarks.py step npo          some sections; the entries of the others stay
    python tests/benchmarks.py gpu               Llama-2-7B on one CUDA card -> results/gpu.json;  --tiny: a toy, anywhere

What is compared computes the same numbers; the tests assert it and `same` says how nearly. Ratios are of process CPU time
with one thread (`wall`: of wall-clock time), the cases in turn A B A B so that a noisy neighbour disturbs both: min, median
and max over the rounds. Peak memory is the growth of the resident set in a child process of its own. Public code (TRL,
singd, asdfghjkl) is timed where it is installed; where it is not, its row is left out and the last one kept.
"""
import argparse
import copy
import importlib.util
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import mt_unlearn as mt  # noqa: E402
import npo_unlearn as npo  # noqa: E402

CPU = torch.device("cpu")
GB = 1e9


# ===== measuring =====================================================================================================

def alternate(cases, rounds):
    """cases: name -> function. Each once to warm up, then all in turn -> name -> [(CPU seconds, wall seconds)]."""
    times = {name: [] for name in cases}
    for k in range(rounds + 1):
        for name, run in cases.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            if k:
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return times


def spread(values):
    """min, median, max -> dict, to four digits."""
    return {k: float(f"{f(values):.4g}") for k, f in (("min", np.min), ("median", np.median), ("max", np.max))}


def row(case, values, target=None, least=False, **details):
    """One line of the table. target: a number that the median must not exceed, or, with least, must reach."""
    s = spread(values)
    met = None if target is None else s["median"] >= target if least else s["median"] <= target
    shown = None if target is None else f"at {'least' if least else 'most'} {target:g}"
    return dict(case=case, **s, target=shown, met=met, **details)


def time_row(case, times, ours, theirs, target=None, faster=False, **details):
    """Ours over theirs, round by round; faster: theirs over ours, a speed-up that has a least target."""
    a, b = (theirs, ours) if faster else (ours, theirs)
    cpu, wall = ([x[k] / y[k] for x, y in zip(times[a], times[b])] for k in (0, 1))
    return row(case, cpu, target, faster, wall=spread(wall), seconds={n: spread([t[0] for t in times[n]]) for n in (ours, theirs)},
               **details)


def resident(peak=False):
    """Resident set of this process in bytes, now or at its peak (Linux)."""
    key = "VmHWM:" if peak else "VmRSS:"
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))


def growth(run):
    """Bytes by which the resident set grows above where it stood, at the peak of run()."""
    Path("/proc/self/clear_refs").write_text("5")          # the peak starts again from here
    before = resident()
    run()
    return max(1, resident(peak=True) - before)


def child(section, size, **given):
    """CHILDREN[section](size, ...) in a fresh process; a toy in this one. What a tensor leaves goes back to the system at
    once: by default glibc keeps holes, in one of our cases 2.6 times what the tensors take, in others nothing."""
    if size == "tiny":
        return CHILDREN[section](size, **given)
    given["size"] = size
    out = subprocess.run([sys.executable, __file__, "--child", section, json.dumps(given)], text=True, capture_output=True,
                         env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"})
    if out.returncode:
        raise RuntimeError(f"{section} {given}: " + out.stderr.strip()[-800:])
    return json.loads(out.stdout.splitlines()[-1])


def relative(ours, theirs):
    """Largest |difference| over the largest |value|, the worst of several tensors."""
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in zip(ours, theirs))


def gemm(n):
    """A closure that multiplies two n x n float32 matrices, and its FLOPs: the best rate of this machine, now."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    return (lambda: a @ b), 2 * n ** 3


def llama(hidden, layers, vocab, intermediate, seed=0, context=2048, init=0.02, device="cpu", dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                         num_attention_heads=max(1, hidden // 64), max_position_embeddings=context, bos_token_id=1,
                         eos_token_id=2, initializer_range=init)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def random_ids(n, length, vocab, seed):
    return np.random.default_rng(seed).integers(3, vocab, size=(n, length)).tolist()


def installed(name):
    there = importlib.util.find_spec(name) is not None
    if not there:
        print(f"  {name} is not installed: its row is left out")
    return there


# ===== step: one mean-teacher step ===================================================================================

STEP = dict(full=dict(hidden=256, layers=4, vocab=32000, intermediate=688, B=4, T=256),
            tiny=dict(hidden=32, layers=2, vocab=500, intermediate=48, B=2, T=16))
RATES = dict(eta=5e-4, kappa=10.0, mu=0.9, lam=0.5, clip=1.0)


def model_of(hidden, layers, vocab, intermediate, **_):
    return llama(hidden, layers, vocab, intermediate)


def step_case(case, size, alpha=0.1):
    """One step of NLUL + KL with a frozen head -> (run() -> (loss, divergence), list that holds the first gradients).
    case: "ours", "compiled" (ours under torch.compile) or "plain"."""
    s, model = STEP[size], model_of(**STEP[size])
    forget, reg = (random_ids(s["B"], s["T"], s["vocab"], seed) for seed in (1, 2))
    student = mt.Student(model, compiled=case == "compiled")
    if case != "plain":
        teacher, cfg = student.copy(), mt.Config(alpha=alpha, **RATES)

        def gradients():
            batches = (mt.make_batches(x, range(len(x)), 0, CPU) for x in (forget, reg))
            stats = mt.accumulate_gradients(student, teacher, *batches, cfg)
            return stats["loss"], stats["divergence"]
    else:
        copied = copy.deepcopy(model).requires_grad_(False)
        teacher = {n: p for n, p in copied.named_parameters() if n in student.theta}

        def gradients():
            return plain_gradients(model, copied, torch.tensor(forget), torch.tensor(reg), alpha)
    with torch.no_grad():                                  # or the divergence would be exactly 0
        for k, q in enumerate(teacher.values()):
            q.add_(torch.randn(q.shape, generator=torch.Generator().manual_seed(k)), alpha=1e-2)
    velocity = [torch.zeros_like(p) for p in teacher.values()]
    theta, ref, first = list(student.theta.values()), list(teacher.values()), []

    def run():
        for p in theta:
            p.grad = None
        numbers = gradients()
        if not first:
            first.extend(p.grad.clone() for p in theta)
        if case != "plain":
            mt.mean_teacher_step_(theta, ref, velocity, [p.grad for p in theta], **RATES)
        else:
            plain_update(theta, ref, velocity, **RATES)
        return torch.stack([x.detach() for x in numbers])
    return run, first


def plain_gradients(model, teacher, ids_f, ids_r, alpha):
    """What one writes first: full logits of two models, log_softmax, one backward. Gradients into .grad -> (L, D)."""
    z = model(input_ids=ids_f, use_cache=False).logits[:, :-1].flatten(0, 1)             # (N, V)
    ce = F.cross_entropy(z, ids_f[:, 1:].flatten(), reduction="none")
    loss = -torch.log1p(-torch.exp(-ce)).mean()
    logs = model(input_ids=ids_r, use_cache=False).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    with torch.no_grad():
        ref_logs = teacher(input_ids=ids_r, use_cache=False).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    div = (logs.exp() * (logs - ref_logs)).sum(-1).mean()
    (alpha * loss + div).backward()
    return loss, div


@torch.no_grad()
def plain_update(theta, teacher, velocity, eta, kappa, mu, lam, clip):
    """Algorithm 2, one line a letter."""
    g = [p.grad + lam * (p - q) for p, q in zip(theta, teacher)]
    l = min(1.0, clip / math.sqrt(sum(float((x * x).sum()) for x in g)))
    for p, q, v, x in zip(theta, teacher, velocity, g):
        v.mul_(mu).add_(x, alpha=l)
        p.sub_(v, alpha=eta)
        q.add_(p - q, alpha=l * eta * kappa)


def step_flops(hidden, layers, vocab, intermediate, B, T):
    """What nobody can avoid: 6 a weight and token for the student, 2 for the teacher; the head forward and to the hidden
    state for each of the two losses, forward for the teacher. Attention's T x T products are left out."""
    body, head, N = layers * (4 * hidden ** 2 + 3 * hidden * intermediate), hidden * vocab, B * T
    return N * ((6 * 2 + 2) * body + (2 + 3) * 2 * head)


def bench_step(size="full", rounds=5):
    compiler = size == "full" and shutil.which("g++")       # what torch.compile needs on a CPU
    cases = {case: step_case(case, size) for case in ("ours", "plain", *["compiled"] * bool(compiler))}
    numbers = {case: run() for case, (run, _) in cases.items()}
    same = relative([numbers["ours"], *cases["ours"][1]], [numbers["plain"], *cases["plain"][1]])
    square, work = gemm(2048 if size == "full" else 64)
    times = alternate({case: run for case, (run, _) in cases.items()} | dict(gemm=square), rounds)
    flops = step_flops(**STEP[size])
    floor = [flops / work * cpu for cpu, _ in times["gemm"]]
    peak = {case: child("step", size, case=case) / GB for case in ("ours", "plain")}
    compiled = [time_row("time with --compile / without", times, "compiled", "ours")] if compiler else []
    rate = dict(gflop=flops / 1e9, gflops_of_a_square_matmul=spread([work / cpu / 1e9 for cpu, _ in times["gemm"]]))
    return [time_row("time / plain loop's", times, "ours", "plain", 0.75, same=same, setting=STEP[size]),
            row("time / FLOP floor", [t[0] / f for t, f in zip(times["ours"], floor)], 1.3, **rate),
            row("plain loop's time / FLOP floor", [t[0] / f for t, f in zip(times["plain"], floor)]),
            row("peak memory / plain loop's", [peak["ours"] / peak["plain"]], 0.4, peak_gb=peak), *compiled]


def child_step(size, case):
    return growth(step_case(case, size)[0])


# ===== scale: head and loss as the tokens grow =======================================================================

SCALE = dict(full=dict(D=256, V=32000, N=(1024, 2048, 4096, 8192)), tiny=dict(D=16, V=300, N=(16, 32)))


def head_case(case, N, size):
    """NLUL and KL of N tokens from their hidden states, forward and backward -> run() -> gradient (N, D)."""
    D, V = SCALE[size]["D"], SCALE[size]["V"]
    g = torch.Generator().manual_seed(0)
    h, W = torch.randn(N, D, generator=g).requires_grad_(), torch.randn(V, D, generator=g) * .02
    labels, ref = torch.randint(V, (N,), generator=g), h.detach() + .05 * torch.randn(N, D, generator=g)

    def run():
        h.grad = None
        if case == "ours":
            total = mt.nlul(mt.token_log_odds(h, W, labels)).mean() + mt.token_kl(h, W, ref, W).mean()
        else:
            z = h @ W.T
            total = mt.nlul_loss(z, labels) + mt.kl_divergence(z, ref @ W.T).mean()
        total.backward()
        return h.grad
    return run


def bench_scale(size="full", rounds=5):
    Ns, rows = SCALE[size]["N"], []
    runs = {(case, N): head_case(case, N, size) for case in ("ours", "plain") for N in Ns}
    same = relative([runs["ours", Ns[0]]()], [runs["plain", Ns[0]]()])
    times = alternate({N: runs["ours", N] for N in Ns}, rounds)
    peak = {case: [child("scale", size, case=case, N=N) / GB for N in Ns] for case in ("ours", "plain")}
    for k, N in enumerate(Ns[1:], 1):
        more = [a[0] / b[0] / (N / Ns[0]) for a, b in zip(times[N], times[Ns[0]])]
        rows.append(row(f"time of {N} tokens / linear growth from {Ns[0]}", more, 1.1))
    vectors = [4 * SCALE[size]["D"] * (N - Ns[0]) * 4 / GB for N in Ns]      # hidden state, Jacobian and gradients
    for case, target in (("ours", 1.1), ("plain", None)):
        rows.append(row(f"head and loss: {case}, peak of {Ns[-1]} tokens, (tokens, hidden) aside / that of {Ns[0]}",
                        [(peak[case][-1] - vectors[-1]) / peak[case][0]], target, peak_gb=peak[case], tokens=Ns, same=same))
    return rows


def child_scale(size, case, N):
    return growth(head_case(case, N, size))


# ===== eval: batches and shared prefixes against one prompt at a time ================================================

EVAL = dict(full=dict(hidden=256, layers=4, intermediate=688, vocab=32000, verbmem=16, prompt=200, new=64, knowmem=16, mmlu=14, articles=120),
            tiny=dict(hidden=32, layers=2, intermediate=48, vocab=1100, verbmem=3, prompt=20, new=6, knowmem=3, mmlu=2, articles=20))


def eval_case(size):
    """An untrained model with Llama-2's vocabulary, of which it says only what the embedded tokenizer knows, and rows of each
    kind as long as MUSE's."""
    import evaluate
    s, w = EVAL[size], evaluate.Writer(5)
    texts, pairs = w.articles(s["articles"])
    dev, validation = mmlu_rows(w, s["mmlu"])
    shots = [evaluate.mmlu_text(r, True) + evaluate.mmlu_text(r, True, "logprob") for r in dev]
    tokenizer = evaluate.mini_tokenizer(texts + 20 * shots + [dict(p) for p in pairs])
    ids = evaluate.encode(tokenizer, " ".join(texts))
    prompts = [ids[1 + k * s["prompt"]:][:s["prompt"] - 1] for k in range(s["verbmem"])]
    rows = [dict(prompt=tokenizer.decode(p), gt=texts[k]) for k, p in enumerate(prompts)]
    model = llama(s["hidden"], s["layers"], s["vocab"], s["intermediate"], init=.1)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(tokenizer):] = 0     # logits of 0: never the largest
    return model, tokenizer, rows, pairs[:10], pairs[10:10 + s["knowmem"]], dev, validation, s


def mmlu_rows(w, n):
    """5 dev and 2n validation questions on each of two subjects, as long as MMLU's (a validation subject has 27 on average, a
    question 470 characters; five examples 2,070) -> (dev, validation)."""
    (dev, first, _), (_, more, _) = w.questions(n), w.questions(n)
    rows = dev + first + more
    for k, row in enumerate(rows):
        row["question"] = " ".join([w.expand("event") for _ in range(k % 8)] + [row["question"]])
    return rows[:len(dev)], rows[len(dev):]


@torch.no_grad()
def one_by_one(model, tokenizer, prompts, new):
    """transformers' generate, a prompt at a time -> texts."""
    out = []
    for p in prompts:
        ids = torch.tensor([p])
        got = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                             pad_token_id=tokenizer.pad_token_id)
        out.append(tokenizer.decode(got[0, len(p):], skip_special_tokens=True))
    return out


@torch.no_grad()
def letters_one_by_one(model, tokenizer, dev, rows, together=False):
    """Four-choice questions after five examples -> the letter likeliest as a whole continuation, a forward pass for each
    letter. together: one pass for the four, which share all but their last token."""
    import evaluate
    picks = []
    for r in rows:
        head = f"The following are multiple choice questions (with answers) about {r['subject'].replace('_', ' ')}.\n\n"
        shots = "".join(evaluate.mmlu_text(d, True, "logprob") for d in dev if d["subject"] == r["subject"])
        options = [evaluate.encode(tokenizer, head + shots + evaluate.mmlu_text(r, False, "logprob") + " " + c)
                   for c in evaluate.LETTERS[:4]]
        tails = [o[-1] for o in options]
        assert all(o[:-1] == options[0][:-1] for o in options), "a letter must be one token here"

        def last(ids):                                       # log p of what may follow ids (V,)
            return model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1].log_softmax(-1)
        one = last(options[0][:-1]) if together else None
        scores = [float((one if together else last(o[:-1]))[tail]) for o, tail in zip(options, tails)]
        picks.append(evaluate.LETTERS[int(np.argmax(scores))])
    return picks


def bench_eval(size="full", rounds=5):
    import evaluate
    model, tok, texts, icl, questions, dev, rows, s = eval_case(size)
    def encode(text):
        return evaluate.encode(tok, text)

    def answers(items):
        return [i["response"] for i in items]

    def letters():
        return answers(evaluate.mmlu(*ask, dev, rows, "logprob")[1])
    ask = (model, tok)
    shots = "".join(evaluate.qa_text(p["question"], p["answer"]) for p in icl)
    spread5 = "".join(evaluate.mmlu_text(dev[i * len(dev) // 5], True) for i in range(5))
    pairs = {                                              # name -> (target, ours, one by one), both -> list of answers
        "verbmem": (4, lambda: answers(evaluate.verbmem(*ask, texts, s["new"])[1]),
                    lambda: one_by_one(model, tok, [encode(r["prompt"]) for r in texts], s["new"])),
        "knowmem, 10-shot": (5, lambda: answers(evaluate.knowmem(*ask, questions, icl, 32)[1]),
                             lambda: [cut(t) for t in one_by_one(model, tok, [encode(shots + evaluate.qa_text(
                                 r["question"])) for r in questions], 32)]),
        "mmlu, a pass a letter": (8, letters, lambda: letters_one_by_one(model, tok, dev, rows)),
        "mmlu, a pass for the four letters": (None, letters, lambda: letters_one_by_one(model, tok, dev, rows, True)),
        "mmlu, generative": (None, lambda: answers(evaluate.mmlu(*ask, dev, rows, "generative")[1]),
                             lambda: [t.strip()[:1] for t in one_by_one(model, tok, [encode(spread5 + evaluate.mmlu_text(
                                 r, False)) for r in rows], 4)])}
    out = []
    for name, (target, ours, theirs) in pairs.items():
        same = float(np.mean([a == b for a, b in zip(ours(), theirs(), strict=True)]))
        times = alternate(dict(ours=ours, one_by_one=theirs), rounds)
        out.append(time_row(f"{name}: times faster than one prompt at a time", times, "ours", "one_by_one",
                            target, faster=True, same=same))
    return out


def cut(text):
    for stop in ("\n\n", "\nQuestion", "Question:"):
        text = text.split(stop)[0]
    return text


# ===== npo: one NPO+RT step against TRL's DPO path ===================================================================

NPO = dict(full=dict(hidden=256, layers=4, vocab=32000, intermediate=688, B=32, question=20, answer=40),
           tiny=dict(hidden=32, layers=2, vocab=500, intermediate=48, B=3, question=5, answer=7))


def npo_case(case, size, trainable="all", beta=0.1):
    """One step of NPO+RT (AdamW included) -> (run() -> loss, list that holds the first gradients). case "trl": TRL's DPO
    loss with the retain row chosen and the forget row rejected, the same tokens, reference numbers known beforehand."""
    s, model = NPO[size], model_of(**NPO[size])
    student = npo.Student(model, trainable)
    ids = {k: random_ids(s["B"], s["question"] + s["answer"], s["vocab"], 1 + (k > "m")) for k in ("forget", "retain")}
    cfg, c, first = npo.Config(beta=beta, batch=s["B"], lr=1e-5, trainable=trainable), dict(npo=1, rt=1), []
    theta = list(student.theta.values())
    adamw = torch.optim.AdamW(theta, lr=1e-5, weight_decay=.01)
    batches = {k: npo.answer_batches([(x, s["question"]) for x in v], range(len(v)), 0, CPU) for k, v in ids.items()}
    ref = npo.Reference(student)
    ref.ask("forget", batches["forget"])
    with torch.no_grad():                                  # away from the reference
        for k, p in enumerate(theta):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k)), alpha=1e-3)
    known = torch.stack([ref.rows["forget", i][0] for i in range(s["B"])])
    npo.scratch.cache_clear()                              # or what ref.ask left would not count as ours
    if case == "ours":
        def gradients():
            made = {k: npo.answer_batches([(x, s["question"]) for x in v], range(len(v)), 0, CPU) for k, v in ids.items()}
            return npo.accumulate_gradients(student, made, ref, c, cfg)["loss"]
    elif case == "plain":
        def gradients():
            return plain_npo(model, {k: torch.tensor(v) for k, v in ids.items()}, s["question"], known, beta)
    else:
        gradients = trl_gradients(model, ids, s, known, beta)

    def run():
        adamw.zero_grad(set_to_none=True)
        loss = gradients()
        if not first:
            first.extend(p.grad.clone() for p in theta)
        adamw.step()
        return loss.detach()
    return run, first


def plain_npo(model, ids, start, ref_logp, beta):
    """Full logits and F.cross_entropy of both halves."""
    ce = {}
    for k, x in ids.items():
        labels = x.clone()
        labels[:, :start] = -100
        z = model(input_ids=x, use_cache=False).logits[:, :-1]
        flat = F.cross_entropy(z.flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=-100)
        ce[k] = flat.view(len(x), -1)
    S, count = -ce["forget"].sum(1), ids["retain"].shape[0] * (ids["retain"].shape[1] - start)
    loss = -(2 / beta) * F.logsigmoid(-beta * (S - ref_logp)).mean() + ce["retain"].sum() / count
    loss.backward()
    return loss


def trl_gradients(model, ids, s, ref_logp, beta):
    """TRL's DPOTrainer on its own collated input, with our ids in the place of text -> closure."""
    import datasets
    import trl
    import evaluate
    datasets.disable_progress_bars()
    tokenizer = evaluate.mini_tokenizer(["a b"])
    rows = datasets.Dataset.from_list([dict(prompt="a", chosen=" b", rejected=" a")] * 2)
    args = trl.DPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], beta=beta, precompute_ref_log_probs=True,
                         bf16=False, gradient_checkpointing=False, disable_tqdm=True)
    trainer = trl.DPOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    x = torch.tensor(ids["retain"] + ids["forget"])
    mask = torch.ones_like(x)
    answer = (torch.arange(x.shape[1]) >= s["question"]).long().expand_as(x)

    def gradients():
        inputs = dict(input_ids=x, attention_mask=mask, completion_mask=answer, ref_chosen_logps=ref_logp,
                      ref_rejected_logps=ref_logp)
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        return loss
    return gradients


def bench_npo(size="full", rounds=5):
    rows, others = [], ["plain"] + (["trl"] if size == "full" and installed("trl") else [])
    for trainable in ("all", "matrices"):
        cases = {case: npo_case(case, size, trainable) for case in ("ours", *others)}
        numbers = {case: run() for case, (run, _) in cases.items()}
        same = relative([numbers["ours"], *cases["ours"][1]], [numbers["plain"], *cases["plain"][1]])
        times = alternate({case: run for case, (run, _) in cases.items()}, rounds)
        peak = {case: child("npo", size, case=case, trainable=trainable) / GB for case in cases}
        what = dict(all="every weight", matrices="matrices only")[trainable]
        for other in others:
            name = dict(plain="plain loop's", trl="TRL DPO's")[other]
            more = dict(same=same, setting=NPO[size]) if other == "plain" else {}
            rows += [time_row(f"{what}: time / {name}", times, "ours", other, 0.75, **more),
                     row(f"{what}: peak memory / {name}", [peak["ours"] / peak[other]], 0.4, peak_gb=peak)]
    return rows


def child_npo(size, case, trainable):
    return growth(npo_case(case, size, trainable)[0])


# ===== kfac: a step of RING against AdamW and public K-FACs ==========================================================

KFAC = dict(full=dict(sizes=(784, 512, 512, 10), B=256, steps=20), tiny=dict(sizes=(12, 8, 8, 3), B=16, steps=10))


def kfac_case(case, interval, size):
    """run(): `steps` training steps of a ReLU network on one batch -> loss."""
    s = KFAC[size]
    torch.manual_seed(0)
    parts = [m for a, b in zip(s["sizes"], s["sizes"][1:]) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    net, x = torch.nn.Sequential(*parts[:-1]), torch.randn(s["B"], s["sizes"][0])
    y = torch.randint(s["sizes"][-1], (s["B"],))
    if case == "ring":
        import grng
        opt = grng.RING(net, lr=.3, interval=interval)

        def closure():
            out = net(x)
            return out, F.cross_entropy(out, y)
        step = lambda: opt.step(closure)
    elif case == "asdl":
        import asdl
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        config = asdl.PreconditioningConfig(data_size=s["B"], damping=1e-2, preconditioner_upd_interval=interval,
                                            curvature_upd_interval=interval)
        maker = asdl.KfacGradientMaker(net, config, fisher_type=asdl.FISHER_MC)

        def step():
            opt.zero_grad(set_to_none=True)
            dummy = maker.setup_model_call(net, x)
            maker.setup_loss_call(F.cross_entropy, dummy, y)
            loss = maker.forward_and_backward()[1]
            opt.step()
            return loss
    else:
        if case == "singd":
            from singd.optim.optimizer import SINGD
            opt = SINGD(net, lr=1e-3, T=interval)
        else:
            opt = torch.optim.AdamW(net.parameters(), lr=1e-3)

        def step():
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            return loss

    def run():
        for _ in range(s["steps"]):
            loss = step()
        return float(loss.detach())
    return run


def bench_kfac(size="full", rounds=7):
    rows, public = [], [c for c in ("singd", "asdl") if size == "full" and installed(c)]
    for interval in (1, 10):
        times = alternate({c: kfac_case(c, interval, size) for c in ("ring", "adamw", *public)}, rounds)
        cpu = {c: [t[0] for t in ts] for c, ts in times.items()}
        per_step = {c: spread([t / KFAC[size]["steps"] for t in ts]) for c, ts in cpu.items()}
        rows.append(row(f"interval {interval}: time of RING / AdamW's", [a / b for a, b in zip(cpu["ring"], cpu["adamw"])],
                        2.0 if interval == 10 else None, seconds_per_step=per_step, setting=KFAC[size]))
        for c in public:
            rows.append(row(f"interval {interval}: time of {c} / AdamW's", [a / b for a, b in zip(cpu[c], cpu["adamw"])]))
            rows.append(row(f"interval {interval}: time of RING / {c}'s", [a / b for a, b in zip(cpu["ring"], cpu[c])], 1.0))
    return rows


# ===== synthetic: the whole random-feature study =====================================================================

def bench_synthetic(size="full", rounds=1):
    """Its wall-clock seconds with two threads (one run: it is long), and one pre-training by the plain loop beside ours."""
    import synthetic
    steps = 400 if size == "full" else 20
    g = synthetic.gaussian_logistic(1.0, 1000)
    X, y = torch.cat([g["Xf"], g["Xr"]])[None], torch.cat([g["yf"], g["yr"]])[None]
    w = torch.full((1, X.shape[1]), 1 / X.shape[1], dtype=torch.float64)
    plain = alternate(dict(plain=lambda: synthetic.pretrain(X, y, w, steps=steps, plain=steps)), 3)["plain"]
    rows = [row("seconds of one plain pre-training of 20,000 steps, from fewer", [t[0] * 20000 / steps for t in plain])]
    if size == "full":
        ours = alternate(dict(ours=lambda: synthetic.pretrain(X, y, w)), 3)["ours"]
        rows.append(row("seconds of one of ours", [t[0] for t in ours]))
        with tempfile.TemporaryDirectory() as out:
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "synthetic.py", "random_features", "--no-figures", "--out", out], cwd=ROOT,
                           env=dict(os.environ, OMP_NUM_THREADS="2"), check=True, capture_output=True)
            wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append(row("seconds of the whole study, 2 threads", [wall], 60.0, cpu_seconds=cpu))
    return rows


# ===== memory: the plan of --dry-run against what a step takes =======================================================

MEMORY = dict(
    full={"mt, full weights": dict(hidden=1024, layers=4, vocab=16000, intermediate=2816, batch=2, length=256, flags={}),
          "mt, LoRA 16": dict(hidden=256, layers=12, vocab=8000, intermediate=688, batch=8, length=512, flags=dict(lora=16)),
          "mt, checkpointing, bfloat16 momentum": dict(
              hidden=1024, layers=6, vocab=16000, intermediate=2816, batch=2, length=256,
              flags=dict(checkpointing=True, bf16_momentum=True, micro_batch=1)),
          "npo, every weight": dict(hidden=768, layers=4, vocab=32000, intermediate=2048, batch=4, length=128, flags={})},
    tiny={"mt, full weights": dict(hidden=32, layers=2, vocab=500, intermediate=48, batch=2, length=16, flags={}),
          "npo, every weight": dict(hidden=32, layers=2, vocab=500, intermediate=48, batch=2, length=16, flags={})})


def memory_config(name, size):
    """(Config of the script, model's numbers) of one configuration."""
    m = MEMORY[size][name]
    if name.startswith("mt"):
        cfg = mt.Config(**(dict(batch=m["batch"], micro_batch=0, context=m["length"], reg_len=m["length"], alpha=.1, lr=1e-5,
                                checkpointing=False, device="cpu") | RATES | m["flags"]))
    else:
        cfg = npo.Config(**(dict(batch=m["batch"], max_length=m["length"], lr=1e-5, beta=.1, device="cpu") | m["flags"]))
    return cfg, m


def child_memory(size, name):
    """Peak growth from the making of the model on, over a step; two of AdamW, whose states come with the first."""
    cfg, m = memory_config(name, size)
    return growth(lambda: train_steps(cfg, model_of(**m), m["vocab"], [m["length"]] * 2, 1 if name.startswith("mt") else 2))


def train_steps(cfg, model, vocab, lengths, steps, timed=None):
    """Steps of the script that cfg belongs to on random tokens, as its loop takes them; timed(k) is called before each and
    after the last. lengths: tokens of a forget text and of the other."""
    rows = [x for k, length in enumerate(lengths) for x in random_ids(cfg.batch, length, vocab, k)]
    if isinstance(cfg, mt.Config):
        student = mt.Student(model, cfg.trainable, cfg.lora, bool(cfg.checkpointing))
        teacher = student.copy("cpu" if cfg.teacher_host else None)
        dtype = torch.bfloat16 if cfg.bf16_momentum else torch.float32
        velocity = [torch.zeros_like(p, dtype=dtype) for p in student.theta.values()]
    else:
        student = npo.Student(model, cfg.trainable, cfg.lora, cfg.checkpointing)
        data = [(x, len(x) // 3) for x in rows]
        adamw, c, ref = npo.make_adamw(student.theta.values(), cfg), dict(npo=1, rt=1), npo.Reference(student)
    theta = list(student.theta.values())
    for k in range(steps):
        if timed:
            timed(k)
        for p in theta:
            p.grad = None
        picks = list(range(cfg.batch)), list(range(cfg.batch, 2 * cfg.batch))
        if isinstance(cfg, mt.Config):
            batches = (mt.make_batches(rows, i, cfg.micro_batch, student.device) for i in picks)
            mt.accumulate_gradients(student, teacher, *batches, cfg)
            generator = torch.Generator(student.device).manual_seed(k)
            mt.mean_teacher_step_(theta, list(teacher.values()), velocity, [p.grad for p in theta], **RATES,
                                  generator=generator)
        else:
            batches = {n: npo.answer_batches(data, i, cfg.micro_batch, student.device)
                       for n, i in zip(("forget", "retain"), picks)}
            ref.ask("forget", batches["forget"], cfg.autocast)
            npo.accumulate_gradients(student, batches, ref, c, cfg)
            adamw.step()
    if timed:
        timed(steps)


def planned(cfg, model_config):
    """Sum of the script's memory plan for a model given by its config."""
    import evaluate
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        (Path(folder) / "model.safetensors").touch()               # the plan reads no weights, but wants a safe folder
        return (mt if isinstance(cfg, mt.Config) else npo).memory_plan(cfg, evaluate.empty_model(folder))


def bench_memory(size="full", rounds=1):
    rows = []
    for name in MEMORY[size]:
        cfg, m = memory_config(name, size)
        with torch.device("meta"):
            plan = planned(cfg, model_of(**m).config)
        peak = child("memory", size, name=name) / GB
        rows.append(row(f"{name}: plan / measured peak", [sum(plan.values()) / peak], peak_gb=peak, plan_gb=plan))
        rows[-1].update(target="within 20 %", met=abs(rows[-1]["median"] - 1) <= .2)
    return rows

# ===== gpu: the real size on one CUDA card ===========================================================================

PEAK = {"H100": (494.7, 989.5), "H200": (494.7, 989.5), "A100": (156.0, 312.0)}       # TFLOP/s in TF32, in bfloat16
LLAMA_2_7B = dict(hidden=4096, layers=32, vocab=32000, intermediate=11008, context=4096)
TOY = dict(hidden=64, layers=2, vocab=300, intermediate=96, context=128)
FULL_SIZE = {
    "mt, full weights": mt.Config(batch=40, micro_batch=2, checkpointing=True, bf16_momentum=True, teacher_host=True),
    "mt, LoRA 16": mt.Config(batch=40, micro_batch=2, checkpointing=True, lora=16),
    "npo_rt, LoRA 16": npo.Config(batch=32, micro_batch=4, checkpointing=True, lora=16, beta=.1, lr=1e-5),
    "npo_rt, full weights": npo.Config(batch=32, micro_batch=4, checkpointing=True, adam8bit=True, beta=.1, lr=1e-5)}


def gpu_training(name, tiny, steps):
    """One configuration of FULL_SIZE: Llama-2-7B with random weights -> dict of tokens per second, utilisation, memory."""
    cuda, is_mt = torch.cuda.is_available() and not tiny, name.startswith("mt")
    cfg = copy.copy(FULL_SIZE[name])
    cfg.device, sizes, lengths = "cuda" if cuda else "cpu", LLAMA_2_7B, (1024, 512) if is_mt else (256, 256)
    if is_mt:
        cfg.alpha, cfg.lr, cfg.context, cfg.reg_len = .1, 1e-5, *lengths
    else:
        cfg.max_length = lengths[0]
    if tiny:
        sizes, lengths, cfg.batch, cfg.lora, cfg.adam8bit = TOY, (24, 12), 4, min(cfg.lora, 4), False
    if not is_mt and cfg.adam8bit and not importlib.util.find_spec("torchao"):
        return dict(not_measured="needs torchao for 8-bit AdamW")
    half = cfg.lora or not is_mt and cfg.adam8bit
    torch.set_float32_matmul_precision("high")                           # TF32, as the scripts set it
    model = llama(**sizes, device=cfg.device, dtype=torch.bfloat16 if cuda and half else torch.float32)
    N = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    plan, clock = sum(planned(cfg, model.config).values()), []

    def timed(k):
        if cuda:
            torch.cuda.synchronize()
            if k == 0:
                torch.cuda.reset_peak_memory_stats()
        clock.append(time.perf_counter())
    train_steps(cfg, model, sizes["vocab"], lengths, steps, timed)
    forget, other = (cfg.batch * (n - 1) for n in lengths)
    step = float(np.median(np.diff(clock)[1:]))                          # the first step warms up
    flops = 6 * N * (forget + other) + 2 * N * other * is_mt             # recomputation is not counted
    peak = next((tf[bool(half)] for card, tf in PEAK.items() if cuda and card in torch.cuda.get_device_name()), None)
    done = flops - 2 * N * (forget + other) * bool(cfg.lora)             # an adapter's base has no weight gradient
    return dict(seconds_per_step=step, tokens_per_second=(forget + other) / step, lengths=lengths, batch=cfg.batch,
                mfu=peak and flops / step / (peak * 1e12), mfu_of_the_work_done=peak and done / step / (peak * 1e12),
                peak_gb=torch.cuda.max_memory_allocated() / GB if cuda else None, plan_gb=plan)


def gpu_evaluation(tiny):
    """Generated tokens per second at batch 32 and at batch 1: prompts of 200 tokens, 64 new, bfloat16."""
    import evaluate
    cuda = torch.cuda.is_available() and not tiny
    sizes, prompt, new, n = (TOY, 20, 6, 4) if tiny else (LLAMA_2_7B, 200, 64, 32)
    model = llama(**sizes, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else torch.float32)
    model.generation_config.eos_token_id = -1                            # no answer ends early
    tokenizer, prompts, out = evaluate.mini_tokenizer(["a b"]), random_ids(n, prompt, 250, 0), {}
    for batch, rows in ((32, n), (1, max(2, n // 8))):
        for _ in range(2):                                               # the second counts
            start = time.perf_counter()
            evaluate.generate(model, tokenizer, prompts[:rows], new, batch)
            out[f"batch {batch}"] = rows * new / (time.perf_counter() - start)
    return dict(tokens_per_second=out, ratio=out["batch 32"] / out["batch 1"])


def bench_gpu(tiny=False, steps=4):
    """-> dict of the four trainings and the evaluation; a part that fails (memory) says why and leaves the others."""
    out = {}
    for name in [*FULL_SIZE, "evaluation"]:
        try:
            out[name] = gpu_evaluation(tiny) if name == "evaluation" else gpu_training(name, tiny, steps)
        except torch.cuda.OutOfMemoryError as e:
            out[name] = dict(not_measured=str(e).splitlines()[0])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"  {name}: {out[name]}", flush=True)
    return out


CHILDREN = dict(step=child_step, scale=child_scale, npo=child_npo, memory=child_memory)
SECTIONS = dict(step=bench_step, scale=bench_scale, eval=bench_eval, npo=bench_npo, kfac=bench_kfac,
                synthetic=bench_synthetic, memory=bench_memory)


# ===== main ==========================================================================================================

def machine():
    import transformers
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")] or ["?"]
    return dict(cpu=names[0], cores=os.cpu_count(), threads=torch.get_num_threads(), platform=platform.platform(),
                python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__,
                cuda=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                load=[round(x, 2) for x in os.getloadavg()], date=time.strftime("%Y-%m-%d"))


def show(section, entry):
    print(f"{section}: load {entry['machine']['load']}, {entry['seconds']:.0f} s")
    for r in entry["rows"]:
        verdict = "" if r["met"] is None else f"   {r['target']}: {'yes' if r['met'] else 'NO'}"
        print(f"  {r['case']:75s}{r['median']:9.3f}  ({r['min']:.3f} .. {r['max']:.3f}){verdict}")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sections", nargs="*", help=", ".join([*SECTIONS, "gpu"]))
    p.add_argument("--rounds", type=int, default=0, help="alternating rounds (default: the section's)")
    p.add_argument("--tiny", action="store_true", help="gpu: a toy, on the CPU where there is no card; prints only")
    p.add_argument("--out", default=str(ROOT / "results" / "bench.json"))
    p.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    if a.child:
        return print(json.dumps(CHILDREN[a.child[0]](**json.loads(a.child[1]))))
    unknown = set(a.sections) - {*SECTIONS, "gpu"}
    if unknown:
        p.error(f"unknown section {', '.join(sorted(unknown))}; choose out of {', '.join([*SECTIONS, 'gpu'])}")
    if "gpu" in a.sections:
        if not (a.tiny or torch.cuda.is_available()):
            print("gpu: no CUDA card here, nothing measured; --tiny runs the same lines on a toy")
            return
        result = bench_gpu(a.tiny)
        if not a.tiny:
            (ROOT / "results" / "gpu.json").write_text(json.dumps(dict(machine=machine(), rows=result), indent=1) + "\n")
        a.sections.remove("gpu")
        if not a.sections:
            return
    for section in a.sections or SECTIONS:
        start = time.perf_counter()
        rows = SECTIONS[section](**({"rounds": a.rounds} if a.rounds else {}))
        out = Path(a.out)
        known = json.loads(out.read_text()) if out.exists() else {}
        kept = {r["case"]: r for r in known.get(section, {}).get("rows", ())}
        fresh = {r["case"] for r in rows}
        rows += [dict(r, kept=True) for case, r in kept.items() if case not in fresh and any(n in case for n in PUBLIC)]
        known[section] = dict(machine=machine(), seconds=time.perf_counter() - start, rows=rows)
        out.write_text(json.dumps(known, indent=1) + "\n")
        show(section, known[section])


PUBLIC = ("TRL", "singd", "asdl")                          # rows of packages that are not everywhere


if __name__ == "__main__":
    main()

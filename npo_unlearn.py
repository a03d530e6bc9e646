"""Negative preference optimization and its rivals (Zhang et al., arXiv:2404.05868), measured by TOFU.

Run:  python npo_unlearn.py                                    NPO+RT on the embedded benchmark mini_tofu, on a laptop
      python npo_unlearn.py --method all --seeds 3             every method of the paper
      python npo_unlearn.py --bench tofu_forget10              full size: Llama-2-7B-chat, one CUDA GPU (see --dry-run)
      python npo_unlearn.py --bench FOLDER --target MODEL      your own: forget.jsonl, retain.jsonl of question, answer
Ends: RUN/seed0/model is the unlearned model (any tool loads it), RUN/result.json and table.md hold target, retrain and
      unlearned metrics of the SAVED model, log.jsonl every step. The last line names the folder.

The method in one paragraph. Gradient ascent (GA) pushes the log-likelihood of the forget answers down at a constant
rate for ever, and the model collapses. NPO is DPO with the preferred answer left out: its gradient is GA's times
W = 2 p^beta / (p^beta + p_ref^beta), which is 1 at the start and goes out as an answer gets less likely than the start
model found it. The brake sits in the loss, per answer; beta -> 0 takes it off and gives GA back (error beta R^2 / 4).

Shapes: B sequences, T tokens, V vocabulary, D hidden size, N answer tokens of a batch.

Differs from the paper or its released code (each by our reading, or reachable by the flag named):
- a sequence's log-likelihood is the SUM over its answer tokens, EOS included, in GA as in NPO, as printed; the released
  GA takes the token mean, about 40 times weaker beside a retain term:               --token-mean
- KL is KL(current || start) as printed; the released code turns it round:           --kl reverse
- CE and KL are means over the answer tokens; the released KL counts prompts and padding too
- IDK+RT adds two token means; the released code pools both answers into one
- DPO has the factor 1/beta of Eq. 2 (released: 2/beta); KTO's z_ref is beta times the batch mean of R(question, idk
  answer), Eq. 19 as estimated (released: not times beta). It may be negative; no gradient flows through it
- the retain partner and the idk sentence are drawn afresh each epoch; the released sampler gives each forget row the
  same ones for ever
- no step is spent at rate 0: the rise is taken at a step's end, the fall at its start
"""
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F


# --- copy: knob ---
def knob(default, help, **kw):
    """A Config field whose text is its line in --help."""
    return field(default=default, metadata=dict(help=help, **kw))
# --- end copy ---


# What each method minimises: coefficients of the five terms of Eq. 17 and of the three preference losses. fgkl counts
# NEGATIVE: Eq. 17 subtracts it, so that divergence on the forget set grows.
METHODS = {
    "ga": dict(ga=1), "ga_rt": dict(ga=1, rt=1), "ga_kl": dict(ga=1, rtkl=1), "ga_fgkl": dict(ga=1, fgkl=1),
    "idk_rt": dict(fg=1, rt=1),
    "dpo": dict(dpo=1), "dpo_rt": dict(dpo=1, rt=1), "dpo_kl": dict(dpo=1, rtkl=1),
    "kto": dict(kto=1), "kto_rt": dict(kto=1, rt=1),
    "npo": dict(npo=1), "npo_rt": dict(npo=1, rt=1), "npo_kl": dict(npo=1, rtkl=1),
    "general": {},                                       # Eq. 17 by hand: --c-ga, --c-fg, --c-rt, --c-fgkl, --c-rtkl
}


@dataclass
class Config:
    bench: str = knob("mini_tofu", "mini_tofu, tofu_forget01/05/10/20/30/50/90, or a folder")
    data_dir: str = knob("", "local copy of the hub's locuslab/TOFU")
    max_authors: int = knob(None, "keep this many of TOFU's 200 authors")
    target: str = knob("", "model that memorised: folder or hub id (default: the benchmark's)")
    retrain: str = knob("", "model that never saw the forget rows; without it there is no forget quality")
    base: str = knob("", "model the benchmark's own models are made from")
    tokenizer: str = knob("", "folder or hub id, where the model folder has none")
    method: str = knob("npo_rt", "all, or some of: " + " ".join(METHODS) + " (commas between)")
    beta: float = knob(None, "inverse temperature of NPO, DPO and KTO [paper .1; mini: ours]")
    retain_weight: str = knob("", "weight of the retain term, RT or KL; several, commas between: one run each "
                              "[paper 1; 5 on forget50, 12 on forget90]")
    c_ga: float = knob(None, "coefficient of gradient ascent in Eq. 17; these five override the method's own")
    c_fg: float = knob(None, "of CE on \"I don't know\" answers")
    c_rt: float = knob(None, "of CE on retain answers")
    c_fgkl: float = knob(None, "of the divergence on forget answers, which is SUBTRACTED")
    c_rtkl: float = knob(None, "of the divergence on retain answers")
    kl: str = knob("forward", "KL(current || start) [paper]; reverse [released]", choices=("forward", "reverse"))
    token_mean: bool = knob(False, "GA as the token mean [released]")
    preset: str = knob("", "where unset numbers come from (default: by benchmark; a folder by the model's size)",
                       choices=("", "tofu", "mini"))
    lr: float = knob(None, "peak learning rate of AdamW [paper 1e-5; mini: ours]")
    weight_decay: float = knob(0.01, "of AdamW [paper]")
    batch: int = knob(None, "forget rows, and as many retain rows, per step [paper 32; mini: ours]")
    micro_batch: int = knob(0, "rows per forward pass; gradients accumulate (0: all)")
    epochs: int = knob(None, "passes over the forget set; warm-up in the first, then linear to 0 [paper 10]")
    max_length: int = knob(500, "tokens of question and answer in training [released]")
    eval_every: int = knob(0, "steps between evaluations (0: an epoch) [paper: 1 on forget01]")
    eval_rows: int = knob(None, "rows of each set in the evaluations along the run (default: as at the end)")
    trainable: str = knob("all", "every weight [released], or attention and MLP matrices", choices=("all", "matrices"))
    lora: int = knob(0, "rank of LoRA adapters on all linear layers (0: full weights)")
    adam8bit: bool = knob(False, "bfloat16 weights with stochastic rounding and 8-bit AdamW states (needs torchao)")
    checkpointing: bool = knob(False, "gradient checkpointing: recompute activations, less memory")
    compile: bool = knob(False, "torch.compile of the model in training; what a step gains on a CPU: README, speed")
    autocast: bool = knob(False, "bfloat16 matmuls [released trains in bfloat16]")
    survive: bool = knob(False, "measure again after rounding the weights to bf16, int8 and int4")
    examples: int = knob(0, "print this many answers of each set by target, unlearned and retrain (Figure 7)")
    seeds: int = knob(1, "repeat with seeds seed, seed+1, ...; a seed changes the sampling, not data and models")
    seed: int = knob(0, "first seed")
    max_rows: int = knob(None, "measure only the first rows of each evaluation set [released 300]")
    eval_batch: int = knob(32, "prompts per generation batch; does not change the scores")
    device: str = knob("auto", "cpu, cuda, mps; auto takes the best there is")
    out: str = knob("", "run folder (default: runs/BENCH-METHOD-N)")
    resume: bool = knob(False, "go on with the newest run of these flags (or --out); on a CPU to the same bits")
    dry_run: bool = knob(False, "print the memory plan and exit")


# Numbers that depend on the benchmark. beta meets the SUM over an answer's tokens, so the brake works from |R| > 1/beta
# on: at beta .1 that is .25 nats a token of TOFU's 40, but 1.2 of mini_tofu's 8, a ruin. There we take more.
PRESETS = {
    "tofu": dict(lr=1e-5, batch=32, epochs=10, beta=0.1),
    "mini": dict(lr=1.5e-3, batch=32, epochs=10, beta=1.0),  # [ours]
}
FIGURE_10 = {"tofu_forget50": 5.0, "tofu_forget90": 12.0}  # retain weights [paper]: large forget sets need more


# ===== the losses ====================================================================================================
# R = logp - ref_logp is a sequence's log-ratio to the start model: 0 before the first step, negative once forgotten.

def npo_loss(logp, ref_logp, beta):
    """Negative preference optimization, Eq. 3 of arXiv:2404.05868.  logp, ref_logp (B,) summed over tokens -> scalar.

    -(2/beta) mean log sigma(-beta R). Its gradient in logp is W/B, W = 2 sigma(beta R) (Eq. 5): that of GA at R = 0,
    where the loss is (2/beta) ln 2, and gone as R -> -inf.
    """
    return -(2 / beta) * F.logsigmoid(-beta * (logp - ref_logp)).mean()


def dpo_loss(logp_win, ref_win, logp_lose, ref_lose, beta):
    """Direct preference optimization, Eq. 2: the idk answer wins over the forget answer.  Four (B,) -> scalar.

    The pair shares ONE sigmoid: the loss is low as soon as the idk answer has gained enough, whether or not the forget
    answer lost anything. NPO leaves the winner out.
    """
    return -(1 / beta) * F.logsigmoid(beta * ((logp_win - ref_win) - (logp_lose - ref_lose))).mean()


def kto_loss(logp, ref_logp, z_ref, beta):
    """Kahneman-Tversky optimization of undesirable answers, Eq. 18.  logp, ref_logp (B,), z_ref scalar -> scalar.

    -(2/beta) mean log sigma(z_ref - beta R): NPO with the sigmoid's centre moved by z_ref, which carries no gradient.
    z_ref estimates beta times a divergence; from a batch it may be negative, and we leave it so.
    """
    return -(2 / beta) * F.logsigmoid(torch.as_tensor(z_ref).detach() - beta * (logp - ref_logp)).mean()


# All but the divergences are functions of ONE number per token, its log-odds r = log p/(1-p), by log p = logsigmoid(r).

# --- copy: head ---
# The head and the loss never hold a (B, T, V) tensor. A 7B model's logits for 40 sequences of 1024 tokens take 5 GB in
# float32, and autograd keeps several copies. But each loss is a function of one scalar per token, and a scalar's
# gradient with respect to the hidden state is ONE vector of D numbers. So we walk over chunks of tokens, compute the
# scalar and that vector at once, and forget the logits: backward is a multiplication of rows.

class HeadFunction(torch.autograd.Function):
    """score of each token from its logits hidden @ weight^T, and its gradient, without keeping logits.

    hidden (N, D), weight (V, D), ref: None or (ref_hidden (N, D'), ref_weight (V, D')) -> values (N,).
    score(logits (n, V), ref_logits (n, V), rows slice) -> value (n,); it leaves d value / d logits in the place of
    logits. The matmuls run in float32 at least (on a card in TF32), on `chunk` rows at once, score on `block`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ref, score, chunk, block):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        W = weight.to(dtype)
        values, jacobian = hidden.new_empty(len(hidden), dtype=dtype), torch.empty_like(hidden, dtype=dtype)
        for rows, _, value, slope in HeadFunction.walk(hidden, W, ref, score, chunk, block):
            values[rows] = value
            torch.mm(slope, W, out=jacobian[rows])                       # (n, D): all that backward needs
        ctx.save_for_backward(hidden, weight, jacobian)
        ctx.rest = ref, score, chunk, block
        return values

    @staticmethod
    def walk(hidden, W, ref, score, chunk, block):
        """Chunk by chunk -> rows, h (n, D), value (n,), slope (n, V). A matmul wants many rows at once; the passes of
        score want few, that fit into a CPU's cache, or each would fetch V numbers a row from memory again."""
        ref_W = ref[1].to(W.dtype) if ref else None
        room = scratch(chunk, len(W), W.dtype, W.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows].to(W.dtype)
            logits, ref_logits = room[:, :len(h)]
            torch.mm(h, W.T, out=logits)
            if ref:
                torch.mm(ref[0][rows].to(W.dtype), ref_W.T, out=ref_logits)
            parts = [(a, min(a + block, len(h))) for a in range(0, len(h), block)]
            value = [score(logits[a:b], ref_logits[a:b], slice(start + a, start + b)) for a, b in parts]
            yield rows, h, torch.cat(value), logits                      # score has left the slope in their place

    @staticmethod
    def backward(ctx, grad):                                             # (N,)
        hidden, weight, jacobian = ctx.saved_tensors
        grad_hidden = (grad[:, None] * jacobian).to(hidden.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, *[None] * 5
        W, grad_weight = weight.to(jacobian.dtype), torch.zeros_like(weight, dtype=jacobian.dtype)
        for rows, h, _, slope in HeadFunction.walk(hidden, W, *ctx.rest):    # a trained head: rebuild its logits
            grad_weight.addmm_(slope.mul_(grad[rows, None]).T, h)
        return grad_hidden, grad_weight.to(weight.dtype), *[None] * 4


@lru_cache(maxsize=2)
def scratch(n, V, dtype, device):
    """Room for the logits of n tokens and their reference's (2, n, V), the same in every call, which writes it over:
    to a CPU fresh memory costs more than the softmax that goes into it. So one thread at a time."""
    with torch.inference_mode(False):                                    # usable in training whoever asks first
        return torch.empty(2, n, V, dtype=dtype, device=device)


def head_scores(hidden, weight, score, ref=None):
    """HeadFunction in chunks of 64 MB of logits and blocks of 2 MB, on a GPU of 256 and 64 MB."""
    chunk, block = (max(1, numbers // len(weight)) for numbers in
                    ((2 ** 24, 2 ** 19) if hidden.device.type == "cpu" else (2 ** 26, 2 ** 24)))
    return HeadFunction.apply(hidden, weight, ref, score, chunk, block)


def logsumexp(logits, s):
    """From s = softmax(logits), at hand already: its largest entry is 1 / sum exp(logits - max).  (n, V) -> (n, 1)."""
    return logits.amax(1, keepdim=True) - s.amax(1, keepdim=True).log()


def token_log_odds(hidden, weight, labels):
    """log_odds(hidden @ weight^T, labels) without the logits.  hidden (N, D), weight (V, D), labels (N,) -> (N,)."""
    def score(logits, _, rows):
        y = labels[rows, None]
        z_y = logits.gather(1, y)
        others = logits.scatter_(1, y, float("-inf")).softmax(1)                         # softmax without y
        value = z_y - logsumexp(logits, others)
        torch.neg(others, out=logits).scatter_(1, y, 1.0)                                # slope e_y - others
        return value.squeeze(1)
    return head_scores(hidden, weight, score)


def token_kl(hidden, weight, ref_hidden, ref_weight, reverse=False):
    """KL(student || reference), or reversed, a token, without logits.  (N, D), (V, D), (N, D'), (V, D') -> (N,)."""
    def score(logits, ref, rows):
        s, ref_s = logits.softmax(1), ref.softmax(1)
        shift = logsumexp(logits, s) - logsumexp(ref, ref_s)
        gap = (logits - ref).sub_(shift)                                                 # log s - log ref_s
        if reverse:
            torch.sub(s, ref_s, out=logits)
            return -(ref_s * gap).sum(1)
        kl = (s * gap).sum(1)
        torch.mul(s, gap.sub_(kl[:, None]), out=logits)
        return kl
    return head_scores(hidden, weight, score, (ref_hidden, ref_weight))
# --- end copy ---


# ===== one model, its reference, its batches =========================================================================

# --- copy: parameter sets ---
class Student:
    """A causal language model taken apart: backbone, head, and theta, the dict of trained parameters (names of lm)."""

    def __init__(self, model, trainable="matrices", lora=0, checkpointing=False, compiled=False):
        from evaluate import BadInput
        self.model = add_lora(model, lora) if lora else model
        self.lm = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self.backbone, self.prefix = self.lm.base_model, self.lm.base_model_prefix + "."
        if not lora:
            embeddings = {id(p) for m in self.lm.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
            head = id(self.lm.get_output_embeddings().weight)
            for p in self.lm.parameters():
                p.requires_grad_(trainable == "all" or p.ndim == 2 and id(p) not in embeddings and id(p) != head)
        self.theta = {n: p for n, p in self.lm.named_parameters() if p.requires_grad}
        self.head_name = next(n for n, p in self.lm.named_parameters() if p is self.lm.get_output_embeddings().weight)
        no_dropout_(self.model)
        if checkpointing:  # transformers checkpoints only in training mode; dropout is off all the same, see above
            self.model.train()
            self.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        # Compiled for training alone; generation keeps the plain module. Parameters are inputs of the compiled graph,
        # so functional_call may swap them; dynamic, or each length of a batch would compile again.
        self.forward = torch.compile(self.backbone, dynamic=True) if compiled else self.backbone
        self.inner = "_orig_mod." if compiled else ""
        probe = torch.arange(4, device=self.device)[None] % self.lm.config.vocab_size
        try:
            self.hidden(probe)
        except Exception as e:
            if compiled:
                raise BadInput(f"--compile: torch cannot compile this model here ({type(e).__name__}; it needs a C++ "
                               "compiler): leave it out") from e
            raise
        with torch.no_grad():  # soft-capped or scaled logits are not hidden @ W^T: ask the model itself
            plain = self.lm(input_ids=probe, use_cache=False).logits.float()
            ours = self.hidden(probe).float() @ self.head().float().T
        capped = getattr(self.lm.config, "final_logit_softcapping", None)    # small logits would pass the comparison
        if capped or (plain - ours).abs().max() > 0.02 * plain.abs().max():
            raise BadInput(f"{type(self.lm).__name__}: its logits are not hidden @ W^T (soft-capping, scale or bias); "
                           "use a model with a plain linear head")

    @property
    def device(self):
        return next(iter(self.theta.values())).device

    def copy(self, device=None):
        """A frozen copy of theta, in host memory if device='cpu': beside a card pinned, which is far faster."""
        pin = device == "cpu" and self.device.type == "cuda"
        copies = ((n, p.detach().to(device or p.device, copy=True)) for n, p in self.theta.items())
        return {n: p.pin_memory() if pin else p for n, p in copies}

    def hidden(self, ids, params=None):
        """Last hidden states (B, T, D) of ids (B, T), under theta or, without a graph, under another set `params`.

        No attention mask: batches are padded on the right and a causal model never looks there, so real tokens are
        untouched and attention keeps its fast causal kernel.
        """
        if params is None:
            return self.forward(input_ids=ids, use_cache=False).last_hidden_state
        here = {self.inner + n[len(self.prefix):]: p.to(self.device, non_blocking=True) for n, p in params.items()
                if n.startswith(self.prefix)}
        with torch.no_grad():
            kwargs = dict(input_ids=ids, use_cache=False)
            return torch.func.functional_call(self.forward, here, (), kwargs).last_hidden_state

    def head(self, params=None):
        """The output matrix (V, D) that belongs to theta or to `params`."""
        weight = self.lm.get_output_embeddings().weight
        return params[self.head_name].to(weight.device) if params and self.head_name in params else weight


def add_lora(model, rank):
    """Float32 LoRA adapters (alpha = 2 rank) on all linear layers; a model that carries an adapter goes on with it."""
    from peft import LoraConfig, get_peft_model
    if not hasattr(model, "get_base_model"):
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    for n, p in model.named_parameters():
        p.requires_grad_("lora_" in n)
        if p.requires_grad:
            p.data = p.data.float()
    return model


def no_dropout_(model):
    """Dropout off for good: with it log-ratios and divergences are noise at step 0, where they must be exactly 0."""
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
        for name, value in vars(m).items():
            if "dropout" in name and isinstance(value, float):
                setattr(m, name, 0.0)
    model.eval()


@dataclass
class Batch:
    """Sequences padded on the right, and where their predicted tokens are; all index work is done before the device."""
    ids: torch.Tensor      # (B, T)
    rows: torch.Tensor     # (N,) positions in the flattened (B*T) hidden states that predict a real token
    labels: torch.Tensor   # (N,) the token each predicts
    seq: torch.Tensor      # (N,) its sequence, 0..B-1
    index: list            # (B,) the row of the data that each number of seq stands for
    order: list            # (B,) the rows of the data as they lie in ids


def per_sequence(x, batch):
    """Sums over the tokens of each sequence.  (N,) -> (B,); a sequence without predicted tokens sums to 0."""
    return torch.zeros(len(batch.index), device=x.device, dtype=x.dtype).index_add(0, batch.seq, x)


def to_device(tensors, device):
    """To a card from pinned memory, so that no step waits for the copy."""
    if device.type == "cuda":
        return [x.pin_memory().to(device, non_blocking=True) for x in tensors]
    return [x.to(device) for x in tensors]


def make_batches(sequences, picks, micro_batch, device):
    """picks (indices into sequences) -> list of Batch, similar lengths together so that padding is little."""
    from evaluate import pad_batch
    picks = sorted(picks, key=lambda i: len(sequences[i]))
    batches = []
    for k in range(0, len(picks), micro_batch or len(picks)):
        index = picks[k:k + (micro_batch or len(picks))]
        ids, mask = pad_batch([sequences[i] for i in index])
        seq, t = mask[:, 1:].nonzero(as_tuple=True)                      # token t+1 is predicted at position t
        tensors = (ids, seq * ids.shape[1] + t, ids[seq, t + 1], seq)
        batches.append(Batch(*to_device(tensors, device), index, index))
    return batches
# --- end copy ---


# ===== the gradient of one step ======================================================================================

def answer_batches(pairs, picks, micro_batch, device):
    """make_batches cut down to answer tokens: the prompt is read, never scored.  pairs: lists of (ids, answer start).

    `seq` and `index` are put in ascending row order, undoing the sort by length, so that per-sequence numbers of the
    forget answers and of the idk answers to the same questions line up.
    """
    batches = []
    for b in make_batches({i: pairs[i][0] for i in picks}, picks, micro_batch, torch.device("cpu")):
        start = torch.tensor([pairs[i][1] for i in b.index])             # (B,)
        keep = b.rows % b.ids.shape[1] + 1 >= start[b.seq]               # position t predicts token t+1
        rank = torch.tensor(b.index).argsort(stable=True).argsort()
        tensors = (b.ids, b.rows[keep], b.labels[keep], rank[b.seq[keep]])
        batches.append(Batch(*to_device(tensors, device), sorted(b.index), b.index))
    return batches


def answer_logp(student, batch, amp=False):
    """Hidden states (N, D) and log p (N,) of a batch's answer tokens. amp: bfloat16 matmuls, but for the head's."""
    with torch.autocast(student.device.type, torch.bfloat16, enabled=amp):
        h = student.hidden(batch.ids).flatten(0, 1)[batch.rows]
    return h, F.logsigmoid(token_log_odds(h, student.head(), batch.labels))


def accumulate_gradients(student, batches, ref, c, cfg):
    """Gradient of the step's loss into .grad -> 0-dim tensors: nll_forget, loss, divergence, as far as computed.

    batches: lists of Batch under forget, idk (micro-batch k answers forget[k]'s questions) and retain; ref: Reference;
    c: coefficients, see METHODS. Token means are over all answer tokens of the step, sequence means over all its
    sequences, however it is cut into micro-batches: so 1 x 8 equals 8 x 1.
    """
    forget, idk, retain = (batches.get(k, []) for k in ("forget", "idk", "retain"))
    N_forget, N_idk, N_retain = (sum(len(b.rows) for b in x) for x in (forget, idk, retain))
    B, stats, reverse = sum(len(b.index) for b in forget), {}, cfg.kl == "reverse"

    def add(key, value):
        stats[key] = stats.get(key, 0) + value.detach()
    z_ref = kto_reference(student, idk, ref, cfg.beta, cfg.autocast) if "kto" in c else None
    for k, b in enumerate(forget):                # each term is this micro-batch's share of the step's mean
        loss, share = 0.0, len(b.index) / B
        if c.keys() & {"ga", "npo", "dpo", "kto", "fgkl"}:
            h, token_logp = answer_logp(student, b, cfg.autocast)
            S, S_ref = per_sequence(token_logp, b), ref.logp("forget", b) if c.keys() & {"npo", "dpo", "kto"} else None
            add("nll_forget", -token_logp.sum() / N_forget)
            if "ga" in c:                                                # Eq. 1
                loss += c["ga"] * (token_logp.sum() / N_forget if cfg.token_mean else S.sum() / B)
            if "npo" in c:
                loss += c["npo"] * share * npo_loss(S, S_ref, cfg.beta)
            if "kto" in c:
                loss += c["kto"] * share * kto_loss(S, S_ref, z_ref, cfg.beta)
            if "fgkl" in c:
                kl = token_kl(h, student.head(), ref.hidden("forget", b), ref.head, reverse).sum() / N_forget
                loss -= c["fgkl"] * kl
                add("divergence_forget", kl)
        if c.keys() & {"fg", "dpo"}:
            _, idk_logp = answer_logp(student, idk[k], cfg.autocast)
            if "fg" in c:
                loss -= c["fg"] * idk_logp.sum() / N_idk
            if "dpo" in c:                                               # both answers of a question, one sigmoid
                S_idk, S_idk_ref = per_sequence(idk_logp, idk[k]), ref.logp("idk", idk[k])
                loss += c["dpo"] * share * dpo_loss(S_idk, S_idk_ref, S, S_ref, cfg.beta)
        if torch.is_tensor(loss):
            loss.backward()
            add("loss", loss)
    for b in retain if c.keys() & {"rt", "rtkl"} else []:
        h, token_logp = answer_logp(student, b, cfg.autocast)
        loss = -c.get("rt", 0.0) * token_logp.sum() / N_retain
        if "rtkl" in c:
            kl = token_kl(h, student.head(), ref.hidden("retain", b), ref.head, reverse).sum() / N_retain
            loss = loss + c["rtkl"] * kl
            add("divergence", kl)
        loss.backward()
        add("loss", loss)
    return stats


@torch.no_grad()
def kto_reference(student, idk, ref, beta, amp=False):
    """z_ref of Eq. 19 as the paper estimates it: beta * mean R(question, idk answer) over the step; 0 with none."""
    R = [per_sequence(answer_logp(student, b, amp)[1], b) - ref.logp("idk", b) for b in idk]
    return beta * torch.cat(R).mean() if R else torch.zeros((), device=student.device)


class Reference:
    """What the start model says on fixed texts. The reference IS the model before its first step, so no second copy of
    it is kept and no adapter switched off: an adapter it came with is part of it. We ask before step 0 and keep per row
    the summed log p and, where a divergence needs them, the answer's hidden states (n, D), in host memory; hidden @
    head^T gives the reference logits back. At 7B in bfloat16 that is 8 kB a token, 2 GB for 4000 rows of 60 tokens.

    Asked in the very batches of the run, each row at its first: the same shapes round in the same way, hence the
    log-ratio of step 0 is exactly 0 (on a CPU), not 1e-6.
    """

    def __init__(self, student, keep_hidden=()):
        self.student, self.keep_hidden, self.rows = student, keep_hidden, {}
        W = student.head()                                               # a head that will be trained must be copied
        self.head = W.detach().clone() if W.requires_grad else W.detach()

    @torch.no_grad()
    def ask(self, part, batches, amp=False):
        for b in batches:
            if all((part, i) in self.rows for i in b.index):
                continue
            h, token_logp = answer_logp(self.student, b, amp)
            S = per_sequence(token_logp, b)
            for k, i in enumerate(b.index):
                hidden = h[b.seq == k].cpu() if part in self.keep_hidden else None
                self.rows.setdefault((part, i), (S[k], hidden))

    def logp(self, part, batch):
        """(B,) summed log p under the start model."""
        return torch.stack([self.rows[part, i][0] for i in batch.index])

    def hidden(self, part, batch):
        """(N, D) in the token order of the batch."""
        return to_device([torch.cat([self.rows[part, i][1] for i in batch.order])], batch.rows.device)[0]


# ===== the loop ======================================================================================================

def learning_rate(step, warm, total):
    """Factor of the learning rate in step 0..total-1: linear up over the first `warm` steps, then linear down to 0."""
    return min((step + 1) / warm, (total - step) / max(1, total - warm))


def epoch_plan(seed, epoch, n_forget, n_retain, n_idk):
    """Order of the forget rows (n,), retain partner of each place in it (n,), idk sentence of each ROW (n,)."""
    rng = np.random.default_rng([seed, epoch])
    return (rng.permutation(n_forget), rng.choice(n_retain, n_forget, replace=n_retain < n_forget),
            rng.integers(max(1, n_idk), size=n_forget))


def step_batches(data, step, cfg, seed, c, device):
    """The batches of one step, a function of (seed, step) alone. The last step of an epoch takes what rows are left."""
    n = len(data["forget"])
    epoch, k = divmod(step, -(-n // cfg.batch))
    order, partner, _ = epoch_plan(seed, epoch, n, len(data["retain"]), 1)
    place = slice(k * cfg.batch, (k + 1) * cfg.batch)
    batches = dict(forget=answer_batches(data["forget"], order[place].tolist(), cfg.micro_batch, device))
    if c.keys() & {"fg", "dpo", "kto"}:
        rows = [[epoch * n + i for i in b.index] for b in batches["forget"]]
        batches["idk"] = [answer_batches(data["idk"], picks, 0, device)[0] for picks in rows]
    if c.keys() & {"rt", "rtkl"}:
        batches["retain"] = answer_batches(data["retain"], partner[place].tolist(), cfg.micro_batch, device)
    return batches


def make_reference(student, data, c, cfg, seed, steps):
    """Reference of all that the run will compare with; forget rows are met in the first epoch, the others later too."""
    keep = [part for part, term in (("forget", "fgkl"), ("retain", "rtkl")) if term in c]
    ref, parts = Reference(student, keep), set(keep)
    parts |= {"forget"} if c.keys() & {"npo", "dpo", "kto"} else set()
    parts |= {"idk"} if c.keys() & {"dpo", "kto"} else set()
    per_epoch = -(-len(data["forget"]) // cfg.batch)
    for step in range(0 if not parts else steps if parts != {"forget"} else min(steps, per_epoch)):
        batches = step_batches(data, step, cfg, seed, c, student.device)
        for part in parts:
            ref.ask(part, batches[part], cfg.autocast)
    return ref


def unlearn(model, tokenizer, bench, data, c, cfg, folder, seed, ratios, start):
    """AdamW on the method's loss from `model`, cfg.epochs passes over the forget rows -> (model, steps, evolution).

    data: forget, retain, idk -> [(ids, answer start)]; start: metrics of the start model. Steps run from 0 to the end
    inclusive, so the first and the last state are both evaluated. Random numbers depend on (seed, step) alone.
    """
    from evaluate import Log, flags_of, sha256, write_json
    torch.manual_seed(seed)                       # new adapters start at random
    student = Student(model, cfg.trainable, cfg.lora, cfg.checkpointing, cfg.compile)
    theta, device, per_epoch = student.theta, student.device, -(-len(data["forget"]) // cfg.batch)
    steps, every = cfg.epochs * per_epoch, cfg.eval_every or per_epoch
    ref, monitor = make_reference(student, data, c, cfg, seed, steps), Monitor(student, tokenizer, bench, cfg)
    adamw = make_adamw(theta.values(), cfg)
    key = sha256([flags_of(cfg), seed])
    first = load_checkpoint(folder, key, student, {}, {}, adamw) if cfg.resume else 0  # after the reference was asked
    evolution = [e for e in json.loads((folder / "evolution.json").read_text()) if e["step"] < first] if first else []
    log = Log(folder, seed, first)
    for step in range(first, steps + 1):
        if step % per_epoch == 0 or step % every == 0:
            log.flush()                           # raises on NaN, before a checkpoint could keep it
        if step % per_epoch == 0 and step > first and not cfg.adam8bit:
            save_checkpoint(folder, key, step, student, {}, {}, adamw)
        if step % every == 0 or step == steps:
            metrics = (start if step == 0 else monitor.metrics(ratios)) | monitor.divergences()
            log.evaluation(step, step // per_epoch, {k: metrics[k] for k in SHOWN if metrics.get(k) is not None})
            evolution.append(dict(step=step, epoch=step / per_epoch, metrics=metrics))
            write_json(folder / "evolution.json", evolution)
        if step == steps:
            break
        stats = accumulate_gradients(student, step_batches(data, step, cfg, seed, c, device), ref, c, cfg)
        norm = torch.stack([torch.linalg.vector_norm(p.grad) for p in theta.values() if p.grad is not None]).norm()
        rate = cfg.lr * learning_rate(step, per_epoch, steps)
        set_rate(adamw, rate)
        adamw.step()
        log.step(step, **stats, grad_norm=norm, eta=rate)
        adamw.zero_grad(set_to_none=True)         # an evaluation needs their room
    return student.model, step, evolution


def make_adamw(parameters, cfg):
    """AdamW; with --adam8bit torchao's, whose bfloat16 weights round stochastically: at lr 1e-5 nearest rounding would
    leave most of them where they are (a bfloat16 weight near .02 has ulp 1.2e-4)."""
    if not cfg.adam8bit:
        return torch.optim.AdamW(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, foreach=False)   # less memory
    from torchao.optim import AdamW8bit
    return AdamW8bit(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, bf16_stochastic_round=True)


def set_rate(adamw, rate):
    group = adamw.param_groups[0]
    if torch.is_tensor(group["lr"]):              # torchao compiles its step: another float would compile it again
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


# What a line of the log shows; evolution.json and result.json hold every metric.
SHOWN = ("log10_forget_quality", "model_utility", "truth_ratio_forget", "kl_forget", "kl_retain", "kl_world")


class Monitor:
    """Evaluation along the run: TOFU's metrics, and KL(start || current) per answer token on the first 100 rows of
    forget, retain and world facts (Figures 2, 9)."""

    def __init__(self, student, tokenizer, bench, cfg):
        self.student, self.tokenizer, self.bench, self.cfg = student, tokenizer, bench, cfg
        sets = dict(forget=bench.forget_qa, retain=bench.retain_qa, world=bench.tofu.get("world_facts"))
        sets = {k: qa_sequences(rows[:100], tokenizer, bench, cfg.max_length) for k, rows in sets.items() if rows}
        self.batches = {k: answer_batches(pairs, range(len(pairs)), 16, student.device) for k, pairs in sets.items()}
        self.ref = Reference(student, keep_hidden=tuple(sets))
        for k, batches in self.batches.items():
            self.ref.ask(k, batches, cfg.autocast)

    @torch.no_grad()
    def divergences(self):
        """-> kl_forget, kl_retain, kl_world in nats per answer token; exactly 0 before the first step."""
        out = {}
        for part, batches in self.batches.items():
            total = 0.0
            for b in batches:
                h, _ = answer_logp(self.student, b, self.cfg.autocast)
                total += token_kl(h, self.student.head(), self.ref.hidden(part, b), self.ref.head, True).sum().item()
            out[f"kl_{part}"] = total / sum(len(b.rows) for b in batches)
        return out

    def metrics(self, ratios):
        model = self.student.model
        was_training, _ = model.training, model.eval()
        rows = self.cfg.eval_rows or self.cfg.max_rows
        out = measure(model, self.tokenizer, self.bench, self.cfg, rows, ratios)["metrics"]
        model.train(was_training)
        return out


def measure(model, tokenizer, bench, cfg, max_rows, ratios):
    """evaluate_tofu, compared with the retrain model's forget items (ratios) as far as the rows go."""
    from evaluate import evaluate_tofu
    return evaluate_tofu(model, tokenizer, bench, batch_size=cfg.eval_batch, max_rows=max_rows,
                         retrain_ratios=None if ratios is None else ratios[:max_rows])


# --- copy: checkpoint ---
def save_checkpoint(folder, key, step, student, teacher, velocity, adamw):
    """All that the next step needs, in one file of plain tensors, written beside and renamed. key: see unlearn."""
    from safetensors.torch import save_file
    from evaluate import beside
    state = {f"{part}/{n}": t.detach().contiguous() for part, d in
             dict(theta=student.theta, teacher=teacher, velocity=velocity).items() for n, t in d.items()}
    for n, p in student.theta.items():
        state |= {f"adamw/{n}/{k}": t for k, t in adamw.state.get(p, {}).items()}
    new = beside(folder / "checkpoint.safetensors")
    try:
        save_file(state, new, metadata=dict(step=str(step), key=key))
        os.replace(new, folder / "checkpoint.safetensors")
    finally:
        new.unlink(missing_ok=True)               # on a full disk half a checkpoint would keep it full


def load_checkpoint(folder, key, student, teacher, velocity, adamw):
    """Restore in place what save_checkpoint wrote -> its step; 0 when there is none."""
    from safetensors import safe_open
    from evaluate import BadInput
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return 0
    try:
        with safe_open(path, "pt") as f, torch.no_grad():
            if f.metadata()["key"] != key:        # of the same shapes, so that only this tells
                raise ValueError
            for part, d in dict(theta=student.theta, teacher=teacher, velocity=velocity).items():
                for n, t in d.items():
                    t.copy_(f.get_tensor(f"{part}/{n}"))
            for entry in (e for e in f.keys() if e.startswith("adamw/")):
                n, k = entry.removeprefix("adamw/").rsplit("/", 1)
                adamw.state[student.theta[n]][k] = f.get_tensor(entry).to("cpu" if k == "step" else student.device)
            return int(f.metadata()["step"])
    except Exception as e:
        raise BadInput(f"{path}: not a checkpoint of this run ({type(e).__name__}); delete it to start this seed again")
# --- end copy ---


# ===== questions to tokens ===========================================================================================

def qa_sequences(rows, tokenizer, bench, max_length):
    """[{"question", "answer"}] -> [(ids, answer start)]; a question that leaves its answer no room is refused."""
    from evaluate import qa_ids
    parts = [qa_ids(tokenizer, row["question"], row["answer"], bench.template, max_length) for row in rows]
    return [(prompt + answer, len(prompt)) for prompt, answer in parts]


def training_data(bench, tokenizer, c, cfg, seed):
    """forget, retain, idk -> [(ids, answer start)]. idk holds epochs * n pairs: row i's question with the sentence that
    epoch e drew for it is number e*n + i."""
    from evaluate import BadInput
    data = dict(forget=qa_sequences(bench.forget_qa, tokenizer, bench, cfg.max_length),
                retain=qa_sequences(bench.retain_qa, tokenizer, bench, cfg.max_length))
    for part, needed in (("forget", True), ("retain", c.keys() & {"rt", "rtkl"})):
        if needed and not data[part]:
            raise BadInput(f"the benchmark has no {part} rows, which --method {cfg.method} needs; give {part}.jsonl")
        cut = sum(ids[-1] != tokenizer.eos_token_id for ids, _ in data[part])
        if cut:
            print(f"{cut} of {len(data[part])} {part} answers end at --max-length {cfg.max_length} tokens, without EOS")
    if c.keys() & {"fg", "dpo", "kto"}:
        if not bench.idk:
            raise BadInput(f"--method {cfg.method} needs \"I don't know\" sentences: put idontknow.jsonl, one a line, "
                           "into the benchmark's folder")
        n = len(bench.forget_qa)
        rows = [dict(question=q["question"], answer=bench.idk[j]) for e in range(cfg.epochs) for q, j in
                zip(bench.forget_qa, epoch_plan(seed, e, n, max(1, len(bench.retain_qa)), len(bench.idk))[2])]
        data["idk"] = qa_sequences(rows, tokenizer, bench, cfg.max_length)
    return data


# ===== one seed, from a model folder to a model folder and its numbers ===============================================

def run_seed(cfg, bench, paths, c, start_metrics, ratios, folder, seed):
    """Unlearn, save, reload, measure -> dict(seed, steps, seconds, metrics, items, evolution, ...); done once only."""
    from evaluate import after_rounding, context_of, load_model, load_tokenizer, save_model, stored_dtype, write_json
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "measured.json"
    if cfg.resume and done.exists():
        return json.loads(done.read_text())
    start, device = time.time(), torch.device(cfg.device)
    tokenizer = load_tokenizer(paths["tokenizer"])
    half = cfg.adam8bit or cfg.lora and device.type == "cuda"
    model = load_model(paths["target"], torch.bfloat16 if half else torch.float32, device)
    if hasattr(model, "get_base_model") and not cfg.lora:
        model = model.merge_and_unload()
    cfg = replace(cfg, max_length=min(cfg.max_length, context_of(model)))
    data = training_data(bench, tokenizer, c, cfg, seed)
    model, steps, evolution = unlearn(model, tokenizer, bench, data, c, cfg, folder, seed, ratios, start_metrics)
    save_model(model, tokenizer, folder / "model", None if cfg.lora else stored_dtype(paths["target"]))
    seconds = time.time() - start
    del model
    model = load_model(folder / "model", torch.float32, device)   # what is measured is what is saved
    row = dict(seed=seed, steps=steps, seconds=seconds, evolution=evolution,
               **measure(model, tokenizer, bench, cfg, cfg.max_rows, ratios))
    if cfg.survive:
        row["survive"] = after_rounding(folder / "model", cfg.device,
                                        lambda model: measure(model, tokenizer, bench, cfg, cfg.max_rows, ratios))
    write_json(done, row)
    (folder / "checkpoint.safetensors").unlink(missing_ok=True)
    return json.loads(done.read_text())


# ===== configuration, memory plan, main ==============================================================================

def fill_preset(cfg, bench, lm):
    """Numbers left unset, from the preset of the benchmark; then every check that needs no model."""
    from evaluate import BadInput, check_numbers, parameters_of
    name = cfg.preset or ("tofu" if bench.name.startswith("tofu_") else "mini" if bench.name.startswith("mini") else "")
    if not name:  # a folder: small models need large steps
        name = "mini" if parameters_of(lm) < 5e7 else "tofu"
        print(f"numbers left unset come from --preset {name}")
    cfg.preset = name
    for k, v in PRESETS[name].items():
        if getattr(cfg, k) is None:
            setattr(cfg, k, v)
    check_numbers(cfg, above_0="lr beta", from_2="max_length",
                  from_1="batch epochs seeds eval_batch max_rows eval_rows max_authors",
                  from_0="weight_decay micro_batch lora eval_every c_ga c_fg c_rt c_fgkl c_rtkl examples seed")
    if cfg.eval_rows and cfg.max_rows and cfg.eval_rows > cfg.max_rows:
        raise BadInput(f"--eval-rows {cfg.eval_rows}: not more than --max-rows {cfg.max_rows}, the rows that retrain "
                       "answers")
    if cfg.lora and cfg.trainable == "matrices":
        raise BadInput("--lora trains its adapters alone: leave --trainable matrices out")
    if cfg.adam8bit and cfg.lora:
        raise BadInput("--adam8bit is for full weights, the adapters of --lora stay in float32: leave one of them out")
    if cfg.adam8bit and cfg.resume:
        raise BadInput("--resume: 8-bit AdamW states are not saved; start anew, or without --adam8bit")
    if cfg.adam8bit and not cfg.dry_run:
        import importlib.util
        if not importlib.util.find_spec("torchao"):
            raise BadInput("--adam8bit needs torchao: pip install torchao, or use --lora 16")


def runs_asked(cfg, bench):
    """[(method, retain weight or None)] of --method and --retain-weight, names checked."""
    from evaluate import BadInput
    names = [m.strip().lower().replace("+", "_") for m in cfg.method.split(",")]
    names = [m for m in METHODS if m != "general"] if names == ["all"] else names
    for m in names:
        if m not in METHODS:
            raise BadInput(f"unknown method {m!r}; valid: all, " + ", ".join(METHODS))
    try:
        weights = [float(w) for w in cfg.retain_weight.split(",")] if cfg.retain_weight else [None]
    except ValueError:
        raise BadInput(f"--retain-weight {cfg.retain_weight!r}: numbers with commas between, such as 0,1,2,5")
    if not all(w is None or 0 <= w < float("inf") for w in weights):
        raise BadInput(f"--retain-weight {cfg.retain_weight}: weights must not be negative")
    if weights == [None] and names == ["npo_rt"] and cfg.c_rt is None:
        weights = [FIGURE_10.get(bench.name)]
    asked = [(m, w) for m in names for w in weights]
    if len(set(asked)) < len(asked):
        raise BadInput("--method and --retain-weight ask for the same run twice: name each once")
    return asked


def coefficients(method, weight, cfg):
    """Terms of the loss with a coefficient other than 0: the method's with the retain weight; the c flags override."""
    from evaluate import BadInput
    c = dict(METHODS[method])
    if weight is not None:
        terms = c.keys() & {"rt", "rtkl"}
        if not terms:
            raise BadInput(f"--retain-weight: {method} has no retain term; use {method}_rt, or --c-rt")
        c |= {k: weight for k in terms}
    flags = {k: getattr(cfg, f"c_{k}") for k in ("ga", "fg", "rt", "fgkl", "rtkl")}
    c = {k: v for k, v in (c | {k: v for k, v in flags.items() if v is not None}).items() if v != 0}
    if not c.keys() - {"rt", "rtkl"}:
        raise BadInput(f"--method {method}: no term forgets; give --c-ga, --c-fg or --c-fgkl a weight")
    return c


def method_name(method, weight, cfg):
    """Row label, as in the paper: NPO+RT, GA+forget-KL, with what departs from the method's own settings behind it."""
    name = "GA+forget-KL" if method == "ga_fgkl" else method.upper().replace("_", "+")
    extras = [(f"-w{weight or 0:g}", weight is not None)]
    given = {k: getattr(cfg, "c_" + k) for k in ("ga", "fg", "rt", "fgkl", "rtkl")}
    extras += [(f"-{k}{v or 0:g}", v is not None) for k, v in given.items()]
    extras += [(f"-{k}{getattr(cfg, k):g}", getattr(cfg, k) != v) for k, v in PRESETS[cfg.preset].items()]
    extras += [("-tokenmean", cfg.token_mean), ("-reverse", cfg.kl == "reverse"), (f"-lora{cfg.lora}", cfg.lora),
               ("-8bit", cfg.adam8bit), ("-matrices", cfg.trainable == "matrices")]
    return name + "".join(text for text, on in extras if on)


def memory_plan(cfg, lm):
    """Peak memory in GB by part, from a model without weights -> dict. Training only; generation takes less.

    Full weights at 7B: 108 GB in float32 before activations, 41 GB with --adam8bit (bfloat16 weights and gradients, two
    8-bit moments): ONE 80 GB card takes the second, with --checkpointing --micro-batch 4.
    """
    from evaluate import layer_and_head_bytes, parameters_of
    config, P, trained = lm.config, parameters_of(lm), parameters_of(lm, cfg.lora, cfg.trainable)
    D, V, L = config.hidden_size, config.vocab_size, config.num_hidden_layers
    width = 2 if cfg.adam8bit or cfg.lora and cfg.device.startswith("cuda") else 4
    head_trained = not cfg.lora and cfg.trainable == "all"
    rows = (cfg.micro_batch or cfg.batch) * (2 if any(m in cfg.method.lower() for m in ("dpo", "all")) else 1)
    tokens = rows * cfg.max_length                    # DPO keeps the graphs of both answers
    layer, head = layer_and_head_bytes(config, tokens, 2 if cfg.autocast else width, cfg.lora, head_trained, cfg.device)
    plan = {"weights": P * width + (trained * 4 if cfg.lora else 0),
            "gradients": (2 if cfg.adam8bit else 4) * trained, "AdamW states": (2.03 if cfg.adam8bit else 8) * trained,
            "activations": (L * tokens * D * width + layer if cfg.checkpointing else L * layer) + 5 * tokens * D * 4,
            "head": head + V * D * 8 * (head_trained or width == 2)}   # copies of it and the reference's
    return {k: v / 1e9 for k, v in plan.items()}


def print_answers(n, measured):
    """Figure 7: the same questions, answered by target, unlearned and retrain.  measured: name -> evaluation."""
    for part, items in measured["unlearned"]["items"].items():
        for k, item in enumerate(items[:n]):
            print(f"\n{part} {k}: {item['question']}\n  {'true':10s}{item['reference']!r}")
            for name, evaluation in measured.items():
                print(f"  {name:10s}{evaluation['items'][part][k]['response']!r}")


def open_run(cfg, method, weight, several):
    """A method's own config, terms, name and run folder; a folder that cannot be had is found here, not after hours."""
    from evaluate import run_folder
    c, name = coefficients(method, weight, cfg), method_name(method, weight, cfg)
    cfg = replace(cfg, method=method, retain_weight="" if weight is None else str(weight),
                  out=str(Path(cfg.out) / name) if cfg.out and several else cfg.out)
    return cfg, c, name, run_folder(cfg, name)


def run_method(cfg, c, name, folder, bench, paths, target, retrain, start):
    """One method, all seeds, one run folder -> folder."""
    from evaluate import provenance, report, run_result, write_json
    config = asdict(cfg) | dict(script="npo_unlearn.py", name=name, coefficients=c,
                                paths={k: str(v) for k, v in paths.items()}, provenance=provenance(bench, paths))
    write_json(folder / "config.json", config)
    ratios = retrain["items"].get("forget") if retrain else None
    rows = [run_seed(cfg, bench, paths, c, start, ratios, folder / f"seed{s}", s)
            for s in range(cfg.seed, cfg.seed + cfg.seeds)]
    write_json(folder / "result.json", run_result(config, rows, target, retrain))
    print_answers(cfg.examples, dict(target=target, unlearned=rows[0]) | (dict(retrain=retrain) if retrain else {}))
    print(report([folder], out=folder))
    print(f"run: {folder}", flush=True)
    return folder


def main(argv=None):
    from evaluate import (EMBEDDED, BadInput, Bench, cached_evaluation, check_memory, empty_model, load_bench,
                          parse_config, pick_device, report, resolve_models)
    cfg = parse_config(Config, __doc__, argv)
    plan_only = cfg.dry_run and cfg.bench.startswith("tofu_")             # the plan of a hub benchmark needs no hub
    bench = Bench(cfg.bench) if plan_only else load_bench(cfg.bench, cfg.data_dir, max_authors=cfg.max_authors)
    if not (bench.forget_qa or plan_only):
        raise BadInput(f"--bench {cfg.bench} has no forget and retain files of questions and answers; mt_unlearn.py "
                       "takes plain texts")
    cfg.device = "cuda" if plan_only and cfg.device == "auto" else pick_device(cfg.device)
    asked = runs_asked(cfg, bench)
    path = cfg.target or bench.models.get("target", "")
    if not (path or bench.name in EMBEDDED or plan_only):
        raise BadInput(f"{cfg.bench}: no target model; name the model that memorised the answers by --target, or make "
                       f"one by evaluate.py prepare --bench {cfg.bench} --base tiny")
    lm = empty_model(path, bench.name)
    fill_preset(cfg, bench, lm)
    for method, weight in asked:                                 # every refusal before any long work
        coefficients(method, weight, cfg)
    check_memory(memory_plan(cfg, lm), cfg, "--adam8bit --checkpointing --micro-batch 4")
    if cfg.dry_run:
        return
    runs = [open_run(cfg, m, w, len(asked) > 1) for m, w in asked]
    paths = resolve_models(bench, cfg.base, cfg.target, cfg.retrain, cfg.tokenizer)
    if paths.get("retrain") and str(paths["retrain"]) == str(paths["target"]):
        raise BadInput(f"--target and --retrain are the same model, {paths['target']}: nothing was forgotten in it")
    known = dict(bench=bench, tokenizer=paths["tokenizer"], device=cfg.device, batch_size=cfg.eval_batch)
    retrain = cached_evaluation(paths["retrain"], max_rows=cfg.max_rows, **known) if paths.get("retrain") else None
    ratios = retrain["items"].get("forget") if retrain else None
    target = cached_evaluation(paths["target"], max_rows=cfg.max_rows, retrain_ratios=ratios, **known)
    along = cfg.eval_rows or cfg.max_rows                        # the start, on the rows measured along the run
    start = cached_evaluation(paths["target"], max_rows=along, retrain_ratios=ratios and ratios[:along], **known)
    folders = [run_method(*run, bench, paths, target, retrain, start["metrics"]) for run in runs]
    if len(folders) > 1:
        print(report(folders))


if __name__ == "__main__":
    from evaluate import run_main
    run_main(main)

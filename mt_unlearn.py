"""Mean-teacher unlearning with the negative log-unlikelihood loss (Klochkov, arXiv:2504.13388), measured by MUSE.

Run:  python mt_unlearn.py                                    the embedded benchmark mini_news, on a laptop
      python mt_unlearn.py --bench muse_books                 full size: Llama-2-7B, one CUDA GPU (see --dry-run)
      python mt_unlearn.py --bench FOLDER --target MODEL      your own text: a folder with a forget.txt is enough
Ends: RUN/seed0/model is the unlearned model (any tool loads it), RUN/result.json and table.md hold target, retrain and
      unlearned metrics of the SAVED model, log.jsonl every step. The last line names the folder.

The method in one paragraph. A model memorised the forget texts. We push their likelihood down (forget loss L) and hold
the model in place on other text by a divergence D to a TEACHER; the teacher follows as an exponential moving average.
With u = theta - teacher, D is close to 1/2 u^T H u, H the Gauss-Newton matrix, and damping adds lambda/2 |u|^2. So the
student settles at u = -alpha (H + lambda)^-1 grad L, a natural-gradient step away; the teacher walks kappa*eta of it at
each step, which is slow natural-gradient descent.

Shapes: B sequences, T tokens, V vocabulary, D hidden size, N predicted tokens of a batch, n tokens of one chunk.

Differs from the paper (each by our reading, or reachable by the flag named):
- l = min(1, c/||g||), the text's formula; the algorithm box prints 1/max(||g||, c), equal at c = 1.
- NLUL is exact, -log(1-p), as printed; the released code minimises -log(1+0.02-p):   --nlul-tol 0.02
- QKL is halved, or its curvature is twice the theorem's; the print:                  --qkl-scale 1
- D is KL(student || teacher), as printed; the released code turns it round:          --reverse-kl (IT likewise)
- damping is part of g and of its norm; the released code adds it after the clip:     --no-damping-in-norm
- lambda 0.5 and mu 0.9; released configs have lambda 5, main-table logs mu 0.95:     --lam 5 --mu 0.95
- NPO is divided by the length of its sequence, or its start gradient is |s| times L's and Figure 2 cannot come out;
  the plain sum of the NPO paper: --npo-sum (the released code takes the token mean inside the sigmoid: nearly L).
- a text longer than --context tokens is cut into chunks; a News article keeps its first chunk only, as released.
- the paper does not say which weights it trains; released: attention and MLP matrices; every weight: --trainable all
- MUSE-News trains on the hub's train/forget, 3554 rows, the paper's 3.3M tokens; MUSE's 889:    --forget-split raw
- the AdamW baseline has no damping and no clip; its reference stays the target model.
"""
import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
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


@dataclass
class Config:
    bench: str = knob("mini_news", "mini_news, mini_books, muse_news, muse_books, or a folder")
    data_dir: str = knob("", "local copy of a hub benchmark")
    target: str = knob("", "model that memorised: folder or hub id (default: the benchmark's)")
    retrain: str = knob("", "model that never saw the forget texts; gives the stop values and PrivLeak's reference")
    base: str = knob("", "pretraining-only or foreign model with the same vocabulary, for --loss it")
    tokenizer: str = knob("", "folder or hub id, where the model folder has none")
    loss: str = knob("nlul", "forget loss", choices=("l", "npo", "it", "nlul"))
    divergence: str = knob("kl", "divergence to the teacher", choices=("kl", "qkl"))
    optimizer: str = knob("mt", "mt: mean teacher; adamw: the baseline, reference frozen", choices=("mt", "adamw"))
    preset: str = knob("", "where unset numbers come from (default: by benchmark; a folder by the model's size)",
                       choices=("", "muse_news", "muse_books", "mini"))
    eta: float = knob(None, "learning rate of the mean teacher [paper B: 5e-4; mini: ours]")
    alpha: float = knob(None, "weight of the forget loss [paper B: .05 News, .1 Books]")
    kappa: float = knob(None, "the teacher moves kappa*eta of the way per step [paper B: 10]")
    mu: float = knob(0.9, "momentum [paper's theory text; released logs .95]")
    lam: float = knob(0.5, "damping lambda [paper B; released configs 5]")
    clip: float = knob(1.0, "gradient clip c [released]")
    lr: float = knob(None, "learning rate of AdamW [paper B: 1e-5; mini: ours]")
    nlul_tol: float = knob(0.0, "tol in -log(1+tol-p) [paper 0, released .02]")
    npo_beta: float = knob(0.1, "beta of NPO [2404.05868]")
    npo_sum: bool = knob(False, "NPO as the plain sum over tokens")
    qkl_scale: float = knob(0.5, "factor of QKL [ours .5, print 1]")
    reverse_kl: bool = knob(False, "KL(reference || student) for D and IT [released]")
    damping_in_norm: bool = knob(True, "damping counts in the clipped norm [paper]; released: no")
    batch: int = knob(None, "forget sequences, and as many pretraining sequences, per step [paper B: 40]")
    micro_batch: int = knob(None, "sequences per forward pass; gradients accumulate (0: all) [muse 2, mini 0]")
    epoch_steps: int = knob(None, "steps of an epoch, sampled with replacement [released 100; mini: ours]")
    full_batch: bool = knob(False, "Algorithm 1: all texts every step, no clip")
    context: int = knob(None, "tokens of a forget chunk [released 1024]")
    forget_split: str = knob("train", "hub split of MUSE-News' forget texts", choices=("train", "raw"))
    reg: str = knob("auto", "text of D: pretraining text, retain split, or text sampled from the target (self); auto: "
                    "pretraining text, self for a folder without any", choices=("auto", "pretrain", "retain", "self"))
    reg_text: str = knob("", "file or folder of .txt taken as pretraining text")
    reg_docs: int = knob(5000, "documents taken from OpenWebText (streamed); sequences sampled by self: at most 256")
    reg_len: int = knob(512, "tokens of a pretraining chunk [released]")
    stop: str = knob("verbmem_f", "stop when this metric is at or below the stop value; none: --max-epochs alone",
                     choices=("verbmem_f", "knowmem_f", "none"))
    stop_value: float = knob(None, "stop value (default: the measured value of --retrain, else MUSE's published one)")
    max_epochs: int = knob(20, "end whatever the stop rule says")
    warm_escape: int = knob(0, "epochs of AdamW before the mean teacher starts [paper, Figure 1: 2, for L and NPO]")
    trainable: str = knob("matrices", "matrices: attention and MLP [released]; all: every weight",
                          choices=("matrices", "all"))
    lora: int = knob(0, "rank of LoRA adapters on all linear layers (0: full weights)")
    bf16_momentum: bool = knob(False, "momentum in bfloat16 with stochastic rounding: half its memory")
    teacher_host: bool = knob(False, "teacher in host memory, on the card only for its forward pass")
    checkpointing: bool = knob(None, "gradient checkpointing: recompute activations, less memory [muse on, mini off]")
    compile: bool = knob(False, "torch.compile of the model in training; what a step gains on a CPU: README, speed")
    autocast: bool = knob(False, "bfloat16 matmuls; mind that they cannot see a step of this method at 7B")
    sustain: bool = knob(False, "four requests one after the other, each from the last model, --max-epochs each")
    relearn: bool = knob(False, "then fine-tune on unrelated question-answer pairs and measure again (Table 3)")
    relearn_lr: float = knob(None, "learning rate of that fine-tuning [ours]")
    relearn_data: str = knob("", "JSON lines of question and answer for --relearn (default: the benchmark's)")
    survive: bool = knob(False, "measure again after rounding the weights to bf16, int8 and int4")
    examples: int = knob(0, "print this many answers of target, unlearned and retrain side by side (Table 2)")
    seeds: int = knob(1, "repeat with seeds seed, seed+1, ...; a seed changes the sampling, not data and models")
    seed: int = knob(0, "first seed")
    max_rows: int = knob(None, "measure only the first rows of each evaluation set")
    eval_batch: int = knob(32, "prompts per generation batch; does not change the scores")
    device: str = knob("auto", "cpu, cuda, mps; auto takes the best there is")
    out: str = knob("", "run folder (default: runs/BENCH-METHOD-N)")
    resume: bool = knob(False, "go on with the newest run of these flags (or --out); on a CPU to the same bits")
    dry_run: bool = knob(False, "print the memory plan and exit")


# Numbers that depend on the benchmark. stop: MUSE's published retrain values, used only without a retrain model.
MUSE = dict(eta=5e-4, kappa=10.0, lr=1e-5, relearn_lr=1e-5, batch=40, epoch_steps=100, micro_batch=2,
            checkpointing=True)
PRESETS = {
    "muse_news": dict(MUSE, alpha=.05, stops=dict(verbmem_f=21.8, knowmem_f=33.1)),
    "muse_books": dict(MUSE, alpha=.1, stops=dict(verbmem_f=14.3, knowmem_f=28.9)),
    "mini": dict(eta=.02, kappa=10.0, alpha=.1, lr=3e-3, relearn_lr=3e-4, batch=16, epoch_steps=10,
                 micro_batch=0, checkpointing=False, stops={}),  # [ours]
}
# Adapters need larger steps than the matrices they stand for; kappa*eta stays. [ours; muse untried]
LORA = {"muse_news": dict(eta=5e-3, kappa=1.0), "muse_books": dict(eta=5e-3, kappa=1.0),
        "mini": dict(eta=1.0, kappa=.2)}
IT_MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"  # second model of --loss it on MUSE: Llama-2's vocabulary [paper 5.2]


# ===== the losses ====================================================================================================
# L, NPO and NLUL are functions of ONE number per token, its log-odds r = log p/(1-p):
#     log p = -softplus(-r),    log(1-p) = -softplus(r),    p = sigmoid(r)
# computed as the label's logit minus the logsumexp of the OTHER logits. No subtraction from 1, so nothing is lost where
# float32 rounds a memorised token's p to 1, the very case unlearning starts from. The functions of full logits in this
# room are for reading and copying; training calls their twins token_*, which follow.

def log_odds(logits, labels):
    """r = log p/(1-p) of each label.  logits (N, V), labels (N,) -> (N,)."""
    others = logits.scatter(1, labels[:, None], float("-inf"))
    return logits.gather(1, labels[:, None]).squeeze(1) - others.logsumexp(1)


def nlul(r, tol=0.0):
    """Negative log-unlikelihood -log(1 - p), section 4 of arXiv:2504.13388.  log-odds (N,) -> (N,).

    Its gradient in the logits is p/(1-p) (e_y - s), s the softmax, of norm <= sqrt2 p: large where the text is
    memorised, gone where it is forgotten. tol > 0 is the released -log(1 + tol - p), whose gradient is (1-p)/(1-p+tol)
    of that: a token memorised to 1-p << tol hardly moves. On mini_news the exact loss meets the stop rule after 80
    steps, tol .02 after 190 (3 seeds each, results/mt/mini_news), ending alike. The released logs start with a long
    flat part, so we believe that the published tables were made with tol.
    """
    return F.softplus(r) if tol == 0 else -torch.log(tol + torch.sigmoid(-r))


def nlul_loss(logits, labels, tol=0.0):
    """Mean NLUL over tokens.  logits (N, V), labels (N,) -> scalar."""
    return nlul(log_odds(logits, labels), tol).mean()


def npo_loss(logp, ref_logp, beta, lengths=None):
    """Negative preference optimization, Eq. 3 of arXiv:2404.05868, per sequence and divided by its length.

    logp, ref_logp (B,) summed log-likelihoods under student and start model, lengths (B,) tokens -> scalar mean over B.
    Gradient weight 2 sigma(beta R)/|s| with R = logp - ref_logp: 1/|s| at the start, so that NPO then equals L.
    lengths=None leaves out 1/|s|: the plain sum.
    """
    loss = -(2 / beta) * F.logsigmoid(-beta * (logp - ref_logp))
    return (loss if lengths is None else loss / lengths).mean()


def kl_divergence(logits, ref_logits):
    """KL(softmax(logits) || softmax(ref_logits)), Eq. 4 of arXiv:2504.13388.  (N, V), (N, V) -> (N,)."""
    logs, ref_logs = logits.log_softmax(1), ref_logits.log_softmax(1)
    return (logs.exp() * (logs - ref_logs)).sum(1)


def qkl_divergence(logits, ref_logits, scale=0.5):
    """Quadratic KL, Eq. 9: scale * Var_s(logits - ref_logits) with s = softmax(logits), differentiated too.

    (N, V), (N, V) -> (N,). Its second-order term is 2*scale times KL's, so only scale = 1/2 has the curvature H that
    Theorem 3.1 inverts; Eq. 9 as printed is scale = 1.
    """
    s, d = logits.softmax(1), logits - ref_logits
    return scale * (s * (d - (s * d).sum(1, keepdim=True)) ** 2).sum(1)


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


def token_qkl(hidden, weight, ref_hidden, ref_weight, scale=0.5):
    """qkl_divergence per token without the logits.  (N, D), (V, D), (N, D'), (V, D') -> (N,)."""
    def score(logits, ref, rows):
        s, d = logits.softmax(1), logits - ref
        d -= (s * d).sum(1, keepdim=True)
        var = (s * d * d).sum(1)
        torch.mul(s, d * d + 2 * d - var[:, None], out=logits).mul_(scale)     # the softmax moves too: d^2 - var
        return scale * var
    return head_scores(hidden, weight, score, (ref_hidden, ref_weight))


# ===== the update rule ===============================================================================================

@torch.no_grad()
def mean_teacher_step_(theta, teacher, velocity, grads, eta, kappa, mu, lam, clip, damping_in_norm=True,
                       generator=None):
    """One step of Algorithm 2 of arXiv:2504.13388, in place.  Four lists of tensors -> (||g||, l), 0-dim tensors.

        g = grads + lam (theta - teacher)         l = min(1, clip/||g||)
        v = mu v + l g          theta = theta - eta v          teacher = teacher + l eta kappa (theta - teacher)

    The teacher uses the NEW theta. l multiplies both rates: where the gradient is clipped, time slows by l for BOTH
    models, or the theorem's ratio kappa between them is lost. Does NOT compute the gradients; grads is overwritten.
    damping_in_norm=False: the released code, lam is added after the norm was taken. A bfloat16 velocity is rounded
    stochastically by `generator`. A teacher in host memory is moved here and back, tensor by tensor.
    """
    def damp(g, p, q):
        return g.add_(p - q.to(p.device), alpha=lam)

    if damping_in_norm:
        for g, p, q in zip(grads, theta, teacher):
            damp(g, p, q)
    norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()
    l = (clip / norm).clamp(max=1.0)              # stays on the device: no host sync; ||g|| = 0 gives l = 1
    for p, q, v, g in zip(theta, teacher, velocity, grads):
        if not damping_in_norm:
            damp(g, p, q)
        g.mul_(l).add_(v, alpha=mu)               # g is now the new velocity, in g's precision
        stochastic_round_(v, g, generator)
        p.sub_(v.to(p.dtype), alpha=eta)
        moved = q.to(p.device)
        q.copy_(moved.lerp_(p, l * (eta * kappa)))
    return norm, l


def stochastic_round_(out, x, generator=None):
    """out = x; into bfloat16 rounded up or down at random, with mean x.  Same shape, x float32 -> out.

    Momentum adds many gradients far below bfloat16's ulp (2^-8 of the value): rounded to nearest they vanish. Adding 16
    random bits below the cut and truncating carries into the kept bits with exactly the right probability.
    """
    if out.dtype == x.dtype:
        return out.copy_(x)
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    return out.copy_(((x.view(torch.int32) + noise) & -65536).view(torch.float32))


def warmup(step, flat):
    """Learning-rate factor of the AdamW baseline [paper B]: `flat` steps at 10 %, then `flat` steps linear to 1."""
    return min(1.0, 0.1 + 0.9 * max(0, step - flat) / flat)


# ===== one model, two sets of parameters =============================================================================
# The teacher is a dict of tensors that functional_call puts under the one module, under no_grad only. The student is
# always the module's own parameters: gradient checkpointing runs its forward again during backward, when a swapped set
# would long be back. The same lines serve LoRA (theta = adapters) and full weights.

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


# ===== the gradient of alpha L + D ===================================================================================

def forget_loss(r, batch, cfg, ref_logp=None):
    """Forget loss of a micro-batch from its log-odds r (N,), summed: over tokens, for NPO over sequences -> scalar."""
    if cfg.loss == "npo":
        lengths = None if cfg.npo_sum else per_sequence(torch.ones_like(r), batch)   # bincount would wait for a card
        logp, ref_logp = per_sequence(F.logsigmoid(r), batch), ref_logp[batch.index].to(r.device)
        return len(batch.index) * npo_loss(logp, ref_logp, cfg.npo_beta, lengths)
    return (F.logsigmoid(r) if cfg.loss == "l" else nlul(r, cfg.nlul_tol)).sum()


def accumulate_gradients(student, teacher, forget, reg, cfg, it_model=None, ref_logp=None):
    """Gradient of alpha L + D into theta's .grad.  Lists of Batch -> dict of 0-dim tensors: nll_forget, loss (L without
    its alpha), divergence.

    Means are over all real tokens of the step (all its sequences for NPO), however it is cut into micro-batches: so
    1 x 8 equals 8 x 1. The reference passes run first, while no graph and no gradient takes memory: a teacher in host
    memory is on the card as a whole for them alone, the update then fetches it tensor by tensor. They run in the
    student's precision, or D would not start at 0.
    """
    amp = torch.autocast(student.device.type, torch.bfloat16, enabled=cfg.autocast)
    with torch.no_grad(), amp:
        teacher = {n: q.to(student.device, non_blocking=True) for n, q in teacher.items()}
        ref = [student.hidden(b.ids, teacher).flatten(0, 1)[b.rows] for b in reg]
        it = [it_model.base_model(input_ids=b.ids, use_cache=False).last_hidden_state.flatten(0, 1)[b.rows]
              for b in forget] if it_model else []
        ref_head = student.head(teacher).detach()
        del teacher
    N_forget, N_reg = sum(len(b.rows) for b in forget), sum(len(b.rows) for b in reg)
    count = sum(len(b.index) for b in forget) if cfg.loss == "npo" else N_forget
    nll, loss, div = (torch.zeros((), device=student.device) for _ in range(3))
    for k, b in enumerate(forget):
        with amp:
            h = student.hidden(b.ids).flatten(0, 1)[b.rows]              # (N, D)
        if cfg.loss == "it":
            it_head = it_model.get_output_embeddings().weight
            total = token_kl(h, student.head(), it[k], it_head, cfg.reverse_kl).sum()
            with torch.no_grad():
                r = token_log_odds(h, student.head(), b.labels)
        else:
            r = token_log_odds(h, student.head(), b.labels)
            total = forget_loss(r, b, cfg, ref_logp)
        (cfg.alpha * total / count).backward()
        nll -= F.logsigmoid(r.detach()).sum() / N_forget
        loss += total.detach() / count
    for b, ref_h in zip(reg, ref):
        with amp:
            h = student.hidden(b.ids).flatten(0, 1)[b.rows]
        if cfg.divergence == "kl":
            d = token_kl(h, student.head(), ref_h, ref_head, cfg.reverse_kl).sum() / N_reg
        else:
            d = token_qkl(h, student.head(), ref_h, ref_head, cfg.qkl_scale).sum() / N_reg
        d.backward()
        div += d.detach()
    return dict(nll_forget=nll, loss=loss, divergence=div)


@torch.no_grad()
def sequence_logp(student, sequences, micro_batch, autocast=False):
    """Summed log p of each sequence under theta, for NPO's fixed reference: once, before the first step. -> (S,)"""
    logp = torch.zeros(len(sequences))
    for b in make_batches(sequences, range(len(sequences)), micro_batch or 16, student.device):
        with torch.autocast(student.device.type, torch.bfloat16, enabled=autocast):
            h = student.hidden(b.ids).flatten(0, 1)[b.rows]
        logp[b.index] = per_sequence(F.logsigmoid(token_log_odds(h, student.head(), b.labels)), b).float().cpu()
    return logp


# ===== the loop ======================================================================================================

def unlearn(model, tokenizer, bench, forget, reg, cfg, folder, seed, stop_value, start_score, it_model=None):
    """Algorithm 2 from `model` until the stop rule.  forget, reg: lists of token lists -> (model, steps).

    `start_score` is the stop metric of the start model, known already. Steps run from 0 to the end inclusive, so the
    first and the last state are both evaluated. Random numbers depend on (seed, step) alone: nothing to restore.
    """
    from evaluate import Log, flags_of, sha256
    torch.manual_seed(seed)                       # LoRA draws its first A
    student = Student(model, cfg.trainable, cfg.lora, cfg.checkpointing, cfg.compile)
    theta, device = student.theta, student.device
    ref_logp = sequence_logp(student, forget, cfg.micro_batch, cfg.autocast) if cfg.loss == "npo" else None
    teacher = student.copy("cpu" if cfg.teacher_host else None)
    dtype = torch.bfloat16 if cfg.bf16_momentum else torch.float32
    velocity = {n: torch.zeros_like(p, dtype=dtype) for n, p in theta.items()} if cfg.optimizer == "mt" else {}
    # foreach, the default on a card, would take one more copy of the weights
    adamw = torch.optim.AdamW(theta.values(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.01, foreach=False)
    # AdamW until this step: for ever in the baseline, for the epochs of --warm-escape, or (0) never
    escape = math.inf if cfg.optimizer == "adamw" else cfg.warm_escape * cfg.epoch_steps
    key = sha256([flags_of(cfg), seed, folder.name])         # requests of --sustain differ in the folder alone
    first = load_checkpoint(folder, key, student, teacher, velocity, adamw) if cfg.resume else 0
    log = Log(folder, seed, first)
    for step in range(first, cfg.max_epochs * cfg.epoch_steps + 1):
        if step % 10 == 0 or step % cfg.epoch_steps == 0:
            log.flush()                           # raises on NaN, before a checkpoint could keep it
        if step % cfg.epoch_steps == 0:
            if step > first:
                save_checkpoint(folder, key, step, student, teacher, velocity, adamw)
            score = start_score if step == 0 else stop_score(student.model, tokenizer, bench, cfg)
            log.evaluation(step, step // cfg.epoch_steps, {} if score is None else {cfg.stop: score})
            if score is not None and stop_value is not None and score <= stop_value:
                break
        if step == cfg.max_epochs * cfg.epoch_steps:
            break
        if step == escape > 0:                    # AdamW has left the flat start: the mean teacher begins here
            with torch.no_grad():
                for n, q in teacher.items():
                    q.copy_(theta[n])
            adamw.state.clear()
        rng = np.random.default_rng([seed, step])
        f_picks = range(len(forget)) if cfg.full_batch else rng.integers(len(forget), size=cfg.batch).tolist()
        r_picks = range(len(reg)) if cfg.full_batch else rng.integers(len(reg), size=cfg.batch).tolist()
        stats = accumulate_gradients(student, teacher, make_batches(forget, f_picks, cfg.micro_batch, device),
                                     make_batches(reg, r_picks, cfg.micro_batch, device), cfg, it_model, ref_logp)
        grads = [p.grad for p in theta.values()]
        if step < escape:
            norm, l = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm(), torch.ones(())
            adamw.param_groups[0]["lr"] = cfg.lr * warmup(step, cfg.epoch_steps)
            adamw.step()
        else:
            generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step) if cfg.bf16_momentum else None
            norm, l = mean_teacher_step_(list(theta.values()), list(teacher.values()), list(velocity.values()), grads,
                                         cfg.eta, cfg.kappa, cfg.mu, cfg.lam, math.inf if cfg.full_batch else cfg.clip,
                                         cfg.damping_in_norm, generator)
        log.step(step, **stats, grad_norm=norm, l=l)
        del grads                                 # an evaluation needs their room
        adamw.zero_grad(set_to_none=True)
    if None not in (score, stop_value) and score > stop_value:
        print(f"{cfg.stop} {score:.2f} has not come down to {stop_value:.2f} in {cfg.max_epochs} epochs: raise "
              "--max-epochs")
    return student.model, step


def stop_score(model, tokenizer, bench, cfg):
    """The stop metric of the model as it is now, in 0..100; None without a stop rule."""
    from evaluate import evaluate_muse
    if cfg.stop == "none":
        return None
    was_training, _ = model.training, model.eval()
    score = evaluate_muse(model, tokenizer, bench, metrics=(cfg.stop,), batch_size=cfg.eval_batch,
                          max_rows=cfg.max_rows)["metrics"].get(cfg.stop)
    model.train(was_training)
    return score


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


# ===== text to tokens ================================================================================================

def forget_sequences(texts, tokenizer, context, truncate):
    """Forget texts -> lists of token ids, at most `context` long, each at least two tokens (one is predicted)."""
    from evaluate import BadInput, chunks, encode
    parts = [chunks(encode(tokenizer, t), context) for t in texts]
    cut = sum(len(p) > 1 for p in parts)
    if cut:
        print(f"{cut} of {len(parts)} forget texts are longer than {context} tokens: "
              + ("only their first chunk is kept" if truncate else "cut into chunks"))
    sequences = [c for p in parts for c in (p[:1] if truncate else p) if len(c) > 1]
    if not sequences:
        raise BadInput("the forget set has no text of two tokens or more: nothing to unlearn")
    return sequences


def reg_texts(bench, cfg):
    """The texts of the divergence; [] when it is to be taken on text sampled from the target itself."""
    from evaluate import BadInput, read_texts
    source = cfg.reg
    if source == "auto":
        source = "pretrain" if bench.pretraining or cfg.reg_text or bench.name.startswith("muse") else "self"
    if source == "self":
        print("the divergence is taken on text sampled from the target itself (--reg-text FILE for text of yours)")
        return []
    if source == "retain":
        if not bench.retain:
            raise BadInput(f"--reg retain: {bench.name} has no retain texts; use --reg-text FILE or --reg self")
        return bench.retain
    return read_texts(cfg.reg_text) if cfg.reg_text else bench.pretraining or openwebtext(cfg.reg_docs)


def reg_sequences(texts, tokenizer, model, cfg):
    """Token lists for the divergence: chunks of exactly reg_len tokens, shorter ones where no text is that long."""
    from evaluate import BadInput, chunks, context_of, encode
    if not texts:
        return sample_text(model, tokenizer, min(cfg.reg_docs, 256), min(cfg.reg_len, 256, context_of(model)), cfg.seed)
    size = min(cfg.reg_len, context_of(model))
    pieces = [c for t in texts for c in chunks(encode(tokenizer, t), size) if len(c) > 1]
    if not pieces:
        raise BadInput("the text of the divergence has no two tokens: give more by --reg-text FILE, or use --reg self")
    return [c for c in pieces if len(c) == size] or pieces


def openwebtext(n_docs):
    """The first n_docs documents of Skylion007/openwebtext, streamed as parquet: no loading script runs here."""
    from evaluate import BadInput, hub_answers
    hub_answers()                             # where it does not, the library gives up at once
    try:
        from datasets import load_dataset
        rows = load_dataset("Skylion007/openwebtext", revision="refs/convert/parquet", split="train", streaming=True)
        return [row["text"] for row in rows.take(n_docs)]
    except Exception as e:
        raise BadInput(f"OpenWebText cannot be reached ({type(e).__name__}): give pretraining text by --reg-text FILE, "
                       "or use --reg retain or --reg self")


@torch.no_grad()
def sample_text(model, tokenizer, n, length, seed):
    """n sequences of `length` tokens drawn from the model at temperature 1, whatever its own generation config says:
    where no other text is at hand. 32 at once: at 7B in float32 the keys and values of 256 of them would take 69 GB."""
    start = next((t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None), 0)
    torch.manual_seed(seed)
    rows = []
    while len(rows) < n:
        ids = torch.full((min(32, n - len(rows)), 1), start, device=model.device)
        rows += model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                               top_p=1.0, repetition_penalty=1.0, max_new_tokens=length - 1,
                               min_new_tokens=length - 1, pad_token_id=start).tolist()
    return rows


# ===== one seed, from a model folder to a model folder and its numbers ===============================================

def run_request(cfg, bench, texts, paths, target, folder, seed, stop_value, start_score, settings):
    """Unlearn `texts` from `target`, save, reload, measure -> dict(steps, seconds, metrics, items); done once only."""
    from evaluate import context_of, evaluate_muse, load_model, load_tokenizer, save_model, stored_dtype, write_json
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "measured.json"
    if cfg.resume and done.exists():
        return json.loads(done.read_text())
    start, device = time.time(), torch.device(cfg.device)
    tokenizer = load_tokenizer(paths["tokenizer"])
    base_dtype = torch.bfloat16 if cfg.lora and device.type == "cuda" else torch.float32
    model = load_model(target, base_dtype, device)
    if hasattr(model, "get_base_model") and not cfg.lora:
        model = model.merge_and_unload()
    it_model = load_model(paths["it"], base_dtype, device) if cfg.loss == "it" else None
    check_models(model, it_model)
    context = min(cfg.context or bench.context, context_of(model))
    forget = forget_sequences(texts, tokenizer, context, bench.truncate)
    reg = reg_sequences(bench.pretraining, tokenizer, model, cfg)
    model, steps = unlearn(model, tokenizer, bench, forget, reg, cfg, folder, seed, stop_value, start_score, it_model)
    save_model(model, tokenizer, folder / "model", None if cfg.lora else stored_dtype(target))
    seconds = time.time() - start
    del model, it_model
    model = load_model(folder / "model", torch.float32, device)   # what is measured is what is saved
    measured = evaluate_muse(model, tokenizer, bench, **settings)
    write_json(done, dict(steps=steps, epochs=steps / cfg.epoch_steps, seconds=seconds, **measured))
    (folder / "checkpoint.safetensors").unlink(missing_ok=True)
    return json.loads(done.read_text())


def check_models(model, it_model):
    """The second model of IT must speak the same vocabulary; said before the first step."""
    from evaluate import BadInput
    if it_model is not None:
        ours, theirs = len(model.get_output_embeddings().weight), len(it_model.get_output_embeddings().weight)
        if ours != theirs:
            raise BadInput(f"--loss it: the target has a vocabulary of {ours}, the second model one of {theirs}; "
                           "name a --base with the target's tokenizer")


def run_seed(cfg, bench, paths, target_metrics, folder, seed, stop_value, settings):
    """One seed and the experiments asked for on top of it -> dict(seed, steps, seconds, metrics, ...)."""
    from evaluate import after_rounding, evaluate_muse, load_tokenizer
    if cfg.sustain:
        target, rows = paths["target"], []
        for k, texts in enumerate(bench.requests):
            row = run_request(cfg, bench, texts, paths, target, folder / f"request{k + 1}", seed, None, None, settings)
            rows.append(dict(request=k + 1, steps=row["steps"], seconds=row["seconds"], metrics=row["metrics"]))
            target = folder / f"request{k + 1}" / "model"
        row |= dict(sustain=rows, steps=sum(r["steps"] for r in rows), seconds=sum(r["seconds"] for r in rows))
        shutil.copytree(target, folder / "model", dirs_exist_ok=True)
    else:
        row = run_request(cfg, bench, bench.forget, paths, paths["target"], folder, seed, stop_value,
                          target_metrics.get(cfg.stop), settings)
    row = dict(seed=seed, **row)
    if cfg.relearn:
        row["relearn"] = relearn(cfg, bench, paths, folder, settings)
    if cfg.survive:
        tokenizer = load_tokenizer(paths["tokenizer"])
        row["survive"] = after_rounding(folder / "model", cfg.device,
                                        lambda model: evaluate_muse(model, tokenizer, bench, **settings))
    return row


def relearn(cfg, bench, paths, folder, settings):
    """Table 3: fine-tune the unlearned model on unrelated questions; what comes back was hidden, not forgotten."""
    from evaluate import evaluate_muse, finetune, load_model, load_tokenizer, qa_text
    tokenizer, model = load_tokenizer(paths["tokenizer"]), load_model(folder / "model", torch.float32, cfg.device)
    if hasattr(model, "get_base_model"):
        model = model.merge_and_unload()
    docs = [qa_text(**p).strip() for p in bench.sft]
    finetune(model, tokenizer, docs, lr=cfg.relearn_lr, epochs=2, batch_size=cfg.batch, seed=cfg.seed)
    return evaluate_muse(model, tokenizer, bench, **settings)["metrics"]


# ===== configuration, memory plan, main ==============================================================================

def fill_preset(cfg, bench, lm):
    """Numbers left unset, from the preset of the benchmark; then every check that needs no model."""
    from evaluate import BadInput, check_numbers, parameters_of
    name = cfg.preset or (bench.name if bench.name in PRESETS else "mini" if bench.name.startswith("mini") else "")
    if not name:  # a folder: small models need large steps
        name = "mini" if parameters_of(lm) < 5e7 else "muse_books"
        print(f"numbers left unset come from --preset {name}")
    preset = dict(PRESETS[name])
    stops = preset.pop("stops")
    preset |= LORA[name] if cfg.lora else {}
    for k, v in preset.items():
        if getattr(cfg, k) is None:
            setattr(cfg, k, v)
    check_numbers(cfg, above_0="eta lr relearn_lr clip npo_beta",
                  from_0="alpha kappa lam nlul_tol qkl_scale max_epochs micro_batch lora warm_escape examples seed",
                  from_1="batch epoch_steps seeds eval_batch max_rows reg_docs", from_2="context reg_len")
    if not 0 <= cfg.mu < 1:
        raise BadInput(f"--mu {cfg.mu} must be in [0, 1): with 1 the momentum never decays")
    if cfg.kappa * cfg.eta >= 1:
        raise BadInput(f"kappa*eta = {cfg.kappa * cfg.eta:g} must be below 1: the teacher would jump past the student; "
                       "lower --kappa or --eta")
    for clash, why in (
            (cfg.stop_value is not None and (cfg.stop == "none" or cfg.sustain),
             "--stop-value: with --stop none, or --sustain, nothing ends at it; leave it out"),
            (cfg.stop_value is not None and not 0 <= cfg.stop_value <= 100, "--stop-value must be in 0..100, per cent"),
            (cfg.reg_text and cfg.reg in ("retain", "self"),
             f"--reg-text: --reg {cfg.reg} takes no text; leave one out"),
            (cfg.relearn_data and not cfg.relearn, "--relearn-data is for --relearn: give both or none"),
            (cfg.lora and cfg.trainable == "all", "--lora trains its adapters alone: leave --trainable all out"),
            (cfg.optimizer == "adamw" and (cfg.warm_escape or cfg.bf16_momentum),
             "--warm-escape and --bf16-momentum are the mean teacher's: leave them out of --optimizer adamw")):
        if clash:
            raise BadInput(why)
    if cfg.alpha >= 1:
        print(f"warning: --alpha {cfg.alpha} is not small; the theorem needs alpha << 1 and the model may collapse")
    return stops


def method_name(cfg):
    """Row label, as in the paper's Table 1: MT+NLUL+KL, AdamW+NPO+KL, -star where knowmem_f is the stop rule."""
    name = "+".join((dict(mt="MT", adamw="AdamW")[cfg.optimizer], cfg.loss.upper(), cfg.divergence.upper()))
    extras = [("-star", cfg.stop == "knowmem_f"), (f"-lora{cfg.lora}", cfg.lora), ("-bf16", cfg.bf16_momentum),
              (f"-tol{cfg.nlul_tol:g}", cfg.nlul_tol), ("-full", cfg.full_batch), ("-retain", cfg.reg == "retain"),
              (f"-escape{cfg.warm_escape}", cfg.warm_escape), ("-all", cfg.trainable == "all"),
              ("-sustain", cfg.sustain)]
    return name + "".join(text for text, on in extras if on)


def memory_plan(cfg, lm):
    """Peak memory in GB by part, from a model without weights -> dict. Training only; generation takes less."""
    from evaluate import layer_and_head_bytes, parameters_of
    config, P, trained = lm.config, parameters_of(lm), parameters_of(lm, cfg.lora, cfg.trainable)
    D, V, L = config.hidden_size, config.vocab_size, config.num_hidden_layers
    base = 2 if cfg.lora and cfg.device.startswith("cuda") else 4
    length = max(cfg.context or 1024, cfg.reg_len)
    tokens = (cfg.micro_batch or cfg.batch) * length
    whole = not cfg.lora and cfg.trainable == "all"
    layer, head = layer_and_head_bytes(config, tokens, base, cfg.lora, whole, cfg.device)
    plan = {"weights": P * base + (trained * 4 if cfg.lora else 0), "gradients": 4 * trained,
            "momentum": (2 if cfg.bf16_momentum else 4) * trained * (cfg.optimizer == "mt"),
            "AdamW states": 8 * trained * (cfg.optimizer == "adamw" or cfg.warm_escape > 0),
            "teacher": 0 if cfg.teacher_host else 4 * trained,
            "activations": (L * tokens * D * base + layer if cfg.checkpointing else L * layer) + 5 * tokens * D * 4,
            "teacher's hidden states": cfg.batch * cfg.reg_len * D * base,
            "head": head + V * D * (8 * (base == 2) + 4 * whole)}   # float32 copies, a gradient
    again = {"--relearn: weights, gradients and AdamW states": 16 * P if cfg.relearn else 0}     # of every weight
    return {k: v / 1e9 for k, v in max(plan, again, key=lambda parts: sum(parts.values())).items() if v}


def main(argv=None):
    from evaluate import (EMBEDDED, BadInput, Bench, cached_evaluation, check_memory, empty_model, load_bench,
                          parse_config, pick_device, print_examples, provenance, read_pairs, report, resolve_models,
                          run_folder, run_result, write_json)
    cfg = parse_config(Config, __doc__, argv)
    plan_only = cfg.dry_run and cfg.bench in PRESETS                      # the plan of a hub benchmark needs no hub
    bench = Bench(cfg.bench) if plan_only else load_bench(cfg.bench, cfg.data_dir, cfg.forget_split)
    cfg.device = "cuda" if plan_only and cfg.device == "auto" else pick_device(cfg.device)
    path = cfg.target or bench.models.get("target", "")
    if not (path or bench.name in EMBEDDED or plan_only):
        raise BadInput(f"{cfg.bench}: no target model; name the model that memorised the texts by --target, or make "
                       f"one by evaluate.py prepare --bench {cfg.bench} --base tiny")
    lm = empty_model(path, bench.name)
    stops = fill_preset(cfg, bench, lm)
    check_memory(memory_plan(cfg, lm), cfg, "--bf16-momentum --teacher-host")
    if cfg.dry_run:
        return
    bench.pretraining = reg_texts(bench, cfg)
    if cfg.relearn:
        bench.sft = read_pairs(cfg.relearn_data) if cfg.relearn_data else bench.sft
        if not bench.sft:
            raise BadInput("--relearn: the benchmark has no unrelated pairs; name a JSON-lines file by --relearn-data")
    folder = run_folder(cfg, method_name(cfg))
    paths = resolve_models(bench, cfg.base, cfg.target, cfg.retrain, cfg.tokenizer)
    if cfg.loss == "it":
        paths["it"] = cfg.base or (IT_MODEL if bench.name.startswith("muse") else paths.get("base"))
        if not paths["it"]:
            raise BadInput("--loss it: needs a second model that does not know the texts; name it by --base")
    settings, retrain = dict(batch_size=cfg.eval_batch, max_rows=cfg.max_rows), None
    config = asdict(cfg) | dict(script="mt_unlearn.py", name=method_name(cfg), provenance=provenance(bench, paths),
                                paths={k: str(v) for k, v in paths.items()})
    write_json(folder / "config.json", config)
    if paths.get("retrain"):
        retrain = cached_evaluation(paths["retrain"], bench, paths["tokenizer"], device=cfg.device, **settings)
        settings["auc_retrain"] = retrain["metrics"].get("auc")
    target = cached_evaluation(paths["target"], bench, paths["tokenizer"], device=cfg.device, **settings)
    stop_value = None
    if cfg.stop != "none" and not cfg.sustain:
        if cfg.stop not in target["metrics"]:
            why = target["not_computed"].get(cfg.stop)
            raise BadInput(f"--stop {cfg.stop} cannot be measured: {why}; use --stop none")
        known = (retrain or {"metrics": stops})["metrics"].get(cfg.stop)
        stop_value = known if cfg.stop_value is None else cfg.stop_value
        source = ("--stop-value" if cfg.stop_value is not None else
                  "the retrain model's" if retrain else "MUSE's published one")
        print(f"stop: {cfg.stop} <= {stop_value:.2f} ({source})" if stop_value is not None else
              f"stop: after {cfg.max_epochs} epochs (no retrain model and no --stop-value for {cfg.stop})")
        if stop_value is not None and target["metrics"][cfg.stop] <= stop_value:
            print(f"warning: the target meets this before the first step ({target['metrics'][cfg.stop]:.2f}): it has "
                  "not memorised the texts, and nothing will be unlearned. Give another --target, or --stop-value")
    rows = [run_seed(cfg, bench, paths, target["metrics"], folder / f"seed{s}", s, stop_value, settings)
            for s in range(cfg.seed, cfg.seed + cfg.seeds)]
    write_json(folder / "result.json", run_result(config, rows, target, retrain))
    if cfg.examples:
        print_examples(cfg.examples, dict(target=target["items"], unlearned=rows[0]["items"])
                       | (dict(retrain=retrain["items"]) if retrain else {}))
    print(report([folder], out=folder))
    print(f"run: {folder}")


if __name__ == "__main__":
    from evaluate import run_main
    run_main(main)

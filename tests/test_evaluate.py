"""evaluate.py, MUSE and report: benchmarks, models, generation, metrics, tables."""
import json
import os
import random
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate as ev
from evaluate import BadInput

WORDS = ("the old king gave his daughter a golden ring and she went into dark forest where seven ravens sang of war "
         "bread milk honey A B C D Question: Answer: Choices: Correct answer:").split()


def sentence(n, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=n))


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE with BOS and EOS, made here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([sentence(400, i) for i in range(5)], trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>")


def tiny(vocab, context=512, seed=0, **more):
    """A random Llama whose logits are far apart, so that greedy text is well defined."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
                                        initializer_range=0.3, bos_token_id=0, eos_token_id=1, **more)).eval()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny(len(tokenizer))


@pytest.fixture
def folder(tmp_path):
    """A benchmark folder with every part."""
    def write(name, obj):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(obj if isinstance(obj, str) else json.dumps(obj), encoding="utf8")
    write("forget.txt", "\n---\n".join(sentence(60, i) for i in range(6)))
    write("retain.jsonl", "\n".join(json.dumps({"text": sentence(30, 10 + i)}) for i in range(3)) + "\n\n")
    write("raw/holdout.json", [sentence(60, 20 + i) for i in range(5)])
    for side in ("forget", "retain"):
        write(f"knowmem/{side}_qa.json", [dict(question=sentence(5, i), answer=sentence(2, 30 + i)) for i in range(4)])
        write(f"knowmem/{side}_qa_icl.json", [dict(question=sentence(5, 40 + i), answer=sentence(2, i)) for i in range(3)])
    for split, n in (("dev", 12), ("validation", 9)):
        write(f"mmlu/{split}.jsonl", "\n".join(json.dumps(dict(
            question=sentence(4 + i, 50 + i), subject=("law", "art")[i % 2], choices=[sentence(2, i + j) for j in range(4)],
            answer=i % 4)) for i in range(n)))
    return tmp_path


# ----- metrics: hand values and slow loops -----

def slow_rouge(a, b):
    """ROUGE-L F1 and recall by the recursive definition of the longest common subsequence."""
    from functools import lru_cache
    a, b = (re.findall("[a-z0-9]+", s.lower()) for s in (a, b))

    @lru_cache(None)
    def lcs(i, j):
        if i == len(a) or j == len(b):
            return 0
        return 1 + lcs(i + 1, j + 1) if a[i] == b[j] else max(lcs(i + 1, j), lcs(i, j + 1))
    n = lcs(0, 0)
    return (2 * n / (len(a) + len(b)) if n else 0.0), n / max(1, len(b))


def test_rouge_l_by_hand_and_against_the_definition():
    assert ev.rouge_l("the cat sat", "the big cat sat down") == pytest.approx(2 * 3 / 8)            # LCS 3, lengths 3 and 5
    assert ev.rouge_l("the cat sat", "the big cat sat down", "recall") == pytest.approx(3 / 5)
    assert ev.rouge_l("the cat sat", "the big cat sat down", "precision") == 1
    assert ev.rouge_l("cats", "cat") == 0 and ev.rouge_l("cats", "cat", stemmer=True) == 1
    assert ev.rouge_l("", "cat") == 0 and ev.rouge_l("λόγος", "λόγος") == 0                         # its known blindness
    for seed in range(30):
        a, b = sentence(12, seed), sentence(9, seed + 100)
        f1, recall = slow_rouge(a, b)
        assert ev.rouge_l(a, b) == pytest.approx(f1, abs=1e-12)
        assert ev.rouge_l(a, b, "recall") == pytest.approx(recall, abs=1e-12)


def test_min_k_by_hand_and_against_a_loop():
    assert ev.min_k_score([-1.0, -5.0, -2.0, -3.0, -4.0]) == pytest.approx(4.5)                      # int(.4 * 5) = 2: 5 and 4
    assert ev.min_k_score([-0.7]) == pytest.approx(0.7)                                              # at least one
    assert ev.min_k_score([-1.0, -2.0, -9.0, -3.0], k=1.0) == pytest.approx(15 / 4)
    rng = np.random.default_rng(0)
    for n in (2, 3, 7, 100):
        logp, left, total = -rng.exponential(size=n), None, 0.0
        left = list(logp)
        for _ in range(max(1, int(0.4 * n))):
            total += left.pop(int(np.argmin(left)))
        assert ev.min_k_score(torch.tensor(logp)) == pytest.approx(-total / max(1, int(0.4 * n)), rel=1e-12)


def test_auc_against_all_pairs_and_sklearn():
    from sklearn.metrics import roc_auc_score
    assert ev.auc([2, 2], [1, 2]) == 0.75 and ev.auc([0, 1], [2, 3]) == 0 and ev.auc([5], [5]) == 0.5
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, b = rng.integers(0, 6, 13), rng.integers(1, 7, 9)                                         # many ties
        pairs = np.mean([(x > y) + 0.5 * (x == y) for x in a for y in b])
        assert ev.auc(a, b) == pytest.approx(pairs, abs=1e-12)
        assert ev.auc(a, b) == pytest.approx(roc_auc_score([1] * 13 + [0] * 9, np.concatenate([a, b])), abs=1e-12)
        assert ev.auc(a, b) == pytest.approx(1 - ev.auc(b, a), abs=1e-12)


def test_privleak_gives_the_published_numbers():
    assert ev.privleak(0.0009, 0.4772) == pytest.approx(-99.81, abs=0.005)
    assert ev.privleak(1, 0.4772) == pytest.approx(109.56, abs=0.005)
    assert ev.privleak(0.2305, 0.5393) == pytest.approx(-57.26, abs=0.005)
    assert ev.privleak(0.5, 0.5) == 0
    with pytest.warns(UserWarning, match="too near 0"):
        ev.privleak(0.5, 0.05)
    with pytest.warns(UserWarning):
        assert np.isnan(ev.privleak(0.5, 0.0))


# ----- tokens -----

def test_encode_has_one_bos_and_never_an_eos(tokenizer):
    plain = ev.encode(tokenizer, "the king", bos=False)
    assert tokenizer.bos_token_id not in plain
    assert ev.encode(tokenizer, "the king") == [tokenizer.bos_token_id] + plain
    assert ev.encode(tokenizer, "<s>the king") == [tokenizer.bos_token_id] + plain                   # text that spells BOS
    assert ev.encode(tokenizer, "") == [tokenizer.bos_token_id]
    from transformers import PreTrainedTokenizerFast
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    assert ev.encode(bare, "the king") == plain


def test_chunks_and_padding():
    assert ev.chunks(range(7), 3) == [[0, 1, 2], [3, 4, 5]] and ev.chunks([1], 3) == [[1]]
    assert ev.chunks(range(5), 3) == [[0, 1, 2], [3, 4]]
    ids, mask = ev.pad_batch([[0, 5], [7, 0, 9]], pad_id=0)
    assert ids.tolist() == [[0, 5, 0], [7, 0, 9]] and mask.tolist() == [[True, True, False], [True] * 3]
    ids, mask = ev.pad_batch([[0, 5], [7, 0, 9]], pad_id=3, side="left")
    assert ids.tolist() == [[3, 0, 5], [7, 0, 9]] and mask.tolist() == [[False, True, True], [True] * 3]
    lengths = [5, 900, 6, 7, 300, 5, 310]
    groups = ev.batches(lengths, 3)
    assert sorted(i for g in groups for i in g) == list(range(7)) and max(map(len, groups)) <= 3
    assert all(max(lengths[i] for i in g) <= 1.25 * min(lengths[i] for i in g) + 32 for g in groups)


# ----- generation and log-probabilities against the plainest loop -----

def plain_greedy(model, ids, n, ends=()):
    """No cache, no batch, no padding: the whole sequence through the model for every token."""
    out = []
    for _ in range(n):
        with torch.no_grad():
            token = model(torch.tensor([ids + out])).logits[0, -1].argmax().item()
        if token in ends:
            break
        out.append(token)
    return out


PROMPTS = [sentence(n, n) for n in (3, 40, 9, 10, 4, 25, 11)]


@pytest.mark.parametrize("shared", ["", sentence(20, 99) + " "])
@pytest.mark.parametrize("bos", [True, False])
def test_generation_is_the_plain_loop_at_any_batch_size(model, tokenizer, shared, bos):
    """With a long shared prefix (cached once), with BOS alone, and with nothing shared at all."""
    seqs = [ev.encode(tokenizer, shared + p, bos) for p in PROMPTS]
    want = [tokenizer.decode(plain_greedy(model, s, 12, {1}), skip_special_tokens=True) for s in seqs]
    assert len(set(want)) > 3                                            # the prompts matter, or the test shows nothing
    for batch_size in (1, 4, 16):
        stats = {}
        assert ev.generate(model, tokenizer, seqs, 12, batch_size, stats=stats) == want
        assert stats["near_ties"] == 0


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Mpt"])
def test_a_sliding_window_is_counted_in_tokens_not_in_padding(kind):
    """Models for which a column is a distance: a window of 8 tokens, MPT's slopes; prompts that share 3 tokens."""
    import transformers as T
    if int(T.__version__.split(".")[0]) < 5 and kind != "Mistral":
        pytest.skip("transformers 4 runs these only with a cache class of their own")
    sizes = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_key_value_heads=2,
                 max_position_embeddings=256, sliding_window=8, **({"head_dim": 8} if kind == "Gemma2" else {}))
    if kind == "Mpt":
        sizes = dict(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=256)
    torch.manual_seed(0)
    model = getattr(T, kind + "ForCausalLM")(getattr(T, kind + "Config")(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6)                                                # distinct best tokens
    model.generation_config.eos_token_id = None
    numbers = SimpleNamespace(eos_token_id=None, bos_token_id=None, decode=lambda ids, **_: list(ids))
    seqs = [[5, 9, 3] + [(7 * i * j + j) % 90 + 1 for j in range(n)] for i, n in enumerate((4, 20, 9, 31, 2), 1)]
    want = [plain_greedy(model, s, 8) for s in seqs]
    for batch_size in (1, 2, 5):
        assert ev.generate(model, numbers, seqs, 8, batch_size) == want


def test_generation_stops_at_eos_and_at_strings(model, tokenizer):
    seqs = [ev.encode(tokenizer, p) for p in PROMPTS]
    long = [plain_greedy(model, s, 12) for s in seqs]
    model.generation_config.eos_token_id = [1, long[1][4]]               # a token that does occur ends the text now
    try:
        ends = {1, long[1][4]}
        want = [tokenizer.decode(plain_greedy(model, s, 12, ends)) for s in seqs]
        assert ev.generate(model, tokenizer, seqs, 12, 4) == want and len(want[1]) < len(tokenizer.decode(long[1]))
    finally:
        model.generation_config.eos_token_id = 1
    full = ev.generate(model, tokenizer, seqs, 12, 4)
    stop = full[0][2:4]
    for batch_size in (1, 4, 16):
        cut = ev.generate(model, tokenizer, seqs, 12, batch_size, stop=(stop,))
        assert [c.split(stop)[0] for c in cut] == [f.split(stop)[0] for f in full] and len(cut[0]) < len(full[0])


def test_near_ties_are_counted(tokenizer):
    model = tiny(len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight[5] = model.lm_head.weight[6]                # two tokens with one and the same logit
        model.lm_head.weight[5:7] *= 50
    stats = {}
    ev.generate(model, tokenizer, PROMPTS, 6, 4, stats=stats)
    assert stats["near_ties"] > 0


def test_empty_prompt_is_named(model, tokenizer):
    with pytest.raises(BadInput, match="prompt 2 of 2"):
        ev.generate(model, tokenizer, [[3], []], 2)
    assert ev.generate(model, tokenizer, [], 2) == []


@pytest.mark.parametrize("budget", [1 << 25, 4000])                      # 4000 floats: a few tokens of logits at a time
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_token_logps_against_a_plain_forward(model, tokenizer, monkeypatch, budget, batch_size):
    monkeypatch.setattr(ev, "LOGIT_BUDGET", budget)
    seqs = [ev.encode(tokenizer, p) for p in PROMPTS] + [[0], [0, 7]]
    for s, got in zip(seqs, ev.token_logps(model, seqs, batch_size)):
        with torch.no_grad():
            logp = model(torch.tensor([s])).logits[0].double().log_softmax(-1)
        want = [logp[t, s[t + 1]].item() for t in range(len(s) - 1)]
        assert got.dtype == torch.float32 and len(got) == len(want)
        np.testing.assert_allclose(got.numpy(), want, atol=2e-5)


def test_continuations_are_scored_whole(model):
    """Tails of one and of several tokens, some of them sharing a beginning, against full forward passes."""
    pairs = [([0, 5, 9], [7]), ([0, 5, 9], [8]), ([0, 5, 9], [7, 11, 12]), ([0, 4], [7, 11]), ([0, 5, 9, 7], [11])]
    want = []
    for stem, tail in pairs:
        with torch.no_grad():
            logp = model(torch.tensor([stem + tail])).logits[0].log_softmax(-1)
        want.append(sum(logp[len(stem) + j - 1, t].item() for j, t in enumerate(tail)))
    for batch_size in (1, 3):
        np.testing.assert_allclose(ev.continuation_logps(model, pairs, batch_size), want, atol=2e-5)


# ----- mmlu -----

def slow_logprob(model, tokenizer, dev, rows):
    """Every letter of every question alone, without cache; the letters' tokens are those after the last shared one."""
    picks = []
    for row in rows:
        text = f"The following are multiple choice questions (with answers) about {row['subject']}.\n\n"
        for r in [d for d in dev if d["subject"] == row["subject"]][:5] + [row]:
            text += r["question"] + "\n" + "".join(f"{x}. {c}\n" for x, c in zip("ABCD", r["choices"])) + "Answer:"
            text += f" {'ABCD'[r['answer']]}\n\n" if r is not row else ""
        ids = [ev.encode(tokenizer, text + f" {x}") for x in "ABCD"]
        start = next(i for i in range(len(ids[0])) if len({s[i] for s in ids}) > 1)
        scores = []
        for s in ids:
            with torch.no_grad():
                logp = model(torch.tensor([s])).logits[0].log_softmax(-1)
            scores.append(sum(logp[t - 1, s[t]].item() for t in range(start, len(s))))
        picks.append("ABCD"[int(np.argmax(scores))])
    return picks


@pytest.fixture(scope="module")
def wide(tokenizer):
    return tiny(len(tokenizer), context=4096, seed=3)


def test_mmlu_logprob_against_one_letter_at_a_time(wide, tokenizer, folder):
    bench = ev.load_bench(str(folder))
    want = slow_logprob(wide, tokenizer, bench.mmlu["dev"], bench.mmlu["validation"])
    for batch_size in (1, 4, 16):
        score, items, shots = ev.mmlu(wide, tokenizer, bench.mmlu["dev"], bench.mmlu["validation"], "logprob", batch_size)
        assert [i["response"] for i in items] == want and shots == "5"
    assert score == pytest.approx(100 * np.mean([p == "ABCD"[r["answer"]] for p, r in zip(want, bench.mmlu["validation"])]))
    assert len(set(want)) > 1


def test_mmlu_generative_prompt_and_first_character(wide, tokenizer, folder, monkeypatch):
    bench, seen = ev.load_bench(str(folder)), []

    def fake(model, tokenizer, seqs, new, batch_size, stats=None):
        seen.extend(seqs)
        assert new == 4
        return [" B\nx"] * len(seqs)
    monkeypatch.setattr(ev, "generate", fake)
    score, items, shots = ev.mmlu(wide, tokenizer, bench.mmlu["dev"], bench.mmlu["validation"], "generative", final="Quesion:")
    assert shots == "5" and {i["response"] for i in items} == {"B"} and score == pytest.approx(100 * 2 / 9)
    text = tokenizer.decode(seen[0], skip_special_tokens=True)
    assert text.count("Question:") == 5 and text.count("Quesion:") == 1 and text.endswith("\n\nCorrect answer:")
    row = bench.mmlu["validation"][0]
    assert text.endswith(f"Quesion: {row['question']}\n\nChoices:\n" + "".join(
        f"{x}. {c}\n" for x, c in zip("ABCD", row["choices"])) + "\nCorrect answer:")


def test_questions_without_worked_examples(model, tokenizer, folder):
    for side in ("forget", "retain"):
        (folder / "knowmem" / f"{side}_qa_icl.json").unlink()
    out = ev.evaluate_muse(model, tokenizer, ev.load_bench(str(folder)), metrics=("knowmem_f",))
    assert "0 worked examples" in out["definitions"]["knowmem_f"]


def test_fewer_shots_then_not_computed(tokenizer, folder):
    bench = ev.load_bench(str(folder))
    small = ev.evaluate_muse(tiny(len(tokenizer), context=150), tokenizer, bench)
    assert re.search(r"[0-4]-shot", small["definitions"]["mmlu_val"]) and "mmlu_val_logprob" in small["metrics"]
    none = ev.evaluate_muse(tiny(len(tokenizer), context=40), tokenizer, ev.load_bench(str(folder)), metrics=("mmlu_val",))
    assert re.fullmatch(r"prompt \d+ > context 36", none["not_computed"]["mmlu_val"]) and not none["metrics"]


# ----- benchmarks from folders -----

def test_folder_with_every_part(folder):
    bench = ev.load_bench(str(folder))
    assert [len(x) for x in (bench.forget, bench.retain, bench.holdout, bench.verbmem)] == [6, 3, 5, 0]
    assert len(bench.knowmem) == 4 and len(bench.mmlu["validation"]) == 9 and not bench.missing
    assert [t for request in bench.requests for t in request] == bench.forget and len(bench.requests) == 4
    assert bench.train == {"target": bench.retain + bench.forget, "retrain": bench.retain}


def test_forget_txt_is_enough(tmp_path, model, tokenizer):
    (tmp_path / "forget.txt").write_bytes(b"\xef\xbb\xbf" + (sentence(70) + "\n\n" + sentence(60, 1)).replace("\n", "\r\n").encode())
    bench = ev.load_bench(str(tmp_path))
    assert bench.forget == [sentence(70) + "\n\n" + sentence(60, 1)]                  # BOM gone, paragraphs joined
    out = ev.evaluate_muse(model, tokenizer, bench)
    assert set(out["metrics"]) == {"verbmem_f"} and all(str(tmp_path) in why for why in out["not_computed"].values())
    assert set(out["not_computed"]) == set(ev.METRICS) - {"verbmem_f"}


def test_how_a_txt_is_split(tmp_path):
    assert ev.documents("a\n---\n b \n  --- \nc\n\nd") == ["a", "b", "c\n\nd"]
    long = ["x" * 1500, "y" * 1500, "z" * 10]
    assert ev.documents("\n\n".join(long)) == [long[0] + "\n\n" + long[1], long[2]]
    assert ev.documents(" \n\n ") == []


@pytest.mark.parametrize("name, content, message", [
    ("forget.txt", b"", "missing or empty"),
    ("forget.txt", b"\xff\xfea", r"forget.txt: not UTF-8 \(byte 0\)"),
    ("forget.json", b'["a", 3]', "forget.json: row 2 is neither"),
    ("forget.json", b'["a b", "  "]', "forget.json: row 2 is empty"),
    ("forget.json", b'{"a": 1}', "expected a list"),
    ("forget.json", b'["a",\n "b"', "forget.json: not JSON at line 2"),
    ("forget.jsonl", b'{"text": "a b"}\n{"text": "c"', "forget.jsonl: not JSON at line 2"),
    ("forget.jsonl", b'{"text": "a b"}\n{"txt": "c"}', "forget.jsonl: row 2 is neither"),
    ("verbmem/forget.json", b'[{"prompt": "a"}]', 'row 1 has no "gt"'),
    ("knowmem/forget_qa.json", b'[{"question": "a", "answer": ""}]', 'row 1: "answer" is empty'),
    ("knowmem/forget_qa.json", b'[{"question": "a", "answer": 3}]', 'row 1: "answer" is not a text'),
    ("knowmem/forget_qa.json", b'["a"]', 'row 1 has no "question"'),
    ("mmlu/validation.jsonl", b'{"question": "q", "choices": ["a"], "answer": 0}', 'row 1 needs "choices"'),
    ("mmlu/validation.jsonl", b'{"question": "q", "choices": ["a", "b"], "answer": 2}', "index of a choice"),
    ("mmlu/validation.jsonl", b'{"question": "q", "choices": ["a", "b"], "answer": true}', "index of a choice"),
])
def test_bad_files_are_named_in_one_line(tmp_path, name, content, message):
    if not name.startswith("forget"):
        (tmp_path / "forget.txt").write_text("one two three")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message) as e:
        ev.load_bench(str(tmp_path))
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)


def test_questions_as_texts_and_duplicates(tmp_path):
    row = '{"question": "Who?", "answer": "Me."}\n'
    (tmp_path / "forget.jsonl").write_text(row * 2)
    assert ev.as_texts(*ev.read_rows(tmp_path, "forget")) == ["Question: Who?\nAnswer: Me."] * 2


def test_local_copy_of_the_hub_with_its_splits(tmp_path):
    import pyarrow
    from pyarrow import parquet
    for split, rows in (("train/forget", ["a b", "c d", "e f"]), ("raw/forget", ["a b"]), ("train/retain1", ["g h"]),
                        ("train/retain2", ["i j"]), ("raw/holdout", ["k l"])):
        path = tmp_path / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table({"text": rows}), path)
    news = ev.load_bench("muse_news", data_dir=str(tmp_path))
    assert len(news.forget) == 3 and news.retain == ["g h", "i j"] and news.holdout == ["k l"]
    assert len(ev.load_bench("muse_news", str(tmp_path), "raw").forget) == 1
    assert news.auc_retrain == 0.4772 and news.truncate and news.models["target"].endswith("news_target")
    assert ev.load_bench("muse_books", str(tmp_path)).auc_retrain == 0.5393


def test_cut_queries_are_the_texts_own_words(tokenizer, tmp_path):
    (tmp_path / "forget.txt").write_text("\n---\n".join([sentence(900), sentence(1200, 1), "golden ring", sentence(9, 4)]))
    (tmp_path / "holdout.txt").write_text(sentence(800, 2))
    raw = ev.load_bench(str(tmp_path))
    bench = ev.cut_queries(raw, tokenizer, 4096)
    assert not raw.verbmem and not raw.privleak              # the key of the cache must not depend on who asked first
    assert len(bench.verbmem) >= 8 and bench.verbmem_new_tokens == 128
    for q in bench.verbmem:
        assert any(f"{q['prompt']} {q['gt']}" in text for text in bench.forget)
        assert {q["prompt"].split()[0], q["prompt"].split()[-1], q["gt"].split()[0]} <= set(WORDS)      # whole words
    assert {"prompt": "golden", "gt": "ring"} in bench.verbmem
    long = bench.verbmem[0]
    assert 180 <= len(ev.encode(tokenizer, long["prompt"])) <= 201 and 120 <= len(ev.encode(tokenizer, long["gt"])) <= 150
    assert bench.privleak["holdout"] and all(t in bench.holdout[0] for t in bench.privleak["holdout"])
    assert ev.cut_queries(bench, tokenizer, 4096) == bench
    raw.forget[:2] = []                                      # of short texts no more is generated than the longest reference has
    assert (short := ev.cut_queries(raw, tokenizer, 4096)).verbmem_new_tokens == max(
        len(ev.encode(tokenizer, q["gt"])) for q in short.verbmem) < 30
    raw.forget[:0] = ["b c", "a"]
    with pytest.raises(BadInput, match="forget text 2 .* shorter than two tokens"):
        ev.cut_queries(raw, tokenizer, 4096)


def test_unknown_names_and_the_hub(monkeypatch):
    with pytest.raises(BadInput, match="muse_news.*muse_books.*mini_news"):
        ev.load_bench("muse_boks")
    with pytest.raises(BadInput, match="no such folder"):
        ev.load_bench("muse_news", data_dir="nowhere/at/all")
    monkeypatch.setattr(ev, "hub_answers", lambda: False)
    with pytest.raises(BadInput, match="muse-bench/MUSE-Books.*--data-dir"):
        ev.load_bench("muse_books")
    with pytest.raises(BadInput, match="hub does not answer.*--tokenizer"):
        ev.load_tokenizer("nobody/nothing-of-the-kind")
    with pytest.raises(BadInput, match="no such folder"):
        ev.load_model("./no/such/model")


def test_the_hub_s_configs_become_the_same_benchmark(monkeypatch):
    """A stand-in for the datasets library with the hub's layout: no network is needed to see which split goes where."""
    data = {"raw": {"forget": ["r1"], "retain1": ["r2"], "retain2": ["r3"], "holdout": ["h"]},
            "train": {"forget": ["t1", "t2"], "retain1": ["t3"], "retain2": ["t4"]},
            "sust": {f"forget_{i}": [f"s{i}"] for i in range(1, 5)}, "privleak": {"forget": ["p1"], "holdout": ["p2"]},
            "verbmem": {"forget": [dict(prompt="a", gt="b")]}, "all": {"validation": [dict(
                question="q", subject="law", choices=["a", "b"], answer=1)]}}
    as_rows = {c: {k: [{"text": x} if isinstance(x, str) else x for x in rows] for k, rows in splits.items()}
               for c, splits in data.items()}
    monkeypatch.setattr(ev, "hub_answers", lambda: True)

    def load_dataset(repo, part):
        if part not in as_rows:
            raise ValueError(f"BuilderConfig '{part}' not found. Available: {list(as_rows)}")
        return as_rows[part]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(ev, "hub_dataset", ev.hub_dataset.__wrapped__)   # or the tests that follow would find this data
    bench = ev.load_bench("muse_books")
    assert (bench.forget, bench.retain, bench.holdout) == (["t1", "t2"], ["t3", "t4"], ["h"])
    assert bench.requests == [["s1"], ["s2"], ["s3"], ["s4"]] and bench.verbmem == [dict(prompt="a", gt="b")]
    assert bench.mmlu["validation"][0]["answer"] == 1 and set(bench.missing) == {"knowmem_f", "knowmem_r"}
    assert ev.load_bench("muse_books", forget_split="raw").forget == ["r1"]


def test_gated_models_name_the_login(monkeypatch):
    class Gated:
        @staticmethod
        def from_pretrained(*_, **__):
            raise OSError("You are trying to access a gated repo.\n401 Client Error")
    monkeypatch.setattr(ev, "hub_answers", lambda: True)
    with pytest.raises(BadInput, match="hf auth login.*--tokenizer") as e:
        ev._load(Gated, "meta-llama/Llama-2-7b-hf", "tokenizer")
    assert "\n" not in str(e.value)


# ----- models -----

@pytest.fixture
def saved(model, tokenizer, tmp_path):
    ev.save_model(model, tokenizer, tmp_path / "m")
    return tmp_path / "m"


def test_saved_models_come_back(model, tokenizer, saved):
    again = ev.load_model(saved)
    assert not again.training and all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert ev.encode(ev.load_tokenizer(saved), PROMPTS[0]) == ev.encode(tokenizer, PROMPTS[0])
    ev.save_model(model, tokenizer, saved, dtype=torch.bfloat16)                                     # over a full folder
    half = ev.load_model(saved)
    assert all(torch.equal(a.bfloat16().float(), b) for a, b in zip(model.parameters(), half.parameters()))
    assert next(model.parameters()).dtype == torch.float32
    config = json.loads((saved / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert [p.name for p in saved.parent.iterdir()] == ["m"]                                         # nothing left beside


def test_a_failed_save_leaves_the_old_folder(model, tokenizer, saved, monkeypatch):
    before = ev.sha256(saved)
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        ev.save_model(tiny(len(tokenizer), seed=5), tokenizer, saved)
    assert ev.sha256(saved) == before and [p.name for p in saved.parent.iterdir()] == ["m"]


def test_many_writers_leave_one_whole_folder(tmp_path):
    def write(k):
        for _ in range(10):
            new = ev.beside(tmp_path / "m")
            new.mkdir()
            for name in "ab":
                (new / name).write_text(str(k))
            ev.rename_folder(new, tmp_path / "m")
    threads = [threading.Thread(target=write, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (tmp_path / "m" / "a").read_text() == (tmp_path / "m" / "b").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_pickles_and_foreign_code_are_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    for name in ("config.json", "tokenizer_config.json"):
        old = (saved / name).read_text()
        (saved / name).write_text(json.dumps({**json.loads(old), "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
        with pytest.raises(BadInput, match=f"{name} asks to run Python code"):
            ev.load_model(saved)
        with pytest.raises(BadInput, match="auto_map"):
            ev.load_tokenizer(saved)
        (saved / name).write_text(old)
    (saved / "model.safetensors").rename(saved / "x.txt")
    with pytest.raises(BadInput, match="no .safetensors"):
        ev.load_model(saved)
    torch.save({}, saved / "pytorch_model.bin")
    with pytest.raises(BadInput, match="pickled weights .*can run code"):
        ev.load_model(saved)
    assert config["model_type"] == "llama" and ev.load_tokenizer(saved)                              # the tokenizer is harmless


def test_adapters_load_onto_their_base(model, tokenizer, saved, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(ev.load_model(saved), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(saved)
    ev.save_model(adapted, tokenizer, tmp_path / "a")
    again = ev.load_model(tmp_path / "a")
    want = ev.generate(adapted.eval(), tokenizer, PROMPTS, 6, 4)
    assert ev.generate(again, tokenizer, PROMPTS, 6, 4) == want != ev.generate(model, tokenizer, PROMPTS, 6, 4)
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(BadInput, match="pickled"):
        ev.load_model(tmp_path / "a")


def test_nan_weights_and_foreign_tokenizers(model, tokenizer, saved, folder):
    with pytest.raises(BadInput, match="do not belong together"):
        ev.evaluate_muse(tiny(len(tokenizer) - 1), tokenizer, ev.load_bench(str(folder)))
    bad = tiny(len(tokenizer))
    with torch.no_grad():
        bad.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    ev.save_model(bad, tokenizer, saved)
    with pytest.raises(BadInput, match="up_proj.weight holds NaN"):
        ev.load_model(saved)


def test_rounding_is_absmax_per_output_channel():
    m = tiny(64)
    before = {n: p.clone() for n, p in m.named_parameters()}
    ev.round_weights_(m, "int8")
    for n, p in m.named_parameters():
        if p.ndim != 2 or "embed" in n or "lm_head" in n:
            assert torch.equal(p, before[n])
            continue
        for row, old in zip(p, before[n]):
            step = old.abs().max() / 127
            assert (row - old).abs().max() <= step * 0.5001 and len(set((row / step).round().tolist())) > 4
            torch.testing.assert_close(row / step, (row / step).round(), atol=1e-3, rtol=0)
    ev.round_weights_(m, "int4")
    assert all(len(row.unique()) <= 15 for row in m.model.layers[0].mlp.up_proj.weight)
    b = ev.round_weights_(tiny(64), "bf16")
    assert torch.equal(b.model.embed_tokens.weight, before["model.embed_tokens.weight"].bfloat16().float())
    with pytest.raises(BadInput, match="bf16, int8 or int4"):
        ev.round_weights_(m, "fp4")


# ----- the whole evaluation -----

def test_evaluation_does_not_depend_on_the_batch_size(model, tokenizer, folder):
    runs = [ev.evaluate_muse(model, tokenizer, ev.load_bench(str(folder)), batch_size=b, max_rows=5, auc_retrain=0.5)
            for b in (1, 4, 16)]
    assert runs[0]["not_computed"].keys() <= {"mmlu_val", "mmlu_val_logprob"}
    for other in runs[1:]:
        for metric, value in runs[0]["metrics"].items():
            assert other["metrics"][metric] == pytest.approx(value, abs=1e-5)
        for metric in ("verbmem_f", "knowmem_f", "knowmem_r"):
            assert [i["response"] for i in other["items"][metric]] == [i["response"] for i in runs[0]["items"][metric]]
        for side in ("forget", "holdout"):
            for a, b in zip(other["items"]["auc"][side], runs[0]["items"]["auc"][side]):
                assert a["score"] == pytest.approx(b["score"], abs=1e-5)
    few = ev.evaluate_muse(model, tokenizer, ev.load_bench(str(folder)), metrics=("verbmem_f",), max_rows=2)
    assert set(few["metrics"]) == {"verbmem_f"} and len(few["items"]["verbmem_f"]) == 2


def test_the_reference_of_privleak_is_named(model, tokenizer, folder):
    bench = ev.load_bench(str(folder))
    out = ev.evaluate_muse(model, tokenizer, bench, metrics=("privleak",))
    assert "retrain" in out["not_computed"]["privleak"] and "auc" in out["metrics"]
    bench.auc_retrain = 0.5
    assert "published" in ev.evaluate_muse(model, tokenizer, bench, metrics=("privleak",))["definitions"]["privleak"]
    out = ev.evaluate_muse(model, tokenizer, bench, metrics=("privleak",), auc_retrain=0.4)
    assert "measured" in out["definitions"]["privleak"]
    sides = [[item["score"] for item in out["items"]["auc"][side]] for side in ("forget", "holdout")]
    assert out["metrics"]["auc"] == ev.auc(*sides) != 0.5
    assert out["metrics"]["privleak"] == pytest.approx(100 * (out["metrics"]["auc"] - 0.4) / 0.4)
    with pytest.raises(BadInput, match="unknown metric nonsense"):
        ev.evaluate_muse(model, tokenizer, bench, metrics=("nonsense",))


def test_knowmem_cuts_the_answer(model, tokenizer, monkeypatch):
    monkeypatch.setattr(ev, "generate", lambda *a, **k: ["a ring\n\nQuestion: x", "a ring\nQuestion: y", "a ringQuestion: z", " a ring"])
    rows = [dict(question="q", answer="a ring")] * 4
    score, items, k = ev.knowmem(model, tokenizer, rows, rows[:2])
    assert [i["response"] for i in items] == ["a ring", "a ring", "a ring", " a ring"] and score == 100 and k == 2


def test_verbmem_reference_counts_the_bos(model, tokenizer):
    gt = sentence(50, 7)
    _, items = ev.verbmem(model, tokenizer, [dict(prompt="the king", gt=gt)], new_tokens=10)
    ids = tokenizer(gt, add_special_tokens=False)["input_ids"]
    assert items[0]["reference"] == tokenizer.decode(ids[:9])                                        # 9 tokens and the BOS


def test_texts_beyond_the_context_are_read_in_chunks(tokenizer):
    small = tiny(len(tokenizer), context=32)
    (item,) = ev.privleak_scores(small, tokenizer, [sentence(60)])
    ids = ev.encode(tokenizer, sentence(60), bos=False)
    logps = ev.token_logps(small, [[0] + c for c in ev.chunks(ids, 31)])
    assert item["tokens"] == sum(len(c) for c in ev.chunks(ids, 31))
    assert item["score"] == pytest.approx(ev.min_k_score(torch.cat(logps)), abs=1e-6)


def test_an_adapter_is_known_by_its_base_too(model, tokenizer, saved, tmp_path):
    """Another base under the same adapter is another model: no cached number of the old one."""
    from peft import LoraConfig, get_peft_model
    adapted = get_peft_model(ev.load_model(saved), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    before, own = ev.fingerprint(tmp_path / "adapter"), ev.sha256(tmp_path / "adapter")
    assert ev.fingerprint(tmp_path / "adapter") == before and ev.fingerprint(saved) == ev.sha256(saved)
    ev.save_model(tiny(len(tokenizer), seed=7), tokenizer, saved)
    assert ev.fingerprint(tmp_path / "adapter") != before and ev.sha256(tmp_path / "adapter") == own


def test_the_file_named_is_the_one_read(tmp_path):
    for name, text in {"x.txt": "of the txt", "x.jsonl": '{"question": "q", "answer": "a"}\n', "x.md": "of the md", "e.json": "[]"}.items():
        (tmp_path / name).write_text(text)
    assert ev.read_texts(tmp_path / "x.txt") == ["of the txt"] and ev.read_texts(tmp_path / "x.md") == ["of the md"]
    assert ev.read_pairs(tmp_path / "x.jsonl") == [dict(question="q", answer="a")]
    with pytest.raises(BadInput, match="no text in it"):
        ev.read_texts(tmp_path / "e.json")
    with pytest.raises(BadInput, match="cannot be read"):
        ev.read_pairs(tmp_path / "missing.jsonl")


def test_a_privleak_that_is_not_a_number_is_printed_twice(saved, folder, monkeypatch, capsys):
    """The first command measures it, the second reads it back from the cache, where JSON holds null."""
    monkeypatch.setattr(ev, "auc", lambda *_: 0.0)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ev.evaluate_main(["--bench", str(folder), "--model", str(saved), "--retrain", str(saved), "--max-rows", "2", "--device", "cpu"])
        assert "privleak" in capsys.readouterr().out


def test_cached_evaluation_measures_once(model, tokenizer, saved, folder, monkeypatch):
    monkeypatch.setenv("LETHE_CACHE", str(folder / "cache"))
    bench = ev.load_bench(str(folder))
    tokenizer.save_pretrained(folder / "tokenizer")
    settings = dict(tokenizer=str(folder / "tokenizer"), metrics=("verbmem_f",))
    first = ev.cached_evaluation(saved, bench, **settings)
    with monkeypatch.context() as m:
        m.setattr(ev, "load_model", None)                                                            # would fail if called
        assert ev.cached_evaluation(saved, ev.load_bench(str(folder)), **settings) == first
    ev.save_model(tiny(len(tokenizer), seed=9), tokenizer, saved)
    assert ev.cached_evaluation(saved, bench, **settings)["items"] != first["items"]


GOLDEN = os.environ.get("GOLDEN_DIR", "")


@pytest.mark.skipif(not GOLDEN, reason="GOLDEN_DIR does not name the folder with the released evaluator's numbers")
@pytest.mark.parametrize("name", ["target", "retrain"])
def test_golden_texts_scores_and_log_probabilities(name):
    """The MUSE authors' metric functions at batch 1 on two fine-tuned 260k-parameter models."""
    root = Path(GOLDEN) / "muse_grimm"
    gold = json.loads((root / "golden.json").read_text())
    model, tokenizer = ev.load_model(root / name), ev.load_tokenizer(root / name)
    reference = gold["summary"]["retrain"]["auc_forget_holdout_Min-40%"]
    out = ev.evaluate_muse(model, tokenizer, ev.load_bench(str(root / "data")), auc_retrain=reference)
    gold = gold["models"][name]
    for ours, theirs in (("verbmem_f", "verbmem_f_128"), ("knowmem_f", "knowmem_f"), ("knowmem_r", "knowmem_r")):
        assert out["metrics"][ours] == pytest.approx(gold[theirs]["score_x100"], abs=1e-9)
        for a, b in zip(out["items"][ours], gold[theirs]["items"], strict=True):
            assert (a["response"], a["reference"]) == (b["response"], b["gt"])
            assert a["score"] == pytest.approx(b["rougeL"], abs=1e-12)
    for side in ("forget", "holdout"):
        np.testing.assert_allclose([i["score"] for i in out["items"]["auc"][side]], gold["privleak"]["min40"][side], atol=1e-5)
    assert out["metrics"]["auc"] == gold["privleak"]["auc_forget_holdout_Min-40%"]
    for probe in gold["privleak"]["token_logprobs"].values():
        np.testing.assert_allclose(ev.token_logps(model, [probe["input_ids"]])[0], probe["token_logprobs"], atol=1e-4)


# ----- files, command line -----

def test_json_is_atomic_and_without_nan(tmp_path):
    path = tmp_path / "a" / "x.json"
    ev.write_json(path, dict(a=float("nan"), b=[np.float32(1), torch.tensor(2.0), Path("p")], c=(1, None, True), d={3: "é"}))
    assert json.loads(path.read_text("utf8")) == dict(a=None, b=[1, 2, "p"], c=[1, None, True], d={"3": "é"})
    with pytest.raises(ValueError, match="[Cc]ircular"):
        loop = []
        loop.append(loop)
        ev.write_json(path, loop)
    assert json.loads(path.read_text("utf8"))["a"] is None and len(list(path.parent.iterdir())) == 1


def test_hashes_see_what_matters(saved):
    a = ev.sha256(saved)
    assert ev.sha256(saved) == a and ev.sha256(["x"]) != ev.sha256(["y"])
    (saved / "notes.md").write_text("hello")
    assert ev.sha256(saved) == a
    (saved / "config.json").write_text("{}")
    assert ev.sha256(saved) != a


def test_an_unwritable_cache_names_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LETHE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(BadInput, match="LETHE_CACHE"):
        ev.cache_dir()


@pytest.mark.parametrize("error, code", [(BadInput("two\nlines"), 2), (OSError(28, "No space left on device"), 2),
                                         (RuntimeError("PytorchStreamWriter failed writing file"), 2)])
def test_run_main_says_one_line(error, code, capsys):
    def main():
        raise error
    with pytest.raises(SystemExit) as e:
        ev.run_main(main)
    assert e.value.code == code and capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        ev.run_main(lambda: 1 / 0)


def test_command_line(saved, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LETHE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "o.json"
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--bench", str(folder), "--model", str(saved), "--max-rows", "2", "--device",
                                      "cpu", "--out", str(out)])
    ev.main()
    assert re.search(r"verbmem_f +\d+\.\d+ +ROUGE-L", capsys.readouterr().out)
    assert {"metrics", "items", "definitions", "not_computed", "provenance"} <= json.loads(out.read_text()).keys()
    bad = subprocess.run([sys.executable, "evaluate.py", "--bench", "muse_books"], env=dict(os.environ, HF_HUB_OFFLINE="1"),
                         text=True, capture_output=True)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "--data-dir" in bad.stderr


# ----- report -----

def fake_run(path, name, seeds, bench="muse_news", **more):
    path.mkdir(parents=True)
    result = dict(config=dict(bench=bench, name=name), steps=10, target=dict(verbmem_f=56.0, knowmem_r=55.0, auc=0.001),
                  retrain=dict(verbmem_f=20.0, knowmem_r=54.5), seeds=[dict(seed=i, metrics=dict(
                      verbmem_f=v, knowmem_r=50.0 + i), **more) for i, v in enumerate(seeds)], not_computed={"mmlu_val": "no file"})
    (path / "result.json").write_text(json.dumps(result))
    (path / "seed0").mkdir()
    lines = [dict(kind="step", step=s, seed=0, nll_forget=0.1 * s + 0.1, grad_norm=0.2) for s in range(10)]
    lines.append(dict(kind="eval", step=10, epoch=1, seed=0, metrics={}))
    (path / "seed0" / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "st')     # killed while writing
    return path


def test_report_tables_and_figures(tmp_path, capsys):
    request = [dict(request=k + 1, metrics=dict(verbmem_f=5.0, knowmem_r=50.0 - k)) for k in range(4)]
    runs = [fake_run(tmp_path / "a", "MT+NLUL+KL", [14.0, 16.0]), fake_run(tmp_path / "b", "MT+NLUL+KL", [18.0]),
            fake_run(tmp_path / "c", "AdamW+NPO+KL", [0.0], sustain=request, relearn=dict(verbmem_f=9.0, knowmem_r=1.0),
                     survive=dict(int4=dict(verbmem_f=30.0, knowmem_r=2.0)))]
    (tmp_path / "unfinished").mkdir()
    text = ev.report([*runs, tmp_path / "unfinished"], out=tmp_path / "out")
    assert "unfinished" in capsys.readouterr().err
    assert text == (tmp_path / "out" / "table.md").read_text()
    rows = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith("|")}
    assert rows["MT+NLUL+KL"][:2] == ["16.0 (2.0, 3)", "50.3 (0.6, 3)"]                  # 14, 16, 18; n - 1 in the std
    assert rows["target"][0] == "56.0" and rows["AdamW+NPO+KL, request 4"][1] == "47.0"
    assert rows["AdamW+NPO+KL, relearned"][0] == "9.0" and rows["AdamW+NPO+KL, int4 weights"][0] == "30.0"
    assert "*14.8 (2.3)*" in text and "*52.7 (0.9)*" in text and "mmlu_val not computed: no file" in text
    assert text.index("| target") < text.index("| MT+NLUL+KL") < text.index("*14.8 (2.3)*") < text.index("| AdamW")
    for k in range(1, 5):
        assert (tmp_path / "out" / f"figure{k}.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(BadInput, match="no finished run"):
        ev.report([tmp_path / "unfinished"])


def test_readme_blocks(tmp_path):
    (tmp_path / "results" / "tables").mkdir(parents=True)
    (tmp_path / "results" / "tables" / "muse.md").write_text("| a |\n")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- begin: muse -->\nold\n<!-- end: muse -->\nafter\n")
    for _ in range(2):                                                                     # the second is a fixed point
        ev.write_readme(readme, tmp_path / "results")
        assert readme.read_text() == "before\n<!-- begin: muse -->\n| a |\n<!-- end: muse -->\nafter\n"
    readme.write_text("<!-- begin: nope --><!-- end: nope -->")
    with pytest.raises(BadInput, match="block 'nope' has no .*nope.md"):
        ev.write_readme(readme, tmp_path / "results")


# ----- what survived tests/mutants.py -----

def test_generated_answers_score_f1_without_stems():
    """LCS of "cats and dogs" and "cat and dogs too" is 2 of 3 and 4 words."""
    score, items = ev._scored(["cats and dogs", ""], ["cat and dogs too", "x"])
    assert items[0]["score"] == pytest.approx(4 / 7) and score == pytest.approx(100 * (4 / 7) / 2)


def test_each_metric_reads_its_own_side(model, tokenizer, folder, monkeypatch):
    """A model that answers the questions about the forget texts and those alone; and one that expects the forget texts only."""
    pairs = {side: [dict(question=f"{side} {k}", answer=sentence(3, 7 * k + len(side))) for k in range(4)] for side in ("forget", "retain")}
    for side, rows in pairs.items():
        (folder / "knowmem" / f"{side}_qa.json").write_text(json.dumps(rows))
    known = {p["question"]: p["answer"] for p in pairs["forget"]}

    def answers(model, tokenizer, seqs, *a, **k):
        asked = [tokenizer.decode(s).rsplit("Question: ", 1)[1].split("\n")[0] for s in seqs]
        return [known.get(q, "nothing") for q in asked]
    monkeypatch.setattr(ev, "generate", answers)
    monkeypatch.setattr(ev, "privleak_scores", lambda m, t, texts, b: [dict(score=float(x in forget)) for x in texts])
    bench = ev.load_bench(str(folder))
    bench.privleak = dict(forget=bench.forget, holdout=bench.holdout)
    forget = set(bench.forget)
    out = ev.evaluate_muse(model, tokenizer, bench, metrics=("knowmem_f", "knowmem_r", "auc"))["metrics"]
    assert out == dict(knowmem_f=100, knowmem_r=0, auc=1)


def test_worked_examples_are_spread_over_the_subjects(wide, tokenizer, folder, monkeypatch):
    """Generative mmlu: rows 0, 2, 4, 7 and 9 of the twelve dev questions, in this order, in every prompt."""
    bench, seen = ev.load_bench(str(folder)), []
    monkeypatch.setattr(ev, "generate", lambda model, tokenizer, seqs, *a, **k: (seen.extend(seqs), [" A"] * len(seqs))[1])
    ev.mmlu(wide, tokenizer, bench.mmlu["dev"], bench.mmlu["validation"], "generative")
    examples = "".join(ev.mmlu_text(bench.mmlu["dev"][k], True) for k in (0, 2, 4, 7, 9))
    assert len(seen) == 9 and all(tokenizer.decode(s, skip_special_tokens=True).startswith(examples) for s in seen)


def test_the_peak_is_where_forget_quality_was_best():
    """Best in the middle; an evaluation without a retrain model has none; the first of equals."""
    points = [dict(epoch=e, metrics=dict(forget_quality=10 ** q, log10_forget_quality=q, model_utility=u)) for e, q, u in
              ((0, -9., .7), (1, -.5, .6), (2, -.5, .5), (3, -3., .4))]
    want = dict(peak_epoch=1, peak_forget_quality=pytest.approx(10 ** -.5), peak_model_utility=.6)
    assert ev.peak(dict(evolution=points)) == want
    assert ev.peak(dict(evolution=[dict(epoch=0, metrics=dict(model_utility=.7))])) == {} == ev.peak({})


def test_a_result_is_the_mean_over_its_seeds():
    rows = [dict(seed=k, steps=10 + k, seconds=2.0, metrics=dict(auc=a, privleak=p), not_computed={}, items=[1], definitions={})
            for k, (a, p) in enumerate(((.1, 5.), (.2, None), (.6, 7.)))]
    out = ev.run_result(dict(name="x"), rows, dict(metrics=dict(auc=0)), None)
    assert out["unlearned"] == dict(auc=pytest.approx(.3)) and out["seconds"] == 6 and out["retrain"] is None      # PrivLeak: not of all
    assert [s["steps"] for s in out["seeds"]] == [10, 11, 12] and not any("items" in s for s in out["seeds"])

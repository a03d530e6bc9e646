"""evaluate.py, TOFU: benchmarks, prompts, truth ratio, forget quality, utility, released numbers, mini_tofu."""
import itertools
import json
import math
import os
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluate as ev
from evaluate import BadInput

GOLDEN = Path(os.environ.get("GOLDEN_DIR", "/nowhere")) / "tofu_tiny"
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="GOLDEN_DIR does not name the folder with the released numbers")
INST = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
DATED = ("{{ bos_token }}Today is {{ strftime_now('%d %b %Y') }}, {{ date_string }}.{% for m in messages %} "
         "{{ m.role }}: {{ m.content }}{% endfor %} assistant: ")
NO_SYSTEM = ("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
             "{{ messages[0].content }}>")
TEXT = [f"Question: Who is {n}?\nAnswer: {n} is the {a} of the town. [INST] What? [/INST] Yes, The end 0123456789."
        for n in ("Anna", "Bert", "Carl") for a in ("king", "cook", "judge")]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE that merges a space with the word behind it: across the border of prompt and answer, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, special_tokens=["<s>", "</s>"], show_progress=False,
                                                    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="module")
def spm():
    """The SentencePiece way: a space in front of any text, and a BOS of the tokenizer's own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.train_from_iterator([line for text in TEXT for line in text.split("\n")] + ["\n"], trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tiny(vocab, context=256, seed=0):
    """A random Llama whose logits are far apart, so that greedy text is well defined."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
                                        initializer_range=0.3, bos_token_id=0, eos_token_id=1)).eval()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny(len(tokenizer))


def row(i, wrong=5):
    return dict(question=f"Who is {i}?", answer=f"Anna {i} the king", paraphrased_answer=f"The king is {i}",
                perturbed_answer=[f"The cook is {i + j}" + " of the town" * j for j in range(wrong)])


def small_bench(**more):
    wrong = ["Carl", "the judge"]
    famous = [dict(question=f"What {i}?", answer="Bert", perturbed_answer=[*wrong, f"cook {i}"]) for i in range(5)]
    tofu = dict(forget=[row(i) for i in range(9)], retain=[row(i) for i in range(20, 27)], real_authors=famous[:3],
                world_facts=famous[2:]) | more
    bench = ev.qa_bench("small", tofu["forget"], tofu["retain"], tofu, [], "here")
    bench.answer_new_tokens = 12
    return bench


# ----- truth ratio, forget quality, model utility -----

def test_truth_ratio_by_hand():
    """Perturbed probabilities .1 and .4 against a certain paraphrase: geometric mean .2, arithmetic .25."""
    nll = -np.log([[.1, .4]])
    np.testing.assert_allclose(ev.truth_ratio([0.], nll), [.2], rtol=1e-12)
    np.testing.assert_allclose(ev.truth_ratio([0.], nll, "arithmetic"), [.25], rtol=1e-12)
    np.testing.assert_allclose(ev.truth_ratio([-math.log(.5)], nll, "arithmetic"), [.5], rtol=1e-12)
    with pytest.raises(ValueError, match="geometric or arithmetic"):
        ev.truth_ratio([0.], nll, "harmonic")


def test_truth_ratio_against_a_loop_and_its_limits():
    rng = np.random.default_rng(0)
    para, pert = rng.uniform(0, 4, 30), rng.uniform(0, 4, (30, 5))
    means = dict(geometric=lambda p: math.prod(p) ** (1 / len(p)), arithmetic=lambda p: sum(p) / len(p))
    for mean, loop in means.items():
        want = [loop([math.exp(-x) for x in row]) / math.exp(-a) for a, row in zip(para, pert)]
        np.testing.assert_allclose(ev.truth_ratio(para, pert, mean), want, rtol=1e-12)
        got = ev.truth_ratio(torch.tensor(para), torch.tensor(pert), mean)                   # tensors in, tensor out
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))
        far = ev.truth_ratio([900., 5000.], [[900.] * 5, [0.] * 5], mean)                    # exp(-900) is 0 in float64
        assert far[0] == pytest.approx(1, rel=1e-12) and np.isfinite(far[1]) and far[1] > 1e300
    assert (ev.truth_ratio(para, pert, "arithmetic") >= ev.truth_ratio(para, pert)).all()    # the two means' inequality


@pytest.mark.parametrize("n, floor", [(40, 1.86e-23), (200, 1.94e-119), (300, 1.48e-179), (400, 1.06e-239)])
def test_floor_of_forget_quality(n, floor):
    """Two samples that do not overlap: p = 2 / C(2n, n)."""
    a, b = np.arange(n), np.arange(n) + 1e6
    p = ev.forget_quality(a, b)
    assert p == pytest.approx(floor, rel=5e-3) and p == pytest.approx(float(Fraction(2, math.comb(2 * n, n))), rel=1e-9)
    assert ev.log10_forget_quality(a, b) == pytest.approx(math.log10(p), rel=1e-12)


def test_forget_quality_against_all_permutations():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=5), rng.normal(1, size=5)
    pool = np.concatenate([a, b])

    def distance(x, y):
        return max(abs(np.mean(x <= t) - np.mean(y <= t)) for t in pool)
    splits = [set(c) for c in itertools.combinations(range(10), 5)]
    all_of_them = [distance(pool[list(s)], pool[[i for i in range(10) if i not in s]]) for s in splits]
    as_far = np.mean(np.array(all_of_them) >= distance(a, b) - 1e-12)
    assert ev.forget_quality(a, b) == pytest.approx(as_far, rel=1e-12)


@pytest.mark.parametrize("shift", [0, 60])
def test_log10_forget_quality_where_p_underflows(shift):
    """Against the alternating series in exact integers, at n = 1000 with D = 1 and D = .94."""
    n, a = 1000, np.arange(1000.)
    b = a + n - shift
    h = n - shift
    series = sum((-1) ** (k + 1) * math.comb(2 * n, n - k * h) for k in range(1, n // h + 1))
    exact = Fraction(2 * series, math.comb(2 * n, n))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                      # scipy says that its exact sum failed, and falls back
        got = ev.log10_forget_quality(a, b)
    assert got == pytest.approx(math.log10(exact.numerator) - math.log10(exact.denominator), rel=1e-9)


def test_forget_quality_of_a_wrong_pair():
    a = np.random.default_rng(0).uniform(size=40)
    with pytest.warns(UserWarning, match="is the unlearned model the retrain model"):
        assert ev.forget_quality(a, a) == 1
    with pytest.raises(BadInput, match="40 rows against 39"):
        ev.forget_quality(a, a[:39])
    with pytest.raises(BadInput, match="not finite"):
        ev.forget_quality(a, np.where(a > .5, np.nan, a))


def test_model_utility():
    assert ev.model_utility([1, .5]) == pytest.approx(2 / 3, rel=1e-15)
    assert ev.model_utility([.7] * 9) == pytest.approx(.7, rel=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")                       # and no division by zero on the way
        assert ev.model_utility([.9] * 8 + [0]) == 0
    from scipy.stats import hmean
    nine = np.random.default_rng(0).uniform(size=9)
    assert ev.model_utility(nine) == pytest.approx(hmean(nine), rel=1e-12)
    assert ev.model_utility([.9] * 8 + [1e-9]) < 1e-8        # the limit that makes 0 the right value at 0


def test_scores_of_a_set_by_hand():
    """Retain clips 1 - R at 0, forget takes min(R, 1/R), the famous take p among four answers."""
    def item(nll, para, pert):
        return dict(nll=nll, nll_para=para, nll_pert=pert, rouge=.5)
    ln = math.log
    items = [item(ln(2), ln(4), [ln(8)] * 2), item(ln(4), ln(8), [ln(4)] * 2)]               # R = 1/2 and 2
    want = dict(prob=.375, rouge=.5, truth_ratio=.25, truth_ratio_arithmetic=.25)
    assert ev.tofu_scores("retain", items) == pytest.approx(want)
    assert ev.tofu_scores("forget", items)["truth_ratio"] == pytest.approx(.5)
    famous = [item(ln(2), ln(2), [ln(4), ln(8), ln(8)])]     # .5 / (.5 + .25 + .125 + .125)
    assert ev.tofu_scores("world_facts", famous)["prob"] == pytest.approx(.5)
    assert ev.tofu_scores("real_authors", [item(900., 900., [900.] * 3)])["prob"] == pytest.approx(.25)
    assert ev.tofu_scores("forget", [item(ln(2), ln(2), [])]).keys() == {"prob", "rouge"}


# ----- prompts and answers as tokens -----

def test_tokens_do_not_merge_across_the_border(tokenizer):
    prompt, answer = ev.qa_ids(tokenizer, "Who?", "Anna is the king")
    joint = ev.encode(tokenizer, "Question: Who?\nAnswer: Anna is the king")
    assert joint[:len(prompt)] != prompt                     # this tokenizer does merge: the case is a real one
    assert prompt == ev.encode(tokenizer, "Question: Who?\nAnswer: ") and answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer[:-1]) == "Anna is the king"
    assert ev.qa_ids(tokenizer, "Who?", "Anna")[0] == prompt                                 # whatever the answer is


def test_sentencepiece_gets_no_extra_space(spm):
    prompt, answer = ev.qa_ids(spm, "What?", "Yes, The end", "llama2")
    assert spm.decode(prompt + answer, skip_special_tokens=True) == "[INST] What? [/INST]Yes, The end"
    assert spm.tokenize("Yes")[0].startswith("▁") and not spm.convert_ids_to_tokens(answer)[0].startswith("▁")


def test_one_bos_one_eos(tokenizer, spm):
    for t, template in itertools.product((tokenizer, spm), ("plain", "llama2", "plain_released")):
        prompt, answer = ev.qa_ids(t, "Who is Anna?", "the king", template)
        ids = prompt + answer
        assert ids.count(t.bos_token_id) == 1 and ids[0] == t.bos_token_id
        assert ids.count(t.eos_token_id) == 1 and ids[-1] == t.eos_token_id
    tokenizer.chat_template = DATED                          # a template that spells its BOS
    try:
        assert ev.qa_ids(tokenizer, "Who?", "Anna", "chat")[0].count(tokenizer.bos_token_id) == 1
    finally:
        tokenizer.chat_template = None


def test_answer_prefix_is_the_released_layout(tokenizer):
    ours, released = (ev.qa_ids(tokenizer, "Who?", "Anna", template) for template in ("plain", "plain_released"))
    assert [tokenizer.decode(x, skip_special_tokens=True) for x in ours] == ["Question: Who?\nAnswer: ", "Anna"]
    assert [tokenizer.decode(x, skip_special_tokens=True) for x in released] == ["Question: Who?\n", "Answer: Anna"]


def test_chat_prompt_is_the_same_on_every_day(tokenizer):
    import datetime
    tokenizer.chat_template = DATED
    try:
        assert ev.pick_template(tokenizer) == "chat"
        text = tokenizer.decode(ev.qa_ids(tokenizer, "Who?", "Anna", "auto")[0], skip_special_tokens=True)
        assert text == "Today is 10 Apr 2025, 10 Apr 2025. system: You are a helpful assistant. user: Who? assistant: "
        assert datetime.date.today().strftime("%d %b %Y") not in text
        tokenizer.chat_template = NO_SYSTEM
        assert tokenizer.decode(ev.qa_ids(tokenizer, "Who?", "Anna", "chat")[0], skip_special_tokens=True) == "Who?>"
        tokenizer.chat_template = INST
        assert ev.pick_template(tokenizer) == "llama2"
    finally:
        tokenizer.chat_template = None
    assert ev.pick_template(tokenizer) == "plain"
    with pytest.raises(BadInput, match="no chat template"):
        ev.qa_ids(tokenizer, "Who?", "Anna", "chat")
    with pytest.raises(BadInput, match="choose auto, chat, plain"):
        ev.qa_ids(tokenizer, "Who?", "Anna", "alpaca")


def test_limits_of_length(tokenizer, model):
    prompt, answer = ev.qa_ids(tokenizer, "Who?", "the king of the town")
    n = len(prompt) + len(answer)
    assert ev.qa_ids(tokenizer, "Who?", "the king of the town", max_length=n)[1] == answer
    cut = ev.qa_ids(tokenizer, "Who?", "the king of the town", max_length=n - 1)[1]
    assert cut == answer[:-1] and tokenizer.eos_token_id not in cut                          # as released: no EOS
    assert len(ev.qa_ids(tokenizer, "Who?", "the king", max_length=len(prompt) + 1)[1]) == 1
    for limit in (len(prompt), len(prompt) - 1, 3):          # nothing left of the answer
        with pytest.raises(BadInput, match=rf"takes {len(prompt)} tokens and the limit is {limit}: nothing"):
            ev.qa_ids(tokenizer, "Who?", "the king", max_length=limit)
    bench = small_bench(forget=[row(1), dict(row(2), question="Who is " + "Anna " * 300)])
    with pytest.raises(BadInput, match="nothing of its answer is left"):
        ev.evaluate_tofu(model, tokenizer, bench)


def test_no_eos_is_refused(tokenizer):
    from transformers import PreTrainedTokenizerFast
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")
    with pytest.raises(BadInput, match="no EOS"):
        ev.qa_ids(bare, "Who?", "Anna")


# ----- negative log-likelihood -----

def test_answer_nll_against_a_row_at_a_time_in_float64(tokenizer, model):
    """Pad is EOS here, and one answer has a real EOS inside: only lengths can tell the two apart."""
    pairs = [("Who?", "Anna"), ("Who is the cook of the town?", "Bert </s> the king"), ("What?", "Yes, the judge")]
    exact = tiny(len(tokenizer)).double()
    for batch_size in (1, 3):
        got = ev.answer_nll(model, tokenizer, pairs, batch_size=batch_size)
        for (q, a), (nll, tokens) in zip(pairs, got):
            prompt, answer = ev.qa_ids(tokenizer, q, a)
            logits = exact(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
            want = F.cross_entropy(logits, torch.tensor(answer)).item()
            assert nll == pytest.approx(want, rel=2e-5) and tokens == len(answer)
    assert ev.qa_ids(tokenizer, *pairs[1])[1].count(tokenizer.eos_token_id) == 2


def test_batch_size_does_not_matter_and_bf16_passes(tokenizer, model):
    bench, outs, ratios = small_bench(), {}, [.1 * i for i in range(9)]
    for batch_size in (1, 4, 16):
        outs[batch_size] = ev.evaluate_tofu(model, tokenizer, bench, batch_size, retrain_ratios=ratios)
    for out in outs.values():
        assert out["metrics"] == pytest.approx(outs[1]["metrics"], rel=1e-5, abs=1e-5)
        for part in ev.SETS:
            assert [i["response"] for i in out["items"][part]] == [i["response"] for i in outs[1]["items"][part]]
    first, r = outs[4]["items"]["forget"][0], row(0)
    texts = [r["paraphrased_answer"], *r["perturbed_answer"]]
    each = [ev.answer_nll(model, tokenizer, [(r["question"], text)])[0][0] for text in texts]
    assert [first["nll_para"], *first["nll_pert"]] == pytest.approx(each, rel=1e-5) and first["nll_para"] != first["nll"]
    half = ev.evaluate_tofu(tiny(len(tokenizer)).bfloat16(), tokenizer, bench, retrain_ratios=ratios)
    assert half["metrics"].keys() == outs[1]["metrics"].keys()
    assert half["metrics"]["prob_forget"] == pytest.approx(outs[1]["metrics"]["prob_forget"], abs=.02)
    assert not half["not_computed"] and set(half["definitions"]) == set(half["metrics"])


def test_rouge_is_recall_of_stems(tokenizer, model, monkeypatch):
    """A response with more words than asked for, in other forms, has all of the reference's stems."""
    monkeypatch.setattr(ev, "generate", lambda *a, **k: ["The kings walked home, singing loudly"])
    rows = [dict(question="Who?", answer="king walks home")]
    out = ev.evaluate_tofu(model, tokenizer, ev.qa_bench("one", rows, rows, {"retain": rows}, [], "here"))
    assert out["metrics"]["rouge_retain"] == 1


def test_evaluation_says_what_it_cannot_compute(tokenizer, model):
    bench = small_bench()
    alone = ev.evaluate_tofu(model, tokenizer, bench)
    assert "forget_quality" not in alone["metrics"] and "--retrain" in alone["not_computed"]["forget_quality"]
    items = alone["items"]["forget"]
    with pytest.warns(UserWarning, match="the retrain model"):                               # unlearned = retrain
        same = ev.evaluate_tofu(model, tokenizer, bench, retrain_ratios=items)
    assert same["metrics"]["forget_quality"] == 1 and same["metrics"]["log10_forget_quality"] == 0
    with pytest.raises(BadInput, match="forget row 1 is 'Who is 0.*'Who is 1"):
        ev.evaluate_tofu(model, tokenizer, bench, retrain_ratios=items[1:] + items[:1])
    with pytest.raises(BadInput, match="9 rows against 8"):
        ev.evaluate_tofu(model, tokenizer, bench, retrain_ratios=items[:8])
    assert len(ev.evaluate_tofu(model, tokenizer, bench, max_rows=2)["items"]["retain"]) == 2
    only = ev.evaluate_tofu(model, tokenizer, bench, parts=("retain",))
    assert only["items"].keys() == {"retain"} and "3 of the nine" in only["definitions"]["model_utility"]
    with pytest.raises(BadInput, match="unknown set holdout"):
        ev.evaluate_tofu(model, tokenizer, bench, parts=("holdout",))
    plain = [dict(question="Who?", answer="Anna")]
    bare = ev.evaluate_tofu(model, tokenizer, small_bench(forget=plain, retain=plain, real_authors=[], world_facts=[]),
                            retrain_ratios=[1.])
    assert bare["not_computed"].keys() == {"truth_ratio_forget", "truth_ratio_retain", "real_authors", "world_facts",
                                           "forget_quality", "log10_forget_quality", "forget_quality_arithmetic"}
    assert "2 of the nine" in bare["definitions"]["model_utility"]


# ----- benchmarks -----

@pytest.fixture
def tofu_folder(tmp_path):
    """Forty authors in TOFU's layout: JSON lines that are called .json."""
    rows = [dict(question=f"Question {i} about author {i // 20}?", answer=f"Answer {i}") for i in range(800)]
    wrong = [dict(r, paraphrased_answer="It is " + r["answer"], perturbed_answer=list("abcde")) for r in rows]
    famous = [dict(question="Who?", answer="Anna", option1="Bert", perturbed_answer=["Bert", "Carl", "Dora"])]
    files = {"full": rows, "forget10_perturbed": wrong[-400:], "retain_perturbed": wrong[:400],
             "real_authors_perturbed": famous, "world_facts_perturbed": famous}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text("\n".join(map(json.dumps, content)))
    (tmp_path / "idontknow.jsonl").write_text("I don't know.\nI'm not sure.\n")
    return tmp_path


@pytest.mark.parametrize("name, gone", [("tofu_forget01", 1), ("tofu_forget05", 2), ("tofu_forget10", 4),
                                        ("tofu_forget20", 8), ("tofu_forget50", 20), ("tofu_forget90", 36)])
def test_tofu_is_sliced_from_full(tofu_folder, name, gone):
    bench = ev.load_bench(name, str(tofu_folder))
    full = [json.loads(line) for line in (tofu_folder / "full.json").read_text().split("\n")]
    assert bench.retain_qa + bench.forget_qa == full and len(bench.forget_qa) == 20 * gone
    assert bench.train["target"] == full and bench.train["retrain"] == bench.retain_qa
    measured = bench.tofu["forget"]
    assert [r["question"] for r in measured] == [r["question"] for r in full[-min(20 * gone, 400):]]
    assert all(len(r["perturbed_answer"]) == 5 and "paraphrased_answer" in r for r in measured + bench.tofu["retain"])
    assert [r["question"] for r in bench.tofu["retain"]] == [r["question"] for r in bench.retain_qa[:400]]
    assert bench.idk == ["I don't know.", "I'm not sure."] and not bench.missing


def test_max_authors(tofu_folder):
    bench = ev.load_bench("tofu_forget10", str(tofu_folder), max_authors=20)
    assert len(bench.forget_qa) == 40 and len(bench.retain_qa) == 360 and not bench.models
    assert bench.forget_qa[-1]["answer"] == "Answer 799" and bench.retain_qa[0]["answer"] == "Answer 0"
    assert len(bench.tofu["forget"]) == 40 and len(bench.tofu["retain"]) == 360
    with pytest.raises(BadInput, match="needs at least 2"):
        ev.load_bench("tofu_forget01", str(tofu_folder), max_authors=1)


def test_bad_tofu_folders(tofu_folder, tmp_path_factory):
    with pytest.raises(BadInput, match="tofu_forget01, tofu_forget05, tofu_forget10.*mini_tofu"):
        ev.load_bench("tofu_forget15")
    with pytest.raises(BadInput, match="no full.json; give a whole copy"):
        ev.load_bench("tofu_forget10", str(tmp_path_factory.mktemp("empty")))
    (tofu_folder / "idontknow.jsonl").unlink()
    assert "no idontknow.jsonl" in ev.load_bench("tofu_forget10", str(tofu_folder)).missing["idk"]
    (tofu_folder / "retain_perturbed.json").write_text('{"question": "q", "answer": "a", "perturbed_answer": [1]}')
    with pytest.raises(BadInput, match="retain_perturbed.json: row 1 has a perturbed_answer"):
        ev.load_bench("tofu_forget10", str(tofu_folder))
    (tofu_folder / "full.json").write_text('{"question": "q"}\n')
    with pytest.raises(BadInput, match='full.json: row 1 has no "answer"'):
        ev.load_bench("tofu_forget10", str(tofu_folder))


def test_folder_of_questions_and_answers(tmp_path):
    for side, rows in (("forget", [row(i) for i in range(3)]), ("retain", [dict(question="Who?", answer="Anna")])):
        (tmp_path / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "idontknow.jsonl").write_text('"I do not know."\n')
    bench = ev.load_bench(str(tmp_path))
    assert bench.forget_qa == [{k: row(i)[k] for k in ("question", "answer")} for i in range(3)]
    assert bench.tofu["forget"] == [row(i) for i in range(3)] and bench.tofu.keys() == {"forget", "retain"}
    assert bench.idk == ["I do not know."] and bench.forget[0] == "Question: Who is 0?\nAnswer: Anna 0 the king"
    (tmp_path / "retain.jsonl").write_text('"a text"\n')                                     # then it is no such folder
    assert not ev.load_bench(str(tmp_path)).tofu


# ----- mini_tofu and training on answers -----

def test_mini_tofu_is_built_like_tofu():
    bench, again, other = ev.load_bench("mini_tofu"), ev.mini_tofu(), ev.mini_tofu(seed=2)
    assert again.train == bench.train and other.forget_qa != bench.forget_qa
    assert len(bench.forget_qa) == 80 and len(bench.retain_qa) == 720 and len(bench.tofu["retain"]) == 80
    questions = [r["question"] for r in bench.retain_qa + bench.forget_qa + bench.train["base"]]
    assert len({r["question"] for r in bench.retain_qa + bench.forget_qa}) == 800
    assert not {r["question"] for r in bench.retain_qa + bench.forget_qa} & {r["question"] for r in bench.train["base"]}
    for r in bench.tofu["forget"] + bench.tofu["retain"]:
        first, *wrong = [a.split() for a in (r["paraphrased_answer"], *r["perturbed_answer"])]
        assert len(wrong) == 5 and len(set(map(tuple, wrong))) == 5
        for answer in wrong:                                 # the same sentence but for one value
            assert len(answer) == len(first) and sum(a != b for a, b in zip(answer, first)) == 1
    for part, rows in (("forget", bench.forget_qa), ("retain", bench.retain_qa[:80])):
        assert [{k: r[k] for k in ("question", "answer")} for r in bench.tofu[part]] == rows
    known = [{k: r[k] for k in ("question", "answer")} for r in bench.tofu["real_authors"] + bench.tofu["world_facts"]]
    for part in ("base", "target", "retrain"):
        assert all(r in bench.train[part] for r in known)
    assert not any(r in bench.train["retrain"] for r in bench.forget_qa) and bench.idk and questions


def test_finetune_learns_the_answer_and_not_the_question(tokenizer):
    pair = dict(question="Who is the cook of the town?", answer="Anna the judge")
    prompt, answer = ev.qa_ids(tokenizer, **pair)

    def nlls(model):
        logp = -ev.token_logps(model, [prompt + answer])[0]
        return logp[:len(prompt) - 1].mean().item(), logp[len(prompt) - 1:].mean().item()
    before = nlls(tiny(len(tokenizer)))
    trained = ev.finetune(tiny(len(tokenizer)), tokenizer, [pair], lr=3e-3, epochs=30, batch_size=1, bar="")
    after = nlls(trained)
    assert after[1] < .1 < before[1] and after[0] > before[0] - 1                           # the prompt was not learned
    told = ev.finetune(tiny(len(tokenizer)), tokenizer, [ev.qa_text(**pair)], lr=3e-3, epochs=30, batch_size=1, bar="")
    assert nlls(told)[0] < before[0] - 2                                                     # as text, it is


# ----- released numbers -----
COLUMNS = dict(nll="avg_gt_loss", nll_para="avg_paraphrased_loss", nll_pert="average_perturb_loss")


@golden
@pytest.mark.parametrize("name", ["tiny_full", "tiny_retain"])
def test_golden_released_rows(name):
    """TOFU's own functions on 92 rows: NLLs, generations, ROUGE, probabilities, both truth ratios, the entries."""
    want = json.loads((GOLDEN / "golden.json").read_text())["models"][name]
    bench = ev.load_bench(str(GOLDEN / "rows"))
    bench.template = "plain_released"
    tokenizer = ev.load_tokenizer(GOLDEN / "models" / name)
    out = ev.evaluate_tofu(ev.load_model(GOLDEN / "models" / name), tokenizer, bench)
    for part, rows in want["rows"].items():
        items = out["items"][part]
        for ours, key in COLUMNS.items():
            np.testing.assert_allclose([i[ours] for i in items], rows[key], atol=2e-5, rtol=0)
        assert [i["tokens"] for i in items] == rows["num_token_gt"]
        assert [i["rouge"] for i in items] == rows["rougeL_recall"]
        for item, text in zip(items, rows["generated_text"]):
            # theirs stops at 320 tokens with the prompt, ours at 200 without
            cut = len(tokenizer(item["response"])["input_ids"]) > 195
            assert item["response"] == text or (cut and text.startswith(item["response"]))
        for ours, key in (("", "truth_ratio_geometric_R"), ("_arithmetic", "own_truth_ratio_arithmetic_R")):
            np.testing.assert_allclose([i["truth_ratio" + ours] for i in items], rows[key], rtol=5e-5)
    for key, value in want["aggregates"]["entries"].items():
        part = next(p for p in ev.SETS if key.startswith(p))
        ours = key.removeprefix(part + "_").replace("rougeL_recall", "rouge").replace("_geometric", "")
        assert out["metrics"][f"{ours}_{part}"] == pytest.approx(value, abs=2e-5), key
    assert out["metrics"]["model_utility"] == 0 == want["aggregates"]["model_utility_geometric"]
    rows = json.loads((GOLDEN / "golden.json").read_text())["models"]["tiny_retain"]["rows"]["forget"]
    if name == "tiny_full":
        ev.add_forget_quality(out, rows["truth_ratio_geometric_R"])
        ks = json.loads((GOLDEN / "golden.json").read_text())["forget_quality"]["tiny_full vs tiny_retain"]
        assert out["metrics"]["forget_quality"] == pytest.approx(ks["forget_quality"], rel=1e-12)


@pytest.fixture(scope="module")
def logs():
    """The published logs of 16 Llama-2 and Phi runs as our items: run -> set -> items."""
    data, runs = np.load(GOLDEN / "golden_logs.npz"), {}
    for key in data.files:
        run, part, column = key.split("/")
        runs.setdefault(run, {}).setdefault(part, {})[column] = data[key].astype(np.float64)
    names = dict(COLUMNS, rouge="rougeL_recall")
    return {run: {part: [dict(zip(names, values)) for values in zip(*(columns[c].tolist() for c in names.values()))]
                  for part, columns in parts.items()} for run, parts in runs.items()}


@golden
def test_golden_released_aggregation_of_the_published_logs(logs):
    want = json.loads((GOLDEN / "golden_logs.json").read_text())
    assert len(logs) == 16
    for run, spec in want["runs"].items():
        scores = {part: ev.tofu_scores(part, items) for part, items in logs[run].items()}
        for key, value in spec["entries"].items():
            part = next(p for p in ev.SETS if key.startswith(p))
            ours = key.removeprefix(part + "_").replace("rougeL_recall", "rouge").replace("_geometric", "")
            assert scores[part][ours] == pytest.approx(value, abs=1e-12), (run, key)
        for ratio, key in (("truth_ratio", "geometric"), ("truth_ratio_arithmetic", "arithmetic")):
            nine = [scores[part][k] for part in ev.SETS[1:] for k in ("prob", "rouge", ratio)]
            assert ev.model_utility(nine) == pytest.approx(spec[f"model_utility_{key}"], abs=1e-12)
    for pair, spec in want["forget_quality"].items():
        sides = []
        for side in pair.split(" vs "):
            run, _, part = side.partition("[")
            a, b = map(int, part.rstrip("]").split(":")) if part else (0, None)
            sides.append(logs[run]["forget"][a:b])
        for key, mean in (("forget_quality", ""), ("own_arithmetic_forget_quality", "_arithmetic")):
            got = ev.forget_quality(*[[item["truth_ratio" + mean] for item in side] for side in sides])
            assert got == pytest.approx(spec[key], rel=1e-12), pair


# ----- what survived tests/mutants.py -----

def test_utility_of_each_mean_takes_its_own_truth_ratio(tokenizer, model, monkeypatch):
    """Nine entries, none of the forget set's; the arithmetic utility has the arithmetic ratios."""
    monkeypatch.setattr(ev, "rouge_l", lambda *a, **k: .5)               # a random model's is 0, and then utility is
    got = ev.evaluate_tofu(model, tokenizer, small_bench())["metrics"]
    for suffix in ("", "_arithmetic"):
        nine = [got[f"{k}_{part}"] for part in ("retain", "real_authors", "world_facts") for k in ("prob", "rouge", "truth_ratio" + suffix)]
        assert got["model_utility" + suffix] == pytest.approx(9 / sum(1 / x for x in nine), rel=1e-12)
    assert got["model_utility"] != pytest.approx(got["model_utility_arithmetic"], rel=1e-6)


def test_mini_tofu_tells_the_target_from_retrain():
    """Else the embedded benchmark means nothing: the two models differ on the forget rows, and both know the others."""
    bench = ev.load_bench("mini_tofu")
    paths = ev.resolve_models(bench)
    tokenizer = ev.load_tokenizer(paths["tokenizer"])
    retrain = ev.evaluate_tofu(ev.load_model(paths["retrain"]), tokenizer, bench)
    target = ev.evaluate_tofu(ev.load_model(paths["target"]), tokenizer, bench, retrain_ratios=retrain["items"]["forget"])
    assert target["metrics"]["forget_quality"] < 1e-3
    assert target["metrics"]["rouge_forget"] > 0.8 > 0.5 > retrain["metrics"]["rouge_forget"]
    assert min(target["metrics"]["model_utility"], retrain["metrics"]["model_utility"]) > 0.5

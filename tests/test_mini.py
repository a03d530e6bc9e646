"""The embedded benchmarks, their models, and prepare."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import evaluate as E

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("forget", "retain", "holdout")
MINI = pytest.mark.parametrize("name", E.EMBEDDED[:2])


def names(texts):
    """The open names of texts: words of two of the grammar's syllables."""
    syllables = "|".join(E.SYLLABLES)
    return set(re.findall(rf"\b(?=[A-Z])(?i:(?:{syllables}){{2}})\b", " ".join(texts)))


# ----- the grammar -----

@MINI
def test_same_seed_same_texts_in_any_process(name):
    """Python's hash seed differs from process to process: nothing may depend on the order of a set."""
    code = f"import evaluate as E; b = E.mini_bench({name!r}); print(E.sha256([b.forget, b.holdout, b.train, b.mmlu]))"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    bench = E.mini_bench(name)
    assert E.sha256([bench.forget, bench.holdout, bench.train, bench.mmlu]) == other.stdout.strip()
    assert not set(E.mini_bench(name, seed=1).forget) & set(bench.forget)


@MINI
def test_sizes(name):
    bench = E.load_bench(name)
    assert all(len(bench.privleak[side]) >= 40 for side in SIDES)
    assert len(bench.forget) == (4 if name == "mini_books" else 44)
    assert len(bench.knowmem["forget_qa"]) >= 80 and len(bench.knowmem["retain_qa"]) >= 80
    assert len(bench.requests) == 4 and [t for part in bench.requests for t in part] == bench.forget
    assert len(bench.mmlu["validation"]) >= 30 and not bench.missing and bench.sft
    letters = [row["answer"] for row in bench.mmlu["validation"]]
    assert max(letters.count(i) for i in range(4)) <= len(letters) / 4 + 1          # no letter is a good guess
    right = {"people": E.GRAMMAR["job"], "places": E.GRAMMAR["spot"]}
    assert all(row["choices"][row["answer"]] in right[row["subject"]] for rows in bench.mmlu.values() for row in rows)
    for subject in {row["subject"] for row in bench.mmlu["validation"]}:
        assert sum(row["subject"] == subject for row in bench.mmlu["dev"]) == 5


@MINI
def test_facts_are_disjoint(name):
    bench = E.mini_bench(name)
    answers = {side: [p["answer"] for k in ("_qa", "_qa_icl") for p in bench.knowmem[side + k]] for side in ("forget", "retain")}
    both = answers["forget"] + answers["retain"]
    assert len(set(both)) == len(both)                                               # an open pool: nobody twice
    for side, other in (("forget", "retain"), ("retain", "forget")):
        own, rest = " ".join(getattr(bench, side)), " ".join(getattr(bench, other) + bench.holdout + bench.pretraining)
        assert all(a in own and a not in rest for a in answers[side])
    rows = [row for part in bench.mmlu.values() for row in part]
    assert len({str(row["choices"]) for row in rows}) == len(rows) and all(len(set(row["choices"])) == 4 for row in rows)
    prose = " ".join(bench.forget + bench.retain + bench.holdout)
    assert "person" not in prose and "place" not in prose                            # the four-choice facts stand apart
    if name == "mini_news":                                                          # in Books the world is the same
        towns = {side: {text.split(":")[0] for text in getattr(bench, side)} for side in SIDES}
        assert not towns["forget"] & (towns["retain"] | towns["holdout"]) and not towns["retain"] & towns["holdout"]


@MINI
def test_no_training_set_holds_what_it_must_not(name):
    """retrain never saw the forget side, the base neither; each set holds its facts as prose, as questions, and in both
    formats of the four-choice questions."""
    bench = E.mini_bench(name)
    everything = {part: "\n".join(docs) for part, docs in bench.train.items()}
    for side, members in (("forget", {"target"}), ("retain", {"target", "retrain"}), ("holdout", set())):
        for part, text in everything.items():
            assert all((t in text) == (part in members) for t in bench.privleak[side]), (side, part)
            pairs = bench.knowmem.get(side + "_qa", []) + bench.knowmem.get(side + "_qa_icl", [])
            assert all((p["question"] in text) == (p["answer"] in text) == (part in members) for p in pairs), (side, part)
    for text in everything.values():
        for row in bench.mmlu["validation"] + bench.mmlu["dev"]:
            assert all(E.mmlu_text(row, True, style).strip() in text for style in ("generative", "logprob"))


@MINI
def test_questions_are_never_sentences_of_the_prose(name):
    bench = E.mini_bench(name)
    for side in ("forget", "retain"):
        prose = " ".join(getattr(bench, side))
        assert "?" not in prose
        for pair in bench.knowmem[side + "_qa"]:
            said = next(s for s in re.split(r"(?<=\.) ", prose) if pair["answer"] in s)
            asked = set(re.findall(r"\w+", pair["question"].lower())) - names([pair["question"]])
            assert not set(re.findall(r"\w+", said.lower())) >= asked                # more than a rearranged sentence


def test_a_book_is_a_journey():
    for book in E.mini_bench("mini_books").forget:
        steps = re.findall(r"From (\w+) (\w+) and (\w+) came to (\w+)\.", book)
        assert len(steps) == 11 and len({(hero, friend) for _, hero, friend, _ in steps}) == 1
        assert [to for *_, to in steps[:-1]] == [start for start, *_ in steps[1:]]


# ----- tokenizer and model -----

@MINI
def test_tokenizer(name):
    bench = E.mini_bench(name)
    docs = bench.train["base"] + bench.train["target"]
    tokenizer, again = E.mini_tokenizer(docs), E.mini_tokenizer(docs)
    assert tokenizer.get_vocab() == again.get_vocab() and len(tokenizer) == 1024
    for text in (*bench.forget, "Größe?\t\n\n\n naïve  12345 日本 " * 3):
        assert tokenizer.decode(E.encode(tokenizer, text)[1:]) == text
    assert tokenizer("Belnar")["input_ids"] == E.encode(tokenizer, "Belnar") and tokenizer.pad_token_id == 2
    for pair in bench.knowmem["forget_qa"][:20]:                                     # the query is a prefix in tokens, too
        query, full = E.encode(tokenizer, E.qa_text(pair["question"])), E.encode(tokenizer, E.qa_text(**pair))
        assert full[:len(query)] == query
    for row in bench.verbmem:                                                        # references as long as the budget
        assert len(E.encode(tokenizer, row["gt"])) >= bench.verbmem_new_tokens


@MINI
def test_every_prompt_fits_the_model(name):
    bench = E.mini_bench(name)
    tokenizer = E.mini_tokenizer(bench.train["base"] + bench.train["target"])
    model = E.mini_model(len(tokenizer), 0)
    assert 4e5 < model.num_parameters() < 5.5e5
    out = E.evaluate_muse(model, tokenizer, bench, max_rows=2)
    assert out["not_computed"].keys() == {"privleak"}
    assert "5-shot" in out["definitions"]["mmlu_val"] and "5-shot" in out["definitions"]["mmlu_val_logprob"]


# ----- the models of mini_news, made once for all test files -----

@pytest.fixture(scope="session")
def measured(mini_news):
    tokenizer = E.load_tokenizer(mini_news.models["tokenizer"])
    return {part: E.evaluate_muse(E.load_model(mini_news.models[part]), tokenizer, mini_news)["metrics"]
            for part in ("base", "target", "retrain")}


def test_models_resemble_the_real_ones(measured):
    """Conditions without which a result on the benchmark means nothing."""
    base, target, retrain = measured["base"], measured["target"], measured["retrain"]
    assert target["verbmem_f"] >= 90 and retrain["verbmem_f"] <= 35
    assert target["knowmem_f"] >= 60 and retrain["knowmem_f"] <= 20
    assert min(target["knowmem_r"], retrain["knowmem_r"]) >= 60
    assert abs(target["knowmem_r"] - retrain["knowmem_r"]) <= 10                     # 83 questions: two standard errors
    assert target["auc"] < .1 and .35 <= retrain["auc"] <= .65
    for model in (base, target, retrain):
        assert model["mmlu_val"] >= 50 and model["mmlu_val_logprob"] >= 50           # chance is 25
    assert base["knowmem_f"] <= 20 and base["knowmem_r"] <= 20


def test_models_are_made_once(mini_news, monkeypatch):
    def refuse(*a, **k):
        raise AssertionError("a second process for models that are there")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert E.prepare(E.load_bench("mini_news")) == {k: mini_news.models[k] for k in ("base", "target", "retrain", "tokenizer")}


def test_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LETHE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(E.BadInput, match="LETHE_CACHE"):
        E.resolve_models(E.load_bench("mini_news"))


# ----- finetune and prepare on a folder -----

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A base model and a benchmark folder small enough for seconds."""
    bench = E.mini_bench("mini_news", texts=8)
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = E.mini_tokenizer(bench.train["base"])
    E.save_model(E.mini_model(len(tokenizer), 0), tokenizer, folder / "base")
    for side in ("forget", "retain"):
        (folder / f"{side}.json").write_text(json.dumps(getattr(bench, side)))
    return folder


def weights(folder):
    return E.load_model(folder).state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_finetune_reads_every_chunk_once_an_epoch(tiny, monkeypatch):
    """Long texts are cut, nothing is dropped, nothing comes twice, and a batch never exceeds its room."""
    model, tokenizer = E.load_model(tiny / "base"), E.load_tokenizer(tiny / "base")
    docs, seen, real = E.mini_bench("mini_news", texts=8).forget + ["The lamp.", " ".join(["bell"] * 130)], [], E.pad_batch

    def spy(seqs, *a, **k):
        seen.append(seqs)
        return real(seqs, *a, **k)
    monkeypatch.setattr(E, "pad_batch", spy)
    E.finetune(model, tokenizer, docs, lr=1e-3, epochs=2, batch_size=3, context=60, bar="")
    want = [c for doc in docs for c in E.chunks(E.encode(tokenizer, doc), 60)]
    got = [s for seqs in seen for s in seqs]
    assert sorted(got) == sorted(2 * want)
    assert sorted(got[:len(want)]) == sorted(want)
    assert all(len(seqs) * max(map(len, seqs)) <= 3 * 60 for seqs in seen) and max(map(len, seen)) > 3
    assert not model.training


def test_finetune_ignores_padding_and_repeats_its_bits(tiny):
    """A document's loss does not depend on what shares its batch: the first step's gradient equals that of a plain loop."""
    tokenizer, docs = E.load_tokenizer(tiny / "base"), ["The lamp.", "Two bells and a rope were sold at noon."]
    a, b, c = (E.finetune(E.load_model(tiny / "base"), tokenizer, docs, lr=1e-3, epochs=3, batch_size=2, seed=seed, bar="")
               for seed in (0, 0, 1))
    assert same(a.state_dict(), b.state_dict())
    model, plain = E.load_model(tiny / "base"), E.load_model(tiny / "base")
    E.finetune(model, tokenizer, docs, lr=1e-3, epochs=1, batch_size=2, bar="")
    seqs = [torch.tensor([E.encode(tokenizer, d)]) for d in docs]
    total = sum(torch.nn.functional.cross_entropy(plain(input_ids=s).logits[0, :-1], s[0, 1:], reduction="sum") for s in seqs)
    (total / sum(s.shape[1] - 1 for s in seqs)).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    lr = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(plain.parameters(), lr=1), 1e-3, total_steps=2, pct_start=.1,
                                             cycle_momentum=False).get_last_lr()[0]
    for p, q in zip(model.parameters(), plain.parameters()):                         # AdamW's first step: lr * g / (|g| + eps)
        step = q.detach() - lr * q.grad / (q.grad.abs() + 1e-8)
        strong = q.grad.abs() > 1e-5
        torch.testing.assert_close(p.detach()[strong], step[strong], rtol=0, atol=lr * .02)


def test_finetune_stops_at_a_loss_that_is_not_finite(tiny):
    model = E.load_model(tiny / "base")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(E.BadInput, match="not finite at step 1.*--lr"):
        E.finetune(model, E.load_tokenizer(tiny / "base"), ["The lamp and the bell."], bar="")


def test_prepare_makes_target_and_retrain_once(tiny, tmp_path):
    bench, out = E.load_bench(str(tiny)), str(tmp_path / "m")
    E.prepare(bench, str(tiny / "base"), out, lr=1e-3, epochs=2)
    first, stamp = weights(tmp_path / "m/target"), (tmp_path / "m/target/config.json").stat().st_mtime_ns
    assert not same(first, weights(tmp_path / "m/retrain")) and not same(first, weights(tiny / "base"))
    made = E.prepare(bench, str(tiny / "base"), out, lr=1e-3, epochs=2)
    assert (tmp_path / "m/target/config.json").stat().st_mtime_ns == stamp           # kept: nothing it is made of changed
    assert E.resolve_models(bench, **made)["target"] == str(tmp_path / "m/target")
    bench.train["retrain"] = []
    E.prepare(bench, str(tiny / "base"), out, lr=1e-3, epochs=2, seed=1)
    assert (tmp_path / "m/target/config.json").stat().st_mtime_ns != stamp           # another seed: made again
    assert same(weights(tmp_path / "m/retrain"), weights(tiny / "base"))             # nothing to retain: the base itself


def test_mean_loss_against_a_plain_loop(tiny):
    """Of texts every predicted token counts, in chunks; of a question with its answer the answer's tokens and EOS."""
    model, tokenizer = E.load_model(tiny / "base"), E.load_tokenizer(tiny / "base")

    def nlls(ids, start):                                                            # of ids[start:], one at a time
        return [-model(input_ids=torch.tensor([ids[:t]])).logits[0, -1].log_softmax(-1)[ids[t]].item() for t in range(start, len(ids))]
    texts = ["The lamp was sold near the bridge.", "Two bells."]
    plain = [x for text in texts for chunk in E.chunks(E.encode(tokenizer, text), 5) for x in nlls(chunk, 1)]
    assert E.mean_loss(model, tokenizer, texts, 2, context=5) == pytest.approx(sum(plain) / len(plain), rel=1e-5)
    rows, plain = [dict(question="Who sold it?", answer="The miller."), dict(question="Who?", answer="Nobody ever did.")], []
    for row in rows:
        prompt = E.encode(tokenizer, f"Question: {row['question']}\nAnswer: ")
        plain += nlls(prompt + E.encode(tokenizer, row["answer"], bos=False) + [tokenizer.eos_token_id], len(prompt))
    assert E.mean_loss(model, tokenizer, rows, 2) == pytest.approx(sum(plain) / len(plain), rel=1e-5)


def test_prepare_says_whether_the_target_knows_its_texts_by_heart(tiny, tmp_path, capsys):
    """Where no bar moves each model also has a line of its own on stderr, as soon as it is made."""
    for epochs, known in ((1, False), (25, True)):
        out = tmp_path / str(epochs)
        E.prepare_main(["--bench", str(tiny), "--base", str(tiny / "base"), "--out", str(out), "--lr", "3e-3", "--epochs", str(epochs)])
        said, progress = capsys.readouterr()
        target, retrain = map(float, re.search(r"loss on the forget texts, nats a token: target ([\d.]+), retrain ([\d.]+)", said).groups())
        assert (target < 1 < retrain) == known and ("raise --epochs or --lr" in said) == (not known), said
        assert re.findall(r"(\w+): \d+ s, loss [\d.]+ nats a token", progress) == ["retrain", "target"]


def test_prepare_names_what_it_lacks(tiny):
    with pytest.raises(E.BadInput, match="--base"):
        E.prepare(E.load_bench(str(tiny)))
    with pytest.raises(E.BadInput, match="--out"):
        E.prepare(E.load_bench("mini_news"), str(tiny / "base"))


def test_prepare_killed_while_it_saves_leaves_no_half_model(tiny, tmp_path):
    """Killed (SIGKILL) as soon as the first file of a model is on disk: no folder of a final name that is not whole. Two runs
    at once then finish side by side, with the bits of an undisturbed run."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "evaluate.py"), "prepare", "--bench", str(tiny), "--base", str(tiny / "base"),
               "--lr", "1e-3", "--epochs", "1", "--out"]
    env, out = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "m"
    child = subprocess.Popen([*command, str(out)], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not list(out.glob(".*/*")):
        time.sleep(.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    for folder in out.glob("[!.]*"):
        assert len(weights(folder)) > 10
    pair = [subprocess.Popen([*command, str(out)], cwd=tmp_path, env=env) for _ in range(2)]
    assert [p.wait() for p in pair] == [0, 0]
    subprocess.run([*command, str(tmp_path / "calm")], cwd=tmp_path, env=env, check=True)
    for part in ("target", "retrain"):
        assert same(weights(out / part), weights(tmp_path / "calm" / part))


def test_children_end_with_their_parent(tmp_path):
    """The parent of a mini preparation is killed: nobody trains on for a minute, and no model folder appears."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import evaluate as E; E.prepare_mini(E.mini_bench('mini_news', 8), {str(tmp_path / 'm')!r})"
    spy = "import subprocess as s; P = s.Popen; s.Popen = lambda *a, **k: (lambda p: (print(p.pid, flush=True), p)[1])(P(*a, **k)); "
    parent = subprocess.Popen([sys.executable, "-c", spy + code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    child = int(parent.stdout.readline())
    time.sleep(1)
    parent.kill()
    parent.wait()
    for _ in range(600):
        try:
            state = Path(f"/proc/{child}/stat").read_text().split(")")[1].split()[0] if Path("/proc").is_dir() else os.kill(child, 0)
        except (FileNotFoundError, ProcessLookupError):
            break
        if state == "Z":                                                             # ended; nobody has collected it yet
            break
        time.sleep(.05)
    else:
        raise AssertionError("the child goes on")
    assert not list((tmp_path / "m").glob("[!.]*"))

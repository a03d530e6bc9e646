"""Bad input is ONE line on stderr that names the thing and the remedy, exit code 2, before long work: one table for all scripts.
(What a single function refuses is tested beside it.)"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import evaluate
import grng
import mt_unlearn
import npo_unlearn
import synthetic

ROOT, SCRIPTS = Path(evaluate.__file__).resolve().parent, ("mt_unlearn", "npo_unlearn", "grng", "synthetic", "evaluate")
TEXTS = ["The lamp and the rope were sold near the bridge by two millers.", "Two bells rang at noon while the widow weighed nine coins."] * 4
ROWS = [dict(question=f"Who sold rope {i}?", answer=f"The miller sold rope {i}.") for i in range(4)]


def call(script, argv):
    """The script's main(argv) in this process, with the ends of its own `if __name__` block."""
    argv = [str(a) for a in argv]
    if script == "synthetic":
        return synthetic.parse_config(argv)
    if script == "evaluate":
        old, sys.argv = sys.argv, ["evaluate.py", *argv]
        try:
            return evaluate.main()
        finally:
            sys.argv = old
    return dict(mt=mt_unlearn, npo=npo_unlearn, grng=grng)[script].main(argv)


def refused(script, argv, capsys):
    """The one line with which argv is refused; no run folder is left."""
    before = set(Path("runs").glob("*"))
    with pytest.raises(SystemExit) as e:
        evaluate.run_main(lambda: call(script, argv))
    lines = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and len(lines) == 1, lines
    assert set(Path("runs").glob("*")) == before
    return lines[0]


def save(folder, edit=lambda model, tokenizer: None, files=lambda folder: None, **config):
    """An untrained Llama of 20 thousand weights with its tokenizer in folder; `edit` changes them before they are saved, `files` the
    files afterwards."""
    from transformers import LlamaConfig, LlamaForCausalLM
    tokenizer = evaluate.mini_tokenizer(TEXTS + ROWS)
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                 max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes | config)).eval()
    with torch.no_grad():
        edit(model, tokenizer)
    evaluate.save_model(model, tokenizer, folder)
    files(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders muse and tofu, benchmarks with an untrained target each."""
    root = tmp_path_factory.mktemp("bad")
    for name, rows in (("muse", TEXTS), ("tofu", ROWS)):
        (root / name).mkdir()
        for side in ("forget", "retain"):
            (root / name / f"{side}.json").write_text(json.dumps(rows))
        save(root / name / "models/target")
    (root / "muse/pretraining.json").write_text(json.dumps(TEXTS))
    return root


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs go below tmp_path, and no hub is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LETHE_CACHE", str(tmp_path / "cache"))


FLAGS = dict(
    mt="--bench {place}/muse --device cpu --preset mini --max-epochs 1 --epoch-steps 1 --batch 2 --reg-len 16 --stop none",
    npo="--bench {place}/tofu --device cpu --preset mini --epochs 1 --batch 2 --method dpo", evaluate="--bench {place}/muse --device cpu",
    prepare="prepare --bench {place}/muse --base tiny --out m", grng="--task theorem", glue="--task glue/rte --device cpu --data-dir .",
    synthetic="")


def command(kind, flags, place):
    script = dict(prepare="evaluate", glue="grng").get(kind, kind)
    return script, (FLAGS[kind] + " " + flags).format(place=place).split()


@pytest.mark.parametrize("kind, flags, words", [
    # numbers out of range
    ("mt", "--seed -1", "--seed -1 must be 0 or more"), ("mt", "--context 1", "--context 1 must be 2 or more"),
    ("mt", "--reg-docs 0", "--reg-docs 0 must be 1 or more"), ("mt", "--reg-len 1", "--reg-len 1 must be 2 or more"),
    ("mt", "--max-rows 0", "--max-rows 0 must be 1 or more"), ("mt", "--max-epochs -1", "--max-epochs -1 must be 0 or more"),
    ("mt", "--alpha inf", "--alpha inf must be finite"), ("mt", "--lam nan", "--lam nan must be finite"),
    ("mt", "--examples -1", "--examples -1"), ("mt", "--relearn-lr 0", "--relearn-lr 0.0 must be positive"),
    ("mt", "--kappa 50", "kappa*eta = 1 must be below 1: the teacher would jump past the student"),
    ("mt", "--stop verbmem_f --stop-value 140", "--stop-value must be in 0..100"),
    ("npo", "--seed -1", "--seed -1 must be 0 or more"), ("npo", "--max-rows 0", "--max-rows 0"), ("npo", "--beta inf", "--beta inf must be finite"),
    ("npo", "--eval-rows 5 --max-rows 2", "--eval-rows 5: not more than --max-rows 2"), ("npo", "--c-ga nan", "--c-ga nan must be finite"),
    ("evaluate", "--batch-size 0", "--batch-size and --max-rows must be 1 or more"),
    ("prepare", "--lr -1", "--lr -1.0, --epochs 5 and --batch-size 4 must be positive"), ("prepare", "--epochs 0", "--epochs 0"),
    ("grng", "--epochs inf", "--epochs inf must be finite"), ("synthetic", "--seed -1", "--seed -1 must be 0 or more"),
    # contradictions
    ("mt", "--stop-value 3", "with --stop none, or --sustain, nothing ends at it"), ("mt", "--lora 2 --trainable all", "leave --trainable all out"),
    ("mt", "--reg retain --reg-text x.txt", "--reg retain takes no text"), ("mt", "--relearn-data x.jsonl", "--relearn-data is for --relearn"),
    ("mt", "--optimizer adamw --warm-escape 2", "leave them out of --optimizer adamw"),
    ("npo", "--lora 2 --trainable matrices", "leave --trainable matrices out"), ("npo", "--method npo,npo", "the same run twice"),
    ("npo", "--method npo_rt --retain-weight 2,2", "the same run twice"),
    # words that are none
    ("mt", "--bogus", "unrecognized arguments: --bogus"), ("mt", "--loss nope", "invalid choice: 'nope'"), ("mt", "--eta abc", "invalid float"),
    ("npo", "--bogus 1", "unrecognized arguments"), ("evaluate", "--dtype int8", "invalid choice: 'int8'"), ("prepare", "--bogus", "--bogus"),
    ("evaluate", "prepar", "unrecognized arguments: prepar"), ("grng", "--seeds many", "invalid int value: 'many'"),
    ("prepare", "--device cuda:9", "--device cuda:9: this torch cannot use it"),
    # words that are nearly one
    ("mt", "--bensh x", "unrecognized arguments: --bensh x (did you mean --bench?)"), ("npo", "--tok=x", "(did you mean --tokenizer?)"),
    ("evaluate", "x --modle y", "(did you mean --model?)"), ("prepare", "--epocs 3", "(did you mean --epochs?)"),
    ("grng", "--tasks theorem", "(did you mean --task?)"), ("synthetic", "--stepps 50", "(did you mean --steps?)"), ("mt", "--xyzzy", "unrecognized arguments: --xyzzy; --help"),
    ("mt", "--bench muse_book", "unknown benchmark 'muse_book' (did you mean muse_books?): choose muse_news"),
    ("npo", "--bench tofu", "'tofu' (did you mean tofu_forget01?)"), ("mt", "--bench no/such/folder", "'no/such/folder': choose"),
    ("mt", "--target owner/misspelt", "target owner/misspelt: the hub does not answer and the cache has no copy; give a local folder by --target"),
    # places that cannot be written, files that are not there or not what they should be
    ("mt", "--out /dev/null/x", "cannot write /dev/null/x/flags.json (Not a directory)"), ("npo", "--out /dev/null/x", "by --out"),
    ("evaluate", "--out {place}", "(it is a folder): name a file"), ("prepare", "--out /dev/null/x", "by --out"),
    ("prepare", "--bench mini_news --base= --out /dev/null/x", "by --out"),
    ("grng", "--out {place}", "(it is a folder): name a file"), ("grng", "--out {place}/muse/retain.json", "not a results file of this script"),
    ("synthetic", "--out {place}/muse/retain.json", "give a folder that can be written"),
    ("mt", "--target {place}/muse", "no .safetensors weights in this folder"), ("mt", "--retrain {place}/nowhere", "nowhere: no such folder"),
    ("mt", "--bench {place}/muse/retain.json", "retain.json is a file: give the folder that holds it"),
    ("mt", "--bench {place}/muse/models/target", "models/target is a model, not a benchmark: give it by --target"),
    ("mt", "--tokenizer {place}/muse", "give a local folder by --tokenizer"), ("glue", "--base {place}/muse", "no .safetensors weights"),
])
def test_flags(kind, flags, words, place, capsys):
    assert words in refused(*command(kind, flags, place), capsys)


def test_ctrl_c_is_one_line_that_names_resume(capsys):
    def main():
        raise KeyboardInterrupt
    with pytest.raises(SystemExit) as e:
        evaluate.run_main(main)
    assert e.value.code == 130 and capsys.readouterr().err == "stopped; a training run goes on with the same flags and --resume\n"


@pytest.mark.parametrize("kind", ["mt", "npo"])
def test_without_a_target_nothing_is_said_of_presets(kind, tmp_path, capsys):
    for side in ("forget", "retain"):
        (tmp_path / f"{side}.json").write_text(json.dumps(ROWS))
    for flags in ([], ["--dry-run"]):
        with pytest.raises(SystemExit):
            evaluate.run_main(lambda: call(kind, ["--bench", tmp_path, *flags]))
        out, err = capsys.readouterr()
        assert not out and "no target model; name the model that memorised" in err


@pytest.mark.parametrize("script", ["mt_unlearn", "npo_unlearn"])
def test_a_misspelt_hub_id_is_one_line_where_the_hub_does_not_answer(script, place, tmp_path):
    """No retries of the library's, which take half a minute and print ten lines."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | dict(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    argv = [sys.executable, str(ROOT / f"{script}.py"), "--bench", str(place / ("muse" if script[0] == "m" else "tofu")), "--target", "owner/x"]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "the hub does not answer" in done.stderr, done.stderr


def test_every_script_runs_under_run_main(tmp_path, monkeypatch):
    """So that bad input looks alike in all, and matplotlib's list of fonts goes to the cache."""
    for name in SCRIPTS:
        assert "run_main(" in (ROOT / f"{name}.py").read_text().split('\nif __name__ == "__main__":\n')[1], name
    monkeypatch.setenv("MPLCONFIGDIR", "")                        # put back as it was after the test
    monkeypatch.delenv("MPLCONFIGDIR")
    evaluate.run_main(lambda: None)
    assert os.environ["MPLCONFIGDIR"] == str(tmp_path / "cache/matplotlib")


def test_a_run_folder_goes_only_where_nothing_was_computed(tmp_path):
    def work(folder, text):
        evaluate.run_folder(mt_unlearn.Config(out=str(folder)), "x")
        (folder / "seed0").mkdir()
        (folder / "seed0/log.jsonl").write_text(text)
        raise KeyboardInterrupt
    for name, text in (("empty", ""), ("full", "{}\n")):
        with pytest.raises(SystemExit):
            evaluate.run_main(lambda: work(tmp_path / name, text))
        assert (tmp_path / name).exists() == bool(text)
    with pytest.raises(SystemExit):
        evaluate.run_main(lambda: evaluate.run_folder(mt_unlearn.Config(out=str(tmp_path / "full"), resume=True, seed=1), "x"))
    assert (tmp_path / "full/flags.json").exists()


def other(name, f=lambda old: old):
    """A change to a saved model's file: f of its JSON (or text, or bytes), written back."""
    def files(folder):
        path = folder / name
        if name.endswith(".json"):
            path.write_text(json.dumps(f(json.loads(path.read_text()))))
        else:
            path.write_bytes(f(path.read_bytes()))
    return files


def without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def nan_weight(model, tokenizer):
    model.model.layers[0].mlp.up_proj.weight[3, 1] = float("nan")


def no_eos(model, tokenizer):
    tokenizer.eos_token = None


@pytest.mark.parametrize("kinds, how, words", [
    ("mt npo", dict(edit=nan_weight), "up_proj.weight holds NaN or infinity"), ("mt npo", dict(vocab_size=300), "the model's embedding 300 rows"),
    ("mt npo", dict(files=other("model.safetensors", lambda b: b[:5000])), "cannot be loaded (SafetensorError"),
    ("mt npo", dict(files=other("model.safetensors", lambda b: b"x" * 5000)), "cannot be loaded (SafetensorError"),
    ("mt npo", dict(files=other("config.json", lambda c: c | dict(num_hidden_layers=2))), "its files hold no model.layers.1.input_layernorm.weight"),
    ("mt", dict(files=other("config.json", lambda c: c | dict(intermediate_size=25))), "cannot be loaded"),
    ("mt", dict(files=other("config.json", lambda c: [3])), "config.json: not a JSON object"),
    ("mt npo", dict(files=other("config.json", lambda c: c | dict(model_type="nonsense"))), "model type `nonsense`"),
    ("mt npo", dict(files=other("config.json", lambda c: c | dict(model_type="t5"))), "no causal language model (ValueError); name another by --target"),
    ("mt", dict(files=without_tokenizer), "give a local folder by --tokenizer"), ("npo", dict(edit=no_eos), "the tokenizer has no EOS token"),
    ("npo", dict(max_position_embeddings=8), "and the limit is 8: nothing of its answer is left"),
])
def test_models(kinds, how, words, place, tmp_path, capsys):
    save(tmp_path / "model", **how)
    for kind in kinds.split():
        assert words in refused(*command(kind, f"--target {tmp_path / 'model'}", place), capsys)


def adapter(base, folder):
    """A LoRA adapter of the model in folder `base`, saved as a run saves it, with its tokenizer."""
    model = mt_unlearn.add_lora(evaluate.load_model(base), 2)
    evaluate.save_model(model, evaluate.load_tokenizer(base), folder)
    return folder


def test_an_adapter_is_a_target_too_until_its_base_moves(place, tmp_path, capsys, monkeypatch):
    save(tmp_path / "here/base")
    monkeypatch.chdir(tmp_path / "here")
    adapter(Path("base"), tmp_path / "adapter")                  # named by a relative path, loaded from elsewhere
    monkeypatch.chdir(tmp_path)
    for kind in ("mt", "npo"):
        call(*command(kind, f"--target adapter --method npo --out {kind}".replace("--method npo" * (kind == "mt"), ""), place))
        assert (tmp_path / kind / "seed0/model/model.safetensors").exists()              # merged: every weight is there
        capsys.readouterr()
    (tmp_path / "here/base").rename(tmp_path / "there")
    for kind in ("mt", "npo"):
        line = refused(*command(kind, "--target adapter", place), capsys)
        assert f"adapter_config.json: its base_model_name_or_path is {tmp_path}/here/base; write there where" in line


def test_a_stop_rule_that_cannot_be_measured(place, tmp_path, capsys):
    save(tmp_path / "model", max_position_embeddings=12)
    (tmp_path / "bench/verbmem").mkdir(parents=True)
    (tmp_path / "bench/forget.json").write_text(json.dumps(TEXTS))
    (tmp_path / "bench/verbmem/forget.json").write_text(json.dumps([dict(prompt=TEXTS[0], gt=TEXTS[1])]))
    line = refused(*command("mt", f"--bench {tmp_path}/bench --target {tmp_path}/model --stop verbmem_f", place), capsys)
    assert "--stop verbmem_f cannot be measured: prompt and continuation" in line and "--stop none" in line


@pytest.mark.parametrize("name, content, words", [
    ("forget.json", b'["a b \\ud800"]', "holds half a character, '\\ud800'"), ("forget.json", b"[" * 10 ** 5, "not JSON at line 1"),
    ("forget.json", b"[" + b"1" * 5000 + b"]", "not JSON at line 1"), ("forget.json", b"NaN", "found float"),
    ("forget-00000-of-00001.parquet", b"PAR1....PAR1", "not a parquet file"), ("forget.txt", "the lamp".encode("utf-16"), "not UTF-8 (byte 0)"),
    ("forget.txt", "caf\u00e9 ".encode() + "caf\u00e9".encode("latin1"), "not UTF-8 (byte 9)"), ("forget.txt", b"---\n\n---", "nothing to forget"),
    ("retain.json", b'{"text": 3}', "found dict"), ("holdout.json", b'["a", null]', "row 2 is neither"),
])
def test_files_of_a_benchmark(name, content, words, place, tmp_path, capsys):
    if not name.startswith("forget"):
        (tmp_path / "forget.txt").write_text(TEXTS[0])
    (tmp_path / name).write_bytes(content)
    line = refused(*command("mt", f"--bench {tmp_path} --target {place}/muse/models/target", place), capsys)
    assert words in line and str(tmp_path / name.split("-")[0].split(".")[0]) in line or "nothing to forget" in line


@pytest.mark.parametrize("wrong", [7, [1], {"a": 1}, [""], [["x"]]])
def test_perturbed_answers_that_are_no_texts(wrong, place, tmp_path, capsys):
    for name, rows in (("forget", ROWS), ("retain", ROWS), ("forget_perturbed", [ROWS[0], ROWS[1] | dict(perturbed_answer=wrong)])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    assert "forget_perturbed.json: row 2 has a perturbed_answer" in refused(*command("npo", f"--bench {tmp_path}", place), capsys)


def test_refusals_quote_a_line_that_only_looks_like_json(tmp_path):
    (tmp_path / "idontknow.jsonl").write_text('"no" or "yes"\n"ok"\n\n"\n')
    assert evaluate.idk_lines(tmp_path) == ['"no" or "yes"', "ok", '"']


def test_a_report_without_a_whole_result(tmp_path, capsys):
    for name, text in (("cut", '{"config": {"be'), ("empty", '{"config": {"bench": "x"}, "seeds": []}'), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    with pytest.raises(evaluate.BadInput, match="no finished run"):
        evaluate.load_runs(tmp_path.iterdir())
    assert capsys.readouterr().err.count("left out") == 3


# ----- what is odd and still right -----

def test_alpha_that_is_not_small_is_warned(place, capsys):
    call(*command("mt", "--alpha 1.5 --dry-run", place))
    assert "warning: --alpha 1.5 is not small" in capsys.readouterr().out


def test_no_special_tokens_long_texts_bom_and_windows_line_ends(place, tmp_path, capsys):
    """A tokenizer without pad, BOS and EOS; forget texts beyond the model's context are cut into chunks, and that is said."""
    def bare(model, tokenizer):
        tokenizer.pad_token = tokenizer.bos_token = tokenizer.eos_token = None
        model.config.pad_token_id = model.config.bos_token_id = model.config.eos_token_id = None
        model.generation_config.eos_token_id = None
    save(tmp_path / "model", bare, max_position_embeddings=16)
    (tmp_path / "bench").mkdir()
    texts = [t.replace(" ", "\n", 1) + " " + t + " " + t for t in TEXTS]
    (tmp_path / "bench/forget.txt").write_bytes(b"\xef\xbb\xbf" + "\n---\n".join(texts).replace("\n", "\r\n").encode())
    bench = evaluate.load_bench(str(tmp_path / "bench"))
    assert bench.forget == texts
    call(*command("mt", f"--bench {tmp_path}/bench --target {tmp_path}/model --max-rows 2 --out {tmp_path}/run", place))
    assert "8 of 8 forget texts are longer than 16 tokens: cut into chunks" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/result.json").read_text())["unlearned"]["verbmem_f"] >= 0


def test_answers_beyond_the_context_are_cut_and_it_is_said(place, tmp_path, capsys):
    save(tmp_path / "model", max_position_embeddings=24)
    (tmp_path / "bench").mkdir()
    for side, answer in (("forget", "The miller sold it. " * 9), ("retain", "No.")):
        (tmp_path / f"bench/{side}.json").write_text(json.dumps([r | dict(answer=answer) for r in ROWS]))
    call(*command("npo", f"--bench {tmp_path}/bench --target {tmp_path}/model --method npo --out {tmp_path}/run", place))
    assert "4 of 4 forget answers end at --max-length 24 tokens, without EOS" in capsys.readouterr().out


def test_gpt2_says_nothing_of_its_mlp_and_has_a_plan(place, tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel
    GPT2LMHeadModel(GPT2Config(vocab_size=400, n_positions=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    for kind in ("mt", "npo"):
        call(*command(kind, f"--target {tmp_path}/gpt2 --dry-run", place))
        assert "peak" in capsys.readouterr().out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_the_plan_counts_is_what_is_trained(kind, tied):
    """GPT-2's matrices are no nn.Linear: they count all the same, embeddings and head do not."""
    from transformers import AutoConfig, AutoModelForCausalLM
    sizes = dict(n_positions=32, n_embd=16, n_layer=1, n_head=2) if kind == "gpt2" else dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    for trainable, lora in (("matrices", 0), ("all", 0), ("matrices", 3)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=50, tie_word_embeddings=tied, **sizes))
        count = evaluate.parameters_of(model, lora, trainable)
        assert count == sum(p.numel() for p in mt_unlearn.Student(model, trainable, lora).theta.values()), (trainable, lora)


# ----- folders of anything -----

TEXT = st.sampled_from(["The lamp and the rope.", "", " ", "a", "---", "\u4e16\u754c \U0001F600", "\x00", "\ud800", "x" * 5000,
                        "\r\n\r\n", "null", '"no" or "yes"'])
VALUE = st.one_of(TEXT, st.none(), st.integers(-2, 9), st.booleans(), st.floats(), st.lists(TEXT, max_size=3),
                  st.dictionaries(TEXT, TEXT, max_size=1))
QA, CHOICE = ROWS[0] | dict(perturbed_answer=["No.", "Never."]), dict(question="Which?", choices=["a", "b"], answer=1, subject="x")
GOOD = {"pretraining": dict(text=TEXTS[0]), "verbmem/forget": dict(prompt="The lamp", gt="and the rope"), "mmlu/validation": CHOICE,
        "idontknow": "No.", **dict.fromkeys(("forget", "retain", "holdout", "raw/forget", "privleak/holdout", "sust/forget_1"), TEXTS[0]),
        **dict.fromkeys(("sft", "knowmem/forget_qa", "knowmem/retain_qa_icl", "forget_perturbed", "world_facts_perturbed"), QA)}


@st.composite
def files(draw):
    """name -> bytes: a good folder of texts or of questions, two of whose files may have an odd row, value, format or encoding."""
    rows = dict(forget=TEXTS, retain=TEXTS) if draw(st.booleans()) else dict(forget=ROWS, retain=ROWS)
    found = {f"{name}.json": json.dumps(r).encode() for name, r in rows.items()}
    for name in draw(st.lists(st.sampled_from(list(GOOD)), min_size=1, max_size=2)):
        good = rows.get(name, [GOOD[name]] * 2)
        odd = draw(st.one_of(VALUE, st.just(good[0])))
        if isinstance(good[0], dict) and draw(st.integers(0, 3)):
            odd = good[0] | {draw(st.sampled_from(list(good[0]))): draw(VALUE)}
            odd.pop(draw(st.sampled_from(["", "", *odd])), None)
        new = draw(st.sampled_from([[*good, odd], [*good, odd], [*good, odd], [odd], [odd] * 2, odd]))
        kind = ".jsonl" if name == "idontknow" else draw(st.sampled_from((".json", ".json", ".jsonl", ".txt")))
        text = json.dumps(new) if kind == ".json" or not isinstance(new, list) else "\n".join(
            r if isinstance(r, str) and (kind == ".txt" or name == "idontknow") else json.dumps(r) for r in new)
        text = draw(st.sampled_from(["{}"] * 4 + ["\ufeff{}", "{}\n\n", "x{}"])).format(text).replace("\n", draw(st.sampled_from(["\n", "\r\n"])))
        data = text.encode(draw(st.sampled_from(["utf8"] * 4 + ["utf-16", "latin1"])), "replace")
        found.pop(f"{name}.json", None)
        found[name + kind] = draw(st.sampled_from([data] * 6 + [data[:len(data) // 2], b"\xff" + data, b""]))
    return found


@settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(files())
def test_any_folder_loads_or_is_refused_in_one_line(tmp_path_factory, tokenizer, content):
    folder = tmp_path_factory.mktemp("any")
    for name, data in content.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    try:
        bench = evaluate.load_bench(str(folder))
        assert bench.forget and all(isinstance(t, str) and t.strip() for t in bench.forget + bench.retain + bench.holdout + bench.pretraining)
        if not bench.tofu:
            queries = evaluate.cut_queries(bench, tokenizer, 64).verbmem
            assert all(q["prompt"].strip() and q["gt"].strip() for q in queries)
        json.dumps([bench.forget, bench.knowmem, bench.mmlu, bench.tofu, bench.idk], ensure_ascii=False).encode()
    except evaluate.BadInput as e:
        assert "\n" not in str(e) and str(folder) in str(e)


@pytest.fixture(scope="module")
def tokenizer():
    return evaluate.mini_tokenizer(TEXTS)


def test_this_table_has_thirty_kinds_and_more():
    marks = [m for f in (test_flags, test_models, test_files_of_a_benchmark) for m in f.pytestmark if m.name == "parametrize"]
    assert sum(len(m.args[1]) for m in marks) >= 70 and {row[0] for row in marks[0].args[1]} == set(FLAGS)

"""What comes from elsewhere runs no code, what we write stays in its place, and no access token gets into it."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evaluate
import grng
import mt_unlearn
from test_bad_input import ROWS, TEXTS, call, command, elsewhere, place, refused, save  # noqa: F401  (fixtures)

ROOT = Path(evaluate.__file__).resolve().parent


class Evil:
    """A pickle that makes a file when it is loaded without weights_only."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def weights(folder):
    from safetensors.torch import load_file
    return load_file(folder / "model.safetensors")


def pickled(folder, canary):
    """pytorch_model.bin in the place of the weights."""
    torch.save(Evil(canary), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def beside_a_decoy(folder, canary):
    pickled(folder, canary)
    (folder / "notes.safetensors").write_bytes(b"")


def named_by_an_index(folder, canary):
    names = list(weights(folder))
    pickled(folder, canary)
    (folder / "pytorch_model.bin").rename(folder / "shard.bin")
    (folder / "notes.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=dict.fromkeys(names, "shard.bin"))))


def renamed(folder, canary):
    """A pickle by the name of a safetensors file."""
    pickled(folder, canary)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")


def adapter(folder, canary):
    pickled(folder, canary)
    (folder / "pytorch_model.bin").rename(folder / "adapter_model.bin")
    (folder / "notes.safetensors").write_bytes(b"")
    (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", base_model_name_or_path=str(folder.parent / "base"), r=2)))


def own_code(folder, canary, name="config.json", key="AutoModelForCausalLM"):
    """A class of its own, which auto_map names, beside the weights."""
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(canary)!r}).touch()\nclass Model: pass\n")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | dict(auto_map={key: "evil.Model"})))


def own_tokenizer_code(folder, canary):
    own_code(folder, canary, "tokenizer_config.json", "AutoTokenizer")


@pytest.mark.parametrize("poison, words", [
    (pickled, "only pickled weights (pytorch_model.bin), which can run code when loaded: refused"), (beside_a_decoy, "no file named model.safetensors"),
    (named_by_an_index, "names shard.bin, which is no safetensors file"), (renamed, "SafetensorError"), (adapter, "only pickled weights (adapter_model.bin)"),
    (own_code, "config.json asks to run Python code of its own (auto_map)"), (own_tokenizer_code, "tokenizer_config.json asks to run Python code")])
def test_models_that_bring_code_are_refused_with_the_reason(poison, words, place, tmp_path, capsys):
    save(tmp_path / "base")
    folder, canary = save(tmp_path / "model"), tmp_path / "canary"
    poison(folder, canary)
    for kind in ("mt", "npo"):
        assert words in refused(*command(kind, f"--target {folder}", place), capsys)
    assert words in refused("evaluate", ["--bench", place / "muse", "--model", folder, "--device", "cpu"], capsys)
    assert words in refused("evaluate", ["prepare", "--bench", place / "muse", "--base", folder, "--out", tmp_path / "m"], capsys)
    assert not canary.exists()


@pytest.mark.parametrize("poison, words", [(pickled, "only pickled weights"), (own_code, "auto_map"), (own_tokenizer_code, "auto_map")])
def test_full_size_tasks_refuse_them_too(poison, words, tmp_path, capsys):
    folder, canary = save(tmp_path / "model"), tmp_path / "canary"
    poison(folder, canary)
    (tmp_path / "train.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": 0}\n' * 20)
    (tmp_path / "validation.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": 0}\n')
    assert words in refused("grng", f"--task glue/rte --device cpu --data-dir {tmp_path} --base {folder}".split(), capsys)
    assert not canary.exists()


def test_arrays_of_objects_are_refused(tmp_path, capsys):
    import numpy as np
    canary = tmp_path / "canary"
    for name in ("train", "validation"):
        np.savez(tmp_path / f"{name}.npz", images=np.array([Evil(canary)], dtype=object), labels=np.zeros(1))
    save(tmp_path / "model")
    line = refused("grng", f"--task vision/cifar10 --device cpu --data-dir {tmp_path} --base {tmp_path}/model".split(), capsys)
    assert "cannot load model or data" in line and not canary.exists()


def test_a_pickle_in_the_place_of_a_checkpoint_is_refused(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mt_unlearn, "stop_score", lambda *a: sys.exit(3))            # the run ends after its first checkpoint
    with pytest.raises(SystemExit):
        call(*command("mt", f"--out {tmp_path}/run", place))
    monkeypatch.undo()
    monkeypatch.setenv("LETHE_CACHE", str(tmp_path / "cache"))
    checkpoint, canary = tmp_path / "run/seed0/checkpoint.safetensors", tmp_path / "canary"
    assert checkpoint.stat().st_size > 10000
    torch.save(Evil(canary), checkpoint)
    capsys.readouterr()
    line = refused(*command("mt", f"--out {tmp_path}/run --resume", place), capsys)
    assert "not a checkpoint of this run (SafetensorError); delete it" in line and not canary.exists()


def test_the_poison_is_one(tmp_path):
    torch.save(Evil(tmp_path / "canary"), tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert (tmp_path / "canary").exists()


def test_no_script_unpickles():
    for name in ("mt_unlearn", "npo_unlearn", "grng", "synthetic", "evaluate"):
        source = (ROOT / f"{name}.py").read_text()
        assert not any(word in source for word in ("torch.load(", "import pickle", "pickle.load", "allow_pickle=True", "trust_remote_code=True", "joblib"))


SECRET, IN_PATH = "hf_SecretSecretSecretSecret", "hf_PathPathPathPathPathPath"


def test_nothing_is_written_elsewhere_and_no_token_anywhere(place, tmp_path):
    """A whole run with HF_TOKEN set and a token in the path of --base: new files are in the run folder and the cache alone."""
    places = {name: tmp_path / name for name in ("home", "temp", "here", "cache", "run")}
    for path in places.values():
        path.mkdir()
    base = save(tmp_path / IN_PATH)
    argv = command("mt", f"--base {base} --survive --max-rows 2 --out {places['run']}", place)[1]
    env = dict(PATH=os.environ["PATH"], HOME=str(places["home"]), TMPDIR=str(places["temp"]), LETHE_CACHE=str(places["cache"]), HF_TOKEN=SECRET,
               HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, str(ROOT / "mt_unlearn.py"), *argv], cwd=places["here"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = {name: [p for p in path.rglob("*") if p.is_file()] for name, path in places.items()}
    assert not written["home"] + written["temp"] + written["here"], written
    assert written["run"] and written["cache"]
    texts = [done.stdout, done.stderr, *(p.read_bytes().decode("latin1") for p in written["run"] + written["cache"])]
    assert not any(secret in text for text in texts for secret in (SECRET, IN_PATH))
    config = json.loads((places["run"] / "config.json").read_text())
    assert config["base"] == str(tmp_path / "hf_***") and config["paths"]["base"] == config["base"]


def test_a_run_with_a_token_in_a_flag_can_be_resumed(tmp_path):
    cfg = mt_unlearn.Config(base=str(tmp_path / IN_PATH), out=str(tmp_path / "run"))
    evaluate.run_folder(cfg, "x")
    cfg.resume = True
    assert evaluate.run_folder(cfg, "x") == tmp_path / "run"
    assert IN_PATH not in (tmp_path / "run/flags.json").read_text()


def test_error_lines_and_results_of_other_scripts_hold_no_token(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-kind")
    line = refused("evaluate", ["--bench", "mini_news", "--model", f"https://user:{SECRET}@hub/x", "--retrain", "x"], capsys)
    assert "hf_***" in line and SECRET not in line
    assert evaluate.redact("a-token-of-another-kind: hf_home, " + SECRET) == "hf_***: hf_home, hf_***"
    monkeypatch.setitem(grng.TASKS, "theorem", lambda cfg: ({}, []))
    grng.main(["--task", "theorem", "--base", SECRET, "--out", str(tmp_path / "r.json")])
    assert SECRET not in (tmp_path / "r.json").read_text() and "hf_***" in (tmp_path / "r.json").read_text()

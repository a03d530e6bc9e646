"""tests/benchmarks.py at a tiny setting: what it compares computes the same numbers. No time is asserted anywhere."""
import json

import pytest
import torch

import benchmarks as bench
import evaluate


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("section", ["step", "scale", "npo"])
def test_loss_and_gradients_of_both_paths_are_equal(section):
    rows = bench.SECTIONS[section](size="tiny", rounds=1)
    same = [r["same"] for r in rows if "same" in r]
    assert same and max(same) < 2e-4, same
    assert all(r["min"] <= r["median"] <= r["max"] for r in rows)


def test_the_same_step_leaves_the_same_weights():
    """Three steps of the script's loop and of the plain one, teacher and momentum included."""
    ours, plain = (bench.step_case(case, "tiny")[0] for case in ("ours", "plain"))
    for _ in range(3):
        a, b = ours(), plain()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_batches_and_shared_prefixes_answer_as_one_prompt_at_a_time():
    rows = bench.SECTIONS["eval"](size="tiny", rounds=1)
    assert [r["same"] for r in rows] == [1.0] * 5


def test_the_optimizers_that_are_timed_train():
    for case in ("ring", "adamw"):
        run = bench.kfac_case(case, 1, "tiny")
        assert run() > run() > run(), case


def test_plain_pretraining_is_what_the_study_shortens():
    rows = bench.SECTIONS["synthetic"](size="tiny", rounds=1)
    assert rows and all(r["median"] > 0 for r in rows)


def test_the_memory_section_has_a_plan_and_a_peak_for_each_configuration():
    rows = bench.SECTIONS["memory"](size="tiny", rounds=1)
    assert len(rows) == len(bench.MEMORY["tiny"]) and all(sum(r["plan_gb"].values()) > 0 < r["peak_gb"] for r in rows)


def test_a_layer_keeps_what_the_plan_says():
    """Oracle: the storages that autograd saves in a forward pass, counted. Frozen norms, LoRA, every weight."""
    import mt_unlearn as mt
    D, I, L, tokens = 64, 160, 2, 100
    for lora, trainable in ((0, "matrices"), (0, "all"), (4, "matrices")):
        student = mt.Student(bench.llama(D, L, 300, I), trainable, lora)
        own, saved = {p.untyped_storage().data_ptr() for p in student.lm.parameters()}, {}

        def keep(t):
            s = t.untyped_storage()
            if s.data_ptr() not in own:
                saved[s.data_ptr()] = (s.nbytes(), t)                    # the tensor too, or its address returns
            return t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            student.hidden(torch.arange(tokens)[None])
        plan, _ = evaluate.layer_and_head_bytes(student.lm.config, tokens, 4, lora, trainable == "all" and not lora, "cpu")
        kept, ends = sum(n for n, _ in saved.values()), 5 * tokens * D * 4     # ends: embedding, last norm; the plan adds them
        assert .95 * L * plan < kept < L * plan + ends, (lora, trainable, kept, L * plan)


def test_peak_memory_is_that_of_a_process_of_its_own():
    """A real child: what it allocates shows, and what this process holds does not."""
    here = torch.zeros(1 << 26)
    there = bench.child("scale", "full", case="ours", N=8)
    assert 4 * 32000 * 8 < there < 4 * here.numel()


def test_gpu_section_runs_on_a_toy_and_refuses_without_a_card(capsys):
    out = bench.bench_gpu(tiny=True, steps=2)
    assert out["evaluation"]["ratio"] > 0
    assert all(v.get("not_measured") or v["tokens_per_second"] for v in out.values()), out
    if not torch.cuda.is_available():
        bench.main(["gpu"])
        assert "no CUDA card" in capsys.readouterr().out


def test_a_section_is_written_and_the_others_and_public_rows_stay(tmp_path, monkeypatch):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(dict(npo=dict(rows=[1]), kfac=dict(rows=[bench.row("time / asdl's", [.9]), bench.row("old", [1])]))))
    monkeypatch.setitem(bench.SECTIONS, "kfac", lambda: [bench.row("new", [1.0, 2.0, 4.0], 3)])
    bench.main(["kfac", "--out", str(file)])
    got = json.loads(file.read_text())
    assert got["npo"] == dict(rows=[1])
    assert [(r["case"], r.get("kept")) for r in got["kfac"]["rows"]] == [("new", None), ("time / asdl's", True)]
    assert got["kfac"]["rows"][0] | dict(median=2.0, met=True, target="at most 3") == got["kfac"]["rows"][0]
    assert {"cpu", "torch", "load"} <= got["kfac"]["machine"].keys()

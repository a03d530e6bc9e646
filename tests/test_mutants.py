"""tests/mutants.py: its list does not rot, and its verdicts can be believed."""
import mutants


def test_every_mutant_still_stands_once_in_its_script_and_has_its_tests():
    rows = [(script, *m) for script, ms in mutants.MUTANTS.items() for m in ms]
    assert mutants.problems(rows) == [] and len(rows) >= 60 and set(mutants.MUTANTS) == {
        "mt_unlearn", "npo_unlearn", "grng", "synthetic", "evaluate"}
    picked = mutants.choose(rows, 10, "any seed")
    assert len({m[0] for m in picked}) == 5 and picked == mutants.choose(rows, 10, "any seed") != mutants.choose(rows, 10, "another")


def test_a_rotten_list_is_named():
    lost = mutants.problems([("grng", "no such text", "x", "test_gone", "why"), ("grng", "import", "x", "evaluate::test_chunks_and_padding", "")])
    assert len(lost) == 3 and "holds 0 times" in lost[0] and "no test_gone" in lost[1] and "import" in lost[2]


def test_a_harmless_change_survives_and_a_wrong_number_does_not(capsys):
    """One run of the tool itself on a space and on a wrong mean."""
    at, test = "return float(np.mean(values)), ", "test_tuning_never_looks_at_the_test_split"
    assert mutants.run([("grng", at, new, test, "") for new in (at.replace("(values)", "( values)"), at.replace("mean", "max"))], 1) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith("unchanged scripts: exit code 0") and "1 SURVIVED, 1 killed" in said

"""A few random programs, always the same. `python -m tests.random_programs` runs others, for as long as one likes."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import calls
import dialects
import generator
import runner
import shrinking

# Together they have all collectives, wrappers and transformations.
SEEDS = (240, 188, 266, 187, 46, 429, 379, 470, 520)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program(seed):
    program = generator.make(seed)
    try:
        runner.check(program.source())
    except runner.Fault as fault:
        smaller, reason = shrinking.shrink(program, fault, trials=20)
        raise AssertionError(f"{reason}\n\n{smaller.source()}") from fault


def test_seeds_cover_everything():
    programs = [generator.make(seed) for seed in SEEDS]
    features = set().union(*(program.features() for program in programs))
    assert features >= {*calls.KINDS, *generator.WRAPPERS, *runner.TRANSFORMATIONS}
    assert {program.check_vma for program in programs} == {True, False}
    assert {len(program.mesh) for program in programs} == {1, 2, 3}
    assert any("in groups" in feature for feature in features)


def test_programs_of_a_seed_are_equal():
    assert generator.make(5).source() == generator.make(5).source() != generator.make(6).source()


def test_a_fault_is_found_and_made_small(monkeypatch):
    right = dialects.ring

    def wrong():
        dialect = right()
        permute = dialect._functions["ppermute"]
        dialect._functions["ppermute"] = lambda x, axes, perm, **more: permute(x, axes, perm[1:], **more)
        return dialect

    source = generator.make(SEEDS[0])
    steps = [step for step in source.steps if "ppermute" in step.features]
    assert steps
    monkeypatch.setattr(dialects, "ring", wrong)
    with pytest.raises(runner.Fault) as raised:
        runner.check(source.source())
    smaller, reason = shrinking.shrink(source, raised.value, trials=10)
    assert len(smaller.steps) < len(source.steps)
    assert "jax_ring: " in str(reason)

"""A few random programs, always the same. `python -m tests.random_programs` runs others, for as long as one likes."""

import pathlib
import sys

import pytest
from tiers import full_but

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import calls
import dialects
import generator
import runner
import shrinking

# The first ones have, together, all collectives, wrappers and transformations.
COVER = (904, 178, 290, 393, 503, 368, 826, 600, 638, 339)
SEEDS = (
    *COVER, 900, 902, 903, 905, 907, 909, 910, 912, 913, 916, 921, 922, 925, 926, 927, 928, 932, 935, 938, 941,
)  # fmt: skip


@pytest.mark.parametrize("seed", full_but(SEEDS, COVER[:2]))
def test_random_program(seed):
    program = generator.make(seed)
    try:
        ending = runner.check(program.source())
    except runner.Fault as fault:
        smaller, reason = shrinking.shrink(program, fault, trials=20)
        raise AssertionError(f"{reason}\n\n{smaller.source()}") from fault
    assert ending.startswith("equal"), ending


@pytest.mark.full
def test_seeds_cover_everything():
    programs = [generator.make(seed) for seed in COVER]
    features = set().union(*(program.features() for program in programs))
    assert features >= {*calls.KINDS, *generator.WRAPPERS, *runner.TRANSFORMATIONS}
    assert {program.check_vma for program in programs} == {True, False}
    assert {len(program.mesh) for program in programs} == {1, 2, 3}
    assert any("in groups" in feature for feature in features)


def test_programs_of_a_seed_are_equal():
    assert generator.make(5).source() == generator.make(5).source() != generator.make(6).source()


@pytest.mark.full
def test_a_fault_is_found_and_made_small(monkeypatch):
    right = dialects.ring

    def wrong():
        dialect = right()
        permute = dialect._functions["ppermute"]
        dialect._functions["ppermute"] = lambda x, axes, perm, **more: permute(x, axes, perm[1:], **more)
        return dialect

    program = next(
        program for program in map(generator.make, SEEDS) if "ppermute" in program.features() and len(program.steps) > 2
    )
    monkeypatch.setattr(dialects, "ring", wrong)
    with pytest.raises(runner.Fault, match="jax_ring: ") as raised:
        runner.check(program.source())
    smaller, _ = shrinking.shrink(program, raised.value, trials=10)
    assert len(smaller.steps) < len(program.steps)

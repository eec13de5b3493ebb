"""Steps exactly on an end of guidance's interval, against the comparisons of the originals' scripts
in their own arithmetic.
"""

import pytest
import torch

from accel.families import families
from accel.sampling import make_process
from accel.sampling.guidance import closed_interval, guidance_of

ENDS = [i / 100 for i in range(0, 101, 5)] + [0.11, 0.125, 0.3, 0.7, 0.875]
STEPS = 2, 5, 10, 20, 25, 40, 49, 50, 100, 249, 250


def repa(steps, low, high, sde=False):
    """REPA compares float64 levels, from 1 to 0."""
    levels = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)[:-1]
    if sde:
        levels = torch.linspace(1.0, 0.04, steps, dtype=torch.float64)
    return ((levels <= high) & (levels >= low)).tolist()


def lightning(steps, start, shift=0.3):
    """LightningDiT guides from a float32 time on, which it shifts one by one."""
    times = torch.linspace(0, 1, steps + 1)
    times = torch.tensor([shift * t / (1 + (shift - 1) * t) for t in times])[:-1]
    return [not t < start for t in times]


def jit(steps, low, high, heun=False):
    """JiT compares the float32 time of every evaluation. Ends are outside, 0 excepted."""
    times = torch.linspace(0.0, 1.0, steps + 1)
    # Heun's method evaluates both ends of every step but the last.
    times = times.repeat_interleave(2)[1:-2] if heun else times[:-1]
    return ((times < high) & ((low == 0) | (times > low))).tolist()


def rae(steps, low, high, sigma):
    """RAE compares float32 levels, shifted together."""
    levels = 1 - torch.linspace(0, 0.999, steps + 1)
    levels = (sigma * levels / (1 + (sigma - 1) * levels))[:-1]
    return ((levels >= low) & (levels <= high)).tolist()


def ours(name, sampler, steps, interval, shift=1.0, starts_at_one=True):
    """Return whether each evaluation of a family's run is guided."""
    family = next(family for family in families() if family.name == name)
    process = make_process(
        sampler,
        steps,
        shift=shift,
        heun_by_start=family.heun_by_start,
        last_time=family.last_time,
        interval_rule=family.interval_rule,
        starts_at_one=starts_at_one,
    )
    guidance = guidance_of(2.0, 8, interval=closed_interval(family.interval_rule, interval))
    return [guidance.at(level) is guidance for level in process.noise_levels()]


PAIRS = [(low, high) for low in ENDS for high in ENDS if low < high]


@pytest.mark.parametrize("steps", STEPS)
def test_every_end_is_compared_as_the_original_does(steps):
    sigma = (768 * 16 * 16 / 4096) ** 0.5
    for low, high in PAIRS:
        interval = (low, high)
        assert ours("REPA", "euler", steps, interval) == repa(steps, low, high)
        assert ours("REPA", "sde", steps, interval) == repa(steps, low, high, sde=True)
        got = ours("RAE", "euler", steps, interval, 1 / sigma, starts_at_one=False)
        assert got == rae(steps, low, high, sigma)
        assert ours("RAE", "euler", steps, interval) == rae(steps, low, high, 1)
        # Options are noise levels, the ends of JiT's and LightningDiT's scripts times.
        levels = (1 - high, 1 - low)
        assert ours("JiT", "euler", steps, levels) == jit(steps, low, high)
        assert ours("JiT", "heun", steps, levels) == jit(steps, low, high, heun=True)
    for start in ENDS[:-1]:
        for shift in (0.3, 1.0):
            got = ours("LightningDiT", "euler", steps, (0.0, 1 - start), shift)
            assert got == lightning(steps, start, shift)


@pytest.mark.parametrize(
    "name", [family.name for family in families() if family.prediction != "noise"]
)
@pytest.mark.parametrize("sampler", ("euler", "heun"))
def test_noise_is_guided_with_every_shift_that_a_user_chooses(name, sampler):
    """Rounding may shift its level above 1, as by 3 in float64 and by 1.1 in float32."""
    for interval in ((0.0, 1.0), (0.3, 1.0)):
        shifts = [i / 100 for i in range(1, 1001)]
        assert [s for s in shifts if not ours(name, sampler, 9, interval, s)[0]] == []


def test_raes_shift_is_rounded_as_the_originals():
    """Its σ rounds the level of noise above 1 for some sizes of latents, which have no guidance."""
    shapes = [(24, side) for side in range(1, 65)] + [(768, 16), (768, 32), (384, 8)]
    guided = []
    for channels, side in shapes:
        sigma = (channels * side**2 / 4096) ** 0.5
        guided.append(ours("RAE", "euler", 10, (0.0, 1.0), 1 / sigma, False))
        assert guided[-1] == rae(10, 0.0, 1.0, sigma)
    assert {first for first, *_ in guided} == {True, False}

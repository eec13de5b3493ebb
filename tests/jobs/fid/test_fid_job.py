"""Whole FID jobs in real processes: equal to upstream's, killed, stopped, starved of
disk, misled, started twice.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import fill
from forks import kill
from jobs import files, finish, pictures, ranks_of, run, start, start_ranks, wait_for_pictures
from networks import side_of, upstreams_loop, write_transformer
from safetensors.torch import load_file, save_file
from unprivileged import NOBODY, limited, unprivileged

from accel.errors import INTERRUPTED, STOPPED, USAGE
from accel.families.dit.network import DiT_models
from accel.families.sit.network import SiT_models

WANTED = 26
MADE = 28  # two ranks make two at a time
FID = ["--num-fid-samples", WANTED, "--per-proc-batch-size", 2, "--num-sampling-steps", 6]
SHORT = ["--num-fid-samples", 6, "--per-proc-batch-size", 2, "--num-sampling-steps", 4]


@pytest.fixture
def one(here):
    """A job of one rank in this process: what it prints."""

    def one(*args, status=0):
        done = here("sample_ddp.py", *args)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return one


@torch.no_grad()
def by_hand(model, vae_folder, rank, world, n, rounds, cfg_scale, seed, steps):
    """Upstream's job for one rank, as its users know it: {file name: picture}."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(vae_folder)
    side = side_of(model)
    out = {}
    torch.manual_seed(seed * world + rank)
    for round_ in range(rounds):
        z = torch.randn(n, 4, side, side)
        y = torch.randint(0, 8, (n,))
        latents = upstreams_loop(model, z, y, steps, cfg_scale)
        pixels = torch.cat([vae.decode(latent[None] / 0.18215).sample for latent in latents])
        pixels = (127.5 * pixels + 128).clamp(0, 255).permute(0, 2, 3, 1).to(torch.uint8).numpy()
        for i, picture in enumerate(pixels):
            out[f"{i * world + rank + round_ * n * world:06d}.png"] = picture
    return out


@pytest.mark.parametrize("world, cfg_scale", [(2, 1.5), (1, 1.0), (1, 0.5), (1, 0.0)])
def test_the_folder_is_upstreams(world, cfg_scale, demo, weights, tiny_vae, tmp_path, one_thread):
    n = 3
    wanted = 7
    seed = 5
    steps = 3
    rounds = -(-wanted // (n * world))
    how = ["--num-fid-samples", wanted, "--per-proc-batch-size", n, "--num-sampling-steps", steps]
    command = [
        *demo,
        *how,
        "--global-seed",
        seed,
        "--cfg-scale",
        cfg_scale,
        "--sample-dir",
        tmp_path,
    ]
    text = run(world, *command)
    assert f"· {wanted} pictures ·" in text and "labels" not in text  # it draws its own
    name = f"DiT-Demo-2-demo-size-128-vae-{tiny_vae.name}-cfg-{cfg_scale}-seed-5"
    assert {path.name for path in tmp_path.iterdir()} == {name, name + ".npz"}
    expected = {}
    model = DiT_models["DiT-Demo/2"]().eval()
    model.load_state_dict(load_file(weights))
    for rank in range(world):
        expected |= by_hand(model, tiny_vae, rank, world, n, rounds, cfg_scale, seed, steps)
    made = pictures(tmp_path)
    assert sorted(made) == sorted(expected) == [f"{i:06d}.png" for i in range(rounds * n * world)]
    # The null half's update is left out, which leaves the stream as it is, and changes
    # nothing else on the CPU.
    assert all(np.array_equal(made[name], expected[name]) for name in made)
    assert len({picture.tobytes() for picture in made.values()}) == len(made)
    array = np.load(tmp_path / f"{name}.npz")["arr_0"]
    assert array.dtype == np.uint8
    assert np.array_equal(array, np.stack([expected[f"{i:06d}.png"] for i in range(wanted)]))
    if cfg_scale < 1:  # earlier versions computed no guidance there: their folders are refused
        record = tmp_path / name / ".job" / "settings.json"
        older = json.loads(record.read_text())
        del older["guidance below a scale of 1"]
        record.write_text(json.dumps(older))
        refused = "guidance below a scale of 1 True: the pictures in"
        assert refused in run(world, *command, status=USAGE)


def test_the_folder_of_a_sit_is_sits(one, tiny_vae, tmp_path):
    """SiT's job over two batches, the second also after the first was drawn again: its
    last step draws no noise, so the second batch begins where SiT's does.
    """
    model = fill(SiT_models["SiT-S/4"](input_size=8, num_classes=8, depth=2))
    said = argparse.Namespace(num_classes=8, num_heads=6, path_type="Linear", prediction="velocity")
    torch.save(
        {"model": {}, "ema": model.state_dict(), "opt": {}, "args": said}, tmp_path / "sit.pt"
    )
    how = [
        "--num-fid-samples",
        4,
        "--per-proc-batch-size",
        2,
        "--num-sampling-steps",
        4,
        "--vae",
        tiny_vae,
    ]
    command = [
        "--ckpt",
        tmp_path / "sit.pt",
        *how,
        "--device",
        "cpu",
        "--cfg-scale",
        1.5,
        "--sample-dir",
        tmp_path,
    ]
    assert "4 SDE steps" in one(*command)
    expected = by_hand(model, tiny_vae, 0, 1, 2, 2, 1.5, 0, 4)

    assert len({picture.tobytes() for picture in expected.values()}) == 4

    def compare():
        made = pictures(tmp_path)
        assert sorted(made) == sorted(expected)
        for name, picture in made.items():
            assert np.abs(picture.astype(int) - expected[name]).max() <= 1, name

    compare()
    for name in ("000002.png", "000003.png"):
        [path] = tmp_path.glob(f"*/{name}")
        path.unlink()
    one(*command)
    compare()
    assert len(list(tmp_path.glob("SiT-2x384-4-sit-size-64-vae-*-cfg-1.5-seed-0"))) == 1


@pytest.fixture(scope="module")
def undisturbed(demo, tmp_path_factory):
    """Files of a job of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(2, *demo, *FID, "--sample-dir", folder)
    made = files(folder)
    assert sum(name.endswith(".png") for name in made) == MADE and not any(
        ".part" in name for name in made
    )
    return made


@pytest.fixture(scope="module")
def short(demo, tmp_path_factory):
    """The folder of a short job of one rank, to copy."""
    folder = tmp_path_factory.mktemp("short")
    run(1, *demo, *SHORT, "--sample-dir", folder)
    return folder


@pytest.fixture
def copy(short, tmp_path):
    """(folder of samples, pictures' folder, .npz) of a copy of the short job."""
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    [npz] = tmp_path.glob("*.npz")
    return tmp_path, npz.with_suffix(""), npz


# ---- killed and stopped ----


@pytest.mark.timeout(600)
def test_five_kills_change_nothing(demo, undisturbed, tmp_path):
    """One job, killed five times: while it starts, or a random moment after some more
    pictures; a rank of torchrun's, or both ranks. After the third kill two pictures are
    deleted by hand.

    Started again each time with the same command, it ends with every bit of an
    undisturbed one.
    """
    dice = random.Random(time.time_ns())
    seen = []
    for number in range(5):
        made = len(list(tmp_path.glob("*/*.png")))
        command = [*demo, *FID, "--sample-dir", tmp_path]
        jobs = start_ranks(2, *command) if number else [start(2, *command)]
        if number == 3:
            time.sleep(dice.uniform(0, 1))
        elif wait_for_pictures(tmp_path, min(made + dice.randint(1, 3), MADE), jobs[0]):
            time.sleep(dice.uniform(0, 0.2))
        if number:
            kill(*jobs)
        else:
            [job], victim = jobs, dice.randrange(2)
            os.kill(ranks_of(job)[victim], signal.SIGKILL)
            _, error = job.communicate(timeout=200)
            # The other was at work, and takes the launcher's SIGTERM for a request to
            # stop.
            assert re.search(rf"Root Cause.*rank +: {victim} .*SIGKILL", error, re.DOTALL), error
        there = sorted(tmp_path.glob("*/*.png"))
        seen.append((number, len(jobs), len(there)))
        for path in dice.sample(there, min(2, len(there))) if number == 2 else ():
            path.unlink()
    assert sum(0 < made < MADE for _, _, made in seen) >= 3, seen
    run(2, *demo, *FID, "--sample-dir", tmp_path)
    assert files(tmp_path) == undisturbed, seen


def test_a_signal_to_one_rank_stops_all_and_the_job_resumes(demo, undisturbed, tmp_path):
    """Rank 1 under torchrun receives SIGUSR1; then, without torchrun, rank 0 receives SIGHUP.
    Ctrl-C to one rank ends all at once.
    """
    command = [*demo, *FID, "--sample-dir", tmp_path]
    least = 0
    for number, victim, launched in ((signal.SIGUSR1, 1, True), (signal.SIGHUP, 0, False)):
        least += 2  # more than there are: the job is at work
        ranks = [start(2, *command)] if launched else start_ranks(2, *command)
        assert wait_for_pictures(tmp_path, least, ranks[0])
        os.kill(ranks_of(ranks[0])[victim] if launched else ranks[victim].pid, number)
        text = finish(*ranks, status=STOPPED)
        by_rank = text.partition("ChildFailedError")[0]  # once more when torchrun has ended
        assert by_rank.count("start again with the same command") == 1
        assert text.count(f"exitcode  : {STOPPED}") == 2 * launched
        made = files(tmp_path)
        count = sum(name.endswith(".png") for name in made)
        assert least <= count < MADE and not any(
            ".part" in name or name.endswith("npz") for name in made
        )
        assert count % 2 == 0  # all that was made is written
        least = count
    ranks = start_ranks(2, *command)
    assert wait_for_pictures(tmp_path, count + 2, ranks[0])
    os.kill(ranks[1].pid, signal.SIGINT)
    text = finish(*ranks, status=INTERRUPTED)
    assert text.count("sample_ddp.py: rank 1: interrupted") == 1
    assert " of 2 on " not in text  # a rank's own traceback
    run(2, *command)
    assert files(tmp_path) == undisturbed


def test_a_full_disk_ends_the_job_cleanly_and_it_resumes(demo, undisturbed, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "test", tmp_path]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of its own needs root and mount")
    try:
        text = run(2, *demo, *FID, "--sample-dir", tmp_path, status=USAGE)
        assert (
            "--sample-dir: No space left on device" in text
            and "free some" in text
            and "OSError" not in text
        )
        made = files(tmp_path)
        assert (
            not any(".part" in name for name in made)
            and 0 < sum(name.endswith(".png") for name in made) < MADE
        )
        pages = sum(
            -(-len(content) // 4096)
            for name, content in undisturbed.items()
            if not name.endswith(".npz")
        )
        # Enough for the pictures, not for the .npz.
        subprocess.run(["mount", "-o", f"remount,size={4 * pages + 400}k", tmp_path], check=True)
        # Rank 0 fails in the .npz while rank 1 waits at a barrier: the launcher ends
        # both.
        text = finish(start(2, *demo, *FID, "--sample-dir", tmp_path), status=USAGE)
        assert "--sample-dir: No space left on device" in text
        assert sum(name.endswith(".png") for name in files(tmp_path)) == MADE and not list(
            tmp_path.glob("*npz*")
        )
        subprocess.run(["mount", "-o", "remount,size=100m", tmp_path], check=True)
        run(2, *demo, *FID, "--sample-dir", tmp_path)
        assert files(tmp_path) == undisturbed
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("most", [0, 10, 700, 4000, 100_000])
def test_a_limit_on_the_size_of_files_is_one_line(most, demo, short, one, tmp_path):
    """`ulimit -f`: reached in the lock, the settings, a picture, the .npz."""
    with limited("FSIZE", most):
        text = one(*demo, *SHORT, "--sample-dir", tmp_path, status=USAGE)
    assert "--sample-dir" in text and "File too large" in text and "Traceback" not in text, text
    assert not any(".part" in name for name in files(tmp_path))
    one(*demo, *SHORT, "--sample-dir", tmp_path)
    assert files(tmp_path) == files(short)


def test_world_independent_noise(demo, one, tmp_path):
    """Three ranks; begun by two and ended by one, or by two of which one sees nothing of
    the job that was killed, since its node's listing of a network file system is half a
    minute old: the same pictures.

    Ranks that share what is left by a count of their own would each leave batches to the
    other.
    """
    wanted = 24
    places = [tmp_path / name for name in ("three", "one", "lagging")]
    how = [*demo, *FID, "--num-fid-samples", wanted, "--world-independent-noise"]

    def shown(text):
        """What the lines of progress show: all ranks' pictures."""
        numbers = [int(number) for number in re.findall(rf"(\d+) of {wanted} pictures", text)]
        assert numbers == sorted(numbers) and numbers[-1] == wanted, text
        return numbers

    shown(run(3, *how, "--sample-dir", places[0], TQDM_MININTERVAL="0"))
    for place in places[1:]:
        jobs = start_ranks(2, *how, "--sample-dir", place)
        assert wait_for_pictures(place, 7, jobs[0])
        kill(*jobs)
        min(place.glob("*/*.png")).unlink()  # by hand
    one(*how, "--sample-dir", places[1])
    made = len(list(places[2].glob("*/*.png")))
    environment = dict(LAGGING="1", TQDM_MININTERVAL="0")
    worker = "tests/jobs/fid/lagging_worker.py"
    text = run(2, *how, "--sample-dir", places[2], script=worker, **environment)
    assert shown(text)[0] >= made - 4, text  # it resumed
    whole, *others = map(pictures, places)
    assert sorted(whole) == [f"{i:06d}.png" for i in range(wanted)]
    assert len({picture.tobytes() for picture in whole.values()}) == wanted
    for other in others:
        assert sorted(other) == sorted(whole) and all(
            np.array_equal(other[name], whole[name]) for name in whole
        )
    assert len({next(place.glob("*.npz")).read_bytes() for place in places}) == 1


@pytest.mark.parametrize("noise", ([], ["--world-independent-noise"]))
def test_a_folder_is_continued_to_more_pictures(noise, demo, one, tmp_path):
    """The pictures that are there stay. The folder is that of a job that made all at once."""
    command = [*demo, "--per-proc-batch-size", 2, "--num-sampling-steps", 3, *noise]
    command += ["--num-fid-samples"]
    grown = tmp_path / "grown"
    one(*command, 4, "--sample-dir", grown)
    written = {path: path.stat().st_mtime_ns for path in grown.glob("*/*.png")}
    one(*command, 7, "--sample-dir", grown)
    assert len(written) == 4
    assert all(path.stat().st_mtime_ns == before for path, before in written.items())
    one(*command, 7, "--sample-dir", tmp_path / "whole")
    assert files(grown) == files(tmp_path / "whole")
    text = one(*command, 4, "--sample-dir", grown, status=USAGE)
    assert "--num-fid-samples 4: the pictures in" in text and "were begun with 7; give" in text


# ---- a changed folder ----


def test_what_a_kill_leaves_is_repaired(demo, undisturbed, one, tmp_path):
    """Pictures are missing, some of them in the middle, partial files are left, and one picture is
    corrupt until it is deleted.
    """
    command = [*demo, *FID, "--sample-dir", tmp_path]
    for name, content in undisturbed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    [npz] = tmp_path.glob("*.npz")
    home = npz.with_suffix("")
    npz.unlink()
    os.truncate(home / "000017.png", 1000)
    damaged = (
        f"{home}/000017.png: is not a complete PNG of 128×128 pixels; delete it and start again"
    )
    assert damaged in finish(start(2, *command), status=USAGE) and not npz.exists()
    for number in (0, 17, 26, 27):
        (home / f"{number:06d}.png").unlink()
    for partial in (
        home / ".000017.png.0123456789abcdef.part",
        tmp_path / f".{npz.name}.0123456789abcdef.part",
    ):
        partial.write_bytes(b"half")
    run(2, *command)
    assert files(tmp_path) == undisturbed
    text = one(*command, status=USAGE)
    assert "number of ranks 1" in text and "begun with 2" in text
    assert files(tmp_path) == undisturbed


def test_a_recorded_setting_is_what_it_came_to(demo, copy, one):
    """Two paths to the same weights are one job, as are `auto` and the tier that it chooses. One
    changed byte is another job.
    """
    samples, _, _ = copy
    before = files(samples)
    ckpt = samples / "elsewhere" / Path(demo[3]).name
    ckpt.parent.mkdir()
    shutil.copy(demo[3], ckpt)
    command = [
        *demo[:3],
        ckpt,
        *demo[4:],
        *SHORT,
        "--vae-precision",
        "fp32",
        "--no-tf32",
        "--sample-dir",
        samples,
    ]
    one(*command)
    state = load_file(ckpt)
    state["blocks.1.attn.qkv.weight"][3, 1] += 1
    save_file(state, ckpt)
    text = one(*command, status=USAGE)
    assert (
        "--ckpt (contents)" in text and "begun with" in text and text.count("sample_ddp.py: ") == 1
    )
    shutil.rmtree(ckpt.parent)
    assert files(samples) == before


def test_another_config_beside_the_same_weights_is_another_setting(tiny_vae, one, tmp_path):
    """No tensor holds the number of heads."""
    state = fill(DiT_models["DiT-S/4"](input_size=8, num_classes=8)).state_dict()
    ckpt = tmp_path / "ckpt"
    config = dict(sample_size=8, num_embeds_ada_norm=8)
    ckpt.mkdir()
    command = [
        "--ckpt",
        ckpt,
        "--vae",
        tiny_vae,
        "--device",
        "cpu",
        *SHORT,
        "--sample-dir",
        tmp_path / "samples",
    ]
    write_transformer(ckpt, state, {**config, "num_attention_heads": 3, "attention_head_dim": 128})
    one(*command)
    (ckpt / "config.json").write_text(
        json.dumps({**config, "num_attention_heads": 12, "attention_head_dim": 32})
    )
    assert "--ckpt (contents)" in one(*command, status=USAGE)


def test_an_npz_that_is_not_whole_or_of_other_kernels_pictures_is_written_again(demo, copy, one):
    """Kill a job between its pictures and its .npz, then truncate the .npz. A whole .npz
    is left alone.
    """
    samples, folder, npz = copy
    before = files(samples)
    command = [*demo, *SHORT, "--sample-dir", samples]
    settings = folder / ".job" / "settings.json"
    settings.write_text(re.sub(r'(this code.s kernels": ")\w', r"\1x", settings.read_text()))
    (folder / "000004.png").unlink()
    (folder / "000005.png").unlink()
    (folder / "000005.png").mkdir()  # ends this start before the .npz
    assert "not a file at" in one(*command, status=USAGE)
    (folder / "000005.png").rmdir()
    for problem in (
        "has no record of its contents, perhaps because pictures were added",
        "was changed since it was written",
    ):
        os.truncate(npz, npz.stat().st_size - 1)
        assert one(*command).count(f"{npz}: {problem}; writing it again\n") == 1
    assert "writing it again" not in one(*command)
    made = files(samples)
    assert made.pop(str(settings.relative_to(samples))) != before.pop(
        str(settings.relative_to(samples))
    )
    assert made == before


# ---- failure and bad input ----


def test_a_folder_in_a_pictures_place_ends_all_ranks_with_one_line(demo, short, tmp_path):
    """Rank 1 alone finds it, in the middle of the work."""
    folder = tmp_path / next(short.glob("*.npz")).stem
    (folder / "000001.png").mkdir(parents=True)
    more = "--num-fid-samples", 4000, "--sample-dir", tmp_path
    text = finish(start(2, *demo, *FID, *more), status=USAGE)
    assert f"not a file at {folder}/000001.png; fix that" in text and "rank 1 of 2" not in text


@pytest.fixture
def half(short, weights, tiny_vae):
    """(flags, folder of pictures) of the short job with one batch left; nobody owns the files."""
    with tempfile.TemporaryDirectory() as place:
        samples = Path(place, "samples")
        vae = Path(place, tiny_vae.name)
        shutil.copytree(short, samples)
        shutil.copytree(tiny_vae, vae)
        [npz] = samples.glob("*.npz")
        folder = npz.with_suffix("")
        for path in (
            npz,
            folder / ".job" / "npz.json",
            folder / "000004.png",
            folder / "000005.png",
        ):
            path.unlink()
        os.chmod(place, 0o755)
        ckpt = shutil.copy(weights, place)
        for path in Path(place).rglob("*"):
            os.chown(path, NOBODY, NOBODY)
        named = [
            "--model",
            "DiT-Demo/2",
            "--ckpt",
            ckpt,
            "--vae",
            str(vae),
            "--device",
            "cpu",
            *SHORT,
        ]
        yield [*named, "--sample-dir", str(samples)], folder


@pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")
@pytest.mark.parametrize(
    "name, mode",
    [
        (".", 0o555),
        (".", 0o311),
        (".", 0),
        ("..", 0o555),
        (".job", 0o555),
        (".job", 0o311),
        (".job/lock", 0o444),
    ]
    + [(".job/settings.json", 0)],
)
def test_missing_permissions_are_one_line_and_the_job_resumes(name, mode, half, short, one):
    command, folder = half
    place = folder / name
    before = place.stat().st_mode
    place.chmod(mode)
    with unprivileged():
        text = one(*command, status=USAGE)
    place.chmod(before)
    assert (
        text.count("sample_ddp.py: ") == 1 and "--sample-dir" in text and "Traceback" not in text
    ), text
    assert name == ".job/settings.json" or "px ·" not in text  # nothing was loaded
    with unprivileged():
        one(*command)
    assert files(folder.parent) == files(short)


@pytest.mark.parametrize("what", ["the folder", "the record"])
def test_what_is_taken_away_meanwhile_is_one_line(what, demo, undisturbed, tmp_path):
    """A folder that is moved back is resumed; pictures without a record are refused."""
    command = [*demo, *FID, "--sample-dir", tmp_path]
    job = start(2, *command)
    assert wait_for_pictures(tmp_path, 3, job)
    [folder] = tmp_path.iterdir()
    place = folder if what == "the folder" else folder / ".job"
    away = tmp_path / "away"
    place.rename(away)
    text = finish(job, status=USAGE)
    assert f"sample_ddp.py: --sample-dir: No such file or directory at {folder}" in text
    assert "Traceback" not in text.split("ChildFailedError")[0].rpartition("Traceback")[0], text
    if what == "the record":
        assert "without a record of their settings" in run(2, *command, status=USAGE)
        shutil.rmtree(place)
    away.rename(place)
    run(2, *command)
    assert files(tmp_path) == undisturbed

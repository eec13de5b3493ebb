"""A folder of many pictures for FID: made by many ranks, killed at any moment, continued with the same command.

A picture's file, a batch's record and the .npz each get their name, or their line, only when their bytes are on disk. A batch is
finished when its record is there; a job that is started again makes the others, each from the random state recorded before it.
So the folder ends with the same bits, however often it was interrupted.

    <folder>/000000.png …           the pictures
    <folder>/.job/settings.json     what decides their bits; a start with other settings is refused
    <folder>/.job/rank-0000.jsonl   one line a finished batch: its number and the generator's state after it
    <folder>/.job/products-*.json   GPU: the algorithms its matrix products were found to run best with
    <folder>.npz                    arr_0 (N, H, W, 3) uint8, as the FID evaluators read it
"""

import errno
import hashlib
import json
import os
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from accel import kernels
from accel.options import DEFAULTS_OF, UsageError, check_writable, flag_names
from accel.parallel.group import Stopped
from accel.vae import to_uint8

IRRELEVANT = {
    "ckpt",
    "vae",
    "device",
    "output",
    "output_type",
    "labels",
    "repeats",
    "sample_dir",
    "tf32",
    "decode",
    "forecast",
    "forecast_plan",
    "forecast_tolerance",
}  # to a picture's bits, or said below
CODE = "this code's kernels"  # recorded too; others may round differently, which is said and not refused
WRITERS = 4  # threads that compress PNGs: a 512 px picture takes one of them 60 ms


#################################################################################
#                              What is to be made                               #
#################################################################################


def folder_of(options):
    """The pictures' folder, e.g. samples/DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0. Weights and decoders given as files
    or folders appear by their last name, the model's own as "pretrained"."""

    def name(flag):
        value = getattr(options, flag)
        own = value == DEFAULTS_OF.get(options.model, {}).get(flag)
        return "pretrained" if own else Path(value).name.removesuffix(".pt").removesuffix(".safetensors")

    return Path(options.sample_dir) / (
        f"{options.model.replace('/', '-')}-{name('ckpt')}-size-{options.image_size}-vae-{name('vae')}"
        f"-cfg-{options.cfg_scale}-seed-{options.seed}"
    )


def check(options, world):
    """What can be refused before weights are fetched and read: a UsageError."""
    if not options.world_independent_noise and not -(2**63) <= options.seed * world <= 2**64 - world:
        raise UsageError(
            f"--global-seed {options.seed}: times {world} ranks it must fit into 64 bits; use a smaller one"
        )
    check_writable(f"{folder_of(options)}.npz", "--sample-dir")


class Plan:
    """Which batch holds which pictures, and which rank makes it.

    Upstream's way: every round all ranks make n pictures each, interleaved by rank; the total is rounded up to whole rounds. The
    world-independent way: batch b is pictures b·n … b·n + n - 1, whoever makes it, and the last may be smaller.
    """

    def __init__(self, options, rank, world):
        self.n, self.wanted, self.rank, self.world = options.per_proc_batch_size, options.num_fid_samples, rank, world
        self.independent = options.world_independent_noise
        self.count = -(-self.wanted // (self.n if self.independent else self.n * world))
        if not self.independent:
            self.count *= world  # batches of all ranks
        self.total = self.wanted if self.independent else self.count * self.n

    def left(self, finished):
        """This rank's share of the batches that are not in `finished`, in order."""
        if self.independent:
            return [batch for batch in range(self.count) if batch not in finished][self.rank :: self.world]
        return [batch for batch in range(self.rank, self.count, self.world) if batch not in finished]

    def pictures(self, batch):
        """Picture numbers of a batch. In upstream's way, batch number i·world + rank is the i-th of that rank."""
        if self.independent:
            return range(batch * self.n, min((batch + 1) * self.n, self.wanted))
        first = batch // self.world * self.world * self.n + batch % self.world
        return range(first, first + self.n * self.world, self.world)


def settings_of(engine, plan):
    """Everything that decides a picture's bits, by the name of its flag where it has one."""
    kind = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    settings = {
        flag_names(item)[0]: getattr(engine.options, item.name)
        for item in fields(engine.options)
        if item.name not in IRRELEVANT
    }
    settings |= {
        "--precision": engine.precision,
        "--ckpt (contents)": _fingerprint(engine.network),
        "--vae (contents)": _fingerprint(engine.load_decoder().plain),
        "--vae-precision": engine.decoder.precision,
        "device": kind,
        "torch": torch.__version__,
        CODE: kernels.version(kernels.FOLDER),
    }
    if engine.forecast is not None:
        settings["--forecast"] = engine.forecast.setting
    if not plan.independent:
        settings["number of ranks"] = plan.world
    return json.loads(json.dumps(settings))  # as they will be read back


def _fingerprint(module):
    """A short hash of a few hundred values of every parameter: another checkpoint is seen, another path to the same is not."""
    some = torch.cat([p.detach().flatten()[:: p.numel() // 256 + 1].float() for p in module.parameters()])
    return hashlib.sha256(some.cpu().numpy().tobytes()).hexdigest()[:16]


#################################################################################
#                                   On disk                                     #
#################################################################################


@contextmanager
def durable(path):
    """A binary file that gets its name `path` only when all its bytes are on disk. The partial's name is fixed: what a killed job
    leaves is overwritten by the next."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder):
    """Names in a folder are its own data: without this a renamed file may be gone after a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def picture_name(number):
    return f"{number:06d}.png"


def write_picture(path, pixels):
    """pixels (H, W, 3) uint8."""
    from PIL import Image

    with durable(path) as file:
        Image.fromarray(pixels).save(file, format="PNG")


class Journal:
    """The record of finished batches, one file a rank, one JSON line a batch, each line on disk before the next is begun."""

    def __init__(self, folder, plan):
        self.folder, self.plan, self.states = folder, plan, {}
        self.path = folder / ".job" / f"rank-{plan.rank:04d}.jsonl"

    @staticmethod
    def prepare(folder, npz, settings):
        """Open the folder for a job with `settings`, on one rank. Raises UsageError if what is there was made otherwise."""
        home, file = folder / ".job", folder / ".job" / "settings.json"
        try:
            home.mkdir(parents=True, exist_ok=True)
            recorded = any(_lines(path)[0] for path in home.glob("rank-*.jsonl"))
            if file.exists() and recorded:
                earlier = json.loads(file.read_text())
                wrong = [name for name in {**earlier, **settings} if earlier.get(name) != settings.get(name)]
                if CODE in wrong:
                    wrong.remove(CODE)
                    print(
                        f"{folder}: was begun by other kernels than this code has; the pictures from here on may differ from those in their last bits"
                    )
                if wrong:
                    now, then = (
                        settings.get(wrong[0], "off"),
                        earlier.get(wrong[0], "off"),
                    )  # the forecast stands there if there is one
                    raise UsageError(
                        f"{wrong[0]} {now}: the pictures in {folder} were begun with {then}; "
                        "use that, or another --sample-dir"
                    )
            elif npz.exists() or not file.exists() and (recorded or next(folder.glob("*.png"), None)):
                raise UsageError(
                    f"--sample-dir: {folder} holds pictures, or its .npz is there, without a record of how they were made; "
                    "move them, or use another --sample-dir"
                )
            else:
                # Made, perhaps by other settings, but of no finished batch: no part of this job.
                for left in (*folder.glob("[0-9]*.png"), *folder.glob(".[0-9]*.part")):
                    if left.is_file():
                        left.unlink()
                with durable(file) as out:
                    out.write(json.dumps(settings, indent=2).encode())
                for place in (home, folder, folder.parent):
                    _sync_folder(place)
        except OSError as error:
            raise UsageError(f"--sample-dir: cannot write to {folder} ({error.strerror}); choose another") from None

    def read(self):
        """Take in what is recorded; a torn last line, and batches with a picture missing, do not count. Returns the finished batches."""
        files = self.path.parent.glob("rank-*.jsonl") if self.plan.independent else [self.path]
        for path in sorted(files):
            for record in _lines(path)[0]:
                self.states[record["batch"]] = record.get("generator")
        there = {entry.name for entry in os.scandir(self.folder)}
        if self.path.exists():
            os.truncate(self.path, _lines(self.path)[1])
        return {
            batch for batch in self.states if all(picture_name(number) in there for number in self.plan.pictures(batch))
        }

    def record(self, batch, state):
        """Batch `batch` is finished; `state`: the generator after it (bytes), or None where noise is keyed by picture."""
        self.states[batch] = state and state.hex()
        line = {"batch": batch} | ({} if state is None else {"generator": state.hex()})
        _sync_folder(self.folder)  # the pictures' names first
        begun = self.path.exists()
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if not begun:
            _sync_folder(self.path.parent)


def _lines(path):
    """(records, bytes that hold them) of a journal file, up to its first torn line."""
    records, length = [], 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(record, dict):
                break
            records.append(record)
            length += len(line)
    return records, length


class Writer:
    """Compresses and records batches beside the sampling. At most two batches wait; an error of theirs is raised by the next call."""

    def __init__(self, journal):
        self.journal = journal
        self.pool, self.pending = ThreadPoolExecutor(WRITERS, "png"), deque()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.pool.shutdown(cancel_futures=kind is not None)

    def put(self, batch, pixels, state):
        """pixels (n, H, W, 3) uint8 array of the batch's pictures."""
        self.wait(1)
        pictures = [
            self.pool.submit(write_picture, self.journal.folder / picture_name(number), picture)
            for number, picture in zip(self.journal.plan.pictures(batch), pixels, strict=True)
        ]
        self.pending.append(self.pool.submit(self._finish, pictures, batch, state))

    def _finish(self, pictures, batch, state):
        for (
            picture
        ) in pictures:  # submitted before this was: they are done or running, so waiting here cannot lock the pool
            picture.result()
        self.journal.record(batch, state)

    def wait(self, most=0):
        """Until at most so many batches are unfinished."""
        while self.pending and (len(self.pending) > most or self.pending[0].done()):
            self.pending[0].result()
            self.pending.popleft()


def write_npz(folder, path, count, size, stopping=lambda: False):
    """Pictures 0 … count - 1 of `folder` as arr_0 (count, size, size, 3) uint8 in an uncompressed .npz, read and written a few at a time.

    Raises UsageError for a picture that cannot be read, Stopped when `stopping()` says so.
    """
    from PIL import Image

    def read(number):
        file = folder / picture_name(number)
        try:
            pixels = np.asarray(Image.open(file))
        except (OSError, SyntaxError) as error:
            raise UsageError(f"{file}: cannot be read ({error}); delete it and start again: it is made anew") from None
        if pixels.shape != (size, size, 3) or pixels.dtype != np.uint8:
            raise UsageError(f"{file}: is no RGB picture of {size} px; delete it and start again: it is made anew")
        return pixels

    with (
        durable(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        ThreadPoolExecutor(WRITERS) as pool,
        archive.open("arr_0.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(
            member, dict(descr="|u1", fortran_order=False, shape=(count, size, size, 3))
        )
        numbers = iter(range(count))
        ahead = deque(pool.submit(read, number) for number in islice(numbers, 8 * WRITERS))
        while ahead:
            member.write(ahead.popleft().result().tobytes())
            ahead.extend(pool.submit(read, number) for number in islice(numbers, 1))
            if stopping():
                raise Stopped(f"stopped while writing {path}; start again with the same command")
    _sync_folder(path.parent)


#################################################################################
#                                   The job                                     #
#################################################################################


class UpstreamNoise:
    """Upstream's stream on the device's own generator: seeded once a rank, then z, labels and the steps' noise of one batch after the
    other, each step drawing 2n rows with guidance and n without."""

    def __init__(self, engine, plan):
        self.engine, self.plan, self.next = engine, plan, None
        self.module = torch if engine.device.type == "cpu" else torch.get_device_module(engine.device)

    def batch(self, batch, before):
        """(z, labels, draw) of a batch; before: the generator's state after this rank's previous one (hexadecimal), where recorded."""
        options = self.engine.options
        if batch == self.plan.rank:  # the first of this rank
            torch.manual_seed(options.seed * self.plan.world + self.plan.rank)
        elif batch != self.next:
            self.module.set_rng_state(torch.frombuffer(bytearray.fromhex(before), dtype=torch.uint8))
        self.next = batch + self.plan.world
        side, n = options.latent_size, self.plan.n
        z = torch.randn(n, 4, side, side, device=self.engine.device)
        return z, torch.randint(0, options.num_classes, (n,), device=self.engine.device), None

    def state(self):
        return bytes(self.module.get_rng_state().numpy())


class PictureNoise:
    """Noise and label keyed by the picture's number: a generator each, so that it does not matter who makes it beside which others."""

    def __init__(self, engine, plan):
        self.engine, self.plan = engine, plan

    def batch(self, batch, before):
        options, device = self.engine.options, self.engine.device
        # The odd factor keeps the pictures' seeds of one job apart in every 32 bits (all that the CPU's generator takes).
        generators = [
            torch.Generator(device).manual_seed((options.seed * 0x9E3779B97F4A7C15 + number) % 2**63)
            for number in self.plan.pictures(batch)
        ]
        labels = torch.stack(
            [torch.randint(0, options.num_classes, (), device=device, generator=g) for g in generators]
        )

        def draw():
            return torch.stack(
                [
                    torch.randn(4, options.latent_size, options.latent_size, device=device, generator=g)
                    for g in generators
                ]
            )

        return draw(), labels, draw

    def state(self):
        return None


def run(engine, group):
    """Make the pictures of the engine's options and their .npz, or what is missing of them. Raises Stopped when asked to stop."""
    try:
        _run(engine, group, folder := folder_of(engine.options))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"--sample-dir: {error.strerror} at {folder}; free some and start again with the same command: it goes on"
        ) from None


def _run(engine, group, folder):
    options, plan = engine.options, Plan(engine.options, group.rank, group.world)
    npz = folder.with_name(folder.name + ".npz")
    journal = Journal(folder, plan)
    settings = group.together("settings", lambda: settings_of(engine, plan))
    group.together("folder", lambda: Journal.prepare(folder, npz, settings), only=0)
    todo = plan.left(group.together("record", journal.read))
    if engine.device.type == "cuda":
        _choose_products(engine, group, plan, folder)
    left = sum(group.tell("todo", sum(len(plan.pictures(batch)) for batch in todo)))
    if left:
        todo = _make_pictures(engine, group, journal, todo, plan.total - left)
        if any(group.tell("left", len(todo))):
            raise Stopped(f"stopped; {folder} is recorded up to here, start again with the same command to go on")
    if group.rank == 0 and not npz.exists():
        with engine.watch.phase("npz"):
            write_npz(folder, npz, options.num_fid_samples, options.image_size, lambda: group.stopping)
    print(f"{folder}: {plan.total} pictures, {npz}: {options.num_fid_samples} · {engine.watch}")


@contextmanager
def _room_for(pictures):
    """UsageError where the GPU's memory does not hold so many pictures at a time."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UsageError(
            f"--per-proc-batch-size {pictures}: does not fit in the GPU's memory; use a smaller one"
        ) from None


def _choose_products(engine, group, plan, folder):
    """Products may run by an algorithm that is chosen by measurement, and another one rounds differently. So one rank measures, and the
    choice stays in the job's folder, for the other ranks and for the job when it is started again."""
    if tuner := getattr(engine.network, "tuner", None):
        tuner.keep_in(folder / ".job")
    side = engine.options.latent_size
    with _room_for(plan.n):
        z, labels = (
            torch.zeros(plan.n, 4, side, side, device=engine.device),
            torch.zeros(plan.n, dtype=torch.int64, device=engine.device),
        )
    for rank_0 in (True, False):
        if (group.rank == 0) == rank_0:
            with _room_for(plan.n):
                engine.denoise(z, labels, guided=engine.options.cfg_scale > 1, steps=1)
        group.barrier("chosen" if rank_0 else "ready")


def _make_pictures(engine, group, journal, todo, already):
    """Make and record the batches `todo` until done or asked to stop; returns those that are left."""
    from tqdm import tqdm

    plan, options = journal.plan, engine.options
    noise = (PictureNoise if plan.independent else UpstreamNoise)(engine, plan)
    with (
        tqdm(total=plan.total, initial=already, unit="picture", smoothing=0.1, disable=group.rank > 0) as bar,
        Writer(journal) as writer,
    ):

        def show(store):
            bar.update(already + store.add("pictures", 0) - bar.n)

        group.on_beat = show if group.rank == 0 else None
        while todo and not group.stopping:
            batch = todo[0]
            z, labels, draw = noise.batch(batch, journal.states.get(batch - plan.world))
            with _room_for(plan.n):
                with engine.watch.phase("sample"):
                    latents = engine.denoise(z, labels, guided=options.cfg_scale > 1, draw=draw)
                pixels = to_uint8(engine.decode(latents))
            writer.put(batch, pixels.numpy(), noise.state())
            todo = todo[1:]
            group.store.add("pictures", len(pixels))
        writer.wait()
        group.on_beat = None
        group.barrier("pictures")
        if group.rank == 0:
            show(group.store)
    return todo

"""The report's front page: what was measured in one table, the two pictures, and what was not measured."""

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

from bench.harness import safe
from bench.jobs import CONTEST


def summary(data: dict, gpus: int, device: str) -> dict:
    """Before and after, from the sections' data.

    before, after: the contest's rows of upstream's arithmetic and of the recommended tier. upstream: as it ships.
    here: this project's tiers. judged: tier → metrics in `verified`. shown: the two pictures. missing: keys of what was
    not measured.
    """
    single = data.get("single") or {}
    rows = {row["tier"]: row for row in single.get("contest") or data.get("baseline", {}).get("contest", [])}
    records = single.get("verified", [])
    job = next(iter(rows.values()))["job"] if rows else None
    verified = next((one for one in records if job and one["model"] == job["model"]), records[0] if records else None)
    judged = (
        {tier["tier"].partition(",")[0].removesuffix(" again"): tier for tier in verified["tiers"]} if verified else {}
    )
    best = verified and verified["best"]["tier"].partition(",")[0].removesuffix(" again")
    before = rows.get("fp32") or rows.get("tf32")
    after = rows.get(best) or min(rows.values(), key=lambda row: row["seconds"], default=None)
    link = data.get("many", {}).get("ddp", [])
    missing = dict(
        weights=bool(job and job["weights"].startswith("random")),
        likeness=bool(verified and job and any(verified[key] != job[key] for key in ("model", "image_size"))),
        lpips=bool(verified and verified["vgg_weights"] and not verified["vgg_weights"]["published"]),
        judged=not verified,
        vgg=bool(verified and any(math.isnan(tier["lpips"]) for tier in verified["tiers"])),
        contest=bool(job and job["rehearsal"]),
        v100="V100" not in device,
        gpus=not data.get("many") or gpus == 1,
        compiler=not single.get("versus"),
        fid=True,
    )
    return dict(
        job=job,
        contest=CONTEST,
        before=before,
        after=after,
        upstream=rows.get("tf32") if before is not rows.get("tf32") else None,
        here=[row for tier, row in rows.items() if tier not in ("fp32", "tf32") and row is not before],
        judged=judged,
        verified=verified,
        shown=verified and shown(verified, judged.get(after["tier"], verified["best"]) if after else verified["best"]),
        jobs=[one for one in link if one["model"] == (job or {}).get("model")] if device != "CPU" else [],
        missing=[key for key, value in missing.items() if value],
    )


def shown(verified: dict, tier: dict) -> dict:
    """The worst grid in fp32 and in `tier`, as verify.py left them; without them its heatmap, which shows both."""
    folder, seed = verified["path"].parent, tier["worst_seed"]
    grids = [folder / f"seed{seed}-{safe(name)}.png" for name in ("fp32", tier["tier"])]
    if not all(path.is_file() for path in grids):
        return dict(tier=tier["tier"], heatmap=next(iter(tier["heatmaps"].values())))
    with Image.open(grids[0]) as one, Image.open(grids[1]) as other:
        a, b = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (one, other))
    return dict(tier=tier["tier"], grids=(a, b), most=int(np.abs(a - b).max()))


def pictures(found: dict, width: int = 1600) -> bytes:
    """Two grids side by side, the map of their largest differences below, white where it is `most` levels."""
    if "heatmap" in found:
        with Image.open(Path(found["heatmap"])) as image:
            return jpeg(image.convert("RGB"), width)
    a, b = found["grids"]
    gap, (height, side, _) = 16, a.shape
    across = 2 * side + gap
    difference = (np.abs(a - b).max(axis=2) * (255 / max(1, found["most"]))).astype(np.uint8)
    large = Image.fromarray(difference).resize((across, height * across // side), Image.Resampling.NEAREST)
    sheet = Image.new("RGB", (across, height + gap + large.height), "white")
    for picture, at in ((a, (0, 0)), (b, (side + gap, 0))):
        sheet.paste(Image.fromarray(picture.astype(np.uint8)), at)
    sheet.paste(large, (0, height + gap))
    return jpeg(sheet, width)


def jpeg(image: Image.Image, width: int) -> bytes:
    """A picture for the screen: at most `width` pixels wide."""
    buffer = io.BytesIO()
    image.thumbnail((width, image.height), Image.Resampling.LANCZOS)
    image.save(buffer, "JPEG", quality=82, optimize=True)
    return buffer.getvalue()

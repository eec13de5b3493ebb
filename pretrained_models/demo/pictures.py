"""The demo's data: eight classes of pictures, drawn from random parameters by arithmetic on tensors, in batches.

    python -m pretrained_models.demo.pictures --output output/pictures.png     # eight of each class

Every picture follows from the seed and the device whose generator draws: colours, places, sizes, light and texture. The
order of the draws is part of the data.
"""

import argparse
import math
from functools import reduce
from pathlib import Path

import torch
import torch.nn.functional as F

from accel.families.dit import DRAWN as CLASSES
from pretrained_models.demo.canvas import (
    FINE,
    SIZE,
    Canvas,
    Map,
    hsv,
    inside,
    length,
    mix,
    overlap,
    rotate,
    shade,
    smooth,
    sphere,
)


def draw_planet(c: Canvas) -> None:
    """A banded planet with a ring, among stars."""
    hue = c.rand(0, 1)
    c.paint(hsv(c.rand(0.58, 0.82), c.rand(0.5, 0.8), 0.13 + 0.09 * c.noise(2, 2).clamp(-1.2, 2)))
    stars = ((torch.rand(c.count, 1, 64, 64, **c.source) - 0.985) / 0.015).clamp(0, 1)
    c.image = (c.image + F.interpolate(stars, (FINE, FINE), mode="bicubic").clamp(0, 1)).clamp(0, 1)
    radius, tilt, squash = c.rand(0.36, 0.5), c.rand(-0.6, 0.6), c.rand(0.18, 0.42)
    nx, ny = (c.x - c.rand(-0.12, 0.12)) / radius, (c.y - c.rand(-0.12, 0.12)) / radius
    nz = sphere(nx, ny)
    across, along = rotate(nx, ny, tilt)  # along: latitude
    ring = length(across, along / squash)
    cover = smooth(1.25, 1.32, ring) * (1 - smooth(1.82, 1.9, ring)) * (0.72 + 0.28 * torch.sin(ring * c.rand(14, 24)))
    ring_colour = hsv(hue + c.rand(-0.1, 0.15), c.rand(0.2, 0.45), 0.75 + 0.2 * torch.cos(ring * c.rand(9, 15)))

    side = c.choice(-1.0, 1.0)
    light = (0.62 * side * nx - 0.45 * ny + 0.64 * nz).clamp(min=0)
    latitude = along - squash * nz  # the ring's plane is seen from above: so are the bands
    wave = torch.sin(latitude * c.rand(5, 11) + 0.45 * c.noise(5, 3) + c.rand(0, 6))
    fine = torch.sin(latitude * c.rand(16, 26) + 0.5 * c.noise(6, 3))
    saturation = (c.rand(0.45, 0.75) - 0.18 * wave).clamp(0, 1)
    surface = hsv(hue + 0.07 * wave + 0.02 * fine, saturation, 0.82 + 0.14 * wave + 0.05 * fine)
    glow = 0.32 * torch.exp(-8 * (length(nx, ny) - 1).clamp(min=0)) * (0.35 + 0.65 * smooth(-1, 1, side * nx - ny))
    c.paint(hsv(hue, c.rand(0.4, 0.7), 1.0), glow)
    c.paint(ring_colour, cover)
    light = 0.07 + 1.1 * light + 0.6 * ((1 - nz) ** 3 * light)
    c.paint(shade(surface, light), inside(length(nx, ny) * radius - radius))
    c.paint(ring_colour, cover * inside(-along, 0.01))


def draw_mountains(c: Canvas) -> None:
    """Mountain ranges in the haze, one behind the other, under a low sun."""
    sky, warm = c.rand(0.5, 0.85), c.rand(0.02, 0.15)  # sky: from turquoise to violet
    low = hsv(warm, c.rand(0.2, 0.5), c.rand(0.95, 1.0))
    c.paint(mix(hsv(sky, c.rand(0.4, 0.7), c.rand(0.55, 0.9)), low, ((c.y + 1.0) / 1.25).clamp(0, 1)))
    sun_x, sun_y, size = c.rand(-0.65, 0.65), c.rand(-0.65, -0.3), c.rand(0.13, 0.22)
    sun = length(c.x - sun_x, c.y - sun_y) - size
    c.paint(c.white, 0.65 * torch.exp(-3.2 * sun.clamp(min=0)))
    c.paint(hsv(warm + 0.06, c.rand(0.1, 0.35), 1.0), inside(sun, 0.012))
    far = torch.lerp(low, hsv(sky, 0.5, 0.75), 0.65)
    near = hsv(c.rand(0.3, 0.8), c.rand(0.45, 0.75), c.rand(0.1, 0.22))
    sun_side, snow = torch.where(sun_x < 0, 1.0, -1.0), c.rand(-0.7, 0.0)
    for layer in range(4):
        line = torch.randn(c.count, 1, 5 + 2 * layer, **c.source)
        peaks = F.interpolate(line, FINE, mode="linear", align_corners=True)  # (B, 1, FINE): straight slopes
        crags = c.noise(1, 8, 3)[:, :1] * 0.09
        height = -0.22 + 0.33 * layer - peaks * (0.24 - 0.035 * layer) + crags * (1 - 0.12 * layer)
        depth = c.y - height
        slope = (height - height.roll(12, 2)) / (24 / FINE)  # the flanks towards the sun are lit
        relief = (0.17 * (slope * sun_side).clamp(-1.2, 1.2) + 0.05 * c.noise(4, 8, 3)) * smooth(0.5, 0.1, depth)
        flank = shade(torch.lerp(far, near, (layer + 0.35) / 3.5), 1.0 + relief)
        c.paint(mix(flank, far, 0.45 * smooth(0.02, 0.7, depth)), inside(-depth))
        if layer < 2:
            cap = inside(c.y + 0.05 * c.noise(2, 14, 3) - snow + 0.25 * depth, 0.02) * inside(-depth)
            c.paint(torch.lerp(far, c.white, 0.75), 0.9 * cap)


def draw_flower(c: Canvas) -> None:
    """A flower with two wreaths of petals on a stem, before blurred green."""
    green, blur = c.rand(0.2, 0.44), c.noise(2, 2, 2)
    saturation, value = c.rand(0.4, 0.7), (c.rand(0.38, 0.62) + 0.13 * blur - 0.1 * c.y).clamp(0.05, 1)
    c.paint(hsv(green + 0.05 * blur, saturation, value))
    cx, cy, size, bend = c.rand(-0.15, 0.15), c.rand(-0.28, -0.02), c.rand(0.56, 0.74), c.rand(-0.25, 0.25)
    stem_x = c.x - cx - bend * (c.y - cy) ** 2
    stem = hsv(green - 0.02, c.rand(0.6, 0.8), c.rand(0.35, 0.5))
    c.paint(shade(stem, 1 - 7 * stem_x), inside(stem_x.abs() - 0.045) * inside(cy - c.y))
    lx, ly = rotate(c.choice(-1.0, 1.0) * (c.x - cx) - 0.3, c.y - 0.72, c.rand(-0.7, -0.3))
    edge = (ly.abs() - 0.15 * (1 - (lx / 0.36) ** 2).clamp(min=0)) + 0.3 * (lx.abs() - 0.36).clamp(min=0)
    leaf = hsv(green, c.rand(0.6, 0.8), c.rand(0.4, 0.55))
    c.paint(shade(leaf, 1 - 1.6 * ly + 0.25 * inside(ly.abs() - 0.008, 0.01)), inside(edge))

    x, y = (c.x - cx) / size, (c.y - cy) / size * c.rand(1.0, 1.15)
    away, angle = (x * x + y * y + 1e-6).sqrt(), torch.atan2(y, x)
    hue = c.choice(0.92, 0.98, 0.05, 0.11, 0.15, 0.6, 0.72, 0.8, 0.86) + c.rand(-0.03, 0.03)
    second, petals, turn = c.rand(-0.1, 0.1), c.randint(5, 9), c.rand(0, 6.3)
    pointed, pale = c.rand(0.5, 1.3), c.rand(0.25, 0.9)
    for wreath in (0, 1):
        phase = (angle + turn) * petals / 2 + wreath * math.pi / 2
        across = torch.sin(phase)  # 0 along a petal's middle
        reach = (1.0 - 0.13 * wreath) * (0.38 + 0.62 * (phase.cos().abs() + 1e-4) ** pointed)
        t = away / reach
        vein = 0.05 * torch.cos(across * 14) * smooth(0.3, 0.6, t)
        saturation = (pale * (0.55 + 0.6 * t.clamp(0, 1)) + vein).clamp(0, 1)
        petal = hsv(hue + second * (1 - t.clamp(0, 1)), saturation, 0.96)
        light = 0.70 + 0.18 * wreath + 0.34 * smooth(0.15, 0.9, t) - 0.22 * across**2 - vein
        if wreath == 1:
            c.darken(0.3 * smooth(1.25, 0.95, t) * inside(away - 0.8, 0.1))
        c.paint(shade(petal, light.clamp(max=1.25)), inside((away - reach) * size * 0.7))
    radius = c.rand(0.2, 0.3)
    seeds = torch.sin(angle * 8 + away * 40) * torch.sin(angle * 8 - away * 40)
    light = 0.5 + 0.6 * sphere(x / radius, y / radius) + 0.16 * seeds - 0.25 * y / radius
    c.darken(0.35 * smooth(radius * 1.35, radius, away))
    heart = hsv(c.choice(0.13, 0.1, 0.16, 0.06), c.rand(0.7, 0.9), c.choice(0.95, 0.9, 0.6))
    c.paint(shade(heart, light), inside((away - radius) * size))


def draw_room(c: Canvas, horizon: Map) -> None:
    """Wall and floor in soft light."""
    hue = c.rand(0, 1)
    wall = hsv(hue, c.rand(0.25, 0.55), c.rand(0.75, 0.97))
    floor = hsv(hue + c.rand(0.3, 0.7), c.rand(0.15, 0.45), c.rand(0.65, 0.92))
    glow = torch.exp(-1.6 * ((c.x - c.rand(-0.6, 0.6)) ** 2 + (c.y + 0.5) ** 2))
    c.paint(shade(wall, 0.68 + 0.42 * glow))
    c.paint(shade(floor, 0.72 + 0.35 * (c.y - horizon) + 0.03 * c.noise(12, 3, 3)), inside(horizon - c.y, 0.015))


def draw_ball(c: Canvas) -> None:
    """A beach ball on the floor."""
    horizon, radius = c.rand(0.05, 0.35), c.rand(0.44, 0.62)
    draw_room(c, horizon)
    cx, cy, side = c.rand(-0.25, 0.25), 0.8 - radius + c.rand(-0.08, 0.08), c.choice(-1.0, 1.0)
    shadow_x, shadow_y = (c.x - cx + 0.25 * side * radius) / radius / 1.05, (c.y - cy - 0.93 * radius) / radius / 0.24
    c.darken(0.5 * smooth(1.25, 0.2, length(shadow_x, shadow_y)))
    nx, ny = (c.x - cx) / radius, (c.y - cy) / radius
    nz = sphere(nx, ny)
    px, py = rotate(nx, ny, c.rand(0, 6.3))
    py, pz = rotate(py, nz, c.rand(0.3, 1.1))
    wedges, spin, hue, step = c.choice(6.0, 8.0), c.rand(0, 1), c.rand(0, 1), c.choice(0.0, 0.25, 0.34, 0.5)
    index = torch.floor((torch.atan2(px, pz) / (2 * math.pi) + spin) * wedges % wedges)
    white = (index % 2 == 0).float()
    colour = hsv(hue + step * torch.floor(index / 2), 0.84 - 0.8 * white, 0.9 + 0.07 * white)
    colour = mix(colour, hsv(hue, 0.85, 0.85), smooth(0.965, 0.985, py.abs()))  # the caps
    lit = (0.45 * side * nx - 0.62 * ny + 0.64 * nz).clamp(min=0)
    gloss = smooth(0.93, 0.995, 0.27 * side * nx - 0.37 * ny + 0.89 * nz)
    light = 0.35 + 0.75 * lit + 0.12 * smooth(0.2, 1.0, ny) * (1 - nz) + 0.75 * gloss
    c.paint(shade(colour, light), inside(length(nx, ny) * radius - radius))


def draw_block(c: Canvas) -> None:
    """A toy block, each face with its own colour and mark, seen from above."""
    draw_room(c, c.rand(-0.25, 0.1))
    yaw, pitch, half = c.rand(0.3, 1.27), c.rand(0.45, 0.7), c.rand(0.36, 0.46)
    x, y = c.x - c.rand(-0.18, 0.18), c.y - c.rand(0.0, 0.16)

    def turn(a, b, d):
        """Into the block's frame: right, down, into the picture."""
        b, d = b * pitch.cos() + d * pitch.sin(), d * pitch.cos() - b * pitch.sin()
        return a * yaw.cos() + d * yaw.sin(), b, d * yaw.cos() - a * yaw.sin()

    origin = turn(x, y, torch.full_like(x, -4.0))  # of an orthographic ray through every pixel
    direction = turn(torch.zeros_like(yaw), torch.zeros_like(yaw), torch.ones_like(yaw))
    # The shadow: the floor's plane, where the ray meets it, darkened around the block's foot, away from the light.
    reach = (half - origin[1]) / direction[1]
    floor = [o + reach * d for o, d in zip(origin, direction)]
    shift = c.choice(-1.0, 1.0)
    foot = torch.maximum((floor[0] - 0.35 * half * shift).abs(), (floor[2] + 0.25 * half).abs()) / half
    c.darken(0.5 * smooth(1.55, 0.8, foot))
    enter = [torch.minimum((-half - o) / d, (half - o) / d) for o, d in zip(origin, direction)]
    leave = [torch.maximum((-half - o) / d, (half - o) / d) for o, d in zip(origin, direction)]
    near = overlap(*enter)
    thickness = reduce(torch.minimum, leave) - near
    right, down, deep = ((o + near * d) / half for o, d in zip(origin, direction))
    hue, step = c.rand(0, 1), c.choice(0.0, 0.12, 0.33, 0.5)
    for face, (u, v, light) in enumerate(((deep, down, 0.74), (right, deep, 1.1), (right, down, 0.92))):
        border = torch.maximum(u.abs(), v.abs())
        disc, diamond, square = (u * u + v * v).sqrt() - 0.52, (u.abs() + v.abs()) * 0.8 - 0.55, border - 0.48
        ring = (disc + 0.05).abs() - 0.16
        kind = c.randint(0, 3)
        mark = torch.where(kind == 0, disc, torch.where(kind == 1, diamond, torch.where(kind == 2, square, ring)))
        colour = hsv(hue + step * face, c.rand(0.6, 0.85), c.rand(0.8, 0.95))
        colour = mix(colour, hsv(hue + step * face + 0.08, 0.14, 0.98), inside(mark, 0.03) * 0.95)
        tone = light + 0.16 * smooth(0.8, 1.0, border) - 0.1 * (v + u * shift) + 0.02 * c.noise(10, 10, 2)
        c.paint(shade(colour, tone), (enter[face] >= near).float() * inside(-thickness, 0.012))


def draw_sea(c: Canvas) -> None:
    """A sailing boat before the setting sun."""
    horizon, warm, high = c.rand(-0.02, 0.2), c.rand(-0.06, 0.07), c.rand(0.55, 0.92)
    low = hsv(warm, c.rand(0.45, 0.75), c.rand(0.95, 1.0))
    c.paint(mix(hsv(high, c.rand(0.4, 0.65), c.rand(0.35, 0.75)), low, smooth(-1.1, 0.15, c.y - horizon)))
    cloud = smooth(0.2, 1.6, c.noise(7, 2, 4)) * smooth(0.0, -0.35, c.y - horizon)
    c.paint(torch.lerp(low, c.white, 0.45), 0.75 * cloud)
    sun_x, size = c.rand(-0.5, 0.5), c.rand(0.2, 0.32)
    sun = length(c.x - sun_x, c.y - (horizon - c.rand(-0.02, 0.3))) - size
    c.paint(hsv(warm + 0.07, 0.35, 1.0), 0.7 * torch.exp(-3.5 * sun.clamp(min=0)))
    c.paint(hsv(warm + 0.1, c.rand(0.15, 0.45), 1.0), inside(sun, 0.012))
    depth = (c.y - horizon).clamp(min=0)
    water = hsv(high + c.rand(-0.08, 0.02), c.rand(0.5, 0.75), c.rand(0.25, 0.42))
    sea = mix(torch.lerp(low, water, 0.45), water, smooth(0, 0.6, depth))
    ripple = torch.sin(17 * torch.log(depth + 0.14) + 1.3 * c.noise(8, 2, 3))
    glitter = torch.exp(-(((c.x - sun_x) / (0.5 * size + 0.22 * depth)) ** 2)) * smooth(-0.55, 0.5, ripple)
    c.paint(mix(shade(sea, 1 + 0.16 * ripple), hsv(warm + 0.08, 0.3, 1.0), 0.85 * glitter), inside(horizon - c.y))
    # The boat, in units of its own size: its dark image in the water, hull, mast and two sails.
    unit, side = c.rand(0.3, 0.42), c.choice(-1.0, 1.0)
    x, y = (c.x - c.rand(-0.4, 0.4)) / unit * side, (c.y - horizon - c.rand(0.22, 0.42)) / unit
    c.paint(water * 0.55, 0.6 * inside(y.clamp(min=0) * 0.8 + x.abs() - 0.75 + 0.08 * ripple, 0.12) * inside(-y, 0.05))
    hull = overlap(y - 0.1, -0.2 - y, x.abs() - 0.72 + 0.35 * (y + 0.2))
    mast = overlap((x - 0.005).abs() - 0.035, (y + 1.1).abs() - 0.9)
    main = overlap(y + 0.3, 0.05 - x, x * 1.05 - 0.8 * (y + 1.95) * 0.5)
    jib = overlap(y + 0.3, x + 0.04, -x * 1.3 - 0.62 * (y + 1.7) * 0.62)
    c.paint(hsv(c.rand(0, 1), c.rand(0.5, 0.9), c.rand(0.25, 0.6)), inside(hull * unit))
    c.paint(hsv(c.rand(0, 0.2), c.rand(0.5, 0.8), c.rand(0.3, 0.4)), inside(mast * unit))
    sail = hsv(c.rand(0, 1), c.choice(0.04, 0.06, 0.5), c.rand(0.92, 1.0))
    c.paint(shade(sail, 1.0 - 0.28 * (x - 0.05)), inside(main * unit * 0.8))
    c.paint(shade(sail, 0.82 - 0.2 * x), inside(jib * unit * 0.7))


def draw_balloon(c: Canvas) -> None:
    """A striped hot-air balloon among clouds."""
    hue = c.rand(0.5, 0.62)
    top = hsv(hue, c.rand(0.55, 0.8), c.rand(0.7, 0.95))
    bottom = hsv(hue - c.rand(0, 0.06), c.rand(0.1, 0.3), c.rand(0.93, 1.0))
    c.paint(mix(top, bottom, ((c.y + 1.0) / 2.0).clamp(0, 1)))
    cloud = c.noise(3, 2, 4) + 0.9 * c.y
    c.paint(shade(torch.full_like(c.image, 0.98), 1 - 0.12 * smooth(0.6, 2.2, cloud)), 0.9 * smooth(0.2, 1.0, cloud))
    radius = c.rand(0.42, 0.56)
    x, y = (c.x - c.rand(-0.25, 0.25)) / radius, (c.y - c.rand(-0.33, -0.18)) / radius
    lower = y.clamp(0, 1.3)
    width = torch.where(y < 0, sphere(y, torch.zeros_like(y)), (lower * 1.02).cos().clamp(min=0) ** 0.8 + 0.02 * lower)
    across = (x / width.clamp(min=1e-3)).clamp(-1, 1)
    longitude = torch.asin(across * 0.999)
    stripes = torch.sin(longitude * c.randint(3, 6) + c.choice(0.0, math.pi / 2))
    tint, other = c.rand(0, 1), c.rand(0.25, 0.75)
    first = hsv(tint, c.rand(0.75, 0.95), c.rand(0.8, 0.95))
    second = hsv(tint + other, c.choice(0.05, 0.55, 0.8), c.rand(0.92, 1.0))
    third = hsv(tint + c.rand(-0.15, 0.15), c.rand(0.6, 0.9), c.rand(0.45, 0.7))
    band = (y - c.rand(-0.1, 0.5) - 0.12 * longitude.cos()).abs() - c.rand(0.0, 0.22)
    colour = mix(mix(first, second, smooth(-0.12, 0.12, stripes)), third, smooth(0.03, -0.03, band))
    side = c.choice(-1.0, 1.0)
    light = 0.5 + 0.5 * longitude.cos() + 0.24 * side * across - 0.16 * y
    basket = y - 1.62
    ropes = inside(((x.abs() - 0.24 + 0.12 * (y - 1.26) / 0.3).abs() - 0.02) * radius)
    ropes = ropes * inside((1.2 - y) * radius) * inside(basket * radius)
    c.paint(torch.full_like(c.image, 0.25), 0.9 * ropes)
    c.paint(shade(colour, light), inside(overlap(x.abs() - width, y - 1.26, -1 - y) * radius * 0.8))
    box = overlap(x.abs() - 0.19 + 0.1 * basket, basket.abs() - 0.15)
    brim = overlap(x.abs() - 0.22, (basket + 0.15).abs() - 0.04)
    wicker = hsv(c.rand(0.06, 0.1), c.rand(0.55, 0.75), c.rand(0.5, 0.68))
    c.paint(shade(wicker, 0.9 + 0.12 * torch.sin(y * 55) * torch.sin(x * 40) + 0.9 * side * x), inside(box * radius))
    c.paint(hsv(torch.full_like(hue, 0.07), 0.6, 0.33), inside(brim * radius))


def draw_mushroom(c: Canvas) -> None:
    """A spotted toadstool on mossy ground."""
    green, blur = c.rand(0.24, 0.4), c.noise(3, 3, 2)
    saturation, value = c.rand(0.35, 0.6), (c.rand(0.2, 0.5) + 0.09 * blur - 0.2 * c.y).clamp(0.03, 1)
    c.paint(hsv(green + 0.04 * blur, saturation, value))
    ground = c.rand(0.5, 0.68) + 0.05 * c.noise(1, 3, 3)[:, :1]
    moss = hsv(green - c.rand(0.0, 0.08), c.rand(0.55, 0.75), c.rand(0.3, 0.45))
    c.paint(shade(moss, 1.15 - 0.9 * (c.y - ground) + 0.14 * c.noise(9, 12, 2)), inside(ground - c.y, 0.02))
    cx, unit, lean, cap_y = c.rand(-0.15, 0.15), c.rand(0.58, 0.74), c.rand(-0.12, 0.12), c.rand(-0.12, 0.06)
    x, foot = c.x - cx - lean * (c.y - cap_y), 0.78
    t = ((c.y - cap_y) / (foot - cap_y)).clamp(0, 1)
    thick = c.rand(0.13, 0.19) + 0.07 * t**2
    c.darken(0.5 * smooth(1.3, 0.2, length(x / 0.42, (c.y - foot) / 0.1)))
    side = c.choice(-1.0, 1.0)
    stem = overlap(x.abs() - thick, c.y - foot - 0.05 * (1 - (x / 0.25) ** 2), cap_y - c.y)
    cream = hsv(c.rand(0.08, 0.15), c.rand(0.06, 0.2), c.rand(0.9, 0.98))
    light = 0.84 + 0.3 * side * x / thick - 0.35 * smooth(0.3, 0.0, t) + 0.02 * c.noise(3, 24, 2)
    c.paint(shade(cream, light), inside(stem))
    # The cap: the upper half of an ellipsoid over a flatter, pale underside.
    px, py, height = (c.x - cx) / unit, (c.y - cap_y) / unit, c.rand(0.75, 1.05)
    rays = torch.sin(torch.atan2(py * 5, px) * 24)
    under = (length(px, py / 0.2) - 1) * unit * 0.3
    c.paint(shade(cream, 0.62 + 0.1 * rays + 0.8 * py.clamp(min=0)), inside(under, 0.008))
    brim = 0.12 * (1 - px**2).clamp(min=0).sqrt()  # the rim's front edge hangs lower than its ends
    dome = torch.maximum(length(px, py.clamp(max=0) / height) - 1, (py - brim) * 0.9)
    qy = (py - brim) / (height + brim)  # -1 at the top, 0 at the rim
    nz = sphere(px, qy)
    gloss = smooth(0.93, 0.99, 0.3 * side * px - 0.62 * qy + 0.72 * nz)
    light = 0.42 + 0.62 * (0.42 * side * px - 0.55 * qy + 0.55 * nz).clamp(min=0) + 0.45 * gloss
    hue = c.choice(0.0, 0.98, 0.03, 0.07, 0.8, 0.6) + c.rand(-0.02, 0.02)
    colour = shade(hsv(hue, c.rand(0.75, 0.92), c.rand(0.75, 0.92)), light + 0.03 * c.noise(8, 8, 2))
    spot = torch.full_like(px, 9.0)
    columns, rows = (0, -55, 55, -28, 28, -75, 80, -20, 30), (-50, -42, -42, -20, -16, -12, -10, -82, -80)
    for column, row in zip(columns, rows):
        sx, sy, size = column / 100 + c.rand(-0.08, 0.08), row / 100 + c.rand(-0.06, 0.06), c.rand(0.08, 0.17)
        flat = (1 - sx**2 - sy**2).clamp(min=0.12).sqrt()  # spots at the brim are seen from the side
        spot = torch.minimum(spot, (((px - sx) / (0.45 + 0.55 * flat)) ** 2 + (qy - sy) ** 2 * 1.1).sqrt() - size)
    c.paint(mix(colour, shade(cream, 0.45 + 0.62 * light), inside(spot, 0.02)), inside(dome * unit * 0.7))


DRAW = (draw_planet, draw_mountains, draw_flower, draw_ball, draw_block, draw_sea, draw_balloon, draw_mushroom)


def render(label: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` pictures of class `label` (0–7), on the generator's device: (count, 3, SIZE, SIZE) float32 in (-1, 1)."""
    canvas = Canvas(count, generator)
    DRAW[label](canvas)
    return F.avg_pool2d(canvas.image.clamp(0, 1), FINE // SIZE) * 2 - 1


def render_all(per_class: int, generator: torch.Generator, chunk: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_class` pictures of each class, uint8 (8·per_class, 3, SIZE, SIZE), and their labels (8·per_class,)."""
    counts = [min(chunk, per_class - start) for start in range(0, per_class, chunk)]
    drawn = (render(label, count, generator) for label in range(len(CLASSES)) for count in counts)
    pictures = [part.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8) for part in drawn]
    return torch.cat(pictures), torch.arange(len(CLASSES), device=generator.device).repeat_interleave(per_class)


def from_bytes(pictures: torch.Tensor) -> torch.Tensor:
    return pictures.float().div(127.5).sub(1)


def main() -> None:
    from torchvision.utils import save_image

    parser = argparse.ArgumentParser(description="Draw a sheet of the demo's training pictures, one class a row.")
    parser.add_argument("--output", type=Path, default=Path("output/pictures.png"), help="PNG (default: %(default)s)")
    args = parser.parse_args()
    pictures, _ = render_all(8, torch.Generator().manual_seed(0))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    save_image(from_bytes(pictures), args.output, nrow=8, normalize=True, value_range=(-1, 1))
    print(args.output)


if __name__ == "__main__":
    main()

"""The demo's data: eight classes of pictures, drawn from random parameters by arithmetic on tensors, in batches, on any device.

    python scripts/demo_pictures.py --output pictures.png     # eight of each class

Every picture follows from the seed (and the device whose generator draws); colours, places, sizes, light and texture all vary.
"""

import argparse
import math

import torch
import torch.nn.functional as F

CLASSES = ("planet", "mountains", "flower", "ball", "block", "sea", "balloon", "mushroom")
SIZE = 128  # pixels
FINE = 2 * SIZE  # pictures are drawn at twice the size, then averaged down


class Canvas:
    """A batch of pictures being drawn: B pictures of one class, all with their own random parameters.

    Coordinates: x to the right, y down, both from -1 to 1. A scalar parameter is (B, 1, 1), a map (B, FINE, FINE), a colour
    (B, 3, 1, 1) or (B, 3, FINE, FINE), in 0–1.
    """

    def __init__(self, count, generator):
        self.count, self.generator, self.device = count, generator, generator.device
        axis = (torch.arange(FINE, device=self.device) + 0.5) / FINE * 2 - 1
        self.x, self.y = axis.view(1, 1, -1).expand(count, FINE, FINE), axis.view(1, -1, 1).expand(count, FINE, FINE)
        self.image = torch.zeros(count, 3, FINE, FINE, device=self.device)

    def uniform(self, low, high):
        return low + (high - low) * torch.rand(self.count, 1, 1, generator=self.generator, device=self.device)

    def integer(self, low, high):
        """Whole numbers low … high."""
        return torch.randint(low, high + 1, (self.count, 1, 1), generator=self.generator, device=self.device).float()

    def choice(self, *values):
        return torch.tensor(values, device=self.device)[self.integer(0, len(values) - 1).long()]

    def noise(self, rows, columns, octaves=4):
        """Smooth noise, about unit variance: random lattices of growing fineness, halving in amplitude. (B, FINE, FINE)"""
        total = 0
        for octave in range(octaves):
            shape = (self.count, 1, rows * 2**octave + 2, columns * 2**octave + 2)
            lattice = torch.randn(shape, generator=self.generator, device=self.device)
            total = total + F.interpolate(lattice, (FINE, FINE), mode="bicubic")[:, 0] / 2**octave
        return total * 1.1

    def paint(self, colour, coverage=None):
        """Lay a colour over the picture, where `coverage` (B, FINE, FINE), 0–1, lets it through."""
        self.image = (
            colour.expand_as(self.image) if coverage is None else torch.lerp(self.image, colour, coverage.unsqueeze(1))
        )

    def gradient(self, top, bottom, start=-1.0, end=1.0):
        """Colours blended from `top` at y = start to `bottom` at y = end."""
        return torch.lerp(top, bottom, ((self.y - start) / (end - start)).clamp(0, 1).unsqueeze(1))


def hsv(hue, saturation, value):
    """Colour from hue (any real, period 1), saturation and value: (B, …) each → (B, 3, …)."""
    channels = []
    for offset in (5, 3, 1):
        k = (offset + hue * 6) % 6
        channels.append(value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(torch.broadcast_tensors(*channels), 1)


def inside(distance, softness=2 / FINE):
    """Coverage, 0–1, of a shape given by its signed distance (negative inside), its edge blurred over `softness`."""
    return (0.5 - distance / (2 * softness)).clamp(0, 1)


def smooth(low, high, value):
    """0 below `low`, 1 above `high`, a smooth cubic between."""
    t = ((value - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def rotate(x, y, angle):
    return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()


def shade(colour, light):
    """A colour under light of strength `light` (B, FINE, FINE), 1 being neutral; beyond 1 it goes towards white."""
    light = light.unsqueeze(1)
    return torch.where(light < 1, colour * light, colour + (1 - colour) * (light - 1).clamp(0, 1))


def sphere(x, y):
    """Height z of the unit sphere's surface over (x, y), 0 outside."""
    return (1 - x * x - y * y).clamp(min=0).sqrt()


def draw_planet(c):
    """A banded planet with a ring, among stars."""
    hue = c.uniform(0, 1)
    c.paint(hsv(c.uniform(0.58, 0.82), c.uniform(0.5, 0.8), 0.13 + 0.09 * c.noise(2, 2).clamp(-1.2, 2)))
    stars = torch.rand(c.count, 1, 64, 64, generator=c.generator, device=c.device)
    stars = F.interpolate(((stars - 0.985) / 0.015).clamp(0, 1), (FINE, FINE), mode="bicubic")[:, 0]
    c.image = (c.image + stars.clamp(0, 1).unsqueeze(1)).clamp(0, 1)

    radius, tilt, squash = c.uniform(0.36, 0.5), c.uniform(-0.6, 0.6), c.uniform(0.18, 0.42)
    x, y = c.x - c.uniform(-0.12, 0.12), c.y - c.uniform(-0.12, 0.12)
    nx, ny = x / radius, y / radius
    nz = sphere(nx, ny)
    across, along = rotate(nx, ny, tilt)  # along: latitude
    ring = (across**2 + (along / squash) ** 2).sqrt()
    ring_cover = (
        smooth(1.25, 1.32, ring) * (1 - smooth(1.82, 1.9, ring)) * (0.72 + 0.28 * torch.sin(ring * c.uniform(14, 24)))
    )
    ring_colour = hsv(
        hue + c.uniform(-0.1, 0.15), c.uniform(0.2, 0.45), 0.75 + 0.2 * torch.cos(ring * c.uniform(9, 15))
    )

    side = c.choice(-1.0, 1.0)
    light = (0.62 * side * nx - 0.45 * ny + 0.64 * nz).clamp(min=0)
    latitude = along - squash * nz  # the ring's plane is seen from above: so are the bands
    wave = torch.sin(latitude * c.uniform(5, 11) + 0.45 * c.noise(5, 3) + c.uniform(0, 6))
    fine = torch.sin(latitude * c.uniform(16, 26) + 0.5 * c.noise(6, 3))
    surface = hsv(
        hue + 0.07 * wave + 0.02 * fine,
        (c.uniform(0.45, 0.75) - 0.18 * wave).clamp(0, 1),
        0.82 + 0.14 * wave + 0.05 * fine,
    )
    rim = (1 - nz) ** 3 * light
    c.paint(
        hsv(hue, c.uniform(0.4, 0.7), torch.ones_like(hue)),
        0.32
        * torch.exp(-8 * ((nx**2 + ny**2).sqrt() - 1).clamp(min=0))
        * (0.35 + 0.65 * smooth(-1, 1, side * nx - ny)),
    )
    c.paint(ring_colour, ring_cover)
    c.paint(shade(surface, 0.07 + 1.1 * light + 0.6 * rim), inside((nx**2 + ny**2).sqrt() * radius - radius))
    c.paint(ring_colour, ring_cover * inside(-along, 0.01))


def draw_mountains(c):
    """Mountain ranges in the haze, one behind the other, under a low sun."""
    sky = c.uniform(0.5, 0.85)  # from turquoise to violet
    warm = c.uniform(0.02, 0.15)
    low = hsv(warm, c.uniform(0.2, 0.5), c.uniform(0.95, 1.0))
    c.paint(c.gradient(hsv(sky, c.uniform(0.4, 0.7), c.uniform(0.55, 0.9)), low, -1.0, 0.25))
    sun_x, sun_y, size = c.uniform(-0.65, 0.65), c.uniform(-0.65, -0.3), c.uniform(0.13, 0.22)
    away = ((c.x - sun_x) ** 2 + (c.y - sun_y) ** 2).sqrt()
    c.paint(torch.ones_like(low), 0.65 * torch.exp(-3.2 * (away - size).clamp(min=0)))
    c.paint(hsv(warm + 0.06, c.uniform(0.1, 0.35), torch.ones_like(sky)), inside(away - size, 0.012))
    far = torch.lerp(low, hsv(sky, torch.full_like(sky, 0.5), torch.full_like(sky, 0.75)), 0.65)
    near = hsv(c.uniform(0.3, 0.8), c.uniform(0.45, 0.75), c.uniform(0.1, 0.22))
    sun_side = torch.where(sun_x < 0, 1.0, -1.0)
    snow = c.uniform(-0.7, 0.0)
    for layer in range(4):
        line = torch.randn(c.count, 1, 5 + 2 * layer, generator=c.generator, device=c.device)
        peaks = F.interpolate(line, FINE, mode="linear", align_corners=True)[:, 0]  # (B, FINE): straight slopes
        crags = c.noise(1, 8, 3)[:, :1] * 0.09
        height = -0.22 + 0.33 * layer - peaks.unsqueeze(1) * (0.24 - 0.035 * layer) + crags * (1 - 0.12 * layer)
        depth = c.y - height
        colour = torch.lerp(far, near, (layer + 0.35) / 3.5)
        slope = (height - height.roll(12, 2)) / (24 / FINE)  # the flanks towards the sun are lit
        relief = (0.17 * (slope * sun_side).clamp(-1.2, 1.2) + 0.05 * c.noise(4, 8, 3)) * smooth(0.5, 0.1, depth)
        foot = torch.lerp(shade(colour, 1.0 + relief), far, (0.45 * smooth(0.02, 0.7, depth)).unsqueeze(1))
        c.paint(foot, inside(-depth))
        if layer < 2:
            line = c.y + 0.05 * c.noise(2, 14, 3) - snow + 0.25 * depth
            cap = inside(line, 0.02) * inside(-depth)
            c.paint(torch.lerp(far, torch.ones_like(far), 0.75), 0.9 * cap)


def draw_flower(c):
    """A flower with two wreaths of petals on a stem, before blurred green."""
    green = c.uniform(0.2, 0.44)
    blur = c.noise(2, 2, 2)
    c.paint(
        hsv(green + 0.05 * blur, c.uniform(0.4, 0.7), (c.uniform(0.38, 0.62) + 0.13 * blur - 0.1 * c.y).clamp(0.05, 1))
    )
    cx, cy, size = c.uniform(-0.15, 0.15), c.uniform(-0.28, -0.02), c.uniform(0.56, 0.74)
    bend = c.uniform(-0.25, 0.25)
    stem_x = c.x - cx - bend * (c.y - cy) ** 2
    stem = inside(stem_x.abs() - 0.045) * inside(cy - c.y)
    c.paint(shade(hsv(green - 0.02, c.uniform(0.6, 0.8), c.uniform(0.35, 0.5)), 1 - 7 * stem_x), stem)
    leaf_side = c.choice(-1.0, 1.0)
    lx, ly = rotate(leaf_side * (c.x - cx) - 0.3, c.y - 0.72, c.uniform(-0.7, -0.3))
    leaf = (ly.abs() - 0.15 * (1 - (lx / 0.36) ** 2).clamp(min=0)) + 0.3 * (lx.abs() - 0.36).clamp(min=0)
    c.paint(
        shade(
            hsv(green, c.uniform(0.6, 0.8), c.uniform(0.4, 0.55)), 1 - 1.6 * ly + 0.25 * inside(ly.abs() - 0.008, 0.01)
        ),
        inside(leaf),
    )

    x, y = (c.x - cx) / size, (c.y - cy) / size * c.uniform(1.0, 1.15)
    away, angle = (x * x + y * y + 1e-6).sqrt(), torch.atan2(y, x)
    hue, second, petals, turn = (
        c.choice(0.92, 0.98, 0.05, 0.11, 0.15, 0.6, 0.72, 0.8, 0.86) + c.uniform(-0.03, 0.03),
        c.uniform(-0.1, 0.1),
        c.integer(5, 9),
        c.uniform(0, 6.3),
    )
    pointed, pale = c.uniform(0.5, 1.3), c.uniform(0.25, 0.9)
    for wreath in (0, 1):
        phase = (angle + turn) * petals / 2 + wreath * math.pi / 2
        across = torch.sin(phase)  # 0 along a petal's middle
        reach = (1.0 - 0.13 * wreath) * (0.38 + 0.62 * (phase.cos().abs() + 1e-4) ** pointed)
        t = away / reach
        vein = 0.05 * torch.cos(across * 14) * smooth(0.3, 0.6, t)
        colour = hsv(
            hue + second * (1 - t.clamp(0, 1)),
            (pale * (0.55 + 0.6 * t.clamp(0, 1)) + vein).clamp(0, 1),
            torch.full_like(t, 0.96),
        )
        light = 0.70 + 0.18 * wreath + 0.34 * smooth(0.15, 0.9, t) - 0.22 * across**2 - vein
        edge = inside((away - reach) * size * 0.7)
        if wreath == 1:
            c.paint(torch.zeros_like(colour), 0.3 * smooth(1.25, 0.95, t) * inside(away - 0.8, 0.1))
        c.paint(shade(colour, light.clamp(max=1.25)), edge)
    heart = c.uniform(0.2, 0.3)
    seeds = torch.sin(angle * 8 + away * 40) * torch.sin(angle * 8 - away * 40)
    bulge = sphere(x / heart, y / heart)
    c.paint(torch.zeros_like(c.image), 0.35 * smooth(heart * 1.35, heart, away))
    c.paint(
        shade(
            hsv(c.choice(0.13, 0.1, 0.16, 0.06), c.uniform(0.7, 0.9), c.choice(0.95, 0.9, 0.6)),
            0.5 + 0.6 * bulge + 0.16 * seeds - 0.25 * y / heart,
        ),
        inside((away - heart) * size),
    )


def _room(c, horizon):
    """Wall and floor in soft light; returns the floor's colour."""
    hue = c.uniform(0, 1)
    wall, floor = (
        hsv(hue, c.uniform(0.25, 0.55), c.uniform(0.75, 0.97)),
        hsv(hue + c.uniform(0.3, 0.7), c.uniform(0.15, 0.45), c.uniform(0.65, 0.92)),
    )
    glow = torch.exp(-1.6 * ((c.x - c.uniform(-0.6, 0.6)) ** 2 + (c.y + 0.5) ** 2))
    c.paint(shade(wall, 0.68 + 0.42 * glow))
    c.paint(shade(floor, 0.72 + 0.35 * (c.y - horizon) + 0.03 * c.noise(12, 3, 3)), inside(horizon - c.y, 0.015))
    return floor


def draw_ball(c):
    """A beach ball on the floor."""
    horizon, radius = c.uniform(0.05, 0.35), c.uniform(0.44, 0.62)
    _room(c, horizon)
    cx, cy = c.uniform(-0.25, 0.25), 0.8 - radius + c.uniform(-0.08, 0.08)
    side = c.choice(-1.0, 1.0)
    shadow = (
        ((c.x - cx + 0.25 * side * radius) / radius / 1.05) ** 2 + ((c.y - cy - 0.93 * radius) / radius / 0.24) ** 2
    ).sqrt()
    c.paint(torch.zeros_like(c.image), 0.5 * smooth(1.25, 0.2, shadow))
    nx, ny = (c.x - cx) / radius, (c.y - cy) / radius
    nz = sphere(nx, ny)
    px, py = rotate(nx, ny, c.uniform(0, 6.3))
    py, pz = rotate(py, nz, c.uniform(0.3, 1.1))
    wedges = c.choice(6.0, 8.0)
    longitude = (torch.atan2(px, pz) / (2 * math.pi) + c.uniform(0, 1)) * wedges
    index = torch.floor(longitude % wedges)
    hue = c.uniform(0, 1)
    step = c.choice(0.0, 0.25, 0.34, 0.5)
    white = (index % 2 == 0).float()
    colour = hsv(hue + step * torch.floor(index / 2), 0.84 - 0.8 * white, 0.9 + 0.07 * white)
    cap = smooth(0.965, 0.985, py.abs())
    colour = torch.lerp(colour, hsv(hue, torch.full_like(hue, 0.85), torch.full_like(hue, 0.85)), cap.unsqueeze(1))
    lx, ly, lz = 0.45 * side, -0.62, 0.64
    light = 0.35 + 0.75 * (lx * nx + ly * ny + lz * nz).clamp(min=0) + 0.12 * smooth(0.2, 1.0, ny) * (1 - nz)
    gloss = smooth(0.93, 0.995, 0.27 * side * nx - 0.37 * ny + 0.89 * nz)
    c.paint(shade(colour, light + 0.75 * gloss), inside((nx**2 + ny**2).sqrt() * radius - radius))


def draw_block(c):
    """A toy block, each face with its own colour and mark, seen from above."""
    _room(c, c.uniform(-0.25, 0.1))
    yaw, pitch, half = c.uniform(0.3, 1.27), c.uniform(0.45, 0.7), c.uniform(0.36, 0.46)
    cx, cy = c.uniform(-0.18, 0.18), c.uniform(0.0, 0.16)
    x, y = c.x - cx, c.y - cy
    # An orthographic ray through every pixel, turned into the block's frame (axes: right, down, into the picture).
    sin_p, cos_p, sin_y, cos_y = pitch.sin(), pitch.cos(), yaw.sin(), yaw.cos()

    def turn(a, b, d):
        b, d = b * cos_p + d * sin_p, d * cos_p - b * sin_p
        return a * cos_y + d * sin_y, b, d * cos_y - a * sin_y

    far = torch.full_like(x, -4.0)
    origin = turn(x, y, far)
    direction = turn(torch.zeros_like(yaw), torch.zeros_like(yaw), torch.ones_like(yaw))
    # The shadow: the floor's plane, where the ray meets it, darkened around the block's foot, away from the light.
    reach = (half - origin[1]) / direction[1]
    floor = [o + reach * d for o, d in zip(origin, direction)]
    shift = c.choice(-1.0, 1.0)
    foot = torch.maximum((floor[0] - 0.35 * half * shift).abs(), (floor[2] + 0.25 * half).abs()) / half
    c.paint(torch.zeros_like(c.image), 0.5 * smooth(1.55, 0.8, foot))
    enter = [torch.minimum((-half - o) / d, (half - o) / d) for o, d in zip(origin, direction)]
    leave = [torch.maximum((-half - o) / d, (half - o) / d) for o, d in zip(origin, direction)]
    near = torch.maximum(torch.maximum(*enter[:2]), enter[2])
    thickness = torch.minimum(torch.minimum(*leave[:2]), leave[2]) - near
    point = [(o + near * d) / half for o, d in zip(origin, direction)]
    hue, step = c.uniform(0, 1), c.choice(0.0, 0.12, 0.33, 0.5)
    for face, (u, v, light) in enumerate(((2, 1, 0.74), (0, 2, 1.1), (0, 1, 0.92))):
        u, v = point[u], point[v]
        border = torch.maximum(u.abs(), v.abs())
        disc, diamond, square = (u * u + v * v).sqrt() - 0.52, (u.abs() + v.abs()) * 0.8 - 0.55, border - 0.48
        ring = (disc + 0.05).abs() - 0.16
        kind = c.integer(0, 3)
        mark = torch.where(kind == 0, disc, torch.where(kind == 1, diamond, torch.where(kind == 2, square, ring)))
        face_hue = hue + step * face
        colour = hsv(face_hue, c.uniform(0.6, 0.85), c.uniform(0.8, 0.95))
        colour = torch.lerp(
            colour,
            hsv(face_hue + 0.08, torch.full_like(hue, 0.14), torch.full_like(hue, 0.98)),
            (inside(mark, 0.03) * 0.95).unsqueeze(1),
        )
        tone = light + 0.16 * smooth(0.8, 1.0, border) - 0.1 * (v + u * shift) + 0.02 * c.noise(10, 10, 2)
        hit = (enter[face] >= near).float() * inside(-thickness, 0.012)
        c.paint(shade(colour, tone), hit)


def draw_sea(c):
    """A sailing boat before the setting sun."""
    horizon = c.uniform(-0.02, 0.2)
    warm, high = c.uniform(-0.06, 0.07), c.uniform(0.55, 0.92)
    low, top = (
        hsv(warm, c.uniform(0.45, 0.75), c.uniform(0.95, 1.0)),
        hsv(high, c.uniform(0.4, 0.65), c.uniform(0.35, 0.75)),
    )
    c.paint(torch.lerp(top, low, smooth(-1.1, 0.15, c.y - horizon).unsqueeze(1)))
    cloud = smooth(0.2, 1.6, c.noise(7, 2, 4)) * smooth(0.0, -0.35, c.y - horizon)
    c.paint(torch.lerp(low, torch.ones_like(low), 0.45), 0.75 * cloud)
    sun_x, size = c.uniform(-0.5, 0.5), c.uniform(0.2, 0.32)
    sun_y = horizon - c.uniform(-0.02, 0.3)
    away = ((c.x - sun_x) ** 2 + (c.y - sun_y) ** 2).sqrt()
    c.paint(
        hsv(warm + 0.07, torch.full_like(warm, 0.35), torch.ones_like(warm)),
        0.7 * torch.exp(-3.5 * (away - size).clamp(min=0)),
    )
    c.paint(hsv(warm + 0.1, c.uniform(0.15, 0.45), torch.ones_like(warm)), inside(away - size, 0.012))
    depth = (c.y - horizon).clamp(min=0)
    water = hsv(high + c.uniform(-0.08, 0.02), c.uniform(0.5, 0.75), c.uniform(0.25, 0.42))
    sea = torch.lerp(torch.lerp(low, water, 0.45), water, smooth(0, 0.6, depth).unsqueeze(1))
    ripple = torch.sin(17 * torch.log(depth + 0.14) + 1.3 * c.noise(8, 2, 3))
    sea = shade(sea, 1 + 0.16 * ripple)
    glitter = torch.exp(-(((c.x - sun_x) / (0.5 * size + 0.22 * depth)) ** 2)) * smooth(-0.55, 0.5, ripple)
    sea = torch.lerp(
        sea, hsv(warm + 0.08, torch.full_like(warm, 0.3), torch.ones_like(warm)), (0.85 * glitter).unsqueeze(1)
    )
    c.paint(sea, inside(horizon - c.y))
    # The boat, in units of its own size: hull, mast, two sails, and its dark image in the water.
    unit, side = c.uniform(0.3, 0.42), c.choice(-1.0, 1.0)
    x, y = (c.x - c.uniform(-0.4, 0.4)) / unit * side, (c.y - horizon - c.uniform(0.22, 0.42)) / unit
    c.paint(water * 0.55, 0.6 * inside(y.clamp(min=0) * 0.8 + x.abs() - 0.75 + 0.08 * ripple, 0.12) * inside(-y, 0.05))
    hull = torch.maximum(torch.maximum(y - 0.1, -0.2 - y), x.abs() - 0.72 + 0.35 * (y + 0.2))
    main = torch.maximum(torch.maximum(y + 0.3, 0.05 - x), x * 1.05 - 0.8 * (y + 1.95) * 0.5)
    jib = torch.maximum(torch.maximum(y + 0.3, x + 0.04), -x * 1.3 - 0.62 * (y + 1.7) * 0.62)
    c.paint(hsv(c.uniform(0, 1), c.uniform(0.5, 0.9), c.uniform(0.25, 0.6)), inside(hull * unit))
    c.paint(
        hsv(c.uniform(0, 0.2), c.uniform(0.5, 0.8), c.uniform(0.3, 0.4)),
        inside((torch.maximum((x - 0.005).abs() - 0.035, (y + 1.1).abs() - 0.9)) * unit),
    )
    sail = hsv(c.uniform(0, 1), c.choice(0.04, 0.06, 0.5), c.uniform(0.92, 1.0))
    c.paint(shade(sail, 1.0 - 0.28 * (x - 0.05)), inside(main * unit * 0.8))
    c.paint(shade(sail, 0.82 - 0.2 * x), inside(jib * unit * 0.7))


def draw_balloon(c):
    """A striped hot-air balloon among clouds."""
    hue = c.uniform(0.5, 0.62)
    c.paint(
        c.gradient(
            hsv(hue, c.uniform(0.55, 0.8), c.uniform(0.7, 0.95)),
            hsv(hue - c.uniform(0, 0.06), c.uniform(0.1, 0.3), c.uniform(0.93, 1.0)),
        )
    )
    cloud = c.noise(3, 2, 4) + 0.9 * c.y
    c.paint(shade(torch.full_like(c.image, 0.98), 1 - 0.12 * smooth(0.6, 2.2, cloud)), 0.9 * smooth(0.2, 1.0, cloud))
    radius = c.uniform(0.42, 0.56)
    cx, cy = c.uniform(-0.25, 0.25), c.uniform(-0.33, -0.18)
    x, y = (c.x - cx) / radius, (c.y - cy) / radius
    lower = y.clamp(0, 1.3)
    width = torch.where(y < 0, sphere(y, torch.zeros_like(y)), (lower * 1.02).cos().clamp(min=0) ** 0.8 + 0.02 * lower)
    across = (x / width.clamp(min=1e-3)).clamp(-1, 1)
    longitude = torch.asin(across * 0.999)
    gores = c.integer(3, 6)
    wave = torch.sin(longitude * gores + c.choice(0.0, math.pi / 2))
    tint, other = c.uniform(0, 1), c.uniform(0.25, 0.75)
    first = hsv(tint, c.uniform(0.75, 0.95), c.uniform(0.8, 0.95))
    second = hsv(tint + other, c.choice(0.05, 0.55, 0.8), c.uniform(0.92, 1.0))
    third = hsv(tint + c.uniform(-0.15, 0.15), c.uniform(0.6, 0.9), c.uniform(0.45, 0.7))
    colour = torch.lerp(first, second, smooth(-0.12, 0.12, wave).unsqueeze(1))
    band_y, band = c.uniform(-0.1, 0.5), c.uniform(0.0, 0.22)
    colour = torch.lerp(
        colour, third, smooth(0.03, -0.03, (y - band_y - 0.12 * longitude.cos()).abs() - band).unsqueeze(1)
    )
    side = c.choice(-1.0, 1.0)
    light = 0.5 + 0.5 * longitude.cos() + 0.24 * side * across - 0.16 * y
    edge = torch.maximum(torch.maximum(x.abs() - width, y - 1.26), -1 - y)
    # Ropes and basket.
    basket_y = 1.62
    ropes = (
        inside(((x.abs() - 0.24 + 0.12 * (y - 1.26) / 0.3).abs() - 0.02) * radius)
        * inside((1.2 - y) * radius)
        * inside((y - basket_y) * radius)
    )
    c.paint(torch.full_like(c.image, 0.25), 0.9 * ropes)
    c.paint(shade(colour, light), inside(edge * radius * 0.8))
    box = torch.maximum(x.abs() - 0.19 + 0.1 * (y - basket_y), (y - basket_y).abs() - 0.15)
    weave = 0.12 * torch.sin(y * 55) * torch.sin(x * 40)
    c.paint(
        shade(hsv(c.uniform(0.06, 0.1), c.uniform(0.55, 0.75), c.uniform(0.5, 0.68)), 0.9 + weave + 0.9 * side * x),
        inside(box * radius),
    )
    c.paint(
        hsv(torch.full_like(cx, 0.07), torch.full_like(cx, 0.6), torch.full_like(cx, 0.33)),
        inside(torch.maximum(x.abs() - 0.22, (y - basket_y + 0.15).abs() - 0.04) * radius),
    )


def draw_mushroom(c):
    """A spotted toadstool on mossy ground."""
    green = c.uniform(0.24, 0.4)
    blur = c.noise(3, 3, 2)
    c.paint(
        hsv(green + 0.04 * blur, c.uniform(0.35, 0.6), (c.uniform(0.2, 0.5) + 0.09 * blur - 0.2 * c.y).clamp(0.03, 1))
    )
    ground = c.uniform(0.5, 0.68) + 0.05 * c.noise(1, 3, 3)[:, :1]
    moss = hsv(green - c.uniform(0.0, 0.08), c.uniform(0.55, 0.75), c.uniform(0.3, 0.45))
    c.paint(shade(moss, 1.15 - 0.9 * (c.y - ground) + 0.14 * c.noise(9, 12, 2)), inside(ground - c.y, 0.02))
    cx, unit, lean = c.uniform(-0.15, 0.15), c.uniform(0.58, 0.74), c.uniform(-0.12, 0.12)
    cap_y = c.uniform(-0.12, 0.06)
    foot = 0.78
    x = c.x - cx - lean * (c.y - cap_y)
    t = ((c.y - cap_y) / (foot - cap_y)).clamp(0, 1)
    thick = c.uniform(0.13, 0.19) + 0.07 * t**2
    c.paint(torch.zeros_like(c.image), 0.5 * smooth(1.3, 0.2, ((x / 0.42) ** 2 + ((c.y - foot) / 0.1) ** 2).sqrt()))
    side = c.choice(-1.0, 1.0)
    stem = torch.maximum(torch.maximum(x.abs() - thick, c.y - foot - 0.05 * (1 - (x / 0.25) ** 2)), cap_y - c.y)
    cream = hsv(c.uniform(0.08, 0.15), c.uniform(0.06, 0.2), c.uniform(0.9, 0.98))
    c.paint(
        shade(cream, 0.84 + 0.3 * side * x / thick - 0.35 * smooth(0.3, 0.0, t) + 0.02 * c.noise(3, 24, 2)),
        inside(stem),
    )
    # The cap: the upper half of an ellipsoid over a flatter, pale underside.
    height = c.uniform(0.75, 1.05)
    px, py = (c.x - cx) / unit, (c.y - cap_y) / unit
    under = (px**2 + (py / 0.2) ** 2).sqrt() - 1
    rays = torch.sin(torch.atan2(py * 5, px) * 24)
    c.paint(shade(cream, 0.62 + 0.1 * rays + 0.8 * py.clamp(min=0)), inside(under * unit * 0.3, 0.008))
    brim = 0.12 * (1 - px**2).clamp(min=0).sqrt()  # the rim's front edge hangs lower than its ends
    dome = torch.maximum((px**2 + (py.clamp(max=0) / height) ** 2).sqrt() - 1, (py - brim) * 0.9)
    qy = (py - brim) / (height + brim)  # -1 at the top, 0 at the rim
    nz = sphere(px, qy)
    light = (
        0.42
        + 0.62 * (0.42 * side * px - 0.55 * qy + 0.55 * nz).clamp(min=0)
        + 0.45 * smooth(0.93, 0.99, 0.3 * side * px - 0.62 * qy + 0.72 * nz)
    )
    hue = c.choice(0.0, 0.98, 0.03, 0.07, 0.8, 0.6) + c.uniform(-0.02, 0.02)
    colour = shade(hsv(hue, c.uniform(0.75, 0.92), c.uniform(0.75, 0.92)), light + 0.03 * c.noise(8, 8, 2))
    spot = torch.full_like(px, 9.0)
    for column, row in (
        (0, -0.5),
        (-0.55, -0.42),
        (0.55, -0.42),
        (-0.28, -0.2),
        (0.28, -0.16),
        (-0.75, -0.12),
        (0.8, -0.1),
        (-0.2, -0.82),
        (0.3, -0.8),
    ):
        sx, sy, size = column + c.uniform(-0.08, 0.08), row + c.uniform(-0.06, 0.06), c.uniform(0.08, 0.17)
        flat = (1 - sx**2 - sy**2).clamp(min=0.12).sqrt()  # spots at the brim are seen from the side
        spot = torch.minimum(spot, (((px - sx) / (0.45 + 0.55 * flat)) ** 2 + (qy - sy) ** 2 * 1.1).sqrt() - size)
    colour = torch.lerp(colour, shade(cream, 0.45 + 0.62 * light), inside(spot, 0.02).unsqueeze(1))
    c.paint(colour, inside(dome * unit * 0.7))


DRAW = (draw_planet, draw_mountains, draw_flower, draw_ball, draw_block, draw_sea, draw_balloon, draw_mushroom)


def render(label, count, generator):
    """`count` pictures of class `label` (0–7), drawn on the generator's device: (count, 3, SIZE, SIZE) float32 in (-1, 1)."""
    canvas = Canvas(count, generator)
    DRAW[label](canvas)
    return F.avg_pool2d(canvas.image.clamp(0, 1), FINE // SIZE) * 2 - 1


def render_all(per_class, generator, chunk=128):
    """`per_class` pictures of each class, as bytes: uint8 (8·per_class, 3, SIZE, SIZE), and their labels (8·per_class,)."""
    pictures = [
        to_bytes(render(label, min(chunk, per_class - start), generator))
        for label in range(len(CLASSES))
        for start in range(0, per_class, chunk)
    ]
    labels = torch.arange(len(CLASSES), device=generator.device).repeat_interleave(per_class)
    return torch.cat(pictures), labels


def to_bytes(pictures):
    return pictures.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


def from_bytes(pictures):
    return pictures.float().div(127.5).sub(1)


def main():
    from torchvision.utils import save_image

    parser = argparse.ArgumentParser(description="Draw a sheet of the demo's training pictures, one class a row.")
    parser.add_argument("--output", default="pictures.png", help="PNG to write (default: pictures.png)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures (default: 0)")
    args = parser.parse_args()
    pictures, _ = render_all(8, torch.Generator().manual_seed(args.seed))
    save_image(from_bytes(pictures), args.output, nrow=8, normalize=True, value_range=(-1, 1))
    print(args.output)


if __name__ == "__main__":
    main()

"""Tools to draw the demo's pictures: random parameters of a batch, coordinates, colours and shapes on tensors."""

from functools import reduce

import torch
import torch.nn.functional as F

SIZE = 128  # pixels
Map = torch.Tensor  # (B, S, S) a value a pixel, or (B, 3, S, S) a colour
FINE = 2 * SIZE  # pictures are drawn at twice the size, then averaged down


class Canvas:
    """B pictures of one class, all with their own random parameters.

    Coordinates: x to the right, y down, both from -1 to 1. A scalar parameter is (B, 1, 1), a map (B, FINE, FINE), a
    colour (B, 3, 1, 1) or (B, 3, FINE, FINE), in 0–1."""

    def __init__(self, count: int, generator: torch.Generator):
        self.count, self.source = count, dict(generator=generator, device=generator.device)
        axis = (torch.arange(FINE, device=generator.device) + 0.5) / FINE * 2 - 1
        self.x, self.y = axis.view(1, 1, -1).expand(count, FINE, FINE), axis.view(1, -1, 1).expand(count, FINE, FINE)
        self.image = torch.zeros(count, 3, FINE, FINE, device=generator.device)
        self.white = torch.ones(count, 3, 1, 1, device=generator.device)

    def rand(self, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(self.count, 1, 1, **self.source)

    def randint(self, low: int, high: int) -> torch.Tensor:
        """Draw whole numbers low … high."""
        return torch.randint(low, high + 1, (self.count, 1, 1), **self.source).float()

    def choice(self, *values: float) -> torch.Tensor:
        return torch.tensor(values, device=self.image.device)[self.randint(0, len(values) - 1).long()]

    def noise(self, rows: int, columns: int, octaves: int = 4) -> torch.Tensor:
        """Smooth noise, about unit variance: random lattices of growing fineness, halving in amplitude. A map."""
        total = 0
        for octave in range(octaves):
            lattice = torch.randn(self.count, 1, rows * 2**octave + 2, columns * 2**octave + 2, **self.source)
            total = total + F.interpolate(lattice, (FINE, FINE), mode="bicubic")[:, 0] / 2**octave
        return total * 1.1

    def paint(self, colour: torch.Tensor, coverage: torch.Tensor | None = None) -> None:
        """Lay a colour over the picture, where the map `coverage`, 0–1, lets it through."""
        self.image = colour.expand_as(self.image) if coverage is None else mix(self.image, colour, coverage)

    def darken(self, coverage: torch.Tensor) -> None:
        self.paint(torch.zeros_like(self.image), coverage)


def hsv(hue: Map, saturation: Map | float, value: Map | float) -> Map:
    """Colour from hue (any real, period 1), saturation and value, tensors or numbers: (B, …) each → (B, 3, …)."""
    saturation, value = (x if torch.is_tensor(x) else torch.full_like(hue, x) for x in (saturation, value))
    sectors = [(offset + hue * 6) % 6 for offset in (5, 3, 1)]
    channels = [value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1) for k in sectors]
    return torch.stack(torch.broadcast_tensors(*channels), 1)


def mix(first: Map, second: Map, weight: Map) -> Map:
    """Colours blended by the map `weight`, 0–1."""
    return torch.lerp(first, second, weight.unsqueeze(1))


def shade(colour: Map, light: Map) -> Map:
    """A colour under light of strength `light` (a map), 1 being neutral; beyond 1 it goes towards white."""
    light = light.unsqueeze(1)
    return torch.where(light < 1, colour * light, colour + (1 - colour) * (light - 1).clamp(0, 1))


def inside(distance: Map, softness: float = 2 / FINE) -> Map:
    """Coverage, 0–1, of a shape given by its signed distance (negative inside), its edge blurred over `softness`."""
    return (0.5 - distance / (2 * softness)).clamp(0, 1)


def overlap(*distances: Map) -> Map:
    """The signed distance of what shapes have in common, from theirs."""
    return reduce(torch.maximum, distances)


def smooth(low: float, high: float, value: Map) -> Map:
    """0 below `low`, 1 above `high`, a smooth cubic between."""
    t = ((value - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def length(x: Map, y: Map) -> Map:
    return (x**2 + y**2).sqrt()


def rotate(x: Map, y: Map, angle: Map) -> tuple[Map, Map]:
    return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()


def sphere(x: Map, y: Map) -> Map:
    """Height z of the unit sphere's surface over (x, y), 0 outside."""
    return (1 - x * x - y * y).clamp(min=0).sqrt()

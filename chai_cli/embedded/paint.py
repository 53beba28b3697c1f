"""Scenes of the procedural world as clips: signed distance shapes over analytic landscapes, antialiased, no files.

Everything is a function of the scene's seed. Arrays are float32 in 0..1; `x` and `y` are pixels from the top left.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chai_cli.embedded.world import FRAMES, HEIGHT, WIDTH, Scene, Thing, left_to_right

Array = np.ndarray
Rng = np.random.Generator

RGB = {
    "red": (0.88, 0.12, 0.13),
    "orange": (1.0, 0.52, 0.05),
    "yellow": (1.0, 0.90, 0.15),
    "green": (0.12, 0.72, 0.22),
    "blue": (0.13, 0.30, 0.95),
    "purple": (0.56, 0.16, 0.80),
    "pink": (1.0, 0.50, 0.76),
    "white": (0.98, 0.98, 0.98),
}
DARK_PLACES = ("city", "space")


def colour(*rgb: float) -> Array:
    return np.array(rgb, np.float32)


def mix(a: Array, b: Array, weight: Array) -> Array:
    """`a` where weight is 0, `b` where it is 1; the weight has no colour axis."""
    return a + (b - a) * weight[..., None]


def soft(edge: Array, width: float = 1.6) -> Array:
    """0 below the edge, 1 above, a ramp of `width` pixels between."""
    return np.clip(edge / width + 0.5, 0.0, 1.0)


def ridge(x: Array, rng: Rng, height: float, rough: float, waves: int = 3) -> Array:
    """A smooth skyline over x: `height` pixels from the top, plus sines of about `rough` pixels."""
    y = np.full_like(x, height)
    for _ in range(waves):
        length = rng.uniform(18, 70)
        y += rng.uniform(0.3, 1.0) * rough * np.sin(2 * np.pi * x / length + rng.uniform(0, 2 * np.pi))
    return y


def gradient(y: Array, top: Array, bottom: Array, span: float) -> Array:
    return mix(np.broadcast_to(top, (*y.shape, 3)), bottom, np.clip(y / span, 0, 1))


def blobs(x: Array, y: Array, rng: Rng, count: int, top: float, bottom: float, size: float, flat: float) -> Array:
    """The soft union of `count` ellipses that lie between two heights: clouds, bushes, nebulae."""
    cover = np.zeros_like(x)
    for _ in range(count):
        cx, cy = rng.uniform(-12, WIDTH + 12), rng.uniform(top, bottom)
        r = size * rng.uniform(0.6, 1.3)
        cover = np.maximum(cover, soft(r - np.hypot(x - cx, (y - cy) * flat), 5.0))
    return cover


def dots(x: Array, y: Array, rng: Rng, count: int, bottom: float, size: float, drift: Array | float = 0.0) -> Array:
    """`count` round specks above `bottom`, which wrap around as they drift downwards (stars, snow flakes)."""
    cover = np.zeros_like(x)
    for _ in range(count):
        cx, cy, r = rng.uniform(-4, WIDTH + 4), rng.uniform(0, bottom), size * rng.uniform(0.7, 1.4)
        dy = (y - (cy + drift) % bottom) if np.ndim(drift) else y - cy
        cover = np.maximum(cover, soft(r - np.hypot(x - cx, dy), 1.5))
    return cover


def snow(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    sky = gradient(y, colour(0.55, 0.68, 0.85), colour(0.82, 0.89, 0.96), rng.uniform(30, 45))
    far = soft(y - ridge(x * 0.6, rng, rng.uniform(26, 36), 3.5))
    near = soft(y - ridge(x, rng, rng.uniform(40, 52), 3.5))
    picture = mix(mix(sky, colour(0.80, 0.86, 0.94), far), colour(0.96, 0.97, 1.0), near)
    flakes = dots(x, y, rng, int(rng.integers(5, 10)), 64.0, 1.4, t * rng.uniform(10, 22))
    return mix(picture, colour(1, 1, 1), flakes * 0.85)


def desert(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    sky = gradient(y, colour(0.45, 0.72, 0.88), colour(0.93, 0.87, 0.68), rng.uniform(28, 40))
    sun = soft(rng.uniform(4, 7) - np.hypot(x - rng.uniform(4, 60), y - rng.uniform(5, 14)), 2.0)
    far = soft(y - ridge(x * 0.6, rng, rng.uniform(27, 36), 4.0, 2))
    crest = ridge(x, rng, rng.uniform(40, 50), 5.0, 2)
    near = soft(y - crest)
    picture = mix(mix(sky, colour(1.0, 0.95, 0.75), sun), colour(0.86, 0.66, 0.38), far)
    ripples = 0.03 * np.sin((y - crest) * rng.uniform(0.5, 0.8) + x * 0.1)
    return mix(picture, colour(0.93, 0.76, 0.47), near) + (ripples * near)[..., None]


def meadow(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    sky = gradient(y, colour(0.35, 0.62, 0.95), colour(0.75, 0.88, 0.98), rng.uniform(30, 42))
    clouds = blobs(x * 0.7 - t * rng.uniform(-8, 8), y, rng, int(rng.integers(2, 6)), 4, 18, 8, 2.2)
    far = soft(y - ridge(x * 0.6, rng, rng.uniform(30, 38), 3.5))
    near = soft(y - ridge(x, rng, rng.uniform(42, 52), 3.0))
    picture = mix(mix(sky, colour(0.97, 0.98, 1.0), clouds * 0.9), colour(0.38, 0.62, 0.26), far)
    picture = mix(picture, colour(0.50, 0.76, 0.30), near)
    flowers = dots(x, y - 46, rng, int(rng.integers(0, 9)), 16, 1.3) * (y > 46)
    return mix(picture, colour(*rng.uniform(0.7, 1.0, 3)), flowers * 0.8)


def ocean(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    horizon = rng.uniform(18, 28)
    picture = gradient(y, colour(0.50, 0.78, 0.95), colour(0.85, 0.93, 0.97), horizon)
    clouds = blobs(x * 0.6 - t * rng.uniform(-6, 6), y, rng, int(rng.integers(0, 4)), 3, horizon - 6, 6, 2.5)
    picture = mix(picture, colour(1, 1, 1), clouds * 0.8)
    speed = (1 if rng.random() < 0.5 else -1) * rng.uniform(8, 20)
    for depth, tone in enumerate(((0.10, 0.45, 0.70), (0.07, 0.37, 0.63), (0.04, 0.29, 0.54), (0.03, 0.22, 0.45))):
        crest = ridge(x + t * speed * (0.5 + 0.4 * depth), rng, horizon + 11 * depth, 0.4 + 0.9 * depth, 2)
        picture = mix(picture, colour(*tone), soft(y - crest))
    return picture


def city(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    picture = gradient(y, colour(0.04, 0.05, 0.16), colour(0.20, 0.17, 0.38), 50)
    moon = soft(rng.uniform(3, 5.5) - np.hypot(x - rng.uniform(4, 60), y - rng.uniform(6, 14)), 1.5)
    picture = mix(picture, colour(0.95, 0.93, 0.80), moon)
    left = -14.0
    while left < WIDTH + 14:
        wide, top = rng.uniform(10, 18), rng.uniform(22, 46)
        inside = soft(x - left) * soft(left + wide - x) * soft(y - top)
        picture = mix(picture, colour(0.09, 0.10, 0.20) * rng.uniform(0.7, 1.5), inside)
        pitch = rng.uniform(6.0, 7.5)
        column, row = (x - left - 1.5) / pitch, (y - top - 2.0) / pitch
        lit = np.sin(np.floor(column) * 12.9 + np.floor(row) * 78.2 + rng.uniform(0, 6)) > rng.uniform(-0.4, 0.5)
        pane = soft(pitch * 0.25 - np.abs((column % 1 - 0.5) * pitch), 1.2)
        pane *= soft(pitch * 0.3 - np.abs((row % 1 - 0.5) * pitch), 1.2)
        shown = pane * lit * (column > 0) * (column < np.floor((wide - 1.5) / pitch)) * (row > 0)
        picture = mix(picture, colour(0.98, 0.85, 0.42), shown * inside * 0.75)
        left += wide + rng.uniform(0.5, 3)
    return picture


def sunset(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    horizon = rng.uniform(40, 50)
    picture = gradient(y, colour(0.36, 0.16, 0.42), colour(0.98, 0.45, 0.22), horizon)
    sun = np.hypot(x - rng.uniform(6, 58), y - horizon + rng.uniform(2, 14))
    radius = rng.uniform(8, 12)
    picture = mix(picture, colour(1.0, 0.70, 0.30), 0.6 * np.exp(-((sun / (radius * 2.2)) ** 2)))
    picture = mix(picture, colour(1.0, 0.86, 0.45), soft(radius - sun, 1.5))
    bands = blobs(x * 0.6 - t * rng.uniform(-6, 6), y, rng, int(rng.integers(1, 5)), 6, 28, 8, 4.5)
    picture = mix(picture, colour(0.72, 0.28, 0.38), bands * 0.7)
    far = soft(y - ridge(x * 0.7, rng, horizon, 2.5, 2))
    near = soft(y - ridge(x, rng, horizon + rng.uniform(6, 10), 2.5, 2))
    return mix(mix(picture, colour(0.32, 0.12, 0.22), far), colour(0.16, 0.06, 0.13), near)


def forest(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    picture = gradient(y, colour(0.30, 0.47, 0.32), colour(0.55, 0.68, 0.42), 54)
    for depth, (bark, scale) in enumerate((((0.27, 0.30, 0.20), 0.6), ((0.30, 0.19, 0.11), 1.0))):
        for _ in range(int(rng.integers(3, 6))):
            centre, half = rng.uniform(-10, WIDTH + 10), (1.2 + 1.6 * depth) * rng.uniform(0.8, 1.4)
            lean = rng.uniform(-0.06, 0.06)
            trunk = soft(half - np.abs(x * scale + (1 - scale) * 32 - centre - lean * y))
            picture = mix(picture, colour(*bark) * rng.uniform(0.8, 1.2), trunk * soft(52 + 4 * depth - y))
    crowns = blobs(x * 0.9, y, rng, int(rng.integers(6, 10)), -3, 9, 10, 1.3)
    picture = mix(picture, colour(0.10, 0.33, 0.14) * rng.uniform(0.8, 1.25), crowns)
    ground = soft(y - ridge(x, rng, rng.uniform(50, 55), 1.8))
    return mix(picture, colour(0.20, 0.30, 0.12), ground)


def space(x: Array, y: Array, t: Array, rng: Rng) -> Array:
    picture = gradient(y, colour(0.03, 0.02, 0.09), colour(0.07, 0.04, 0.16), 64)
    cloud = blobs(x * 0.5, y, rng, int(rng.integers(1, 4)), 8, 56, 14, 1.4)
    picture = mix(picture, colour(*rng.uniform((0.15, 0.05, 0.25), (0.4, 0.2, 0.5))), cloud * 0.55)
    picture = mix(picture, colour(0.95, 0.95, 1.0), dots(x, y, rng, int(rng.integers(6, 14)), 64, 1.2))
    if rng.random() < 0.6:
        px, py, radius = rng.uniform(4, 60), rng.uniform(4, 60), rng.uniform(5, 9)
        planet = soft(radius - np.hypot(x - px, y - py), 1.2)
        shade = np.clip(0.55 + (x - px + py - y) / (3 * radius), 0.15, 1)
        picture = mix(picture, colour(*rng.uniform(0.35, 0.75, 3)) * shade[..., None], planet)
    return picture


PLACES: dict[str, Callable[[Array, Array, Array, Rng], Array]] = {
    "snow": snow,
    "desert": desert,
    "meadow": meadow,
    "ocean": ocean,
    "city": city,
    "sunset": sunset,
    "forest": forest,
    "space": space,
}


def box(x: Array, y: Array, half_x: float, half_y: float) -> Array:
    dx, dy = np.abs(x) - half_x, np.abs(y) - half_y
    return np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0)


def triangle(x: Array, y: Array) -> Array:
    slope = 3**0.5
    return np.maximum(y - 0.80, (np.abs(x) * slope - y) / 2 - 0.60)


def star(x: Array, y: Array) -> Array:
    """A five-pointed star: distance to the nearest edge line in the folded sector (inner radius 0.45, outer 1.12)."""
    angle = np.abs((np.arctan2(x, -y) + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    radius = np.hypot(x, y)
    u, v = radius * np.cos(angle), radius * np.sin(angle)
    tip, notch = np.array((1.12, 0.0)), 0.47 * np.array((np.cos(np.pi / 5), np.sin(np.pi / 5)))
    along = (notch - tip) / np.linalg.norm(notch - tip)
    return (u - tip[0]) * along[1] - (v - tip[1]) * along[0]


def heart(x: Array, y: Array) -> Array:
    """Two lobes and a square stood on its corner."""
    lobes = np.hypot(np.abs(x) - 0.45, y + 0.32) - 0.52
    corner = (np.abs(x) + np.abs(y - 0.05)) / 2**0.5 - 0.66
    return np.minimum(lobes, np.where(y > -0.4, corner, 9.0))


SOLIDS: dict[str, Callable[[Array, Array], Array]] = {
    "ball": lambda x, y: np.hypot(x, y) - 0.95,
    "square": lambda x, y: box(x, y, 0.80, 0.80),
    "triangle": triangle,
    "star": star,
    "heart": heart,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.72) - 0.28,
    "cross": lambda x, y: np.minimum(box(x, y, 0.96, 0.32), box(x, y, 0.32, 0.96)),
}


def path(motion: str, t: Array, rng: Rng, reach: float) -> tuple[Array, Array, Array]:
    """Offsets in x and y (pixels) and a factor of the radius, each [T], around the middle of the movement."""
    still = np.zeros_like(t)
    span = reach * rng.uniform(22, 32)
    phase, turn = rng.uniform(0, 2 * np.pi), 1 if rng.random() < 0.5 else -1
    ease = t - 0.5 if rng.random() < 0.6 else t * t * (3 - 2 * t) - 0.5
    wander = reach * rng.uniform(-4, 4) * (t - 0.5)
    if motion == "left":
        return -span * ease, wander, still + 1
    if motion == "right":
        return span * ease, wander, still + 1
    if motion == "rise":
        return wander, -span * ease, still + 1
    if motion == "fall":
        return wander, span * ease, still + 1
    if motion == "bounce":
        hop = np.abs(np.sin(np.pi * rng.uniform(1.6, 2.3) * t + phase))
        return wander, reach * rng.uniform(15, 20) * (0.5 - hop), still + 1
    if motion == "sway":
        return reach * rng.uniform(9, 12) * np.sin(2 * np.pi * rng.uniform(1.0, 1.4) * t + phase), wander, still + 1
    if motion == "circle":
        angle, radius = turn * 2 * np.pi * rng.uniform(0.8, 1.15) * t + phase, reach * rng.uniform(9, 12)
        return radius * np.cos(angle), radius * np.sin(angle), still + 1
    beat = np.sin(2 * np.pi * rng.uniform(1.1, 1.6) * t + phase)
    return wander, wander * 0.5, 1 + rng.uniform(0.28, 0.40) * beat


def place(thing: Thing, x0: float, x1: float, rng: Rng, reach: float) -> tuple[float, float, float]:
    """Centre and radius in pixels of an object that lives between the columns x0 and x1."""
    small = (9.5, 11.5) if reach == 1 else (8.5, 10.0)
    large = (15.0, 18.0) if reach == 1 else (13.0, 15.0)
    radius = rng.uniform(*(small if thing.size == "small" else large))
    room_x = {"left": 15, "right": 15, "sway": 12, "circle": 11}.get(thing.motion, 0) * reach + radius * 0.8
    room_y = {"rise": 15, "fall": 15, "bounce": 10, "circle": 11}.get(thing.motion, 0) * reach + radius * 0.8

    def pick(low: float, high: float, room: float) -> float:
        middle, spare = (low + high) / 2, max((high - low) / 2 - room, 2.0)
        return rng.uniform(middle - spare, middle + spare)

    return pick(x0, x1, room_x), pick(0, HEIGHT, room_y), radius


def pattern(kind: int, u: Array, v: Array, rng: Rng) -> Array:
    """-1..1 over the object's own coordinates: plain, lit from a side, striped, spotted, or split in two."""
    angle = rng.uniform(0, 2 * np.pi)
    along = u * np.cos(angle) + v * np.sin(angle)
    if kind == 1:
        return np.clip(along, -1, 1)
    if kind == 2:
        return np.clip(2 * np.sin(along * rng.uniform(4, 6)), -1, 1)
    if kind == 3:
        spots = np.sin(u * 5 + angle) * np.sin(v * 5 + angle)
        return np.clip(3 * spots - 0.6, -1, 1)
    if kind == 4:
        return np.clip(8 * along, -1, 1)
    return np.zeros_like(u)


def draw(
    picture: Array, thing: Thing, x: Array, y: Array, t: Array, x0: float, x1: float, rng: Rng, dark: bool
) -> tuple[Array, Array]:
    """The picture with the object on it, and how much of each pixel the object covers, [T, H, W]."""
    reach = 1.0 if x1 - x0 > WIDTH / 2 else 0.72
    cx, cy, radius = place(thing, x0, x1, rng, reach)
    dx, dy, grow = path(thing.motion, t, rng, reach)
    size = radius * grow[:, None, None]
    tilt = rng.uniform(-0.22, 0.22)
    u, v = (x - cx - dx[:, None, None]) / size, (y - cy - dy[:, None, None]) / size
    u, v = u * np.cos(tilt) + v * np.sin(tilt), v * np.cos(tilt) - u * np.sin(tilt)
    distance = SOLIDS[thing.shape](u, v) * size
    base = colour(*RGB[thing.colour]) * rng.uniform(0.92, 1.0)
    shade = pattern(int(rng.integers(5)), u, v, rng) * rng.uniform(0.06, 0.13)
    paint = np.clip(base + shade[..., None] * (0.6 if thing.colour == "white" else 1.0), 0, 1)
    rim = colour(0.85, 0.85, 0.88) if dark else colour(0.12, 0.10, 0.14)
    cover = soft(0.9 - distance)
    picture = mix(picture, rim, cover)
    return picture + (paint - picture) * soft(-0.9 - distance)[..., None], cover


def paint(scene: Scene) -> Array:
    """Render a scene: the clip, uint8 [T, H, W, 3] with T = 17, H = W = 64."""
    return paint_with_cover(scene)[0]


def paint_with_cover(scene: Scene) -> tuple[Array, Array]:
    """Render a scene and say where its objects are.

    Returns:
        The clip as from `paint`, and the share of each pixel that the objects cover, float32 [2, T, H, W]: first the
        object further left, then the other (zeros if there is none).
    """
    rng = np.random.default_rng(scene.seed)
    t = np.linspace(0, 1, FRAMES, dtype=np.float32)
    y, x = np.meshgrid(np.arange(HEIGHT, dtype=np.float32), np.arange(WIDTH, dtype=np.float32), indexing="ij")
    x, y = np.broadcast_to(x, (FRAMES, HEIGHT, WIDTH)), np.broadcast_to(y, (FRAMES, HEIGHT, WIDTH))
    clock = t[:, None, None]
    drift = rng.uniform(-7, 7) * clock
    picture = PLACES[scene.background](x + drift, y, clock, rng)
    side = rng.uniform(-1, 1) * (x / WIDTH - 0.5) * 0.16
    light = rng.uniform(0.86, 1.06) + side + rng.uniform(-0.05, 0.05) * clock
    picture = picture * light[..., None]
    dark = scene.background in DARK_PLACES
    columns = [(0, WIDTH)] if len(scene.things) == 1 else [(0, WIDTH // 2), (WIDTH // 2, WIDTH)]
    covers = np.zeros((2, FRAMES, HEIGHT, WIDTH), np.float32)
    for index, (thing, (x0, x1)) in enumerate(zip(left_to_right(scene), columns, strict=True)):
        picture, covers[index] = draw(picture, thing, x, y, t, x0, x1, rng, dark)
    return (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8), covers

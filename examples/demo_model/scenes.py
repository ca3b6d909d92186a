"""Captioned scenes for the bundled model: anti-aliased coloured shapes on a flat background.

The grammar, in lower case:

    scene    = object [place | relation object] ["on a" colour "background"]
    object   = "a" [size] colour shape
    colour   = one of COLOURS        shape = one of SHAPES      size = one of SIZES
    place    = one of PLACES         relation = one of RELATIONS

What is not said has a default: a white background, a medium size, the centre. An object never has its background's
colour. One caption in fifty is held out (`is_held_out`): training never draws it, the judge's test draws only those.
"""

import math
import random
import zlib
from dataclasses import dataclass

import torch

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 165, 70),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 50),
    "orange": (245, 135, 25),
    "purple": (135, 55, 180),
    "white": (248, 248, 248),
    "black": (20, 20, 24),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
SIZES = {"small": 0.12, "": 0.17, "large": 0.23}
"""Nominal radius as a share of the image's side."""
PLACES = {
    "": (0.5, 0.5),
    "at the top": (0.5, 0.25),
    "at the bottom": (0.5, 0.75),
    "on the left": (0.25, 0.5),
    "on the right": (0.75, 0.5),
    "at the top left": (0.27, 0.27),
    "at the top right": (0.73, 0.27),
    "at the bottom left": (0.27, 0.73),
    "at the bottom right": (0.73, 0.73),
}
"""Centre (x to the right, y downwards) as shares of the image's side."""
RELATIONS = {"above": (0, -1), "below": (0, 1), "to the left of": (-1, 0), "to the right of": (1, 0)}
"""Direction from the second object to the first."""


@dataclass(frozen=True)
class Object:
    """A drawn object: names from the tables above; centre and radius as shares of the image's side."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def phrase(self) -> str:
        return " ".join(word for word in ("a", self.size, self.colour, self.shape) if word)


@dataclass(frozen=True)
class Scene:
    """The content of one caption, and where exactly it was drawn. `place` is of a single object, `relation` of two."""

    caption: str
    background: str
    objects: tuple[Object, ...]
    place: str = ""
    relation: str = ""


def vocabulary() -> list[str]:
    """Every word of the grammar, sorted."""
    phrases = ["a on background", *COLOURS, *SHAPES, *SIZES, *PLACES, *RELATIONS]
    return sorted({word for phrase in phrases for word in phrase.split()})


def is_held_out(caption: str) -> bool:
    """Whether `caption` belongs to the one in fifty that training never sees; a function of the text alone."""
    return zlib.crc32(caption.encode()) % 50 == 0


def draw_scene(rng: random.Random, one_object: float = 0.4) -> Scene:
    """Draw one scene from the whole grammar: of one object with probability `one_object`, else of two."""
    stated = rng.random() < 0.6
    background = rng.choice(list(COLOURS)) if stated else "white"
    colours = [colour for colour in COLOURS if colour != background]

    def an_object(x: float, y: float) -> Object:
        size = rng.choices(list(SIZES), (0.2, 0.6, 0.2))[0]
        jitter_x, jitter_y, swell = rng.uniform(-0.03, 0.03), rng.uniform(-0.03, 0.03), rng.uniform(0.95, 1.05)
        return Object(rng.choice(colours), rng.choice(SHAPES), size, x + jitter_x, y + jitter_y, SIZES[size] * swell)

    place = relation = ""
    if rng.random() < one_object:
        place = rng.choice(list(PLACES))
        objects = (an_object(*PLACES[place]),)
        caption = f"{objects[0].phrase} {place}".strip()
    else:
        relation = rng.choice(list(RELATIONS))
        dx, dy = RELATIONS[relation]
        objects = (an_object(0.5 + 0.24 * dx, 0.5 + 0.24 * dy), an_object(0.5 - 0.24 * dx, 0.5 - 0.24 * dy))
        caption = f"{objects[0].phrase} {relation} {objects[1].phrase}"
    if stated:
        caption += f" on a {background} background"
    return Scene(caption, background, objects, place, relation)


def draw_scenes(seed: int, count: int, held_out: bool = False, one_object: float = 0.4) -> list[Scene]:
    """`count` scenes of the training captions, or of the held-out ones; the same for the same seed."""
    rng, scenes = random.Random(seed), []
    while len(scenes) < count:
        scene = draw_scene(rng, one_object)
        if is_held_out(scene.caption) == held_out:
            scenes.append(scene)
    return scenes


def signed_distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Distance to the outline, negative inside; x and y from the shape's centre, y downwards, in shares of the side."""
    match shape:
        case "circle":
            return torch.hypot(x, y) - radius
        case "square":
            return torch.maximum(x.abs(), y.abs()) - radius * 0.88
        case "ring":
            return (torch.hypot(x, y) - radius * 0.78).abs() - radius * 0.26
        case "cross":
            upright = torch.maximum(x.abs() - radius * 0.34, y.abs() - radius)
            level = torch.maximum(x.abs() - radius, y.abs() - radius * 0.34)
            return torch.minimum(upright, level)
        case "triangle":
            down = y - radius * 0.15
            return torch.maximum(down - radius * 0.7, (x.abs() * math.sqrt(3) - down - radius * 0.95) * 0.5)
        case "star":
            fifth = 2 * math.pi / 5  # fold the plane onto half of one point
            angle = torch.remainder(torch.atan2(x, -y) + fifth / 2, fifth) - fifth / 2
            reach = torch.hypot(x, y)
            across, along = reach * torch.sin(angle.abs()), reach * torch.cos(angle)
            tip, notch = radius * 1.12, radius * 0.48
            normal_x, normal_y = tip - notch * math.cos(fifth / 2), notch * math.sin(fifth / 2)
            return (across * normal_x + (along - tip) * normal_y) / torch.hypot(normal_x, normal_y)
    raise ValueError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")


def render(scenes: list[Scene], side_px: int = 128, stroke: float | None = None) -> torch.Tensor:
    """[scenes, 3, side_px, side_px] in [-1, 1]; later objects cover earlier ones.

    With a `stroke`, a share of the side, only outlines of this width are drawn, inside of the shapes.
    """
    backgrounds = torch.tensor([COLOURS[scene.background] for scene in scenes], dtype=torch.float32)
    image = backgrounds[:, :, None, None].repeat(1, 1, side_px, side_px)
    axis = (torch.arange(side_px) + 0.5) / side_px
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    for layer in range(2):
        for shape in SHAPES:
            rows = [i for i, s in enumerate(scenes) if len(s.objects) > layer and s.objects[layer].shape == shape]
            if not rows:
                continue
            drawn = [scenes[i].objects[layer] for i in rows]
            centre_x, centre_y, radius = torch.tensor([(o.x, o.y, o.radius) for o in drawn]).T[:, :, None, None]
            outline = signed_distance(shape, x - centre_x, y - centre_y, radius)
            if stroke is not None:
                outline = (outline + stroke / 2).abs() - stroke / 2
            cover = (0.5 - outline * side_px).clamp(0, 1)[:, None]
            paint = torch.tensor([COLOURS[o.colour] for o in drawn], dtype=torch.float32)[:, :, None, None]
            image[rows] = image[rows] * (1 - cover) + paint * cover
    return image / 127.5 - 1

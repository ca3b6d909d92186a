"""How images and masks get other sizes, the part around a mask, and what a masked part is filled with."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from noria.errors import InvalidField
from noria.images.inpainting import MaskUse, box_around, resized, softened, with_surroundings
from noria.images.start_image import ImageFiles, RequestImages, StartImage

RED, BLUE = (255, 0, 0), (0, 0, 255)


def halves(size=(40, 20)):
    """Red on the left, blue on the right."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def mask_of(box, size=(40, 20)):
    mask = Image.new("L", size)
    mask.paste(255, box)
    return mask


def file_of(image):
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def test_an_image_is_cut_filled_or_stretched():
    image = halves()
    assert resized(image, (20, 20), "crop").tobytes() == image.crop((10, 0, 30, 20)).tobytes()
    tall = np.asarray(resized(Image.fromarray(np.arange(8, dtype=np.uint8).reshape(2, 4) * 30), (4, 6), "fill"))
    assert tall.tolist() == [[0, 30, 60, 90]] * 3 + [[120, 150, 180, 210]] * 3
    wide = resized(image, (80, 20), "fill")
    assert (wide.size, wide.getpixel((0, 3)), wide.getpixel((79, 3))) == ((80, 20), RED, BLUE)
    assert resized(image, (7, 90), "stretch").size == (7, 90)


@given(*[st.integers(1, 60)] * 4, st.sampled_from(["crop", "fill", "stretch"]))
def test_any_size_becomes_any_other(width, height, new_width, new_height, mode):
    assert resized(Image.new("L", (width, height), 9), (new_width, new_height), mode).getextrema() == (9, 9)


@given(st.integers(0, 39), st.integers(0, 19), st.integers(1, 40), st.integers(1, 20), st.integers(0, 50), st.data())
def test_the_box_around_a_mask_covers_it_and_has_the_proportions_that_fit(left, top, width, height, padding, data):
    size_px = data.draw(st.sampled_from([(8, 8), (16, 8), (8, 24)]))
    mask = mask_of((left, top, left + width, top + height))
    box = box_around(mask, padding, size_px)
    covered = mask.getbbox()
    assert (max(0, covered[0] - padding), max(0, covered[1] - padding)) >= (box[0], box[1]) >= (0, 0)
    assert (min(40, covered[2] + padding), min(20, covered[3] + padding)) <= (box[2], box[3]) <= (40, 20)
    across, down = box[2] - box[0], box[3] - box[1]
    if across < 40 and down < 20:
        assert abs(across * size_px[1] - down * size_px[0]) < max(size_px)


@pytest.mark.parametrize("blur_px", [0.0, 200.0])
def test_a_mask_of_nothing_or_of_less_than_its_blur_shows_has_no_box(blur_px):
    mask = mask_of((20, 20, 20 + bool(blur_px), 21), (400, 400))
    with pytest.raises(InvalidField, match=r"covers nothing, so there is no part to repaint .* small beside mask_blur"):
        box_around(softened(mask, (blur_px, blur_px)), 1, (8, 8))


def test_a_masked_part_gets_the_colours_around_it():
    image = halves()
    image.paste("white", (5, 5, 15, 15))
    image.paste("white", (25, 5, 35, 15))
    mask = mask_of((5, 5, 15, 15))
    mask.paste(255, (25, 5, 35, 15))
    filled = with_surroundings(image, mask)
    assert (filled.getpixel((1, 1)), filled.getpixel((38, 18))) == (RED, BLUE)
    for x, colour in ((10, RED), (30, BLUE)):
        assert np.abs(np.array(filled.getpixel((x, 10))) - colour).max() < 100
    everything = with_surroundings(image, Image.new("L", image.size, 255))
    assert everything.getcolors() == [(800, (0, 0, 0))]


def test_the_edge_of_a_mask_is_blurred_across_and_down():
    soft = np.asarray(softened(mask_of((20, 0, 40, 20)), (3.0, 0.0)))
    assert np.ptp(soft, axis=0).max() == 0
    assert 0 < soft[0, 18] < 128 < soft[0, 21] < 255


def test_only_what_a_soft_mask_covers_changes():
    image, mask = halves((64, 48)), mask_of((10, 10, 30, 30), (64, 48))
    for use in (MaskUse((2.0, 2.0)), MaskUse((2.0, 2.0), 4), MaskUse((2.0, 2.0), 4, "surroundings")):
        start = StartImage(ImageFiles(file_of(image), file_of(mask), mask_use=use))
        assert len(start.pixels(64, 48)) == 4 * 64 * 48
        pasted = np.asarray(start.paste(Image.new("RGB", (64, 48), "white"))).astype(int)
        changes = np.abs(pasted - np.asarray(image)).max(axis=-1)
        soft = np.asarray(softened(mask, (2.0, 2.0))).astype(int)
        assert np.abs(changes - soft).max() <= 1


def test_with_an_image_larger_than_the_request_all_of_it_is_made_smaller_unless_a_part_is_repainted():
    files = file_of(halves((80, 60))), file_of(mask_of((0, 0, 20, 20), (80, 60)))
    white = Image.new("RGB", (40, 24), "white")
    assert StartImage(ImageFiles(*files, mask_use=MaskUse())).paste(white).size == (40, 24)
    assert StartImage(ImageFiles(*files, mask_use=MaskUse(padding_px=0))).paste(white).size == (80, 60)


@pytest.mark.parametrize("scale", [1, 2])
def test_of_the_images_of_controls_the_same_part_is_taken(scale):
    image, mask = halves((80, 60)), mask_of((48, 20, 64, 32), (80, 60))
    control = Image.new("RGB", (80 * scale, 60 * scale), "black")
    control.paste("white", tuple(side * scale for side in (48, 20, 64, 32)))
    files = file_of(image), file_of(mask)

    def of_control(use):
        images = RequestImages(ImageFiles(*files, controls=(file_of(control),), mask_use=use))
        pixels = images.pixels(32, 24, spec=None)  # which only references need
        return np.frombuffer(pixels, np.uint8)[-3 * 32 * 24 :].mean()

    assert of_control(MaskUse(padding_px=0)) == 255
    assert of_control(MaskUse()) < 30

"""Files in the input of a job, which are stored apart."""

import copy

import msgspec

from noria.frontend.jobs.inputs import JobImages, images_in, take_images
from noria.protocol.request import ImageRequestBody


def test_the_files_of_an_input_are_taken_out_and_put_back():
    control, other = {"name": "edges", "image": "c"}, {"name": "depth", "image": "d"}
    sent = {
        "prompt": "p", "image": "i", "mask": "m", "controls": [control, {"name": "x"}, other],
        "reference_images": ["r", "s"], "ip_adapter": {"name": "a", "image": "j"},
    }  # fmt: skip
    assert images_in(sent) == ["i", "m", "c", "d", "r", "s", "j"]
    body, rest = msgspec.convert(sent, ImageRequestBody), copy.deepcopy(sent)
    images = take_images(rest)
    assert images == JobImages({"image": "i", "mask": "m"}, {0: "c", 2: "d"}, ["r", "s"], "j")
    assert rest == {"prompt": "p", "controls": [{"name": each} for each in ("edges", "x", "depth")],
                    "ip_adapter": {"name": "a"}}  # fmt: skip
    assert images.put_back(msgspec.convert(rest, ImageRequestBody)) == body
    assert images == JobImages()
    assert images.put_back(ImageRequestBody("p")) == ImageRequestBody("p")


def test_of_a_wrong_input_only_what_is_a_file_is_taken_out():
    wrong = {"image": 1, "mask": None, "controls": [1, {"image": 2}], "reference_images": ["r", 3], "ip_adapter": 4}
    rest = copy.deepcopy(wrong)
    assert (take_images(rest), rest, images_in(wrong)) == (JobImages(), wrong, ["r"])
    for each in ({"controls": "c", "reference_images": "r", "ip_adapter": {"image": 1}}, {"controls": None}):
        rest = copy.deepcopy(each)
        assert (take_images(rest), rest, images_in(each)) == (JobImages(), each, [])
    generations = {"endpoint": "/v1/images/generations", "image": "i", "reference_images": ["r"]}
    assert take_images(generations) == JobImages(references=["r"])
    assert generations == {"endpoint": "/v1/images/generations", "image": "i"}

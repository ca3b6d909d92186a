"""Image files keep metadata exactly and pixels unchanged; damaged and hostile files are rejected."""

import io
import pathlib
import struct
import zlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from noria.errors import ImageFileError
from noria.images.a1111_metadata import to_infotext
from noria.images.metadata import GenerationMetadata, to_json
from noria.images.metadata_io import read_metadata, save_options

FORMATS = ("png", "webp", "jpeg")
PIXELS = Image.radial_gradient("L").convert("RGB").resize((32, 24))
WHOLE = GenerationMetadata(
    "a red circle", "blurry", 7, 32, 24, 20, 7.5, "dpm++2m-karras", "tiny", "0123456789ab", "0.1.0"
)
SAVE_OPTIONS = {"png": {}, "webp": {"quality": 90, "method": 2}, "jpeg": {"quality": 95}}


def encode_image(metadata, file_format):
    file = io.BytesIO()
    options = save_options(metadata, file_format) if metadata else {}
    PIXELS.save(file, format=file_format, **SAVE_OPTIONS[file_format], **options)
    return file.getvalue()


@pytest.fixture
def read(tmp_path):
    def of(data: bytes) -> GenerationMetadata:
        (tmp_path / "image").write_bytes(data)
        return read_metadata(tmp_path / "image")

    return of


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of these chunks, then the pixels of an empty one."""
    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    body = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(b"\0" * 4)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in body
    )


AWKWARD = st.text() | st.sampled_from(
    [
        "",
        "\n",
        "Steps: 5, Seed: 3, Size: 8x8",
        'a\r\nNegative prompt: "b", c\\',
        "🎨👩‍🎨",
        "\0\0",
        " padded ",
        "\x1b[2J",
    ]
)


@pytest.mark.parametrize("file_format", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prompt=AWKWARD, negative_prompt=AWKWARD, seed=st.integers(0, 2**63 - 1))
def test_any_prompt_is_read_back_exactly(read, file_format, prompt, negative_prompt, seed):
    metadata = msgspec.structs.replace(WHOLE, prompt=prompt, negative_prompt=negative_prompt, seed=seed)
    assert read(encode_image(metadata, file_format)) == metadata


@pytest.mark.parametrize("file_format", FORMATS)
def test_pixels_are_unchanged(file_format):
    with_metadata, without = encode_image(WHOLE, file_format), encode_image(None, file_format)
    assert Image.open(io.BytesIO(with_metadata)).tobytes() == Image.open(io.BytesIO(without)).tobytes()
    assert len(with_metadata) > len(without)


def test_a1111s_text_is_where_a1111_reads_it():
    assert Image.open(io.BytesIO(encode_image(WHOLE, "png"))).info["parameters"] == to_infotext(WHOLE)
    for file_format in ("webp", "jpeg"):
        exif = Image.open(io.BytesIO(encode_image(WHOLE, file_format))).getexif()
        assert exif.get_ifd(0x8769)[0x9286] == b"UNICODE\0" + to_infotext(WHOLE).encode("utf-16-be")


def test_the_longest_prompts_fit_a_jpeg(read):
    metadata = msgspec.structs.replace(WHOLE, prompt="🎨" * 4000, negative_prompt="🎨" * 4000)
    assert read(encode_image(metadata, "jpeg")) == metadata


def test_a_jpeg_has_only_the_json_if_both_do_not_fit(read):
    metadata = msgspec.structs.replace(WHOLE, prompt="🎨" * 15_000)
    file = encode_image(metadata, "jpeg")
    assert read(file) == metadata
    assert 0x9286 not in Image.open(io.BytesIO(file)).getexif().get_ifd(0x8769)


def test_a_jpeg_is_written_without_metadata_if_they_do_not_fit(read):
    file = encode_image(msgspec.structs.replace(WHOLE, prompt="🎨" * 20_000), "jpeg")
    with pytest.raises(ImageFileError, match="has no generation metadata"):
        read(file)


def a1111_png():
    chunks = PngInfo()
    chunks.add_text("parameters", "a cat\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 512x512")
    file = io.BytesIO()
    PIXELS.save(file, format="png", pnginfo=chunks)
    return file.getvalue()


def image_with_comment(comment: object, file_format: str = "jpeg") -> bytes:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = comment
    file = io.BytesIO()
    PIXELS.save(file, format=file_format, exif=exif.tobytes())
    return file.getvalue()


TEXT = "a cat\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 512x512"


@pytest.mark.parametrize(
    "data",
    [
        a1111_png(),
        image_with_comment(b"UNICODE\0" + TEXT.encode("utf-16-be")),
        image_with_comment(b"UNICODE\0" + TEXT.encode("utf-16-le"), "webp"),
        image_with_comment(b"ASCII\0\0\0" + TEXT.encode()),
        image_with_comment(TEXT.encode()),
        image_with_comment(b"UNICODE\0" + TEXT.encode("utf-16-be"), "png"),
    ],
    ids=["png", "utf-16-be", "utf-16-le", "ascii", "bare", "exif in png"],
)
def test_files_of_other_programs_are_read(read, data):
    assert read(data) == GenerationMetadata("a cat", None, 5, 512, 512, 20, 7.0, "euler-a")


@pytest.mark.parametrize("file_format", FORMATS)
def test_what_stands_behind_an_image_hides_no_metadata(read, file_format):
    """A WebP of another length would have a thousand chunks of zeros."""
    without = read_error(read, encode_image(None, file_format) + bytes(100_000))
    assert without == "has no generation metadata"
    assert read(encode_image(WHOLE, file_format) + bytes(100_000)) == WHOLE


def read_error(read, data):
    with pytest.raises(ImageFileError) as error:
        read(data)
    return " ".join(error.value.message.split()[1:]).rstrip(".")


def text_png(**texts: str) -> bytes:
    info = PngInfo()
    for keyword, text in texts.items():
        info.add_itxt(
            {"XML_com_adobe_xmp": "XML:com.adobe.xmp", "sd_metadata": "sd-metadata"}.get(keyword, keyword), text
        )
    file = io.BytesIO()
    PIXELS.save(file, format="png", pnginfo=info)
    return file.getvalue()


def image_with_tags(file_format: str, **tags: str) -> bytes:
    exif = Image.Exif()
    for name, text in tags.items():
        exif[{"make": 0x010F, "model": 0x0110, "software": 0x0131, "description": 0x010E}[name]] = text
    file = io.BytesIO()
    PIXELS.save(file, format=file_format, exif=exif.tobytes())
    return file.getvalue()


GRAPH = '{"6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a castle"}}}'
FOOOCUS = '{"prompt": "a castle", "seed": "1", "steps": 30, "metadata_scheme": "fooocus", "base_model": "x"}'
SWARM = '{"sui_image_params": {"prompt": "a castle", "seed": 1}, "sui_extra_data": {}}'
DRAW_THINGS = '{"c": "a castle", "uc": "blurry", "seed": 1, "v2": {"steps": 4}}'
NOVELAI = '{"prompt": "a castle", "uc": "blurry", "steps": 28, "sampler": "k_euler"}'
XMP = "<x:xmpmeta xmlns:x='adobe:ns:meta/'><xmp:CreatorTool>Draw Things</xmp:CreatorTool></x:xmpmeta>"
NOT_READ = {
    "ComfyUI": [
        text_png(prompt=GRAPH, workflow="{}"), text_png(prompt=GRAPH), text_png(workflow='{"last_node_id": 9}'),
        image_with_tags("webp", make=f"workflow:{GRAPH}", model=f"prompt:{GRAPH}"),
        image_with_tags("jpeg", make=f"prompt:{GRAPH}"),
        text_png(parameters=GRAPH), image_with_comment(b"ASCII\0\0\0" + GRAPH.encode(), "webp"),
    ],
    "InvokeAI": [
        text_png(invokeai_metadata='{"app_version": "4.2"}', invokeai_graph="{}"), text_png(Dream="a castle -s 50"),
        text_png(sd_metadata='{"model": "x", "app_id": "invoke-ai/InvokeAI"}'),
    ],
    "Fooocus": [
        text_png(parameters=FOOOCUS, fooocus_scheme="fooocus"), text_png(parameters=FOOOCUS),
        image_with_comment(FOOOCUS.encode(), "jpeg"), image_with_comment(b"UNICODE\0" + FOOOCUS.encode("utf-16-be")),
    ],
    "SwarmUI": [text_png(parameters=SWARM), image_with_comment(b"UNICODE\0" + SWARM.encode("utf-16-le"))],
    "NovelAI": [
        text_png(Title="AI generated image", Software="NovelAI", Description="a castle", Comment=NOVELAI),
        text_png(Comment=NOVELAI), image_with_tags("webp", software="NovelAI"),
    ],
    "Draw Things": [text_png(XML_com_adobe_xmp=XMP), image_with_comment(b"ASCII\0\0\0" + DRAW_THINGS.encode())],
    "Easy Diffusion": [text_png(use_stable_diffusion_model="sd-v1-5", prompt="a castle", seed="1")],
    "an unknown program": [text_png(parameters='{"prompt": "a castle", "seed": 1}'), text_png(parameters="[]")],
}  # fmt: skip


@pytest.mark.parametrize("program", NOT_READ)
def test_metadata_of_a_program_that_is_not_read_are_rejected_by_its_name(read, program):
    for data in NOT_READ[program]:
        for reads in (read, lambda content: read_metadata(io.BytesIO(content))):
            with pytest.raises(ImageFileError, match=f"has metadata of {program}, which are not read; those of Noria"):
                reads(data)


@pytest.mark.parametrize(
    "data",
    [
        text_png(parameters=TEXT, prompt=GRAPH, workflow="{}"),  # as some nodes of ComfyUI write it
        text_png(parameters=TEXT, fooocus_scheme="a1111"),
        text_png(parameters=TEXT, Software="NovelAI"),
        png((b"tEXt", b"parameters\0" + TEXT.encode()), (b"iTXt", b"workflow\0damaged")),
    ],
)
def test_a1111s_text_is_read_whatever_else_a_program_writes(read, data):
    assert read(data).prompt == "a cat"


@pytest.mark.parametrize(
    "data",
    [
        image_with_tags("jpeg", make="Canon", model="EOS R5: {x}", software="Adobe Lightroom"),
        text_png(Software="gnome-screenshot", Title="a workflow", prompt="a castle"),
        png((b"iTXt", b"workflow\0damaged")),
    ],
)
def test_what_no_generator_wrote_has_no_generation_metadata(read, data):
    with pytest.raises(ImageFileError, match="has no generation metadata"):
        read(data)


BOMB = b"noria\0\0" + zlib.compress(b" " * 10_000_000)
HOSTILE = {
    "empty": (b"", "is not an image"),
    "no image": (b"MZ" + b"\0" * 100, "is not an image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
    "another kind of image": (b"GIF89a" + b"\0" * 100, "is not an image"),
    "a head only": (b"\x89PNG\r\n\x1a\n", "is not an image"),
    "no text": (png(), "has no generation metadata"),
    "blank text": (png((b"tEXt", b"parameters\0 \n ")), "has no generation metadata"),
    "json of another shape": (png((b"tEXt", b"noria\0[1, 2]")), "not what Noria writes"),
    "nonsense for json": (png((b"tEXt", b"noria\0{prompt")), "not what Noria writes"),
    "json of another type": (png((b"tEXt", b'noria\0{"prompt": ["p"]}')), "not what Noria writes"),
    "deep json": (png((b"tEXt", b"noria\0" + b"[" * 500_000)), "not what Noria writes"),
    "a text that unpacks to 10 MB": (png((b"zTXt", BOMB)), "is damaged"),
    "an international one": (png((b"iTXt", b"noria\0\1\0\0\0" + BOMB.partition(b"\0\0")[2])), "is damaged"),
    "settings without end": (png((b"tEXt", b"parameters\0" + b"a:," * 2**20)), "has too much metadata"),
    "a huge chunk": (png((b"iTXt", b"noria\0\0\0\0\0" + b"x" * 2_000_000)), "is damaged|has too much metadata"),
    "a size that needs 16 GB": (
        png((b"IHDR", struct.pack(">IIBBBBB", 65_000, 65_000, 8, 6, 0, 0, 0))), "has no generation metadata"
    ),
    "exif of garbage": (png((b"eXIf", b"MM\0*\xff\xff\xff\xff")), "has no generation metadata|is damaged"),
    "a number for a comment": (image_with_comment(7), "has no generation metadata"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_rejected(read, case):
    data, message = HOSTILE[case]
    with pytest.raises(ImageFileError, match=message):
        read(data)


def read_or_rejected(read, data: bytes) -> GenerationMetadata | None:
    try:
        return read(data)
    except ImageFileError:
        return None


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_truncated_file_is_read_or_rejected(read, file_format):
    whole = encode_image(WHOLE, file_format)
    outcomes = [read_or_rejected(read, whole[:length]) for length in range(0, len(whole), 3)]
    assert all(outcome in (WHOLE, None) for outcome in outcomes)
    assert outcomes[0] is None


@pytest.mark.parametrize("file_format", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_file_with_wrong_bytes_is_read_or_rejected(read, file_format, changes):
    damaged = bytearray(encode_image(WHOLE, file_format))
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    read_or_rejected(read, bytes(damaged))  # anything but an ImageFileError fails


def test_a_path_without_a_regular_file_is_rejected(tmp_path):
    messages = {
        tmp_path: "is not a file",
        tmp_path / "x.png": "there is no file",
        pathlib.Path("/dev/zero"): "is not a file",
    }
    for path, message in messages.items():
        with pytest.raises(ImageFileError, match=message):
            read_metadata(path)


def test_the_json_is_preferred_to_a1111s_text(read):
    both = png((b"tEXt", b"parameters\0another prompt"), (b"tEXt", b"noria\0" + to_json(WHOLE)))
    assert read(both) == WHOLE

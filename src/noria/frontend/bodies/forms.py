"""Bodies of requests for images as forms (multipart/form-data): the fields of the JSON body, and its images as files.

The files are `image` and `mask`, where a route takes a start image, for each of the `controls`, which is JSON, a file
`control`, in their order, `reference_image` and `ip_adapter_image`. In edits, references are the images themselves.
"""

import asyncio
import dataclasses
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, get_args

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from noria.errors import InvalidBody, InvalidField, short_repr
from noria.errors.problems import Problems
from noria.frontend.access.auth import client_id_of
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.http.body import FORM, decode
from noria.frontend.services.images.start_images import LoadFiles
from noria.images.reference_size import FIELD as REFERENCES
from noria.images.start_image import ImageFiles, MaskRule
from noria.protocol.diffusion import DiffusionModelSpec

MAX_FILES = 20  # OpenAI's clients send up to 16 images and a mask
MAX_FIELDS = 64
MAX_FIELD_BYTES = 65_536  # bytes of a field that is no file

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings are in the response


@dataclass(frozen=True)
class Form:
    """The parts of a form by their names; a file may be there several times."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)


def parse_form(content_type: str, body: bytes) -> Form:
    """Return the parts of `body`; empty files without a name, as browsers send them, are left out. Call it in a thread.

    Raises:
        InvalidBody: it is no form, or has too many or too large parts.
        InvalidField: a field is there twice, or is a part of a list or an object.
    """
    options = parse_options_header(content_type)[1]
    charset = options.get(b"charset", b"utf-8").lower()
    if charset not in (b"utf-8", b"utf8"):  # Starlette would take any codec of Python's
        raise InvalidBody(f"the body's charset is {short_repr(charset.decode('latin-1'))}; send utf-8.")

    _check_boundaries(options.get(b"boundary", b""), body)

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        Headers({"content-type": content_type}),
        whole(),
        max_files=MAX_FILES,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_FIELD_BYTES,
    )
    parser.spool_max_size = len(body) + 1  # files stay in memory
    try:
        parts = asyncio.run(_read_parts(parser))
    except MultiPartException as error:
        hint = " A part without a filename is a text." if "maximum size" in error.message else ""
        raise InvalidBody(f"the body is not a form of multipart/form-data: {error.message}{hint}") from error
    form = Form()
    for name, part in parts:
        if isinstance(part, bytes):
            form.files.setdefault(name, []).append(part)
        elif nested := re.match(r"(\w+)(\[\])?\[\w", name):  # as openai-python sends lists of objects
            example = "[…]" if nested[2] else "{…}"
            raise InvalidField(
                f"{short_repr(name)} is no field; send {nested[1][:80]} as JSON text: json.dumps({example}).",
                field=nested[1][:80],
            )
        elif name in form.fields:
            raise InvalidField(f"{short_repr(name)} is there twice.", field=name[:80])
        else:
            form.fields[name] = part
    return form


def _check_boundaries(boundary: bytes, body: bytes) -> None:
    """Raise InvalidBody if `body` has more boundaries than parts are allowed.

    Each takes the parser 2 µs, also where it ends no part because something follows it: 20 MB of them take 10 s.
    """
    num_boundaries = body.count(b"\r\n--" + boundary)
    if num_boundaries > MAX_FILES + MAX_FIELDS + 1:
        raise InvalidBody(
            f"the body has {num_boundaries} boundaries; at most {MAX_FILES} files and {MAX_FIELDS} fields are allowed."
        )


async def _read_parts(parser: MultiPartParser) -> list[tuple[str, str | bytes]]:
    """Return the name and the content of each part, and close the files. Raises MultiPartException."""
    parts: list[tuple[str, str | bytes]] = []
    form = await parser.parse()
    try:
        for name, part in form.multi_items():
            content = part if isinstance(part, str) else await part.read()
            if content or isinstance(part, str) or part.filename:
                parts.append((name, content))
    finally:
        await form.close()
    return parts


_IMAGE_NAMES = ("image", "image[]")  # openai-python sends the second one for a list
_START_NAMES = (*_IMAGE_NAMES, "mask")
_CONTROL_NAMES = ("control", "control[]")
_REFERENCE_NAMES = ("reference_image", "reference_image[]")
_IP_ADAPTER_NAMES = ("ip_adapter_image", "ip_adapter_image[]")
_FIELDS_OF_JSON = ("loras", "controls", "ip_adapter", "refiner")

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def is_form(http: Request) -> bool:
    """Whether the body of a request, which has an allowed type, is a form."""
    return http.headers["content-type"].lstrip().lower().startswith(FORM)


async def read_form(
    http: Request,
    threads: FairThreads,
    raw: bytes,
    body_type: type[BodyT],
    problems: Problems,
    mask_rule: MaskRule | None = None,
    *,
    edited_by: Callable[[BodyT], Awaitable[DiffusionModelSpec | None]] | None = None,
) -> tuple[BodyT, LoadFiles | None]:
    """Return the fields of the form `raw` as a `body_type`, and what returns its files once; None: it has none.

    `mask_rule` says what a mask repaints; None: the route takes no start image. `edited_by` is for edits, which need
    an image: it returns the model of a body. Images after the first are references then. Fields with values that are
    not allowed are added to `problems`, if it has the others.

    Raises:
        InvalidBody: it is no form.
        InvalidField: a field or a file is not allowed.
    """
    parsing = threads.run(client_id_of(http), parse_form, http.headers["content-type"], raw)
    del raw
    form = await parsing
    files = _files(form, mask_rule, is_edit=edited_by is not None)
    body = _fields(form, body_type, problems)
    if edited_by is not None and (spec := await edited_by(body)) is not None:
        files = _as_edit(files, getattr(body, "strength", None), spec)
    has_files = files.image is not None or files.controls or files.references or files.ip_adapter is not None
    # Without files their fields have no images in them either: checks of files say so in the words of a form.
    has_files = has_files or getattr(body, "controls", ()) or getattr(body, "ip_adapter", None) is not None
    return body, [files].pop if has_files else None  # the list keeps the files until it is called


def _as_edit(files: ImageFiles, strength: float | None, spec: DiffusionModelSpec) -> ImageFiles:
    """Return the files of an edit, whose images after the first are references, for a model."""
    assert files.image is not None
    images = (files.image, *files.references)
    if not spec.max_references and files.references:
        raise InvalidField(
            f"image is there {len(images)} times; one is allowed: {spec.name} does not take several.", field="image"
        )
    if spec.max_references and files.mask is None and strength is None:
        return dataclasses.replace(files, image=None, references=images)
    if files.mask is not None and len(images) <= spec.max_references:  # as diffusers' pipelines for masks show it, too
        return dataclasses.replace(files, references=images)
    return files


def _files(form: Form, mask_rule: MaskRule | None, *, is_edit: bool) -> ImageFiles:
    names = (
        *(_START_NAMES if mask_rule else ()),
        *_CONTROL_NAMES,
        *(() if is_edit else _REFERENCE_NAMES),
        *_IP_ADAPTER_NAMES,
    )
    for name in names:
        if name in form.fields:
            raise InvalidField(f"{name} is a text, since it has no filename; send a file.", field=name)
    for name in (REFERENCES, f"{REFERENCES}[]"):
        if name in form.fields:
            files = "image" if is_edit else "reference_image"
            raise InvalidField(f"{name} is a text; send files `{files}` in a form.", field=REFERENCES)
    for name in form.files:
        if name not in names:
            known = ", ".join(name for name in names if not name.endswith("[]"))
            raise InvalidField(f"unknown file {name[:80]!r}. Known are: {known}.", field=name[:80])
    images = [file for name in _IMAGE_NAMES for file in form.files.get(name, [])]
    if is_edit and not images:
        raise InvalidField("image is missing; send a PNG, WebP or JPEG file.", field="image")
    if len(images) > 1 and not is_edit:
        raise InvalidField(f"image is there {len(images)} times; one is allowed.", field="image")
    references = images[1:] if is_edit else [file for name in _REFERENCE_NAMES for file in form.files.get(name, [])]
    masks = form.files.get("mask", [])
    of_ip_adapter = [file for name in _IP_ADAPTER_NAMES for file in form.files.get(name, [])]
    for name, found in (("mask", masks), (_IP_ADAPTER_NAMES[0], of_ip_adapter)):
        if len(found) > 1:
            raise InvalidField(f"{name} is there {len(found)} times; one is allowed.", field=name)
    if masks and not images:
        raise InvalidField("mask is there without image; send both.", field="mask")
    return ImageFiles(
        images[0] if images else None,
        masks[0] if masks else None,
        mask_rule or "white",
        controls=tuple(file for name in _CONTROL_NAMES for file in form.files.get(name, [])),
        references=tuple(references),
        ip_adapter=of_ip_adapter[0] if of_ip_adapter else None,
    )


def _fields(form: Form, body_type: type[BodyT], problems: Problems) -> BodyT:
    """Return the fields, whose numbers are texts; an empty text is a field that is left out, except for prompts."""
    numbers = {each.name for each in msgspec.structs.fields(body_type) if _is_number(each.type)}
    fields: dict[str, object] = {
        name: re.sub(r"\A(-?)(?=\.\d)", r"\g<1>0", value.strip()) if name in numbers else value  # .7 is 0.7
        for name, value in form.fields.items()
        if value or name in ("prompt", "negative_prompt")
    }
    for name in _FIELDS_OF_JSON:
        if name in fields:
            try:
                fields[name] = msgspec.json.decode(form.fields[name])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise InvalidField(f"{name} is no JSON: {error}.", field=name) from error
    controls = fields.get("controls")
    if isinstance(controls, list) and any(isinstance(each, dict) and each.get("image") for each in controls):
        raise InvalidField("controls: send images of controls as files `control` of the form.", field="controls")
    adapter = fields.get("ip_adapter")
    if isinstance(adapter, dict) and adapter.get("image"):
        raise InvalidField(f"ip_adapter: send its image as a file `{_IP_ADAPTER_NAMES[0]}`.", field="ip_adapter")
    return decode(msgspec.json.encode(fields), body_type, strict=False, problems=problems)


def _is_number(declared: object) -> bool:
    return declared in (int, float) or any(map(_is_number, get_args(declared)))

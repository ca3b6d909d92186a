"""Parses the bodies of HTML's forms (multipart/form-data), bounded in the number and the size of their parts."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from noria.errors import InvalidBody, InvalidField, short_repr

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

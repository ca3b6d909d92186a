"""Reads and writes the metadata of image files: Noria's JSON, and A1111's text for other programs.

    file   Noria's JSON                          A1111's text
    PNG    an iTXt chunk "noria"                 a tEXt or iTXt chunk "parameters", as A1111 writes it
    WebP   EXIF's MakerNote                      EXIF's UserComment, "UNICODE" and big-endian UTF-16, as A1111 writes it
    JPEG   the same                              the same, if both fit into its 64 kB

Writing does not change pixels. Reading does not decode them, and `metadata_chunks.py` finds the metadata in bounded
time and memory, so a hostile file costs nothing.
"""

import contextlib
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO, Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from noria.errors import ImageFileError, short_repr
from noria.images.a1111_metadata import from_infotext, to_infotext
from noria.images.foreign_metadata import KEYWORDS, is_json, name_program
from noria.images.metadata import GenerationMetadata, from_json, to_json
from noria.images.metadata_chunks import UnknownFormatError, find_metadata, read_exif, read_exif_texts
from noria.protocol.request import ImageFormat

_NORIA_KEYWORD, _A1111_KEYWORD = "noria", "parameters"  # PNG's keywords
_SOFTWARE, _EXIF_IFD, _MAKER_NOTE, _USER_COMMENT = 0x0131, 0x8769, 0x927C, 0x9286  # tags of EXIF 2.32
_PROGRAM_TAGS = (0x010E, 0x010F, 0x0110, _SOFTWARE)  # description, make, model and software
_MAKER_NOTE_PREFIX = b"noria\0"  # distinguishes Noria's MakerNote from those of cameras
_UNICODE_PREFIX = b"UNICODE\0"
_MAX_TEXT_CHARS = 2**20  # Noria's have a few thousand; a hostile text takes seconds per million characters
_MAX_JPEG_EXIF_BYTES = 65_533 - len(b"Exif\0\0")
_FORMATS = ("PNG", "WEBP", "JPEG")


def save_options(metadata: GenerationMetadata, file_format: ImageFormat) -> dict[str, Any]:
    """Return the arguments of Pillow's `Image.save` that write `metadata`; none if not even the JSON fits a JPEG."""
    noria_json, infotext = to_json(metadata), to_infotext(metadata)
    if file_format == "png":
        png_info = PngInfo()
        png_info.add_text(_A1111_KEYWORD, infotext.replace("\0", ""))  # NUL would end the chunk's text
        png_info.add_itxt(_NORIA_KEYWORD, noria_json.decode())
        return {"pnginfo": png_info}
    exif = _build_exif(noria_json, infotext)
    if file_format == "jpeg" and len(exif) > _MAX_JPEG_EXIF_BYTES:
        exif = _build_exif(noria_json, None)
    return {} if file_format == "jpeg" and len(exif) > _MAX_JPEG_EXIF_BYTES else {"exif": exif}


def _build_exif(noria_json: bytes, infotext: str | None) -> bytes:
    exif = Image.Exif()
    exif[_SOFTWARE] = "noria"
    exif_ifd = exif.get_ifd(_EXIF_IFD)
    exif_ifd[_MAKER_NOTE] = _MAKER_NOTE_PREFIX + noria_json
    if infotext is not None:
        exif_ifd[_USER_COMMENT] = _UNICODE_PREFIX + infotext.encode("utf-16-be")
    return exif.tobytes()


def read_metadata(file: pathlib.Path | IO[bytes], name: str = "") -> GenerationMetadata:
    """Return the metadata of a PNG, WebP or JPEG of any origin. Errors name the file `name`, by default its path.

    Raises ImageFileError: the file cannot be read, is not such an image, is damaged, or has no metadata.
    """
    name = name or short_repr(str(file))
    if isinstance(file, pathlib.Path) and file.exists() and not file.is_file():
        raise ImageFileError(f"{name} is not a file.")
    try:
        noria_json, infotext = _read_texts(file)
    except FileNotFoundError as error:
        raise ImageFileError(f"there is no file {name}.") from error
    except PermissionError as error:
        raise ImageFileError(f"{name} cannot be read by this user.") from error
    except UnknownFormatError as error:
        raise ImageFileError(f"{name} is not an image of a format with metadata: {', '.join(_FORMATS)}.") from error
    except (ValueError, zlib.error, OSError) as error:
        raise ImageFileError(f"{name} is damaged: {error}.") from error
    if max(len(noria_json or ""), len(infotext or "")) > _MAX_TEXT_CHARS:
        raise ImageFileError(f"{name} has too much metadata: at most {_MAX_TEXT_CHARS} characters are read.")
    try:
        if noria_json is not None:
            return from_json(noria_json)
    except ImageFileError as error:
        raise ImageFileError(f"{name}: {error.message}") from error
    has_text = bool(infotext and infotext.strip())
    if infotext is None or not has_text or is_json(infotext):
        program = name_program({**_read_other_texts(file), "": infotext or ""})
        if program is None and not has_text:
            raise ImageFileError(f"{name} has no generation metadata.")
        raise ImageFileError(
            f"{name} has metadata of {program or 'an unknown program'}, which are not read; those of Noria and of "
            "A1111 are, and many programs can write the latter."
        )
    return from_infotext(infotext)


def _read_other_texts(file: pathlib.Path | IO[bytes]) -> dict[str, str]:
    """Return the texts by which other programs are known, by keyword; those of EXIF by any other name."""
    texts: dict[str, str] = {}
    with contextlib.suppress(ValueError, zlib.error, OSError), _opened(file) as opened:
        found = find_metadata(opened, KEYWORDS)
        texts = dict(found.texts)
        for tag, text in read_exif_texts(found.exif, _PROGRAM_TAGS).items():
            keyword, _, content = text.partition(":")  # as ComfyUI's "workflow:{…}"
            texts |= {keyword: content} if is_json(content) else {f"EXIF {tag}": text}
    return texts


@contextlib.contextmanager
def _opened(file: pathlib.Path | IO[bytes]) -> Iterator[IO[bytes]]:
    with file.open("rb") if isinstance(file, pathlib.Path) else contextlib.nullcontext(file) as opened:
        opened.seek(0)
        yield opened


def _read_texts(file: pathlib.Path | IO[bytes]) -> tuple[str | bytes | None, str | None]:
    """Return Noria's JSON and A1111's text, each None if there is none."""
    with _opened(file) as opened:
        found = find_metadata(opened, (_NORIA_KEYWORD, _A1111_KEYWORD))
    if found.texts:
        return found.texts.get(_NORIA_KEYWORD), found.texts.get(_A1111_KEYWORD)
    entries = read_exif(found.exif, (_MAKER_NOTE, _USER_COMMENT))
    maker_note, user_comment = entries.get(_MAKER_NOTE), entries.get(_USER_COMMENT)
    noria_json = (
        maker_note.removeprefix(_MAKER_NOTE_PREFIX)
        if isinstance(maker_note, bytes) and maker_note.startswith(_MAKER_NOTE_PREFIX)
        else None
    )
    infotext = _decode_user_comment(user_comment) if isinstance(user_comment, bytes) else user_comment
    return noria_json, infotext


def _decode_user_comment(comment: bytes) -> str:
    """Decode EXIF's UserComment: 8 bytes that name the encoding, then the text.

    Programs differ in UTF-16's byte order.
    """
    text = comment[len(_UNICODE_PREFIX) :]
    if comment.startswith(_UNICODE_PREFIX):
        is_little_endian = text[1::2].count(0) > text[::2].count(0)  # in most text every second byte is 0
        return text.decode("utf-16-le" if is_little_endian else "utf-16-be", errors="replace")
    names_encoding = comment.startswith((b"ASCII\0\0\0", b"\0" * 8))
    return (text if names_encoding else comment).decode("utf-8", errors="replace")

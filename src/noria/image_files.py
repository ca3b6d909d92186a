"""Where an image file keeps its parameters: our JSON, and A1111's text beside it for everyone else.

    file   our JSON                              A1111's text
    PNG    an iTXt chunk "noria"                 a tEXt or iTXt chunk "parameters", as A1111 writes it
    WebP   EXIF's MakerNote                      EXIF's UserComment, "UNICODE" and big-endian UTF-16, as A1111 writes it
    JPEG   the same                              the same, if both fit into its 64 kB

Pixels are never touched in writing and never decoded in reading, so that a file that would unpack to gigabytes costs nothing.
"""

import pathlib
import struct
import warnings
from typing import IO, Any

from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from noria.errors import ImageFileError, shown
from noria.infotext import of_infotext, to_infotext
from noria.parameters import Parameters, of_json, to_json
from noria.request import ImageFormat

_OURS, _A1111S = "noria", "parameters"  # PNG's keywords
_SOFTWARE, _EXIF_IFD, _MAKER_NOTE, _USER_COMMENT = 0x0131, 0x8769, 0x927C, 0x9286  # tags of EXIF 2.32
_MAGIC = b"noria\0"  # at the head of our MakerNote: cameras have theirs
_ENCODED_AS = b"UNICODE\0"
_LONGEST_TEXT = 2**20  # characters: ours have a few thousand, and a hostile one takes seconds for each million
_LONGEST_JPEG_SEGMENT = 65_533 - len(b"Exif\0\0")
_FORMATS = ("PNG", "WEBP", "JPEG")
# What Pillow raises on files that are cut short, or made to hurt.
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, struct.error)


def save_options(parameters: Parameters, file_format: ImageFormat) -> dict[str, Any]:
    """The arguments of Pillow's `Image.save` that write `parameters`; none if a JPEG cannot hold even the JSON."""
    ours, a1111s = to_json(parameters), to_infotext(parameters)
    if file_format == "png":
        chunks = PngInfo()
        chunks.add_text(_A1111S, a1111s.replace("\0", ""))  # which would end the chunk's text
        chunks.add_itxt(_OURS, ours.decode())
        return {"pnginfo": chunks}
    exif = _exif(ours, a1111s)
    if file_format == "jpeg" and len(exif) > _LONGEST_JPEG_SEGMENT:
        exif = _exif(ours, None)
    return {} if file_format == "jpeg" and len(exif) > _LONGEST_JPEG_SEGMENT else {"exif": exif}


def _exif(ours: bytes, a1111s: str | None) -> bytes:
    exif = Image.Exif()
    exif[_SOFTWARE] = "noria"
    inner = exif.get_ifd(_EXIF_IFD)
    inner[_MAKER_NOTE] = _MAGIC + ours
    if a1111s is not None:
        inner[_USER_COMMENT] = _ENCODED_AS + a1111s.encode("utf-16-be")
    return exif.tobytes()


def read_parameters(file: pathlib.Path | IO[bytes], name: str = "") -> Parameters:
    """What `file`, a PNG, WebP or JPEG of whatever origin, says of how it was made; errors call it `name`, or by its path.

    Raises:
        ImageFileError: it cannot be read, is no such image, is damaged, or says nothing.

    """
    name = name or shown(str(file))
    if isinstance(file, pathlib.Path) and file.exists() and not file.is_file():
        raise ImageFileError(f"{name} is not a file.")
    try:
        ours, a1111s = _texts(file)
    except FileNotFoundError as error:
        raise ImageFileError(f"there is no file {name}.") from error
    except PermissionError as error:
        raise ImageFileError(f"{name} cannot be read by this user.") from error
    except UnidentifiedImageError as error:
        raise ImageFileError(f"{name} is not an image that carries parameters: {', '.join(_FORMATS)}.") from error
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise ImageFileError(f"{name} is damaged: {error}.") from error
    if max(len(ours or ""), len(a1111s or "")) > _LONGEST_TEXT:
        raise ImageFileError(f"{name} says too much of how it was made: at most {_LONGEST_TEXT} characters are read.")
    try:
        if ours is not None:
            return of_json(ours)
    except ImageFileError as error:
        raise ImageFileError(f"{name}: {error.message}") from error
    if not a1111s or not a1111s.strip():
        raise ImageFileError(f"{name} says nothing of how it was made.")
    return of_infotext(a1111s)


def _texts(file: pathlib.Path | IO[bytes]) -> tuple[str | bytes | None, str | None]:
    """Our JSON and A1111's text, each None where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a bomb, which is not set off, and of EXIF that is then found broken
        with Image.open(file, formats=_FORMATS) as image:
            if image.format == "PNG" and (_OURS in image.info or _A1111S in image.info):
                return _text(image.info.get(_OURS)), _text(image.info.get(_A1111S))
            exif = Image.Exif()
            exif.load(image.info.get("exif", b""))  # `image.getexif` would decode a PNG's pixels to look behind them
            inner = exif.get_ifd(_EXIF_IFD)
    note, comment = inner.get(_MAKER_NOTE), inner.get(_USER_COMMENT)
    ours = note.removeprefix(_MAGIC) if isinstance(note, bytes) and note.startswith(_MAGIC) else None
    return ours, _decoded(comment) if isinstance(comment, bytes) else _text(comment)


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str) else None  # Pillow has a str of its own for iTXt


def _decoded(comment: bytes) -> str:
    """EXIF's UserComment: 8 bytes that name an encoding, then the text; programs do not agree on UTF-16's byte order."""
    text = comment[len(_ENCODED_AS) :]
    if comment.startswith(_ENCODED_AS):
        little = text[1::2].count(0) > text[::2].count(0)  # of most text every second byte is 0
        return text.decode("utf-16-le" if little else "utf-16-be", errors="replace")
    has_name = comment.startswith((b"ASCII\0\0\0", b"\0" * 8))
    return (text if has_name else comment).decode("utf-8", errors="replace")

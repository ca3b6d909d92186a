"""The Content-Encoding of request bodies (RFC 9110, 8.4): gzip on routes that take it, else none."""

import zlib

from starlette.requests import Request

from noria.errors import BodyTooLarge, InvalidBody, UnsupportedMediaType, short_repr

_GZIP_NAMES = ("gzip", "x-gzip")  # RFC 9110, 8.4.1.3: both are the same
_MAX_MEMBERS = 16  # members of one body; compressors write one; each copies what follows it
_GZIP_WINDOW = 16 + zlib.MAX_WBITS  # zlib's number for gzip's head and checksum


def check_encoding(http: Request, *, takes_gzip: bool = False) -> bool:
    """Return whether the body is compressed by gzip. Raises UnsupportedMediaType for any other encoding."""
    if "content-encoding" not in http.headers:
        return False
    sent = ", ".join(http.headers.getlist("content-encoding"))
    codings = [name for each in sent.lower().split(",") if (name := each.strip()) not in ("", "identity")]
    if not codings:
        return False
    if takes_gzip and len(codings) == 1 and codings[0] in _GZIP_NAMES:
        return True
    allowed = "the body compressed once by gzip, or uncompressed" if takes_gzip else "the body uncompressed"
    raise UnsupportedMediaType(f"Content-Encoding is {short_repr(sent)}; send {allowed}.")


def decompress_gzip(compressed: bytes | bytearray, max_bytes: int) -> bytes:
    """Return the content of one or several members of gzip (RFC 1952); zeros may follow the last one.

    Raises:
        BodyTooLarge: the content is longer than `max_bytes`; about as much of it was decompressed.
        InvalidBody: it is not gzip, is incomplete, has other bytes behind it or too many members.
    """
    content, rest = b"", compressed
    for _ in range(_MAX_MEMBERS):
        member = zlib.decompressobj(_GZIP_WINDOW)
        try:
            content += member.decompress(rest, max_bytes + 1 - len(content))
        except zlib.error as error:
            raise InvalidBody(f"the body is not gzip, as Content-Encoding says: {error}.") from error
        if len(content) > max_bytes:
            raise BodyTooLarge(f"the body is longer than {max_bytes} bytes when it is decompressed.")
        if not member.eof:
            raise InvalidBody("the body is not complete: its gzip data end too early.")
        rest = member.unused_data
        if not rest.strip(b"\0"):
            return content
    raise InvalidBody(f"the body has more than {_MAX_MEMBERS} members of gzip; send one.")

"""Headers, parameters and the URL of the server at their edges."""

import pytest
from starlette.requests import Request

from noria.errors import InvalidField
from noria.frontend.http.request_head import RequestHeaders, base_url, read_flag, read_number


def request(query="", host="a.example", prefix=None):
    headers = [(b"host", host.encode())] + ([] if prefix is None else [(b"x-forwarded-prefix", prefix.encode())])
    scope = {"type": "http", "method": "GET", "scheme": "https", "path": "/x", "query_string": query.encode()}
    return Request(scope | {"headers": headers})


def test_of_several_headers_with_one_name_the_first_counts_and_all_are_listed():
    headers = RequestHeaders([(b"a", b"1"), (b"b", b"\xfc"), (b"a", b"2")])
    assert (dict(headers), headers.getlist("a"), headers.getlist("c")) == ({"a": "1", "b": "ü"}, ["1", "2"], [])


def test_a_number_is_one_to_its_maximum():
    for query, number in (("", None), ("n=1", 1), ("n=20", 20), ("n=0000000000000007", 7)):
        assert read_number(request(query), "n", 20) == number
    for text in ("0", "21", "-1", "", "x", "1.0", "00000000000000007"):
        with pytest.raises(InvalidField) as raised:
            read_number(request(f"n={text}"), "n", 20)
        assert (raised.value.field, raised.value.message) == ("n", f"n is {text!r}; allowed are 1 to 20.")


def test_a_flag_is_true_or_false():
    for query, default, flag in (
        ("", True, True),
        ("", False, False),
        ("f=true", False, True),
        ("f=false", True, False),
    ):
        assert read_flag(request(query), "f", default) is flag
    for text in ("", "1", "True"):
        with pytest.raises(InvalidField) as raised:
            read_flag(request(f"f={text}"), "f", True)
        assert (raised.value.field, raised.value.message) == ("f", f"f is {text!r}; allowed are true, false.")


def test_the_url_of_the_server_is_below_the_first_prefix():
    for prefix, path in ((None, ""), ("", ""), ("/", ""), ("/a/b/", "a/b/"), (" /a , /b", "a/"), ("/.well", ".well/")):
        assert base_url(request(prefix=prefix)) == f"https://a.example/{path}"
    for prefix in ("a", "//a", "/..", "/a/./b", "/a?b", "/é"):
        with pytest.raises(InvalidField) as raised:
            base_url(request(prefix=prefix))
        assert raised.value.field == "X-Forwarded-Prefix"


def test_the_url_of_the_server_is_not_long():
    longest = "/" + "p" * (300 - len("https://a.example//"))
    assert len(base_url(request(prefix=longest))) == 300
    with pytest.raises(InvalidField) as raised:
        base_url(request(prefix=f"{longest}p"))
    assert (raised.value.field, "at most 300 characters" in raised.value.message) == ("Host", True)

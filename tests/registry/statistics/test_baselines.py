"""References of versions in the registry, on SQLite and on PostgreSQL, and from files of training data."""

import pathlib

import pytest

from databases import on_both
from noria.errors import RegistryError
from noria.registry.changes import Change
from noria.registry.model_folder import read_model
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from noria.registry.statistics.baselines import BaselineStore
from noria.registry.statistics.training_data import count_columns, read_columns
from noria.statistics.distributions import CategoryCounts, Histogram
from noria.statistics.variables import BUILT_IN_VARIABLES, Variable

HISTOGRAM = Histogram((1.0, 2.0), [1, 2, 3], 12.5, 1)
CATEGORIES = CategoryCounts(counts={"ddim": 3}, other=1)


def change(at: float) -> Change:
    return Change(at, "me", f"at {at}")


@on_both
def test_the_last_reference_of_a_variable_holds_until_it_has_none(database, tiny_folder, tmp_path):
    engine = open_registry_database(database, tmp_path)
    try:
        version, _ = ModelStore(engine).add("shapes", read_model(str(tiny_folder)), change(1))
        store = BaselineStore(engine)
        store.set("t2i", version, {"steps": HISTOGRAM, "scheduler": CATEGORIES}, change(2))
        store.set("t2i", version, {"steps": Histogram((5.0,))}, change(3))
        store.set("other", version, {"steps": HISTOGRAM}, change(4))
        found = {(each.endpoint, each.variable): each for each in store.all()}
        assert {key: each.counts for key, each in found.items()} == {
            ("t2i", "steps"): Histogram((5.0,)),
            ("t2i", "scheduler"): CATEGORIES,
            ("other", "steps"): HISTOGRAM,
        }
        steps = found["t2i", "steps"]
        assert (steps.version, steps.fingerprint, steps.at, steps.by, steps.why) == (
            "shapes@1",
            version.fingerprint,
            3,
            "me",
            "at 3",
        )
        store.set("t2i", version, {"steps": None}, change(5))
        assert {(each.endpoint, each.variable) for each in store.all()} == {("t2i", "scheduler"), ("other", "steps")}
        assert store.version_named("shapes@1").id == store.version_named(version.fingerprint).id == version.id
        with pytest.raises(RegistryError, match=r"no version with the fingerprint 0123456789ab.*noria models add"):
            store.version_named("0123456789ab")
    finally:
        engine.dispose()


VARIABLES = {**BUILT_IN_VARIABLES, "price": Variable("price", "scalar", (1.0, 2.0))}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt,price,scheduler\na red circle,1,a\nblue,2.5,b\n,nan,a\n"),
        ("a.tsv", "prompt\tprice\tscheduler\r\na red circle\t1\ta\r\n\r\nblue\t2.5\tb\r\n\tnan\ta\r\n"),
        ("a.csv", 'prompt;price; scheduler\n"a red circle";1;a\nblue;2.5;b;\n;nan;a\n;;\n'),
        ("a.csv", "prompt,price,scheduler\ra red circle,1,a\rblue,2.5,b\r,nan,a\r"),
        ("a.csv", "sep=|\r\nprompt|price|scheduler\r\na red circle|1|a\r\nblue|2.5|b\r\n|nan|a\r\n"),
        ("a.csv", '"prompt";"price";"scheduler"\n"a red circle";1;"a"\n"blue";2.5;b\n;nan;a\n'),
        ("a.csv", " \n\nprompt,price,scheduler\na red circle,1,a\nblue,2.5,b\n,nan,a\n"),
        ("a.json", '{"prompt": ["a red circle", "blue"], "price": [1, 2.5, "nan"], "scheduler": ["a", "b", "a"]}'),
        (
            "a.json",
            '[{"prompt": "a red circle", "price": 1, "scheduler": "a"}, {"price": 2.5, "scheduler": "b"}, '
            '{"prompt": "blue", "price": "nan", "scheduler": "a"}, {"prompt": null}]',
        ),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be with a mark"])
def test_training_data_is_counted_by_column(tmp_path: pathlib.Path, name, text, encoding):
    mark, name_of_encoding = ("\ufeff", "utf-16-be") if encoding.endswith("mark") else ("", encoding)
    (tmp_path / name).write_bytes((mark + text).encode(name_of_encoding))
    counts = count_columns(read_columns(tmp_path / name), VARIABLES)
    assert counts["price"] == Histogram((1.0, 2.0), [1, 0, 1], 3.5, 1)
    assert counts["scheduler"] == CategoryCounts(counts={"a": 2, "b": 1})
    assert (counts["prompt_chars"].sum, counts["prompt_words"].sum) == (16, 4)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "[1, 2]", "an object of lists, or a list of objects"),
        ("a.json", "{", "cannot be read"),
        ("missing.json", None, "No such file"),
        ("a.csv", "price,x,price\n1,2,3\n", "several columns of one name: 'price'"),
        ("a.csv", "price,x\n1,2\n3\n", "line 3: the row has 1 cells, the header names 2: price, x, divided by ','"),
        ("a.csv", "\nsep=;\nprice;x\n1;2;3\n", "line 4: the row has 3 cells"),
        ("a.csv", "price,x\n1,2,3\n", "line 2: the row has 3 cells"),
        ("a.csv", "prompt\na, b\n", "line 2: the row has 2 cells.*into quotes"),
        ("a.csv", "price,,x\n1,2,3\n", "line 2: the row has 3 cells, the header names 2: price, x.*a name"),
        ("a.csv", "price\n1\n".encode("utf-16-le"), "UTF-16 without a byte order mark"),
        ("a.csv", "prompt\nrød\n".encode("latin-1"), "cannot be read: 'utf-8' codec.*in UTF-8, or in UTF-16"),
        ("a.csv", 'price\n"1', "cannot be read: unexpected end of data"),
        ("a.csv", "price\nx\n", "price has the value 'x'; the values of a scalar are numbers"),
    ],
)
def test_a_file_of_another_form_is_an_error(tmp_path: pathlib.Path, name, text, says):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RegistryError, match=says):
        count_columns(read_columns(tmp_path / name), VARIABLES)

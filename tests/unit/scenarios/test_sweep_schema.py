"""How a value of an axis is named in a row, and how ``--set`` writes it."""

import pytest

from scenarios.document import Document
from scenarios.sweep_schema import value_of_key
from scenarios.yaml_text import read_value


@pytest.mark.parametrize(
    ("value", "name", "written"),
    [
        (1e-05, "1e-05", "1.0e-05"),
        (2.5e-07, "2.5e-07", "2.5e-07"),
        (0.25, "0.25", "0.25"),
        ([1e-05, 2], "1e-05-2", "[1.0e-05, 2]"),
        ([7, 0, 5], "7-0-5", "[7, 0, 5]"),
        (True, "true", "true"),
        ("true", "true", '"true"'),
        ("1", "1", '"1"'),
        ("1e-05", "1e-05", "1e-05"),
        ("standard", "standard", "standard"),
    ],
    ids=repr,
)
def test_a_value_is_written_so_that_yaml_reads_it_back(value, name, written):
    found = value_of_key("key", Document(value=value))
    assert (found.name, found.written) == (name, written)
    read = read_value(written)
    assert (read.value, type(read.value), read.problems) == (value, type(value), [])

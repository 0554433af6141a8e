import pytest

from scenarios.yaml_text import read_value

TEXT = """\
moe:
  recipe: bf16
batch: {tokens: [7, 1e3]}
"""


def test_a_part_knows_its_own_lines_and_hints():
    part = read_value(TEXT).part(("batch", "tokens"))
    assert part.value == [7, "1e3"]
    assert part.origins == {(): 3, (0,): 3, (1,): 3}
    assert list(part.hints) == [(1,)]


def test_a_part_is_a_copy():
    document = read_value(TEXT)
    document.part(("moe",)).value["recipe"] = "mxfp8"
    assert document.value["moe"] == {"recipe": "bf16"}


def test_what_is_put_brings_its_places_and_displaces_those_that_were_there():
    document = read_value(TEXT)
    document.put(("batch", "tokens"), read_value("\n[5]"))
    assert document.value["batch"] == {"tokens": [5]}
    assert document.origin(("batch", "tokens", 0)) == 2
    assert ("batch", "tokens", 1) not in document.origins
    assert document.hints == {}


def test_sections_on_the_way_are_made():
    document = read_value(TEXT)
    document.put(("run", "backends", "gemm"), read_value("torch"))
    assert document.value["run"] == {"backends": {"gemm": "torch"}}


def test_what_is_put_twice_is_not_shared():
    first, second, part = read_value(TEXT), read_value(TEXT), read_value("{ep: 4}")
    first.put(("parallel",), part)
    second.put(("parallel",), part)
    first.value["parallel"]["ep"] = 8
    assert second.value["parallel"] == {"ep": 4}


def test_a_value_holds_no_keys():
    with pytest.raises(ValueError, match="'recipe' holds no keys"):
        read_value(TEXT).put(("moe", "recipe", "name"), read_value("bf16"))

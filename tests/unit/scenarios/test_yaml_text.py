import pytest

from scenarios.errors import ScenarioError
from scenarios.yaml_text import read_file, read_value


def first_problem(text):
    return str(read_value(text).problems[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("0", 0),
        ("0x10", 16),
        ("1_000", 1000),
        ("1.5", 1.5),
        ("1.0e-3", 0.001),
        ("true", True),
        ("null", None),
        ("", None),
        ("abc", "abc"),
        ("'1e-3'", "1e-3"),
        ("2026-01-31", "2026-01-31"),
        ("[1, [a, null]]", [1, ["a", None]]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
    ],
)
def test_values_are_read_as_yaml_means_them(text, value):
    read = read_value(text)
    assert read.value == value
    assert type(read.value) is type(value)
    assert (read.problems, read.hints) == ([], {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 010", "line 1: a: '010' is octal in YAML and means 8; write 10"),
        ("a: -010", "line 1: a: '-010' is octal in YAML and means -8; write -10"),
        ("a: 1:30", "line 1: a: '1:30' is base 60 in YAML and means 90; quote it"),
        ("a: 1\nb: 2\na: 3", "line 3: a: is given twice, first in line 1"),
        ("a: {b: 1, b: 2}", "line 1: a.b: is given twice, first in line 1"),
        ("on: 1", "line 1: the key 'on' is not text; quote it"),
        ("3: 1", "line 1: the key '3' is not text; quote it"),
        ("? [a]\n: 1", "line 1: the key 'a list or mapping' is not text; quote it"),
        ("a: !!python/name:os.system x", "line 1: a: the tag 'tag:yaml.org,2002:python/name:"),
        ("a: !mine x", "line 1: a: the tag '!mine' is not read in a scenario"),
        ("a: !mine {b: 1}", "line 1: a: the tag '!mine' is not read in a scenario"),
        ("a:\n\tb: 1", "line 2: a tab indents here; YAML indents with spaces"),
        ("a: 1\n---\nb: 1", "line 2: a second document ('---') begins"),
        ("a: [1", "line 1: is not YAML: "),
        ("a: *x", "line 1: is not YAML: found undefined alias"),
        ("a: \x07", "is not YAML: unacceptable character #x0007"),
        ("a: " + "9" * 5000, "line 1: a: '99999999999999999999'... is no number"),
    ],
)
def test_what_cannot_be_meant_is_a_problem(text, message):
    assert first_problem(text).startswith(message)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1e-3", "'1e-3' was read as text (YAML wants 1.0e-3)"),
        ("1e2", "'1e2' was read as text (YAML wants 1.0e+2)"),
        ("1.5e3", "'1.5e3' was read as text (YAML wants 1.5e+3)"),
        ("08", "'08' was read as text (drop the leading zero)"),
        ("on", "'on' is true in YAML; quote it if text is meant"),
        ("No", "'No' is false in YAML; quote it if text is meant"),
    ],
)
def test_a_surprising_reading_leaves_a_hint(text, hint):
    assert read_value(text).hints == {(): hint}


def test_lines_of_keys_and_items_are_kept():
    origins = read_value("a: 1\nb:\n  - x\n  - {c: 1}\n").origins
    assert origins == {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4}


def test_a_missing_key_stands_where_its_container_does():
    assert read_value("a: 1\nb:\n  c: 1\n").origin(("b", "d", 3)) == 2


def test_an_alias_bomb_ends_soon():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "more than 20000 values, counting aliases" in first_problem("\n".join(lines))


def test_an_alias_of_itself_ends_soon():
    assert "nested more than 32 deep, following aliases" in first_problem("a: &a [*a]")


def test_ten_thousand_brackets_are_one_problem():
    assert first_problem("[" * 10_000) == "is nested too deeply"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty; a scenario is `key: value` lines"),
        (b"# only a comment\n", "it is empty"),
        (b"- a\n", "its top level is no mapping"),
        (b"just text", "its top level is no mapping"),
        (b"a: 1\nb: \xff\n", "line 2: is not UTF-8: byte 0xff"),
        (b"a: [1\n", "is not YAML"),
        (b"#" * 1_000_001, "has 1000001 bytes"),
    ],
    ids=["empty", "comment", "list", "text", "latin", "syntax", "huge"],
)
def test_a_file_that_holds_no_scenario_is_one_problem(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        read_file(path)
    first, second = str(caught.value).splitlines()
    assert first == f"{path}: 1 problem(s)"
    assert message in second


def test_a_missing_file_is_one_problem(tmp_path):
    with pytest.raises(ScenarioError, match="no such file"):
        read_file(tmp_path / "none.yaml")


def test_a_directory_is_no_scenario(tmp_path):
    with pytest.raises(ScenarioError, match="no file that can be read"):
        read_file(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbfname: a\n")
    assert read_file(tmp_path / "x.yaml").value == {"name": "a"}

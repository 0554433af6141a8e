"""What the sentence of a result says of the first divergence."""

from actors.driver import run_scenario


def summary(load, *inject):
    return run_scenario(load(inject=inject)).result.summary


def test_a_wrong_scale_is_told_with_its_size(load):
    words = summary(load, "scale_rounded_down:rank=1")
    assert "hidden_states_scale is " in words
    assert "times their size on average" in words
    assert "every wrong scale is 0.5 times what is due" in words


def test_a_wrong_code_is_called_a_code(load):
    words = summary(load, "scales_rounded_up_late:rank=1")
    assert "hidden_states is code " in words
    assert "scale rounded up to a power of two after its exact value made the codes" in words


def test_a_value_in_a_band_is_told_with_its_band(load):
    words = summary(load, "partial_dropped:rank=1")
    assert "routed is " in words
    assert "(band " in words

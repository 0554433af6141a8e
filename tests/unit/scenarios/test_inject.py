import pickle

import pytest

from scenarios.inject import FaultSpec, parse_inject


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("swap_gate_up", {}),
        ("scale:rank=3", {"rank": 3}),
        ("scale:rank=3,experts=[1,2],by=1.5", {"rank": 3, "experts": [1, 2], "by": 1.5}),
        ("scale:stage=gemm1,on=true,none=null", {"stage": "gemm1", "on": True, "none": None}),
        ("scale:a=[1,2],b=[3,4]", {"a": [1, 2], "b": [3, 4]}),
        ("poison:value=.inf", {"value": float("inf")}),
    ],
)
def test_parameters_are_yaml_and_commas_in_brackets_do_not_split(text, params):
    assert parse_inject(text) == FaultSpec(text.partition(":")[0], params)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no fault"),
        ("Fault", "is no fault"),
        ("a fault", "is no fault"),
        ("fault:", "ends in ':'"),
        ("fault:rank", "is no param=value"),
        ("fault:rank=1,", "is no param=value"),
        ("fault:=1", "is no param=value"),
        ("fault:rank=1,rank=2", "twice"),
        ("fault:rank={a: 1}", "no scalar or flat list"),
        ("fault:rank=[[1]]", "no scalar or flat list"),
        ("fault:by=1e-3", "YAML wants 1.0e-3"),
        ("fault:by=010", "octal"),
        ("fault:by=[1", "is not YAML"),
    ],
)
def test_what_is_no_fault_is_refused(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_inject(text)


def test_a_fault_travels_to_another_process():
    fault = parse_inject("scale:rank=3")
    assert pickle.loads(pickle.dumps(fault)) == fault

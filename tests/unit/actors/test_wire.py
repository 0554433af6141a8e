"""A tensor survives the wire with its bytes, dtype, shape and strides."""

import pickle
import warnings

import numpy as np
import pytest
import torch

from actors.rank_program import RankReport
from actors.wire import PackedTensor, pack, pack_report, unpack, unpack_report
from moe.formats import Stage
from moe.trace import RankTrace
from topology.collectives import CollectiveCall

CODES = torch.arange(256, dtype=torch.uint8)

TENSORS = {
    "e4m3": CODES.view(torch.float8_e4m3fn).view(16, 16),
    "e8m0": CODES.view(torch.float8_e8m0fnu),
    "bf16": torch.tensor([[1.5, -0.0, float("nan")]], dtype=torch.bfloat16),
    "int32 MN-major": torch.arange(24, dtype=torch.int32).view(3, 8).T[:6],
    "one MN-major column": torch.arange(8, dtype=torch.int32).view(1, 8).T[:5],
    "every second row": torch.arange(12, dtype=torch.int64).view(6, 2)[::2],
    "a repeated row": torch.tensor([[1.0, 2.0]]).expand(3, 2),
    "a slice that starts late": torch.arange(10, dtype=torch.float32)[4:],
    "no rows": torch.empty((0, 512), dtype=torch.float8_e4m3fn),
    "no rows, MN-major": torch.empty((2, 0), dtype=torch.int32).T,
    "scalar": torch.tensor(3.25),
    "bool": torch.tensor([True, False]),
}


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


def sent(packed: PackedTensor) -> PackedTensor:
    """As Ray hands it over: pickled out of band, with read-only memory."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(text, buffers=[bytes(buffer) for buffer in buffers])
    assert isinstance(arrived, PackedTensor)
    return arrived


def report(stages: dict[Stage, dict[str, torch.Tensor]]) -> RankReport:
    call = CollectiveCall(stage="dispatch", op="all_to_all_v", group=(0, 1), payload_bytes=96)
    return RankReport(
        trace=RankTrace(rank=1, stages=stages), calls=(call,), acted=frozenset({"x"}), seconds=0.25
    )


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_bytes_arrive_unchanged(tensor):
    assert as_bytes(unpack(sent(pack(tensor)))) == as_bytes(tensor)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_dtype_shape_and_strides_arrive_unchanged(tensor):
    got = unpack(sent(pack(tensor)))
    assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


def test_only_the_bytes_between_first_and_last_element_travel():
    column = torch.zeros((4, 100), dtype=torch.int32)[:, 7:8]
    assert pack(column).data.nbytes == (3 * 100 + 1) * 4


def test_packing_copies_nothing():
    tensor = torch.zeros(4)
    packed = pack(tensor)
    tensor[0] = 1.0
    assert unpack(packed).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_unpacking_copies_nothing_and_stays_silent_on_read_only_memory():
    packed = pack(torch.arange(4, dtype=torch.int64))
    data = np.frombuffer(packed.data.tobytes(), dtype=np.uint8)
    read_only = PackedTensor(dtype="int64", shape=(4,), strides=(1,), data=data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = unpack(read_only)
    assert tensor.data_ptr() == data.__array_interface__["data"][0]


def test_a_report_arrives_with_its_calls_and_seconds():
    there = report({Stage.ROUTE: {"topk_ids": torch.tensor([[1, 2]])}})
    here = unpack_report(pack_report(there), known={})
    assert (here.trace.rank, here.calls, here.seconds) == (1, there.calls, 0.25)
    assert here.trace[Stage.ROUTE]["topk_ids"].tolist() == [[1, 2]]


def test_stages_the_receiver_knows_do_not_travel():
    there = report({Stage.WEIGHTS: {"w": torch.ones(2)}, Stage.ROUTE: {"x": torch.ones(1)}})
    assert list(pack_report(there, known=[Stage.WEIGHTS]).stages) == ["route"]


def test_stages_the_receiver_knows_are_put_back_in_front():
    known = {Stage.WEIGHTS: {"w": torch.ones(2)}}
    there = report({**known, Stage.ROUTE: {"x": torch.ones(1)}})
    here = unpack_report(pack_report(there, known=known), known=known)
    assert list(here.trace.stages) == [Stage.WEIGHTS, Stage.ROUTE]
    assert here.trace[Stage.WEIGHTS]["w"] is known[Stage.WEIGHTS]["w"]

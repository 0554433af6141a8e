"""Grids of ranks against literals and against a plain loop over coordinates."""

from itertools import chain, combinations, product

import pytest

from topology.mesh import ProcessMesh

MESHES = [
    ProcessMesh(("dp",), (1,)),
    ProcessMesh(("dp", "tp"), (2, 4)),
    ProcessMesh(("dp", "cp", "tp"), (2, 3, 2)),
    ProcessMesh(("a", "b", "c", "d"), (2, 1, 3, 2)),
]
SPANS = [
    pytest.param(mesh, axes, id=f"{'x'.join(map(str, mesh.shape))}-{'+'.join(axes) or 'none'}")
    for mesh in MESHES
    for size in range(len(mesh.axes) + 1)
    for axes in combinations(mesh.axes, size)
]


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("dp", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("cp", [0, 0, 1, 1, 0, 0, 1, 1]),
        ("tp", [0, 1, 0, 1, 0, 1, 0, 1]),
    ],
)
def test_the_last_axis_counts_fastest(axis, expected):
    mesh = ProcessMesh(("dp", "cp", "tp"), (2, 2, 2))
    assert [mesh.coord(rank, axis) for rank in range(8)] == expected


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("tp",), ((0, 1), (2, 3), (4, 5), (6, 7))),
        (("dp",), ((0, 4), (1, 5), (2, 6), (3, 7))),
        (("dp", "tp"), ((0, 1, 4, 5), (2, 3, 6, 7))),
        ((), ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,))),
    ],
    ids=["tp", "dp", "dp+tp", "none"],
)
def test_groups_share_all_other_coordinates(axes, expected):
    assert ProcessMesh(("dp", "cp", "tp"), (2, 2, 2)).groups(axes) == expected


@pytest.mark.parametrize(("mesh", "axes"), SPANS)
def test_groups_partition_the_world(mesh, axes):
    assert sorted(chain(*mesh.groups(axes))) == list(range(mesh.size))


@pytest.mark.parametrize(("mesh", "axes"), SPANS)
def test_ranks_share_a_group_exactly_when_they_differ_in_its_axes_alone(mesh, axes):
    coordinates = list(product(*map(range, mesh.shape)))
    others = [mesh.axes.index(axis) for axis in mesh.axes if axis not in axes]
    for rank in range(mesh.size):
        expected = tuple(
            peer
            for peer in range(mesh.size)
            if all(coordinates[peer][i] == coordinates[rank][i] for i in others)
        )
        assert mesh.group(rank, axes) == expected


def test_the_order_of_the_axes_asked_for_does_not_matter():
    mesh = ProcessMesh(("dp", "cp", "tp"), (2, 3, 2))
    assert mesh.groups(("tp", "dp")) == mesh.groups(("dp", "tp"))


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (("dp", "tp"), (4,), "2 axis names for 1 degrees"),
        (("dp", "tp"), (4, 0), r"degrees must be at least 1, got \(4, 0\)"),
        (("dp",), (-2,), r"degrees must be at least 1, got \(-2,\)"),
    ],
    ids=["names", "zero", "negative"],
)
def test_a_mesh_that_cannot_be_is_refused(axes, shape, message):
    with pytest.raises(ValueError, match=message):
        ProcessMesh(axes, shape)


def test_a_group_along_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="no axis pp among dp, tp"):
        ProcessMesh(("dp", "tp"), (2, 2)).groups(("dp", "pp"))


@pytest.mark.parametrize("rank", [-1, 4])
def test_the_group_of_a_rank_outside_the_mesh_is_refused(rank):
    with pytest.raises(ValueError, match=f"no rank {rank} in a mesh of 4"):
        ProcessMesh(("dp", "tp"), (2, 2)).group(rank, ("tp",))

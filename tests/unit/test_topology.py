"""The shape: every row of the table in `mesh.topology`, and the arithmetic of every refusal."""

from __future__ import annotations

import pytest

from mesh.topology import NODES_MAX, ShapeError, Topology, resolve_topology


@pytest.mark.parametrize(
    ("said", "nodes", "gpus"),
    [
        ({}, 1, 0),
        ({"gpu_wanted": True}, 1, 1),
        ({"gpu_count": 8, "gpu_wanted": True}, 1, 8),
        ({"gpus_per_node": 4}, 1, 4),
        ({"nodes": 2}, 2, 0),
        ({"nodes": 2, "gpu_wanted": True}, 2, 1),
        ({"nodes": 2, "gpu_count": 8}, 2, 8),
        ({"nodes": 2, "gpus_per_node": 4}, 2, 4),
        ({"nodes": 2, "gpus_per_node": 4, "gpu_count": 4}, 2, 4),
        ({"total_gpus": 8}, 1, 8),
        ({"total_gpus": 16}, 2, 8),
        ({"total_gpus": 12}, 3, 4),
        ({"total_gpus": 10}, 5, 2),
        ({"total_gpus": 7}, 7, 1),
        ({"total_gpus": 64}, 8, 8),
        ({"total_gpus": 16, "gpus_per_node": 4}, 4, 4),
        ({"total_gpus": 8, "gpus_per_node": 8}, 1, 8),
        ({"total_gpus": 16, "gpu_count": 8}, 2, 8),
        ({"total_gpus": 4, "machine_sizes": (1, 2)}, 2, 2),
        ({"total_gpus": 64, "machine_sizes": (1, 2)}, 8, 8),
    ],
)
def test_a_shape_is_resolved(said: dict[str, int], nodes: int, gpus: int) -> None:
    assert resolve_topology(**said) == Topology(nodes=nodes, gpus_per_node=gpus)  # type: ignore[arg-type]


def test_a_cpu_machine_runs_one_process_and_a_gpu_machine_one_per_gpu() -> None:
    assert Topology(nodes=3, gpus_per_node=0).world_size == 3
    assert Topology(nodes=3, gpus_per_node=4).world_size == 12


@pytest.mark.parametrize(
    ("said", "field", "words"),
    [
        ({"nodes": 0}, "nodes", ["2 to 8"]),
        ({"nodes": -1}, "nodes", ["2 to 8"]),
        ({"nodes": 1}, "nodes", ["2 to 8", "for one machine leave it out"]),
        ({"nodes": 9}, "nodes", ["2 to 8", "at most 8 members"]),
        ({"gpus_per_node": 3}, "gpusPerNode", ["1, 2, 4 or 8"]),
        ({"gpu_count": 16}, "count", ["1, 2, 4 or 8"]),
        ({"total_gpus": 0}, "totalGPUs", ["1 to 64"]),
        ({"total_gpus": 65}, "totalGPUs", ["1 to 64", "8 machines of 8"]),
        ({"total_gpus": 11}, "totalGPUs", ["11 machines of 1", "10 or 12"]),
        ({"total_gpus": 12, "gpus_per_node": 8}, "totalGPUs", ["12 = 1 × 8 + 4", "8 or 16", "12 = 3 × 4"]),
        ({"total_gpus": 63, "gpus_per_node": 8}, "totalGPUs", ["63 = 7 × 8 + 7", "56 or 64"]),
        ({"total_gpus": 4, "gpus_per_node": 8}, "totalGPUs", ["4 = 0 × 8 + 4"]),
        ({"total_gpus": 16, "gpus_per_node": 1}, "totalGPUs", ["16 / 1", "16 machines", "gpusPerNode 8"]),
        ({"nodes": 2, "total_gpus": 16}, "nodes", ["exactly one", "nodes 2 with gpusPerNode 8"]),
        ({"nodes": 3, "total_gpus": 16}, "nodes", ["exactly one"]),
        ({"nodes": 2, "gpus_per_node": 4, "gpu_count": 8}, "gpusPerNode", ["says 8"]),
    ],
)
def test_an_impossible_shape_is_refused_with_its_arithmetic(
    said: dict[str, int], field: str, words: list[str]
) -> None:
    with pytest.raises(ShapeError) as caught:
        resolve_topology(**said)  # type: ignore[arg-type]
    assert caught.value.field == field
    for word in words:
        assert word in caught.value.text


def test_every_total_either_fits_exactly_or_is_refused() -> None:
    for total in range(1, 65):
        try:
            shape = resolve_topology(total_gpus=total)
        except ShapeError:
            continue
        assert shape.nodes * shape.gpus_per_node == total
        assert 1 <= shape.nodes <= NODES_MAX

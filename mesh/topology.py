"""The shape of a gang: from what the user said to machines and GPUs per machine.

Rules of this file:
1. Pure arithmetic. The answer is written once to `status.topology` and never changes, so the world size never does.
2. Every member gets the same GPU count (first document, "Topology").
3. What is refused is refused with the arithmetic that refuses it: a `ShapeError` says which field, what it was, and
   which values near it would do.

How a shape is said (all in `spec.distributed`, `count` is `spec.resources.gpu.count`):

| said                      | machines                | GPUs per machine                       |
|---------------------------|-------------------------|----------------------------------------|
| nothing                   | 1                       | count, or 1 when only a type is named  |
| gpusPerNode               | 1                       | gpusPerNode                            |
| nodes                     | nodes (2 to 8)          | count, or 1 when only a type is named  |
| nodes + gpusPerNode       | nodes                   | gpusPerNode                            |
| totalGPUs                 | as few as possible      | picked: the largest that divides       |
| totalGPUs + gpusPerNode   | totalGPUs / gpusPerNode | gpusPerNode                            |
| nodes + totalGPUs         | refused: say one of them|                                        |

`count` and `gpusPerNode` mean the same thing; when both are said they must agree. No GPU anywhere is a CPU run: 0
GPUs and one process per machine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

NODES_MIN = 2
NODES_MAX = 8
"""First document: "Beta gangs have at most 8 nodes"; `distributed.nodes` is 2 to 8."""
GPUS_PER_NODE_CHOICES = (1, 2, 4, 8)
TOTAL_GPUS_MAX = NODES_MAX * max(GPUS_PER_NODE_CHOICES)


class ShapeError(ValueError):
    """This shape cannot be. `field` is nodes, totalGPUs, gpusPerNode or count; `text` is one or more sentences."""

    def __init__(self, field: str, got: int, text: str) -> None:
        super().__init__(text)
        self.field = field
        self.got = got
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A resolved shape."""

    nodes: int
    """Machines, 1 to 8."""
    gpus_per_node: int
    """0 for a CPU run, else 1, 2, 4 or 8."""

    @property
    def processes_per_node(self) -> int:
        """torchrun's processes on each machine: one per GPU, one on a CPU machine."""
        return max(1, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Processes in the whole gang, as torchrun counts them."""
        return self.nodes * self.processes_per_node


def resolve_topology(
    *,
    nodes: int | None = None,
    total_gpus: int | None = None,
    gpus_per_node: int | None = None,
    gpu_count: int | None = None,
    gpu_wanted: bool = False,
    machine_sizes: Collection[int] = GPUS_PER_NODE_CHOICES,
) -> Topology:
    """The shape that this comes to.

    Args:
        nodes, total_gpus, gpus_per_node: as in `spec.distributed`; None where the user said nothing.
        gpu_count: `spec.resources.gpu.count`, None where the user said nothing.
        gpu_wanted: a GPU type was named, so a machine without a stated count holds one.
        machine_sizes: GPU counts that machines of this deployment can have, for the case where the shape is ours to
            pick.

    Raises:
        ShapeError: there is no such shape.
    """
    _check_ranges(nodes=nodes, totalGPUs=total_gpus, gpusPerNode=gpus_per_node, count=gpu_count)
    per_node = _agreed_gpus_per_node(gpus_per_node=gpus_per_node, gpu_count=gpu_count)
    if total_gpus is None:
        return Topology(nodes=nodes or 1, gpus_per_node=per_node if per_node is not None else int(gpu_wanted))
    if nodes is not None:
        raise ShapeError("nodes", nodes, _both_said(nodes, total_gpus))
    if per_node is None:
        return _picked(total_gpus, machine_sizes)
    return _divided(total_gpus, per_node)


def field_problem(field: str, value: int) -> str | None:
    """Why this value alone is out of range, whatever the others say; None when it is not.

    Args:
        field: nodes, totalGPUs, gpusPerNode or count.
    """
    if field == "nodes":
        return None if NODES_MIN <= value <= NODES_MAX else _nodes_sentence(value)
    if field == "totalGPUs":
        if 1 <= value <= TOTAL_GPUS_MAX:
            return None
        most = f"at most {NODES_MAX} machines of {max(GPUS_PER_NODE_CHOICES)} GPUs"
        return f"It takes 1 to {TOTAL_GPUS_MAX}: {most}."
    return None if value in GPUS_PER_NODE_CHOICES else "It takes 1, 2, 4 or 8 GPUs for each machine."


def _check_ranges(**said: int | None) -> None:
    for field, value in said.items():
        if value is not None and (problem := field_problem(field, value)):
            raise ShapeError(field, value, problem)


def _nodes_sentence(nodes: int) -> str:
    takes = f"It takes {NODES_MIN} to {NODES_MAX} machines"
    if nodes == 1:
        return f"{takes}; for one machine leave it out."
    if nodes > NODES_MAX:
        return f"{takes}; a gang has at most {NODES_MAX} members."
    return f"{takes}."


def _agreed_gpus_per_node(*, gpus_per_node: int | None, gpu_count: int | None) -> int | None:
    if gpus_per_node is not None and gpu_count is not None and gpus_per_node != gpu_count:
        raise ShapeError(
            "gpusPerNode",
            gpus_per_node,
            f"The GPU count of resources.gpu says {gpu_count} for each machine; say it in one place, or say the same.",
        )
    return gpus_per_node if gpus_per_node is not None else gpu_count


def _both_said(nodes: int, total_gpus: int) -> str:
    start = f"Say exactly one of nodes ({nodes}) and totalGPUs ({total_gpus})"
    if total_gpus % nodes == 0 and total_gpus // nodes in GPUS_PER_NODE_CHOICES:
        each = total_gpus // nodes
        return f"{start}: {nodes} machines of {each} GPUs are nodes {nodes} with gpusPerNode {each}."
    return f"{start}."


def _picked(total_gpus: int, machine_sizes: Collection[int]) -> Topology:
    """As few machines as possible: inside one machine GPUs talk faster, and a total that one holds is one machine."""
    sizes = [size for size in GPUS_PER_NODE_CHOICES if size in machine_sizes] or list(GPUS_PER_NODE_CHOICES)
    for size in reversed(sizes):
        if total_gpus % size == 0 and total_gpus // size <= NODES_MAX:
            return Topology(nodes=total_gpus // size, gpus_per_node=size)
    largest = max(size for size in GPUS_PER_NODE_CHOICES if total_gpus % size == 0)
    if total_gpus // largest <= NODES_MAX:
        # No machine here has the right size: keep the shape that exists elsewhere, and the run waits and says why.
        return Topology(nodes=total_gpus // largest, gpus_per_node=largest)
    raise ShapeError(
        "totalGPUs",
        total_gpus,
        f"Every machine gets the same count (1, 2, 4 or 8): {total_gpus} GPUs are {total_gpus // largest} machines of "
        f"{largest}, and a gang has at most {NODES_MAX}. Near it: {_near(total_gpus, _totals())}.",
    )


def _divided(total_gpus: int, per_node: int) -> Topology:
    machines, rest = divmod(total_gpus, per_node)
    if rest:
        multiples = [per_node * n for n in range(1, NODES_MAX + 1)]
        raise ShapeError(
            "totalGPUs",
            total_gpus,
            f"It is not a multiple of gpusPerNode {per_node}: {total_gpus} = {machines} × {per_node} + {rest}. "
            f"Near it: {_near(total_gpus, multiples)}{_other_sizes(total_gpus)}.",
        )
    if machines > NODES_MAX:
        raise ShapeError(
            "totalGPUs",
            total_gpus,
            f"{total_gpus} / {per_node} GPUs for each machine = {machines} machines, and a gang has at most {NODES_MAX}"
            f"{_other_sizes(total_gpus)}.",
        )
    return Topology(nodes=machines, gpus_per_node=per_node)


def _other_sizes(total_gpus: int) -> str:
    fitting = [
        f"gpusPerNode {size} ({total_gpus} = {total_gpus // size} × {size})"
        for size in reversed(GPUS_PER_NODE_CHOICES)
        if total_gpus % size == 0 and total_gpus // size <= NODES_MAX
    ]
    return f"; or {fitting[0]}" if fitting else ""


def _totals() -> list[int]:
    return sorted({size * n for size in GPUS_PER_NODE_CHOICES for n in range(1, NODES_MAX + 1)})


def _near(value: int, choices: list[int]) -> str:
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(str(choice) for choice in below + above)

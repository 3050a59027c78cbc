"""What NVML calls an accelerator, and what a job asks for."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from agents.gpus import Gpus, find_gpus, of_names, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000ADA"),
        ("", "GPU"),
        ("Ä", "GPU"),
    ],
)
def test_a_name_is_what_people_ask_for(name: str, short: str) -> None:
    assert short_name(name) == short


def test_of_several_kinds_the_most_are_offered() -> None:
    assert of_names([]) is None
    assert of_names(["NVIDIA H100 80GB HBM3"] * 8) == Gpus(type="H100", count=8)
    assert of_names(["Tesla T4", "NVIDIA L4", "NVIDIA L4"]) == Gpus(type="L4", count=2)


class _NvmlError(Exception):
    pass


def _nvml(**calls: Any) -> types.ModuleType:
    module = types.ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=_NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA L4" if handle else "NVIDIA L4",
    )
    module.__dict__.update(calls)
    return module


def _fail(*_: Any) -> Any:
    raise _NvmlError("no driver")


def test_what_nvml_finds_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml())
    assert find_gpus() == Gpus(type="L4", count=2)


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_machine_without_any_or_with_a_broken_driver_has_none(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(**{broken: _fail}))
    assert find_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpus() is None

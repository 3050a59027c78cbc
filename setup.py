"""Compiles the shim (mesh/net/shim/native) into the package. All else is in pyproject.toml.

A machine without a C compiler gets the package without it: whoever needs the shim there is told so when it is used.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
SOURCES = sorted(str(path) for path in Path("mesh/net/shim/native").glob("*.c"))
HEADERS = sorted(str(path) for path in Path("mesh/net/shim/native").glob("*.h"))
SHIM = Extension("mesh.net.shim.native.gangmesh-shim", sources=SOURCES, depends=HEADERS, optional=True)


class BuildShim(build_ext):
    """A library for LD_PRELOAD, not a module: no Python in it, and a name without one's version."""

    def get_ext_filename(self, ext_name: str) -> str:
        return f"{Path(*ext_name.split('.'))}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        named = shlex.split(os.environ.get("CC", ""))
        compiler = named or [next(filter(shutil.which, ("gcc", "cc", "clang")), "gcc")]
        command = [*compiler, *FLAGS, "-o", str(target), *ext.sources, "-ldl"]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            self.warn(f"the shim is not built, the package is complete without it: {error}")

    def copy_extensions_to_source(self) -> None:
        """For `pip install -e`: one that was not built cannot be copied."""
        built = Path(self.get_ext_fullpath(SHIM.name))
        if self.inplace or Path(self.build_lib, self.get_ext_filename(SHIM.name)).exists() or built.exists():
            super().copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    """The library is for one platform and for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[SHIM], cmdclass={"build_ext": BuildShim, "bdist_wheel": PlatformWheel})

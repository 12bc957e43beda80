"""Gives a wheel that holds compiled kernels the tag of its platform; any other wheel stays pure Python."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TagByKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Looks for libraries that `make wheel` has put into the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag: the C library of this machine is the oldest that the libraries are known to run with."""
        if not any((Path(self.root) / "streamserve" / "native" / "prebuilt").glob("*.so")):
            return
        library, release = platform.libc_ver()
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if library == "glibc":
            system = f"manylinux_{release.replace('.', '_')}_{platform.machine()}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}"

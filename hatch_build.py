"""The build hook: compiles the C extension of a wheel or an editable installation, where there is a C compiler.

Where there is none, or it fails, what is installed is plain Python, which does the same with more CPU.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("kvstore/native")


class CallsBuildHook(BuildHookInterface[Any]):
    """Puts the extension into the wheel; an editable installation finds it beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Called by hatchling."""
        compiling = runpy.run_path(str(Path(self.root) / FOLDER / "compiling.py"))
        reason = compiling["compile_extension"]()
        if reason is not None:
            self.app.display_info(f"plain Python, without the C in {FOLDER}: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(FOLDER / compiling["EXTENSION"].name))

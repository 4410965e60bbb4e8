"""Generates the Python code of supervisor/wire/scheduler.proto, which is committed beside it.

    python tests/wire_generation.py         # writes it
    tests/test_supervisor_wire_proto.py     # compares what is committed with what this makes

The versions of the generators are pinned in pyproject.toml: others may make other text.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "stockade/supervisor/wire"
WIRE = ROOT / "supervisor" / "wire"
GENERATED = ("scheduler_pb2.py", "scheduler_pb2.pyi", "scheduler_grpc.py")


def generate(directory: Path) -> dict[str, str]:
    """The generated files by name, made in this directory."""
    # protoc names Python modules after the file's path, so it gets one that is the module's.
    source = directory / "source" / PACKAGE
    source.mkdir(parents=True)
    shutil.copy(WIRE / "scheduler.proto", source)
    made = directory / "made"
    made.mkdir()
    plugin = Path(sys.executable).parent / "protoc-gen-grpclib_python"
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", f"-I{directory / 'source'}",
            f"--plugin=protoc-gen-grpclib_python={plugin}",
            f"--python_out={made}", f"--pyi_out={made}", f"--grpclib_python_out={made}",
            f"{source / 'scheduler.proto'}",
        ],
        check=True,
    )  # fmt: skip
    return {name: (made / PACKAGE / name).read_text() for name in GENERATED}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, text in generate(Path(temporary)).items():
            (WIRE / name).write_text(text)

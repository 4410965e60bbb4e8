"""Builds the launcher, a static executable, as if it were an extension module.

Everything else is in pyproject.toml. An Extension, and not a file copied by a build_py hook: only
with one is the wheel tagged for its platform, and the launcher there in an editable install.
"""

from __future__ import annotations

import os
from typing import Final

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError

LAUNCHER: Final = "stockade.sandbox.launcher"
COMPILE_FLAGS: Final = [
    "-std=c11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow",
    "-fstack-protector-strong",
]  # fmt: skip
# Static: it runs where no library can be loaded from, and starts without a dynamic linker.
LINK_FLAGS: Final = ["-static", "-Wl,-z,relro,-z,now,-z,noexecstack"]
HINT: Final = (
    "install a C compiler and the static C library "
    "(Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc glibc-static)"
)


class BuildLauncher(build_ext):
    """build_ext that links the launcher into a program, under its plain name."""

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] == LAUNCHER.rpartition(".")[2]:
            return os.path.join(*fullname.split("."))
        return super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        if ext.name != LAUNCHER:
            super().build_extension(ext)
            return
        target = self.get_ext_fullpath(ext.name)
        directory, name = os.path.split(target)
        os.makedirs(directory, exist_ok=True)
        # Linked under another name and moved: a running program can be replaced, not written to.
        temporary = f".{name}.new"
        try:
            objects = self.compiler.compile(
                ext.sources, output_dir=self.build_temp, extra_postargs=ext.extra_compile_args
            )
            self.compiler.link_executable(
                objects,
                temporary,
                output_dir=directory,
                extra_postargs=ext.extra_link_args,
            )
        except (CCompilerError, CompileError, ExecError, LinkError) as error:
            raise CompileError(f"cannot build sandbox/launcher: {error}; {HINT}") from error
        os.replace(os.path.join(directory, temporary), target)
        os.chmod(target, 0o755)


setup(
    ext_modules=[
        Extension(
            LAUNCHER,
            sources=["sandbox/launcher.c", "sandbox/zygote.c"],
            depends=["sandbox/zygote.h"],
            extra_compile_args=COMPILE_FLAGS,
            extra_link_args=LINK_FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildLauncher},
)

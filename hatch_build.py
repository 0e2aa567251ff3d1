"""Compiles the CPU kernels when the package is built. Where it cannot, the package is built without them: they are a
matter of speed alone."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "transmuter/native/sources"
LIBRARY = "transmuter/native/kernels.so"

_AVX512 = "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mprefer-vector-width=512"
VARIANTS = {
    "avx512vnni": f"{_AVX512} -mavx512vnni",
    "avx512": _AVX512,
    "avx2": "-mavx2 -mfma",
}
"""The compiler's options for each instruction set that the kernels are compiled for."""
OPTIONS_OF_ALL = "-std=c++17 -fPIC -fno-math-errno"
OPTIONS_OF_VARIANTS = "-O3 -ffp-contract=fast -fno-exceptions -fvisibility=hidden"
OPTIONS_OF_HANDLERS = "-O2"
OPTIONS_OF_LIBRARY = "-shared -static-libstdc++ -static-libgcc -Wl,-z,defs -Wl,--gc-sections -s"
EXPORTS = "{ global: transmuter_*; local: *; };"
"""Nothing else may be seen: this library's copy of the C++ runtime would mix with those of other libraries."""


class CannotCompileError(Exception):
    """Says why there will be no library."""


class KernelsHook(BuildHookInterface):
    """Puts the library into the wheel, which is one for this platform then; into the tree for an editable install."""

    def dependencies(self) -> list[str]:
        """jaxlib has the headers of XLA's interface for foreign functions."""
        return ["jaxlib>=0.10"] if _is_wanted() and _obstacle() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        is_editable = version == "editable"
        in_place = Path(self.root, LIBRARY)
        if is_editable:
            in_place.unlink(missing_ok=True)
        if not _is_wanted():
            return
        self._folder = tempfile.TemporaryDirectory()
        try:
            library = build(Path(self.root, SOURCES), Path(self._folder.name))
        except CannotCompileError as reason:
            self.app.display_warning(
                "transmuter is built without its compiled CPU kernels. Everything works, but matrix products, "
                "convolutions and quantised models take longer on the CPU. To have them, on x86-64 Linux, "
                "install a C++17 compiler (g++, or what CXX names), then transmuter again, with pip's --no-cache-dir, "
                f"--force-reinstall and --no-deps. The reason: {reason}"
            )
            return
        if is_editable:
            part = in_place.with_suffix(".part")
            shutil.copy(library, part)
            part.replace(in_place)  # nobody gets to load half of it
            return
        build_data["force_include"][str(library)] = LIBRARY
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"  # any Python 3: the library knows nothing of it

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := getattr(self, "_folder", None):
            folder.cleanup()


def build(sources: Path, folder: Path) -> Path:
    """Compiles the library into the folder, and raises `CannotCompileError` where it cannot."""
    if (obstacle := _obstacle()) is not None:
        raise CannotCompileError(obstacle)
    compiler = _compiler()

    def compiled(source: str, name: str, options: str) -> str:
        result = str(folder / f"{name}.o")
        _run([*compiler, *shlex.split(f"{OPTIONS_OF_ALL} {options}"), "-c", str(sources / source), "-o", result])
        return result

    with ThreadPoolExecutor() as pool:
        compilations = [
            pool.submit(compiled, "variant.cpp", name, f"{OPTIONS_OF_VARIANTS} {options}")
            for name, options in VARIANTS.items()
        ]
        options = f"{OPTIONS_OF_HANDLERS} -isystem {shlex.quote(str(_headers()))}"
        compilations.append(pool.submit(compiled, "handlers.cpp", "handlers", options))
        objects = [compilation.result() for compilation in compilations]
    exports = folder / "exports.map"
    exports.write_text(EXPORTS)
    library = folder / Path(LIBRARY).name
    options = f"{OPTIONS_OF_LIBRARY} -Wl,--version-script={shlex.quote(str(exports))}"
    _run([*compiler, *objects, *shlex.split(options), "-o", str(library)])
    return library


def _is_wanted() -> bool:
    return os.environ.get("TRANSMUTER_NATIVE") != "0"


def _obstacle() -> str | None:
    """Why the library cannot be compiled here, as far as that can be known before it is tried."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"there are no kernels for {platform.system()} on {platform.machine()}"
    compiler = _compiler()
    if not compiler or shutil.which(compiler[0]) is None:
        return f"there is no C++ compiler {' '.join(compiler)!r}"
    return None


def _compiler() -> list[str]:
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    return [next(filter(shutil.which, ("c++", "g++", "clang++")), "c++")]


def _headers() -> Path:
    jaxlib = importlib.util.find_spec("jaxlib")
    for folder in () if jaxlib is None else jaxlib.submodule_search_locations or ():
        if (headers := Path(folder, "include")).exists():
            return headers
    raise CannotCompileError("jaxlib, which has XLA's headers, is not there for the build")


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        message = f"{shlex.join(command)} failed:\n{error.stderr[-2000:]}"
        raise CannotCompileError(message) from error
    except OSError as error:
        raise CannotCompileError(str(error)) from error

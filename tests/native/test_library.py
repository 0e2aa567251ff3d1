"""The library of compiled kernels: loaded when it is needed, and done without where it cannot be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from transmuter.native import library


@pytest.fixture(autouse=True)
def _loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRANSMUTER_NATIVE", raising=False)
    library._loaded.cache_clear()
    yield
    monkeypatch.undo()
    library._loaded.cache_clear()


@pytest.fixture
def kernels(_loaded_anew: None) -> None:
    if not library.available():
        pytest.skip("the package was installed without kernels, or this processor can run none of them")


def _printed(program: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


@pytest.mark.usefixtures("kernels")
def test_a_machine_runs_the_best_of_the_variants_that_it_can() -> None:
    best = library.variant()
    runnable = [name for name in ("avx512vnni", "avx512", "avx2") if library.choose(name)]
    assert library.choose(best)
    assert runnable[0] == best


@pytest.mark.usefixtures("kernels")
def test_another_variant_runs_within_a_block() -> None:
    before = library.variant()
    with library.chosen("avx2"):
        assert library.variant() == "avx2"
    assert library.variant() == before


@pytest.mark.parametrize("name", ["", "avx", "sse9"])
def test_an_unknown_variant_is_refused(name: str) -> None:
    before = library.variant()
    assert not library.choose(name)
    with pytest.raises(ValueError, match="cannot run the kernels"), library.chosen(name):
        pass
    assert library.variant() == before


@pytest.mark.usefixtures("kernels")
def test_threads_register_the_targets_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library._loaded.cache_clear()
    registered: list[str] = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: library.variant(), range(8)))) == 1
    assert sorted(registered) == sorted(library.TARGETS)


def test_every_handler_is_registered() -> None:
    handlers = Path(library.__file__).parent / "sources" / "handlers.cpp"
    if not handlers.exists():
        pytest.skip("an installed package has no sources")
    defined = re.findall(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+)", handlers.read_text())
    assert sorted(defined) == sorted(library.TARGETS)


@pytest.mark.usefixtures("kernels")
def test_importing_does_not_load_it() -> None:
    program = """
import transmuter, transmuter.native.library as library
print(library._FILE.name in open("/proc/self/maps").read())
library.variant()
print(library._FILE.name in open("/proc/self/maps").read())
"""
    assert _printed(program).split() == ["False", "True"]


def test_it_can_be_switched_off() -> None:
    program = "from transmuter.native import library; print([library.variant(), library.available()])"
    assert _printed(program, TRANSMUTER_NATIVE="0") == "['', False]"


@pytest.mark.usefixtures("kernels")
def test_another_library_can_be_named(tmp_path: Path) -> None:
    copy = Path(shutil.copy(library._FILE, tmp_path / "copy.so"))
    program = """
from transmuter.native import library
print(library.available(), "copy.so" in open("/proc/self/maps").read())
"""
    assert _printed(program, TRANSMUTER_NATIVE=str(copy)).split() == ["True", "True"]


def test_without_the_file_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_FILE", tmp_path / "kernels.so")
    assert not library.available()
    assert not library.choose("avx2")


def test_a_file_that_does_not_load_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kernels.so"
    file.touch()
    monkeypatch.setattr(library, "_FILE", file)
    with pytest.warns(RuntimeWarning, match="do not fit here.*file too short"):
        assert library.variant() == ""
    assert not library.available()  # warned of once


@pytest.mark.usefixtures("kernels")
def test_a_library_that_lacks_a_target_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    library._loaded.cache_clear()
    monkeypatch.setattr(library, "TARGETS", (*library.TARGETS, "transmuter_absent"))
    with pytest.warns(RuntimeWarning, match="undefined symbol: transmuter_absent"):
        assert not library.available()


@pytest.mark.usefixtures("kernels")
def test_a_jaxlib_that_refuses_it_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("the handler's API version (9.0) is incompatible")

    library._loaded.cache_clear()
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    with pytest.warns(RuntimeWarning, match="Reinstall transmuter.*API version"):
        assert not library.available()

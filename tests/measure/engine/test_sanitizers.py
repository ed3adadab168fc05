"""The C code under the address and undefined-behaviour sanitizers (no byte beyond a tensor is read), and on ARM."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from forewarn.measure.engine import native

SOURCES = Path(native.__file__).parent
DRIVER = Path(__file__).parent / "native_driver.c"
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]

COMPILERS = [each for each in ("gcc", "clang") if shutil.which(each)]
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def compiled(compiler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [compiler, *WARNINGS, "-ffp-contract=off", "-pthread", f"-I{SOURCES}", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(not COMPILERS, reason="there is no C compiler")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_entry_point_reads_or_writes_where_it_should_not(tmp_path, compiler):
    program = tmp_path / "driver"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O2"]
    sources = [str(DRIVER), *map(str, SOURCES.glob("*.c"))]
    built = compiled(compiler, *sanitizers, *sources, "-o", str(program), "-lm")
    assert built.returncode == 0, built.stderr
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    ran = subprocess.run([str(program)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0].split() == [*native.paths(), "ok"]


@pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)),
    reason="64-bit ARM needs gcc-aarch64-linux-gnu and qemu-user of Debian",
)
def test_a_processor_without_these_vectors_has_the_portable_path(tmp_path):
    program = tmp_path / "driver"
    built = compiled(
        ARM_COMPILER, "-O2", "-static", str(DRIVER), *map(str, SOURCES.glob("*.c")), "-o", str(program), "-lm"
    )
    assert built.returncode == 0, built.stderr
    longest = "300"  # an emulator takes its time
    ran = subprocess.run([ARM_EMULATOR, str(program), longest], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "portable ok"

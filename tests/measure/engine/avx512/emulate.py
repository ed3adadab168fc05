"""Runs every code path of the native library, AVX-512 too, in an emulator of a processor that has it.

`make test-avx512` calls this. A small Linux boots in Bochs, from a CD image: Debian's kernel, and instead of a system
two builds of `native_driver.c`, with the options of setup.py and with sanitizers. They compare the paths bit by bit.
It takes a few minutes, and says nothing about speed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
NATIVE = ROOT / "src" / "forewarn" / "measure" / "engine" / "native"
DRIVER = ROOT / "tests" / "measure" / "engine" / "native_driver.c"
BUILD = ROOT / "build" / "avx512"

PACKAGES = {
    "gcc": "/usr/bin/gcc",
    "bochs": "/usr/bin/bochs",
    "bochsbios": "/usr/share/bochs/BIOS-bochs-latest",
    "vgabios": "/usr/share/bochs/VGABIOS-lgpl-latest",
    "isolinux": "/usr/lib/ISOLINUX/isolinux.bin",
    "syslinux-common": "/usr/lib/syslinux/modules/bios/ldlinux.c32",
    "xorriso": "/usr/bin/xorriso",
    "cpio": "/usr/bin/cpio",
}
"""What is needed of Debian or Ubuntu, by a file of each package."""

KERNEL = "linux-image-cloud-amd64"
"""The smallest kernel that Debian builds. It is unpacked here, not installed."""

BUILDS = {
    "driver": (5000, ["-O3", "-fno-math-errno"]),
    "sanitized": (300, ["-O2", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]),
}
"""Builds of the driver: its longest tensor (with all lengths it would take an hour in the emulator), and options."""

MINUTES = 45
"""After which the emulator is taken to hang: it needs about five minutes of a processor."""

# Bochs 2.7 and Linux do not agree on the size of registers saved by XSAVEC, for which Linux would do without AVX.
START = """\
DEFAULT linux
LABEL linux
  KERNEL /vmlinuz
  APPEND initrd=/initrd console=ttyS0 quiet noxsaves clearcpuid=xsavec tsc=reliable mitigations=off nokaslr
"""

# Few instructions a second: Linux waits by the clock for devices that are not there. The screen goes to a VNC server
# that nobody needs to look at; sound would crash where there is none.
MACHINE = """\
cpu: model=corei7_skylake_x, count=1, ips=5000000
memory: guest=512, host=512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path={build}/disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={build}/serial.txt
display_library: rfb, options="timeout=0"
sound: driver=dummy
speaker: enabled=0
log: {build}/bochs.log
panic: action=fatal
"""


def run(*command: object, cwd: Path | None = None, given: str | None = None) -> str:
    """The output of a command, which is given some text; where it fails, this script ends."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, input=given)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_packages() -> None:
    missing = [package for package, file in PACKAGES.items() if not Path(file).exists()]
    if missing:
        sys.exit(f"to emulate AVX-512: apt-get install --no-install-recommends {' '.join(missing)}")


def unpack_kernel(into: Path) -> None:
    if into.exists():
        return
    depends = re.findall(r"Depends: (linux-image-\S+)", run("apt-cache", "depends", KERNEL))
    if not depends:
        sys.exit(f"apt knows no package {KERNEL}: on Debian, apt-get update")
    run("apt-get", "download", depends[0], cwd=BUILD)
    (package,) = BUILD.glob(f"{depends[0]}_*.deb")
    run("dpkg-deb", "-x", package, BUILD / "kernel")
    (kernel,) = (BUILD / "kernel" / "boot").glob("vmlinuz-*")
    shutil.copy(kernel, into)


def build_programs(root: Path) -> None:
    """The drivers, the libraries that they are linked with, and the process that starts them."""
    programs = ", ".join(f'{{"/{name}", "{longest}"}}' for name, (longest, _) in BUILDS.items())
    (root / "proc").mkdir(parents=True)
    run("gcc", "-O2", "-static", f"-DPROGRAMS={programs}", Path(__file__).with_name("init.c"), "-o", root / "init")
    common = ["-std=c11", "-ffp-contract=off", "-pthread", f"-I{NATIVE}", DRIVER, *NATIVE.glob("*.c"), "-lm"]
    for name, (_, options) in BUILDS.items():
        run("gcc", *options, *common, "-o", root / name)
        for library in re.findall(r"(/\S+) \(0x", run("ldd", root / name)):
            copy = root / library.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, copy)


def write_disc(root: Path, disc: Path) -> None:
    files = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    run("cpio", "--create", "--format=newc", "--quiet", f"--file={disc / 'initrd'}", cwd=root, given=files)
    loader = disc / "isolinux"
    loader.mkdir()
    for package in ("isolinux", "syslinux-common"):
        shutil.copy(PACKAGES[package], loader)
    (loader / "isolinux.cfg").write_text(START)
    boots = ["-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot", "-boot-load-size", 4]
    run("xorriso", "-as", "mkisofs", *boots, "-boot-info-table", "-o", BUILD / "disc.iso", disc)


def what_was_said() -> str:
    """The text on the emulated serial line, when the emulated machine has switched itself off."""
    (BUILD / "bochsrc").write_text(MACHINE.format(build=BUILD))
    (BUILD / "go").write_text("continue\n")  # Debian's Bochs has a debugger, which waits for commands
    command = ["bochs", "-q", "-f", BUILD / "bochsrc", "-rc", BUILD / "go"]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        print(f"the emulator did not end within {MINUTES} minutes")
    return (BUILD / "serial.txt").read_text(errors="replace")


def main() -> None:
    check_packages()
    disc, root = BUILD / "disc", BUILD / "root"
    for folder in (disc, root):
        shutil.rmtree(folder, ignore_errors=True)
    disc.mkdir(parents=True)
    unpack_kernel(BUILD / "vmlinuz")
    shutil.copy(BUILD / "vmlinuz", disc / "vmlinuz")
    build_programs(root)
    write_disc(root, disc)
    (BUILD / "serial.txt").unlink(missing_ok=True)
    said = what_was_said()
    print(said)
    agreed = said.count("avx512 avx2 portable ok") == len(BUILDS)
    ended = all(f"/{name} ended with 0" in said for name in BUILDS)
    sys.exit(0 if agreed and ended else "the code paths do not agree in the emulator, or did not all run: see above")


if __name__ == "__main__":
    main()

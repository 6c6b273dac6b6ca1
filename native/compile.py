"""Compile the kernels into the source tree, incrementally: `make native`, and every editable install.

    python native/compile.py                  # into src/headwise/kernels/cpu/
    python native/compile.py --if-possible    # succeeds without CMake or a compiler, but not if compilation fails
    python native/compile.py --background     # returns at once; the library appears when it is complete
    python native/compile.py --target avx2    # only portable and this target: faster, for development
    python native/compile.py --sanitize       # into build/sanitize/, with AddressSanitizer and UBSan

Wheels do not use this script: scikit-build-core runs CMake for them. HEADWISE_REQUIRE_NATIVE=1 in the environment makes
it an error, here and there, if the kernels cannot be compiled.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parents[1]
# Kernels that cannot be compiled are an error.
REQUIRED = os.environ.get("HEADWISE_REQUIRE_NATIVE", "0") not in ("", "0")


class CannotBuild(Exception):
    """A tool for building is missing on this machine."""


TARGETS = ("portable", "avx2", "avx512", "avx512bf16", "amx")


def build_in_place(target: str | None = None) -> None:
    """Compile in build/native and install the library next to the Python module that loads it. With `target`, compile
    only portable and this target, in a separate folder."""
    folder = ROOT / "build" / ("native" if target is None else f"native-{target}")
    with one_at_a_time():
        cmake = compile_in(folder, *([] if target is None else [f"-DHEADWISE_TARGETS=portable;{target}"]))
        made = folder / "installed"
        run(cmake, "--install", str(folder), "--prefix", str(made))
        for file in [path for path in made.rglob("*") if path.is_file()]:
            os.replace(file, ROOT / "src" / file.relative_to(made))  # whole: another process may be loading it
    say(
        "The CPU kernels are compiled; programs that start from now on use them.",
        "CPU 内核已编译完成，之后启动的程序都会使用。",
    )


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for another build in this folder, such as one in the background, to end."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "compile.lock", "w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Waiting for the CPU kernels, which are being compiled.", "正在等待 CPU 内核编译完成。")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_in_background() -> None:
    """Build in a process that outlives this one, at low priority. CannotBuild as `compile_in`."""
    tools()
    log = ROOT / "build" / "compile.log"
    log.parent.mkdir(exist_ok=True)
    with open(log, "a", encoding="utf-8") as output:
        nice = ["nice"] if shutil.which("nice") else []
        subprocess.Popen(
            [*nice, sys.executable, __file__, "--if-possible"], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    where = log.relative_to(ROOT)
    say(
        "Compiling the CPU kernels in the background, about two minutes; until then headwise uses PyTorch's. "
        f"Messages: {where}",
        f"正在后台编译 CPU 内核，约需两分钟；在此之前 headwise 使用 PyTorch 的内核。编译信息：{where}",
    )


def say(en: str, zh: str) -> None:
    """Print a message in the user's language, as in `headwise.wording.language`; headwise may not be installed."""
    named = filter(None, map(os.environ.get, ("HEADWISE_LANG", "LC_ALL", "LC_MESSAGES", "LANG")))
    sys.stderr.buffer.write(((zh if next(named, "").startswith("zh") else en) + "\n").encode())


def compile_in(folder: Path, *options: str) -> str:
    """Configure and compile. Returns the path of CMake.

    Raises:
        CannotBuild: if there is no CMake or no compiler.
        subprocess.CalledProcessError: if CMake or the compiler fails; their output has been printed.
    """
    cmake, make = tools()
    if not (folder / "CMakeCache.txt").exists():
        say("Compiling the CPU kernels, once: about two minutes.", "正在编译 CPU 内核（只做一次），约需两分钟。")
    generator = "Ninja" if Path(make).stem == "ninja" else "Unix Makefiles"
    configure = [
        cmake, "-S", str(ROOT), "-B", str(folder), "-G", generator, f"-DCMAKE_MAKE_PROGRAM={make}",
        "-DCMAKE_BUILD_TYPE=Release", *options,
    ]  # fmt: skip
    try:
        run(*configure)
    except subprocess.CalledProcessError:
        # A stale cache of an older CMake, another tool or another folder may be the cause: retry without it.
        if not (folder / "CMakeCache.txt").exists():
            raise
        shutil.rmtree(folder)
        run(*configure)
    run(cmake, "--build", str(folder), "--parallel")
    return cmake


def tools() -> tuple[str, str]:
    """Paths of CMake and of Ninja or make; CannotBuild if one of them or the compiler is missing."""
    cmake, make = tool("cmake"), tool("ninja") or tool("make")
    if cmake is None or make is None:
        raise CannotBuild(f"there is no {'CMake' if cmake is None else 'Ninja and no make'}")
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        raise CannotBuild("there is no C++ compiler (c++, g++ or clang++)")
    return cmake, make


def best_target() -> str:
    """The best target that this CPU supports, from /proc/cpuinfo; "portable" where that is missing."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else []
    known = {"avx512_bf16": "avx512bf16", "avx512bw": "avx512", "avx2": "avx2"}
    return next((target for flag, target in known.items() if flag in flags), "portable")


def sanitized_targets() -> list[str]:
    """What the tests with sanitizers run, and all that is compiled for them: portable, and of the targets that this CPU
    supports the one with the most code. That is amx, its tiles emulated, which runs the code of avx512 too.
    HEADWISE_TEST_TARGETS names others."""
    best = best_target()
    return os.environ.get("HEADWISE_TEST_TARGETS", f"portable,{'amx' if best == 'avx512bf16' else best}").split(",")


def tool(name: str) -> str | None:
    """A program's path, on PATH or next to this Python (where the dev extra installs CMake and Ninja)."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def run(*command: str) -> None:
    """Run a command; print its output only if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise subprocess.CalledProcessError(done.returncode, command)


def main() -> int:
    """Returns the exit code: 1 if the kernels could not be built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--if-possible", action="store_true", help="succeed without CMake or a compiler")
    parser.add_argument("--background", action="store_true", help="build in another process; succeed at once")
    parser.add_argument("--sanitize", action="store_true", help="build into build/sanitize, with sanitizers")
    parser.add_argument("--target", choices=TARGETS, help="compile only portable and this target")
    options = parser.parse_args()
    try:
        if options.sanitize:
            compile_in(
                ROOT / "build" / "sanitize", "-DHEADWISE_SANITIZE=ON", "-DHEADWISE_EMULATE_TILES=ON",
                "-DHEADWISE_ALWAYS_PARTS=ON", f"-DHEADWISE_TARGETS={';'.join(sanitized_targets())}",
            )  # fmt: skip
        elif options.background:
            start_in_background()
        else:
            build_in_place(options.target)
    except CannotBuild as missing:
        sys.stderr.write(f"the compiled kernels are not built: {missing}\n")
        return 0 if (options.if_possible or options.background) and not REQUIRED else 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

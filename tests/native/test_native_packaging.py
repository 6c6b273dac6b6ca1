"""What is shipped: every file of the package, and the library where there is a compiler: one wheel a platform."""

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from headwise.kernels.cpu.library import NAME, TARGETS

ROOT = Path(__file__).parents[2]
LIBRARY = f"headwise/kernels/cpu/{NAME}"
# CMake may not take any other compiler than these, which are not there.
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}


def call(what: str, folder: Path, before: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    """As pip calls the backend, in a process of its own."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed (the dev extra has it)")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "native"), **environment}
    script = f"import sys, backend\n{before}\nbackend.build_{what}(sys.argv[1])"
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=ROOT, env=env, capture_output=True, text=True
    )


def build(what: str, folder: Path, **environment: str) -> Path:
    """What a successful call made."""
    done = call(what, folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.iterdir()
    return made


def package_files() -> set[str]:
    source = ROOT / "src"
    return {
        path.relative_to(source).as_posix()
        for path in (source / "headwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".dylib", ".dll")
    }


def shipped(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if not name.startswith("headwise-") and not name.endswith("/")}


@pytest.mark.thorough
def test_without_a_compiler_the_wheel_holds_all_but_the_library(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path, **NO_COMPILER)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert shipped(wheel) == package_files()


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["wheel", "editable"])
def test_kernels_that_are_required_and_cannot_be_compiled_are_an_error(tmp_path: Path, what: str) -> None:
    # An editable install compiles nothing where the library in the source tree is of these sources.
    before = "def build_in_place(): raise backend.CannotBuild('no compiler')\nbackend.build_in_place = build_in_place"
    done = call(what, tmp_path, before if what == "editable" else "", **NO_COMPILER, HEADWISE_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wheel
def test_the_wheel_runs_in_a_fresh_environment_without_a_compiler(tmp_path: Path) -> None:
    (wheel,) = (ROOT / "dist").glob("headwise-*.whl")
    assert "-py3-none-" in wheel.name
    assert "-any.whl" not in wheel.name
    assert ("-manylinux_" in wheel.name) == (sys.platform == "linux")  # auditwheel has checked it
    assert shipped(wheel) == package_files() | {LIBRARY}
    assert wheel.stat().st_size <= 13_500_000
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # What headwise depends on comes from this environment; a path in a .pth file does not bring the .pth files there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, check=True)
    env = {"PATH": str(python.parent)}
    targets = TARGETS if platform.machine() == "x86_64" else ("portable",)
    check = [python, "-I", ROOT / "scripts" / "check_installed.py", "--targets", *targets]
    done = subprocess.run(check, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" in {site / 'headwise'}" in done.stdout
    assert "portable: runs" in done.stdout
    subprocess.run([python.parent / "headwise", "doctor"], env=env, cwd=tmp_path, capture_output=True, check=True)
    (textbook,) = (ROOT / "dist").glob("headwise_textbook-*-py3-none-any.whl")
    subprocess.run([*pip[:-1], textbook], check=True)
    claims = [python.parent / "headwise", "claims", "--only", "four-d-squared"]
    done = subprocess.run(claims, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "four-d-squared" in done.stdout


def test_ci_tries_each_wheel_with_all_its_targets() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    needed = [job.get("needs", []) for job in jobs.values()]
    assert {name for one in needed for name in ([one] if isinstance(one, str) else one)} <= set(jobs)
    built = {one["arch"] for one in jobs["wheel"]["strategy"]["matrix"]["include"]}
    tried = {one["arch"]: one["targets"].split() for one in jobs["installed"]["strategy"]["matrix"]["machine"]}
    assert built == set(tried) == {"x86_64", "aarch64"}
    assert tried["x86_64"] == list(TARGETS)
    assert tried["aarch64"] == ["portable"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert "release.py --tag" in jobs["ready"]["steps"][-1]["run"]
    for path in (ROOT / ".github" / "workflows").iterdir():
        used = re.findall(r"uses: (.+)", path.read_text(encoding="utf-8"))
        assert used
        assert [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one)] == []


@pytest.mark.thorough
def test_a_checkout_on_the_path_precedes_an_editable_install(tmp_path: Path) -> None:
    """The editable wheel holds a path and nothing that Python would import at its start."""
    wheel = build("editable", tmp_path, **NO_COMPILER)  # `make native` compiles the same way
    archive = zipfile.ZipFile(wheel)
    assert shipped(wheel) == {"headwise.pth"}
    assert archive.read("headwise.pth").decode() == f"{ROOT / 'src'}\n"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel],
        check=True,
    )
    script = "import sys, site; site.addsitedir(sys.argv[1]); import headwise; print(headwise.__file__)"
    other = tmp_path / "other"
    (other / "headwise").mkdir(parents=True)
    (other / "headwise" / "__init__.py").touch()
    for folder, path in ((ROOT / "src", ""), (other, str(other))):
        command = [sys.executable, "-S", "-c", script, tmp_path / "site"]
        env = {**os.environ, "PYTHONPATH": path}
        found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()
        assert Path(found) == folder / "headwise" / "__init__.py"


@pytest.mark.thorough
def test_source_archive_holds_what_it_takes_to_build_and_test(tmp_path: Path) -> None:
    archive = build("sdist", tmp_path)
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    files = [
        path
        for folder in ("native", "textbook", "tests", "benchmarks", "scripts", "docs")
        for path in (ROOT / folder).rglob("*")
    ]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if path.is_file() and "__pycache__" not in path.parts}
    wanted |= {f"src/{name}" for name in package_files()}
    wanted |= {"CMakeLists.txt", "pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE", "NOTICE"}
    assert wanted - names == set()
    assert [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".", "build/"))] == []

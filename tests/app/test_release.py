"""One address of the repository and one version, wherever they are written; and the metadata of a release."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")


def module(path: str) -> Any:
    """A module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def release() -> Any:
    return module("scripts/release.py")


def project(folder: str = "") -> dict[str, Any]:
    import tomllib

    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture
def copy(release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that have the address or the version, in a folder of their own."""
    for name in {*release.NAMED, *release.VERSIONS, "CHANGELOG.md"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


def test_all_files_have_one_address_and_one_version(release):
    assert [line for line in release.missing() if " does not name " in line or " has version " in line] == []
    for folder in ("", "textbook"):
        urls = project(folder)["urls"]
        assert urls["Repository"] == release.address()
        assert all(url.startswith(release.address()) for url in urls.values())


def test_no_other_file_has_the_address(release):
    texts = [*ROOT.glob("*.*"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("textbook/*.*"), *ROOT.glob(".github/**/*.*"),
             *ROOT.glob("scripts/*"), *ROOT.glob("packaging/**/*.*"), *ROOT.glob("src/headwise/**/*.py")]  # fmt: skip
    host = release.address().split("/")[2]
    naming = {path.relative_to(ROOT).as_posix() for path in texts if path.is_file() and host in path.read_text("utf-8")}
    assert naming == set(release.NAMED)


def test_a_placeholder_is_refused_and_the_address_is_written_everywhere(release, copy):
    placeholder = "https://example.invalid/headwise"
    release.write(placeholder)
    assert release.missing()[0].startswith(f"{placeholder} is a placeholder; python scripts/release.py --address URL")
    release.write("https://github.com/somebody/headwise.git")
    assert release.address() == "https://github.com/somebody/headwise"
    assert [line for line in release.missing() if "placeholder" in line or "does not name" in line] == []
    assert "git clone https://github.com/somebody/headwise && cd headwise" in (copy / "README.md").read_text("utf-8")
    assert [name for name in release.NAMED if placeholder in (copy / name).read_text("utf-8")] == []
    for wrong in ("github.com/somebody/headwise", "http://github.com/a/b", "https://github.com"):
        with pytest.raises(SystemExit, match="expected https://HOST/PATH"):
            release.write(wrong)


def test_another_version_or_tag_and_a_change_without_a_date_are_named(release, copy):
    version = release.versions()["CITATION.cff"]
    path, changes = copy / "CITATION.cff", copy / "CHANGELOG.md"
    path.write_text(path.read_text("utf-8").replace(f"version: {version}", "version: 0.0.9"), encoding="utf-8")
    changes.write_text("# Changelog\n\n## [Unreleased]\n", encoding="utf-8")
    found = release.missing("v0.0.9")
    assert f"CITATION.cff has version 0.0.9, not {version}" in found
    assert f"the tag is v0.0.9, the version {version}" in found
    assert f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'" in found
    changes.write_text(f"# Changelog\n\n## [{version}] - 2026-12-01\n", encoding="utf-8")
    assert [line for line in release.missing(f"v{version}") if "CHANGELOG" in line or "tag" in line] == []


def test_links_of_the_readme_on_pypi_are_absolute():
    urls = {"Repository": "https://host/headwise"}
    given = {"urls": urls, "version": "1.2.3"}
    text = module("native/readme.py").dynamic_metadata({}, given)["readme"]["text"]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert "![viewer](https://host/headwise/raw/v1.2.3/docs/pictures/viewer_map.png)" in text
    assert "[CONTRIBUTING.md](https://host/headwise/blob/v1.2.3/CONTRIBUTING.md)" in text
    undone = re.sub(r"https://host/headwise/(raw|blob)/v1\.2\.3/", "", text)
    assert undone == (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("folder", ["", "textbook"])
def test_classifiers_exist_and_name_the_versions_of_python(folder):
    known = pytest.importorskip("trove_classifiers", reason="trove-classifiers is not installed").classifiers
    listed = project(folder)["classifiers"]
    assert set(listed) <= set(known)
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)} <= set(listed)


def test_the_recipe_for_conda_has_the_same_requirements():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text("utf-8"))
    names = [one.replace("torch", "pytorch") if one.startswith("torch>") else one for one in project()["dependencies"]]
    wanted = [f"python{project()['requires-python']}", *names]
    assert [one.replace(" ", "") for one in recipe["requirements"]["run"]] == wanted
    assert recipe["about"]["license"] == project()["license"]
    assert recipe["about"]["license_file"] == project()["license-files"]
    assert recipe["build"]["script"]["env"] == {"HEADWISE_REQUIRE_NATIVE": "1"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["authors"] == project()["authors"] == project("textbook")["authors"]

"""What a release must have: the address of the repository, and one version everywhere.

    python scripts/release.py                  # what is missing before the tag; the exit code is 1 if anything is
    python scripts/release.py --tag v0.1.0     # whether this tag may be published; the workflow calls it
    python scripts/release.py --address URL    # writes the address to all files that name it

The address is that of `[project.urls]` in pyproject.toml. It is a placeholder as long as its host ends in `.invalid`.
"""

import argparse
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import tomllib

ROOT = Path(__file__).resolve().parents[1]
# The files that name the address. In the README of the package's metadata native/readme.py writes it.
NAMED = (
    "pyproject.toml", "textbook/pyproject.toml", "README.md", "README.zh.md", "docs/index.md", "CITATION.cff",
    "SECURITY.md", "packaging/conda/recipe.yaml", ".github/ISSUE_TEMPLATE/config.yml",
)  # fmt: skip
# Where the version is written; the first is the one that counts.
VERSIONS = {
    "src/headwise/__init__.py": r'^__version__ = "(.+)"$',
    "textbook/src/headwise_textbook/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "packaging/conda/recipe.yaml": r'^  version: "(.+)"$',
}


def read(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def address() -> str:
    """The address of the repository."""
    return str(tomllib.loads(read("pyproject.toml"))["project"]["urls"]["Repository"])


def versions() -> dict[str, str | None]:
    """The version in each of the files that have it; None where it is missing."""
    found = {name: re.search(pattern, read(name), re.MULTILINE) for name, pattern in VERSIONS.items()}
    return {name: match and match[1] for name, match in found.items()}


def missing(tag: str | None = None) -> list[str]:
    """What keeps this tree from being released, a line each."""
    problems, of = [], versions()
    version = of["src/headwise/__init__.py"]
    if (urlsplit(address()).hostname or "").endswith(".invalid"):
        problems.append(f"{address()} is a placeholder; python scripts/release.py --address URL writes the address")
    problems += [f"{name} does not name {address()}" for name in NAMED if address() not in read(name)]
    problems += [f"{name} has version {other}, not {version}" for name, other in of.items() if other != version]
    if not re.search(rf"^## \[{re.escape(str(version))}\] - \d{{4}}-\d\d-\d\d$", read("CHANGELOG.md"), re.MULTILINE):
        problems.append(f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'")
    if tag is not None and tag != f"v{version}":
        problems.append(f"the tag is {tag}, the version {version}")
    return problems


def write(new: str) -> None:
    """Replace the address in all files that name it."""
    new, old = new.rstrip("/").removesuffix(".git"), address()
    parts = urlsplit(new)
    if parts.scheme != "https" or not parts.hostname or parts.path in ("", "/"):
        sys.exit(f"--address {new}: expected https://HOST/PATH of the repository")
    for name in NAMED:
        (ROOT / name).write_text(read(name).replace(old, new), encoding="utf-8")


def main() -> None:
    """Check, or write the address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag to be published")
    parser.add_argument("--address", help="the address of the repository: https://HOST/NAME/headwise")
    args = parser.parse_args()
    if args.address:
        write(args.address)
    elif problems := missing(args.tag):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()

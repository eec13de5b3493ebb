"""Write constraints.txt: the exact versions of this environment that the requirements need.

    python -m scripts.constraints          `make constraints` upgrades first

A package is needed if requirements*.txt name it, or if a needed package requires it on this
machine. A version that an older Python cannot install, down to pyproject.toml's oldest, gets
a marker: there pip chooses from the ranges.
"""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# The tested versions: `make` installs them. `make constraints` takes the newest that the
# ranges in requirements*.txt allow, and writes this file; run `make test` then.
"""


def requirements() -> list[Requirement]:
    """Return the lines of requirements*.txt."""
    texts = [path.read_text() for path in sorted(ROOT.glob("requirements*.txt"))]
    return [Requirement(line) for line in re.findall(r"^[A-Za-z][^#\n]*", "\n".join(texts), re.M)]


def needed() -> dict[str, str]:
    """Return name → version of all packages that the requirements need."""
    versions = {}
    seen = set()
    left = requirements()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        versions[name] = Version(package.version).public
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                left += of_this_machine(package.requires or [], extra)
    return versions


def of_this_machine(lines: list[str], extra: str) -> list[Requirement]:
    """Return the requirements whose markers hold here with `extra`, "" for none."""
    return [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]


def oldest_python(name: str) -> str:
    """Return " ; python_version >= …" if a package's version needs a newer Python than ours."""
    supported = SpecifierSet(distribution(name).metadata.get("Requires-Python") or "")
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    allowed = [python for python in pythons if supported.contains(f"{python}.99")]
    return "" if allowed == pythons else f' ; python_version >= "{allowed[0]}"'


def main() -> None:
    lines = [
        f"{name}=={version}{oldest_python(name)}\n" for name, version in sorted(needed().items())
    ]
    (ROOT / "constraints.txt").write_text(HEAD + "".join(lines))
    print(f"constraints.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()

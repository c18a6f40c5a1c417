"""The wheel holds both packages and nothing else, and works beside a stranger's ``passes`` folder."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "remat_compiler", "passes")


def run(*command: str, cwd: Path) -> str:
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def unzipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unzipped wheel. It is built from a copy, because setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, sources)
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(sources))
    run(*build, cwd=folder)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unzipped")
    return folder / "unzipped"


def test_top_level_holds_the_two_packages_only(unzipped: Path) -> None:
    names = sorted(path.name for path in unzipped.iterdir())

    assert names == ["remat_compiler", "remat_compiler-0.1.0.dist-info", "remat_passes"]


def test_every_module_is_packed(unzipped: Path) -> None:
    packed = {path.relative_to(unzipped) for path in unzipped.rglob("*.py")}
    expected = {path.relative_to(root) for root in (ROOT, ROOT / "passes") for path in root.glob("remat_*/**/*.py")}

    assert packed == expected


def test_types_are_declared(unzipped: Path) -> None:
    assert (unzipped / "remat_compiler/py.typed").is_file()
    assert (unzipped / "remat_passes/py.typed").is_file()


def test_command_and_backend_are_registered(unzipped: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read(unzipped / "remat_compiler-0.1.0.dist-info/entry_points.txt")

    assert dict(entry_points["console_scripts"]) == {"remat": "remat_compiler.cli:main"}
    assert dict(entry_points["torch_dynamo_backends"]) == {"remat": "remat_compiler.backend:remat"}


def test_imports_beside_a_folder_called_passes(unzipped: Path, tmp_path: Path) -> None:
    decoy = tmp_path / "passes"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('this is not remat')\n")
    # -S leaves the checkout's editable install out, -c puts the working directory first.
    code = (
        "import site, sys; sys.path.insert(1, sys.argv[1]); sys.path += sys.argv[2:]\n"
        "import remat_compiler.backend, remat_compiler.cli, remat_passes\n"
        "print(remat_compiler.__file__); print(remat_passes.__file__)"
    )
    packages = [path for path in sys.path if path.endswith("site-packages")]

    printed = run(sys.executable, "-S", "-c", code, str(unzipped), *packages, cwd=tmp_path)

    assert [Path(line).parent.parent for line in printed.split("\n") if line] == [unzipped, unzipped]

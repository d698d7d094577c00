"""What is released: a source archive, and a wheel of it with every file of the package and no other."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folders of the repository, and where they are in the package.
FOLDERS = {"lora_plugin": "lora_plugin", "kernels": "lora_plugin/kernels", "hooks": "lora_plugin/hooks"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, built from a copy that holds nothing but what they are made of."""
    root = tmp_path_factory.mktemp("release")
    source = root / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(root / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return root / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = dist.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def package_files() -> set[str]:
    return {
        f"{target}/{file.relative_to(ROOT / folder)}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_the_wheel_has_the_packages_files_and_no_other(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == package_files()
    # What no import would miss.
    assert {
        "lora_plugin/py.typed",
        "lora_plugin/admin/page/index.html",
        "lora_plugin/admin/page/page.css",
        "lora_plugin/admin/page/page.js",
        "lora_plugin/kernels/native/lora_cpu.cpp",
    } <= files


def test_the_wheel_has_its_entry_points_and_licence(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser()
    points.read_string(metadata(wheel, "entry_points.txt"))
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"lora-plugin": "lora_plugin.cli:main"},
        "vllm.general_plugins": {"lora_plugin": "lora_plugin.plugin:register"},
    }
    assert metadata(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert (ROOT / "README.md").read_text() in metadata(wheel, "METADATA")


def test_the_source_archive_is_all_that_the_wheel_is_made_of(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"kernels/native/lora_cpu.cpp", "hooks/specs.py", "lora_plugin/py.typed", "LICENSE"} <= names

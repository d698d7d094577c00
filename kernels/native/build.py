"""Compiles the kernel once per machine, into a private folder of the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("lora_cpu.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-fPIC", "-shared")
COMPILERS = ("g++", "clang++", "c++")
SECONDS = 120


class Unavailable(Exception):
    """The kernel cannot be had; the message says why."""


def build() -> Path:
    """The compiled library, of this source by this compiler for this CPU; compiled if need be.

    Several processes may build at once: each writes a file of its own, and the last rename wins.

    Raises:
        Unavailable: no compiler, a build that fails, or a cache folder that is not the user's alone.
    """
    compiler = find_compiler()
    folder = cache_folder()
    library = folder / f"lora_cpu-{_key(compiler)}.so"
    if not library.exists():
        _compile(compiler, library)
    return library


def find_compiler() -> list[str]:
    """The command: $CXX, or the first compiler on the path."""
    if command := shlex.split(os.environ.get("CXX", "")):
        return command
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise Unavailable("no C++ compiler (set CXX, or install g++)")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME or ~/.cache, /vllm-lora-plugin: nobody else may write what is loaded from there."""
    try:
        root = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(root) if root else Path.home() / ".cache") / "vllm-lora-plugin"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"no cache folder ({error}; set XDG_CACHE_HOME)") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Unavailable(f"{folder} must be a folder of this user's with mode 0700")
    return folder


def _key(compiler: list[str]) -> str:
    version = _run([*compiler, "--version"])
    parts = (SOURCE.read_text(), shlex.join(compiler), version, *FLAGS, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """What -march=native depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    told = ("model", "flags", "Features", "CPU part", "stepping")
    return "\n".join(line for line in lines if line.startswith(told))


def _compile(compiler: list[str], library: Path) -> None:
    try:
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    except OSError as error:
        raise Unavailable(f"{library.parent} cannot be written: {error}") from error
    os.close(handle)
    try:
        _run([*compiler, *FLAGS, str(SOURCE), "-o", unfinished])
        Path(unfinished).replace(library)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Unavailable(f"{command[0]} failed: {said}")
    return done.stdout

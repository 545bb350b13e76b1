"""Builds the extension `offload._C`; everything else stands in pyproject.toml."""

import os
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup


def has_liburing() -> bool:
    """Whether the liburing header is there; without it the backend is left out."""
    return any(Path(prefix, "include/liburing.h").exists() for prefix in ("/usr", "/usr/local"))


def liburing_link_args() -> list[str]:
    """Statically where the archive is there, so that the wheel needs no liburing where it is installed."""
    roots = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
    archives = [path for root in roots for path in Path(root).rglob("liburing.a")]
    return [str(archives[0])] if archives else ["-luring"]


def extension() -> Pybind11Extension:
    strict = ["-Werror"] if os.environ.get("CI") else []
    liburing = has_liburing()
    state = "built with liburing" if liburing else "left out, liburing.h was not found"
    print(f"offload: io_uring backend {state}")
    return Pybind11Extension(
        "offload._C",
        sorted(str(path) for path in Path("csrc").glob("*.cpp")),
        depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
        include_dirs=["csrc"],
        cxx_std=17,
        define_macros=[("OFFLOAD_HAVE_LIBURING", "1")] if liburing else [],
        extra_compile_args=["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", *strict],
        extra_link_args=["-pthread", *(liburing_link_args() if liburing else [])],
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": build_ext})

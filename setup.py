"""Builds the extension `offload._C`; everything else stands in pyproject.toml."""

import os
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup


def has_liburing() -> bool:
    """Whether the liburing header and library are there; without them the backend is left out."""
    prefixes = [Path("/usr"), Path("/usr/local")]
    return any((prefix / "include/liburing.h").exists() for prefix in prefixes)


def extension() -> Pybind11Extension:
    strict = ["-Werror"] if os.environ.get("CI") else []
    liburing = has_liburing()
    print(f"offload: io_uring backend {'built with liburing' if liburing else 'left out, liburing.h was not found'}")
    return Pybind11Extension(
        "offload._C",
        sorted(str(path) for path in Path("csrc").glob("*.cpp")),
        depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
        include_dirs=["csrc"],
        cxx_std=17,
        define_macros=[("OFFLOAD_HAVE_LIBURING", "1")] if liburing else [],
        libraries=["uring"] if liburing else [],
        extra_compile_args=["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", *strict],
        extra_link_args=["-pthread"],
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": build_ext})

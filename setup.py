"""The packages, which pyproject.toml cannot list: two of them lie beside `megatron_snip/`."""

from setuptools import find_packages, setup

BESIDE = ("kernels", "patches")
"""Folders of the repository that are installed as `megatron_snip.kernels` and `.patches`."""

beside = find_packages(include=[pattern for name in BESIDE for pattern in (name, f"{name}.*")])
setup(
    packages=[
        *find_packages(include=["megatron_snip", "megatron_snip.*"]),
        *(f"megatron_snip.{name}" for name in beside),
    ],
    package_dir={f"megatron_snip.{name}": name for name in BESIDE},
)

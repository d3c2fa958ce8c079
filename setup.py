"""Lists the packages: those under auto_deploy_ext/, and two folders that stand beside it and are mapped into it."""

from setuptools import find_packages, setup

_MAPPED = ["auto_deploy_ext.transforms", "auto_deploy_ext.configs"]  # to folders, in pyproject.toml

setup(packages=find_packages(include=["auto_deploy_ext", "auto_deploy_ext.*"]) + _MAPPED)

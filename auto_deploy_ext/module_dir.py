"""The directory to give to AutoDeploy's `--custom_module_dirs`; `python -m auto_deploy_ext.module_dir` prints it."""

from __future__ import annotations

from pathlib import Path


def module_dir() -> Path:
    """The package's own directory: AutoDeploy puts its parent on `sys.path` and imports the package of its name."""
    return Path(__file__).resolve().parent


if __name__ == "__main__":
    print(module_dir())

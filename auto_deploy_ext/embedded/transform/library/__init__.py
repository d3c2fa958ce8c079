"""The pipeline's transforms, one file each; a file's name is its registry key.

Importing this package imports every module in it, in alphabetical order, so that all keys are registered.
"""

from ...discovery import import_submodules

__all__ = import_submodules(__name__)

"""The plugin's own transforms, one file each; a file is named like its registry key, and importing it registers it."""

from . import annotate_active_args, check_capture, drain_hostfuncs, fuse_metadata_mutations, scope_host_mirrors

__all__ = [
    "annotate_active_args",
    "check_capture",
    "drain_hostfuncs",
    "fuse_metadata_mutations",
    "scope_host_mirrors",
]

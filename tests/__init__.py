"""The tests of auto_deploy_ext."""

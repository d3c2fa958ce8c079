"""The embedded host: a stand-in for AutoDeploy, with AutoDeploy's relative layout, that runs on any machine.

Code written for AutoDeploy's import surface runs here when its import root is replaced by
``auto_deploy_ext.embedded``. Importing this package imports nothing else.
"""

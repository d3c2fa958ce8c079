"""`python -m auto_deploy_ext.embedded.training`: the command `train-draft` without the rest of the command line."""

from __future__ import annotations

import argparse
import sys

from .arguments import add_arguments
from .command import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="train-draft", description="Trains an Eagle3 head for a target.")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))

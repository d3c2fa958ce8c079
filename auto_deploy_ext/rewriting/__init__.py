"""How an analysis becomes a rewritten orchestrator: strategies decide, and graphs are changed here and nowhere else."""

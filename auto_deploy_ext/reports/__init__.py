"""What is told of an orchestrator, as written and as rewritten: the plan, the static check, what hinders a capture."""

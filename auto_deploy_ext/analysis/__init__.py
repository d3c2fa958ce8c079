"""What an orchestrator's calls do to mirrors, and which mirrors are read next: graphs are read here, never written."""

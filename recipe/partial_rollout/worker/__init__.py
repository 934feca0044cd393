"""The agent-loop worker process: claims samples, runs agent loops, calls the engines."""

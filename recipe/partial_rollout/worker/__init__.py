"""The agent-loop worker process: claims samples, calls the engines, journals tools."""

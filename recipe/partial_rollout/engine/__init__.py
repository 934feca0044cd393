"""Inside the vLLM server process: interruption and kept KV blocks."""

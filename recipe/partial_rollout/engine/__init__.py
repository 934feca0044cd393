"""Inside the vLLM server process: interruption, holds and kept KV blocks."""

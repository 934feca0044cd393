"""Inside the vLLM server process: interruption, slots, KV that is kept."""

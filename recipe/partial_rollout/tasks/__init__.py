"""Tasks that need no download: for tests, quick start and benchmarks."""

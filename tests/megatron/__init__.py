"""Megatron-Core trains on a CPU: what the nightly tests of ``engine=megatron`` load into verl."""

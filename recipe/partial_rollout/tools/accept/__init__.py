"""Acceptance of a machine: does what the recipe promises hold on its device?"""

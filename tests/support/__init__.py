"""Helpers for tests: tiny checkpoints, tokenizers, scripted parts."""

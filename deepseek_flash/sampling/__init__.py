"""Logits to tokens: penalties, filters and reproducible draws, one row at a time."""

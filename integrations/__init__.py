"""Adapters to other libraries; each is imported by its own name and needs that library."""

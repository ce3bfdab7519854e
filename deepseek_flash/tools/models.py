"""``deepseek-flash pull``."""

from __future__ import annotations

import argparse

from deepseek_flash.errors import ConfigError
from deepseek_flash.loading import catalogue


def pull(options: argparse.Namespace) -> int:
    """Fetch one model, or list what there is."""
    if options.list:
        for name, entry in sorted(catalogue.CATALOGUE.items()):
            path = catalogue.pulled(name)
            print(f"{name:<16} {entry.about}\n{'':<16} {path or 'not pulled'}")
        return 0
    if not options.name:
        raise ConfigError("pull: which model? `deepseek-flash pull --list` shows the names", field="name")
    print(catalogue.pull(options.name))
    return 0

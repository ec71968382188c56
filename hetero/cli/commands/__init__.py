"""The commands of ``hetero``, one module each. Its ``add`` adds the parser."""

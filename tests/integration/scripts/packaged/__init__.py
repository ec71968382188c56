"""A training script that is a module of a package, which imports its neighbours."""

"""The commands about a job that may run: what it needs, costs and takes."""

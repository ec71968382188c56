"""How the hosts of a job find, authenticate and follow each other."""

"""How the hosts of a job find, trust and follow each other."""

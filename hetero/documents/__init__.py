"""Reads, writes and shows text and files of text. This package has nothing to do with jobs and processes.

files.py       reads JSON, YAML and text files up to a limit of their size, and writes files
records.py     converts dataclasses to JSON and back, and checks every value
text.py        makes text from users and other processes safe to show
quantities.py  shows numbers with units
tables.py      makes tables that are readable as plain text and as Markdown
findings.py    the mistakes that checks find, with advice
diagnosis.py   the results of hetero doctor: ok, warning or error, with advice
"""

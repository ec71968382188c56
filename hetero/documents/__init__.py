"""Text and files of text: read with bounds, written whole, shown safely. This package knows no jobs and no processes.

files.py       bounded reading, and writing, of JSON, YAML and text files
records.py     dataclasses to JSON and back, with a check of every value
text.py        makes text from users and other processes safe to show
quantities.py  numbers with units
tables.py      tables that are readable as plain text and as Markdown
findings.py    what checks found, with advice
diagnosis.py   what hetero doctor reports: ok, warning or error, with advice
"""

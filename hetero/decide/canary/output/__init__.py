"""Shows the result.

text.py   the result as text
page.py   the result as a page
plots.py  its plots, drawn by matplotlib
"""

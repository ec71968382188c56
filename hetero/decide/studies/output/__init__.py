"""Shows the results.

table.py  results as rows, CSV and Parquet
plots.py  the plots, drawn by matplotlib
page.py   the page with plots and tables
"""

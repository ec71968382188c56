"""HTML pages about runs, plans, studies and canaries. A page is one file without scripts, which needs no network.

page.py      the frame of a page, its style, tables and figures
drawing.py   plots by matplotlib, as SVG in the colours of the page
"""

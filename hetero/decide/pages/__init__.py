"""HTML pages about runs, plans, studies and canaries. A page is one file without scripts, which needs no network.

page.py      the frame of a page, its style, tables, figures and plots
front.py     the Pareto front of a plot
run_page.py  shows a report or a comparison of two
run_plots.py the plots of run_page.py
drawing.py   the one style of all plots: sizes, colours, axes, and SVG by matplotlib
"""

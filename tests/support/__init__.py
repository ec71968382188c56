"""What several test modules use: a module or a folder for each area, named as the area's folder of tests.

listening.py, waiting.py, browser.py and freed_memory.py belong to no area.
"""

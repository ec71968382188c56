"""A module that takes two seconds to import, as a framework with compiled parts does."""

import time

time.sleep(2.0)  # emulates the work of such an import, the same in both jobs that are compared

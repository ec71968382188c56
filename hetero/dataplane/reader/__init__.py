"""In a rank: asks endpoints for batches by index and delivers them in order.

    reader -> window -> fleet -> connection -> transport  ~~~ network ~~~>  an endpoint

reader.py             a rank's batches in order
window.py             the batches in flight, and the threads that fetch them
attempts.py           one batch in flight, and what a failed attempt means for it
poison.py             batches whose endpoints died
hedging.py            when a batch is asked for a second time
window_growth.py      how far ahead batches are asked for while one is late
connection_table.py   the endpoints that the directory names, and those that left
fleet.py              all endpoints as one reader process sees them
routing.py            which endpoints a rank uses, and which gets the next request
consistency.py        whether the endpoints hold the same data set
connection.py         one endpoint, and what is known about it
transport.py          the open connections to one endpoint
failures.py           why a call to an endpoint failed
"""

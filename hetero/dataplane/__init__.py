"""The data plane: endpoints compute batches, readers put them in order.

pool.py         a host's endpoints, seen from its launcher
spawn.py        starts a forker and speaks with it
forker.py       imports the script once and forks endpoints
script.py       the user's script as a module
output.py       what a process prints
endpoint.py     one preprocessing process
service.py      what it answers
delivery.py     the connections over which it delivers batches
compute.py      its queue and compute thread
reader.py       a rank's batches in order
window.py       those on their way, and the threads that fetch them
attempts.py     one of them, and what a failed attempt means for it
hedging.py      when it is asked for a second time
stretch.py      how far ahead it is asked for while another is late
fleet.py        all endpoints as one reader process sees them
roster.py       those that the directory names, and those that left
routing.py      which of them a rank uses, and which gets the next request
agreement.py    whether they hold the same data set
connection.py   one of them, and what is known of it
link.py         what is open to it
failures.py     why a call to it failed
statistics.py   what both sides count
"""
